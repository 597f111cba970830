"""The digit judges: right on the half they never saw, and blind to what the statistics measure."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from digenrl.types import Prompt
from reward_models.digit_judge import (
    WORDS,
    DigitJudge,
    DigitStatistics,
    asked_digit,
    judge_half,
    real_digits,
)

OTHER = {"a": "b", "b": "a"}


def asking(labels: torch.Tensor) -> list[Prompt]:
    return [Prompt(f"number {WORDS[int(label)]}") for label in labels]


@pytest.mark.parametrize("judge", ["a", "b"])
def test_committed_judges_are_right_on_the_half_they_never_saw(judge: str) -> None:
    images, labels = judge_half(OTHER[judge])
    hits = DigitJudge(judge, "accuracy")(images, asking(labels))
    assert hits.mean() > 0.97
    wrong = DigitJudge(judge)(images, asking((labels + 1) % 10))
    assert wrong.mean() < 0.02


def test_the_halves_are_disjoint_and_complete() -> None:
    images, labels = real_digits()
    half_a, half_b = judge_half("a"), judge_half("b")
    rows = {image.numpy().tobytes() for image in half_a[0]} & {
        image.numpy().tobytes() for image in half_b[0]
    }
    assert not rows
    assert len(half_a[1]) + len(half_b[1]) == len(labels) == 1797
    assert images.amin() >= 0
    assert images.amax() <= 1


def test_probability_is_the_softmax_of_the_asked_digit() -> None:
    images, _ = judge_half("b")
    judge = DigitJudge("a")
    every = torch.stack([judge(images[:4], [Prompt(str(digit))] * 4) for digit in range(10)])
    torch.testing.assert_close(every.sum(dim=0), torch.ones(4))
    expected = judge.model(images[:4]).softmax(1)
    torch.testing.assert_close(every.T, expected)


@pytest.mark.parametrize(
    ("prompt", "digit"),
    [
        (Prompt("number seven"), 7),
        (Prompt("Number ZERO, please"), 0),
        (Prompt("the digit 4"), 4),
        (Prompt("not three but nine"), 9),
        (Prompt("anything", target="5"), 5),
        (Prompt("number one", target="two"), 2),
    ],
)
def test_the_asked_digit(prompt: Prompt, digit: int) -> None:
    assert asked_digit(prompt) == digit


@pytest.mark.parametrize("text", ["a horse", "number 17", "someone"])
def test_a_prompt_without_a_digit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"names no digit.*target"):
        asked_digit(Prompt(text))


def test_real_digits_have_diversity_one_and_distance_zero() -> None:
    images, labels = real_digits()
    statistics = DigitStatistics()(images, asking(labels))
    assert statistics["diversity_ratio"] == pytest.approx(1.0, abs=1e-5)
    assert statistics["nn_distance"] == pytest.approx(0.0, abs=1e-3)


def test_collapse_and_noise_move_the_statistics() -> None:
    images, labels = real_digits()
    first = torch.stack([images[labels == digit][0] for digit in range(10)])
    collapsed = DigitStatistics()(
        first.repeat_interleave(5, dim=0), asking(torch.arange(10).repeat_interleave(5))
    )
    assert collapsed["diversity_ratio"] < 1e-3
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(50, 1, 8, 8, generator=generator)
    assert (
        DigitStatistics()(noise, asking(torch.arange(10).repeat_interleave(5)))["nn_distance"] > 2.0
    )


def test_statistics_compare_with_real_images_of_the_same_digits() -> None:
    images, labels = real_digits()
    ones = labels == 1
    assert DigitStatistics()(images[ones], asking(labels[ones]))[
        "diversity_ratio"
    ] == pytest.approx(1.0, abs=1e-5)


def test_bad_input_names_value_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'c'"):
        DigitJudge("c")
    with pytest.raises(ValueError, match="'logit'"):
        DigitJudge("a", "logit")
    with pytest.raises(FileNotFoundError, match="make pretrain"):
        DigitJudge(path=tmp_path / "absent.safetensors")
    judge = DigitJudge()
    with pytest.raises(ValueError, match=r"\[2, 3, 8, 8\].*model=digits"):
        judge(torch.zeros(2, 3, 8, 8), asking(torch.zeros(2)))
    with pytest.raises(ValueError, match="2 images but 1 prompts"):
        judge(torch.zeros(2, 1, 8, 8), asking(torch.zeros(1)))
