"""How far a policy is from its base model, against sums that can be written down."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from digenrl import keys
from digenrl.diffusion.sde import Kernel
from digenrl.diffusion.sigmas import step_sigmas
from digenrl.extensions.methods.sde import LinearSDE
from digenrl.extensions.tasks.digits import DigitsPolicy
from digenrl.rollout.divergence import KERNEL, noisy_trajectories
from digenrl.types import Prompt
from tests.callbacks.test_evaluation import engine_of
from tests.extensions.tasks.test_digits import perturbed

SHIFT = 0.3
LORA = {"rank": 2, "alpha": 4, "targets": ["to_q", "to_v"]}


class Shifted(DigitsPolicy):
    """A policy whose velocity is exactly the base's plus a constant in each dimension."""

    def velocity(self, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
        return super().velocity(latents, sigmas, condition) + (
            0.0 if self.adapter.in_reference else SHIFT
        )


def drawn(policy: DigitsPolicy, kernel: Kernel = KERNEL) -> tuple[Tensor, Tensor]:
    def draw(step: int) -> Tensor:
        return keys.noise(3, 0, 7, range(4), step, policy.latent_shape)

    return noisy_trajectories(
        policy, policy.codec.encode([Prompt("number one")]), policy.sigma_grid(5), draw, kernel
    )


@pytest.mark.parametrize("kernel", [KERNEL, LinearSDE(0.4)])
def test_a_constant_shift_of_the_velocity_has_the_divergence_of_its_means(kernel: Kernel) -> None:
    policy = Shifted(keep_reference=True)
    grid, dimensions = policy.sigma_grid(5), policy.latent_shape[0] * policy.latent_shape[1]
    levels = step_sigmas(grid, torch.arange(5))
    nothing = torch.zeros(5, 1)
    with_shift, without = (
        kernel.transition(nothing, torch.full((5, 1), velocity), *levels, next_latents=nothing)
        for velocity in (SHIFT, 0.0)
    )
    scale = without.std * without.sqrt_h
    wanted = dimensions * float(((with_shift.mean - without.mean)[:, 0] / scale).square().sum()) / 2
    assert drawn(policy, kernel)[1].tolist() == pytest.approx([wanted] * 4, rel=1e-4)


def test_an_adapter_that_does_nothing_is_not_away_and_the_base_alone_never_is() -> None:
    policy = DigitsPolicy(lora=LORA)
    samples, nats = drawn(policy)
    assert nats.tolist() == [0.0] * 4
    perturbed(policy)
    moved, away = drawn(policy)
    assert bool((away > 0).all())
    assert not torch.equal(moved, samples)
    with policy.adapter.reference():
        again, none = drawn(policy)
        assert policy.adapter.in_reference
    assert torch.equal(again, samples)
    assert none.tolist() == [0.0] * 4
    assert not policy.adapter.in_reference


def test_an_evaluation_measures_so_many_samples_of_a_prompt_and_draws_the_same_as_ever() -> None:
    policy = perturbed(DigitsPolicy(lora=LORA))
    engine, prompts = engine_of(policy), [Prompt("number one"), Prompt("number two")]
    plain, measured = (
        engine.evaluate_prompts(prompts, 3, seed=5, kl_samples=count) for count in (0, 2)
    )
    assert torch.equal(plain.media, measured.media)
    assert bool(plain.kl.isnan().all())
    assert measured.kl.isnan().tolist() == [False, False, True] * 2
    assert bool((measured.kl[~measured.kl.isnan()] > 0).all())
