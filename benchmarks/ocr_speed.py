"""Pictures a second that the OCR reward reads on this machine, and how well it scores words that
PIL has rendered.

    python -m benchmarks.ocr_speed [threads=2] [repeats=3] [quick=true]

Prints one row per size of picture; recognition-sized crops must reach 20 a second on two cores
(exit code 1 if not). "per core" counts processor time in place of wall time: what one free core
does, also on a busy machine.
"""

from __future__ import annotations

import math
import sys
import time

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from benchmarks._shared import Report, options
from digenrl.types import Prompt
from reward_models.ocr import Ocr

WORDS = (
    "HELLO",
    "Open Now",
    "digenrl",
    "Cafe 24",
    "BAKERY",
    "No Entry",
    "reward",
    "Willow Records",
)
SIZES = (
    (160, 48, 22),
    (256, 64, 32),
    (320, 48, 32),
    (128, 128, 16),
    (256, 256, 30),
    (512, 512, 60),
    (832, 480, 60),
)
"""Width, height, size of the letters. Those at most 64 pixels high are recognition-sized crops."""
BAR = 20.0


def render(word: str, width: int, height: int, size: int) -> torch.Tensor:
    """[3, height, width] in [0, 1]."""
    picture = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(picture)
    draw.text(
        (width / 2, height / 2), word, fill="black", font=ImageFont.load_default(size), anchor="mm"
    )
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255


def main(words: list[str]) -> int:
    """Exit code 1 if a recognition-sized crop is slower than the bar."""
    given = options(words, {"threads": "2", "repeats": "3"}, {"repeats": "1"})
    repeats, ocr = int(given["repeats"]), Ocr(threads=int(given["threads"]))
    prompts = [Prompt(f'"{word}"') for word in WORDS]
    columns = ("width", "height", "images/s", "per core", "mean score", "lowest")
    report = Report("OCR reward", f"{given['threads']} threads, {repeats} repeats.", columns)
    slowest = math.inf
    for width, height, size in SIZES:
        media = torch.stack([render(word, width, height, size) for word in WORDS])
        scores = ocr(media, prompts)
        began, cpu_began = time.perf_counter(), time.process_time()
        for _ in range(repeats):
            ocr(media, prompts)
        count = repeats * len(WORDS)
        rate = count / (time.perf_counter() - began)
        per_core = count / (time.process_time() - cpu_began)
        report.row(
            width,
            height,
            f"{rate:.1f}",
            f"{per_core:.1f}",
            f"{scores.mean():.3f}",
            f"{scores.min():.3f}",
        )
        slowest = min(slowest, rate) if height <= 64 else slowest
    report.verdict(
        slowest >= BAR, f"{slowest:.1f} recognition-sized crops a second, at least {BAR:.0f} wanted"
    )
    return report.close(given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
