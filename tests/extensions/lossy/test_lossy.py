"""Forecast velocities (`sampling.lossy`): what is computed, what is not, and where they are
refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import TaylorSeerCacheConfig
from torch import Tensor

from digenrl import config as configuration
from digenrl.data import load_prompts
from digenrl.diffusion.sde import FlowSDE
from digenrl.extensions.forward.steps import NoiseLevels
from digenrl.extensions.lossy.engine import ForecastingEngine
from digenrl.extensions.tasks.digits import DigitsPolicy
from digenrl.rewards.suite import RewardSuite
from digenrl.rollout.engine import Generation, RolloutEngine, SamplingSpec
from digenrl.run import engine_of
from digenrl.schedule import Task

SCORER = {"_target_": "reward_models.digit_judge.DigitJudge", "judge": "a", "output": "probability"}
STEPS = 10
TASK = Task(step=3, index=1, group=0, first_sample=4, samples=4, version=0)
(PROMPT,) = load_prompts("digits.jsonl")[4:5]


def engine(kind: type[RolloutEngine] = ForecastingEngine) -> RolloutEngine:
    rewards = RewardSuite({"judge": {"scorer": SCORER}}, placement="inline")
    return kind(
        DigitsPolicy(), rewards, FlowSDE(0.0), NoiseLevels(size=3), SamplingSpec(STEPS), seed=5
    )


def advanced(made: RolloutEngine, generation: Generation, steps: int) -> Generation:
    for _ in range(steps):
        generation = made.advance(generation)
    return generation


def finals(made: RolloutEngine) -> Tensor:
    return advanced(made, made.begin(TASK, PROMPT), STEPS).state.latents


def levels(made: RolloutEngine) -> list[float]:
    """Noise levels at which the engine's policy is asked, filled while it generates."""
    asked, own = list[float](), made.policy.velocity

    def velocity(latents: Tensor, sigmas: Tensor, condition: Any) -> Tensor:
        asked.append(float(sigmas[0]))
        return own(latents, sigmas, condition)

    object.__setattr__(made.policy, "velocity", velocity)
    return asked


def test_after_three_steps_every_second_velocity_is_computed() -> None:
    made = engine()
    asked = levels(made)
    finals(made)
    assert asked == pytest.approx([float(made.grid[k]) for k in (0, 1, 2, 4, 6, 8)])
    asked.clear()
    made.evaluate([PROMPT], samples_per_prompt=1, seed=0)
    assert len(asked) == STEPS


def test_the_forecast_is_that_of_diffusers() -> None:
    hooked = engine(RolloutEngine)
    network: Any = hooked.policy.transformer
    network.enable_cache(
        TaylorSeerCacheConfig(
            cache_interval=2,
            disable_cache_before_step=3,
            taylor_factors_dtype=torch.float32,
            use_lite_mode=True,
        )
    )
    with network.cache_context("task"):
        theirs = finals(hooked)
    made = finals(engine())
    torch.testing.assert_close(made, theirs, rtol=1e-4, atol=1e-4)
    assert (made - finals(engine(RolloutEngine))).abs().max() > 1e-2


def test_a_rank_that_goes_on_with_a_task_computes_what_it_cannot_forecast() -> None:
    """Step 5 is forecast by who took the steps before it, and by nobody else, also where another
    task came between."""
    made = engine()
    before = advanced(made, made.begin(TASK, PROMPT), 5)
    exact = engine(RolloutEngine).advance(before).state.latents
    torch.testing.assert_close(engine().advance(before).state.latents, exact, rtol=0, atol=0)
    assert not torch.equal(made.advance(before).state.latents, exact)
    made.advance(made.begin(Task(3, 2, 0, 8, 4, 0), PROMPT))
    torch.testing.assert_close(made.advance(before).state.latents, exact, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["experiment=digits_flowgrpo"], r"the loss replays the steps of the sampler"),
        (["experiment=digits_solrl"], r"sampling.scouts.candidates = 4: not built together"),
        (["experiment=digits_sft"], r"data.samples = files: nothing is generated"),
        (
            ["experiment=digits_nft", "parallel.sharding=fsdp", "allocation.trainers=2"],
            r"parallel.sharding = fsdp: sharded ranks meet in every forward",
        ),
    ],
)
def test_it_is_refused_where_the_loss_sees_the_sampler_or_ranks_must_meet(
    words: list[str], reason: str
) -> None:
    with pytest.raises(configuration.ConfigError, match=reason):
        configuration.load([*words, "sampling.lossy=taylorseer"])


def test_a_run_that_asks_for_it_gets_it() -> None:
    config = configuration.load(["experiment=digits_nft", "sampling.lossy=taylorseer"]).config
    module = configuration.instantiate(config.algorithm, policy=DigitsPolicy())
    rewards = configuration.instantiate(config.reward)
    assert isinstance(engine_of(config, module, rewards), ForecastingEngine)
