from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from digenrl.config import load
from digenrl.types import Prompt
from reward_models.ocr import Ocr, match, normalise, ocr_target

WORDS = ["HELLO", "Open Now", "digenrl", "Cafe 24", "BAKERY"]


def render(
    text: str,
    width: int = 256,
    height: int = 256,
    size: int = 36,
    paper: str = "white",
    ink: str = "black",
) -> torch.Tensor:
    """[3, H, W] in [0, 1]: `text` in the middle of a plain picture."""
    picture = Image.new("RGB", (width, height), paper)
    draw = ImageDraw.Draw(picture)
    draw.text(
        (width / 2, height / 2), text, fill=ink, font=ImageFont.load_default(size), anchor="mm"
    )
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255


def asks(word: str) -> Prompt:
    return Prompt(f'a "big" sign that says "{word}"')


@pytest.fixture(scope="module")
def ocr() -> Ocr:
    return Ocr()


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("width", "height", "size"), [(256, 256, 36), (160, 48, 28), (64, 256, 14), (512, 384, 60)]
)
def test_rendered_words_score_high(ocr, width, height, size):
    media = torch.stack([render(word, width, height, size) for word in WORDS])
    assert ocr(media, [asks(word) for word in WORDS]).min() >= 0.9


def test_colour_and_grey_pictures_are_read(ocr):
    assert ocr(render("STOP", paper="navy", ink="yellow")[None], [asks("STOP")]) == 1
    assert ocr(render("STOP").mean(0, keepdim=True)[None], [asks("STOP")]) == 1


def test_one_wrong_letter_scores_in_between(ocr):
    for width, height in ((256, 256), (160, 48)):
        wrong = torch.stack([render(word, width, height, 28) for word in ("HELLD", "BAKXRY")])
        scores = ocr(wrong, [asks("HELLO"), asks("BAKERY")])
        assert (scores > 0.5).all()
        assert (scores < 0.9).all()


@pytest.mark.parametrize(("height", "width"), [(256, 256), (48, 160), (64, 64)])
def test_noise_and_blank_pictures_score_nothing(ocr, height, width):
    generator = torch.Generator().manual_seed(0)
    media = torch.cat(
        [torch.rand(3, 3, height, width, generator=generator), torch.zeros(1, 3, height, width)]
    )
    assert ocr(media, [asks(word) for word in WORDS[:4]]).max() <= 0.1


def test_a_video_scores_the_mean_of_its_frames(ocr):
    half = torch.stack([render("HELLO"), torch.ones(3, 256, 256)])[None]
    assert ocr(half, [asks("HELLO")]).item() == pytest.approx(0.5)


def test_a_score_does_not_depend_on_its_neighbours(ocr):
    media = torch.stack([render(word, 160, 48, 24) for word in ("HELLO", "Open N0w", "digenr")])
    prompts = [asks(word) for word in WORDS[:3]]
    alone = torch.cat([ocr(media[i : i + 1], prompts[i : i + 1]) for i in range(3)])
    assert torch.equal(ocr(media, prompts), alone)


def test_target_is_the_field_then_the_last_quotes():
    assert ocr_target(Prompt('says "A" and "B"', target="C")) == "C"
    assert ocr_target(Prompt('says "A" and "two words"')) == "two words"
    published = load(["reward=ocr"]).settings.node_at("reward.rewards.ocr.scorer")
    assert published["quoted"] == "first", "as yifan123/flow_grpo's ocr.py:31 has it"
    assert ocr_target(Prompt('says "A" and "two words"'), published["quoted"]) == "A"
    with pytest.raises(ValueError, match="choose first or last"):
        Ocr(quoted="second")
    assert ocr_target(Prompt("says “curly”")) == "curly"
    for text in ("nothing quoted", 'only one " here', 'empty ""', 'blank "  "'):
        with pytest.raises(ValueError, match="says no text to render"):
            ocr_target(Prompt(text))
    with pytest.raises(ValueError, match="'bare'"):
        Ocr.check_prompts([Prompt('fine "x"'), Prompt("bare")])


def test_match_takes_the_best_line():
    assert match(["SALE", "HELLO"], "hello") == 1
    assert match(["some other text", "HELLD"], "hello") == pytest.approx(0.8)
    assert match([], "hello") == match(["zzzzzzzzzzz"], "hello") == 0
    assert match(["some other text", "HELLD"], "hello", best_line=False) == 0
    assert match(["SALE", "HELLO"], "hello", best_line=False) == 1
    assert normalise("Ｃａｆé  24") == "café24"
