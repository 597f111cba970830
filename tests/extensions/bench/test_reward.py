"""GenEval as a reward: made cases of its rules, and a random detector loaded as a real one is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from digenrl.data import load_prompts
from digenrl.extensions.bench.geneval import Detection
from digenrl.extensions.bench.reward import GenEval
from digenrl.types import Prompt

PICTURE = torch.zeros(3, 40, 40)


class Told:
    """A detector that is told what it sees: (label, colour, left, score)."""

    def __init__(self, *objects: tuple[str, str, float, float]) -> None:
        self.objects = objects

    def find_objects(self, picture: Tensor, classes: Sequence[str]) -> list[Detection]:
        return [
            Detection(label, (left, 0.0, left + 4.0, 4.0), score)
            for label, _, left, score in self.objects
            if label in classes
        ]

    def name_colours(self, picture: Tensor, found: Sequence[Detection]) -> list[str | None]:
        named = {left: colour for _, colour, left, _ in self.objects}
        return [named[one.box[0]] for one in found]


def scored(rules: dict[str, Any], *objects: tuple[str, str, float, float], strict: bool) -> float:
    judge = object.__new__(GenEval)
    judge.strict, judge.threshold, judge.counting = strict, 0.3, 0.3
    judge.detector = Told(*objects)  # type: ignore[assignment]
    return judge.score_picture(PICTURE, rules)


THREE = {
    "tag": "counting",
    "include": [{"class": "dog", "count": 3}],
    "exclude": [{"class": "dog", "count": 4}],
}
RED = {"tag": "colors", "include": [{"class": "dog", "count": 1, "color": "red"}]}
LEFT = {
    "tag": "position",
    "include": [
        {"class": "cat", "count": 1},
        {"class": "dog", "count": 1, "position": ["left of", 0]},
    ],
}
BOTH = {
    "tag": "two_object",
    "include": [{"class": "cat", "count": 1}, {"class": "dog", "count": 1}],
}
DOGS = [("dog", "red", 8.0 * place, 0.9) for place in range(6)]


@pytest.mark.parametrize(
    ("rules", "objects", "graded", "strict"),
    [
        *(
            (THREE, DOGS[:n], g, s)
            for n, g, s in ((0, 0, 0), (2, 2 / 3, 0), (3, 1, 1), (4, 2 / 3, 0), (6, 0, 0))
        ),
        (THREE, [*DOGS[:3], ("dog", "red", 30.0, 0.2)], 1, 1),  # the fourth is not sure
        (RED, [("dog", "red", 0.0, 0.9)], 1, 1),
        (RED, [("dog", "blue", 0.0, 0.9)], 0.5, 0),
        (RED, [("cat", "red", 0.0, 0.9)], 0, 0),
        (LEFT, [("dog", "red", 0.0, 0.9), ("cat", "red", 20.0, 0.9)], 1, 1),
        (
            LEFT,
            [("dog", "red", 20.0, 0.9), ("cat", "red", 0.0, 0.9)],
            3 / 4,
            0,
        ),  # as published: 0 and 1
        (LEFT, [("dog", "red", 0.0, 0.9)], 1 / 3, 0),
        (RED, DOGS[:4], -1, 1),  # surplus costs
        (BOTH, [("cat", "red", 0.0, 0.9)], 0.5, 0),
    ],
)
def test_made_cases(rules, objects, graded, strict) -> None:
    assert scored(rules, *objects, strict=False) == pytest.approx(graded)
    assert scored(rules, *objects, strict=True) == strict


@pytest.mark.heavy
def test_a_random_detector_and_clip_are_loaded_as_real_ones_are() -> None:
    options = {"build": "tiny", "threshold": 0.0, "counting_threshold": 0.0}
    first, again = GenEval(None, None, **options), GenEval(None, None, **options)
    prompts = load_prompts("objects.jsonl")[:6]
    GenEval.check_prompts(load_prompts("objects.jsonl") + load_prompts("objects_heldout.jsonl"))
    media = torch.rand(6, 3, 48, 48, generator=torch.Generator().manual_seed(0))
    scores = first(media, prompts)
    assert torch.equal(scores, again(media, prompts))
    assert (scores <= 1).all()
    assert first.weights_digest == again.weights_digest
    assert "strict=False" in first.model_id
    with pytest.raises(ValueError, match="has no GenEval rules"):
        GenEval.check_prompts([Prompt("a dog")])
    with pytest.raises(ValueError, match="build=real needs `path`"):
        GenEval(None, None)
