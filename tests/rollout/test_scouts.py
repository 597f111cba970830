"""Scouts (`sampling.scouts`): cheap tries choose the initial noises, and what they choose is
generated exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from digenrl.data import load_prompts
from digenrl.diffusion import denoise
from digenrl.diffusion.sde import FlowSDE
from digenrl.extensions.methods.noise_levels import NoiseLevels
from digenrl.extensions.tasks.digits import DigitsPolicy
from digenrl.rewards.suite import RewardSuite
from digenrl.rollout.engine import RolloutEngine, SamplingSpec
from digenrl.rollout.scouts import ScoutingEngine
from digenrl.schedule import Task
from tests.strategy.processes import assert_same_cells, completed, configured, run_cluster

SCORER = {"_target_": "reward_models.digit_judge.DigitJudge", "judge": "a", "output": "probability"}
STEPS, CANDIDATES, SCOUT_STEPS = 6, 4, 2
TASK = Task(step=3, index=1, group=0, first_sample=4, samples=4, version=0)
(PROMPT,) = load_prompts("digits.jsonl")[4:5]


def engine(**sampling: int) -> RolloutEngine:
    rewards = RewardSuite({"judge": {"scorer": SCORER}}, placement="inline")
    arguments = DigitsPolicy(), rewards, FlowSDE(0.9), NoiseLevels(size=3), SamplingSpec(STEPS)
    return (
        ScoutingEngine(*arguments, seed=5, **sampling)
        if sampling
        else RolloutEngine(*arguments, seed=5)
    )


def finished(made: RolloutEngine, task: Task) -> tuple[tuple[int, ...], Tensor, Tensor]:
    """(numbers of the noises, clean latents, scores) of a task."""
    generation = made.begin_task(task, PROMPT)
    while made.steps_left(generation):
        generation = made.take_step(generation)
    scored = made.score(generation, made.decode(generation)).result()
    assert scored.final is not None
    return generation.state.key.samples, scored.final, scored.rewards["judge"]


@torch.no_grad()
def tried(made: RolloutEngine, numbers: range) -> Tensor:
    """Scores of the noises `numbers` after an ODE of few steps."""
    key = denoise.SampleKey(made.seed, TASK.step, PROMPT.uid, tuple(numbers))
    start = denoise.initial_state(key, made.policy.latent_shape)
    grid = made.policy.sigma_grid(SCOUT_STEPS)
    final = denoise.ode_sample(made.policy, made.policy.codec.encode([PROMPT]), start.latents, grid)
    return made._rewards.score(made.policy.codec.decode(final), [PROMPT] * len(numbers))["judge"]


def test_the_best_and_the_worst_noises_are_generated_as_without_scouts() -> None:
    scouted = engine(candidates=CANDIDATES, scout_steps=SCOUT_STEPS)
    numbers = range(TASK.first_sample * CANDIDATES, (TASK.first_sample + TASK.samples) * CANDIDATES)
    chosen, final, scores = finished(scouted, TASK)
    order = [numbers[i] for i in tried(scouted, numbers).argsort().tolist()]
    assert set(chosen) == {*order[:2], *order[-2:]}
    plain = Task(TASK.step, 0, 0, numbers.start, len(numbers), 0)
    every, whole, _ = finished(engine(), plain)
    assert every == tuple(numbers)
    for row, number in enumerate(chosen):
        torch.testing.assert_close(final[row], whole[number - numbers.start])
    assert scores.max() - scores.min() > 0


def test_a_suspended_task_keeps_what_its_scouts_chose() -> None:
    first, second = (engine(candidates=CANDIDATES, scout_steps=SCOUT_STEPS) for _ in range(2))
    begun = first.take_step(first.begin_task(TASK, PROMPT))
    while second.steps_left(begun):
        begun = second.take_step(begun)
    assert begun.state.key.samples == finished(first, TASK)[0]


def test_off_is_one_candidate() -> None:
    assert finished(engine(), TASK)[0] == (4, 5, 6, 7)
    assert torch.equal(
        finished(engine(), TASK)[1], finished(engine(candidates=1, scout_steps=2), TASK)[1]
    )


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            ("algorithm=nft", "~algorithm.clip_range", "sampling.scouts.candidates=3"), id="scouts"
        ),
        pytest.param(
            (
                "algorithm/train_steps=random_subset",
                "algorithm.train_steps.size=1",
                "algorithm.train_steps.untrained=ode",
                "algorithm.train_steps.per_prompt=true",
                "algorithm.step_weight=rectified",
            ),
            id="a step for each prompt",
        ),
    ],
)
def test_the_samples_are_the_same_in_every_schedule(tmp_path: Path, words: tuple[str, ...]) -> None:
    together = completed(run_cluster(tmp_path / "0", 1, 0, configured(*words)))
    apart = ("schedule=gap_tsp_tag",)
    assert_same_cells(
        completed(run_cluster(tmp_path / "1", 1, 2, configured(*words, *apart))),
        together,
        steps=(0,),
    )
