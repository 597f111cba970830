"""Alarms about the samples and scores of two evaluations of a run: blur, grids, constant rewards.

Each function returns `Alarm`s. `of_evaluations` calls all of them. Of an evaluation's pictures they
need two numbers each (`Looks`), so that nobody has to keep the pictures of the first.
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
from torch.nn.utils.rnn import pad_sequence

from digenrl.rewards.protocol import luma
from digenrl.rollout.engine import picture_detail
from digenrl.rollout.evaluation import Pictures

COLLAPSED_SHARE = 0.9
BLUR_SHARE = 0.5
GRID_RATIO = 4.0
NOISE_RATIO = 4.0
"""Detail of samples with noise over that of clean ones, or its inverse, from which they are
destroyed."""
_AT_ONCE_BYTES = 256 << 20
"""Bytes of samples in fp32 that are measured together; at least one sample."""


@dataclass(frozen=True)
class Alarm:
    """One suspicion."""

    name: str
    """variance_collapse | blur | grid"""
    value: float
    """Measured value."""
    threshold: float
    message: str
    """Cause, and what to look at."""


@dataclass(frozen=True)
class Looks:
    """What alarms compare of N pictures or videos."""

    detail: Tensor
    """[N], see `digenrl.rollout.engine.picture_detail`."""
    grid: Tensor
    """[N], see `grid_strength`."""


def looks_of(media: Tensor) -> Looks:
    """Measure uint8 media [N, (F,) C, H, W], a few samples at a time. In fp32 all videos of an
    evaluation would take tens of gigabytes of host memory."""
    parts = media.split(max(1, _AT_ONCE_BYTES // (4 * media[0].numel())))
    found = [
        (picture_detail(part), grid_strength(part))
        for part in (part.float() / 255 for part in parts)
    ]
    details, grids = zip(*found, strict=True)
    return Looks(torch.cat(details), torch.cat(grids))


def of_pictures(
    before: Looks, after: Looks, pictures: Pictures, rewards: Sequence[str]
) -> list[Alarm]:
    """Return the alarms of two evaluations. The last one has `pictures`, with the scores of
    `rewards`."""
    scores = {name: pictures.rewards[name].numpy() for name in rewards}
    return of_evaluations(before, after, scores, [prompt.text for prompt in pictures.prompts])


def of_evaluations(
    before: Looks,
    after: Looks,
    scores: Mapping[str, NDArray[np.float32]],
    prompts: Sequence[str],
) -> list[Alarm]:
    """Return the alarms of two evaluations of a run: blur, grid, and rewards that are constant
    within the prompts.

    Args:
        before, after: the first and the last evaluation.
        scores: scores of the last evaluation, name -> [N].
        prompts: prompts of the last evaluation, N texts. Samples of one prompt are a group.
    """
    found = [blur_alarm(before, after), grid_alarm(before, after)]
    rows: dict[str, list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows.setdefault(prompt, []).append(row)
    for name, values in scores.items():
        groups = [torch.from_numpy(values[members]) for members in rows.values()]
        found.append(
            variance_collapse(name, pad_sequence(groups, batch_first=True, padding_value=math.nan))
        )
    return [alarm for alarm in found if alarm is not None]


def variance_collapse(name: str, rewards: Tensor, floor: float = 1e-4) -> Alarm | None:
    """Return an alarm if nearly every group of `rewards` [P, G] has a single value and so gives no
    gradient.

    `floor` is the standard deviation below which a group counts as constant. Its unit is the
    reward's overall spread or 1.0, whichever is larger. NaN members are left out. Groups with fewer
    than two members do not count.

    Example:
        All of the first batch's groups are constant, half of the second's:

        >>> variance_collapse("ocr", torch.tensor([[1.0, 1.0], [0.0, 0.0]])).value
        1.0
        >>> variance_collapse("ocr", torch.tensor([[1.0, 1.0], [0.0, 1.0]]))  # no alarm
    """
    spreads = [
        row[~row.isnan()].std().item() for row in rewards.float() if (~row.isnan()).sum() >= 2
    ]
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


def blur_alarm(before: Looks, after: Looks) -> Alarm | None:
    """Return an alarm if the samples `after` have less detail than `before`."""
    old, new = before.detail.median().item(), after.detail.median().item()
    if old <= 0 or new / old >= BLUR_SHARE:
        return None
    return Alarm(
        "blur",
        new / old,
        BLUR_SHARE,
        f"Samples keep {new / old:.0%} of the detail that they had before training: blur.",
    )


def grid_alarm(before: Looks, after: Looks) -> Alarm | None:
    """Return an alarm if a regular pattern grew, such as checkerboards and grids that please a
    scorer."""
    old, new = before.grid.median().item(), after.grid.median().item()
    if new < GRID_RATIO * max(old, 1.0 / GRID_RATIO):
        return None
    return Alarm(
        "grid",
        new,
        GRID_RATIO * old,
        f"A regular pattern stands out {new:.1f}-fold (at first {old:.1f}): grid.",
    )


def destroyed_warning(noisy_detail: float | None) -> str | None:
    """Return a warning where samples with the run's own noise have another amount of detail than
    clean ones: noise in place of pictures, or nothing at all."""
    if noisy_detail is None or 1 / NOISE_RATIO <= noisy_detail <= NOISE_RATIO:
        return None
    said = "noise" if noisy_detail > 1 else "nearly nothing"
    return (
        f"samples with the run's noise have {noisy_detail:.2g} times the detail of clean ones: "
        f"rollouts draw {said}, which no reward can rank; lower algorithm.sde.noise_level (or "
        "eta), or put noise into fewer or earlier steps (algorithm/train_steps)"
    )


def grid_strength(media: Tensor) -> Tensor:
    """Return [N] of media in [0, 1]: the sharpest peak of the spectrum above a quarter of Nyquist
    over its neighbourhood; about 1.5 = no peak.

    The power of every frequency along rows (and along columns) is averaged over the other axis. The
    result is the largest ratio of a frequency to the mean of the eight around it. Photographs and
    noise have smooth spectra, a grid has a line.
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
    """Return [N, K], the sum over the nine entries around each, fewer at the ends."""
    return functional.avg_pool1d(spectrum[:, None], 9, stride=1, padding=4)[:, 0] * 9
