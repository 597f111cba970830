"""Small clusters on the strict device compute what they compute on the CPU. Each process of a run
is a fork of this one, which never uses the device itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from digenrl import accelerator, devices, run
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
HALF = "data.prompts_per_batch=2"


def without(world: World, session: Session) -> None:
    """This rank has no device."""
    strict.hide()
    assert accelerator.device_kind() == "cpu"


def on_the_device(tmp_path: Path, trainers: int, *words: str, **how: Any) -> Record:
    """What a run with one rollout did on the device."""
    found = completed(run_cluster(tmp_path, trainers, 1, configured(*words), **how))
    assert not strict.is_initialized(), "this process has used the device"
    return found


def on_the_cpu(tmp_path: Path, *words: str) -> Record:
    return completed(run_cluster(tmp_path, 1, 1, configured(*words), before=without))


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """What one trainer and one rollout do on the CPU, as any number of trainers (I1)."""
    return on_the_cpu(tmp_path_factory.mktemp("cpu"), HALF)


def assert_bit_equal(found: Record, wanted: Record) -> None:
    assert found.cells
    assert_same_cells(found, wanted)
    assert len(found.gradients) == len(wanted.gradients) > 0
    for mine, theirs in zip(found.gradients, wanted.gradients, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert all(torch.equal(found.weights[name], wanted.weights[name]) for name in wanted.weights)


def assert_close(found: Record, wanted: Record) -> None:
    """Gradients are summed over ranks in the order in which fragments are there: to rounding."""
    assert relative(found.gradients[0], wanted.gradients[0]) < 1e-5
    assert relative(found.weights, wanted.weights) < 1e-3


def test_whoever_asks_for_devices_may_fork_ranks() -> None:
    assert len(devices.usable_gpus()) == accelerator.device_count() >= 2
    assert not strict.is_initialized(), "this process has used the device"


class Counted(TorchDispatchMode):
    """Counts the bytes that leave the device."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = func(*args, **(kwargs or {}))
        first = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
        if first is not None and isinstance(found, torch.Tensor):
            left = first.device.type == "strict" and found.device.type == "cpu"
            self.bytes += found.nbytes if left else 0
        return found


def counted(world: World, session: Session) -> None:
    """This rank notes the bytes that leave its device at the end."""
    teardown = DisaggregatedStrategy.teardown

    def counts(self: DisaggregatedStrategy) -> None:
        with Counted() as counter:
            teardown(self)
        (session.run_dir / f"left-{world.rank}").write_text(str(counter.bytes))

    DisaggregatedStrategy.teardown = counts  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Record, list[int]]:
    """What one trainer and one rollout do on the device, and the bytes that leave it at the end."""
    path = tmp_path_factory.mktemp("device")
    found = on_the_device(path, 1, HALF, before=counted)
    return found, [int((path / f"left-{rank}").read_text()) for rank in range(2)]


def test_one_trainer_and_one_rollout(plain: tuple[Record, list[int]], wanted: Record) -> None:
    assert_bit_equal(plain[0], wanted)


@pytest.mark.parametrize("sharding", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_two_trainers(tmp_path: Path, wanted: Record, sharding: str) -> None:
    assert_close(on_the_device(tmp_path, 2, HALF, f"parallel.sharding={sharding}"), wanted)


@pytest.mark.slow
def test_whole_weights_with_fsdp_and_a_resume(tmp_path: Path) -> None:
    on_the_device(tmp_path / "device", 2, *FSDP, "max_rl_steps=1")
    found = on_the_device(tmp_path / "device", 2, *FSDP, "max_rl_steps=2", resume=True)
    wanted = on_the_cpu(tmp_path / "cpu", *FULL, "max_rl_steps=2")
    assert relative(found.weights, wanted.weights) < 1e-3


OTHERWISE: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "off-loaded activations": (1, 1, ("model.gradient_checkpointing=offload",)),
    "schedule full": (1, 1, ("schedule=full",)),
    "colocated": (1, 0, ("schedule=colocated", "schedule.gap=1")),
    "hsdp": (4, 1, ("parallel.sharding=hsdp", "parallel.shard_group=2")),
    "broadcast": (1, 2, ("network.publication=broadcast",)),
}
"""What is otherwise than in the plain run -> trainers, rollouts, words."""


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERWISE)
def test_what_is_done_otherwise_gives_the_cpus_weights(tmp_path: Path, name: str) -> None:
    trainers, rollouts, words = OTHERWISE[name]
    done = run_cluster(tmp_path / "device", trainers, rollouts, configured(*words))
    same = words if trainers == rollouts else ()  # ranks and links change no number (I1)
    assert_close(completed(done), on_the_cpu(tmp_path / "cpu", *same))
    said = [row["by"] for row in done.events() if row["kind"] == "publication"]
    assert said == ["stccl broadcast"] * (name == "broadcast")


SCORER = (
    "allow_targets=[tests.device.scorers]",
    "~reward.rewards",
    "~reward.heldout",
    "+reward.rewards.number.scorer._target_=tests.device.scorers.DeviceNumber",
)


@pytest.mark.parametrize(
    "placement",
    [
        pytest.param("inline", marks=pytest.mark.slow),
        pytest.param("thread", marks=pytest.mark.slow),
        "process",
    ],
)
def test_the_scorer_of_a_rank_is_on_its_device(tmp_path: Path, placement: str) -> None:
    """H1: children of all ranks were on device 0, where the trainer is."""
    words = (*SCORER, HALF, f"reward.placement={placement}", "max_rl_steps=1")
    done = completed(run_cluster(tmp_path, 1, 1, configured(*words)))
    assert {cell.reward.item() for cell in done.cells.values()} == {1.0}


def test_the_network_stays_on_its_device_at_the_end(plain: tuple[Record, list[int]]) -> None:
    """H5: Lightning's teardown copied every rank's network and optimizer to the CPU."""
    assert plain[1] == [0, 0]


@pytest.mark.slow
def test_seconds_are_booked_where_the_device_works(tmp_path: Path) -> None:
    """H3: spans ended when work was given to the device, before it was done; the rest
    was called a straggler's. Here each operator keeps the device busy for a millisecond, and a
    fragment is one micro-batch."""
    busy_s, given = 1e-3, [0]
    words = ("max_rl_steps=1", "data.prompts_per_batch=2", "data.group_size=2", "schedule.gap=1")

    def slow(rank: run.Rank, world: World) -> None:
        strict.set_op_us(round(busy_s * 1e6))
        owner, names = (
            (rank.strategy, ("training_step", "backward"))
            if world.is_trainer
            else (rank.strategy.engine, ("take_step", "decode"))
        )

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def inside(*args: Any, **kwargs: Any) -> Any:
                before = sum(strict.calls().values())
                found = call(*args, **kwargs)
                given[0] += sum(strict.calls().values()) - before
                (tmp_path / f"given-{world.role}").write_text(str(given[0]))
                return found

            return inside

        for name in names:
            setattr(owner, name, counted(getattr(owner, name)))

    config = configured(*words, "schedule.tsp.batch=all")
    done = run_cluster(tmp_path, 1, 1, config, after_build=slow)
    completed(done)
    for role, stages in (("trainer", ("train",)), ("rollout", ("generate", "decode"))):
        busy = int((tmp_path / f"given-{role}").read_text()) * busy_s
        booked = sum(row["end"] - row["start"] for name in stages for row in done.spans(name))
        assert booked > 0.9 * busy > 0.1, f"{role}: {booked} s booked of {busy}"
