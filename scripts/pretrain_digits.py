"""`make pretrain`: train the digits base model and its two judges again, into the files that the
repository commits.

    python -m scripts.pretrain_digits [key=value ...]

Deterministic on one machine with one thread; about two minutes on one core. `wrong_captions` sets
how much reinforcement learning has left to improve.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from digenrl.config.help import Arguments, own_command
from digenrl.config.value_types import AtLeast1, File, Positive, Share
from digenrl.extensions.tasks.digits import BASE_FILE, DigitsPolicy, pack_latents
from digenrl.types import Prompt
from reward_models.digit_judge import (
    HALVES,
    JUDGES_FILE,
    WORDS,
    DigitJudge,
    DigitStatistics,
    build_judge,
    judge_half,
    real_digits,
)
from scripts.flow_matching import Batch, sampled, save, train

PROMPTS = [Prompt(f"number {word}") for word in WORDS]


class Settings(Arguments):
    """Settings of the command line."""

    base: File = str(BASE_FILE)
    """File for the base model."""
    judges: File = str(JUDGES_FILE)
    """File for the judges."""
    wrong_captions: Share = 0.45
    """Share of captions that name a random digit."""
    steps: AtLeast1 = 1500
    """Optimizer steps of the base model."""
    batch: AtLeast1 = 128
    """Images per step."""
    lr: Positive = 2e-3
    """Peak learning rate."""
    seed: int = 0
    """Seed of noise, captions and initial weights."""


def pretrain_base(settings: Settings) -> DigitsPolicy:
    """Train on all real digits.

    Each draw of an image keeps its caption with probability 1 - wrong_captions. Otherwise its
    caption is a random digit.
    """
    policy = DigitsPolicy(path="random", seed=settings.seed)
    generator = torch.Generator().manual_seed(settings.seed)
    # The rate is absolute, so that the optimizer's own is 1.
    optimizer = torch.optim.AdamW(policy.transformer.parameters(), 1.0, weight_decay=0.0)

    def rate(step: int) -> float:
        cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / settings.steps))
        return settings.lr * min(1.0, (step + 1) / 100) * cosine

    train(policy, _batches(policy, settings, generator), generator, [optimizer], rate)
    return policy


def _batches(
    policy: DigitsPolicy, settings: Settings, generator: torch.Generator
) -> Iterator[Batch]:
    images, labels = real_digits()
    clean, conditions = pack_latents(2 * images - 1), policy.codec.encode(PROMPTS)
    for _ in range(settings.steps):
        index = torch.randint(len(labels), (settings.batch,), generator=generator)
        random_labels = torch.randint(len(WORDS), (settings.batch,), generator=generator)
        wrong = torch.rand(settings.batch, generator=generator) < settings.wrong_captions
        captions = torch.where(wrong, random_labels, labels[index])
        yield clean[index], {key: value[captions] for key, value in conditions.items()}


def fit_judge(
    judge: str, seed: int, steps: int = 500, batch: int = 128, lr: float = 2e-3
) -> nn.Sequential:
    """Train a judge on its own half of the digits (about 4 s on one core). Pixel noise of 0.1
    prepares it for imperfect samples."""
    images, labels = judge_half(judge)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_judge()
        optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=1e-2)
        for _ in range(steps):
            index = torch.randint(len(labels), (batch,))
            noisy = images[index] + 0.1 * torch.randn_like(images[index])
            functional.cross_entropy(model(noisy), labels[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.eval().requires_grad_(False)


def sample_digits(
    policy: DigitsPolicy, per_prompt: int, steps: int, seed: int = 0
) -> tuple[Tensor, list[Prompt]]:
    """Return images [10 * per_prompt, 1, 8, 8] by the plain Euler ODE, and their prompts."""
    prompts = [prompt for prompt in PROMPTS for _ in range(per_prompt)]
    return sampled(policy, policy.codec.encode(prompts), steps, seed), prompts


def work(settings: Settings, _: list[str]) -> None:
    """Train, save and measure."""
    torch.set_num_threads(1)
    started = time.monotonic()
    judges = {
        judge: fit_judge(judge, seed=settings.seed + parity) for judge, parity in HALVES.items()
    }
    weights = {
        f"{judge}.{key}": item
        for judge, model in judges.items()
        for key, item in model.state_dict().items()
    }
    save(weights, Path(settings.judges))
    policy = pretrain_base(settings)
    save(policy.transformer.state_dict(), Path(settings.base))
    media, prompts = sample_digits(policy, per_prompt=50, steps=6)
    judged = {
        judge: DigitJudge(judge, "accuracy", settings.judges)(media, prompts).mean().item()
        for judge in HALVES
    }
    statistics = DigitStatistics()(media, prompts)
    print(
        f"base model: judge A {judged['a']:.3f}, judge B {judged['b']:.3f}, "
        f"diversity ratio {statistics['diversity_ratio']:.2f}, "
        f"distance to the nearest real digit {statistics['nn_distance']:.2f} "
        f"({len(media)} samples, {time.monotonic() - started:.0f} s)"
    )


def main(arguments: Sequence[str]) -> int:
    """Run the command. Returns exit code 2 on a bad argument."""
    return own_command(Settings, __doc__, arguments, work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
