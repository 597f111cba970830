"""Judges and statistics of the digits task: is it the asked digit, and are the images still diverse
and real?

Two judges learned from disjoint halves of scikit-learn's 8x8 digits (UCI optical recognition of
handwritten digits, 1797 images). Judge A is the reward; judge B is never optimised, so a rise of A
that B does not confirm is reward hacking. Neither sees mode collapse, the usual price of
policy-gradient training: `DigitStatistics` does.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from digenrl.types import Prompt

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
JUDGES_FILE = Path(__file__).with_name("digit_judges.safetensors")
HALVES = {"a": 0, "b": 1}
"""Judge -> the parity of its half in the fixed shuffle of `judge_half`."""


@lru_cache(maxsize=1)
def real_digits() -> tuple[Tensor, Tensor]:
    """Return the real images [1797, 1, 8, 8] fp32 in [0, 1] and their labels [1797] int64, in
    scikit-learn's order."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32) / 16.0
    return images[:, None], torch.tensor(data.target, dtype=torch.int64)


def judge_half(judge: str) -> tuple[Tensor, Tensor]:
    """Return images and labels of the half that `judge` ("a" or "b") learns from.

    The file groups its images by writer, so the halves alternate: both see every writer's hand, no
    image twice.
    """
    images, labels = real_digits()
    return images[HALVES[judge] :: 2], labels[HALVES[judge] :: 2]


def build_judge() -> nn.Sequential:
    """Return the untrained judge: [B, 1, 8, 8] in [0, 1] -> logits [B, 10] (two convolutions, 29k
    parameters)."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(64 * 16, 10),
    )


def asked_digit(prompt: Prompt) -> int:
    """Return the digit that a prompt asks for: its `target` if given, else the last digit word or
    numeral of its text.

    Raises:
        ValueError: when neither names a digit.
    """
    source = prompt.text if prompt.target is None else prompt.target
    found = [
        word
        for word in re.findall(r"[a-z]+|\d+", source.lower())
        if word in WORDS or re.fullmatch(r"\d", word)
    ]
    if not found:
        raise ValueError(
            f"prompt {source!r} names no digit, so the digit judge cannot score it; write one of "
            f'{", ".join(WORDS)} (or 0-9), or give the JSONL line a "target"'
        )
    return WORDS.index(found[-1]) if found[-1] in WORDS else int(found[-1])


class DigitJudge:
    """Scorer: probability (or hit) of the asked digit under a committed judge.

    Args:
        judge: "a" (the reward) or "b" (held out).
        output: "probability" in [0, 1], or "accuracy" (1.0 where the asked digit is the judge's
            first choice).
        path: safetensors with keys `a.*` and `b.*`, made by `make pretrain`; None = the committed
            file.

    Raises:
        ValueError: unknown judge or output.
        FileNotFoundError: no such weights.
    """

    def __init__(
        self, judge: str = "a", output: str = "probability", path: str | Path | None = None
    ) -> None:
        if judge not in HALVES:
            raise ValueError(f"judge must be one of {sorted(HALVES)}, got {judge!r}")
        if output not in ("probability", "accuracy"):
            raise ValueError(f'output must be "probability" or "accuracy", got {output!r}')
        source = JUDGES_FILE if path is None else Path(path)
        if not source.is_file():
            raise FileNotFoundError(
                f"no judge weights at {source}; run `make pretrain`, or give an existing path"
            )
        prefix = f"{judge}."
        weights = {
            key.removeprefix(prefix): item
            for key, item in load_file(source).items()
            if key.startswith(prefix)
        }
        self.judge, self.output = judge, output
        self.model_id = f"digit-judge-{judge}-{output}"
        self.weights_digest = hashlib.blake2b(source.read_bytes(), digest_size=16).hexdigest()
        self.model = build_judge()
        self.model.load_state_dict(weights)
        self.model.eval().requires_grad_(False)

    @staticmethod
    def check_prompts(prompts: Sequence[Prompt]) -> None:
        """Raise ValueError for the first prompt that names no digit."""
        for prompt in prompts:
            asked_digit(prompt)

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Score images [b, 1, 8, 8] in [0, 1] against their prompts -> [b] fp32 on the CPU.

        Raises:
            ValueError: another image shape, or a prompt count that differs from the batch's.
        """
        if media.ndim != 4 or tuple(media.shape[1:]) != (1, 8, 8):
            raise ValueError(
                f"the digit judge reads images [b, 1, 8, 8], got {list(media.shape)}; use "
                "model=digits"
            )
        if len(prompts) != len(media):
            raise ValueError(
                f"{len(media)} images but {len(prompts)} prompts; give one prompt per image"
            )
        digits = torch.tensor([asked_digit(prompt) for prompt in prompts], dtype=torch.int64)
        with torch.no_grad():
            logits = self.model(media.detach().to("cpu", torch.float32))
        if self.output == "accuracy":
            return (logits.argmax(1) == digits).float()
        return logits.softmax(1).gather(1, digits[:, None])[:, 0]


def class_spread(images: Tensor, labels: Tensor) -> Tensor:
    """Return mean pairwise L2 distance within each class that has at least two images -> [classes]
    (images [N, 1, 8, 8])."""
    classes = [images[labels == label].flatten(1) for label in labels.unique()]
    spreads = [torch.pdist(members).mean() for members in classes if len(members) > 1]
    return torch.stack(spreads) if spreads else torch.empty(0)


class DigitStatistics:
    """What the judges cannot see, over an evaluation set: diversity and realism against the real
    digits.

    * `diversity_ratio`: mean pairwise L2 among the samples of one prompt, relative to real images
      of the same digit. 1.0 = as varied as real handwriting, towards 0 = mode collapse. NaN when no
      prompt has two samples.
    * `nn_distance`: mean L2 distance (64 pixels in [0, 1]) from a sample to the nearest of the 1797
      real images.
    """

    check_prompts = staticmethod(DigitJudge.check_prompts)

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> dict[str, float]:
        """Return the statistics of samples [N, 1, 8, 8] in [0, 1] and their N prompts."""
        samples = media.detach().to("cpu", torch.float32)
        asked = torch.tensor([asked_digit(prompt) for prompt in prompts], dtype=torch.int64)
        images, labels = real_digits()
        compared = [int(label) for label in asked.unique() if int((asked == label).sum()) > 1]
        real = class_spread(images, labels)[compared]
        return {
            "diversity_ratio": float(class_spread(samples, asked).mean() / real.mean()),
            "nn_distance": float(
                torch.cdist(samples.flatten(1), images.flatten(1)).min(dim=1).values.mean()
            ),
        }
