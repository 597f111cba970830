"""2 RL steps + resume + 2 are the same run as 4: weights, gradients and samples, bit for bit. The
prompt stream stops in the middle of an epoch (4 of 10 prompts)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from digenrl.strategy.checkpoints import Checkpoints
from tests.strategy.processes import FULL, assert_same_cells, completed, configured, run_cluster

SMALL = (
    "data.prompts_per_batch=2",
    "sampling.steps=3",
    "callbacks.checkpoint.every=2",
    "algorithm.kl_weight=0.05",
)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("trainers", "rollouts", "words"),
    [
        pytest.param(1, 1, ("schedule.gap=1",), marks=pytest.mark.slow),
        (1, 1, ("schedule.async_steps=1", "schedule.gap=1", "schedule.tag=true")),
        pytest.param(
            1,
            0,
            ("algorithm.updates_per_batch=2", "+algorithm/ema=default"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2,
            1,
            ("data.oversample=2", "data.zero_variance_groups=drop", "schedule.gap=1"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2,
            1,
            ("parallel.sharding=fsdp", *FULL, "+algorithm/ema=default"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            4, 1, ("parallel.sharding=hsdp", "parallel.shard_group=2"), marks=pytest.mark.slow
        ),
    ],
    ids=[
        "sync",
        "async",
        "colocated-two-updates-ema",
        "oversampled",
        "fsdp-all-weights-ema",
        "hsdp",
    ],
)
def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(
    tmp_path: Path, trainers: int, rollouts: int, words: tuple[str, ...]
) -> None:
    whole = configured(*SMALL, *words, "max_rl_steps=4")
    uninterrupted = completed(run_cluster(tmp_path / "whole", trainers, rollouts, whole))
    # The first half must not know that it ends: with asynchrony step 1 already generates for step
    # 2.
    cut = run_cluster(
        tmp_path / "halves",
        trainers,
        rollouts,
        whole,
        after_build=lambda rank, world: _stop_after(rank, 2),
    )
    first = completed(cut)
    second = completed(run_cluster(tmp_path / "halves", trainers, rollouts, whole, resume=True))
    assert {key[0] for key in first.cells} == {0, 1}
    assert {key[0] for key in second.cells} == {2, 3}
    assert_same_cells(first, uninterrupted, steps=[0, 1])
    assert_same_cells(second, uninterrupted, steps=[2, 3])
    updates = len(uninterrupted.gradients)
    gradients = [*first.gradients, *second.gradients]
    assert len(gradients) == updates
    for mine, theirs in zip(gradients, uninterrupted.gradients, strict=True):
        assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())
    assert all(
        torch.equal(second.weights[name], tensor) for name, tensor in uninterrupted.weights.items()
    )
    if whole.schedule.async_steps:
        assert {cell.version for key, cell in second.cells.items() if key[:2] == (2, 0)} == {1}


def _stop_after(rank: object, steps: int) -> None:
    """End the fit after `steps` epochs, as a stop request does: the schedule still plans for the
    whole run."""
    rank.trainer.fit_loop.max_epochs = steps  # type: ignore[attr-defined]


def test_a_resumed_optimizer_keeps_its_moments_and_takes_the_learning_rate_of_the_configuration():
    weight = torch.nn.Parameter(torch.ones(2))
    old = torch.optim.AdamW([weight], lr=0.1)
    weight.grad = torch.ones(2)
    old.step()
    new = torch.optim.AdamW([weight], lr=0.2)
    Checkpoints.load_optimizers([new], {"optimizer_states": [old.state_dict()]})
    assert new.param_groups[0]["lr"] == 0.2
    assert torch.equal(new.state[weight]["exp_avg"], old.state[weight]["exp_avg"])
