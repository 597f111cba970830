"""Alarms against rewards that are plausible but wrong, and against policies that game them: pure functions.

Each takes what a report has read from a run and returns `Alarm`s; none means nothing was found, not that all is well.
`of_evaluations` calls those that need only the samples and scores of two evaluations (samples/eval-*.npz).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from digenrl.rewards.pictures import laplacian, luma

COLLAPSED_SHARE = 0.9
BLUR_SHARE = 0.5
GRID_RATIO = 4.0


@dataclass(frozen=True)
class Alarm:
    """One suspicion."""

    name: str
    """variance_collapse | saturated | heldout_gap | blur | grid | canary"""
    value: float
    """What was measured."""
    threshold: float
    message: str
    """Cause and what to look at."""


def of_evaluations(
    before: NDArray[np.uint8],
    after: NDArray[np.uint8],
    scores: Mapping[str, NDArray[np.float32]],
    prompts: Sequence[str],
) -> list[Alarm]:
    """Alarms that two evaluations of a run give: blur, grid, and rewards that are constant within the prompts.

    Args:
        before, after: media of the first and of the last evaluation, [N, (F,) C, H, W].
        scores: of the last evaluation, name -> [N].
        prompts: of the last evaluation, N texts; samples of one prompt are a group.
    """
    pictures = [torch.from_numpy(media).float() / 255 for media in (before, after)]
    found = [blur(*pictures), grid(*pictures)]
    rows: dict[str, list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows.setdefault(prompt, []).append(row)
    longest = max(map(len, rows.values()))
    for name, values in scores.items():
        groups = torch.full((len(rows), longest), math.nan)
        for group, members in enumerate(rows.values()):
            groups[group, : len(members)] = torch.from_numpy(values[members])
        found.append(variance_collapse(name, groups))
    return [alarm for alarm in found if alarm is not None]


def variance_collapse(name: str, rewards: Tensor, floor: float = 1e-4) -> Alarm | None:
    """Whether nearly every group of `rewards` [P, G] has one value: such a group carries no gradient.

    `floor` is the standard deviation below which a group counts as constant, in units of the reward's overall spread or
    of 1.0, whichever is larger. NaN members are left out; groups with fewer than two members do not count.
    """
    spreads = [row[~row.isnan()].std().item() for row in rewards.float() if (~row.isnan()).sum() >= 2]
    if not spreads:
        return None
    known = rewards[~rewards.isnan()]
    scale = max(1.0, known.std().item()) if known.numel() > 1 else 1.0
    share = sum(spread <= floor * scale for spread in spreads) / len(spreads)
    if share < COLLAPSED_SHARE:
        return None
    return Alarm(
        "variance_collapse",
        share,
        COLLAPSED_SHARE,
        f"Reward `{name}` is constant within {share:.0%} of the groups: no gradient comes from it "
        "(all solved, none solvable, samples alike, or a broken scorer).",
    )


def saturated(name: str, history: Sequence[float], window: int = 5, tolerance: float = 1e-6) -> Alarm | None:
    """Whether the last `window` mean rewards are the same number: a constant scorer, or one at its ceiling."""
    last = [value for value in history if math.isfinite(value)][-window:]
    if len(last) < window or max(last) - min(last) > tolerance * max(1.0, abs(last[0])):
        return None
    return Alarm(
        "saturated",
        last[-1],
        tolerance,
        f"Reward `{name}` has been {last[-1]:.6g} for {window} steps: is it still a judge?",
    )


def heldout_gap(reward: Sequence[float], heldout: Sequence[float], rise: float = 0.1) -> Alarm | None:
    """Whether the optimised reward rose while the held-out one fell: the mark of a reward that is being gamed.

    Args:
        reward, heldout: values of the evaluations, first to last, in any units.
        rise: change of the optimised reward, in units of its own standard deviation over the evaluations, that counts.
    """
    pairs = [(a, b) for a, b in zip(reward, heldout, strict=True) if math.isfinite(a) and math.isfinite(b)]
    if len(pairs) < 3:
        return None
    columns = torch.tensor(pairs, dtype=torch.float64)
    gained, lost = (columns[-1] - columns[0]).tolist()
    spread = columns[:, 0].std().item()
    if spread == 0 or gained / spread < rise or lost >= 0:
        return None
    return Alarm(
        "heldout_gap",
        lost,
        0.0,
        f"The optimised reward rose by {gained:.4g} while the held-out one fell by {-lost:.4g}: look at the samples, "
        "raise kl_weight or add the held-out reward to the mixture.",
    )


def blur(before: Tensor, after: Tensor) -> Alarm | None:
    """Whether the samples `after` have lost detail against `before` (both [N, (F,) C, H, W] in [0, 1])."""
    old, new = sharpness(before).median().item(), sharpness(after).median().item()
    if old <= 0 or new / old >= BLUR_SHARE:
        return None
    return Alarm(
        "blur",
        new / old,
        BLUR_SHARE,
        f"Samples keep {new / old:.0%} of the detail that they had before training: blur.",
    )


def grid(before: Tensor, after: Tensor) -> Alarm | None:
    """Whether a regular pattern grew: checkerboards and grids are what a policy paints to please a scorer."""
    old, new = grid_strength(before).median().item(), grid_strength(after).median().item()
    if new < GRID_RATIO * max(old, 1.0 / GRID_RATIO):
        return None
    return Alarm(
        "grid",
        new,
        GRID_RATIO * old,
        f"A regular pattern stands out {new:.1f}-fold (at first {old:.1f}): grid.",
    )


def canary(name: str, scores: Mapping[str, float], expected: Mapping[str, float], tolerance: float) -> Alarm | None:
    """Whether fixed pictures still score what they scored when the run began (picture name -> score)."""
    if unknown := sorted(set(expected) - set(scores)):
        raise KeyError(f"No canary scores for {unknown}; got {sorted(scores)}.")
    gaps = {key: abs(scores[key] - value) for key, value in expected.items()}
    worst = max(gaps, key=lambda key: gaps[key] if math.isfinite(gaps[key]) else math.inf)
    if gaps[worst] <= tolerance:
        return None
    return Alarm(
        "canary",
        gaps[worst],
        tolerance,
        f"Reward `{name}` scores the fixed picture {worst} {scores[worst]:.6g}, it scored {expected[worst]:.6g}: "
        "the reward model changed.",
    )


def sharpness(media: Tensor) -> Tensor:
    """[N] mean absolute Laplacian of the samples' brightness."""
    return laplacian(luma(media)).abs().mean((1, 2, 3))


def grid_strength(media: Tensor) -> Tensor:
    """[N] sharpest peak of the spectrum above a quarter of Nyquist, over its neighbourhood; about 1.5 = none.

    For each sample: the power of every frequency along rows (and along columns), averaged over the other axis; the
    largest ratio of one frequency to the mean of the eight around it. Photographs and noise have smooth spectra, a grid
    has a line.
    """
    frames = luma(media)
    frames = frames - frames.mean((-2, -1), keepdim=True)
    strengths = [torch.ones(frames.shape[0])]
    for axis, other in ((-1, -2), (-2, -1)):
        if frames.shape[axis] < 16:
            continue
        power = torch.fft.rfft(frames, dim=axis).abs().square().mean((1, other))
        neighbours = _window_sum(power) - power
        count = _window_sum(torch.ones_like(power)) - 1
        floor = power.mean(1, keepdim=True) * 1e-6 + 1e-12
        ratio = power / (neighbours / count + floor)
        strengths.append(ratio[:, power.shape[1] // 4 :].amax(1))
    return torch.stack(strengths).amax(0)


def _window_sum(spectrum: Tensor) -> Tensor:
    """[N, K]: sum over the nine entries around each, fewer at the ends."""
    return functional.avg_pool1d(spectrum[:, None], 9, stride=1, padding=4)[:, 0] * 9
