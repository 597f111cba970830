"""A run's config.yaml is the one that its checkpoint was written with, or the command line says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from digenrl import config
from digenrl.config.compose import group_options
from digenrl.config.shipped import config_directory
from digenrl.config.stored import compare_ties, tie_of
from digenrl.earlier_run import require_tied
from digenrl.extensions.export.cli import export
from digenrl.strategy.checkpoint_io import (
    MANIFEST,
    RESUMED,
    CheckpointError,
    DirectoryCheckpointIO,
    newest_valid,
    tie_again,
    ties_of,
    verify_checkpoint,
)
from tests.strategy.test_checkpoint_io import content
from tests.training import SMALL, Train


@pytest.fixture
def run(tmp_path: Path) -> Path:
    composed = config.load([f"hydra.run.dir={tmp_path}/run-0"])
    run = config.prepare_run_dir(composed)
    io = DirectoryCheckpointIO(tie=tie_of(composed.settings.tree))
    io.save_checkpoint(content(1.0, 2), run / "checkpoints" / "step-000002")
    return run


def edit(run: Path, key: str, value: Any) -> None:
    tree = OmegaConf.load(run / "config.yaml")
    OmegaConf.update(tree, key, value, force_add=True, merge=False)
    OmegaConf.save(tree, run / "config.yaml")


def compared(run: Path, *words: str) -> tuple[list[str], list[str]]:
    return compare_ties(run, ties_of(run / "checkpoints" / "step-000002"), words)


@pytest.mark.heavy
@pytest.mark.parametrize("experiment", sorted(group_options(config_directory())["experiment"])[::4])
def test_what_a_run_stores_is_what_its_checkpoint_is_tied_to(
    tmp_path: Path, experiment: str
) -> None:
    composed = config.load([f"experiment={experiment}", f"hydra.run.dir={tmp_path}/run-0"])
    run = config.prepare_run_dir(composed)
    assert compare_ties(run, [tie_of(composed.settings.tree)], []) == ([], [])


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", 7),
        ("algorithm.optimizer.lr", 1.0),
        ("max_rl_steps", 10**6),
        ("model.path", "/elsewhere"),
        ("data.heldout", None),
        ("callbacks.checkpoint.every", 1),
        ("reward.rewards", {}),
        ("logger.more", {"csv": {"_target_": "lightning.pytorch.loggers.CSVLogger"}}),
        ("network.interface", "eth0"),
        ("algorithm.optimizer.more", 1),
    ],
)
def test_a_key_that_was_changed_since_is_named_and_refused_unless_the_command_line_sets_it(
    run: Path, key: str, value: Any
) -> None:
    assert compared(run) == ([], [])
    edit(run, key, value)
    problems, _ = compared(run, "resume=x", "allocation.trainers=1")
    assert problems
    assert all(f"config.yaml: {key}" in problem for problem in problems)
    with pytest.raises(config.ConfigError, match="is not what the checkpoint was written with"):
        require_tied(run, run / "checkpoints" / "step-000002", [])
    problems, notes = compared(run, f"{key}=1")
    assert not problems
    assert notes
    assert not compared(run, f"~{key}")[0]


@pytest.mark.heavy
def test_a_key_that_was_taken_out_is_named(run: Path) -> None:
    tree = OmegaConf.load(run / "config.yaml")
    del tree["algorithm"]["clip_range"]
    OmegaConf.save(tree, run / "config.yaml")
    (problem,) = compared(run)[0]
    assert "algorithm.clip_range = absent" in problem


@pytest.mark.heavy
def test_what_a_resume_has_set_counts_from_its_first_step_on(run: Path) -> None:
    edit(run, "algorithm.optimizer.lr", 0.5)
    assert compared(run)[0]
    tie_again(run / "checkpoints" / "step-000002", tie_of(OmegaConf.load(run / "config.yaml")))
    assert compared(run) == ([], [])
    verify_checkpoint(run / "checkpoints" / "step-000002")
    text = (run / "checkpoints" / "step-000002" / RESUMED).read_text()
    (run / "checkpoints" / "step-000002" / RESUMED).write_text(text.replace("seed", "sead"))
    assert compared(run)[0], "its own digest does not agree"


@pytest.mark.heavy
def test_a_checkpoint_without_digests_is_taken_with_a_note(run: Path) -> None:
    checkpoint = run / "checkpoints" / "step-000002"
    DirectoryCheckpointIO().save_checkpoint(content(1.0, 3), checkpoint)
    assert "tie" not in json.loads((checkpoint / MANIFEST).read_text())
    edit(run, "seed", 7)
    problems, (note,) = compared(run)
    assert not problems
    assert "has no digests of a configuration" in note


def test_a_checkpoint_under_another_name_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    DirectoryCheckpointIO().save_checkpoint(content(1.0, 2), folder / "step-000002")
    (folder / "step-000002").rename(folder / "step-000009")
    with pytest.raises(CheckpointError, match="is not the checkpoint 'step-000002'"):
        verify_checkpoint(folder / "step-000009")
    with pytest.raises(CheckpointError):
        newest_valid(folder)
    (folder / "step-000009").rename(folder / ".old-step-000002")
    assert newest_valid(folder).name == ".old-step-000002"


@pytest.mark.heavy
@pytest.mark.processes
def test_resume_and_export_refuse_a_configuration_that_was_changed(
    running: Callable[..., Train], capsys: pytest.CaptureFixture[str]
) -> None:
    train = running(*SMALL, "max_rl_steps=1", fork=True)
    assert train.finish() == 0, train.stderr
    run = train.run_dir
    grown = running(
        f"resume={run}", "max_rl_steps=2", "algorithm.optimizer.lr=1e-5", tiny=(), fork=True
    )
    assert grown.finish() == 0, grown.stderr
    assert "is not what" not in grown.stderr
    before = (run / "config.yaml").read_text()
    edit(run, "algorithm.optimizer.lr", 0.5)
    refused = running(f"resume={run}", "max_rl_steps=3", tiny=(), fork=True)
    assert refused.finish() == 2, refused.stderr
    assert "algorithm.optimizer.lr = 0.5: is not what the checkpoint" in refused.stderr
    assert export.main([f"run={run}"]) == 2
    assert "algorithm.optimizer.lr = 0.5: is not what the checkpoint" in capsys.readouterr().err
    (run / "config.yaml").write_text(before)
    again = running(f"resume={run}", "max_rl_steps=3", tiny=(), fork=True)
    assert again.finish() == 0, again.stderr
