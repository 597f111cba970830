"""Seeded mistakes in the source: would a test notice?

    make mutants ARGS="n=150 seed=1 rooms=schedule,strategy"     (python -m tests.mutants n=150 seed=1)

1. The survey: the tests of `make test-fast` run once under coverage, to learn which test reaches a
   line. Later only test files that have changed run again; lines of the source that have moved are
   found again by their text.
2. `n` places are drawn, equally many in each room. Each gets one small mistake in a copy of the tree:
   another comparison, operator, constant, condition or order of arguments, or a statement less.
3. The near round: the tests that reach the line, those of the same room first. A test that notices
   must pass without the mistake.
4. The far round, for what is left: the other tests of its room, which start processes, and runs of all
   kinds. Coverage does not see the ranks of a run. A test that notices must do so twice.

What was judged is kept in outputs/mutants, so the same command goes on where it was stopped. A mutant
that survived meets tests again when a test that reaches its line has changed. Limits count the seconds
in which the tests had a processor or waited for something else, so it may run at the lowest priority:

    chrt -i 0 nice -n 19 python -m tests.mutants n=150 seed=1

The last line of standard output is the path of a table with the difference of each mutant that no
test noticed. Whether such a mutant is a hole, or means the same as the original, is for a reader to
judge. `verdicts=FILE` names a file with lines `KEY same|cosmetic|hole WHY`, and the table counts by them.
`far=false` leaves the far round out. `jobs=` says how many mutants at a time.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import difflib
import functools
import hashlib
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue
from typing import Any

import coverage
import psutil
import pytest

from tests.deleting import ROOT, copy_without

SOURCE = ROOT / "src" / "digenrl"
OUTPUT = ROOT / "outputs" / "mutants"
ROOMS = (
    "schedule,strategy,transport,cluster,diffusion,algorithms,rollout,models,rewards,record,config,"
    "extensions/planner"
)
CHOSEN = "not slow and not cluster and not alone"
FAST = f"{CHOSEN} and not processes and not heavy"
FAR = f"{CHOSEN} and (processes or heavy)"
BUDGET_S, LIMIT_S, JOBS = 40.0, (60.0, 600.0), 2
"""Seconds of a bite of tests by their own durations. Seconds after which a mutant has timed out in the
near and in the far round. Mutants at a time."""
VERDICTS = ("same", "cosmetic", "hole")
"""What a reader may judge of a survivor. Only a hole counts against the tests."""
TEST_S = 100
"""Seconds of one test of the far round: a mutant may let ranks wait for each other."""
UNSTABLE = 3
"""Tests of a mutant that may fail without it too, before it is left as it is."""
ANYWHERE = (
    "tests/strategy/test_invariants.py",
    "tests/strategy/test_witnesses.py",
    "tests/test_train_cli.py",
)
"""Runs of all kinds, beside all tests of a room."""
BESIDE = {
    "rollout": ("tests/strategy/test_evaluating.py",),
    "cluster": ("tests/test_signals.py", "tests/test_restarts.py"),
}
"""Tests of a room in other folders than its own, for the far round."""
KILLED, SURVIVED, TIMED_OUT = "killed", "survived", "timed out"


@dataclass(frozen=True)
class Mutant:
    """One mistake."""

    room: str
    file: str
    """Path below src/digenrl."""
    line: int
    end: int
    kind: str
    old: str
    new: str
    place: tuple[int, int]
    """Bytes of the file that `new` replaces."""

    @property
    def key(self) -> str:
        """Name of the mutant in the record; another text of the file gives another."""
        return hashlib.sha1(repr(self).encode() + (SOURCE / self.file).read_bytes()).hexdigest()[
            :16
        ]

    def applied(self, text: bytes) -> bytes:
        """Return the file with the mistake in it."""
        start, end = self.place
        return text[:start] + self.new.encode() + text[end:]


COMPARED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield (kind, changed node) for each mistake that can be made at a node."""
    new: Any = copy.deepcopy(node)
    match node:
        case ast.Compare() if type(node.ops[0]) in COMPARED:
            new.ops[0] = COMPARED[type(node.ops[0])]()
            yield "comparison", new
        case ast.BinOp() if type(node.op) in OPERATED:
            new.op = OPERATED[type(node.op)]()
            yield "operator", new
        case ast.BoolOp():
            new.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "and/or", new
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            large = isinstance(value, float) and abs(value) >= LARGE
            yield "constant", ast.Constant(2 * value if large else value + 1)
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield "negation", node.operand
        case ast.IfExp():
            new.test = ast.UnaryOp(ast.Not(), new.test)
            yield "condition", new
        case ast.Call() if (
            len(node.args) > 1
            and ast.unparse(node.func) not in SYMMETRIC
            and not any(isinstance(each, ast.Starred) for each in node.args)
        ):
            new.args[:2] = new.args[1::-1]
            yield "arguments", new
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign():
            yield "statement", ast.Pass()
        case ast.Return() if node.value is not None and not isinstance(node.value, ast.Constant):
            yield "early return", ast.Return(ast.Constant(None))


LARGE = 1e3
"""Fractions from here on are doubled: one more means nothing."""
SYMMETRIC = ("max", "min", "math.gcd", "math.lcm", "torch.maximum", "torch.minimum")
"""Functions that answer the same whatever the order of their arguments."""
SILENT = (ast.Raise, ast.JoinedStr, ast.Assert, ast.arg)
"""Nodes below which nothing is changed: texts of errors, and what only the types read."""


def candidates(room: str, path: Path) -> Iterator[Mutant]:
    """Yield every mistake that can be made in a file."""
    text = path.read_bytes()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def visit(node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, SILENT) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.keyword) and node.arg == "strict":  # asserts what is so
            return
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[0] in (
            "logger",
            "warnings",
            "Field",
        ):
            return
        for kind, new in changes(node):
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            written = ast.unparse(ast.fix_missing_locations(new))
            if isinstance(new, ast.expr):
                written = f"({written})"
            yield Mutant(
                room, path.relative_to(SOURCE).as_posix(), node.lineno, node.end_lineno, kind,
                text[start:end].decode(), written, (start, end),
            )  # fmt: skip
        for name, value in ast.iter_fields(node):
            if name in ("decorator_list", "annotation", "returns", "type_params", "bases"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from visit(child)

    for statement in ast.parse(text).body:
        if not isinstance(statement, (ast.Import, ast.ImportFrom)):
            yield from visit(statement)


def drawn(n: int, seed: int, rooms: list[str]) -> list[Mutant]:
    """Return `n` mutants, equally many of each room, at most one of a line."""
    chance, picked = random.Random(seed), list[Mutant]()
    for number, room in enumerate(rooms):
        files = sorted((SOURCE / room).rglob("*.py"))
        found = [mutant for path in files for mutant in candidates(room, path)]
        chance.shuffle(found)
        unique = {(mutant.file, mutant.line): mutant for mutant in reversed(found)}
        order = [mutant for mutant in found if unique[mutant.file, mutant.line] is mutant]
        picked += order[: n // len(rooms) + (number < n % len(rooms))]
    chance.shuffle(picked)
    return picked


class Durations:
    """Plugin of pytest that notes seconds and outcome of each test."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase of a test."""
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.add(report.nodeid)


def survey() -> list[Path]:
    """Run the fast tests of files that are new or changed under coverage; return the folders with
    what was seen, oldest first."""
    files = {
        str(path.relative_to(ROOT)): hashlib.sha1(path.read_bytes()).hexdigest()
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if path.parent.name != "inside"  # of processes with the strict device
    }
    folders = [path.parent for path in sorted(OUTPUT.glob("survey-*/files.json"))]
    known: dict[str, str] = {}
    for folder in folders:
        known |= json.loads((folder / "files.json").read_text())
    changed = {name: digest for name, digest in files.items() if known.get(name) != digest}
    if changed:
        print(f"survey: which line do the tests of {len(changed)} files reach?", file=sys.stderr)
        folder = OUTPUT / f"survey-{len(folders):03d}"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(SOURCE, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
        environment = os.environ | {"COVERAGE_FILE": str(folder / "coverage")}
        code = f"from tests.mutants import cover; cover({str(folder)!r}, {sorted(changed)!r})"
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=sys.stderr)
        (folder / "files.json").write_text(json.dumps(changed))
        folders.append(folder)
    return folders


def cover(folder: str, files: list[str]) -> None:
    """Run the fast tests of `files` under coverage, with a context for each test."""
    durations = Durations()
    options = ["-q", "-p", "no:cacheprovider", "-m", FAST, "--timeout=1800", "--tb=no"]
    options += ["--cov=src/digenrl", "--cov-context=test", "--cov-report="]
    pytest.main([*options, *files], plugins=[durations])
    known = {test: s for test, s in durations.seconds.items() if test not in durations.failed}
    (Path(folder) / "seconds.json").write_text(json.dumps(known))


class Tests:
    """Knows which tests to run for a mutant.

    Args:
        folders: of `survey`. Of a test file, the newest one counts.
    """

    def __init__(self, folders: list[Path]) -> None:
        self._surveys: list[tuple[Path, coverage.CoverageData]] = []
        self._seconds: dict[str, float] = {}
        newest: dict[str, int] = {}
        for number, folder in enumerate(folders):
            data = coverage.CoverageData(str(folder / "coverage"))
            data.read()
            self._surveys.append((folder, data))
            newest |= dict.fromkeys(json.loads((folder / "files.json").read_text()), number)
        for number, folder in enumerate(folders):
            for test, seconds in json.loads((folder / "seconds.json").read_text()).items():
                name = test.split("::")[0]
                if newest.get(name) == number and (ROOT / name).exists():
                    self._seconds[test] = seconds
        self._newest = newest

    def of(self, mutant: Mutant) -> tuple[list[str], list[str]]:
        """Return the tests that reach the line, quick ones first: those of the mutant's room, and
        the others. Of a line that importing reaches, the tests that reach or import its file."""
        now = (SOURCE / mutant.file).read_text().splitlines()
        line, file = set[str](), set[str]()
        for number, (folder, data) in enumerate(self._surveys):
            then = folder / "source" / mutant.file
            by_line = data.contexts_by_lineno(str(SOURCE / mutant.file))
            moved = _moved(then.read_text().splitlines() if then.exists() else [], now)
            for n, contexts in by_line.items():
                tests = {context.rpartition("|")[0] for context in contexts}
                tests = {t for t in tests if self._newest.get(t.split("::")[0]) == number}
                file |= tests
                if mutant.line <= moved.get(n, 0) <= mutant.end:
                    line |= tests
        if not line & self._seconds.keys():
            module = f"digenrl.{mutant.file.removesuffix('.py').replace('/', '.')}"
            package, _, own = module.rpartition(".")
            named = re.compile(rf"{re.escape(module)}\b|from {package} import .*\b{own}\b")
            naming = {name for name in self._newest if named.search(_text(name))}
            line = file | {test for test in self._seconds if test.split("::")[0] in naming}
        known = line & self._seconds.keys()
        home, chosen = f"tests/{mutant.room}/", (list[str](), list[str]())
        for bite, at_home in zip(chosen, (True, False), strict=True):
            left_s = BUDGET_S
            for test in sorted(known, key=lambda t: (self._seconds[t], t)):
                if test.startswith(home) == at_home and (not bite or self._seconds[test] < left_s):
                    left_s -= self._seconds[test]
                    bite.append(test)
        return chosen

    @staticmethod
    def digest(tests: Sequence[str]) -> str:
        """Return a name of the text of the files that hold `tests`."""
        files = sorted({test.split("::")[0] for test in tests})
        return hashlib.sha1(b"".join((ROOT / name).read_bytes() for name in files)).hexdigest()


@functools.cache
def _text(name: str) -> str:
    """Return the text of a test file, or nothing if it is gone."""
    return (ROOT / name).read_text() if (ROOT / name).exists() else ""


def _moved(then: list[str], now: list[str]) -> dict[int, int]:
    """Return number of a line then -> its number now, of lines whose text is still there."""
    if then == now:
        return {n: n for n in range(1, len(now) + 1)}
    blocks = difflib.SequenceMatcher(None, then, now, autojunk=False).get_matching_blocks()
    return {at.a + i + 1: at.b + i + 1 for at in blocks for i in range(at.size)}


PRELOADED = (
    "torch lightning diffusers transformers peft hydra hypothesis psutil safetensors.torch "
    "torch.distributed.fsdp torch.distributed.tensor PIL.Image numpy pydantic httpx xxhash"
)
SERVER = """
import importlib, json, os, sys
import pytest
for name in sys.argv[1].split():
    importlib.import_module(name)
for line in sys.stdin:
    words, output = json.loads(line)
    child = os.fork()
    if child == 0:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number in (1, 2):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os._exit(pytest.main(words))
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Process that has imported what takes seconds, and forks for each pytest."""


class Tree:
    """Copy of the tree, in which tests are run."""

    def __init__(self, root: Path) -> None:
        subprocess.run(["rm", "-rf", root], check=True)
        root.mkdir(parents=True)
        self.root = copy_without((), root)
        self._sound = set[str]()
        """Tests that pass without a mistake."""
        self._environment = os.environ | {
            "PYTHONPATH": f"{root / 'src'}:{root}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
            "HF_HUB_OFFLINE": "1",
        }
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER, PRELOADED],
            cwd=root, env=self._environment, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def judged(self, mutant: Mutant, bites: Sequence[list[str]], far: bool) -> dict[str, Any]:
        """Run tests against a mutant, one bite after the other until one notices, and return what
        came of it. A test that fails must pass without the mistake, and in the far round fail
        twice with it."""
        path = self.root / "src" / "digenrl" / mutant.file
        original, began = path.read_bytes(), time.monotonic()
        result, by, unstable = SURVIVED, "", list[str]()
        try:
            for tests in bites:
                while tests and result == SURVIVED and len(unstable) < UNSTABLE:
                    path.write_bytes(mutant.applied(original))
                    result, by = self.run(tests, unstable, far)
                    path.write_bytes(original)
                    # What cannot be collected has no name: then all must be collectable.
                    again = [by] if "::" in by else ["--collect-only", *tests]
                    if result != KILLED or (by in self._sound and not far):
                        break
                    sound = self.run(again, [], far)[0] == SURVIVED
                    if sound and far:  # a run may also fail by chance: this one must fail again
                        path.write_bytes(mutant.applied(original))
                        sound = self.run(again, [], far)[0] != SURVIVED or again != [by]
                        path.write_bytes(original)
                    if sound:
                        self._sound.add(by)
                        break
                    if again != [by]:
                        raise RuntimeError(f"{mutant.file}:{mutant.line}: {by} without the mistake")
                    unstable.append(by)
                    result, by = SURVIVED, ""
        finally:
            path.write_bytes(original)
        seconds = round(time.monotonic() - began, 1)
        return {"result": result, "by": by, "far": far, "seconds": seconds, "unstable": unstable}

    def run(self, tests: list[str], without: list[str], far: bool) -> tuple[str, str]:
        """Run tests; return what came of it, and the test that failed. Tests that start processes
        get a pytest of their own."""
        left_out = [word for test in without for word in ("--deselect", test)]
        marks, most_s = (FAR, TEST_S) if far else (CHOSEN, 3600)
        words = [
            "-x",
            "-q",
            "--tb=no",
            "-p",
            "no:cacheprovider",
            "-m",
            marks,
            f"--timeout={most_s}",
        ]
        words, output = [*words, *left_out, *tests], self.root.with_suffix(".txt")
        if far:
            with output.open("w") as file:
                process = subprocess.Popen(
                    [sys.executable, "-m", "pytest", *words],
                    cwd=self.root, env=self._environment, stdout=file, stderr=subprocess.STDOUT,
                )  # fmt: skip
                in_time = ended(process.pid, lambda: process.poll() is not None, LIMIT_S[far])
                code = process.wait()
        else:
            told, asked = self._server.stdout, self._server.stdin
            assert told
            assert asked
            asked.write(json.dumps([words, str(output)]).encode() + b"\n")
            child = int(told.readline())
            in_time = ended(child, lambda: bool(select.select([told], [], [], 0)[0]), LIMIT_S[far])
            code = int(told.readline())
        if not in_time:
            return TIMED_OUT, ""
        text = output.read_text(errors="replace")
        if far and code == 1 and "Timeout" in text:
            return TIMED_OUT, ""
        lines = text.splitlines()
        # Of a file that cannot be imported pytest also says that it finds no collectors.
        failed = [line for line in lines if line.startswith(("FAILED tests/", "ERROR tests/"))]
        by = failed[0].split(" - ")[0].split(maxsplit=1)[1].strip() if failed else f"exit {code}"
        return (SURVIVED, "") if code in (0, 5) else (KILLED, by)


def ended(child: int, is_over: Callable[[], bool], left_s: float) -> bool:
    """Wait for a pytest and what it has started; kill them all and return False after `left_s`.
    Seconds in which a thread of theirs waited for a processor do not count."""
    waits, now = dict[str, float](), time.monotonic()
    while not is_over():
        time.sleep(0.2)
        before, now, known = now, time.monotonic(), waits
        family = [child]
        with contextlib.suppress(psutil.NoSuchProcess):
            family += [process.pid for process in psutil.Process(child).children(True)]
        waits = {}
        for pid in family:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                    waits[path.parent.name] = int(path.read_text().split()[1]) / 1e9
        waited = (s - known[thread] for thread, s in waits.items() if thread in known)
        left_s -= max(0.0, now - before - max(waited, default=0.0))
        if left_s < 0:
            for pid in reversed(family):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return False
    return True


def difference(mutant: Mutant) -> str:
    """Return the mutant as a unified difference without context."""
    text = (SOURCE / mutant.file).read_bytes()
    before, after = text.decode().splitlines(), mutant.applied(text).decode().splitlines()
    lines = difflib.unified_diff(before, after, lineterm="", n=0)
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def table(rows: list[dict[str, Any]], words: str, verdicts: dict[str, tuple[str, str]]) -> str:
    """Return the results as Markdown.

    Args:
        verdicts: key of a survivor -> what a reader has judged, and why.
    """
    rooms: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        verdict, _ = verdicts.get(row["key"], ("open", ""))
        missed = row["first"] == SURVIVED
        for room in (row["room"], "all"):
            rooms[room]["drawn"] += 1
            rooms[room][verdict] += missed
            rooms[room]["untouched"] += not missed
            rooms[room]["timed"] += row["first"] == TIMED_OUT
            rooms[room]["now"] += missed and row["result"] != SURVIVED
    lines = [
        f'`make mutants ARGS="{words}"`, {time.strftime("%Y-%m-%d")}. What is the same in effect, or cosmetic, is not judged.',
        "A mutant that timed out was noticed. The last column counts the tests written since.",
        "",
        "| room | drawn | the same | cosmetic | noticed (timed out) | missed, or open | noticed by untouched tests | now |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for room, n in sorted(rooms.items(), key=lambda item: (item[0] == "all", item[0])):
        judged = n["drawn"] - n["same"] - n["cosmetic"]
        before, after = (
            count / max(1, judged) for count in (n["untouched"], n["untouched"] + n["now"])
        )
        cells = [
            n["drawn"],
            n["same"],
            n["cosmetic"],
            f"{n['untouched']} ({n['timed']})",
            judged - n["untouched"],
        ]
        lines.append(f"| {room} | {' | '.join(map(str, cells))} | {before:.0%} | {after:.0%} |")
    for row in rows:
        if row["first"] == SURVIVED:
            verdict, why = verdicts.get(row["key"], ("open", f"key {row['key']}"))
            now = f"; now noticed by `{row['by']}`" if row["result"] != SURVIVED else ""
            lines += ["", f"{row['file']}:{row['line']}, {row['kind']}: **{verdict}**{now}. {why}"]
            lines += ["", "```diff", row["difference"], "```"]
    return "\n".join(lines) + "\n"


def judgements(name: str) -> dict[str, tuple[str, str]]:
    """Return key -> (verdict, why) from a file of lines `KEY VERDICT WHY`; nothing without a name."""
    lines = Path(name).read_text().splitlines() if name else []
    parts = [line.split(maxsplit=2) for line in lines if line.strip()]
    if wrong := [part for part in parts if len(part) != 3 or part[1] not in VERDICTS]:
        raise SystemExit(f"{name}: {wrong[0]} is no line KEY {'|'.join(VERDICTS)} WHY")
    return {key: (verdict, why) for key, verdict, why in parts}


def main(words: list[str]) -> int:
    """Judge the mutants, and print the path of the table."""
    given = dict(word.split("=", 1) for word in words)
    said = " ".join(word for word in words if word.startswith(("n=", "seed=", "rooms=", "far=")))
    n, seed = int(given.pop("n", 150)), int(given.pop("seed", 1))
    jobs, far_too = int(given.pop("jobs", JOBS)), given.pop("far", "true") == "true"
    rooms, verdicts = given.pop("rooms", ROOMS).split(","), judgements(given.pop("verdicts", ""))
    if given or any(not (SOURCE / room).is_dir() for room in rooms):
        print(
            f"unknown: {given or rooms}; use n=, seed=, rooms=, far=, jobs=, verdicts=",
            file=sys.stderr,
        )
        return 2
    tests, mutants = Tests(survey()), drawn(n, seed, rooms)
    record, path = OUTPUT / "judged.jsonl", OUTPUT / f"mutants-{seed}.md"
    known: dict[str, dict[str, Any]] = {}
    if record.exists():
        known = {row["key"]: row for row in map(json.loads, record.read_text().splitlines())}
    trees: Queue[Tree] = Queue()

    def report() -> None:
        rows = [known[mutant.key] for mutant in mutants if mutant.key in known]
        path.write_text(table(rows, said, verdicts))

    def work(mutant: Mutant, far: bool) -> None:
        near = tests.of(mutant)
        met = tests.digest([*near[0], *near[1]])
        row = known.get(mutant.key, {"met": "", "far": False, "result": SURVIVED})
        if row["result"] != SURVIVED or (row["met"] == met and row["far"] >= far):
            return
        if far and mutant.key in verdicts:  # a reader has seen already what it is
            return
        home = [f"tests/{mutant.room}/", *BESIDE.get(mutant.room, ())]
        tree = trees.get()
        try:
            away = [name for name in ANYWHERE if not name.startswith(home[0])]
            whole = [name for name in home if (ROOT / name).exists()], away
            found = tree.judged(mutant, whole if far else near, far)
        finally:
            trees.put(tree)
        # While no test that it met has changed, the near and the far round are one first look.
        found |= {"key": mutant.key, "difference": difference(mutant), "met": met}
        found["untouched"] = row.get("untouched", met)
        found["first"] = found["result"] if met == found["untouched"] else row["first"]
        known[mutant.key] = asdict(mutant) | found
        with record.open("a") as file:
            file.write(json.dumps(known[mutant.key]) + "\n")
        print(f"{found['result']:<12}{found['seconds']:>6} s  {mutant.file}:{mutant.line}  {mutant.kind}  {found['by']}",
              file=sys.stderr, flush=True)  # fmt: skip
        report()

    report()
    for number in range(jobs):
        trees.put(Tree(OUTPUT / f"tree-{number}"))
    for far in (False, True)[: 1 + far_too]:
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(work, mutants, [far] * len(mutants)))
    report()
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
