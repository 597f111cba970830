"""Sharded trainers, beyond the equality matrix: hsdp on a 2 x 2 mesh, what is reduced and when, mixed precision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from digenrl import run
from digenrl.strategy.checkpoint import DirectoryCheckpointIO, newest_valid
from digenrl.strategy.shard import mesh_of
from digenrl.strategy.world import World
from tests.strategy.cluster import FP64, FULL, Job, completed, configured, relative, run_cluster, run_series
from tests.strategy.test_equality import LIGHT, assert_equal_runs, reference_of

HSDP = ("parallel.sharding=hsdp", "parallel.shard_group=2")
TUNES: dict[str, tuple[str, ...]] = {"lora": (), "full": FULL}


def checkpoint(run_dir: Path) -> dict[str, Any]:
    return DirectoryCheckpointIO().load_checkpoint(newest_valid(run_dir / "checkpoints"))


def norm(gradient: dict[str, Tensor]) -> float:
    return float(torch.stack([value.double().square().sum() for value in gradient.values()]).sum().sqrt())


def test_hsdp_on_a_two_by_two_mesh_equals_the_reference(tmp_path: Path) -> None:
    """Gradients, clipping by the global norm, published weights, moving average; LoRA and all weights."""
    words = ("schedule.gap=2", "schedule.tsp.shard=true", "sampling.task_size=4", "callbacks.checkpoint.every=2")
    clip = ("algorithm.max_grad_norm=0.05", "+algorithm/ema=default", "algorithm.ema.every=1")

    def jobs(*more: str) -> list[Job]:
        return [Job(name, configured(*LIGHT, *FP64, *words, *clip, *tune, *more)) for name, tune in TUNES.items()]

    averages = {
        job.name: checkpoint(c.run_dir)["algorithm"]["ema"] for job, c in run_series(tmp_path / "1", 1, 1, jobs())
    }
    for job, cluster in run_series(tmp_path / "4", 4, 1, jobs(*HSDP)):
        found, wanted = completed(cluster), reference_of(job.config)
        assert all(norm(gradient) > 0.05 for gradient in wanted.gradients), "clipping would not be tested"
        assert_equal_runs(found, wanted, exact=False, double=True, weight_bound=1e-12)
        average = checkpoint(cluster.run_dir)["algorithm"]["ema"]
        assert relative(average, averages[job.name]) <= 1e-12
        assert relative(average, wanted.weights) > 1e-6, "the average must differ from the weights to show anything"


@pytest.mark.parametrize(
    ("trainers", "words", "reduced"),
    [(2, ("parallel.sharding=ddp",), 1), (2, ("parallel.sharding=fsdp",), 1), (4, HSDP, 2)],
    ids=["ddp", "fsdp", "hsdp"],
)
def test_gradients_are_reduced_once_per_update(
    tmp_path: Path, trainers: int, words: tuple[str, ...], reduced: int
) -> None:
    """`reduced`: kinds of collectives that carry a gradient. Every other micro-batch sends none of it."""

    def count(rank: run.Rank, world: World) -> None:
        if not world.is_trainer:
            return
        calls: list[tuple[str, int]] = []
        batches = [0]
        for name in ("reduce_scatter_tensor", "reduce_scatter_single", "all_reduce"):
            if hasattr(dist, name):  # PyTorch 2.15 renamed the second from the first
                kind = name.removesuffix("_tensor").removesuffix("_single")
                setattr(dist, name, counting(getattr(dist, name), kind, calls, batches))
        strategy, backward = rank.strategy, rank.strategy.backward

        def counted(*args: Any, **kwargs: Any) -> Any:
            batches[0] += 1
            loss = backward(*args, **kwargs)
            (tmp_path / f"calls-{world.rank}.json").write_text(json.dumps([batches[0], calls]))
            return loss

        strategy.backward = counted  # type: ignore[method-assign]

    config = configured(*LIGHT, *words, "schedule.gap=1", "schedule.tsp.batch=1")
    completed(run_cluster(tmp_path / "run", trainers, 1, config, after_build=count))
    batches, calls = json.loads((tmp_path / "calls-0.json").read_text())
    per_update = batches // 2
    assert per_update > 4, "too few micro-batches to show anything"
    assert {number for _, number in calls} == {per_update, 2 * per_update}, (
        "reduced in another micro-batch than the last"
    )
    assert len({name for name, _ in calls}) == reduced


def counting(original: Any, name: str, calls: list[tuple[str, int]], batches: list[int]) -> Any:
    """`original`, whose calls with more than a few numbers (a gradient, no flag) are noted with their micro-batch."""

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if max(tensor.numel() for tensor in tensors) > 64:
            calls.append((name, batches[0]))
        return original(*args, **kwargs)

    return call


@pytest.mark.parametrize("tune", TUNES)
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_mixed_precision(tmp_path: Path, sharding: str, tune: str) -> None:
    """bf16 forwards; trained weights, gradients and optimizer state stay fp32, and come close to the fp32 gradient."""
    words = (*LIGHT, "algorithm.ratio_bound=1.0", f"parallel.sharding={sharding}", *TUNES[tune])
    found = completed(run_cluster(tmp_path, 2, 1, configured(*words, "model.dtype=bfloat16")))
    wanted = reference_of(configured(*words))
    assert {value.dtype for value in [*found.gradients[0].values(), *found.weights.values()]} == {torch.float32}
    assert 1e-6 < relative(found.gradients[0], wanted.gradients[0]) < 0.2


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_activation_checkpointing_recomputes_blocks_and_leaves_the_gradient(tmp_path: Path, sharding: str) -> None:
    def count(rank: run.Rank, world: World) -> None:
        if not world.is_trainer:
            return
        forwards = [0, 0]

        def seen(module: nn.Module, *args: Any) -> None:
            forwards[isinstance(module, type(rank.module.policy.transformer))] += 1  # type: ignore[union-attr]
            (tmp_path / f"forwards-{world.rank}.json").write_text(json.dumps(forwards))

        policy: Any = rank.module.policy
        policy.wrap_units()[0].register_forward_pre_hook(seen)
        policy.transformer.register_forward_pre_hook(seen)

    words = (*LIGHT, *FP64, f"parallel.sharding={sharding}", "model.gradient_checkpointing=true")
    config = configured(*words, "schedule.tsp.batch=2")
    found = completed(run_cluster(tmp_path / "run", 2, 1, config, after_build=count))
    plain = configured(*(word for word in words if "checkpointing" not in word))
    assert_equal_runs(found, reference_of(plain, 2), exact=False, double=True, weight_bound=1e-12)
    block, network = json.loads((tmp_path / "forwards-0.json").read_text())
    assert block == 2 * network > 0, "each trained forward runs every block a second time in its backward"


def test_a_mesh_that_does_not_fit_names_both_numbers() -> None:
    with pytest.raises(
        ValueError, match=r"parallel\.shard_group = 4 must divide allocation\.trainers = 6; set it to 2"
    ):
        mesh_of("hsdp", 6, 4, "cpu")
