"""Animate a run's evaluations: `.venv/bin/python scripts/animate_run.py RUN docs/first_run.gif`.

Each frame is one evaluation: the same prompts from the same noise, drawn by the weights of that RL
step. docs/first_run.gif is the README's first picture, of `make train
ARGS=callbacks.evaluation.every=5`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from digenrl.report.pictures import Samples, read_samples, sample_files
from digenrl.report.read_run import read_run

PROMPTS, SAMPLES, SIDE, GAP, HEAD = 5, 4, 96, 6, 36
"""Prompts shown and pictures of each; pixels of a picture, of a gap and of the line above."""
STEP_MS, LAST_MS = 700, 3500
"""Milliseconds of a frame, and of the last."""


def frame(samples: Samples, prompts: Sequence[str], last: int) -> Image.Image:
    """Return one evaluation: a row for each prompt, below a bar of the RL steps."""
    pace, font = SIDE + GAP, ImageFont.load_default(15)
    left = int(max(font.getlength(prompt) for prompt in prompts)) + 3 * GAP
    canvas = Image.new("RGB", (left + SAMPLES * pace, HEAD + len(prompts) * pace), "white")
    pen = ImageDraw.Draw(canvas)
    pen.text((GAP, 8), f"RL step {samples.rl_step} of {last}", "black", font)
    pen.rectangle((0, HEAD - 7, canvas.width * samples.rl_step // last, HEAD - 4), "#2a6fdb")
    for row, prompt in enumerate(prompts):
        top = HEAD + row * pace
        pen.text((GAP, top + SIDE // 2 - 9), prompt, "black", font)
        kept = [index for index, text in enumerate(samples.prompts) if text == prompt][:SAMPLES]
        for column, index in enumerate(kept):
            pixels = np.moveaxis(samples.media[index], 0, -1).squeeze()
            picture = Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
            canvas.paste(picture, (left + column * pace, top))
    return canvas


def main(run: str, out: str) -> None:
    """Write the animation."""
    kept = [read_samples(path) for path in sample_files(read_run(run))]
    prompts = list(dict.fromkeys(kept[0].prompts))[::2][:PROMPTS]
    frames = [frame(each, prompts, kept[-1].rl_step) for each in kept]
    # One palette: a colour of its own for each frame would flicker where nothing changes.
    palette = frames[-1].quantize(255, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    small = [each.quantize(palette=palette, dither=Image.Dither.NONE) for each in frames]
    times = [STEP_MS] * (len(small) - 1) + [LAST_MS]
    small[0].save(out, save_all=True, append_images=small[1:], duration=times, loop=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
