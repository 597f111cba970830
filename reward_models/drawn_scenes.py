"""Drawn scenes of one or two objects: what a prompt asserts, where the objects may lie, and how a
picture is drawn.

Prompts are "a red circle", "two green triangles" and "a red circle above a blue square". An object
is of a kind, one of 4 colours x 3 shapes; pictures are 24x24 RGB on paper white. Four kinds, one of
each colour, are held out: reinforcement learning never asks for them.

Shapes: N scenes; places are x, y, radius in pixels, y downwards.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SIDE = 24
SHAPES = ("circle", "square", "triangle")
COLOURS = {
    "red": (226, 61, 61),
    "green": (46, 160, 84),
    "blue": (52, 108, 214),
    "yellow": (245, 187, 34),
}
PAPER = torch.tensor((250, 245, 235)) / 255.0
PALETTE = torch.tensor(list(COLOURS.values())) / 255.0
"""[4, 3], in the order of COLOURS."""
RELATIONS = {"above": (0, -1), "below": (0, 1), "left of": (-1, 0), "right of": (1, 0)}
"""Relation -> the direction in which the first object lies of the second."""
RADII = {1: (4.0, 5.2), 2: (3.4, 4.3)}
"""Objects of a scene -> smallest and largest radius."""
EXTENT = torch.tensor([[1, 1, 1, 1], [0.9, 0.9, 0.9, 0.9], [1.2, 1.2, 1.4, 0.7]])
"""[3, 4]: how far each shape of radius 1 reaches to the left, right, up and down of its
centroid."""
AREA = torch.tensor([math.pi, 0.9**2 * 4, 2.4 * 2.1 / 2])
"""[3]: of each shape of radius 1."""
CLEARANCE, BORDER, MARGIN = 1.5, 0.7, 2.0
"""Pixels between the boxes of two objects, from a box to the edge, and by which a relation of a
real scene holds."""

Kind = tuple[str, str]
"""(colour, shape)."""
KINDS: tuple[Kind, ...] = tuple(itertools.product(COLOURS, SHAPES))
HELD_OUT = frozenset(
    {("red", "triangle"), ("green", "circle"), ("blue", "square"), ("yellow", "triangle")}
)


@dataclass(frozen=True)
class Scene:
    """What a prompt asserts: so many objects and no other, of these kinds, the first in `relation`
    to the second."""

    kinds: tuple[Kind, ...]
    """Kind of each object."""
    relation: str | None = None
    """None: any."""

    @property
    def text(self) -> str:
        """The prompt."""
        phrases = [" ".join(kind) for kind in self.kinds]
        if self.relation:
            return f"a {phrases[0]} {self.relation} a {phrases[1]}"
        return f"a {phrases[0]}" if len(phrases) == 1 else f"two {phrases[0]}s"

    @property
    def seen(self) -> bool:
        """Whether reinforcement learning may ask for it."""
        return not HELD_OUT & set(self.kinds)


SCENES = (
    *(Scene((kind,) * number) for kind in KINDS for number in (1, 2)),
    *(Scene(pair, relation) for pair in itertools.permutations(KINDS, 2) for relation in RELATIONS),
)
"""All 552."""
_BY_TEXT = {scene.text: scene for scene in SCENES}


def asked_scene(text: str) -> Scene:
    """Return the scene that a prompt asks for.

    Raises:
        ValueError: the prompt asks for none.
    """
    words = " ".join(re.findall(r"\w+", text.lower()))
    if words not in _BY_TEXT:
        raise ValueError(
            f"prompt {text!r} asks for no drawn scene; write 'a red circle', 'two red circles' or "
            f"'a red circle above a blue square', with {', '.join(COLOURS)}; "
            f"{', '.join(SHAPES)}; {', '.join(RELATIONS)}"
        )
    return _BY_TEXT[words]


def margin(first: Tensor, second: Tensor, relation: str) -> Tensor:
    """Return [...]: pixels by which places `first` [..., 2+] lie rather in the direction of
    `relation` from `second` than across it; > 0: the relation holds."""
    offset = (first - second)[..., :2]
    along = offset @ torch.tensor(RELATIONS[relation], dtype=offset.dtype)
    return along - (offset.abs().sum(-1) - along.abs())


def draw_places(scenes: Sequence[Scene], generator: torch.Generator) -> Tensor:
    """Places [N, 2, 3] (radius 0: no such object), drawn evenly from all where the scene is plainly
    true: objects apart and inside, a relation by `MARGIN` at least."""
    shapes = torch.tensor(
        [[SHAPES.index(k[1]) for k in (*s.kinds, s.kinds[0])[:2]] for s in scenes]
    )
    number = torch.tensor([len(scene.kinds) for scene in scenes])
    low, high = torch.tensor([RADII[int(n)] for n in number]).T
    places, open_rows = torch.zeros(len(scenes), 2, 3), torch.arange(len(scenes))
    while len(open_rows):
        rows, n = open_rows, len(open_rows)
        radius = low[rows, None] + (high - low)[rows, None] * torch.rand(n, 2, generator=generator)
        reach = EXTENT[shapes[rows]] * radius[..., None]
        least = BORDER + reach[..., [0, 2]]
        most = SIDE - BORDER - reach[..., [1, 3]]
        centre = least + (most - least) * torch.rand(n, 2, 2, generator=generator)
        gap = torch.maximum(
            centre[:, 0] - reach[:, 0][:, [0, 2]] - (centre[:, 1] + reach[:, 1][:, [1, 3]]),
            centre[:, 1] - reach[:, 1][:, [0, 2]] - (centre[:, 0] + reach[:, 0][:, [1, 3]]),
        ).amax(1)
        good = (number[rows] == 1) | (gap >= CLEARANCE)
        for relation in RELATIONS:
            held = margin(centre[:, 0], centre[:, 1], relation) >= MARGIN
            good &= torch.tensor([scenes[int(row)].relation != relation for row in rows]) | held
        drawn = torch.cat([centre, radius[..., None]], 2)
        drawn[number[rows] == 1, 1] = 0.0
        places[rows[good]] = drawn[good]
        open_rows = rows[~good]
    return places


def signed_distance(shape: Tensor, dx: Tensor, dy: Tensor, radius: Tensor) -> Tensor:
    """Pixels from each point to the edge of `shape` (index), negative inside; all broadcast,
    offsets from the centroid."""
    circle = (dx * dx + dy * dy).sqrt() - radius
    square = torch.maximum(dx.abs(), dy.abs()) - 0.9 * radius
    side = (dx.abs() * 2.1 - (dy + 1.4 * radius) * 1.2) / math.hypot(
        2.1, 1.2
    )  # apex at -1.4 r, base at 0.7 r
    triangle = torch.maximum(side, dy - 0.7 * radius)
    return torch.where(shape == 0, circle, torch.where(shape == 1, square, triangle))


def cover(shape: Tensor, places: Tensor) -> Tensor:
    """Return [..., 24, 24]: share of each pixel that shapes (index) [...] at places [..., 3] cover,
    smooth at their edge."""
    at = torch.arange(SIDE) + 0.5
    x, y, radius = (places[..., i, None, None] for i in range(3))
    return (0.5 - signed_distance(shape[..., None, None], at - x, at[:, None] - y, radius)).clamp(
        0, 1
    )


def draw(kinds: Sequence[Sequence[Kind]], places: Tensor) -> Tensor:
    """Return pictures [N, 3, 24, 24] in [0, 1] of objects at places [N, K, 3]; a scene may have
    fewer than K objects."""
    canvas = PAPER[:, None, None].repeat(len(kinds), 1, 1, 1) * torch.ones(SIDE, SIDE)
    for k in range(places.shape[1]):
        rows = torch.tensor(
            [row for row, objects in enumerate(kinds) if len(objects) > k], dtype=torch.int64
        )
        if not len(rows):
            break
        chosen = [kinds[int(row)][k] for row in rows]
        colour = PALETTE[[list(COLOURS).index(kind[0]) for kind in chosen]][..., None, None]
        shape = torch.tensor([SHAPES.index(kind[1]) for kind in chosen])
        covered = cover(shape, places[rows, k])[:, None]
        canvas[rows] += covered * (colour - canvas[rows])
    return canvas


def draw_scenes(count: int, generator: torch.Generator) -> tuple[list[Scene], Tensor]:
    """Scenes as pretraining sees them, two thirds of them with a relation, and pictures [count, 3,
    24, 24] of them."""
    split = 2 * len(KINDS)
    related = torch.rand(count, generator=generator) < 2 / 3
    plain = torch.randint(split, (count,), generator=generator)
    pairs = torch.randint(split, len(SCENES), (count,), generator=generator)
    scenes = [SCENES[int(i)] for i in torch.where(related, pairs, plain)]
    return scenes, draw([scene.kinds for scene in scenes], draw_places(scenes, generator))
