"""Grids: docs/algorithms.md section 1.1 and check 24."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from digenrl.diffusion import sigmas


def test_static_shift_is_applied_once() -> None:
    """Check 24: s = 3*0.9/(1+2*0.9) = 0.964286 at t = 0.9; a second application gives 0.9878."""
    grid = sigmas.static_grid(10, 3.0)
    assert float(grid[1]) == pytest.approx(2.7 / 2.8, abs=1e-7)
    twice = sigmas.static_shift(sigmas.static_shift(sigmas.linear_grid(10), 3.0), 3.0)
    assert abs(float(twice[1]) - 2.7 / 2.8) > 0.02  # the test above would see a second shift


def test_guard_is_chosen_by_index_not_by_value() -> None:
    """Trap T8: a grid that starts at 0.9999 still has a first step."""
    grid = torch.tensor([0.9999, 0.7, 0.3, 0.0])
    sigma, following, guard = sigmas.step_sigmas(grid, torch.tensor([0, 1, 2]))
    assert torch.equal(sigma, grid[:3])
    assert torch.equal(following, grid[1:])
    assert torch.equal(guard, torch.tensor([0.7, 0.7, 0.3]))


@pytest.mark.parametrize(
    "values",
    [[1.0, 0.5, 0.5, 0.0], [1.0, 0.5, 0.1], [1.2, 0.5, 0.0], [0.0], [[1.0, 0.0]]],
)
def test_a_bad_grid_is_refused(values: list[Any]) -> None:
    assert sigmas.static_grid(1).tolist() == [1.0, 0.0], "one step is a grid"
    with pytest.raises(ValueError, match="sigma grid"):
        sigmas.check_grid(torch.tensor(values))


def test_where_no_shift_is_named_the_grid_is_linear_and_a_shift_of_nothing_is_refused() -> None:
    assert torch.equal(sigmas.static_grid(4), sigmas.linear_grid(4).float())
    with pytest.raises(ValueError, match="shift must be positive, got 0"):
        sigmas.static_shift(sigmas.linear_grid(4), 0.0)
