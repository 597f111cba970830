"""How near a run on the tilted mixture comes to the best reward that its KL allows.

    python -m benchmarks.mixture runs=[RUN,...] [samples=2000]

Measured from each run's last checkpoint, over all prompts: the KL of whole trajectories to the
base, the gain in reward, and the gain of the optimum at that KL. The KL is exact for Gaussian
steps, and the KL of the points alone is no larger. The optimum is p exp(r/beta), with one beta for
all prompts. For the mixture itself it has a closed form. For the sampler with its finite steps,
samples of the base are weighted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks._shared import Report, options
from digenrl.config import instantiate
from digenrl.config.stored import read_stored
from digenrl.data import load_prompts
from digenrl.diffusion.sde import Kernel
from digenrl.extensions.tasks.mixture import MixtureFlow, MixturePolicy
from digenrl.rollout.divergence import noisy_trajectories

BASE_SAMPLES = 5_000
"""Samples of each prompt, for the base's own distribution of rewards."""


@dataclass(frozen=True)
class Reached:
    """Means over the prompts."""

    kl: float
    """Nats, of trajectories."""
    gain: float
    """Reward above the base's."""
    optimum: float
    """The base sampler's best gain at this KL."""
    closed_form: float
    """The mixture's own."""

    @property
    def share(self) -> float:
        """Gain as a share of the optimum's gain."""
        return self.gain / self.optimum


@torch.no_grad()
def reached(run: Path, samples: int) -> Reached:
    """Measure the last checkpoint of `run` with `samples` of each prompt."""
    config = read_stored(run, "run")[0]
    policy: MixturePolicy = instantiate(config.model)
    kernel: Kernel = instantiate(config.algorithm.sde)
    policy.adapter.load_trained_parameters(load_file(run / "checkpoints/last/policy.safetensors"))
    network, steps = policy.transformer, config.sampling.steps
    assert isinstance(network, MixtureFlow)
    directions = torch.cat(
        [policy.codec.encode([prompt])["direction"] for prompt in load_prompts(config.data.prompts)]
    )
    generator = torch.Generator().manual_seed(0)
    rows = directions.repeat_interleave(samples, 0)
    points, divergence = rolled(policy, kernel, rows, steps, generator)
    rewards, kl = (points * rows).sum(1), float(divergence.mean())
    base = base_rewards(policy, kernel, directions, steps, generator)
    return Reached(
        kl,
        float(rewards.mean() - base.mean()),
        at_kl(kl, lambda beta: weighted(base, beta))[1],
        at_kl(kl, lambda beta: tilted(network, directions.double(), beta))[1],
    )


def base_rewards(
    policy: MixturePolicy,
    kernel: Kernel,
    directions: Tensor,
    steps: int,
    generator: torch.Generator,
) -> Tensor:
    """[prompts, BASE_SAMPLES] fp64, of the base sampler."""
    rows = directions.repeat_interleave(BASE_SAMPLES, 0)
    points, _ = rolled(policy, kernel, rows, steps, generator, trained=False)
    return (points * rows).sum(1).unflatten(0, (-1, BASE_SAMPLES)).double()


@torch.no_grad()
def rolled(
    policy: MixturePolicy,
    kernel: Kernel,
    directions: Tensor,
    steps: int,
    generator: torch.Generator,
    trained: bool = True,
) -> tuple[Tensor, Tensor]:
    """Draw a trajectory with noise in every step for each row of `directions` [B, D], by the
    trained weights or by the base. Return (points [B, D], KL to the base [B])."""

    def draw(step: int) -> Tensor:
        return torch.randn(directions.shape, generator=generator)

    with nullcontext() if trained else policy.adapter.reference():
        return noisy_trajectories(
            policy, {"direction": directions}, policy.sigma_grid(steps), draw, kernel
        )


def weighted(base: Tensor, beta: float) -> tuple[float, float]:
    """(KL, gain) of the base's samples under weights exp(r/beta); rewards [prompts, samples]."""
    weights = (base / beta).softmax(dim=1)
    kl = (weights * (weights * base.shape[1]).log()).sum(1).mean()
    return float(kl), float((weights * base).sum(1).mean() - base.mean())


def tilted(network: MixtureFlow, directions: Tensor, beta: float) -> tuple[float, float]:
    """(KL, gain) of the mixture tilted along `directions` [prompts, D], in closed form."""
    means, log_weights = network.means.double(), network.log_weights.double()
    along, shift = directions @ means.T, network.variance / beta
    log_z = torch.logsumexp(log_weights + along / beta, dim=1) + shift / (2 * beta)
    best = ((log_weights + along / beta).softmax(dim=1) * along).sum(1) + shift
    plain = (log_weights.exp() * along).sum(1)
    return float((best / beta - log_z).mean()), float((best - plain).mean())


def at_kl(kl: float, curve: Callable[[float], tuple[float, float]]) -> tuple[float, float]:
    """(beta, gain) where `curve` (beta -> KL, which falls with beta, and gain) has this KL, by
    bisection."""
    low, high = 1e-2, 1e4
    for _ in range(60):
        beta = (low * high) ** 0.5
        low, high = (beta, high) if curve(beta)[0] > kl else (low, beta)
    return high, curve(high)[1]


def main(words: Sequence[str]) -> int:
    """Print the table; the exit code."""
    given = options(words, {"runs": "", "samples": "2000"}, {"samples": "200"})
    report = Report(
        "Reward at matched KL on the tilted mixture",
        __doc__ or "",
        ("run", "KL", "gain", "best", "share"),
    )
    for name in given["runs"].strip("[]").split(","):
        found = reached(Path(name), int(given["samples"]))
        report.row(
            Path(name).name,
            f"{found.kl:.3f}",
            f"{found.gain:.3f}",
            f"{found.optimum:.3f}",
            f"{found.share:.3f}",
        )
        report.say(f"closed form of the mixture at this KL: {found.closed_form:.3f}")
    return report.close(given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
