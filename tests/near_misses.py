"""Scenes that a judge must tell from the asked one."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from reward_models.drawn_scenes import KINDS, RELATIONS, SCENES, Scene


@lru_cache(maxsize=len(SCENES))
def near_misses(scene: Scene) -> tuple[Scene, ...]:
    """Return the scenes that differ from `scene` in one assertion. It is a colour, a shape, the
    number, the relation, or an exchange of the two colours or shapes."""
    if not scene.relation:
        others = [
            Scene((kind,) * len(scene.kinds))
            for kind in KINDS
            if sum(map(_differs, kind, scene.kinds[0])) == 1
        ]
        return (*others, Scene(scene.kinds[:1] * (3 - len(scene.kinds))))
    first, second = scene.kinds
    pairs = [(kind, second) for kind in KINDS if sum(map(_differs, kind, first)) == 1]
    pairs += [(first, kind) for kind in KINDS if sum(map(_differs, kind, second)) == 1]
    pairs += [
        ((second[0], first[1]), (first[0], second[1])),
        ((first[0], second[1]), (second[0], first[1])),
    ]
    wrong = [
        Scene(pair, scene.relation)
        for pair in dict.fromkeys(pairs)
        if pair[0] != pair[1] and pair != scene.kinds
    ]
    return (
        *wrong,
        *(replace(scene, relation=other) for other in RELATIONS if other != scene.relation),
    )


def _differs(a: str, b: str) -> bool:
    return a != b
