"""Checkpoints of sharded trainers: each writes and reads the rows that it holds, beside training;
nobody gathers."""

from __future__ import annotations

import errno
import json
import multiprocessing
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from digenrl import config as configuration
from digenrl import run
from digenrl.cluster.world import World
from digenrl.strategy import checkpoint_storage as storage
from digenrl.strategy.checkpoint_io import DirectoryCheckpointIO, newest_valid, read_checkpoint
from digenrl.strategy.checkpoint_storage import POLICY, PREFIX
from tests.strategy.faults import Fault
from tests.strategy.processes import (
    FEW,
    FP64,
    FULL,
    SMALL,
    completed,
    configured,
    relative,
    run_cluster,
)

pytestmark = pytest.mark.processes

WHOLE = {
    "block.weight": torch.arange(35.0).reshape(7, 5),
    "block.bias": torch.arange(2.0),
    "flat": torch.ones(4).half(),
}
"""Seven rows do not divide by the ranks, and two are fewer than three ranks."""


def as_ranks(ranks: int, body: Callable[[int], None], folder: Path) -> None:
    """Run `body` in forked ranks of one gloo group."""

    def rank(number: int) -> None:
        store = dist.FileStore(str(folder / f"store-{ranks}"), ranks)
        dist.init_process_group("gloo", store=store, rank=number, world_size=ranks)
        body(number)
        dist.destroy_process_group()

    processes = [
        multiprocessing.get_context("fork").Process(target=rank, args=(number,))
        for number in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * ranks, "see the traceback above"


def sharded(tensor: Tensor, ranks: int) -> DTensor:
    return distribute_tensor(tensor, init_device_mesh("cpu", (ranks,)), [Shard(0)])


def content(place: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    moments = {
        name: {"step": torch.tensor(3.0), "exp_avg": place(-value)} for name, value in WHOLE.items()
    }
    return {
        "epoch": 3,
        "state_dict": {PREFIX + name: place(value) for name, value in WHOLE.items()},
        "optimizer_states": [
            {"state": moments, "param_groups": [{"lr": 0.1, "params": list(WHOLE)}]}
        ],
        "algorithm": {
            "ema": {name: place(2 * value) for name, value in WHOLE.items()},
            "ema_steps": 8,
        },
    }


def test_two_ranks_write_what_one_would_and_three_read_it(tmp_path: Path) -> None:
    """Changes after `begin_writing` do not reach the checkpoint. A full disk of one rank is
    reported to both."""
    alone, together, failed = (
        tmp_path / name / "step-000003" for name in ("alone", "together", "failed")
    )
    DirectoryCheckpointIO().save_checkpoint(content(torch.clone), alone)

    def write(number: int) -> None:
        checkpoint = content(lambda tensor: sharded(tensor, 2))
        writing = DirectoryCheckpointIO().begin_writing(
            checkpoint, together, dist.new_group(backend="gloo")
        )
        checkpoint["state_dict"][PREFIX + "block.weight"].zero_()
        writing.wait_until_complete()
        if number == 1:
            storage.save_file = _full
        with pytest.raises(OSError, match="No space left"):
            DirectoryCheckpointIO().begin_writing(
                checkpoint, failed, dist.new_group(backend="gloo")
            ).wait_until_complete()

    def load(number: int) -> None:
        def room(place: str, size: torch.Size, dtype: torch.dtype) -> Tensor:
            return (
                sharded(torch.empty(size, dtype=dtype), 3)
                if size
                else torch.empty(size, dtype=dtype)
            )

        found = read_checkpoint(together, group=dist.group.WORLD, room=room)
        for name, value in WHOLE.items():
            assert torch.equal(
                found["algorithm"]["ema"][name].to_local(), sharded(2 * value, 3).to_local()
            )

    as_ranks(2, write, tmp_path)
    assert not list(failed.parent.iterdir()), "something was left behind"
    assert (together / POLICY).read_bytes() == (alone / POLICY).read_bytes()
    files = json.loads((together / "manifest.json").read_text())["files"]
    assert set(files) == {path.name for path in together.iterdir()} - {"manifest.json"}
    shares = [files[f"state-{number:05d}.safetensors"]["bytes"] for number in (0, 1)]
    assert max(shares) < 0.6 * sum(shares)
    both = [DirectoryCheckpointIO().load_checkpoint(path) for path in (alone, together)]
    for name, value in WHOLE.items():
        for found in both:
            assert torch.equal(found["optimizer_states"][0]["state"][name]["exp_avg"], -value)
            assert torch.equal(found["state_dict"][PREFIX + name], value)
    assert (
        both[0]["optimizer_states"][0]["param_groups"]
        == both[1]["optimizer_states"][0]["param_groups"]
    )
    as_ranks(3, load, tmp_path)


def _full(*args: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


SHARDED = (
    *FULL,
    *FP64,
    "parallel.sharding=fsdp",
    "+algorithm/ema=default",
    "algorithm.ema.every=1",
)
TRAINED = (
    *SHARDED,
    "data.prompts_per_batch=2",
    "sampling.steps=3",
    "callbacks.checkpoint.every=1",
    "max_rl_steps=4",
)


@contextmanager
def nothing_gathered() -> Iterator[None]:
    """Inside, a tensor that is made whole is an error."""
    whole = DTensor.full_tensor

    def refused(*args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("a tensor was gathered for a checkpoint")

    DTensor.full_tensor = refused  # type: ignore[method-assign]
    try:
        yield
    finally:
        DTensor.full_tensor = whole  # type: ignore[method-assign]


def watched(counts: Path) -> Callable[[run.Rank, World], None]:
    """Notes the bytes that each trainer has to hold for each checkpoint; no checkpoint gathers
    anything."""

    def watch(rank: run.Rank, world: World) -> None:
        strategy, save, load = (
            rank.strategy,
            rank.trainer.save_checkpoint,
            rank.strategy.load_checkpoint,
        )
        begin = strategy.checkpoint_io.begin_writing  # type: ignore[attr-defined]

        def counted(checkpoint: dict[str, Any], *args: Any) -> Any:
            held = [
                value.to_local() for value in _tensors(checkpoint) if isinstance(value, DTensor)
            ]
            with (counts / f"bytes-{world.rank}").open("a") as file:
                file.write(f"{sum(value.numel() * value.element_size() for value in held)}\n")
            return begin(checkpoint, *args)

        def save_watched(*args: Any) -> None:
            with nothing_gathered():
                save(*args)

        def load_watched(*args: Any, **kwargs: Any) -> Any:
            with nothing_gathered():
                return load(*args, **kwargs)

        rank.trainer.save_checkpoint = save_watched  # type: ignore[method-assign, assignment]
        strategy.load_checkpoint = load_watched  # type: ignore[method-assign]
        strategy.checkpoint_io.begin_writing = counted  # type: ignore[attr-defined]

    return watch


def _tensors(node: Any) -> Iterator[Tensor]:
    for value in (
        node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    ):
        if isinstance(value, Tensor):
            yield value
        else:
            yield from _tensors(value)


def kill_while_writing() -> None:
    """Trainer 1, at its third checkpoint: it writes two files for each."""
    Fault("save", 1, "kill", call=5)


def averaged(run_dir: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = read_checkpoint(
        newest_valid(run_dir / "checkpoints"), ("algorithm",)
    )["algorithm"]["ema"]
    return found


@pytest.mark.slow
def test_a_trainer_killed_while_it_writes_and_a_damaged_shard_cost_steps_and_no_bit(
    tmp_path: Path,
) -> None:
    """The third checkpoint is torn, the second damaged. With as many trainers, a run from the first
    checkpoint ends as an undisturbed run does. With one trainer the weights agree up to
    rounding."""
    config = configured(*TRAINED)
    whole = completed(run_cluster(tmp_path / "whole", 2, 1, config, after_build=watched(tmp_path)))
    held = [
        [int(line) for line in (tmp_path / f"bytes-{rank}").read_text().split()] for rank in (0, 1)
    ]
    weights = sum(value.numel() * value.element_size() for value in whole.weights.values())
    assert len(held[0]) == 4
    assert max(held[0] + held[1]) <= 0.55 * 4 * weights, (
        "weights, two moments, average: more than half of it"
    )

    torn = run_cluster(
        tmp_path / "torn", 2, 1, config, before=lambda world, session: kill_while_writing()
    )
    checkpoints = tmp_path / "torn" / "checkpoints"
    assert "trainer" in torn.outcome.cause
    assert list(checkpoints.glob(".tmp-step-000003/*")), "it was not killed while it wrote"
    assert newest_valid(checkpoints).name == "step-000002"
    damaged = checkpoints / "step-000002" / "state-00001.safetensors"
    flipped = bytearray(damaged.read_bytes())
    flipped[-1] ^= 1
    damaged.write_bytes(flipped)
    said: list[str] = []
    assert newest_valid(checkpoints, said.append).name == "step-000001"
    assert "state-00001.safetensors is damaged" in said[0]
    shutil.copytree(tmp_path / "torn", tmp_path / "fewer", symlinks=True)
    again = completed(
        run_cluster(tmp_path / "torn", 2, 1, config, resume=True, after_build=watched(tmp_path))
    )
    assert len(again.gradients) == 3
    assert all(torch.equal(again.weights[name], value) for name, value in whole.weights.items())
    average, wanted = (averaged(tmp_path / name) for name in ("torn", "whole"))
    assert all(torch.equal(average[name], value) for name, value in wanted.items())
    fewer = completed(run_cluster(tmp_path / "fewer", 1, 1, config, resume=True))
    assert relative(fewer.weights, whole.weights) <= 1e-9


@pytest.mark.slow
def test_training_goes_on_while_a_checkpoint_is_written_and_the_end_waits_for_it(
    tmp_path: Path,
) -> None:
    config = configured(
        "data.prompts_per_batch=2", "callbacks.checkpoint.every=2", "max_rl_steps=4"
    )
    cluster = run_cluster(tmp_path, 1, 1, config, before=lambda world, session: write_slowly())
    completed(cluster)
    events = [(row["kind"], row.get("version", row.get("rl_step"))) for row in cluster.events()]
    assert (
        events.index(("publish", 3))
        < events.index(("checkpoint", 2))
        < events.index(("checkpoint", 4))
    )
    assert newest_valid(tmp_path / "checkpoints").name == "step-000004"


def write_slowly() -> None:
    """The first checkpoint takes far longer than an RL step."""
    Fault("save", 0, "hang", seconds=8.0)


@pytest.mark.slow
def test_a_network_that_is_built_without_values_resumes_with_those_of_the_checkpoint(
    tmp_path: Path,
) -> None:
    """What a resumed run publishes first is what the run before published last, bit by bit."""
    # of digenrl.extensions.zoo
    words = ("experiment=wan21_flowgrpo", *SMALL, *FEW, "parallel.sharding=fsdp")
    for resume, steps in ((False, 1), (True, 2)):
        config = configuration.load([*words, f"max_rl_steps={steps}"]).settings
        cluster = run_cluster(tmp_path, 2, 1, config, resume=resume)
        completed(cluster)
    digests = [
        (row["version"], row["digest"]) for row in cluster.events() if row["kind"] == "publish"
    ]
    assert [version for version, _ in digests] == [0, 1, 1, 2]
    assert digests[1] == digests[2] != digests[0]
