"""Hold `training_terms` of GenEval against the published function, on drawn detections.

    python -m scripts.published_geneval CHECKOUT/reward_server/gen_eval.py [CASES]

CHECKOUT is yifan123/reward-server (7131478 was compared); its `evaluate_reward` is read out of the
file and called with told detections. No model is needed.
"""

from __future__ import annotations

import ast
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from digenrl.extensions.bench.geneval import COLOURS, Clause, Detection, Rules, training_terms

_NAMES = ("evaluate_reward", "relative_position")
_CLASSES = ("cat", "dog", "tv")
_RELATIONS = ("left of", "right of", "above", "below")


def main(source: str, cases: str = "9000") -> None:
    published, draw, worst = _published(Path(source)), random.Random(0), 0.0
    for _ in range(int(cases)):
        rules, found, colours = _rules(draw), _found(draw), dict[tuple[float, ...], str]()
        colours.update({one.box: draw.choice(COLOURS[:2]) for one in found})
        terms = training_terms(rules, torch.zeros(3, 1, 1), _Told(found, colours), 0.3, 0.3)
        objects: dict[str, list[Any]] = {}
        for one in sorted(found, key=lambda one: -one.score):
            if len(objects.setdefault(one.label, [])) < 16:
                objects[one.label].append((np.array([*one.box, one.score]), None))
        wanted = published(colours)(None, objects, rules)[1]
        worst = max(worst, abs(wanted - sum(terms) / len(terms)))
    print(f"{cases} cases, largest difference {worst:.2e}")
    if worst > 1e-6:
        raise SystemExit("the rules differ")


class _Told:
    """A detector that is told what it sees."""

    def __init__(self, found: Sequence[Detection], colours: dict[tuple[float, ...], str]) -> None:
        self._found, self._colours = found, colours

    def find_objects(self, picture: Tensor, classes: Sequence[str]) -> list[Detection]:
        return [one for one in self._found if one.label in classes]

    def name_colours(self, picture: Tensor, found: Sequence[Detection]) -> list[str | None]:
        return [self._colours[one.box] for one in found]


def _published(source: Path) -> Any:
    """Return what makes the published function, given the colours of the boxes."""
    wanted: list[ast.stmt] = [
        node
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name in _NAMES
    ]
    code = compile(ast.Module(wanted, []), str(source), "exec")

    def made(colours: dict[tuple[float, ...], str]) -> Any:
        def named(image: Any, objects: Any, name: str) -> list[str]:
            return [colours[tuple(map(float, box[:4]))] for box, _ in objects]

        names = {"np": np, "POSITION_THRESHOLD": 0.1, "COLORS": COLOURS}
        names["color_classification"] = named
        exec(code, names)
        return names["evaluate_reward"]

    return made


def _rules(draw: random.Random) -> Rules:
    include: list[Clause] = []
    for name in draw.sample(_CLASSES, draw.randint(1, 3)):
        clause: Clause = {"class": name, "count": draw.choice((1, 1, 1, 2, 3, 4))}
        if draw.random() < 0.4:
            clause["color"] = draw.choice(COLOURS[:2])
        if include and draw.random() < 0.5:
            clause["position"] = [draw.choice(_RELATIONS), draw.randrange(len(include))]
        include.append(clause)
    return {"tag": "drawn", "include": include}


def _found(draw: random.Random) -> list[Detection]:
    found = []
    for _ in range(draw.choice((0, 1, 2, 2, 3, 3, 4, 5, 20))):
        left, top = draw.uniform(0, 90), draw.uniform(0, 90)
        box = (left, top, left + draw.uniform(1, 40), top + draw.uniform(1, 40))
        found.append(Detection(draw.choice(_CLASSES), box, draw.uniform(0.31, 1.0)))
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
