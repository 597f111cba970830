"""Less work for the same gradient: what cannot have a gradient is not trained, and replicas compute
no stand-ins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from digenrl import config as configuration
from digenrl.advisor import PlainAdvisor
from digenrl.schedule import group_tasks, place_fragment
from digenrl.settle import with_allocation
from digenrl.transport.cells import StepBoard
from tests.strategy.processes import FP64, Cluster, completed, configured, relative, run_cluster
from tests.strategy.test_equality import LIGHT
from tests.strategy.test_invariants import SPEC, part, placed

BEST_AND_WORST = (
    "algorithm/advantage=best_and_worst",
    "algorithm.advantage.best_and_worst=1",
    "algorithm.kl_weight=0",
)
"""2 of each group's 4 samples have an advantage."""


def cells(cluster: Cluster) -> dict[str, int]:
    """Cells of the whole run, by what became of them."""
    rows = [row for row in cluster.metrics() if "cells_trained" in row]
    return {name: int(sum(row[f"cells_{name}"] for row in rows)) for name in ("trained", "skipped")}


def test_a_block_keeps_the_rows_that_have_a_gradient() -> None:
    useful = torch.tensor([[True, False, False, False], [True] * 4])
    board = StepBoard(SPEC, placed, 0, 0, {"r": 1.0}, lambda rewards: useful)
    tasks = [part(task) for task in group_tasks(SPEC, 0, 0)]
    for task in tasks:
        board.add_part(task)
    blocks = [block for batch in board.micro_batches((0,)) for block in batch.blocks]
    assert [block.numbers for block in blocks] == [(0,)] * 3, (
        "task 1 of the group has nothing to train"
    )
    whole = tasks[0].cell_block((0, 1, 2))
    for k, block in enumerate(blocks):
        assert torch.equal(block.latents, whole.latents[:1, k : k + 1])
        assert torch.equal(block.log_probs, whole.log_probs[:1, k : k + 1])


@pytest.mark.processes
@pytest.mark.parametrize(
    ("trainers", "words"),
    [
        pytest.param(
            2, ("schedule.gap=1", "schedule.tsp.shard=true"), id="ddp", marks=pytest.mark.slow
        ),
        pytest.param(
            2,
            ("schedule.gap=1", "parallel.sharding=fsdp", "schedule.tsp.shard=true"),
            id="fsdp",
            marks=pytest.mark.slow,
        ),
        pytest.param(1, ("schedule.gap=2", "schedule.tsp.batch=all"), marks=pytest.mark.slow),
        pytest.param(2, ("schedule.tsp.batch=2", "schedule.shares=[2,1]"), marks=pytest.mark.slow),
        pytest.param(2, ("schedule=full",), marks=pytest.mark.slow),
    ],
)
def test_the_gradient_is_that_of_training_everything(
    tmp_path: Path, trainers: int, words: tuple[str, ...]
) -> None:
    runs = {}
    for skip in ("true", "false"):
        config = configured(*LIGHT, *FP64, *BEST_AND_WORST, *words, f"schedule.skip_zero={skip}")
        runs[skip] = run_cluster(tmp_path / skip, trainers, 1, config)
    less, all_of_it = completed(runs["true"]), completed(runs["false"])
    for mine, theirs in zip(less.gradients, all_of_it.gradients, strict=True):
        assert relative(mine, theirs) <= 1e-12
    assert len(less.cells) * 2 == len(all_of_it.cells) == cells(runs["false"])["trained"]
    assert cells(runs["true"]) == {"trained": len(less.cells), "skipped": len(less.cells)}
    if "parallel.sharding=fsdp" not in words:
        assert set(less.padded.values()) == {0}
    same = ("reward", "reward_std", "zero_variance_groups", "grad_norm", "first_ratio_max_dev")
    for mine, theirs in zip(runs["true"].metrics(), runs["false"].metrics(), strict=True):
        for name in set(same) & (mine.keys() | theirs.keys()):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-6, abs=1e-12), name


@pytest.mark.processes
@pytest.mark.slow
def test_hunyuans_recipe_trains_8_of_24_samples(tmp_path: Path) -> None:
    """The 4 best and the 4 worst, wherever its two updates a batch have them: counted by what was
    trained."""
    words = (
        "experiment=hunyuanvideo_dancegrpo",
        "hardware=cpu_tiny",
        "~reward.heldout",
        "logger=none",
    )
    more = ("schedule=colocated", "callbacks=default", "~callbacks.evaluation", "max_rl_steps=1")
    group = (
        "data.group_size=24",
        "data.prompts_per_batch=1",
        "sampling.task_size=4",
        "sampling.steps=4",
    )
    config = with_allocation(
        configuration.load([*words, *more, *group, "sampling.height=32", "sampling.width=32"]),
        1,
        0,
        PlainAdvisor(),
    ).settings
    cluster = run_cluster(tmp_path, 1, 0, config)
    record = completed(cluster)
    assert len({sample for _, _, sample, _ in record.cells}) == 8
    steps = len(record.cells) // 8
    assert cells(cluster) == {"trained": 8 * steps, "skipped": 16 * steps}


@pytest.mark.processes
def test_replicas_share_groups_of_one_task_and_compute_no_stand_ins(tmp_path: Path) -> None:
    """One task a group, all its steps in one forward: of four groups each of two trainers trains
    two."""
    words = ("sampling.task_size=4", "schedule.gap=1", "schedule.tsp.batch=all")
    cluster = run_cluster(tmp_path, 2, 0, configured(*LIGHT, *FP64, *words))
    record = completed(cluster)
    owners = {key[1]: ranks for key, ranks in record.trained_by.items()}
    assert owners == {0: [0], 1: [1], 2: [0], 3: [1]}
    assert set(record.padded.values()) == {0}


@pytest.mark.processes
@pytest.mark.parametrize("sharding", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_step_that_teaches_nothing_changes_what_a_gradient_of_zero_changes(
    tmp_path: Path, sharding: str
) -> None:
    """A constant reward: nobody trains a cell, and the optimizer does with its moments what it
    would have done."""
    words = (
        f"parallel.sharding={sharding}",
        "schedule.gap=1",
        "algorithm.kl_weight=0",
        "max_rl_steps=2",
    )
    constant = (
        "allow_targets=[tests]",
        "reward.rewards.judge_a.scorer._target_=tests.strategy.faults.Indifferent",
    )
    cluster = run_cluster(tmp_path, 2, 1, configured(*LIGHT, *FP64, *words, *constant))
    record = completed(cluster)
    assert cells(cluster)["trained"] == 0
    assert all(
        not gradient.any() for gradients in record.gradients for gradient in gradients.values()
    )


@pytest.mark.parametrize(("neighbours", "blocks"), [(2, [1, 0]), (0, [1, 1])])
def test_padding_keeps_neighbours_in_step_and_all_where_gradients_are_reduced(
    neighbours: int, blocks: list[int]
) -> None:
    """Rank 2 of two pairs has one block of six, the first pair two each."""
    spec = replace(SPEC, tsp_shard=True, shares=(3.0, 3.0, 1.0, 1.0))
    board = StepBoard(
        spec,
        lambda f: place_fragment(spec, 4, f),
        2,
        0,
        {"r": 1.0},
        lockstep=True,
        neighbours=neighbours,
    )
    for task in group_tasks(spec, 0, 0):
        board.add_part(part(task))
    assert [len(batch.blocks) for batch in board.micro_batches((0,))] == blocks
    assert [len(batch.blocks) for batch in board.micro_batches((0,), last=True)] == [1, 1]
