"""The transition kernels against closed forms: docs/algorithms.md section 7, checks 3 to 8, each
with mutations."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from digenrl.diffusion.sde import FlowSDE, Kernel, Transition, ode_step
from digenrl.diffusion.sigmas import static_grid, step_sigmas
from digenrl.extensions.methods.sde import DanceSDE, FlowCPS, LinearSDE

SHAPES = [(4, 6), (3, 4, 4), (2, 3, 2, 2)]


def rows(steps: list[int], shape: tuple[int, ...], total: int = 10) -> dict[str, Tensor]:
    """Random fp64 latents and velocities of rows at `steps` of a grid with shift 3."""
    generator = torch.Generator().manual_seed(len(shape))
    sigma, following, guard = step_sigmas(static_grid(total, 3.0).double(), torch.tensor(steps))
    x, v, z = (
        torch.randn(len(steps), *shape, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    return {
        "latents": x,
        "velocity": v,
        "sigma": sigma,
        "next_sigma": following,
        "sigma_guard": guard,
        "noise": z,
    }


def step(
    kernel: Kernel, data: dict[str, Tensor], storage: torch.dtype = torch.float64
) -> Transition:
    return kernel.transition(**data, storage_dtype=storage)


def column(value: Tensor, like: Tensor) -> Tensor:
    return value.reshape(-1, *([1] * (like.ndim - 1)))


@dataclass(frozen=True)
class Mutant:
    """A kernel whose transition is damaged: the checks must notice."""

    kernel: Any
    damage: str

    @property
    def stochastic(self) -> bool:
        return bool(self.kernel.stochastic)

    @property
    def gaussian(self) -> bool:
        return bool(self.kernel.gaussian)

    def transition(
        self, latents: Tensor, velocity: Tensor, sigma: Tensor, next_sigma: Tensor, **rest: Any
    ) -> Transition:
        if self.damage == "velocity sign":
            velocity = -velocity
        if self.damage == "sigma shifted":
            sigma = sigma * 1.001
        out: Transition = self.kernel.transition(latents, velocity, sigma, next_sigma, **rest)
        if self.damage == "std with sqrt_h":
            return replace(out, std=out.std * out.sqrt_h)
        if self.damage == "mean off":
            return replace(out, mean=out.mean * 1.0001)
        if self.damage == "no normaliser" and out.log_prob is not None:
            return replace(out, log_prob=out.log_prob + torch.log(out.std))
        if self.damage == "sum" and out.log_prob is not None:
            return replace(out, log_prob=out.log_prob * latents[0].numel())
        return out


# ---- check 3


def check_noise_zero_is_euler(kernel: Kernel, shape: tuple[int, ...]) -> None:
    data = rows([0, 1, 5, 9], shape)
    out = step(kernel, data)
    dt = column(data["next_sigma"] - data["sigma"], data["latents"])
    torch.testing.assert_close(
        out.next_latents, data["latents"] + data["velocity"] * dt, atol=1e-12, rtol=0
    )
    assert out.log_prob is None  # 0/0 must never be stored


@pytest.mark.parametrize("kernel", [FlowSDE(0.0), DanceSDE(0.0), FlowCPS(0.0)])
@pytest.mark.parametrize("shape", SHAPES)
def test_noise_level_zero_is_the_euler_step(kernel: Kernel, shape: tuple[int, ...]) -> None:
    """Check 3: x' = x + v*dt to 1e-12, and there is no log-prob."""
    check_noise_zero_is_euler(kernel, shape)
    data = rows([0, 1, 5, 9], shape)
    del data["noise"], data["sigma_guard"]
    torch.testing.assert_close(
        ode_step(**data, storage_dtype=torch.float64),
        step(kernel, rows([0, 1, 5, 9], shape)).next_latents,
        atol=1e-12,
        rtol=0,
    )


@pytest.mark.parametrize("damage", ["velocity sign", "sigma shifted"])
@pytest.mark.parametrize("kernel", [FlowSDE(0.0), DanceSDE(0.0), FlowCPS(0.0)])
def test_check_3_can_fail(kernel: Kernel, damage: str) -> None:
    with pytest.raises(AssertionError):
        check_noise_zero_is_euler(Mutant(kernel, damage), SHAPES[0])


# ---- check 4


def check_dance_is_flow_with_std_eta(dance: Kernel, eta: float) -> None:
    data = rows([1, 4, 8], (4, 6))
    out = step(dance, data)
    x, v, s = data["latents"], data["velocity"], column(data["sigma"], data["latents"])
    dt = column(data["next_sigma"] - data["sigma"], x)
    # Flow-GRPO's coefficient form with std := eta
    mean = x * (1 + eta**2 / (2 * s) * dt) + v * (1 + eta**2 * (1 - s) / (2 * s)) * dt
    torch.testing.assert_close(out.mean, mean, atol=1e-14, rtol=0)
    torch.testing.assert_close(out.std, torch.full_like(out.std, eta), atol=0, rtol=0)
    torch.testing.assert_close(
        out.next_latents, mean + eta * (-dt).sqrt() * data["noise"], atol=1e-14, rtol=0
    )


def test_dance_is_flow_sde_with_constant_std() -> None:
    """Check 4, DanceGRPO section 1.3: identical to 1.2 with std := eta."""
    check_dance_is_flow_with_std_eta(DanceSDE(0.3), 0.3)


def test_linear_sde_is_dance_sde_with_each_rows_own_eta() -> None:
    """std = a*s, at the first step too."""
    out, data = step(LinearSDE(0.9), rows([0, 4, 8], (4, 6))), rows([0, 4, 8], (4, 6))
    torch.testing.assert_close(out.std, 0.9 * data["sigma"])
    for row, sigma in enumerate(data["sigma"].tolist()):
        one = {name: value[row : row + 1] for name, value in data.items()}
        dance = step(DanceSDE(0.9 * sigma), one)
        torch.testing.assert_close(out.next_latents[row : row + 1], dance.next_latents)
        torch.testing.assert_close(out.log_prob[row : row + 1], dance.log_prob)


@pytest.mark.parametrize(
    "damage", ["velocity sign", "sigma shifted", "std with sqrt_h", "mean off"]
)
def test_check_4_can_fail(damage: str) -> None:
    with pytest.raises(AssertionError):
        check_dance_is_flow_with_std_eta(Mutant(DanceSDE(0.3), damage), 0.3)


def test_flow_mean_equals_its_coefficient_form() -> None:
    """Check 4: x + v*dt + std^2/(2s)*eps_hat*dt == x*(1 + std^2/(2s)*dt) + v*(1 +
    std^2*(1-s)/(2s))*dt."""
    data = rows([0, 1, 4, 9], (3, 4, 4))
    out = step(FlowSDE(0.7), data)
    x, v, s = data["latents"], data["velocity"], column(data["sigma"], data["latents"])
    dt, std = column(data["next_sigma"] - data["sigma"], x), column(out.std, x)
    mean = x * (1 + std**2 / (2 * s) * dt) + v * (1 + std**2 * (1 - s) / (2 * s)) * dt
    torch.testing.assert_close(out.mean, mean, atol=1e-13, rtol=0)
    torch.testing.assert_close(
        out.std, 0.7 * torch.sqrt(data["sigma"] / (1 - data["sigma_guard"])), atol=1e-14, rtol=0
    )


# ---- check 5


def check_exact_pair(kernel: Kernel) -> None:
    """Check the closed-form coefficients of data and noise that the step's mean has for v = eps -
    x0."""
    data = rows([1, 4, 8], (4, 6))
    x0, eps = data["latents"], data["velocity"]
    s, s1 = (column(data[name], x0) for name in ("sigma", "next_sigma"))
    data["latents"], data["velocity"] = (1 - s) * x0 + s * eps, eps - x0
    out = step(kernel, data)
    h, std = s - s1, column(out.std, x0)
    noise = s1 - std**2 * h / (2 * s)
    torch.testing.assert_close(out.mean, (1 - s1) * x0 + noise * eps, atol=1e-13, rtol=0)
    total = noise**2 + std**2 * h
    torch.testing.assert_close(
        total, s1**2 + std**2 * h**2 / s + std**4 * h**2 / (4 * s**2), atol=1e-13, rtol=0
    )
    injected = out.next_latents - out.mean
    torch.testing.assert_close(injected, std * h.sqrt() * data["noise"], atol=1e-13, rtol=0)


def test_exact_pair_of_flow_sde() -> None:
    """Check 5: mean = (1-s1)x0 + (s1 - std^2 h/(2s))eps; total variance s1^2 + std^2 h^2/s + std^4
    h^2/(4s^2)."""
    check_exact_pair(FlowSDE(0.7))
    check_exact_pair(DanceSDE(0.3))


@pytest.mark.parametrize(
    "damage", ["velocity sign", "sigma shifted", "std with sqrt_h", "mean off"]
)
def test_check_5_can_fail(damage: str) -> None:
    with pytest.raises(AssertionError):
        check_exact_pair(Mutant(FlowSDE(0.7), damage))


def check_cps_coefficients(kernel: Kernel) -> None:
    data = rows([0, 4, 8, 9], (4, 6))
    x0, eps = data["latents"], data["velocity"]
    s, s1 = (column(data[name], x0) for name in ("sigma", "next_sigma"))
    data["latents"], data["velocity"] = (1 - s) * x0 + s * eps, eps - x0
    out = step(kernel, data)
    injected = column(out.std * out.sqrt_h, x0)
    kept = (s1**2 - injected**2).clamp(min=0).sqrt()
    torch.testing.assert_close(out.mean, (1 - s1) * x0 + kept * eps, atol=1e-7, rtol=0)
    torch.testing.assert_close(injected, s1 * math.sin(0.8 * math.pi / 2), atol=1e-14, rtol=0)
    last = out.next_latents[3]
    torch.testing.assert_close(last, x0[3], atol=1e-13, rtol=0)  # s1 = 0: x' = x0_hat without noise


def test_cps_preserves_coefficients_on_an_exact_pair() -> None:
    """Check 5: data coefficient exactly 1-s1, noise variance exactly s1^2 (part kept, part
    injected)."""
    check_cps_coefficients(FlowCPS(0.8))
    for wrong in (
        FlowSDE(0.8),
        FlowCPS(0.7),
        Mutant(FlowCPS(0.8), "velocity sign"),
        Mutant(FlowCPS(0.8), "mean off"),
    ):
        with pytest.raises(AssertionError):
            check_cps_coefficients(wrong)


@pytest.mark.parametrize("a", [0.7, 1.2])
def test_first_step_of_flow_sde_injects_noise_a(a: float) -> None:
    """Check 5: at s = 1 the noise has std exactly a and x's coefficient is 1 - a^2/2, on any
    grid."""
    data = rows([0], (4, 6))
    out = step(FlowSDE(a), data)
    assert float(out.std * out.sqrt_h) == pytest.approx(a, abs=1e-14)
    data["velocity"] = torch.zeros_like(data["velocity"])
    torch.testing.assert_close(
        step(FlowSDE(a), data).mean, (1 - a**2 / 2) * data["latents"], atol=1e-13, rtol=0
    )


# ---- check 6


def marginal_std(kernel: Kernel | None, steps: int, samples: int = 40_000) -> float:
    """Std of 1-D Gaussian data N(1.5, 0.5^2) sampled with its closed-form velocity."""
    generator = torch.Generator().manual_seed(0)
    grid = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    x = torch.randn(samples, 1, generator=generator, dtype=torch.float64)
    for k in range(steps):
        sigma, following, guard = (
            value.expand(samples) for value in step_sigmas(grid, torch.tensor([k]))
        )
        s = sigma[:, None]
        variance = (1 - s) ** 2 * 0.25 + s**2
        x0 = 1.5 + (1 - s) * 0.25 / variance * (x - (1 - s) * 1.5)
        velocity = (x - x0) / s  # eps_hat - x0_hat with x = (1-s)*x0 + s*eps
        if kernel is None:
            x = ode_step(x, velocity, sigma, following, torch.float64)
        else:
            z = torch.randn(samples, 1, generator=generator, dtype=torch.float64)
            x = kernel.transition(
                x,
                velocity,
                sigma,
                following,
                sigma_guard=guard,
                noise=z,
                storage_dtype=torch.float64,
            ).next_latents
    return float(x.std())


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (None, (0.43, 0.485, 0.498)),
        (FlowSDE(0.7), (0.48, 0.499, 0.500)),
        (DanceSDE(0.3), (0.441, 0.486, 0.499)),
        (LinearSDE(0.983), (0.450, 0.490, 0.499)),
    ],
)
def test_marginal_is_preserved_as_steps_grow(
    kernel: Kernel | None, expected: tuple[float, float, float]
) -> None:
    """Check 6: the std tends to 0.5 with error ~ 1/T. (CPS does not preserve marginals, section
    1.4, and is not asserted.)"""
    for steps, value in zip((10, 50, 400), expected, strict=True):
        samples = 40_000 if steps < 400 else 10_000
        assert marginal_std(kernel, steps, samples) == pytest.approx(value, abs=0.012)


def test_check_6_can_fail() -> None:
    assert abs(marginal_std(Mutant(FlowSDE(0.7), "velocity sign"), 50) - 0.499) > 0.05
    assert (
        abs(marginal_std(FlowCPS(0.8), 50) - 0.5) > 0.05
    )  # the known bias of CPS is what such a test would see


# ---- check 7


def check_log_prob(kernel: Kernel) -> None:
    data = rows([0, 1, 5, 8], (3, 4, 4))
    out = step(kernel, data)
    scale = column(out.std * out.sqrt_h, out.mean)
    reference = torch.distributions.Normal(out.mean, scale).log_prob(out.next_latents)
    assert out.log_prob is not None
    torch.testing.assert_close(out.log_prob, reference.flatten(1).mean(1), atol=1e-6, rtol=0)
    joint = reference.flatten(1).sum(1)
    torch.testing.assert_close(out.log_prob * out.mean[0].numel(), joint, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "kernel", [FlowSDE(0.7), FlowSDE(1.0, max_scale=0.45), DanceSDE(0.3), LinearSDE(0.9)]
)
def test_log_prob_is_the_mean_of_the_normal_log_density(kernel: Kernel) -> None:
    """Check 7: torch Normal(mean, S).log_prob(x').mean(dims); the joint one is D times that."""
    check_log_prob(kernel)


@pytest.mark.parametrize("damage", ["std with sqrt_h", "mean off", "no normaliser", "sum"])
def test_check_7_can_fail(damage: str) -> None:
    with pytest.raises(AssertionError):
        check_log_prob(Mutant(FlowSDE(0.7), damage))


def test_cps_log_prob_is_minus_the_mean_square() -> None:
    """Check 7: -mean((x'-mean)^2), no variance, no constants."""
    out = step(FlowCPS(0.8), rows([0, 4, 8], (4, 6)))
    torch.testing.assert_close(
        out.log_prob, -((out.next_latents - out.mean) ** 2).flatten(1).mean(1)
    )


def test_normaliser_does_not_change_ratios() -> None:
    """Check 7: std is equal in both phases, so a constant shift of the log-prob cancels."""
    data = rows([1, 5], (4, 6))
    rolled = step(FlowSDE(0.7), data)
    del data["noise"]
    data["velocity"] = data["velocity"] + 0.01
    for kernel in (FlowSDE(0.7), Mutant(FlowSDE(0.7), "no normaliser")):
        new = kernel.transition(**data, next_latents=rolled.next_latents)
        old = step(kernel, {**rows([1, 5], (4, 6))})
        assert new.log_prob is not None
        assert old.log_prob is not None
        ratio = (new.log_prob - old.log_prob).exp()
        if kernel == FlowSDE(0.7):
            first = ratio
    torch.testing.assert_close(ratio, first, atol=1e-12, rtol=0)


# ---- check 8


def test_first_step_std_depends_on_the_guard() -> None:
    """Check 8: SD3 shift 3, T = 10: sigmas[1] = 0.9643 gives std 3.70 and noise 0.70; a fixed 0.99
    gives 7.0 and 1.32."""
    data = rows([0], (4, 6))
    right = step(FlowSDE(0.7), data)
    assert float(right.std) == pytest.approx(3.70, abs=0.01)
    assert float(right.std * right.sqrt_h) == pytest.approx(0.70, abs=1e-9)
    data["sigma_guard"] = torch.full_like(data["sigma_guard"], 0.99)
    wrong = step(FlowSDE(0.7), data)
    assert float(wrong.std) == pytest.approx(7.0, abs=0.01)
    assert float(wrong.std * wrong.sqrt_h) == pytest.approx(1.32, abs=0.01)


def test_replay_with_another_guard_breaks_the_ratio() -> None:
    """Check 8: rollout and replay must share the value."""
    data = rows([0], (4, 6))
    rolled = step(FlowSDE(0.7), data)
    del data["noise"]
    same = FlowSDE(0.7).transition(**data, next_latents=rolled.next_latents)
    data["sigma_guard"] = torch.full_like(data["sigma_guard"], 0.99)
    other = FlowSDE(0.7).transition(**data, next_latents=rolled.next_latents)
    assert torch.equal(same.log_prob, rolled.log_prob)
    assert float((other.log_prob - rolled.log_prob).abs()) > 0.1


# ---- conventions and errors


def test_latents_are_rounded_to_the_storage_dtype_before_the_log_prob() -> None:
    """Section 1.8: the log-prob belongs to the tensor that is stored."""
    data = {name: value.float() for name, value in rows([1, 5], (4, 6)).items()}
    for storage in (torch.float16, torch.bfloat16):
        out = step(FlowSDE(0.7), data, storage)
        assert out.next_latents.dtype == storage
        scale = column(out.std * out.sqrt_h, out.mean)
        stored = (
            torch.distributions.Normal(out.mean, scale)
            .log_prob(out.next_latents.float())
            .flatten(1)
            .mean(1)
        )
        unrounded = torch.distributions.Normal(out.mean, scale).log_prob(
            out.mean + scale * data["noise"]
        )
        torch.testing.assert_close(out.log_prob, stored, atol=1e-6, rtol=0)
        assert float((out.log_prob - unrounded.flatten(1).mean(1)).abs().max()) > 2e-6


def test_noise_bound_of_longcat_holds() -> None:
    """Section 1.2: std*sqrt(h) <= 0.45, applied before the mean."""
    out = step(FlowSDE(1.0, max_scale=0.45), rows([0, 4, 8], (4, 6)))
    free = step(FlowSDE(1.0), rows([0, 4, 8], (4, 6)))
    scales, unbounded = out.std * out.sqrt_h, free.std * free.sqrt_h
    assert float(unbounded.max()) > 0.9
    assert float(unbounded.min()) < 0.45, "the bound does not bind everywhere"
    torch.testing.assert_close(scales, unbounded.clamp(max=0.45))
    assert torch.equal(out.mean[unbounded < 0.45], free.mean[unbounded < 0.45])
    assert not torch.equal(out.mean[unbounded > 0.45], free.mean[unbounded > 0.45])


def test_arithmetic_is_fp32_for_16_bit_latents() -> None:
    data = {name: value.bfloat16() for name, value in rows([1], (4, 6)).items()}
    out = step(FlowSDE(0.7), data, torch.bfloat16)
    assert out.mean.dtype == torch.float32
    assert out.log_prob is not None
    assert out.log_prob.dtype == torch.float32


def test_bad_arguments_are_named() -> None:
    data = rows([1], (4, 6))
    with pytest.raises(ValueError, match="exactly one of noise"):
        FlowSDE(0.7).transition(**data, next_latents=data["latents"])
    with pytest.raises(ValueError, match=r"noise_level must be finite and >= 0, got -0\.1"):
        FlowSDE(-0.1)
    with pytest.raises(ValueError, match="quarter turns"):
        FlowCPS(1.3)
    with pytest.raises(ValueError, match=r"0\.45"):
        FlowSDE(0.7, max_scale=0.0)


@pytest.mark.parametrize("kernel", [FlowSDE(0.7), FlowCPS(0.8)])
def test_tokens_behind_the_drawn_ones_follow_the_ode(kernel: Kernel) -> None:
    """Sampled and replayed; the log-prob is that of the others alone."""
    data = rows([0, 4], (6, 3))
    out = kernel.transition(**data, storage_dtype=torch.float64, drawn=4)
    part = {name: value[:, :4] if value.dim() > 1 else value for name, value in data.items()}
    alone = kernel.transition(**part, storage_dtype=torch.float64)
    assert torch.equal(out.next_latents[:, :4], alone.next_latents)
    moved = ode_step(
        data["latents"], data["velocity"], data["sigma"], data["next_sigma"], torch.float64
    )
    assert torch.equal(out.next_latents[:, 4:], moved[:, 4:])
    noise = data.pop("noise")
    again = kernel.transition(
        **data, next_latents=out.next_latents, storage_dtype=torch.float64, drawn=4
    )
    assert out.log_prob is not None
    assert again.log_prob is not None
    assert alone.log_prob is not None
    assert torch.equal(out.log_prob, alone.log_prob)
    assert torch.equal(again.log_prob, alone.log_prob)
    assert out.mean.shape == noise[:, :4].shape
