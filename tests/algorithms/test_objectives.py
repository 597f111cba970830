"""Losses against closed forms: docs/algorithms.md section 7, checks 2, 9 to 12, each with
mutations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from digenrl.algorithms import objectives
from digenrl.algorithms.surrogates import Cells, Clipped
from digenrl.diffusion.sde import FlowSDE
from digenrl.diffusion.sigmas import static_grid, step_sigmas
from digenrl.extensions.methods.sde import LinearSDE
from digenrl.extensions.methods.surrogates import FlowDPPO, Guard, dppo_keep, guard_ratio

SHAPE = (3, 4)
DIMENSIONS = 12


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cells_at(
    steps: list[list[int]], drift: float, clip: float = 1e-2, a: float = 0.7
) -> tuple[Cells, Tensor, Tensor]:
    """Cells [b, K] whose rows sit at `steps`, with velocities moved by `drift`; also the velocity
    leaf and the noise z."""
    index = torch.tensor(steps)
    rows, count = index.shape
    sigma, following, guard = step_sigmas(static_grid(10, 3.0).double(), index.flatten())
    x, v, z = (normal(rows * count, *SHAPE, seed=seed) for seed in (1, 2, 3))
    kernel = FlowSDE(a)
    old = kernel.transition(x, v, sigma, following, guard, noise=z, storage_dtype=torch.float64)
    leaf = (v + drift * normal(rows * count, *SHAPE, seed=4)).requires_grad_()
    new = kernel.transition(x, leaf, sigma, following, guard, next_latents=old.next_latents)
    assert old.log_prob is not None
    assert new.log_prob is not None
    cells = Cells(
        log_prob=new.log_prob.unflatten(0, (rows, count)),
        old_log_prob=old.log_prob.unflatten(0, (rows, count)),
        advantages=normal(rows, 1, seed=5),
        mean=new.mean.unflatten(0, (rows, count)),
        scale=(new.std * new.sqrt_h).unflatten(0, (rows, count)),
        sqrt_h=new.sqrt_h.unflatten(0, (rows, count)),
        clip=(clip, clip),
        old_mean=old.mean.unflatten(0, (rows, count)),
    )
    return cells, leaf, z.unflatten(0, (rows, count))


# ---- check 2


def check_policy_gradient(loss_of: Callable[[Cells], Tensor]) -> None:
    cells, leaf, _ = cells_at([[1, 4], [2, 6], [0, 8]], drift=0.0)
    loss = loss_of(cells).mean()
    assert float(loss.detach()) == pytest.approx(-float(cells.advantages.mean()), abs=1e-14)
    (expected,) = torch.autograd.grad(
        -(cells.advantages * cells.log_prob).mean(), leaf, retain_graph=True
    )
    (got,) = torch.autograd.grad(loss, leaf, allow_unused=True)
    torch.testing.assert_close(got, expected, atol=1e-14, rtol=0)


def test_on_policy_gradient_is_the_policy_gradient() -> None:
    """Check 2: at ratio 1 the loss is -mean(A) and its gradient -mean(A * dlogp/dtheta), clip
    inactive."""
    check_policy_gradient(Clipped().loss)
    with pytest.raises(AssertionError):  # the right value by a gradient of twice the size
        check_policy_gradient(lambda cells: Clipped().loss(cells) * cells.ratio)
    with pytest.raises(AssertionError):  # the ratio of another step's log-prob
        check_policy_gradient(
            lambda cells: (
                -cells.advantages * (cells.log_prob - cells.log_prob.detach().flip(1)).exp()
            )
        )
    with pytest.raises(
        RuntimeError, match="does not require grad"
    ):  # a detached ratio teaches nothing
        check_policy_gradient(
            lambda cells: objectives.clipped_surrogate(cells.ratio.detach(), cells.advantages, 0.1)
        )


def clip_table(surrogate: Callable[[Tensor, Tensor, float], Tensor]) -> None:
    """Gradient survives only inside the clip range or where the clip is pessimistic."""
    ratio = torch.tensor([0.5, 0.5, 1.5, 1.5, 1.05], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    loss = surrogate(ratio, advantages, 0.1)
    torch.testing.assert_close(
        loss.detach(), torch.tensor([-0.5, 0.9, -1.1, 1.5, -1.05], dtype=torch.float64)
    )
    (gradient,) = torch.autograd.grad(loss.sum(), ratio)
    torch.testing.assert_close(
        gradient, torch.tensor([-1.0, 0.0, 0.0, 1.0, -1.0], dtype=torch.float64)
    )


def test_clip_truth_table() -> None:
    """Section 3.1: max(-A*r, -A*clamp(r, 1-c, 1+c))."""
    clip_table(objectives.clipped_surrogate)
    with pytest.raises(AssertionError):
        clip_table(lambda r, a, c: torch.minimum(-a * r, -a * r.clamp(1 - c, 1 + c)))
    with pytest.raises(AssertionError):
        clip_table(lambda r, a, c: -a * r.clamp(1 - c, 1 + c))
    asymmetric = objectives.clipped_surrogate(
        torch.tensor([1.5, 0.5]), torch.tensor([1.0, -1.0]), 0.1, 0.3
    )
    torch.testing.assert_close(asymmetric, torch.tensor([-1.3, 0.9]))
    ratio = torch.tensor([1.25, 1.26, 0.5, 0.49, 2.0, 0.1, 0.1, 2.0])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0, 0.0, 1.0, -1.0])
    binds = objectives.clip_binds(ratio, advantages, 0.5, 0.25)
    assert binds.tolist() == [False, True, False, True, False, False, False, False]


# ---- check 9


def check_kl(kl: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], h_power: int) -> None:
    """h*(1+a^2/2)^2*mean(dv^2)/(2*a^2*s/(1-s)) for a fixed velocity offset, times h once more for
    the h-free form."""
    steps, a = [1, 3, 5, 8], 0.7
    sigma, following, guard = step_sigmas(static_grid(10, 3.0).double(), torch.tensor(steps))
    x, v, dv = (normal(4, *SHAPE, seed=seed) for seed in (1, 2, 3))
    kernel = FlowSDE(a)
    new = kernel.transition(x, v + dv, sigma, following, guard, next_latents=x)
    base = kernel.transition(x, v, sigma, following, guard, next_latents=x)
    h = sigma - following
    expected = (
        h
        * (1 + a**2 / 2) ** 2
        * (dv**2).flatten(1).mean(1)
        / (2 * a**2 * sigma / (1 - sigma))
        * h**h_power
    )
    got = kl(new.mean[:, None], base.mean[:, None], new.std[:, None], new.sqrt_h[:, None])[:, 0]
    torch.testing.assert_close(got, expected, atol=1e-13, rtol=1e-12)
    zero = kl(new.mean[:, None], new.mean[:, None], new.std[:, None], new.sqrt_h[:, None])
    assert torch.equal(zero, torch.zeros_like(zero))


def test_kl_of_a_velocity_offset() -> None:
    """Check 9: the true Gaussian KL, and Flow-GRPO's, which is h times it; 0 exactly for equal
    means."""
    check_kl(lambda m, r, std, h: objectives.gaussian_kl(m, r, std * h), 0)
    check_kl(lambda m, r, std, h: objectives.h_free_kl(m, r, std), 1)
    with pytest.raises(AssertionError):
        check_kl(lambda m, r, std, h: objectives.h_free_kl(m, r, std), 0)  # trap T1
    with pytest.raises(AssertionError):
        check_kl(lambda m, r, std, h: objectives.mean_square_kl(m, r), 0)


def test_gaussian_kl_is_torchs() -> None:
    mean, reference, scale = normal(2, 3, *SHAPE), normal(2, 3, *SHAPE, seed=1), uniform(2, 3) + 0.1
    wide = scale[..., None, None]
    kl = torch.distributions.kl_divergence(
        torch.distributions.Normal(mean, wide), torch.distributions.Normal(reference, wide)
    )
    torch.testing.assert_close(
        objectives.gaussian_kl(mean, reference, scale), kl.flatten(2).mean(2)
    )


# ---- checks 10 and 11


def check_guard(ratio: Callable[..., Tensor], cells: Cells, z: Tensor) -> None:
    expected = torch.exp((z * (cells.mean - cells.old_mean)).flatten(2).mean(2))
    got = ratio(cells.log_prob, cells.old_log_prob, cells.mean, cells.old_mean, cells.scale)
    torch.testing.assert_close(got, expected, atol=1e-11, rtol=0)


def test_guard_ratio_per_row() -> None:
    """Checks 10, 11: exp((log r + bias)*S) == exp(mean(z*(new-old))), with each row's own S where
    steps are mixed."""
    cells, _, z = cells_at([[0, 5], [3, 8], [7, 1]], drift=0.3)
    assert cells.old_mean is not None
    check_guard(guard_ratio, cells, z)
    with pytest.raises(AssertionError):  # verl-omni's batch mean of S (trap T6)
        check_guard(
            lambda n, o, m, om, s: guard_ratio(n, o, m, om, s.mean().expand_as(s)),
            cells,
            z,
        )
    with pytest.raises(AssertionError):  # no bias term
        check_guard(lambda n, o, m, om, s: torch.exp((n - o) * s), cells, z)
    whole = Guard().loss(cells)
    for row in range(3):
        pick = slice(row, row + 1)
        alone = Cells(
            *(
                getattr(cells, name)[pick]
                for name in ("log_prob", "old_log_prob", "advantages", "mean", "scale", "sqrt_h")
            ),
            clip=cells.clip,
            old_mean=cells.old_mean[pick],
        )
        torch.testing.assert_close(Guard().loss(alone), whole[pick], atol=1e-13, rtol=0)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_guard_clips_each_side_at_its_own_bound_and_divides_by_h(advantage: float) -> None:
    ratio = torch.tensor([[0.5, 0.8, 1.0, 1.2, 1.5]], dtype=torch.float64)
    means, ones = torch.zeros(1, 5, *SHAPE, dtype=torch.float64), torch.ones_like(ratio)
    advantages = torch.full((1, 1), advantage, dtype=torch.float64)
    cells = Cells(
        ratio.log(), 0 * ones, advantages, means, ones, 2 * ones, clip=(0.3, 0.1), old_mean=means
    )
    unclipped, clipped = -advantage * ratio, -advantage * ratio.clamp(0.7, 1.1)
    torch.testing.assert_close(Guard().loss(cells), torch.maximum(unclipped, clipped) / 4)


def test_guard_log_ratio_is_centred_and_the_plain_one_is_not() -> None:
    """Check 10: over z, E[log ratio] = 0, while the plain log-ratio has mean -bias."""
    x = torch.zeros(20_000, 1, *SHAPE, dtype=torch.float64)
    shift, scale = 0.3, torch.full((20_000, 1), 0.5, dtype=torch.float64)
    z = normal(20_000, 1, *SHAPE)
    following, mean, old = 0.5 * z, x + shift, x
    new_lp, old_lp = (-((following - m) ** 2).flatten(2).mean(2) / (2 * 0.25) for m in (mean, old))
    guard = guard_ratio(new_lp, old_lp, mean, old, scale).log().mean()
    bias = shift**2 / (2 * 0.25)
    assert abs(float(guard)) < 3e-3
    assert float((new_lp - old_lp).mean()) == pytest.approx(-bias, abs=1e-2)


def guard_gradient_norms(divide_by_h: bool) -> Tensor:
    cells, leaf, z = cells_at([[1], [3], [6], [8]], drift=0.0)
    loss = Guard().loss(cells)
    if not divide_by_h:
        loss = loss * cells.sqrt_h**2
    weight = loss / cells.advantages
    (gradient,) = torch.autograd.grad(weight.sum(), leaf)
    return gradient.flatten(1).norm(dim=1) / z.flatten(1).norm(dim=1)


def test_guard_gradient_does_not_depend_on_h() -> None:
    """Check 10: |dL/dv| = |z|*(1+a^2/2)/D after 1/h, on every step of Flow-SDE."""
    expected = torch.full((4,), (1 + 0.49 / 2) / DIMENSIONS, dtype=torch.float64)
    torch.testing.assert_close(guard_gradient_norms(True), expected, atol=1e-12, rtol=0)
    assert (
        float(guard_gradient_norms(False).max() / guard_gradient_norms(False).min()) > 2
    )  # Flow-Factory's omission


# ---- check 12


def check_dppo_mask(mask: Callable[[Tensor, Tensor, Tensor, float], Tensor]) -> None:
    table = [  # A, r, K >= tau -> kept
        (1.0, 1.1, True, False),
        (1.0, 1.1, False, True),
        (1.0, 0.9, True, True),
        (1.0, 0.9, False, True),
        (-1.0, 1.1, True, True),
        (-1.0, 1.1, False, True),
        (-1.0, 0.9, True, False),
        (-1.0, 0.9, False, True),
    ]
    advantages, ratio, far, kept = (torch.tensor(column) for column in zip(*table, strict=True))
    kl = torch.where(far, 2e-5, 5e-6)
    assert torch.equal(mask(ratio, advantages, kl, 1e-5), kept)


def test_dppo_truth_table() -> None:
    """Check 12: dropped only beyond the region and moving out; corrective rows keep their
    gradient."""
    check_dppo_mask(dppo_keep)
    with pytest.raises(AssertionError):
        check_dppo_mask(lambda r, a, k, t: k < t)
    with pytest.raises(AssertionError):
        check_dppo_mask(lambda r, a, k, t: dppo_keep(r, -a, k, t))


def test_dppo_survives_an_infinite_ratio() -> None:
    """Check 12: where(), not inf * 0, also in the backward pass."""
    log_prob = torch.tensor([[800.0], [0.0]], dtype=torch.float64, requires_grad=True)
    mean = torch.zeros(2, 1, *SHAPE, dtype=torch.float64)
    ones = torch.ones(2, 1, dtype=torch.float64)
    cells = Cells(
        log_prob, torch.zeros_like(ones), ones, mean + 1.0, ones, ones, (0.1, 0.1), old_mean=mean
    )
    assert bool(torch.isinf(cells.ratio[0]))
    loss = FlowDPPO().loss(cells)
    (gradient,) = torch.autograd.grad(loss.sum(), log_prob)
    assert torch.equal(gradient, torch.tensor([[0.0], [-1.0]], dtype=torch.float64))
    keep = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    (naive,) = torch.autograd.grad((-torch.exp(log_prob) * keep).sum(), log_prob)
    assert bool(torch.isnan(naive).any())  # what the mask would do after exp


def test_rectified_weights_are_those_that_flash_grpo_publishes() -> None:
    """Shredded-Pork/Flash-GRPO scripts/train_wanx2_1_flash.py:985 at 4211013, for the first ten of
    Wan's 20 steps."""
    published = torch.tensor(
        [7.4770, 7.0414, 6.6112, 6.1867, 5.7682, 5.3559, 4.9502, 4.5513, 4.1596, 3.7754]
    )
    found = objectives.rectified_weight(LinearSDE(0.983), static_grid(20, 3.0), torch.arange(10))
    torch.testing.assert_close(
        found / found.sum(), published / published.sum(), rtol=5e-3, atol=0.0
    )
    assert float((found - found.mean()).abs().max()) > 0.1
    every = objectives.rectified_weight(FlowSDE(0.7), static_grid(10, 3.0), torch.arange(9))
    assert float(every.mean()) == pytest.approx(1.0)
