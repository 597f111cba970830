"""Small clusters on the strict device compute what they compute on the CPU. Each process of a run
is a fork of this one, which never uses the device itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from digenrl import accelerator
from digenrl.cluster.world import Session, World
from tests.strategy.processes import (
    FULL,
    Record,
    assert_same_cells,
    completed,
    configured,
    relative,
    run_cluster,
)

strict = torch.get_device_module("strict")
FSDP = (*FULL, "parallel.sharding=fsdp")


def plain(world: World, session: Session) -> None:
    """The CPU's fused attention rounds otherwise than the products that stand for it elsewhere."""
    torch.backends.cuda.enable_flash_sdp(False)


def without(world: World, session: Session) -> None:
    """This rank has no device."""
    plain(world, session)
    strict.hide()
    assert accelerator.kind() == "cpu"


def both(tmp_path: Path, trainers: int, rollouts: int, *words: str) -> tuple[Record, Record]:
    """What a run did on the device, and on the CPU."""
    config = configured(*words)
    found = completed(run_cluster(tmp_path / "device", trainers, rollouts, config, before=plain))
    assert not strict.is_initialized(), "this process has used the device"
    wanted = completed(run_cluster(tmp_path / "cpu", trainers, rollouts, config, before=without))
    return found, wanted


def assert_bit_equal(found: Record, wanted: Record) -> None:
    assert found.cells
    assert_same_cells(found, wanted)
    assert len(found.gradients) == len(wanted.gradients) > 0
    for mine, theirs in zip(found.gradients, wanted.gradients, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert all(torch.equal(found.weights[name], wanted.weights[name]) for name in wanted.weights)


def test_one_trainer_and_one_rollout(tmp_path: Path) -> None:
    assert_bit_equal(*both(tmp_path, 1, 1))


@pytest.mark.parametrize("words", [(), FSDP], ids=["ddp", "fsdp"])
def test_two_trainers(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Gradients are summed over ranks in the order in which fragments are there: to rounding."""
    found, wanted = both(tmp_path, 2, 1, *words)
    assert relative(found.gradients[0], wanted.gradients[0]) < 1e-5
    assert relative(found.weights, wanted.weights) < 1e-3
