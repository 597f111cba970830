"""A run directory that came from elsewhere: nothing in it leads out of it, neither when it is read
nor when a run goes on writing there."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from digenrl import config
from digenrl.cli import report
from digenrl.config.output_dir import store_config
from digenrl.record.line_file import LineFile
from digenrl.record.run_dir import (
    ForeignEntry,
    append_jsonl,
    atomic_replace,
    open_log,
    own_folder,
    require_own,
    write_json,
)
from digenrl.report.read_run import JsonlTail
from digenrl.strategy.checkpoint_io import CheckpointError, DirectoryCheckpointIO, newest_valid
from tests.report.synthetic import write_run
from tests.strategy.test_checkpoint_io import content, saved

WRITTEN = (
    "config.yaml",
    "metrics.jsonl",
    "events.jsonl",
    "trace.json",
    "summary.json",
    "report.html",
    "samples/before_after.png",
    "samples/eval-0.npz",
    "plots/timeline.png",
    "spans/rank-000.jsonl",
    "decisions/rank-000.jsonl",
    "logs/rank-000.log",
    "logs/launcher.log",
    "logs/join.log",
    "access.json",
    "eval.json",
    "eval.png",
    ".reserve",
    "export/README.md",
    "export/pytorch_lora_weights.safetensors",
    "checkpoints/step-000001/state.pt",
    "checkpoints/step-000001",
    "checkpoints/.tmp-last",
    "checkpoints/.tmp-step-000009",
    "tensorboard/events.out",
    "csv/metrics.csv",
    *("logs", "spans", "samples", "plots", "decisions", "checkpoints", "tensorboard", "wandb"),
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = config.prepare_run_dir(config.load([f"hydra.run.dir={tmp_path}/run-0"]))
    write_run(tmp_path / "other", steps=1, samples=False)
    for name in ("metrics.jsonl", "events.jsonl", "spans"):
        (tmp_path / "other" / name).rename(run / name)
    saved(run, 1, 1.0)
    (run / "logs").mkdir()
    return run


def test_a_run_as_it_is_written_is_its_own(run: Path) -> None:
    (run / "wandb" / "run-1" / "logs").mkdir(parents=True)
    (run / "wandb" / "latest-run").symlink_to("run-1")
    (run / "wandb" / "debug.log").symlink_to("run-1/logs/debug.log")
    require_own(run)
    assert config.load([f"resume={run}"]).resumed


@pytest.mark.heavy
@pytest.mark.parametrize("name", WRITTEN)
def test_a_link_at_any_place_is_refused_by_resume_evaluation_and_report(
    run: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine")
    place = run / name
    if place.is_dir():
        shutil.rmtree(place)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to(outside)
    for load in (
        lambda: config.load([f"resume={run}"]),
        lambda: config.load([], stored=run),
    ):
        with pytest.raises(config.ConfigError, match="is a link to"):
            load()
    assert report.main([f"run={run}"]) == 2
    assert "is a link to" in capsys.readouterr().err
    assert outside.read_text() == "mine"
    assert not (run / "summary.json").is_file() or (run / "summary.json").is_symlink()


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("checkpoints/last", "../../other"),
        ("checkpoints/last", "/tmp"),
        ("checkpoints/last", ".."),
        ("checkpoints/newest", "step-000001"),
        ("last", "step-000001"),
        ("wandb/latest-run", "../../x"),
        ("wandb/latest-run", "/etc"),
        ("a\x1b]0;b\nc", "x"),
    ],
)
def test_other_links_are_refused_and_named_printably(run: Path, name: str, target: str) -> None:
    place = run / name
    place.parent.mkdir(exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to(target)
    with pytest.raises(ForeignEntry, match="is a link to") as caught:
        require_own(run)
    assert str(caught.value).isprintable()


def as_pipe(place: Path, _: Path) -> None:
    os.mkfifo(place)


def as_folder(place: Path, _: Path) -> None:
    place.mkdir()


def as_hard_link(place: Path, outside: Path) -> None:
    place.hardlink_to(outside)


@pytest.mark.parametrize("make", [as_pipe, as_folder, as_hard_link])
def test_what_is_no_file_of_its_own_is_refused(
    run: Path, tmp_path: Path, make: Callable[[Path, Path], None]
) -> None:
    (tmp_path / "outside").write_text("mine")
    place = run / "metrics.jsonl"
    place.unlink()
    make(place, tmp_path / "outside")
    with pytest.raises(ForeignEntry, match=r"metrics\.jsonl"):
        require_own(run)
    assert JsonlTail(place).read_new_rows() == []


@pytest.mark.parametrize(
    "name",
    [
        "profile.yaml",
        "csv/metrics.csv",
        "version_0/hparams.yaml",
        "export/README.md",
        "export/reward.png",
        "export/transformer/config.json",
        "benchmark/scenes/base/settings.json",
        "config.yaml",
        "a.txt",
    ],
)
def test_a_second_name_is_refused_wherever_a_command_may_write(
    run: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "outside").write_text("mine")
    place = run / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    as_hard_link(place, tmp_path / "outside")
    with pytest.raises(ForeignEntry, match="has a second name elsewhere"):
        require_own(run)


def test_checkpoints_may_share_their_weights_with_another_run(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "checkpoints", tmp_path / "kept", symlinks=True, copy_function=os.link)
    require_own(run)


def test_no_writer_follows_a_link_or_a_second_name(tmp_path: Path) -> None:
    outside, run = tmp_path / "outside", tmp_path / "run"
    (outside / "folder").mkdir(parents=True)
    (outside / "file").write_text("mine\n")
    run.mkdir()
    for name in ("logs", "spans", "samples"):
        (run / name).symlink_to(outside / "folder")
    (run / "a.log").symlink_to(outside / "file")
    (run / "b.log").hardlink_to(outside / "file")
    os.mkfifo(run / "c.log")
    for path in (run / "logs" / "rank-000.log", *run.glob("*.log")):
        with pytest.raises(OSError, match=r"link|symbolic|second name|No such device"):
            open_log(path)
    append_jsonl(run / "spans" / "x.jsonl", {"a": 1})
    append_jsonl(run / "b.log", {"a": 1})
    assert not LineFile(run / "spans" / "rank-000.jsonl").write(b"{}\n")
    assert not LineFile(run / "b.log").write(b"{}\n")
    with pytest.raises(OSError, match="is a link"):
        own_folder(run / "samples")
    assert (outside / "file").read_text() == "mine\n"
    assert not list((outside / "folder").iterdir())


def test_a_folder_that_becomes_a_link_after_the_check_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside, run = tmp_path / "outside", tmp_path / "run"
    outside.mkdir()
    run.mkdir()
    for name in ("logs", "spans", "decisions"):
        (run / name).symlink_to(outside)
    monkeypatch.setattr(Path, "is_symlink", lambda _: False)  # it was a folder then
    with pytest.raises(OSError, match=r"rank-000|logs|irectory|symbolic"):
        open_log(run / "logs" / "rank-000.log")
    append_jsonl(run / "spans" / "x.jsonl", {"a": 1})
    assert not LineFile(run / "decisions" / "rank-000.jsonl").write(b"{}\n")
    assert not list(outside.iterdir())


def test_no_temporary_name_can_be_guessed_and_none_is_written_through(tmp_path: Path) -> None:
    names = set[str]()
    for _ in range(3):
        with atomic_replace(tmp_path / "a.json") as temporary:
            facts = temporary.lstat()
            assert stat.S_ISREG(facts.st_mode)
            assert facts.st_size == 0
            names.add(temporary.name)
    assert len(names) == 3
    outside = tmp_path / "outside"
    outside.write_text("mine")
    for name in ("config.yaml", "summary.json"):
        (tmp_path / f".{name}.{os.getpid()}.tmp").symlink_to(outside)
    write_json(tmp_path / "summary.json", {})
    store_config(config.load([]).settings.tree, tmp_path)
    assert outside.read_text() == "mine"


def test_another_runs_checkpoints_stay_and_are_not_read(tmp_path: Path) -> None:
    other = saved(tmp_path / "other", 1, 1.0)
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(other.parent)
    for step in (2, 3, 4):
        with pytest.raises(OSError, match="is a link"):
            DirectoryCheckpointIO(1).save_checkpoint(
                content(1.0, step), run / "checkpoints" / f"step-{step:06d}"
            )
    assert sorted(path.name for path in other.parent.iterdir()) == ["last", "step-000001"]
    (run / "checkpoints").unlink()
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "step-000001").symlink_to(other)
    with pytest.raises(CheckpointError, match="is a link"):
        newest_valid(run / "checkpoints")
