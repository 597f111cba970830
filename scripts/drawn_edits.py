"""Edits of drawn scenes: "make the circle green" gives one object of a picture another colour and
changes nothing else.

A scene that is edited has one object, or two of different shapes, so that a shape names one of
them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from reward_models.drawn_scenes import COLOURS, EXTENT, SCENES, SHAPES, SIDE, Scene


@dataclass(frozen=True)
class Edit:
    """What a prompt asks of a picture."""

    before: Scene
    """What the picture shows."""
    changed: int
    """Index of the object that gets another colour."""
    colour: str

    @property
    def text(self) -> str:
        """The prompt."""
        return f"make the {self.before.kinds[self.changed][1]} {self.colour}"

    @property
    def after(self) -> Scene:
        """What the picture should show then."""
        return _recoloured(self.before, self.changed, self.colour)

    @property
    def mistakes(self) -> tuple[Scene, ...]:
        """What it shows when the edit goes wrong: nothing changed, another colour, the other object
        changed."""
        own = self.before.kinds[self.changed][0]
        wrong = [
            _recoloured(self.before, self.changed, other)
            for other in COLOURS
            if other not in (own, self.colour)
        ]
        others = [number for number in range(len(self.before.kinds)) if number != self.changed]
        wrong += [_recoloured(self.before, other, self.colour) for other in others]
        return tuple(dict.fromkeys([self.before, *wrong]))

    def region(self, places: Tensor) -> list[float]:
        """Return [left, top, right, bottom] in shares of the picture, on whole pixels: the box of
        the object that changes, of objects at places [K, 3]."""
        x, y, radius = places[self.changed].tolist()
        left, right, up, down = (
            EXTENT[SHAPES.index(self.before.kinds[self.changed][1])] * radius
        ).tolist()
        low, high = (
            (math.floor(x - left), math.floor(y - up)),
            (math.ceil(x + right), math.ceil(y + down)),
        )
        return [round(edge / SIDE, 6) for edge in (*low, *high)]


def _recoloured(scene: Scene, number: int, colour: str) -> Scene:
    kinds = list(scene.kinds)
    kinds[number] = (colour, kinds[number][1])
    return replace(scene, kinds=tuple(kinds))


def edits_of(scenes: Sequence[Scene]) -> tuple[Edit, ...]:
    """Return every edit of those `scenes` that can be edited."""
    return tuple(
        Edit(scene, number, colour)
        for scene in scenes
        if len({shape for _, shape in scene.kinds}) == len(scene.kinds)
        for number, (own, _) in enumerate(scene.kinds)
        for colour in COLOURS
        if colour != own
    )


EDITS = edits_of(SCENES)
"""All 2340."""
