"""Seeded mistakes in the source: would a test notice?

    make mutants ARGS="n=150 seed=1 rooms=schedule,strategy"     (python -m tests.mutants n=150 seed=1)

First the default tests that start no process run once under coverage, which tells which test reaches
which line. Then `n` places are drawn, equally many in each room. Each gets one small mistake in a copy
of the tree: a comparison, an operator, a constant, a negated condition, a removed statement, exchanged
arguments or an early return. The tests that reach the line run against it, those of the same room
first. Coverage does not see the ranks of a run, so what is left then meets all tests of its room and
runs of all kinds. What was judged is kept in outputs/mutants, so the same command goes on where it was
stopped. Limits count the seconds in which the tests had a processor or waited for something else, so
it may run at the lowest priority:

    chrt -i 0 nice -n 19 python -m tests.mutants n=150 seed=1

The last line of standard output is the path of a table with the difference of each mutant that no
test noticed. Whether such a mutant is a hole, or means the same as the original, is for a reader to
judge.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import difflib
import hashlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
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
BUDGET_S, LIMIT_S, JOBS = 40.0, (60.0, 600.0), 2
"""Seconds of tests for a mutant by their own durations, seconds after which it has timed out in the
near and in the far round, and mutants at a time."""
UNSTABLE = 3
"""Tests of a mutant that may fail without it too, before it is left as it is."""
ANYWHERE = (
    "tests/test_train_cli.py",
    "tests/strategy/test_invariants.py",
    "tests/strategy/test_witnesses.py",
)
"""Runs of all kinds, beside all tests of a room."""
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
            yield "constant", ast.Constant(value + 1)
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield "negation", node.operand
        case ast.IfExp():
            new.test = ast.UnaryOp(ast.Not(), new.test)
            yield "condition", new
        case ast.Call() if len(node.args) > 1 and not any(
            isinstance(each, ast.Starred) for each in node.args
        ):
            new.args[:2] = new.args[1::-1]
            yield "arguments", new
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign():
            yield "statement", ast.Pass()
        case ast.Return() if node.value is not None and not isinstance(node.value, ast.Constant):
            yield "early return", ast.Return(ast.Constant(None))


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


def survey(words: list[str]) -> Path:
    """Run the default tests under coverage, unless that was done for these sources; return the
    folder with the data."""
    digest = hashlib.sha1()
    for folder in (SOURCE, ROOT / "tests"):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    folder = OUTPUT / f"survey-{digest.hexdigest()[:12]}"
    if (folder / "seconds.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    print("which test reaches which line: the default tests run once", file=sys.stderr)
    code = (
        f"import sys; from tests.mutants import cover; sys.exit(cover({str(folder)!r}, {words!r}))"
    )
    environment = os.environ | {"COVERAGE_FILE": str(folder / "coverage")}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=sys.stderr)
    return folder


def cover(folder: str, words: list[str]) -> int:
    """Run the default tests that start no process under coverage, with a context for each test."""
    durations = Durations()
    options = [
        "-q", "-n", str(JOBS), "-m", f"{CHOSEN} and not processes", "--timeout=1800",
        "--cov=src/digenrl", "--cov-context=test", "--cov-report=",
    ]  # fmt: skip
    code = int(pytest.main([*options, *words], plugins=[durations]))
    known = {test: s for test, s in durations.seconds.items() if test not in durations.failed}
    (Path(folder) / "seconds.json").write_text(json.dumps(known))
    return code


class Tests:
    """Which tests to run for a mutant."""

    def __init__(self, folder: Path) -> None:
        self._data = coverage.CoverageData(str(folder / "coverage"))
        self._data.read()
        self._seconds: dict[str, float] = json.loads((folder / "seconds.json").read_text())

    def _tests(self, contexts: Iterable[str]) -> set[str]:
        return {context.rpartition("|")[0] for context in contexts} & self._seconds.keys()

    def of(self, mutant: Mutant) -> list[str]:
        """Return the tests that reach the line, those of the mutant's room first, then by seconds;
        of a line that importing reaches, the tests that reach its file."""
        by_line = self._data.contexts_by_lineno(str(SOURCE / mutant.file))
        lines = range(mutant.line, mutant.end + 1)
        known = self._tests(context for n in lines for context in by_line.get(n, ()))
        known = known or self._tests(context for n in by_line for context in by_line[n])
        home = f"tests/{mutant.room}/"
        chosen, room_s = list[str](), BUDGET_S
        for test in sorted(known, key=lambda t: (not t.startswith(home), self._seconds[t])):
            room_s -= self._seconds[test]
            if chosen and room_s < 0:
                break
            chosen.append(test)
        return chosen


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

    def judged(self, mutant: Mutant, tests: list[str], far: bool) -> dict[str, Any]:
        """Run tests against a mutant, and return what came of it. In the far round, where tests
        start processes, one that fails must pass without the mistake."""
        path = self.root / "src" / "digenrl" / mutant.file
        original, began = path.read_bytes(), time.monotonic()
        result, by, unstable = SURVIVED, "", list[str]()
        try:
            while tests and len(unstable) < UNSTABLE:
                path.write_bytes(mutant.applied(original))
                result, by = self.run(tests, unstable, far)
                if not (far and result == KILLED and "::" in by):
                    break
                path.write_bytes(original)
                if self.run([by], [], far)[0] == SURVIVED:
                    break
                unstable.append(by)
                result = SURVIVED
        finally:
            path.write_bytes(original)
        seconds = round(time.monotonic() - began, 1)
        return {"result": result, "by": by, "far": far, "seconds": seconds}

    def run(self, tests: list[str], without: list[str], far: bool) -> tuple[str, str]:
        """Run tests; return what came of it, and the test that failed. Tests that start processes
        get a pytest of their own."""
        left_out = [word for test in without for word in ("--deselect", test)]
        words = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-m", CHOSEN, "--timeout=3600"]
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
        lines = output.read_text(errors="replace").splitlines()
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
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
            for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                with contextlib.suppress(OSError):
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


def table(rows: list[dict[str, Any]], words: str) -> str:
    """Return the results as Markdown."""
    rooms = sorted({row["room"] for row in rows})
    counts = {room: Counter(row["result"] for row in rows if row["room"] == room) for room in rooms}
    counts["all"] = Counter(row["result"] for row in rows)
    columns = (KILLED, TIMED_OUT, SURVIVED)
    lines = [
        "# Mutants",
        "",
        f'`make mutants ARGS="{words}"`, {time.strftime("%Y-%m-%d")}. {len(rows)} judged. One that timed out was noticed.',
        "",
        f"| room | {' | '.join(columns)} | noticed |",
        f"|---|{'---|' * (len(columns) + 1)}",
    ]
    for room, found in counts.items():
        share = (found[KILLED] + found[TIMED_OUT]) / max(1, found.total())
        lines.append(f"| {room} | {' | '.join(str(found[c]) for c in columns)} | {share:.0%} |")
    for row in rows:
        if row["result"] == SURVIVED:
            head = f"{row['file']}:{row['line']}: {row['kind']}"
            lines += ["", f"## {head}", "", "```diff", row["difference"], "```", "", "Judgement: "]
    return "\n".join(lines) + "\n"


def main(words: list[str]) -> int:
    """Judge the mutants, and print the path of the table."""
    given = dict(word.split("=", 1) for word in words)
    n, seed = int(given.pop("n", 150)), int(given.pop("seed", 1))
    jobs = int(given.pop("jobs", JOBS))
    rooms = given.pop("rooms", ROOMS).split(",")
    tests_words = given.pop("tests", "").split()
    if given or any(not (SOURCE / room).is_dir() for room in rooms):
        print(f"unknown: {given or rooms}; use n=, seed=, jobs=, rooms=, tests=", file=sys.stderr)
        return 2
    tests, mutants = Tests(survey(tests_words)), drawn(n, seed, rooms)
    record = OUTPUT / "judged.jsonl"
    known = {}
    if record.exists():
        known = {row["key"]: row for row in map(json.loads, record.read_text().splitlines())}
    trees: Queue[Tree] = Queue()
    for number in range(jobs):
        trees.put(Tree(OUTPUT / f"tree-{number}"))

    path = OUTPUT / f"mutants-{seed}.md"

    def report() -> None:
        rows = [known[mutant.key] for mutant in mutants if mutant.key in known]
        path.write_text(table(rows, " ".join(words)))

    def work(mutant: Mutant, far: bool) -> None:
        row = known.get(mutant.key)
        if row is not None and (row["far"] >= far or row["result"] != SURVIVED):
            return
        home = f"tests/{mutant.room}/"
        whole = [name for name in (home, *ANYWHERE) if (ROOT / name).exists()]
        tree = trees.get()
        try:
            found = tree.judged(mutant, whole if far else tests.of(mutant), far)
        finally:
            trees.put(tree)
        row = asdict(mutant) | {"key": mutant.key, "difference": difference(mutant)} | found
        known[mutant.key] = row
        with record.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{row['result']:<12}{row['seconds']:>6} s  {row['file']}:{row['line']}  {row['kind']}  {row['by']}",
              file=sys.stderr, flush=True)  # fmt: skip
        report()

    for far in (False, True):
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(work, mutants, [far] * len(mutants)))
    report()
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
