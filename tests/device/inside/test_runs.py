"""Small clusters on the strict device compute what they compute on the CPU. Each process of a run
is a fork of this one, which never uses the device itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from digenrl import accelerator
from digenrl.cluster.world import Session, World
from digenrl.strategy.disaggregated import DisaggregatedStrategy
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


SCORER = (
    "allow_targets=[tests.device.scorers]",
    "~reward.rewards",
    "~reward.heldout",
    "+reward.rewards.number.scorer._target_=tests.device.scorers.DeviceNumber",
)


@pytest.mark.parametrize("placement", ["inline", "thread", "process"])
def test_the_scorer_of_a_rank_is_on_its_device(tmp_path: Path, placement: str) -> None:
    """H1 of gpu2.md: children of all ranks were on device 0, where the trainer is."""
    words = (*SCORER, f"reward.placement={placement}", "max_rl_steps=1")
    done = run_cluster(tmp_path, 1, 3, configured(*words), before=plain)
    rewards = {cell.reward.item() for cell in completed(done).cells.values()}
    assert rewards
    assert rewards <= {1.0, 2.0, 3.0}


def test_the_network_stays_on_its_device_at_the_end(tmp_path: Path) -> None:
    """H5 of gpu2.md: Lightning's teardown copied every rank's network and optimizer to the CPU."""

    class Counted(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            found = func(*args, **(kwargs or {}))
            first = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
            if first is not None and isinstance(found, torch.Tensor):
                left = first.device.type == "strict" and found.device.type == "cpu"
                self.bytes += found.nbytes if left else 0
            return found

    def counted(world: World, session: Session) -> None:
        plain(world, session)
        teardown = DisaggregatedStrategy.teardown

        def counts(self: DisaggregatedStrategy) -> None:
            with Counted() as counter:
                teardown(self)
            (session.run_dir / f"left-{world.rank}").write_text(str(counter.bytes))

        DisaggregatedStrategy.teardown = counts  # type: ignore[method-assign]

    done = run_cluster(tmp_path, 1, 1, configured("max_rl_steps=1"), before=counted)
    completed(done)
    assert [int((tmp_path / f"left-{rank}").read_text()) for rank in range(2)] == [0, 0]
