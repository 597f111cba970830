"""Draw the edit set of src/digenrl/prompts: `.venv/bin/python scripts/draw_edits.py` writes it again, byte for byte.

Each line asks for a shape in another colour, and knows the picture before and after. Shapes whose new colour is held
out occur in edits_heldout.jsonl alone.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from PIL import Image, ImageDraw

FOLDER = Path(__file__).resolve().parents[1] / "src" / "digenrl" / "prompts"
SIDE, SCALE, PLACES = 64, 4, 3
PAPER = (250, 245, 235)
COLOURS = {"red": (226, 61, 61), "green": (46, 160, 84), "blue": (52, 108, 214), "yellow": (245, 187, 34)}
SHAPES = ("circle", "square", "triangle")
HELD_OUT = {("circle", "green"), ("square", "blue"), ("triangle", "red")}


def draw(shape: str, colour: str, place: int) -> Image.Image:
    """One shape on paper, its edges smoothed; places run from the upper left to the lower right."""
    picture = Image.new("RGB", (SIDE * SCALE, SIDE * SCALE), PAPER)
    pen, low, high = ImageDraw.Draw(picture), (4 + 10 * place) * SCALE, (40 + 10 * place) * SCALE
    if shape == "circle":
        pen.ellipse((low, low, high, high), fill=COLOURS[colour])
    elif shape == "square":
        pen.rectangle((low, low, high, high), fill=COLOURS[colour])
    else:
        pen.polygon(((low, high), (high, high), ((low + high) / 2, low)), fill=COLOURS[colour])
    return picture.resize((SIDE, SIDE), Image.Resampling.BOX)


def main() -> None:
    """Write pictures and both prompt files."""
    (FOLDER / "edits").mkdir(exist_ok=True)
    lines: dict[bool, list[str]] = {False: [], True: []}
    for shape, colour, place in itertools.product(SHAPES, COLOURS, range(PLACES)):
        draw(shape, colour, place).save(FOLDER / "edits" / f"{colour}_{shape}_{place}.png", optimize=True)
    for shape, before, after, place in itertools.product(SHAPES, COLOURS, COLOURS, range(PLACES)):
        if before != after:
            record = {
                "prompt": f"Make the {shape} {after}.",
                "image": f"edits/{before}_{shape}_{place}.png",
                "target_image": f"edits/{after}_{shape}_{place}.png",
            }
            lines[(shape, after) in HELD_OUT].append(json.dumps(record))
    for heldout, name in ((False, "edits.jsonl"), (True, "edits_heldout.jsonl")):
        (FOLDER / name).write_text("".join(f"{line}\n" for line in lines[heldout]))


if __name__ == "__main__":
    main()
