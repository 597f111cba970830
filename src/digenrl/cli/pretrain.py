"""`make pretrain`: train the digits base model and its two judges again, into the files that the repository commits.

    python -m digenrl.cli.pretrain [base=FILE] [judges=FILE] [wrong_captions=0.45] [steps=1500] [seed=0]

Deterministic on one machine with one thread; about two minutes on one core. `wrong_captions` is the share of
pretraining captions that name a random digit: the knob that sets how much reinforcement learning has left to improve.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from digenrl.models.digits import BASE_FILE, DigitsPolicy, pack
from digenrl.types import Prompt
from reward_models.digit_judge import HALVES, JUDGES_FILE, WORDS, DigitJudge, DigitStatistics, fit_judge, real_digits

PROMPTS = tuple(Prompt(f"number {word}") for word in WORDS)


@dataclass(frozen=True)
class PretrainSettings:
    """What the command line may set."""

    base: str = str(BASE_FILE)
    judges: str = str(JUDGES_FILE)
    wrong_captions: float = 0.45
    steps: int = 1500
    batch: int = 128
    lr: float = 2e-3
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.wrong_captions <= 1.0:
            raise ValueError(f"wrong_captions is a share in [0, 1], got {self.wrong_captions}")
        if self.steps < 1 or self.batch < 1 or not self.lr > 0:
            raise ValueError(f"steps, batch and lr must be positive, got {self.steps}, {self.batch}, {self.lr}")

    @classmethod
    def from_arguments(cls, arguments: list[str]) -> PretrainSettings:
        """Settings of `key=value` arguments; raises ValueError on an unknown key or a value of the wrong type."""
        defaults = asdict(cls())
        values: dict[str, Any] = {}
        for argument in arguments:
            key, separator, value = argument.partition("=")
            if not separator or key not in defaults:
                raise ValueError(f"cannot read {argument!r}; write key=value with key one of {', '.join(defaults)}")
            kind = type(defaults[key])
            try:
                values[key] = kind(value)
            except ValueError:
                raise ValueError(f"{key} must be {kind.__name__}, got {value!r}") from None
        return cls(**values)


def pretrain_base(settings: PretrainSettings) -> DigitsPolicy:
    """Flow matching on all real digits: regress eps - x0 at sigma ~ logit-normal(0, 1) (SD3, arXiv:2403.03206, 3.1).

    Each draw of an image keeps its caption with probability 1 - wrong_captions, else a random digit is its caption.
    """
    policy = DigitsPolicy(path="random", seed=settings.seed)
    images, labels = real_digits()
    clean = pack(2 * images - 1)
    conditions = policy.encode(PROMPTS)
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
        velocity = policy.velocity(latents, sigmas, {key: value[captions] for key, value in conditions.items()})
        loss = functional.mse_loss(velocity, noise - clean[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 250 == 0 or step + 1 == settings.steps:
            print(f"step {step + 1}/{settings.steps} loss {loss.item():.3f}", file=sys.stderr, flush=True)
    return policy


@torch.no_grad()
def sample_digits(policy: DigitsPolicy, per_prompt: int, steps: int, seed: int = 0) -> tuple[Tensor, list[Prompt]]:
    """Images [10 * per_prompt, 1, 8, 8] by the plain Euler ODE, and their prompts."""
    prompts = [prompt for prompt in PROMPTS for _ in range(per_prompt)]
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(len(prompts), *policy.latent_shape, generator=generator)
    condition, grid = policy.encode(prompts), policy.sigma_grid(steps)
    for sigma, after in itertools.pairwise(grid):
        latents = latents + (after - sigma) * policy.velocity(latents, sigma.expand(len(prompts)), condition)
    return policy.decode(latents), prompts


def save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write safetensors under a temporary name, then rename, so that a stopped run never leaves half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".tmp")
    save_file({key: value.detach().contiguous() for key, value in tensors.items()}, unfinished)
    unfinished.chmod(0o644)
    unfinished.replace(path)
    print(f"wrote {path} ({path.stat().st_size / 2**20:.2f} MiB)", file=sys.stderr)


def main(arguments: list[str]) -> int:
    """Train, save and measure; 2 on a bad argument."""
    try:
        settings = PretrainSettings.from_arguments(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    started = time.monotonic()
    judges = {judge: fit_judge(judge, seed=settings.seed + parity) for judge, parity in HALVES.items()}
    weights = {f"{judge}.{key}": item for judge, model in judges.items() for key, item in model.state_dict().items()}
    save(weights, Path(settings.judges))
    policy = pretrain_base(settings)
    save(policy.transformer.state_dict(), Path(settings.base))
    media, prompts = sample_digits(policy, per_prompt=50, steps=6)
    judged = {judge: DigitJudge(judge, "accuracy", settings.judges)(media, prompts).mean().item() for judge in HALVES}
    statistics = DigitStatistics()(media, prompts)
    print(
        f"base model: judge A {judged['a']:.3f}, judge B {judged['b']:.3f}, "
        f"diversity ratio {statistics['diversity_ratio']:.2f}, "
        f"distance to the nearest real digit {statistics['nn_distance']:.2f} "
        f"({len(media)} samples, {time.monotonic() - started:.0f} s)"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
