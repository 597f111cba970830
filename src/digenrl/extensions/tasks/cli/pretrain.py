"""`make pretrain`: train the digits base model and its two judges again, into the files that the
repository commits.

    digenrl pretrain [key=value ...]

Deterministic on one machine with one thread; about two minutes on one core. `wrong_captions` sets
how much reinforcement learning has left to improve.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from digenrl.config.help import Arguments, own_command
from digenrl.config.schema import AtLeast1, File, Positive, Share

if TYPE_CHECKING:  # torch is imported only when the settings are read
    from torch import Tensor

    from digenrl.extensions.tasks.digits import DigitsPolicy
    from digenrl.models.policy import Policy
    from digenrl.types import Prompt


class PretrainSettings(Arguments):
    """Settings of the command line."""

    base: File | None = None
    """File for the base model. null: the committed file."""
    judges: File | None = None
    """File for the judges. null: the committed file."""
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


def pretrain_base(settings: PretrainSettings) -> DigitsPolicy:
    """Train by flow matching on all real digits: regress eps - x0 at sigma ~ logit-normal(0, 1)
    (SD3, arXiv:2403.03206, 3.1).

    Each draw of an image keeps its caption with probability 1 - wrong_captions. Otherwise its
    caption is a random digit.
    """
    import torch
    from torch.nn import functional

    from digenrl.extensions.tasks.digits import DigitsPolicy, pack
    from reward_models.digit_judge import WORDS, real_digits

    policy = DigitsPolicy(path="random", seed=settings.seed)
    images, labels = real_digits()
    clean = pack(2 * images - 1)
    conditions = policy.encode(_prompts())
    generator = torch.Generator().manual_seed(settings.seed)
    optimizer = torch.optim.AdamW(policy.transformer.parameters(), settings.lr, weight_decay=0.0)
    for step in range(settings.steps):
        cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / settings.steps))
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min(1.0, (step + 1) / 100) * cosine
        index = torch.randint(len(labels), (settings.batch,), generator=generator)
        random_labels = torch.randint(len(WORDS), (settings.batch,), generator=generator)
        wrong = torch.rand(settings.batch, generator=generator) < settings.wrong_captions
        captions = torch.where(wrong, random_labels, labels[index])
        noise = torch.randn(clean[index].shape, generator=generator)
        sigmas = torch.sigmoid(torch.randn(settings.batch, generator=generator))
        latents = torch.lerp(clean[index], noise, sigmas[:, None, None])
        velocity = policy.velocity(
            latents, sigmas, {key: value[captions] for key, value in conditions.items()}
        )
        loss = functional.mse_loss(velocity, noise - clean[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 250 == 0 or step + 1 == settings.steps:
            print(
                f"step {step + 1}/{settings.steps} loss {loss.item():.3f}",
                file=sys.stderr,
                flush=True,
            )
    return policy


def sample_digits(
    policy: DigitsPolicy, per_prompt: int, steps: int, seed: int = 0
) -> tuple[Tensor, list[Prompt]]:
    """Return images [10 * per_prompt, 1, 8, 8] by the plain Euler ODE, and their prompts."""
    prompts = [prompt for prompt in _prompts() for _ in range(per_prompt)]
    return sampled(policy, policy.encode(prompts), steps, seed), prompts


def sampled(policy: Policy, condition: dict[str, Tensor], steps: int, seed: int) -> Tensor:
    """Return media of `condition`, whose leading dimension is their number, by the plain Euler
    ODE."""
    import torch

    rows = len(condition["text"])
    latents = torch.randn(rows, *policy.latent_shape, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for sigma, after in itertools.pairwise(policy.sigma_grid(steps)):
            latents = latents + (after - sigma) * policy.velocity(
                latents, sigma.expand(rows), condition
            )
        return policy.decode(latents)


def _prompts() -> list[Prompt]:
    from digenrl.types import Prompt
    from reward_models.digit_judge import WORDS

    return [Prompt(f"number {word}") for word in WORDS]


def save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write safetensors under a temporary name, then rename, so that a stopped run never leaves
    half a file."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".tmp")
    save_file({key: value.detach().contiguous() for key, value in tensors.items()}, unfinished)
    unfinished.chmod(0o644)
    unfinished.replace(path)
    print(f"wrote {path} ({path.stat().st_size / 2**20:.2f} MiB)", file=sys.stderr)


def main(arguments: Sequence[str]) -> int:
    """Train, save and measure. Returns exit code 2 on a bad argument."""

    def work(settings: PretrainSettings, _: list[str]) -> None:
        import torch

        from digenrl.extensions.tasks.digits import BASE_FILE
        from reward_models.digit_judge import (
            HALVES,
            JUDGES_FILE,
            DigitJudge,
            DigitStatistics,
            fit_judge,
        )

        base, judges_file = settings.base or str(BASE_FILE), settings.judges or str(JUDGES_FILE)
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
        save(weights, Path(judges_file))
        policy = pretrain_base(settings)
        save(policy.transformer.state_dict(), Path(base))
        media, prompts = sample_digits(policy, per_prompt=50, steps=6)
        judged = {
            judge: DigitJudge(judge, "accuracy", judges_file)(media, prompts).mean().item()
            for judge in HALVES
        }
        statistics = DigitStatistics()(media, prompts)
        print(
            f"base model: judge A {judged['a']:.3f}, judge B {judged['b']:.3f}, "
            f"diversity ratio {statistics['diversity_ratio']:.2f}, "
            f"distance to the nearest real digit {statistics['nn_distance']:.2f} "
            f"({len(media)} samples, {time.monotonic() - started:.0f} s)"
        )

    return own_command(PretrainSettings, __doc__, arguments, work)
