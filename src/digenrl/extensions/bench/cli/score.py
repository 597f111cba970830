"""`make score REWARD=ocr IMAGES=dir PROMPTS=file`: score pictures or videos with any reward.

    digenrl score reward=ocr images=DIR prompts=FILE

File i of the folder is scored against prompt i of the prompt file (one a line). Files are taken in
order of name, 2.png before 10.png. Hidden files and what is no picture are left out. Prints a
table and writes outputs/scores/TIME.json (output=FILE: elsewhere): `scores` is a list of {file,
prompt, score, rewards}, `score` the mixture's weighted sum (null = missing). Every key of
configs/score.yaml may follow as key=value. The last line of standard output is that file's path.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from digenrl import prompts
from digenrl.config.command_settings import ScoreSettings
from digenrl.config.paths import why_unwritable
from digenrl.images import ImageLimits
from digenrl.reward_command import reward_command, reward_suite
from digenrl.rewards.needs import unscorable_prompts

if TYPE_CHECKING:
    from torch import Tensor

    from digenrl.rewards.suite import RewardSuite
    from digenrl.types import Prompt


def main(argv: Sequence[str]) -> int:
    """Run the command; `reward_command` describes the exit codes."""
    return reward_command("score", __doc__, argv, lambda settings: print(score_files(settings)))


def score_files(settings: ScoreSettings) -> Path:
    """Score, print the table and write the file; return its absolute path."""
    from digenrl.extensions.bench.media_files import media_files
    from digenrl.rewards.protocol import RewardUnavailable

    files, asked = media_files(Path(settings.images)), aligned_prompts(settings.prompts)
    if len(files) != len(asked):
        raise ValueError(
            f"{settings.images} holds {len(files)} pictures or videos, "
            f"{Path(settings.prompts).name} {len(asked)} prompts: give one prompt a file, in the "
            "files' order of name (2.png before 10.png)."
        )
    if problems := unscorable_prompts(
        settings.node_at("reward"),
        [(f"{settings.prompts}:{line}", prompt) for line, prompt in asked],
    ):
        raise ValueError("\n".join(problems))
    path = _output_file(settings.output)
    suite: RewardSuite = reward_suite(settings)
    try:
        rows = list(_score_rows(settings, suite, files, [prompt for _, prompt in asked]))
        failures = suite.failure_counts()
    finally:
        suite.close()
    for name, count in failures.items():
        for cause, times in count.causes.most_common():
            print(f"score: {name} is missing for {times} files: {cause}", file=sys.stderr)
    _print_table(rows)
    if all(row["score"] is None for row in rows):
        raise RewardUnavailable("no file could be scored; the causes are above.")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"reward": dict(suite.weights), "scores": rows}, indent=2, ensure_ascii=False)
        + "\n"
    )
    return path


def _output_file(asked: str | None) -> Path:
    """Return the file of the scores. Nothing is written.

    Raises:
        ValueError: it could not be written, said before hours of scoring.
    """
    path = Path(asked or f"outputs/scores/{time.strftime('%Y-%m-%d_%H-%M-%S')}.json").absolute()
    if path.exists():
        closed = path.is_dir() or not os.access(path, os.W_OK)
    else:
        closed = why_unwritable(path.parent) is not None
    if closed:
        raise ValueError(
            f"output = {path}: cannot be written; name a file in a directory that you may write."
        )
    return path


def aligned_prompts(name: str) -> list[tuple[int, Prompt]]:
    """Return (line, prompt) of every line of a prompt file, also of repeated ones: files are
    matched by position."""
    file = prompts.read_prompt_file(name, ImageLimits())
    found = dict(zip(file.lines, file.prompts, strict=True))
    return sorted((found | {line: found[first] for line, first in file.duplicates}).items())


class FileScore(TypedDict):
    """Scores of one file; None: the file could not be scored."""

    file: str
    prompt: str
    score: float | None
    """Weighted sum of the rewards."""
    rewards: dict[str, float | None]


def _score_rows(
    settings: ScoreSettings, suite: RewardSuite, files: Sequence[Path], asked: Sequence[Prompt]
) -> Iterator[FileScore]:
    """Return one entry of `scores` per file."""
    import torch

    from digenrl.rewards.suite import combine_scores

    for group in _equal_size_batches(settings, files, asked):
        media = torch.stack([entry[2] for entry in group])
        scores = suite.score(media, [entry[1] for entry in group], heldout=settings.heldout)
        total = combine_scores(scores, suite.weights)
        for row, (file, prompt, _) in enumerate(group):
            yield {
                "file": file.name,
                "prompt": prompt.text,
                "score": _number_or_none(total[row]),
                "rewards": {name: _number_or_none(values[row]) for name, values in scores.items()},
            }


def _equal_size_batches(
    settings: ScoreSettings, files: Sequence[Path], asked: Sequence[Prompt]
) -> Iterator[list[tuple[Path, Prompt, Tensor]]]:
    """Yield neighbouring files of equal size to score together: at most `batch` files and
    `max_pixels` pixels."""
    from digenrl.extensions.bench.media_files import read_media

    group: list[tuple[Path, Prompt, Tensor]] = []
    for file, prompt in zip(files, asked, strict=True):
        media = read_media(file, settings.max_frames, settings.max_pixels)
        fits = (len(group) + 1) * media[..., 0, :, :].numel() <= settings.max_pixels
        if group and not (
            fits and len(group) < settings.batch and media.shape == group[0][2].shape
        ):
            yield group
            group = []
        group.append((file, prompt, media))
    if group:
        yield group


def _number_or_none(value: Tensor) -> float | None:
    number = value.item()
    return None if math.isnan(number) else number


def _print_table(rows: Sequence[FileScore]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    names = list(rows[0]["rewards"]) if len(rows[0]["rewards"]) > 1 else []
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("file", overflow="fold")
    table.add_column("prompt", overflow="ellipsis", max_width=60, no_wrap=True)
    for name in [*names, "score"]:
        table.add_column(name, justify="right")
    for row in rows:
        cells = [_format_score(row["rewards"][name]) for name in names]
        table.add_row(row["file"], row["prompt"], *cells, _format_score(row["score"]))
    known = [row["score"] for row in rows if row["score"] is not None]
    console = Console(highlight=False, markup=False)
    console.print(table)
    if known:
        mean = statistics.fmean(known)
        console.print(
            f"{len(known)} of {len(rows)} scored; mean {mean:.4f}, lowest {min(known):.4f}, "
            f"highest {max(known):.4f}"
        )


def _format_score(value: float | None) -> str:
    return "missing" if value is None else f"{value:.4f}"
