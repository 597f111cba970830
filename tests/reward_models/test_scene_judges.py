"""The drawn scenes and their judges, against scenes whose content is known because it was drawn."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from digenrl.extensions.tasks import scenes as family
from digenrl.prompts import DIRECTORY
from digenrl.types import Prompt
from reward_models.drawn_scenes import (
    KINDS,
    PAPER,
    RELATIONS,
    SCENES,
    SIDE,
    Scene,
    asked_scene,
    draw,
    draw_places,
    draw_scenes,
    margin,
)
from reward_models.scene_judges import (
    SceneDetector,
    SceneJudge,
    SceneStatistics,
    detect,
    share_of_assertions,
)
from tests.near_misses import near_misses

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def real() -> tuple[list[Scene], Tensor]:
    return draw_scenes(300, torch.Generator().manual_seed(1))


def wrong(scenes: list[Scene]) -> list[Scene]:
    return [near_misses(scene)[row % len(near_misses(scene))] for row, scene in enumerate(scenes)]


def prompts_of(scenes: list[Scene]) -> list[Prompt]:
    return [Prompt(scene.text) for scene in scenes]


def test_the_detector_confirms_every_real_scene_and_no_caption_with_one_error(
    real: tuple[list[Scene], Tensor],
) -> None:
    scenes, pictures = real
    assert SceneDetector()(pictures, prompts_of(scenes)).tolist() == [1.0] * 300
    shares = SceneDetector()(pictures, prompts_of(wrong(scenes)))
    assert shares.max() < 1
    assert shares.min() >= 0.2
    assert SceneDetector(perfect=True)(pictures, prompts_of(wrong(scenes))).sum() == 0


def test_a_detector_survives_noise_and_sees_places_to_a_pixel(
    real: tuple[list[Scene], Tensor],
) -> None:
    scenes, pictures = real
    noisy = (
        pictures + 0.05 * torch.randn(pictures.shape, generator=torch.Generator().manual_seed(0))
    ).clamp(0, 1)
    assert SceneDetector(perfect=True)(noisy, prompts_of(scenes)).mean() > 0.97
    places = torch.tensor([[[6.0, 7.0, 4.0], [17.0, 16.0, 3.5]]])
    (found,) = detect(draw([(("red", "circle"), ("blue", "triangle"))], places))
    assert [(o.colour, o.shape) for o in found] == [("red", "circle"), ("blue", "triangle")]
    for o, (x, y, _) in zip(found, places[0].tolist(), strict=True):
        assert abs(o.x - x) < 0.5
        assert abs(o.y - y) < 0.5


def test_half_a_scene_scores_in_between() -> None:
    asked = asked_scene("a red circle above a blue square")
    (one,) = detect(draw([(("red", "circle"),)], torch.tensor([[[12.0, 6.0, 4.0]]])))
    assert (
        share_of_assertions(one, asked) == 2 / 8
    )  # its colour and shape; not the number, the relation, the other
    (swapped,) = detect(draw([asked.kinds], torch.tensor([[[12.0, 18.0, 4.0], [12.0, 6.0, 4.0]]])))
    assert share_of_assertions(swapped, asked) == 6 / 8
    assert share_of_assertions([], asked) == 0
    assert len(detect(PAPER[None, :, None, None].expand(1, 3, SIDE, SIDE))[0]) == 0


def test_the_judge_agrees_on_real_scenes_and_was_not_told_about_templates(
    real: tuple[list[Scene], Tensor],
) -> None:
    scenes, pictures = real
    judge = SceneJudge()
    assert judge(pictures, prompts_of(scenes)).mean() > 0.93
    assert judge(pictures, prompts_of(wrong(scenes))).mean() < 0.03


def test_statistics_see_collapse_that_the_judges_do_not(real: tuple[list[Scene], Tensor]) -> None:
    scenes = [scene for scene in SCENES[100:108] for _ in range(8)]
    spread = draw(
        [scene.kinds for scene in scenes], draw_places(scenes, torch.Generator().manual_seed(2))
    )
    alike = spread[::8].repeat_interleave(8, 0)
    honest, collapsed = (
        SceneStatistics()(pictures, prompts_of(scenes)) for pictures in (spread, alike)
    )
    assert honest["perfect"] == collapsed["perfect"] == 1.0
    assert honest["place_ratio"] == pytest.approx(1, abs=0.2)
    assert honest["diversity_ratio"] == pytest.approx(1, abs=0.1)
    assert collapsed["place_ratio"] == pytest.approx(0, abs=1e-4)


def test_real_scenes_are_what_their_prompts_say_and_places_are_apart(
    real: tuple[list[Scene], Tensor],
) -> None:
    places = draw_places(list(SCENES), torch.Generator().manual_seed(3))
    for scene, (first, second) in zip(SCENES, places, strict=True):
        assert asked_scene(scene.text) == scene
        if scene.relation:
            assert margin(first, second, scene.relation) >= 2
            others = [other for other in RELATIONS if other != scene.relation]
            assert all(margin(first, second, other) <= 0 for other in others)
    assert len({scene.text for scene in SCENES}) == 552
    for scene in SCENES:
        assert all(other in SCENES and other != scene for other in near_misses(scene))
    assert torch.equal(family.PAPER, PAPER)
    assert family.SIDE == SIDE


def test_training_prompts_have_no_held_out_kind_and_no_held_out_prompt() -> None:
    kept, held = (
        [asked_scene(line) for line in (DIRECTORY / name).read_text().splitlines()]
        for name in ("drawn_scenes.txt", "drawn_scenes_heldout.txt")
    )
    assert all(scene.seen for scene in kept)
    assert not set(kept) & set(held)
    assert sum(scene.seen for scene in held) == sum(not scene.seen for scene in held) == 24
    assert {kind for scene in kept for kind in scene.kinds} == {
        kind for kind in KINDS if Scene((kind,)).seen
    }


@pytest.mark.parametrize(
    "text", ["a red circle over a blue square", "three red circles", "", "number one"]
)
def test_prompts_that_ask_for_no_scene_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"asks for no drawn scene; write"):
        asked_scene(text)


def test_media_and_prompts_that_do_not_fit_are_refused() -> None:
    for judge, shape in itertools.product(
        (SceneDetector(), SceneJudge()), ((1, 3, 8, 8), (1, 1, 24, 24))
    ):
        with pytest.raises(ValueError, match="use model=scenes"):
            judge(torch.zeros(shape), [Prompt("a red circle")])
    with pytest.raises(ValueError, match="2 pictures but 1 prompts"):
        SceneDetector()(torch.zeros(2, 3, 24, 24), [Prompt("a red circle")])
