"""Methods that noise finished samples train in separate ranks what they train with every schedule:
the same scores of the first RL step, and the same weights."""

# Its experiments need digenrl.extensions.methods.
from __future__ import annotations

from pathlib import Path

import pytest
import torch

from digenrl.config import load
from digenrl.config.settings import Settings
from tests.models.tiny_policies import BOTH
from tests.strategy.processes import SGD, TINY, Job, assert_same_cells, completed, run_series
from tests.strategy.test_equality import lend_always

pytestmark = pytest.mark.processes

SCHEDULES = {
    "sync": ("schedule=sync",),
    "gap": ("schedule=sync", "schedule.gap=1"),
    "gap_tsp": ("schedule=gap_tsp",),
    "lent": ("schedule=full", "schedule.gap=2", "schedule.tsp.batch=1", "schedule.async_steps=0"),
}
EXACT = ("gap", "lent")
"""One trainer in canonical order. With TSP it takes steps in one forward, which rounds otherwise."""


def settings_of(method: str, *words: str) -> Settings:
    """The tiny configuration of a method. DGPO's group is one task."""
    tasks = ["sampling.task_size=4"] if method == "dgpo" else []
    return load([f"experiment=digits_{method}", *TINY[1:], *SGD, *tasks, *words]).settings


SOUND = (
    "sampling=ltx2_512x768x121",
    "data=videos",
    "reward=clap",
    "+reward.rewards.clap.for=[audio]",
    "+reward.rewards.size={for:[video],scorer:{_target_:reward_models.jpeg_size.JpegSize}}",
    "+reward.rewards.size.weight=1",
    "hardware=cpu_tiny",
    "max_rl_steps=2",
    "~callbacks.evaluation",
    "logger=none",
)
"""Videos with sound, with a reward for each."""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_reward_for_sound_trains_the_same_weights_with_every_schedule(tmp_path: Path) -> None:
    def settings(*words: str) -> Settings:
        chosen = ["experiment=zimage_turbo_nft", f"model={BOTH}"]
        return load([*chosen, *SOUND, *SGD, *TINY[-2:], *words]).settings

    jobs = [
        Job(name, settings(*SCHEDULES[name]), lend_always if name == "lent" else None)
        for name in ("sync", "lent")
    ]
    plain, lent = (completed(cluster) for _, cluster in run_series(tmp_path, 1, 1, jobs))
    assert_same_cells(lent, plain)
    assert any(bool(gradient.any()) for each in plain.gradients for gradient in each.values())
    for key, value in plain.weights.items():
        assert torch.equal(lent.weights[key], value), key


@pytest.mark.parametrize(
    "method",
    ["dgpo", *(pytest.param(method, marks=pytest.mark.slow) for method in ("awm", "rvm"))],
)
def test_every_schedule_trains_the_same_weights(tmp_path: Path, method: str) -> None:
    """AWM and DGPO keep an old copy of the policy, and DGPO's rollouts may draw with it."""
    jobs = [
        Job(
            name,
            settings_of(method, *words),
            lend_always if name == "lent" else None,
        )
        for name, words in SCHEDULES.items()
    ]
    found = {}
    for job, cluster in run_series(tmp_path, 1, 1, jobs):
        found[job.name] = completed(cluster)
        assert cluster.spans("lend") or job.name != "lent", "no trainer ever lent"
    wanted = found["sync"]
    assert any(bool(gradient.any()) for each in wanted.gradients for gradient in each.values())
    for name in EXACT:
        assert_same_cells(found[name], wanted)
        for key, value in wanted.weights.items():
            assert torch.equal(found[name].weights[key], value), (name, key)
    assert_same_cells(found["gap_tsp"], wanted, steps=[0])
    for key, value in wanted.weights.items():
        torch.testing.assert_close(found["gap_tsp"].weights[key], value, rtol=0, atol=1e-4)
