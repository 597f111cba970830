"""GenEval's rules (arXiv 2310.11513) over detected objects: their number, colour and place.

All `include` clauses of a line must hold, and no `exclude` clause. A clause looks at the `count`
objects with the highest scores. Lengths are pixels, y downwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, Protocol, TypedDict

from torch import Tensor

MOST_OBJECTS = 16
"""Most objects of a class that are counted, the highest scores first."""
APART = 0.1
"""Share of both objects' sizes by which their centres must be apart to have a direction at all."""
ALONG = 0.5
"""Smallest component of the unit offset at which its direction counts. Two directions may hold at
once."""
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")


Clause = TypedDict(
    "Clause",
    {
        "class": str,
        "count": int,
        "color": NotRequired[str],
        "position": NotRequired[list[Any]],
    },
)
"""What a line asks of the objects of one class. `position` is [relation, index of the clause whose
objects they stand beside]."""


class Rules(TypedDict):
    """A line of the suite, without its prompt."""

    tag: str
    include: list[Clause]
    exclude: NotRequired[list[Clause]]


@dataclass(frozen=True)
class Detection:
    """An object in a picture."""

    label: str
    box: tuple[float, float, float, float]
    """Left, top, right, bottom."""
    score: float = 1.0


class Detector(Protocol):
    """Finder of objects and their colours."""

    def find_objects(self, picture: Tensor, classes: Sequence[str]) -> list[Detection]:
        """Return the objects of `classes` in a picture [3, H, W] in [0, 1]."""
        ...

    def name_colours(self, picture: Tensor, found: Sequence[Detection]) -> list[str | None]:
        """Return the colour of each object, one of `COLOURS`, or None if no colour fits."""
        ...


def classes_of(rules: Rules) -> list[str]:
    """Return every class that a line names, once."""
    return list(
        dict.fromkeys(clause["class"] for clause in [*rules["include"], *rules.get("exclude", [])])
    )


def find_fault(
    rules: Rules,
    picture: Tensor,
    detector: Detector,
    threshold: float,
    counting_threshold: float,
) -> str:
    """Return why `picture` [3, H, W] does not fulfil the line `rules`; "" if it does.

    Args:
        threshold: score above which detections count. Lines tagged "counting" use
            `counting_threshold`.
    """
    seen = _counted_objects(rules, picture, detector, threshold, counting_threshold)
    wrong: list[str] = []
    groups: list[list[Detection] | None] = []
    for clause in rules["include"]:
        first = seen[clause["class"]][: clause["count"]]
        problem = _clause_fault(clause, first, picture, detector, groups)
        groups.append(None if problem else first)
        wrong += [problem] if problem else []
    for clause in rules.get("exclude", []):
        number = len(seen[clause["class"]])
        if number >= clause["count"]:
            wrong.append(f"{clause['class']}: {number}, expected fewer than {clause['count']}")
    return "; ".join(wrong)


def training_terms(
    rules: Rules,
    picture: Tensor,
    detector: Detector,
    threshold: float,
    counting_threshold: float,
) -> list[float]:
    """Return the terms whose mean is Flow-GRPO's training reward (yifan123/reward-server
    `reward_server/gen_eval.py` at 7131478, `evaluate_reward`); arguments as of `find_fault`.

    Each `include` clause gives 1 - |found - asked| / asked: surplus costs as lack does, and a term
    may be negative. If the number is not exact, a colour or a place gives one term 0. Otherwise a
    colour gives 1 - |so coloured - asked| / asked. A place gives 0 if its target's own clause
    fails, 1 if the place is right, and both 0 and 1 if an object is elsewhere. `exclude` is not
    used.
    """
    seen = _counted_objects(rules, picture, detector, threshold, counting_threshold)
    terms: list[float] = []
    groups: list[list[Detection] | None] = []
    for clause in rules["include"]:
        found, count = seen[clause["class"]], clause["count"]
        terms.append(1.0 - abs(count - len(found)) / count)
        holds = len(found) == count
        if not holds and ("color" in clause or "position" in clause):
            terms.append(0.0)
        if holds and "color" in clause:
            coloured = detector.name_colours(picture, found).count(clause["color"])
            terms.append(1.0 - abs(count - coloured) / count)
            holds = coloured == count
        if holds and "position" in clause:
            others = groups[clause["position"][1]]
            holds = others is not None and not _position_fault(clause, found, others)
            terms += [0.0] * (not holds) + [1.0] * (others is not None)
        groups.append(found if holds else None)
    return terms


def _counted_objects(
    rules: Rules,
    picture: Tensor,
    detector: Detector,
    threshold: float,
    counting_threshold: float,
) -> dict[str, list[Detection]]:
    """Return the objects of each class that count, the highest scores first."""
    least = counting_threshold if rules["tag"] == "counting" else threshold
    classes = classes_of(rules)
    seen = [found for found in detector.find_objects(picture, classes) if found.score > least]
    seen.sort(key=lambda found: -found.score)
    return {name: [one for one in seen if one.label == name][:MOST_OBJECTS] for name in classes}


def _clause_fault(
    clause: Clause,
    found: Sequence[Detection],
    picture: Tensor,
    detector: Detector,
    groups: Sequence[Sequence[Detection] | None],
) -> str:
    """Return why the objects of an `include` clause do not fulfil it; "" if they do.

    `groups` are the objects of earlier clauses.
    """
    name, count = clause["class"], clause["count"]
    if len(found) < count:
        return f"{name}: {len(found)}, expected {count}"
    if "color" in clause:
        colours = detector.name_colours(picture, found)
        if colours.count(clause["color"]) < count:
            return (
                f"{name}: {', '.join(str(colour) for colour in colours)}, expected "
                f"{clause['color']}"
            )
    if "position" in clause:
        relation, target = clause["position"]
        others = groups[target]
        if others is None:
            return f"{name}: nothing that it could be {relation}"
        return _position_fault(clause, found, others)
    return ""


def _position_fault(clause: Clause, found: Sequence[Detection], others: Sequence[Detection]) -> str:
    """Return where the first object is that has not the asked place beside each of `others`; "" if
    all have."""
    relation = clause["position"][0]
    for one in found:
        for other in others:
            if relation not in (held := spatial_relations(one, other)):
                place = " and ".join(sorted(held)) or "nowhere plainly"
                return f"{clause['class']}: {place}, expected {relation}"
    return ""


def spatial_relations(one: Detection, other: Detection) -> set[str]:
    """Return the relations of `one` to `other`: up to two of left of, right of, above, below."""
    offsets, apart = [], []
    for axis in (0, 1):
        low, high, other_low, other_high = (
            one.box[axis],
            one.box[axis + 2],
            other.box[axis],
            other.box[axis + 2],
        )
        offset = (low + high - other_low - other_high) / 2
        slack = APART * (abs(high - low) + abs(other_high - other_low))
        offsets.append(offset)
        apart.append(math.copysign(max(abs(offset) - slack, 0.0), offset))
    if max(map(abs, apart)) < 1e-3:
        return set()
    x, y = (length / math.hypot(*offsets) for length in apart)
    held = {"left of": x < -ALONG, "right of": x > ALONG, "above": y < -ALONG, "below": y > ALONG}
    return {name for name, holds in held.items() if holds}
