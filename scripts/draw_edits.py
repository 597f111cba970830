"""Draw the edit sets of src/digenrl/prompts: `.venv/bin/python scripts/draw_edits.py` writes them
again, byte for byte.

edits.jsonl: each line asks for a shape in another colour, and knows the picture before and after.
Shapes whose new colour is held out occur in edits_heldout.jsonl alone.

drawn_edits.jsonl: edits of the drawn scenes, 24x24. The held-out set has other pictures. Half of
its edits make kinds that are held out (`reward_models.drawn_scenes`).
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torchvision.transforms.v2.functional import to_pil_image

from reward_models import drawn_scenes
from scripts.drawn_edits import edits_of

FOLDER = Path(__file__).resolve().parents[1] / "src" / "digenrl" / "prompts"
SIDE, SCALE, PLACES = 64, 4, 3
PAPER = (250, 245, 235)
COLOURS = {
    "red": (226, 61, 61),
    "green": (46, 160, 84),
    "blue": (52, 108, 214),
    "yellow": (245, 187, 34),
}
SHAPES = ("circle", "square", "triangle")
HELD_OUT = {("circle", "green"), ("square", "blue"), ("triangle", "red")}
PICTURES = {"drawn_edits": 40, "drawn_edits_heldout": 12}
"""Name of a set -> number of its scenes. A quarter of them has a single object."""


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


def drawn_edits() -> dict[str, list[str]]:
    """Write the pictures of the sets, and return name of a set -> its lines. Training has every
    edit of its pictures that makes no held-out kind. Each held-out picture has up to two such
    edits, and up to two that make a held-out kind."""
    generator = torch.Generator().manual_seed(0)
    edits = [edit for edit in edits_of(drawn_scenes.SCENES) if edit.before.seen]
    scenes = list(dict.fromkeys(edit.before for edit in edits))
    several = [scene for scene in scenes if len(scene.kinds) > 1]
    single = [scene for scene in scenes if len(scene.kinds) == 1]
    lines: dict[str, list[str]] = {}
    for name, count in PICTURES.items():
        plain = [
            single[i]
            for i in torch.randint(len(single), (count // 4,), generator=generator).tolist()
        ]
        chosen = plain + [
            several[i]
            for i in torch.randperm(len(several), generator=generator)[: count - len(plain)]
        ]
        places = drawn_scenes.draw_places(chosen, generator)
        pictures = drawn_scenes.draw([scene.kinds for scene in chosen], places)
        lines[name] = []
        for number, (scene, where, picture) in enumerate(
            zip(chosen, places, pictures, strict=True)
        ):
            file = f"drawn_edits/{name.removeprefix('drawn_edits').strip('_') or 'train'}_{number:02d}.png"  # noqa: E501
            to_pil_image(picture).save(FOLDER / file, optimize=True)
            own = [edit for edit in edits if edit.before == scene]
            own = [own[i] for i in torch.randperm(len(own), generator=generator)]
            seen, unseen = (
                [edit for edit in own if edit.after.seen is known] for known in (True, False)
            )
            for edit in seen if name == "drawn_edits" else seen[:2] + unseen[:2]:
                facts = {"target": edit.after.text, "region": edit.region(where)}
                lines[name].append(json.dumps({"prompt": edit.text, "image": file, **facts}))
    return lines


def main() -> None:
    """Write pictures and both prompt files."""
    for name in ("edits", "drawn_edits"):
        (FOLDER / name).mkdir(exist_ok=True)
    lines: dict[bool, list[str]] = {False: [], True: []}
    for shape, colour, place in itertools.product(SHAPES, COLOURS, range(PLACES)):
        draw(shape, colour, place).save(
            FOLDER / "edits" / f"{colour}_{shape}_{place}.png", optimize=True
        )
    for shape, before, after, place in itertools.product(SHAPES, COLOURS, COLOURS, range(PLACES)):
        if before != after:
            record = {
                "prompt": f"Make the {shape} {after}.",
                "image": f"edits/{before}_{shape}_{place}.png",
                "target_image": f"edits/{after}_{shape}_{place}.png",
            }
            lines[(shape, after) in HELD_OUT].append(json.dumps(record))
    for name, content in (
        {"edits": lines[False], "edits_heldout": lines[True]} | drawn_edits()
    ).items():
        (FOLDER / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in content))


if __name__ == "__main__":
    main()
