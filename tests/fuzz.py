"""Damaged and hostile inputs, drawn from a seed: configurations, prompt files, stored prompts,
checkpoints, messages, requests and run directories.

    make fuzz ARGS="n=10000 seed=1"     (python -m tests.fuzz n=10000 seed=1 only=wire,http)

Four attacks damage a run that came from elsewhere: `arguments` of every class that a stored
configuration may name, `links` at every path that a run writes, `tied` (flips of config.yaml beside
a checkpoint), and `parsers` (pictures, arrays, YAML).

Each input must be accepted, or refused by the error that its reader documents. The limit is
`LIMIT_S` seconds of CPU, and `WAIT_S` by the clock, because a busy machine takes its time. Anything
else is a defect: another exception, a hang, a new process, a write outside of the attack's own
directory, or a read of a canary beside it. The last line of standard output is the number of
defects. Each defect is printed with the seed that makes it again.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import torch
import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from PIL import Image

from digenrl import config, prompts
from digenrl.cluster.access import Access, write_access
from digenrl.config.command_settings import schema_of
from digenrl.config.stored import compare_ties, tie_of
from digenrl.config.targets import known_components, walk_nodes
from digenrl.config.validation import keys_of
from digenrl.extensions.bench.media_files import read_media
from digenrl.images import ImageLimits
from digenrl.models.prompt_store import PromptStore
from digenrl.models.wording import Wording
from digenrl.record.line_file import LineFile
from digenrl.record.run_dir import (
    ForeignEntry,
    append_event,
    hold_reserve,
    open_log,
    require_own,
    write_json,
)
from digenrl.record.stored_yaml import read_plain
from digenrl.report.pictures import read_samples
from digenrl.report.read_run import read_run
from digenrl.report.summary import build_summary
from digenrl.rewards import frames
from digenrl.rewards.service import RewardService, ServiceLimits
from digenrl.strategy.checkpoint_io import CheckpointError, DirectoryCheckpointIO, verify_checkpoint
from digenrl.transport.wire import Message, MessageKind, WireError, decode
from digenrl.types import Prompt
from tests.reachable import constructor_arguments
from tests.record.test_own_directory import WRITTEN
from tests.report.page.test_hostile import damaged
from tests.report.synthetic import write_run
from tests.rewards.services import Brightness
from tests.strategy.test_checkpoint_io import content
from tests.transport.test_wire import reader, written

LIMIT_S, WAIT_S = 10, 120
CANARY = "canary-5512"
LIMIT_BYTES = 1 << 20
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 2**70, 1e400, float("nan"), "", "x" * 70_000, "\0", "../../canary", "/dev/zero",
    "${oc.env:HOME}", "${seed}", "${hydra:runtime.cwd}", [], {}, [[[[]]]], {"a": {"b": [1]}}, "http://evil.example:1",
    "${", "!!python/object/apply:os.system [true]", "\ud800", "a.b.c", "auto", "null", "1e3", "0x10", "-", "=", "[1,",
    {"_target_": "os.system", "command": "touch canary"},
    {"_target_": "lightning.pytorch.cli.instantiate_class", "args": "x", "init": {"class_path": "os.system"}},
    {"_target_": "digenrl.cli.train.main", "words": []}, {"_target_": "digenrl.config.targets.os.system", "_args_": ["true"]},
    {"_target_": "torch.load", "f": "canary"}, {"_target_": 3}, {"_target_": "hydra.utils.get_method", "path": "os.system"},
    {"_partial_": True, "_target_": "builtins.eval", "_args_": ["1"]},
)  # fmt: skip
OWN = ("digenrl.", "reward_models.", "torch.optim.", "lightning.pytorch.")
"""What a stored configuration may call; within these, `digenrl.config.targets` names the classes."""
PLACE = {"root": "", "forbidden": ""}


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook: no process, no file outside while an attack goes on."""
    if not PLACE["root"]:
        return
    if event in ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen"):
        raise SystemError(f"started something: {event} {arguments!r:.200}")
    if event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
        named, mode, flags = os.fsdecode(arguments[0]), arguments[1], arguments[2]
        if named == os.path.basename(named) and flags & os.O_NOFOLLOW:
            return  # below the descriptor of a folder (`open_below`), which was looked at before
        path = os.path.realpath(named)
        if flags & os.O_NOFOLLOW:  # a link itself is refused, one above it is followed
            above, own = os.path.split(os.path.abspath(named))
            path = os.path.join(os.path.realpath(above), own)
        writes = any(letter in (mode or "") for letter in "wax+") or flags & (
            os.O_WRONLY | os.O_RDWR
        )
        if path == PLACE["forbidden"]:
            raise SystemError(f"opened the canary: {arguments[0]}")
        if writes and not path.startswith((PLACE["root"], "/dev/null")):
            raise SystemError(f"writes outside: {path}")


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Return the bytes with one to four changes: flipped, cut, doubled, exchanged or inserted."""
    for _ in range(chance.randint(1, 4)):
        if not data:
            return data
        at, to = sorted(chance.randrange(len(data) + 1) for _ in range(2))
        kind = chance.randrange(6)
        if kind == 0:
            at = min(at, len(data) - 1)
            data = data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
        elif kind == 1:
            data = data[:at] + data[to:]
        elif kind == 2:
            data = data[:to] + data[at:]
        elif kind == 3:
            data = data[:at] + chance.randbytes(chance.randint(1, 9)) + data[at:]
        elif kind == 4:
            odd = chance.choice(ODD)
            data = data[:at] + json.dumps(odd).encode() + data[to:]
        else:
            data = data[to:] + data[:at]
    return data


def anywhere(tree: Any, chance: random.Random) -> Any:
    """Return a tree of YAML or JSON with an odd value at a random place."""
    if not isinstance(tree, (dict, list)) or not tree or chance.random() < 0.15:
        return chance.choice(ODD)
    key = chance.choice(list(tree)) if isinstance(tree, dict) else chance.randrange(len(tree))
    if isinstance(tree, dict) and chance.random() < 0.1:
        return tree | {str(chance.choice(ODD))[:50]: chance.choice(ODD)}
    changed = dict(tree) if isinstance(tree, dict) else list(tree)
    changed[key] = anywhere(tree[key], chance)
    return changed


Attack = Callable[[random.Random], bool]
"""One input; returns whether it was taken, and raises where it is a defect."""


def configuration(root: Path) -> Attack:
    keys = [key for key in keys_of(schema_of("train")) if "NAME" not in key]
    groups = ("experiment", "schedule", "hardware", "reward", "logger", "callbacks", "model")

    def attack(chance: random.Random) -> bool:
        words = [f"output_root={root}"]
        for _ in range(chance.randint(1, 3)):
            key = chance.choice(keys) if chance.random() < 0.8 else chance.choice(groups)
            value = chance.choice(ODD)
            text = json.dumps(value) if chance.random() < 0.5 else str(value)
            sign = chance.choice(("", "", "", "+", "++", "~"))
            words.append(f"{sign}{key}={text}"[:2000])
        try:
            config.load(words)
        except config.ConfigError:
            return False
        return True

    return attack


def targets(tree: Any) -> Iterator[str]:
    """Yield everything that a configuration would call."""
    if isinstance(tree, (DictConfig, dict)):
        for key, value in tree.items():
            yield from [str(value)] if key == "_target_" else targets(value)
    elif isinstance(tree, (ListConfig, list)):
        for value in tree:
            yield from targets(value)


def stored(root: Path) -> Attack:
    run = config.prepare_run_dir(config.load([f"hydra.run.dir={root}/run-0"]))
    whole = yaml.safe_load((run / "config.yaml").read_text())

    def attack(chance: random.Random) -> bool:
        tree = whole
        for _ in range(chance.randint(1, 3)):
            tree = anywhere(tree, chance)
        text = yaml.safe_dump(tree, allow_unicode=True).encode(errors="replace")
        (run / "config.yaml").write_bytes(mutated(text, chance) if chance.random() < 0.3 else text)
        try:
            found = config.load([f"resume={run}"])
        except config.ConfigError:
            return False
        strange = [name for name in targets(found.settings) if not name.startswith(OWN)]
        assert not strange, f"names {strange}"
        return True

    return attack


def prompt_file(root: Path) -> Attack:
    (root / "pipe.png").unlink(missing_ok=True)
    os.mkfifo(root / "pipe.png")
    lines = [
        {
            "prompt": "a red cube",
            "negative": "blurry",
            "target": "cube",
            "metadata": {"n": [1, 2.5]},
        },
        *({"prompt": "x", "image": name} for name in ("pipe.png", "/dev/zero", "none.png", ".")),
    ]

    def attack(chance: random.Random) -> bool:
        texts = [
            json.dumps(anywhere(chance.choice(lines), chance)).encode(errors="replace")
            for _ in range(chance.randint(1, 6))
        ]
        path = root / chance.choice(("p.jsonl", "p.txt"))
        path.write_bytes(mutated(b"\n".join(texts), chance))
        try:
            list(prompts.read_prompt_file(path, ImageLimits()).prompts)
        except prompts.PromptFileError:
            return False
        return True

    return attack


def prompt_store(root: Path) -> Attack:
    store = PromptStore(root, {"encoder": 1})
    wording, value = Wording("a"), {"text": torch.arange(24.0).view(1, 6, 4)}
    store.add_wordings([wording], lambda missing: iter([value for _ in missing]))
    path = store.path_of(wording)
    whole = path.read_bytes()

    def attack(chance: random.Random) -> bool:
        path.write_bytes(mutated(whole, chance))
        found = store.read_condition(wording)
        assert found is None or torch.equal(found["text"], value["text"]), "served something else"
        return found is not None

    return attack


def checkpoint(root: Path) -> Attack:
    path = root / "checkpoints" / "step-000001"
    DirectoryCheckpointIO().save_checkpoint(content(1.5, 1), path)
    whole = {file.name: file.read_bytes() for file in path.iterdir()}

    def attack(chance: random.Random) -> bool:
        for name, data in whole.items():
            (path / name).write_bytes(data)
        name = chance.choice(sorted(whole))
        (path / name).write_bytes(data := mutated(whole[name], chance))
        try:
            verify_checkpoint(path)
        except CheckpointError:
            return False
        assert data == whole[name], f"{name} was changed and is taken"
        return True

    return attack


def wire(_: Path) -> Attack:
    kinds = list(MessageKind)
    messages = [
        written(Message(kind, {"a": [1, "b", None]}, {"x": torch.arange(6.0).view(2, 3)}))
        for kind in kinds
    ]

    def attack(chance: random.Random) -> bool:
        try:
            found = decode(reader(mutated(chance.choice(messages), chance)), LIMIT_BYTES)
        except (WireError, EOFError):
            return False
        assert sum(t.numel() * t.element_size() for t in found.tensors.values()) <= LIMIT_BYTES
        return True

    return attack


def http(_: Path) -> Attack:
    service = RewardService(Brightness(), ServiceLimits(max_pixels=1 << 12, max_body_bytes=1 << 16))
    app = service.make_app()
    asked = [Prompt(f"p{i}", metadata={"k": [1, None]}) for i in range(3)]
    frame = frames.encode_request(torch.rand(3, 3, 4, 4), asked, "request")

    async def post(body: bytes, path: str, headers: dict[str, bytes]) -> httpx.Response:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://s"
        ) as client:
            return await client.post(path, content=body, headers=headers)

    def attack(chance: random.Random) -> bool:
        headers = {}
        if chance.random() < 0.3:
            name = chance.choice(("content-type", "content-encoding", "authorization", "expect"))
            headers[name] = chance.randbytes(8).hex().encode()
        path = chance.choice(("/score", "/score", "/score", "/identity", "/../score", "/%00"))
        answer = asyncio.run(post(mutated(frame, chance), path, headers))
        assert answer.status_code < 500, f"{answer.status_code} {answer.text[:200]}"
        return answer.status_code == 200

    return attack


def run_directory(root: Path) -> Attack:
    calm = write_run(root / "calm", steps=3, samples=False)

    def attack(chance: random.Random) -> bool:
        path = root / "run"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(calm, path)
        damaged(path, chance)
        file = chance.choice([each for each in sorted(path.rglob("*")) if each.is_file()])
        file.write_bytes(mutated(file.read_bytes(), chance))
        json.dumps(build_summary(read_run(path)))
        return True

    return attack


WORDS: tuple[Any, ...] = (
    ["--trust-remote-code"], ["--middleware", "evil.App"], ["--host=0.0.0.0"], ["--seed", 1, "--plugin=x"], "--trust",
    {"args": ["--trust_remote_code"]}, {"build": "real", "args": ["--config", "/tmp/x"]}, "../../outside", "/tmp/outside", "a/b",
    "s3://evil/x", "http://evil.example:1", "evil.example:80", "flash_hub", "_FLASH_3_hub", "hub", "-x", "--load-format", "a\nb", "\x1b[2J",
    [], {}, None, 1, True, ["http://127.0.0.1@evil.example/"], {"_target_": "lightning.pytorch.loggers.CSVLogger", "save_dir": "/tmp"},
)  # fmt: skip
PLACES = (
    "model", "algorithm", "algorithm.advantage", "reward.rewards.judge_a.scorer", "reward.heldout.mine.scorer", "logger.mine",
    "callbacks.mine", "trainer.mine", "trainer", "callbacks.evaluation.statistics",
)  # fmt: skip


def arguments(root: Path) -> Attack:
    run = config.prepare_run_dir(config.load([f"hydra.run.dir={root}/run-0"]))
    whole = (run / "config.yaml").read_text()
    classes = {
        name: [*constructor_arguments(name), "kwargs", "log_dir", "_args_", "serve"]
        for name in sorted(known_components())
        if not name.startswith("torch.optim") and name != "lightning.pytorch.Trainer"
    }

    def attack(chance: random.Random) -> bool:
        tree = OmegaConf.create(whole)
        name = chance.choice(sorted(classes))
        node = {"_target_": name, "_partial_": chance.random() < 0.5}
        for _ in range(chance.randint(1, 3)):
            node[chance.choice(classes[name])] = chance.choice(WORDS)
        if chance.random() < 0.3:
            node["serve"] = {"args": chance.choice(WORDS)}
        place = chance.choice(PLACES)
        if chance.random() < 0.4:
            for key, value in node.items():
                with suppress(ValueError):  # below a list
                    OmegaConf.update(tree, f"{place}.{key}", value, force_add=True, merge=False)
        else:
            OmegaConf.update(tree, place, node, force_add=True, merge=False)
        OmegaConf.save(tree, run / "config.yaml")
        try:
            found = config.load([], stored=run)
        except config.ConfigError:
            return False
        for path, each in walk_nodes(OmegaConf.to_container(found.settings.tree)):
            if isinstance(each, dict):
                serve = each.get("serve")
                assert not serve or not serve.get("args"), f"{path}: {serve}"
                assert "hub" not in str(each.get("attention_backend")).lower(), path
                assert "_args_" not in each, path
                if "loggers" in str(each.get("_target_")):
                    assert not {"save_dir", "log_dir", "kwargs"} & {*each}, f"{path}: {each}"
                    names = [str(each.get(key, "")) for key in ("name", "version", "sub_dir")]
                    assert not any("/" in name or ".." in name for name in names), f"{path}: {each}"
            assert (
                "evil.example" not in str(each)
                or not isinstance(each, str)
                or not ("://" in each or ":80" in each)
            ), f"{path} = {each}"
        return True

    return attack


def links(root: Path) -> Attack:
    calm = write_run(root / "calm", steps=2)
    config.store_config(config.load([]).settings.tree, calm)
    DirectoryCheckpointIO().save_checkpoint(content(1.5, 1), calm / "checkpoints" / "step-000001")
    (calm / "logs").mkdir()
    outside = root.parent / "canary"

    def lead(place: Path, chance: random.Random) -> None:
        """Put something at `place` that leads out of the run."""
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        if not place.parent.is_dir() or place.parent.is_symlink():
            return  # another one is above it
        place.unlink(missing_ok=True)
        kind = chance.randrange(6)
        if kind == 0:
            place.symlink_to(outside)
        elif kind == 1:
            place.symlink_to(os.path.relpath(outside, place.parent))
        elif kind == 2:
            place.symlink_to(outside.parent)
        elif kind == 3:
            place.symlink_to(outside.parent / "new")
        elif kind == 4:
            (place.parent / "step").unlink(missing_ok=True)
            (place.parent / "step").symlink_to(outside.parent)
            place.symlink_to("step")
        else:
            os.mkfifo(place)

    def attack(chance: random.Random) -> bool:
        run = root / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(calm, run, symlinks=True)
        for _ in range(chance.randint(1, 3)):
            lead(run / chance.choice(WRITTEN), chance)
        writers: tuple[Callable[[], object], ...] = (
            lambda: append_event(run, "end", {"a": 1}, urgent=True),
            lambda: LineFile(run / "spans" / "rank-000.jsonl").write(b"{}\n"),
            lambda: LineFile(run / "decisions" / "rank-000.jsonl").write(b"{}\n"),
            lambda: os.close(open_log(run / "logs" / f"{chance.choice(('rank-000', 'join'))}.log")),
            lambda: write_json(run / "summary.json", {}),
            lambda: config.store_config(DictConfig({"a": 1}), run),
            lambda: hold_reserve(run),
            lambda: write_access(run, Access("127.0.0.1", 1, "t", 0.0)),
            lambda: DirectoryCheckpointIO().save_checkpoint(
                content(1.5, 2), run / "checkpoints" / "step-000002"
            ),
        )
        for write in chance.sample(writers, 3):
            with suppress(OSError):
                write()
        json.dumps(build_summary(read_run(run))) if (run / "config.yaml").is_file() else None
        left = [path for path in run.rglob("*") if path.is_symlink()]
        own = [
            path for path in left if path.name == "last" and os.readlink(path).startswith("step-")
        ]
        try:
            require_own(run)
        except ForeignEntry:
            return False
        assert left == own, f"leads elsewhere: {sorted({*left} - {*own})}"
        return True

    return attack


def tied(root: Path) -> Attack:
    composed = config.load([f"hydra.run.dir={root}/run-0"])
    run = config.prepare_run_dir(composed)
    whole, ties = (run / "config.yaml").read_bytes(), [tie_of(composed.settings.tree)]
    before = yaml.safe_load(whole)

    def attack(chance: random.Random) -> bool:
        if chance.random() < 0.5:
            text = mutated(whole, chance)
        else:
            text = yaml.safe_dump(anywhere(before, chance)).encode(errors="replace")
        (run / "config.yaml").write_bytes(text)
        try:
            problems, _ = compare_ties(run, ties, ["resume=x", "allocation.trainers=1"])
        except config.ConfigError:
            return False
        after = yaml.safe_load(text)
        if not isinstance(after, dict):  # OmegaConf takes a text as a key
            assert problems
            return False
        for tree in (before, after):
            for key in ("resume", "allow_targets", "confirm_hosts", "allocation", "copies"):
                tree.pop(key, None)
            if isinstance(tree.get("data"), dict):
                tree["data"].pop("prompt_store", None)
        same = json.dumps(before, sort_keys=True) == json.dumps(after, sort_keys=True, default=repr)
        assert same or problems, "a change is not named"
        before.update(yaml.safe_load(whole))
        return not problems

    return attack


def parsers(root: Path) -> Attack:
    calm = write_run(root / "calm", steps=1)
    whole = next((calm / "samples").glob("eval-*.npz")).read_bytes()
    pictures = dict[str, bytes]()
    for name, made in (("a.png", "PNG"), ("a.jpg", "JPEG"), ("a.gif", "GIF"), ("a.tif", "TIFF")):
        content = io.BytesIO()
        Image.new("RGB", (9, 7), (1, 2, 3)).save(content, made)
        pictures[name] = content.getvalue()
    other = io.BytesIO()
    Image.new("RGB", (9, 7)).save(other, "EPS")

    def attack(chance: random.Random) -> bool:
        kind = chance.randrange(3)
        try:
            if kind == 0:
                file = root / "eval-1.npz"
                file.write_bytes(mutated(whole, chance))
                read_samples(file)
            elif kind == 1:
                name = chance.choice(sorted(pictures))
                taken = pictures[name] if chance.random() < 0.7 else other.getvalue()
                (root / name).write_bytes(mutated(taken, chance))
                read_media(root / name, 2, 1 << 16)
            else:
                text = b"a: &a [1, 2]\nb: " + chance.choice((b"*a", b"{<<: *a}", b"[*a, *a]", b"1"))
                (root / "x.yaml").write_bytes(mutated(text, chance))
                found = read_plain(root / "x.yaml")
                assert not isinstance(found, dict) or found.get("b") != [1, 2], "an alias is taken"
        except (ValueError, OSError, yaml.YAMLError):
            return False
        return True

    return attack


ATTACKS: dict[str, tuple[Callable[[Path], Attack], int]] = {
    "configuration": (configuration, 1),
    "stored": (stored, 1),
    "prompts": (prompt_file, 3),
    "store": (prompt_store, 3),
    "checkpoint": (checkpoint, 3),
    "wire": (wire, 4),
    "http": (http, 3),
    "runs": (run_directory, 1),
    "arguments": (arguments, 1),
    "links": (links, 1),
    "tied": (tied, 1),
    "parsers": (parsers, 3),
}
"""Name -> what makes the attack in a directory, and its part of the inputs."""


class HangError(Exception):
    """An input took longer than `LIMIT_S` or `WAIT_S`."""


def _hangs(number: int, frame: object) -> None:
    raise HangError


def _limit(cpu_s: int, wall_s: int) -> None:
    """Set both limits of the input that begins; 0 takes a limit away."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.alarm(wall_s)


def fuzz(n: int, seed: str, names: list[str], say: Callable[[str], object] = print) -> list[str]:
    """Return the defects that `n` inputs have shown, each in words with its seed."""
    sys.addaudithook(watch)
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, _hangs)
    parts = {name: ATTACKS[name][1] for name in names}
    defects = []
    for name, part in parts.items():
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder).resolve() / "attack"
            root.mkdir()
            (root.parent / "canary").write_text(CANARY)
            attack, results = ATTACKS[name][0](root), Counter[str]()
            began = time.monotonic()
            for number in range(-(-n * part // sum(parts.values()))):
                own = f"{seed}/{name}/{number}"
                PLACE.update(root=str(root), forbidden=str(root.parent / "canary"))
                _limit(LIMIT_S, WAIT_S)
                try:
                    results["taken" if attack(random.Random(own)) else "refused"] += 1
                except BaseException as error:  # whatever it is, it is a defect
                    _limit(0, 0)
                    if isinstance(error, KeyboardInterrupt):
                        raise
                    results["defect"] += 1
                    last = traceback.extract_tb(error.__traceback__)[-1]
                    where = f"{Path(last.filename).name}:{last.lineno}"
                    defects.append(f"{own}: {type(error).__name__} at {where}: {error!s:.300}")
                    say(defects[-1])
                finally:
                    _limit(0, 0)
                    PLACE.update(root="")
            took = time.monotonic() - began
            say(f"{name}: {dict(results)} in {took:.0f} s")
    return defects


def main(words: list[str]) -> int:
    """Print every defect and their number; 1 if there is any."""
    given = dict(word.split("=", 1) for word in words)
    n, seed = int(given.pop("n", 10_000)), given.pop("seed", "1")
    names = given.pop("only", ",".join(ATTACKS)).split(",")
    if given or not set(names) <= set(ATTACKS):
        print(
            f"unknown: {given or names}; use n=, seed=, only={','.join(ATTACKS)}", file=sys.stderr
        )
        return 2
    found = fuzz(n, seed, names, lambda line: print(line, file=sys.stderr, flush=True))
    print(len(found))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
