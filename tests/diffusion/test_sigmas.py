"""Grids: docs/algorithms.md section 1.1 and check 24."""

from __future__ import annotations

import math

import pytest
import torch

from digenrl.diffusion import sigmas


def test_static_shift_is_applied_once() -> None:
    """Check 24: s = 3*0.9/(1+2*0.9) = 0.964286 at t = 0.9; a second application gives 0.9878."""
    grid = sigmas.static_grid(10, 3.0)
    assert float(grid[1]) == pytest.approx(2.7 / 2.8, abs=1e-7)
    twice = sigmas.static_shift(sigmas.static_shift(sigmas.linear_grid(10), 3.0), 3.0)
    assert abs(float(twice[1]) - 2.7 / 2.8) > 0.02  # the test above would see a second shift


def test_dynamic_shift_of_flux() -> None:
    """mu = m*L + b: 0.5 at 256 tokens, 1.15 at 4096; s = e^mu/(e^mu + 1/t - 1)."""
    assert sigmas.dynamic_mu(256) == pytest.approx(0.5)
    assert sigmas.dynamic_mu(4096) == pytest.approx(1.15)
    grid = sigmas.dynamic_grid(8, 1024)
    mu, t = sigmas.dynamic_mu(1024), 5 / 8
    assert float(grid[3]) == pytest.approx(math.exp(mu) / (math.exp(mu) + 1 / t - 1), abs=1e-7)
    assert float(grid[0]) == 1.0
    assert float(grid[-1]) == 0.0


def test_terminal_stretch_keeps_one_and_zero() -> None:
    grid = sigmas.dynamic_grid(10, 1024, max_tokens=8192, max_shift=0.9, terminal=0.02)
    assert float(grid[0]) == 1.0
    assert float(grid[-2]) == pytest.approx(0.02, abs=1e-6)
    assert float(grid[-1]) == 0.0


def test_grids_agree_with_diffusers() -> None:
    """The published schedulers, called as the pipelines call them."""
    import numpy as np
    from diffusers import FlowMatchEulerDiscreteScheduler

    flux = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    flux.set_timesteps(sigmas=np.linspace(1.0, 1 / 10, 10), mu=sigmas.dynamic_mu(1024))
    torch.testing.assert_close(sigmas.dynamic_grid(10, 1024), flux.sigmas, atol=1e-6, rtol=0)
    qwen = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.02)
    mu = sigmas.dynamic_mu(1024, 256, 8192, 0.5, 0.9)
    qwen.set_timesteps(sigmas=np.linspace(1.0, 1 / 10, 10), mu=mu)
    ours = sigmas.dynamic_grid(10, 1024, 256, 8192, 0.5, 0.9, terminal=0.02)
    torch.testing.assert_close(ours, qwen.sigmas, atol=1e-6, rtol=0)


def test_guard_is_chosen_by_index_not_by_value() -> None:
    """Trap T8: a grid that starts at 0.9999 still has a first step."""
    grid = torch.tensor([0.9999, 0.7, 0.3, 0.0])
    sigma, following, guard = sigmas.step_sigmas(grid, torch.tensor([0, 1, 2]))
    assert torch.equal(sigma, grid[:3])
    assert torch.equal(following, grid[1:])
    assert torch.equal(guard, torch.tensor([0.7, 0.7, 0.3]))


@pytest.mark.parametrize("values", [[1.0, 0.5, 0.5, 0.0], [1.0, 0.5, 0.1], [1.2, 0.5, 0.0], [0.0]])
def test_a_bad_grid_is_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="sigma grid"):
        sigmas.check_grid(torch.tensor(values))
