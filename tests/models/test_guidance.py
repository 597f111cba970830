"""Classifier-free guidance: check 18 of docs/algorithms.md section 7, with its mutations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from digenrl.diffusion.sde import FlowSDE
from digenrl.diffusion.sigmas import step_sigmas
from digenrl.extensions.tasks.digits import DigitsPolicy
from digenrl.models.guidance import NEGATIVE
from digenrl.models.pipeline import DiffusersPolicy
from digenrl.models.policy import Policy
from digenrl.types import Prompt
from tests.models.tiny_policies import FAMILIES, make, randomise_lora

pytestmark = pytest.mark.heavy

OWN = [
    name
    for name, policy in FAMILIES.items()
    if policy.guide is not Policy.guide and not policy.codec_class.reads
]
"""Families with a rule of their own, all of which keep the norm of the conditional velocity."""
Guide = Callable[[DiffusersPolicy, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def policy_of(family: str) -> DiffusersPolicy:
    policy = make(family, guidance_scale=4.0).eval()
    randomise_lora(policy)
    return policy


def branches(policy: DiffusersPolicy) -> tuple[Tensor, Tensor, dict[str, Tensor], Tensor, Tensor]:
    """(latents, sigmas, condition, conditional, unconditional): each branch by a forward of its
    own."""
    condition = policy.codec.encode([Prompt("a red circle"), Prompt("a sign")])
    latents = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(3))
    sigmas = policy.sigma_grid(4)[[1, 2]]
    positive = {name: value for name, value in condition.items() if not name.startswith(NEGATIVE)}
    negative = {name: condition[NEGATIVE + name] for name in positive}
    return (
        latents,
        sigmas,
        condition,
        policy.predict(latents, sigmas, positive),
        policy.predict(latents, sigmas, negative),
    )


def check_concatenation(policy: DiffusersPolicy, guide: Guide) -> None:
    """Rollout and replay share one forward of [unconditional, conditional] rows; two forwards give
    the same."""
    latents, sigmas, condition, conditional, unconditional = branches(policy)
    together = policy.velocity(latents, sigmas, condition)
    torch.testing.assert_close(
        together, guide(policy, conditional, unconditional), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("family", ["sd3", *OWN])
def test_concatenated_guidance_equals_two_forwards(family: str) -> None:
    """Check 18: u + g*(c - u), or the family's own rule; branches swapped or scale off by a hair
    are seen."""
    policy = policy_of(family)
    check_concatenation(policy, lambda p, c, u: p.guide(c, u, p.cfg_scale))
    with pytest.raises(AssertionError):
        check_concatenation(policy, lambda p, c, u: p.guide(u, c, p.cfg_scale))
    with pytest.raises(AssertionError):
        check_concatenation(policy, lambda p, c, u: p.guide(c, u, p.cfg_scale) + 0.01 * (c - u))


def check_norm(policy: DiffusersPolicy, guide: Guide) -> None:
    _, _, _, conditional, unconditional = branches(policy)
    norms = guide(policy, conditional, unconditional).norm(dim=-1)
    torch.testing.assert_close(norms, conditional.norm(dim=-1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", OWN)
def test_rescaled_guidance_keeps_the_norm_of_every_token(family: str) -> None:
    """Check 18: c*||p||/||c|| over the channels of a packed token; plain guidance, and a norm of
    the whole, do not."""
    policy = policy_of(family)
    check_norm(policy, lambda p, c, u: p.guide(c, u, p.cfg_scale))
    with pytest.raises(AssertionError):
        check_norm(policy, lambda p, c, u: Policy.guide(p, c, u, p.cfg_scale))

    def of_the_whole_sample(p: DiffusersPolicy, c: Tensor, u: Tensor) -> Tensor:
        plain = Policy.guide(p, c, u, p.cfg_scale)
        return plain * (c.flatten(1).norm(dim=1) / plain.flatten(1).norm(dim=1))[:, None, None]

    with pytest.raises(AssertionError):
        check_norm(policy, of_the_whole_sample)


def test_a_detached_unconditional_branch_changes_the_gradient_and_no_log_prob() -> None:
    """Check 18: Flow-GRPO's SD3 script detaches it (train_sd3.py:190), others train both; here it
    is an option."""
    policy, kernel = policy_of("sd3"), FlowSDE(0.7)
    latents, sigmas, condition, conditional, unconditional = branches(policy)
    sigma, following, guard = step_sigmas(policy.sigma_grid(4), torch.tensor([1, 2]))
    assert torch.equal(sigma, sigmas)
    drawn = torch.randn(latents.shape, generator=torch.Generator().manual_seed(4))
    parameters = list(policy.adapter.trained_parameters().values())

    def of(velocity: Tensor) -> tuple[Tensor, Tensor]:
        out = kernel.transition(latents, velocity, sigma, following, guard, next_latents=drawn)
        assert out.log_prob is not None
        gradients = torch.autograd.grad(out.log_prob.sum(), parameters, retain_graph=True)
        return out.log_prob.detach(), torch.cat([gradient.flatten() for gradient in gradients])

    both, both_gradient = of(policy.velocity(latents, sigmas, condition))
    policy.detach_unconditional = True
    one, one_gradient = of(policy.velocity(latents, sigmas, condition))
    torch.testing.assert_close(both, one)
    assert float((both_gradient - one_gradient).norm() / both_gradient.norm()) > 0.1
    _, by_hand = of(policy.guide(conditional, unconditional.detach(), policy.cfg_scale))
    torch.testing.assert_close(one_gradient, by_hand, atol=1e-5, rtol=1e-3)


def test_evaluation_may_be_guided_otherwise() -> None:
    """Trained without guidance, evaluated with it: one forward becomes two, and the conditioning
    comes along."""
    plain, guided = make("sd3", guidance_scale=1.0).eval(), policy_of("sd3")
    randomise_lora(plain)
    latents, sigmas, condition, *_ = branches(guided)
    with plain.guided_by(4.0):
        asked = plain.codec.encode([Prompt("a red circle"), Prompt("a sign")])
        torch.testing.assert_close(
            plain.velocity(latents, sigmas, asked),
            guided.velocity(latents, sigmas, condition),
            atol=1e-5,
            rtol=0,
        )
    assert not plain.two_forwards
    assert plain.guidance_scale == 1.0
    with plain.guided_by(None):
        assert not plain.two_forwards
    flux = make("flux", guidance_scale=3.5)
    with flux.guided_by(1.0):
        assert (flux.guidance_scale, flux.two_forwards) == (1.0, False)
    unguided = pytest.raises(
        ValueError, match=r"sampling\.eval\.guidance_scale = 2\.0: digits has no unconditional"
    )
    with unguided, DigitsPolicy().guided_by(2.0):
        pass
