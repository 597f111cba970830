"""Edits of drawn scenes: what is asked, what is rewarded, and the committed set."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from digenrl.data import load_prompts
from digenrl.rewards.protocol import source_images
from digenrl.types import Prompt
from reward_models.drawn_scenes import PAPER, asked_scene, draw
from reward_models.region import outside
from reward_models.scene_edits import SceneEdit, ScenePreserved
from reward_models.scene_judges import SceneJudge, detect
from scripts.drawn_edits import EDITS, edits_of

PROMPTS = list(load_prompts("drawn_edits.jsonl"))[::3]
SIZE = torch.zeros(len(PROMPTS), 3, 24, 24)


@pytest.fixture(scope="module")
def sources() -> Tensor:
    return source_images(SIZE, PROMPTS)


def edited(source: Tensor, prompt: Prompt) -> Tensor:
    """`source` with the region as the target has it, drawn where the object was found."""
    assert prompt.target
    objects = {found.shape: found for found in detect(source[None])[0]}
    kinds = asked_scene(prompt.target).kinds
    places = [
        (objects[shape].x, objects[shape].y, (objects[shape].area / area(shape)) ** 0.5)
        for _, shape in kinds
    ]
    rest = outside(prompt, 24, 24)
    return torch.where(rest, source, draw([kinds], torch.tensor([places]))[0])


def area(shape: str) -> float:
    return {"circle": torch.pi, "square": 3.24, "triangle": 2.52}[shape]


def test_the_right_edit_a_copy_and_a_spoilt_rest_are_told_apart(sources: Tensor) -> None:
    right = torch.stack([edited(*pair) for pair in zip(sources, PROMPTS, strict=True)])
    assert torch.equal(SceneEdit()(right, PROMPTS), torch.ones(len(PROMPTS)))
    assert SceneJudge()(right, PROMPTS).mean() > 0.9
    for judge in (SceneEdit(), SceneJudge()):
        assert judge(sources, PROMPTS).mean() < 0.05, "nothing was changed"
    assert torch.equal(ScenePreserved()(sources, PROMPTS), torch.ones(len(PROMPTS)))
    erased = PAPER[:, None, None].expand_as(sources).clone()
    alone = torch.tensor([len(detect(source[None])[0]) == 1 for source in sources])
    left = torch.where(alone, 1.0, 0.5)  # the paper, and half of it: the other object is gone
    assert (ScenePreserved()(erased, PROMPTS) - left).abs().max() < 0.02
    assert ScenePreserved()(1 - sources, PROMPTS).max() < 0.1


def test_every_edit_ends_in_a_scene_and_every_mistake_in_another() -> None:
    assert len(EDITS) == 2340
    for edit in EDITS[::7]:
        assert asked_scene(edit.after.text) == edit.after
        assert edit.before in edit.mistakes
        assert edit.after not in edit.mistakes
        assert all(asked_scene(wrong.text) == wrong for wrong in edit.mistakes)


def test_the_committed_set_asks_for_what_its_pictures_can_become() -> None:
    training, heldout = load_prompts("drawn_edits.jsonl"), load_prompts("drawn_edits_heldout.jsonl")
    assert (len(training), len(heldout)) == (117, 45)
    assert {p.images for p in training}.isdisjoint(p.images for p in heldout)
    scenes = [asked_scene(str(prompt.target)) for prompt in (*training, *heldout)]
    assert all(scene.seen for scene in scenes[:117])
    assert 20 <= sum(scene.seen for scene in scenes[117:]) <= 25
    for prompt, scene in zip((*training, *heldout), scenes, strict=True):
        before = tuple(
            (found.colour, found.shape) for found in detect(source_images(SIZE[:1], [prompt]))[0]
        )
        edits = edits_of([replace(scene, kinds=before), replace(scene, kinds=before[::-1])])
        assert (prompt.text, scene) in {(edit.text, edit.after) for edit in edits}
    ScenePreserved.check_prompts([*training, *heldout])


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"images": ()}, "has no image; name a file"),
        ({"target": None}, "has no target: the scene that the edit makes"),
        ({"target": "a green car"}, "asks for no drawn scene"),
        ({"metadata": {"region": [0, 0, 1, 1]}}, "and a rest"),
    ],
)
def test_a_line_that_cannot_be_scored_says_why(change: dict, cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        SceneEdit.check_prompts([replace(PROMPTS[0], **change)])
