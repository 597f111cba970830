"""Samples of a report: the same prompts from the same noise over time, the best and the worst, and
changes by prompt."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from digenrl.report.page import gallery
from digenrl.report.page.gallery import Tile
from digenrl.report.pictures import Samples, read_samples, sample_files
from digenrl.report.read_run import Run, is_number
from digenrl.report.tables import format_number

PROMPTS, MOMENTS, EXTREMES, CHANGES = 8, 6, 6, 6
"""Most prompts on a page, evaluations of a prompt, best and worst samples, and prompts with the
largest changes."""


@dataclass(frozen=True)
class Cell:
    """A sample on a page."""

    source: str
    """Content as a data: address."""
    is_video: bool
    score: str
    prompt: str
    """Whole text of the prompt."""


@dataclass(frozen=True)
class Showing:
    """Samples of a run's evaluations that a page shows."""

    steps: tuple[int, ...]
    """RL steps of the evaluations in `rows`."""
    rows: tuple[tuple[str, tuple[Cell | None, ...]], ...]
    """(prompt, its first sample at each of `steps`)."""
    best: tuple[Cell, ...]
    worst: tuple[Cell, ...]
    """Samples of the last evaluation with the lowest scores."""
    changes: tuple[tuple[str, str, str, str], ...]
    """(prompt, mean score at first, mean score at last, change), the largest gains first."""


def samples_to_show(run: Run) -> Showing | None:
    """Return the samples to show, or None if no evaluation has kept a sample.

    Raises:
        ValueError: a file of samples is damaged.
        OSError: a file of samples cannot be read.
    """
    files = sample_files(run)
    if not files:
        return None
    places = sorted(
        {round(place) for place in np.linspace(0, len(files) - 1, min(MOMENTS, len(files)))}
    )
    moments = [read_samples(files[place]) for place in places]
    weights = _reward_weights(run)
    scores = [
        gallery.total_scores(moment.scores, weights, len(moment.prompts)) for moment in moments
    ]
    rows = [gallery.by_prompt(moment.prompts) for moment in moments]
    last, score = moments[-1], scores[-1]
    shown = [
        (
            prompt,
            tuple(
                _first_cell(prompt, *moment) for moment in zip(moments, scores, rows, strict=True)
            ),
        )
        for prompt in list(rows[-1])[:PROMPTS]
    ]
    best, worst = (
        tuple(
            map(
                make_cell,
                gallery.make_tiles(
                    last.media, last.prompts, score, chosen, last.sources, last.sound
                ),
            )
        )
        for chosen in gallery.extreme_rows(score, EXTREMES)
    )
    means = [
        {prompt: float(np.mean(score[own])) for prompt, own in places.items()}
        for score, places in zip(scores, rows, strict=True)
    ]
    changes = _score_changes(means[0], means[-1]) if len(moments) > 1 else ()
    return Showing(
        tuple(moment.rl_step for moment in moments), tuple(shown), best, worst, tuple(changes)
    )


def make_cell(tile: Tile) -> Cell:
    """Return a tile for a page. A video becomes MP4, or a strip of its frames if imageio is
    missing."""
    mime, data = gallery.encode_image(gallery.still_image(tile.media, tile.source))
    is_video = False
    if tile.is_video:
        with suppress(ImportError):
            mime, data, is_video = "video/mp4", gallery.encode_video(tile), True
    source = f"data:{mime};base64,{base64.b64encode(data).decode()}"
    return Cell(source, is_video, gallery.score_caption(tile), tile.prompt)


def _first_cell(
    prompt: str, moment: Samples, score: NDArray[np.float64], rows: Mapping[str, Sequence[int]]
) -> Cell | None:
    if prompt not in rows:
        return None
    kept = moment.media, moment.prompts, score, rows[prompt][:1], moment.sources, moment.sound
    return make_cell(gallery.make_tiles(*kept)[0])


def _score_changes(
    first: Mapping[str, float], last: Mapping[str, float]
) -> Iterable[tuple[str, str, str, str]]:
    gains = [(last[prompt] - first[prompt], prompt) for prompt in last if prompt in first]
    known = sorted((gain for gain in gains if is_number(gain[0])), key=lambda gain: -gain[0])
    kept = known if len(known) <= 2 * CHANGES else [*known[:CHANGES], *known[-CHANGES:]]
    for gain, prompt in kept:
        yield prompt, format_number(first[prompt]), format_number(last[prompt]), f"{gain:+.3f}"


def _reward_weights(run: Run) -> dict[str, float]:
    """Return the weights of the optimised rewards in the configuration."""
    group = run.config.get("reward")
    rewards = group.get("rewards") if isinstance(group, Mapping) else None
    entries = rewards.items() if isinstance(rewards, Mapping) else ()
    weights = {
        str(name): entry.get("weight", 1.0) for name, entry in entries if isinstance(entry, Mapping)
    }
    return {name: float(weight) for name, weight in weights.items() if is_number(weight)}
