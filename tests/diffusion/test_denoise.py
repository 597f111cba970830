"""Sampling, suspending and replay: docs/algorithms.md section 7, checks 1 and 16, and invariant
I12."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from digenrl import keys
from digenrl.diffusion import denoise
from digenrl.diffusion.sde import FlowSDE, Kernel
from digenrl.diffusion.sigmas import static_grid
from digenrl.diffusion.steps import AllButLast, StepPlan
from digenrl.extensions.methods.noise_levels import NoiseLevels
from digenrl.extensions.methods.sde import DanceSDE, FlowCPS, LinearSDE
from digenrl.extensions.methods.steps import Window
from digenrl.types import CellBlock
from tests.algorithms.toy_policy import ToyPolicy, condition, roll
from tests.sampling import sample

KERNELS: list[Kernel] = [FlowSDE(0.7), DanceSDE(0.3), FlowCPS(0.8), LinearSDE(0.9)]
STORAGE = [torch.float32, torch.float16, torch.bfloat16]


def one_step(block: CellBlock, index: int) -> CellBlock:
    """The block at one of its steps (K = 1)."""
    pick = slice(index, index + 1)
    return replace(
        block,
        steps=block.steps[pick],
        latents=block.latents[:, pick],
        next_latents=block.next_latents[:, pick],
        log_probs=block.log_probs[:, pick],
        means=None if block.means is None else block.means[:, pick],
    )


def on_policy_deviation(block: CellBlock, policy: ToyPolicy, kernel: Kernel) -> float:
    """max |logp_new - logp_rollout| at the rollout's batch geometry."""
    parts = [
        denoise.replay(policy, one_step(block, k), kernel).log_prob - block.log_probs[:, k : k + 1]
        for k in range(len(block.steps))
    ]
    return float(torch.cat(parts, dim=1).detach().abs().max())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("storage", STORAGE)
def test_on_policy_ratio_is_exactly_one(kernel: Kernel, storage: torch.dtype) -> None:
    """Check 1: rounded before the log-prob and equal geometry -> bit-equal, in fp32, fp16 and bf16
    storage."""
    policy = ToyPolicy()
    for block in roll(policy, kernel, storage=storage):
        assert block.latents.dtype == storage
        assert on_policy_deviation(block, policy, kernel) == 0.0


@pytest.mark.parametrize("storage", STORAGE[1:])
def test_check_1_fails_if_the_log_prob_is_taken_before_rounding(storage: torch.dtype) -> None:
    policy, kernel = ToyPolicy(), FlowSDE(0.7)

    class RoundsLate(FlowSDE):
        def transition(self, *args, **kwargs):
            dtype = kwargs.pop("storage_dtype", torch.float32)
            out = super().transition(*args, **kwargs, storage_dtype=torch.float32)
            return replace(out, next_latents=out.next_latents.to(dtype))

    block = roll(policy, RoundsLate(0.7), storage=storage)[0]
    assert on_policy_deviation(block, policy, kernel) > 1e-6


def test_check_1_fails_with_other_weights_sigmas_or_latents() -> None:
    policy, kernel = ToyPolicy(), FlowSDE(0.7)
    block = roll(policy, kernel)[0]
    moved = replace(block, sigmas=static_grid(5, 3.1))
    assert on_policy_deviation(moved, policy, kernel) > 1e-4
    assert (
        on_policy_deviation(replace(block, latents=block.latents.bfloat16()), policy, kernel) > 1e-5
    )
    with torch.no_grad():
        policy.transformer[2].bias.add_(0.01)
    assert on_policy_deviation(block, policy, kernel) > 1e-5


def gradients(loss: Tensor, policy: ToyPolicy) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(policy.adapter.trained_parameters().values())))


@pytest.mark.parametrize("kernel", KERNELS)
def test_batched_replay_equals_the_loop_over_steps(kernel: Kernel) -> None:
    """Check 16: log-probs, means and gradients of K steps in one forward equal the per-step loop
    (I5), fp64."""
    policy = ToyPolicy(torch.float64)
    block = roll(policy, kernel, storage=torch.float64, sigmas=static_grid(6, 3.0).double())[0]
    together = denoise.replay(policy, block, kernel)
    loop = [denoise.replay(policy, one_step(block, k), kernel) for k in range(len(block.steps))]
    for name in ("log_prob", "mean", "std", "sqrt_h", "velocity"):
        stacked = torch.cat([getattr(part, name) for part in loop], dim=1)
        torch.testing.assert_close(getattr(together, name), stacked, atol=1e-12, rtol=0)
    weights = torch.randn(
        block.log_probs.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    whole = gradients((weights * together.log_prob).sum(), policy)
    parts = [
        gradients((weights[:, k : k + 1] * part.log_prob).sum(), policy)
        for k, part in enumerate(loop)
    ]
    for index, value in enumerate(whole):
        torch.testing.assert_close(
            value, torch.stack([part[index] for part in parts]).sum(0), atol=1e-12, rtol=0
        )


def permuted(block: CellBlock, order: list[int], with_sigmas: bool = True) -> CellBlock:
    index = torch.tensor(order)
    return replace(
        block,
        steps=block.steps[index] if with_sigmas else block.steps,
        latents=block.latents[:, index],
        next_latents=block.next_latents[:, index],
        log_probs=block.log_probs[:, index],
    )


def test_permuted_replay_gathers_matching_sigmas() -> None:
    """Check 16: any order of steps; leaving the sigmas behind (the sensitivity) breaks it."""
    policy, kernel, order = ToyPolicy(), FlowSDE(0.7), [2, 0, 3, 1]
    block = roll(policy, kernel)[0]
    right = denoise.replay(policy, permuted(block, order), kernel)
    torch.testing.assert_close(right.log_prob, block.log_probs[:, order], atol=1e-5, rtol=0)
    wrong = denoise.replay(policy, permuted(block, order, with_sigmas=False), kernel)
    assert float((wrong.log_prob.detach() - block.log_probs[:, order]).abs().max()) > 0.1


@pytest.mark.parametrize("boundary", [0, 1, 3, 5, 6])
def test_a_suspended_trajectory_is_finished_elsewhere_bit_equal(boundary: int) -> None:
    """I12: every suspension point, resumed by another policy object with the same weights."""
    grid, kernel = static_grid(6, 3.0), FlowSDE(0.7)
    plan = Window(3, stop=5).plan_steps(0, 2, 6)
    key = denoise.SampleKey(0, 2, 11, (4, 5, 6))
    here, there = ToyPolicy(), ToyPolicy()
    expected = sample(here, condition(), key, grid, kernel, plan, torch.float16, keep_means=True)
    state = denoise.initial_state(key, here.latent_shape, torch.float16)
    for k in range(6):
        owner = here if k < boundary else there
        state = denoise.advance_state(
            owner, condition(), state, grid, kernel, plan, keep_means=True
        )
    got = denoise.finished_samples(state, plan)
    for name in ("steps", "latents", "next_latents", "log_probs", "final", "means"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name


def test_a_resumed_trajectory_with_another_key_differs() -> None:
    """Sensitivity of I12: noise comes from the key that travels."""
    grid, plan = static_grid(6, 3.0), AllButLast().plan_steps(0, 0, 6)
    state = denoise.initial_state(denoise.SampleKey(0, 0, 1, (0,)), (3, 4))
    other = replace(state, key=denoise.SampleKey(0, 0, 1, (1,)))
    ends = [
        denoise.advance_state(ToyPolicy(), condition(), s, grid, FlowSDE(0.7), plan).latents
        for s in (state, other)
    ]
    assert not torch.equal(*ends)


def test_shapes_and_kept_steps_of_a_window() -> None:
    """Check 19: S kept items for the window, none for the ODE steps outside; the final latent is
    the last x'."""
    plan = StepPlan((1, 2), (1, 2))
    grid, key = static_grid(6, 3.0), denoise.SampleKey(0, 0, 5, (0, 1))
    samples = sample(ToyPolicy(), condition(), key, grid, FlowSDE(0.7), plan)
    assert samples.latents.shape == samples.next_latents.shape == (2, 2, 3, 4)
    assert samples.log_probs.shape == (2, 2)
    assert torch.equal(samples.steps, torch.tensor([1, 2]))
    assert torch.equal(samples.latents[:, 1], samples.next_latents[:, 0])
    assert samples.means is None
    first = denoise.initial_state(key, (3, 4)).latents
    assert not torch.equal(samples.latents[:, 0], first)


def test_every_step_is_made_once_whatever_becomes_of_it() -> None:
    """Trained, drawn and not trained, and deterministic ones."""
    plan = StepPlan((1, 2, 4), (1, 4))
    grid, key = static_grid(6, 3.0), denoise.SampleKey(0, 0, 5, (0, 1))
    state, seen = denoise.initial_state(key, (3, 4)), list[int]()
    for _ in range(6):
        seen.append(state.next_step)
        state = denoise.advance_state(ToyPolicy(), condition(), state, grid, FlowSDE(0.7), plan)
    assert seen == [0, 1, 2, 3, 4, 5]
    assert state.next_step == 6
    assert torch.equal(denoise.finished_samples(state, plan).steps, torch.tensor([1, 4]))


def test_last_ode_step_is_the_predicted_clean_latent() -> None:
    """Section 1.3: x - s*v of the last step, what DanceGRPO decodes."""
    policy, grid, plan = ToyPolicy(), static_grid(6, 3.0), AllButLast().plan_steps(0, 0, 6)
    samples = sample(
        policy, condition(), denoise.SampleKey(0, 0, 5, (0, 1)), grid, FlowSDE(0.7), plan
    )
    before = samples.next_latents[:, -1]
    velocity = policy.velocity(before, grid[5].expand(2), denoise.expand_condition(condition(), 2))
    torch.testing.assert_close(samples.final, before - grid[5] * velocity, atol=1e-6, rtol=0)


def test_forward_process_plans_store_the_final_latent_alone() -> None:
    plan = NoiseLevels(size=3).plan_steps(0, 0, 6)
    grid, key = static_grid(6, 3.0), denoise.SampleKey(0, 0, 5, (0, 1))
    samples = sample(ToyPolicy(), condition(), key, grid, FlowSDE(0.0), plan)
    assert samples.latents.shape == (2, 3, 0)
    assert torch.equal(samples.log_probs, torch.zeros(2, 3))
    noise = denoise.initial_state(key, (3, 4)).latents
    assert torch.equal(samples.final, denoise.ode_sample(ToyPolicy(), condition(), noise, grid))


def test_same_noise_is_shared_by_a_group_and_sde_noise_is_not() -> None:
    state = denoise.initial_state(denoise.SampleKey(0, 0, 5, (0, 1, 2)), (3, 4), same_noise=True)
    assert torch.equal(state.latents[0], state.latents[2])
    plan = AllButLast().plan_steps(0, 0, 6)
    after = denoise.advance_state(
        ToyPolicy(), condition(), state, static_grid(6, 3.0), FlowSDE(0.7), plan
    )
    assert not torch.equal(after.latents[0], after.latents[2])


class Gaussian(ToyPolicy):
    """The exact velocity for data N(1.5, 0.5^2): its ODE takes noise z to 1.5 + 0.5 z."""

    def velocity(self, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
        s = sigmas.reshape(-1, 1, 1)
        x0 = 1.5 + (1 - s) * 0.25 / ((1 - s) ** 2 * 0.25 + s**2) * (latents - (1 - s) * 1.5)
        return (latents - x0) / s


def test_the_second_order_solver_is_nearer_to_the_exact_flow_and_begins_and_ends_as_eulers() -> (
    None
):
    policy = Gaussian(torch.float64)
    noise = torch.linspace(-2, 2, 24, dtype=torch.float64).reshape(2, 3, 4)
    errors = {}
    for steps in (2, 10, 40):
        grid = static_grid(steps).double()
        found = {
            s: denoise.ode_sample(policy, {}, noise, grid, solver=s) for s in ("euler", "dpm2")
        }
        errors[steps] = {
            solver: float((x - 1.5 - 0.5 * noise).abs().max()) for solver, x in found.items()
        }
        assert torch.equal(found["euler"], found["dpm2"]) == (steps == 2)
    assert errors[10]["dpm2"] < 0.5 * errors[10]["euler"]
    assert errors[40]["dpm2"] < 0.2 * errors[40]["euler"]


@pytest.mark.parametrize("rows", [1, 2])
def test_the_second_order_solver_extrapolates_over_log_snr(rows: int) -> None:
    """DPM-Solver++ 2M as its paper has it (arXiv 2211.01095, algorithm 2), with alpha = 1 - s."""
    policy, grid = Gaussian(torch.float64), static_grid(6, 3.0).double()
    x = noise = torch.linspace(-2, 2, 12 * rows, dtype=torch.float64).reshape(rows, 3, 4)
    lam = torch.log((1 - grid) / grid)
    last, calls = None, list[int]()
    for k in range(6):
        s, t = grid[k], grid[k + 1]
        clean = x - s * policy.velocity(x, s.expand(rows), {})
        ahead = clean
        if 0 < k < 5:
            r = (lam[k] - lam[k - 1]) / (lam[k + 1] - lam[k])
            ahead = (1 + 1 / (2 * r)) * clean - 1 / (2 * r) * last
        decay = torch.exp(-(lam[k + 1] - lam[k])) if 0 < k < 5 else t * (1 - s) / (s * (1 - t))
        x = t / s * x - (1 - t) * (decay - 1) * ahead
        last = clean
    found = denoise.ode_sample(
        policy, {}, noise, grid, solver="dpm2", before_step=lambda: calls.append(1)
    )
    torch.testing.assert_close(found, x, rtol=1e-6, atol=1e-6)
    assert len(calls) == 6


def test_means_are_kept_where_asked_and_the_scale_is_that_of_the_noise() -> None:
    policy, kernel = ToyPolicy(), FlowSDE(0.7)
    grid, plan = static_grid(6, 3.0), AllButLast().plan_steps(0, 0, 6)
    key = denoise.SampleKey(0, 0, 5, (0, 1))
    plain = sample(policy, condition(), key, grid, kernel, plan)
    assert plain.means is None
    assert (
        denoise.advance_state(
            policy, condition(), denoise.initial_state(key, policy.latent_shape), grid, kernel, plan
        ).kept_means
        == ()
    )
    (block,) = roll(policy, kernel, groups=1, samples=2)
    assert block.means is not None
    assert block.means.shape == block.latents.shape
    again = denoise.replay(policy, block, kernel)
    torch.testing.assert_close(again.mean, block.means, rtol=1e-5, atol=1e-6)
    own = [keys.noise(0, 0, 100, [0, 1], int(k), policy.latent_shape) for k in block.steps]
    drawn = (block.next_latents - again.mean) / again.scale[..., None, None]
    torch.testing.assert_close(drawn, torch.stack(own, 1), rtol=1e-3, atol=1e-3)


def test_a_prompts_conditioning_is_shown_to_every_row_and_that_of_rows_is_theirs() -> None:
    given = {"one": torch.arange(6.0).reshape(1, 3, 2), "two": torch.ones(2, 3)}
    found = denoise.expand_condition(given, 2)
    assert torch.equal(found["one"], given["one"].repeat(2, 1, 1))
    assert found["two"] is given["two"]


def test_misuse_is_explained() -> None:
    policy, grid, key = ToyPolicy(), static_grid(4, 3.0), denoise.SampleKey(0, 0, 5, (0,))
    plan = AllButLast().plan_steps(0, 0, 4)
    with pytest.raises(ValueError, match="noise level is 0"):
        sample(policy, condition(), key, grid, FlowSDE(0.0), plan)
    state = denoise.initial_state(key, (3, 4))
    with pytest.raises(ValueError, match="0 of the 3 trained steps"):
        denoise.finished_samples(state, plan)
    for _ in range(4):
        state = denoise.advance_state(policy, condition(), state, grid, FlowSDE(0.7), plan)
    with pytest.raises(ValueError, match="finished its 4"):
        denoise.advance_state(policy, condition(), state, grid, FlowSDE(0.7), plan)


def test_each_step_draws_the_noise_of_its_own_key() -> None:
    key = denoise.SampleKey(seed=5, step=2, uid=7, samples=(1, 4))
    drawn: list[Tensor] = []

    class Noted(FlowSDE):
        def transition(self, *args, **kwargs):
            drawn.append(kwargs["noise"])
            return super().transition(*args, **kwargs)

    policy, grid, plan = ToyPolicy(), static_grid(3, 3.0), StepPlan((0, 2), (0,))
    sample(policy, condition(), key, grid, Noted(0.7), plan, torch.float32)
    own = [keys.noise(5, 2, 7, [1, 4], k, policy.latent_shape) for k in (0, 2)]
    assert all(torch.equal(*pair) for pair in zip(drawn, own, strict=True))
