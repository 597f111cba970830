"""`make resume` and the commands that read a run, as a user meets them: what is refused, and what
is untouched."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from digenrl.strategy import checkpoint_io
from digenrl.strategy.checkpoint_io import MANIFEST
from tests.training import SMALL, commands

pytestmark = pytest.mark.processes

CANARY = "canary-81ac5507"


@pytest.fixture(scope="module")
def completed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of a run of two RL steps with a checkpoint after each."""
    for start in commands(tmp_path_factory.mktemp("runs")):
        train = start(*SMALL, "max_rl_steps=2", fork=True)
        assert train.finish() == 0, train.stderr
        yield train.run_dir


@pytest.fixture
def run(completed: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(completed, tmp_path / "run", symlinks=True))


def tree(run: Path) -> dict[str, tuple[str, bytes]]:
    """Every file and link of a run with its content; logs/ excepted, which tell why a resume
    failed."""
    paths = [path for path in run.rglob("*") if path.relative_to(run).parts[0] != "logs"]
    links = {str(path): ("link", os.readlink(path).encode()) for path in paths if path.is_symlink()}
    return links | {
        str(path): ("file", path.read_bytes())
        for path in paths
        if path.is_file() and str(path) not in links
    }


def store(run: Path, **changes: Any) -> None:
    """Change keys of a run's config.yaml by hand; `__` stands for a dot."""
    config = OmegaConf.load(run / "config.yaml")
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    OmegaConf.save(config, run / "config.yaml")


def test_a_completed_run_says_so_untouched_and_goes_on_when_asked(running: Any, run: Path) -> None:
    before = tree(run)
    again = running(f"resume={run}", tiny=(), fork=True)
    assert again.finish() == 0, again.stderr
    assert f"{run} is complete at RL step 2; nothing was started or written" in again.stderr
    assert "max_rl_steps=4" in again.stderr
    assert again.stdout.splitlines() == [str(run)]
    refused = running(f"resume={run}", "model.lora.rank=8", "max_rl_steps=3", tiny=(), fork=True)
    assert refused.finish() == 2
    assert "model.lora.rank = 8 (stored: 4)" in refused.stderr
    assert tree(run) == before
    longer = running(f"resume={run}", "max_rl_steps=3", tiny=(), fork=True)
    assert longer.finish() == 0, longer.stderr
    assert json.loads((run / "summary.json").read_text())["rl_steps"] == 3
    assert OmegaConf.load(run / "config.yaml").max_rl_steps == 3


def test_a_resume_that_cannot_load_its_checkpoint_is_a_failed_attempt_and_changes_nothing(
    running: Any, run: Path
) -> None:
    """The checkpoint is whole, but the configuration that somebody edited wants another shape. A
    checkpoint of today would say so before (tests/config/test_tied.py)."""
    store(run, model__lora__rank=8)
    for manifest in run.glob(f"checkpoints/step-*/{MANIFEST}"):
        facts = json.loads(manifest.read_text())
        facts = {key: value for key, value in facts.items() if key not in ("tie", "xxh3")}
        manifest.write_text(checkpoint_io._manifest_text(facts))
    kept = [path for path in tree(run) if "/checkpoints/" in path or path.endswith("config.yaml")]
    before = {path: tree(run)[path] for path in kept}
    failing = running(f"resume={run}", "max_rl_steps=3", tiny=(), fork=True)
    assert failing.finish() == 1
    assert "step-000002 does not fit this run: Size mismatch" in " ".join(failing.stderr.split())
    assert {path: tree(run)[path] for path in kept} == before
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["rl_steps"], summary["attempts"]) == ("failed", 2, 2)


def test_a_manifest_without_files_falls_back_to_the_older_checkpoint(
    running: Any, run: Path
) -> None:
    newest = run / "checkpoints" / "step-000002"
    (newest / MANIFEST).write_text(checkpoint_io._manifest_text({"epoch": 1, "files": {}}))
    resumed = running(f"resume={run}", tiny=(), fork=True)
    assert resumed.finish() == 0, resumed.stderr
    assert f"passed over for step-000001: {newest / MANIFEST} does not list" in resumed.stderr
    assert json.loads((run / "summary.json").read_text())["rl_steps"] == 2
    rows = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [row["rl_step"] for row in rows if row["kind"] == "resume"] == [1]
    checkpoint_io.verify_checkpoint(newest)


@pytest.mark.slow
def test_a_resume_may_have_other_ranks_and_another_schedule(running: Any, run: Path) -> None:
    words = ["max_rl_steps=4", "allocation.trainers=2", "schedule.gap=1", "schedule.tsp.shard=true"]
    wider = running(f"resume={run}", *words, "schedule.shares=measured", tiny=(), fork=True)
    assert wider.finish() == 0, wider.stderr
    assert json.loads((run / "summary.json").read_text())["world"] == {"trainer": 2, "rollout": 1}
    narrower = running(
        f"resume={run}", "max_rl_steps=5", "allocation.trainers=1", tiny=(), fork=True
    )
    assert narrower.finish() == 0, narrower.stderr


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A server that counts connections, at an address that is not written as loopback."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        server.settimeout(0.2)
        yield server


def remote(run: Path, url: str) -> None:
    """Make the held-out judge of a run a service at `url`."""
    scorer = {
        "_target_": "digenrl.rewards.remote.RemoteScorer",
        "urls": [url],
        "deadline_s": 3.0,
    }
    evaluation = {"_target_": "digenrl.callbacks.evaluation.Evaluation", "prompts": "digits.jsonl"}
    evaluation |= {"samples_per_prompt": 1}
    store(run, reward__heldout__judge_b__scorer=None)
    store(run, reward__heldout__judge_b__scorer=scorer, callbacks__evaluation=evaluation)


READERS = [("eval", "run"), ("export", "run"), ("resume", "resume")]


@pytest.mark.parametrize(("name", "word"), READERS, ids=[name for name, _ in READERS])
def test_a_hostile_configuration_sends_nothing(
    running: Any,
    listener: socket.socket,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    word: str,
) -> None:
    """A run directory from elsewhere that wants the environment, and a host that nobody
    confirmed."""
    for variable in ("CANARY", "DIGENRL_REWARD_TOKEN"):
        monkeypatch.setenv(variable, CANARY)
    url = f"http://0.0.0.0:{listener.getsockname()[1]}"
    remote(run, url)
    hosts = running(f"{word}={run}", tiny=(), fork=True, command=name)
    assert hosts.finish() == 2
    assert f"add confirm_hosts=[{url.removeprefix('http://')}] to the command line" in hosts.stderr
    remote(run, url + "/${oc.env:CANARY}")
    environment = running(
        f"{word}={run}",
        f"confirm_hosts=[{url.removeprefix('http://')}]",
        tiny=(),
        fork=True,
        command=name,
    )
    assert environment.finish() == 2
    assert r"/${oc.env:CANARY}: is refused" in environment.stderr
    assert CANARY not in hosts.stderr + environment.stderr
    with pytest.raises(TimeoutError):
        listener.accept()


def _by_lightning(ran: Path) -> dict[str, Any]:
    """Return a node that makes a function of Lightning call `os.system`."""
    called = {"class_path": "os.system"}
    return {
        "_target_": "lightning.pytorch.cli.instantiate_class",
        "args": f"touch {ran}",
        "init": called,
    }


def _by_command(ran: Path) -> dict[str, Any]:
    """Return a node that runs a command of digenrl, which trusts `tempfile` by its own words."""
    evil = (
        f"+callbacks.evil={{_target_: tempfile.mkdtemp, dir: '{ran.parent}', prefix: '{ran.name}'}}"
    )
    return {"_target_": "digenrl.cli.report.main", "words": ["allow_targets=[tempfile]", evil]}


@pytest.mark.parametrize("attack", [_by_lightning, _by_command])
@pytest.mark.parametrize(
    ("name", "word", "key"),
    [
        ("eval", "run", "callbacks.evaluation"),
        ("export", "run", "algorithm.ema"),
        ("resume", "resume", "callbacks.evil"),
    ],
)
def test_a_hostile_configuration_runs_nothing(
    running: Any,
    run: Path,
    tmp_path: Path,
    name: str,
    word: str,
    key: str,
    attack: Callable[[Path], dict[str, Any]],
) -> None:
    """A run directory from elsewhere with a target that would call something by another name."""
    ran = tmp_path / "ran"
    hostile = attack(ran)
    store(run, max_rl_steps=3, **{key.replace(".", "__"): None})
    store(run, **{key.replace(".", "__"): hostile})
    refused = running(f"{word}={run}", tiny=(), fork=True, command=name)
    assert refused.finish() == 2
    assert not [*tmp_path.glob("ran*")]
    assert f"{key}._target_ = {hostile['_target_']}: refused" in refused.stderr


def test_a_mistyped_run_is_named_with_what_it_was_taken_for(running: Any, run: Path) -> None:
    for name, word in (("export", "run"), ("resume", "resume")):
        done = running(f"{word}={run}x", tiny=(), fork=True, command=name)
        assert done.finish() == 2
        assert f"{word} = {run}x: is no directory; name a run directory" in done.stderr
        assert f"(with make: RUN=...). Nearest: {run}." in done.stderr


@pytest.mark.slow
def test_a_run_on_several_prompt_files_goes_on_with_the_same_prompts(
    running: Any, tmp_path: Path
) -> None:
    """Two rollouts, then one: whoever generates."""
    mine = tmp_path / "mine.jsonl"
    mine.write_text(
        "".join(json.dumps({"prompt": f"digit {n}", "target": str(n)}) + "\n" for n in range(4))
    )
    words = (
        *SMALL,
        f"data.prompts=[{{file: {mine}, weight: 1}}, {{file: digits.jsonl, weight: 2}}]",
    )
    whole = running(*words, "max_rl_steps=3", "allocation.rollouts=2", fork=True)
    parts = running(*words, "max_rl_steps=1", fork=True)
    assert [train.finish() for train in (whole, parts)] == [0, 0], whole.stderr + parts.stderr
    again = running(f"resume={parts.run_dir}", "max_rl_steps=3", tiny=(), fork=True)
    assert again.finish() == 0, again.stderr
    policy = "checkpoints/last/policy.safetensors"
    assert (parts.run_dir / policy).read_bytes() == (whole.run_dir / policy).read_bytes()


def test_a_prompt_that_a_judge_cannot_score_is_found_before_ranks_start(
    running: Any, tmp_path: Path
) -> None:
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text(
        '{"prompt": "number one"}\n{"prompt": "a horse"}\n{"prompt": "a cow", "target": "2"}\n'
    )
    train = running(*SMALL, f"data.prompts={prompts}", fork=True)
    assert train.finish() == 2
    assert (
        f"data.prompts: {prompts}:2: reward judge_a cannot score it: prompt 'a horse' names no "
        "digit" in train.stderr
    )
    assert ":1: " not in train.stderr
    assert ":3: " not in train.stderr
    assert not (train.root / "outputs").exists()
