"""Means of a benchmark with 95 % intervals. The unit is the prompt, because images of one prompt
are similar."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

_Z = 1.959964
_RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float
    prompts: int


def of_shares(shares: Sequence[float]) -> Estimate:
    """Return the mean share of right images over prompts, with Wilson's interval for that many
    draws.

    Counting prompts instead of images keeps the interval from being too narrow, because images of
    one prompt are not independent.
    """
    mean, n = fmean(shares), len(shares)
    centre = (mean + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(mean * (1 - mean) / n + _Z**2 / (4 * n**2))
    return Estimate(mean, min(mean, centre - half), max(mean, centre + half), n)


def of_values(values: Sequence[float]) -> Estimate:
    """Return the mean of one value per prompt, with percentiles of a bootstrap over prompts (fixed
    seed).

    The interval is NaN for a single prompt.
    """
    array = np.asarray(values)
    if len(array) == 1:
        return Estimate(float(array[0]), math.nan, math.nan, 1)
    rows = np.random.default_rng(0).integers(len(array), size=(_RESAMPLES, len(array)))
    low, high = np.percentile(array[rows].mean(1), [2.5, 97.5])
    return Estimate(float(array.mean()), float(low), float(high), len(array))


def over_tags(tags: Mapping[str, Estimate]) -> Estimate:
    """Return the mean over tags, which have equal weight as in GenEval. Distances to the bounds add
    as squares (Newcombe)."""
    each = list(tags.values())
    mean = fmean(one.mean for one in each)
    low = math.sqrt(sum((one.mean - one.low) ** 2 for one in each)) / len(each)
    high = math.sqrt(sum((one.high - one.mean) ** 2 for one in each)) / len(each)
    return Estimate(mean, mean - low, mean + high, sum(one.prompts for one in each))
