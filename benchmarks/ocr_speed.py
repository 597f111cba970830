"""Pictures a second that the OCR reward reads on this machine, and how well it scores words that PIL has rendered.

    python benchmarks/ocr_speed.py [threads=2]

Prints one row per size of picture; recognition-sized crops must reach 20 a second on two cores (exit code 1 if not).
"per core" counts processor time in place of wall time: what one free core does, also on a busy machine.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from digenrl.types import Prompt
from reward_models.ocr import Ocr

WORDS = ("HELLO", "Open Now", "digenrl", "Cafe 24", "BAKERY", "No Entry", "reward", "Willow Records")
SIZES = ((160, 48, 22), (256, 64, 32), (320, 48, 32), (128, 128, 16), (256, 256, 30), (512, 512, 60), (832, 480, 60))
"""Width, height, size of the letters. Those at most 64 pixels high are recognition-sized crops."""
REPEATS = 3
BAR = 20.0


def render(word: str, width: int, height: int, size: int) -> torch.Tensor:
    """[3, height, width] in [0, 1]."""
    picture = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(picture)
    draw.text((width / 2, height / 2), word, fill="black", font=ImageFont.load_default(size), anchor="mm")
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255


def main(threads: int) -> int:
    """Exit code 1 if a recognition-sized crop is slower than the bar."""
    ocr = Ocr(threads=threads)
    prompts = [Prompt(f'"{word}"') for word in WORDS]
    print(
        f"threads={threads}\n{'width':>6}{'height':>8}{'images/s':>10}{'per core':>10}{'mean score':>12}{'lowest':>8}"
    )
    slow = False
    for width, height, size in SIZES:
        media = torch.stack([render(word, width, height, size) for word in WORDS])
        scores = ocr(media, prompts)
        began, cpu_began = time.perf_counter(), time.process_time()
        for _ in range(REPEATS):
            ocr(media, prompts)
        count = REPEATS * len(WORDS)
        rate = count / (time.perf_counter() - began)
        per_core = count / (time.process_time() - cpu_began)
        speed = f"{width:>6}{height:>8}{rate:>10.1f}{per_core:>10.1f}"
        print(f"{speed}{scores.mean():>12.3f}{scores.min():>8.3f}", flush=True)
        slow |= height <= 64 and rate < BAR
    return int(slow)


if __name__ == "__main__":
    given = dict(word.partition("=")[::2] for word in sys.argv[1:])
    sys.exit(main(int(given.get("threads", 2))))
