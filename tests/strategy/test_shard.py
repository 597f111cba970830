"""Sharded trainers, beyond the equality matrix: hsdp on a 2 x 2 mesh, what is reduced and when,
mixed precision."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from digenrl import run
from digenrl.cluster.world import World
from digenrl.models.adapter import cast_parameters
from digenrl.strategy import shard
from digenrl.strategy.checkpoint_io import DirectoryCheckpointIO, newest_valid
from digenrl.strategy.shard import mesh_of
from tests.strategy.processes import (
    FP64,
    FULL,
    Job,
    completed,
    configured,
    relative,
    run_cluster,
    run_series,
)
from tests.strategy.test_equality import LIGHT, assert_equal_runs, reference_of

HSDP = ("parallel.sharding=hsdp", "parallel.shard_group=2")
TUNES: dict[str, tuple[str, ...]] = {"lora": (), "full": FULL}


def checkpoint(run_dir: Path) -> dict[str, Any]:
    return DirectoryCheckpointIO().load_checkpoint(newest_valid(run_dir / "checkpoints"))


def norm(gradient: dict[str, Tensor]) -> float:
    return float(
        torch.stack([value.double().square().sum() for value in gradient.values()]).sum().sqrt()
    )


@pytest.mark.processes
@pytest.mark.slow
def test_hsdp_on_a_two_by_two_mesh_equals_the_reference(tmp_path: Path) -> None:
    """Gradients, clipping by the global norm, published weights, moving average; LoRA and all
    weights."""
    words = (
        "schedule.gap=2",
        "schedule.tsp.shard=true",
        "sampling.task_size=4",
        "callbacks.checkpoint.every=2",
    )
    clip = ("algorithm.max_grad_norm=0.05", "+algorithm/ema=default", "algorithm.ema.every=1")

    def jobs(*more: str) -> list[Job]:
        return [
            Job(name, configured(*LIGHT, *FP64, *words, *clip, *tune, *more))
            for name, tune in TUNES.items()
        ]

    averages = {
        job.name: checkpoint(c.run_dir)["algorithm"]["ema"]
        for job, c in run_series(tmp_path / "1", 1, 1, jobs())
    }
    equal, unequal = (
        jobs(*HSDP),
        jobs(*HSDP, "schedule.shares=[3,3,1,1]"),
    )  # one node has more blocks at once
    runs = (
        run_series(tmp_path / "4", 4, 1, equal),
        run_series(tmp_path / "unequal", 4, 1, unequal),
    )
    for job, cluster in itertools.chain.from_iterable(runs):
        found, wanted = completed(cluster), reference_of(job.config)
        assert all(norm(gradient) > 0.05 for gradient in wanted.gradients), (
            "clipping would not be tested"
        )
        assert_equal_runs(found, wanted, exact=False, double=True, weight_bound=1e-12)
        average = checkpoint(cluster.run_dir)["algorithm"]["ema"]
        assert relative(average, averages[job.name]) <= 1e-12
        assert relative(average, wanted.weights) > 1e-6, (
            "the average must differ from the weights to show anything"
        )


@pytest.mark.processes
@pytest.mark.parametrize(
    ("trainers", "words", "reduced"),
    [
        pytest.param(2, ("parallel.sharding=ddp",), 1, id="ddp", marks=pytest.mark.slow),
        pytest.param(2, ("parallel.sharding=fsdp",), 1, id="fsdp"),
        pytest.param(4, HSDP, 2, id="hsdp", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_reduced_once_per_update(
    tmp_path: Path, trainers: int, words: tuple[str, ...], reduced: int
) -> None:
    """`reduced`: kinds of collectives that carry a gradient. Every other micro-batch sends none of
    it."""

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
    """`original`, whose calls with more than a few numbers (a gradient, no flag) are noted with
    their micro-batch."""

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if max(tensor.numel() for tensor in tensors) > 64:
            calls.append((name, batches[0]))
        return original(*args, **kwargs)

    return call


@pytest.mark.processes
@pytest.mark.parametrize(
    ("sharding", "tune"),
    [
        ("ddp", "lora"),
        pytest.param("fsdp", "full", marks=pytest.mark.slow),
        pytest.param("ddp", "full", marks=pytest.mark.slow),
        pytest.param("fsdp", "lora", marks=pytest.mark.slow),
    ],
)
def test_mixed_precision(tmp_path: Path, sharding: str, tune: str) -> None:
    """bf16 forwards; trained weights, gradients and optimizer state stay fp32, and come close to
    the fp32 gradient."""
    words = (*LIGHT, "algorithm.ratio_bound=1.0", f"parallel.sharding={sharding}", *TUNES[tune])
    found = completed(run_cluster(tmp_path, 2, 1, configured(*words, "model.dtype=bfloat16")))
    wanted = reference_of(configured(*words))
    assert {value.dtype for value in [*found.gradients[0].values(), *found.weights.values()]} == {
        torch.float32
    }
    assert 1e-6 < relative(found.gradients[0], wanted.gradients[0]) < 0.2


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.skipif(
    "param_dtype_override_fn" not in MixedPrecisionPolicy.__dataclass_fields__,
    reason="before PyTorch 2.15 FSDP2 cannot keep single parameters of a block in fp32",
)
def test_all_weights_trained_in_bf16_are_gathered_in_bf16(tmp_path: Path) -> None:
    """Half the bytes of what autocast would cast, norms in fp32. The first ratios are those of
    equal weights, and the gradient is the single process's, whose forwards autocast from the same
    fp32 weights."""

    def count(rank: run.Rank, world: World) -> None:
        if not world.is_trainer:
            return
        policy: Any = rank.module.policy
        parameters = list(policy.wrap_units()[0].parameters())
        cast = {id(p) for module in policy.modules() for p in cast_parameters(module)}
        wanted = [
            sum(p.numel() for p in parameters if (id(p) in cast) == narrow)
            for narrow in (True, False)
        ]
        sizes: set[int] = set()
        for name in (
            "all_gather_into_tensor",
            "all_gather_single",
        ):  # PyTorch 2.15 renamed the second from the first
            if hasattr(dist, name):
                note = tmp_path / f"gathered-{world.rank}.json"
                setattr(dist, name, measuring(getattr(dist, name), sizes, note, wanted))

    config = configured(
        *LIGHT, *FULL, "model.dtype=bfloat16", "parallel.sharding=fsdp", "max_rl_steps=1"
    )
    found = completed(cluster := run_cluster(tmp_path / "run", 2, 1, config, after_build=count))
    wanted = reference_of(config)
    (narrow, fp32), sizes = json.loads((tmp_path / "gathered-0.json").read_text())
    assert fp32 > 0, "a block without norms would show less"
    exact = 2 * narrow + 4 * fp32
    assert any(exact <= size < 1.05 * exact for size in sizes), (
        f"no gather of about {exact} bytes in {sorted(sizes)}"
    )
    assert not any(0.95 < size / (4 * (narrow + fp32)) < 1.05 for size in sizes), (
        "a block was gathered in fp32"
    )
    assert cluster.metrics()[0]["first_ratio_max_dev"] <= 1e-5
    assert {value.dtype for value in [*found.gradients[0].values(), *found.weights.values()]} == {
        torch.float32
    }
    assert relative(found.gradients[0], wanted.gradients[0]) <= 1e-2


def measuring(original: Any, sizes: set[int], path: Path, wanted: list[int]) -> Any:
    """`original`, whose largest tensor's bytes are noted at each call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        sizes.add(max(tensor.numel() * tensor.element_size() for tensor in tensors))
        path.write_text(json.dumps([wanted, sorted(sizes)]))
        return original(*args, **kwargs)

    return call


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_activation_checkpointing_recomputes_blocks_and_leaves_the_gradient(
    tmp_path: Path, sharding: str
) -> None:
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
    assert block == 2 * network > 0, (
        "each trained forward runs every block a second time in its backward"
    )


def test_a_mesh_that_does_not_fit_names_both_numbers() -> None:
    with pytest.raises(
        ValueError,
        match=r"parallel\.shard_group = 4 must divide allocation\.trainers = 6; set it to 2",
    ):
        mesh_of("hsdp", 6, 4, "cpu")


def test_meshes_have_a_row_for_each_whole_group(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def made(device: str, shape: tuple[int, ...], *, mesh_dim_names: tuple[str, ...]) -> str:
        asked.append((device, repr(shape), mesh_dim_names))
        return "mesh"

    monkeypatch.setattr(shard, "init_device_mesh", made)
    for sharding, group in (("fsdp", 4), ("hsdp", 2), ("hsdp", 6)):
        assert mesh_of(sharding, 6, group, "cpu") == "mesh"
    names = ("replicate", "shard")
    assert asked == [
        ("cpu", "(6,)", ("shard",)), ("cpu", "(3, 2)", names), ("cpu", "(1, 6)", names),
    ]  # fmt: skip
