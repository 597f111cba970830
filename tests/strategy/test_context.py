"""Trainers that share the tokens of a forward compute what they compute alone: samples, gradients,
weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from digenrl import config as configuration
from digenrl import parts, run
from digenrl.cluster.world import World
from digenrl.config.settings import Settings
from digenrl.facts import facts_by_family
from tests.strategy.processes import (
    FEW,
    FP64,
    SGD,
    SMALL,
    Job,
    Record,
    completed,
    relative,
    run_series,
)

FAMILIES = {
    "wan": ("experiment=wan21_flowgrpo",),
    "hunyuan": ("experiment=hunyuanvideo_dancegrpo", "~reward.heldout"),
    "hunyuan15": ("experiment=hunyuan15_flowgrpo",),
}
KEPT = "model.gradient_checkpointing=false"
TOGETHER = ("parallel.context=2",)


def configured(family: str, *words: str) -> Settings:
    return configuration.load([*SMALL, *SGD, *FP64, *FEW, *FAMILIES[family], *words]).settings


def records(path: Path, trainers: int, **jobs: Settings) -> dict[str, Record]:
    """One run after the other in the same ranks."""
    series = run_series(path, trainers, 1, [Job(name, config) for name, config in jobs.items()])
    return {job.name: completed(cluster) for job, cluster in series}


def assert_equal(found: Record, wanted: Record, group: int) -> None:
    """To 1e-10; each cell is trained by all ranks of one group."""
    assert len(found.gradients) == len(wanted.gradients) > 0
    for mine, theirs in zip(found.gradients, wanted.gradients, strict=True):
        assert relative(mine, theirs) <= 1e-10
    assert found.cells.keys() == wanted.cells.keys()
    for key, cell in wanted.cells.items():
        first, *others = found.trained_by[key]
        assert first % group == 0
        assert others == list(range(first + 1, first + group))
        assert found.cells[key].version == cell.version
        torch.testing.assert_close(found.cells[key].latents, cell.latents, rtol=0, atol=1e-10)
    assert relative(found.weights, wanted.weights) <= 1e-10


@pytest.mark.processes
def test_a_context_group_equals_replicas(tmp_path: Path) -> None:
    """HunyuanVideo with texts of odd lengths, and every block repeated in the backward pass."""
    own = {"wan": (KEPT,), "hunyuan": ("model.gradient_checkpointing=true",)}
    jobs = {name: configured(name, *words) for name, words in own.items()}
    together = {
        f"{name} together": configured(name, *words, *TOGETHER) for name, words in own.items()
    }
    found = records(tmp_path, 2, **jobs, **together)
    for name in jobs:
        assert_equal(found[f"{name} together"], found[name], 2)


@pytest.mark.slow
@pytest.mark.processes
def test_four_ranks_keep_parts_of_the_activations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Builds of four heads, whose texts have lengths that four does not divide; bytes as autograd
    keeps them."""
    monkeypatch.setenv("DIGENRL_CACHE", str(tmp_path / "cache"))
    for family in (family for family, facts in facts_by_family().items() if facts.context):
        monkeypatch.setitem(facts_by_family()[family].tiny["transformer"], "num_attention_heads", 4)

    def count(rank: run.Rank, world: World) -> None:
        step = rank.strategy.training_step
        weights = {parameter.data_ptr() for parameter in rank.module.parameters()}

        def counted(*args: Any, **kwargs: Any) -> Any:
            seen: dict[int, int] = {}

            def pack(tensor: torch.Tensor) -> torch.Tensor:
                if tensor.data_ptr() not in weights:
                    seen[tensor.data_ptr()] = tensor.nbytes
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = step(*args, **kwargs)
            path = rank.strategy.session.run_dir / f"bytes-{world.rank}"
            path.write_text(
                str(max(sum(seen.values()), int(path.read_text()) if path.exists() else 0))
            )
            return loss

        rank.strategy.training_step = counted  # type: ignore[method-assign]

    large = ("sampling.height=192", "sampling.width=192", "sampling.steps=2", KEPT)
    jobs = [
        Job(f"{f} {n}", configured(f, *large, f"parallel.context={n}"), count)
        for f in FAMILIES
        for n in (1, 4)
    ]
    found, kept = {}, {}
    for job, cluster in run_series(tmp_path / "run", 4, 1, jobs):
        found[job.name] = completed(cluster)
        kept[job.name] = max(int(path.read_text()) for path in cluster.run_dir.glob("bytes-*"))
    for family in FAMILIES:
        assert_equal(found[f"{family} 4"], found[f"{family} 1"], 4)
        assert (
            kept[f"{family} 4"] < 0.5 * kept[f"{family} 1"]
        )  # the text's, and what comes before, are on all


CASES = {
    "fragments": ("schedule.gap=1", "schedule.tsp.shard=true"),
    "lending": ("schedule=gap_tsp_tag",),
    "products": ("model.gradient_checkpointing=products",),
}


@pytest.mark.slow
@pytest.mark.processes
def test_two_context_groups_equal_one_trainer_and_sharded_ones_themselves(tmp_path: Path) -> None:
    """All weights of HunyuanVideo are sharded; Wan sums the gradients of its modulations over the
    tokens in fp32."""
    two_steps = ("max_rl_steps=2", "data.prompts_per_batch=2")
    (wanted,) = records(tmp_path / "1", 1, alone=configured("wan", *two_steps)).values()
    jobs = {name: configured("wan", *words, *two_steps, *TOGETHER) for name, words in CASES.items()}
    sharded = ("hunyuan", "parallel.sharding=fsdp")
    jobs |= {"alone": configured(*sharded), "together": configured(*sharded, *TOGETHER)}
    found = records(tmp_path / "4", 4, **jobs)
    for name in CASES:
        assert_equal(found[name], wanted, 2)
    assert_equal(found["together"], found["alone"], 2)


@pytest.mark.parametrize(
    ("family", "words", "said"),
    [
        (
            "wan",
            ("parallel.context=3", "allocation.trainers=3"),
            "must divide the 2 attention heads of wan and the 32",
        ),
        ("wan", ("parallel.context=2", "model.compile=true"), "compiled blocks cannot be divided"),
        (
            "wan",
            ("parallel.context=2", "model=sd35_medium"),
            "the tokens of sd3 are not divided among trainers",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(family: str, words: tuple[str, ...], said: str) -> None:
    config = configured(family, *words)
    with pytest.raises(ValueError, match=said):
        parts.check_parts(config)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("parallel.context=2", "allocation.trainers=3"), "must divide allocation.trainers = 3"),
        (
            ("parallel.context=2", "allocation.trainers=2", "schedule.shares=measured"),
            "equally fast",
        ),
        (
            ("parallel.context=3", "hardware=node_8xh100"),
            "the 8 GPUs of a node of hardware.pools.h100",
        ),
        (("parallel.context=0",), "parallel.context = 0"),
    ],
)
def test_groups_that_do_not_fit_the_ranks_are_refused(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(configuration.ConfigError, match=said):
        configured("wan", *words)
