"""The check of the first ratios, over ranks with unequal numbers of cells."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from digenrl.algorithms.first_ratios import FirstRatios
from digenrl.algorithms.meters import NOTHING


def beside(other: list[float]) -> Any:
    """Return a module whose collectives meet one more rank, which has these deviations."""
    theirs = torch.tensor([NOTHING, *other], dtype=torch.float64)
    sizes = [len(theirs)]

    def all_gather(mine: Tensor) -> Tensor:
        if mine.ndim == 0:
            sizes.append(int(mine))
            return torch.stack([mine, torch.tensor(len(theirs))])
        assert len(mine) == max(sizes)  # a collective takes equal shapes
        row = torch.cat([theirs, torch.full((len(mine) - len(theirs),), 7.0)])
        return torch.stack([mine, row])

    return SimpleNamespace(device="cpu", all_gather=all_gather)


@pytest.mark.parametrize(
    ("own", "other", "found"),
    [
        ([], [], None),
        ([0.25], [], 0.25),
        ([], [0.125, 0.5], 0.5),
        ([0.25, 0.5, 0.125], [0.0], 0.5),
        ([0.0], [0.0, 0.0, 0.0], 0.0),
    ],
)
def test_the_largest_deviation_of_all_ranks_may_reach_the_bound(
    own: list[float], other: list[float], found: float | None
) -> None:
    ratios = FirstRatios(torch.float32, bound=0.5)
    for deviation in own:
        ratios.keep_deviations(torch.tensor([[deviation]]))
    assert ratios.largest_deviation(beside(other)) == found
    assert ratios.largest_deviation(beside([])) is None


@pytest.mark.parametrize(("most", "says"), [(0.5, "ratio_bound=2"), (0.75, "use equal weights")])
def test_a_few_wrong_cells_are_called_rounding_and_many_are_not(most: float, says: str) -> None:
    """The quantile .999 of 1,001 deviations is the second largest."""
    ratios = FirstRatios(torch.float32, bound=0.5)
    ratios.keep_deviations(torch.tensor([1.0, most, *[0.0] * 999]))
    with pytest.raises(RuntimeError, match=says):
        ratios.largest_deviation(beside([]))


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float32, 1e-5), (torch.float64, 1e-5), (torch.bfloat16, 1e-3), (torch.float16, 1e-3)],
)
def test_what_is_rounding_depends_on_the_dtype(dtype: torch.dtype, bound: float) -> None:
    ratios = FirstRatios(dtype)
    ratios.keep_deviations(torch.tensor([0.9 * bound]))
    assert ratios.largest_deviation(beside([])) == pytest.approx(0.9 * bound)
    ratios.keep_deviations(torch.tensor([1.1 * bound]))
    with pytest.raises(RuntimeError, match="does not reproduce the rollout"):
        ratios.largest_deviation(beside([]))
