"""A tiny policy that satisfies the protocol, and batches rolled out with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from digenrl.diffusion import denoise
from digenrl.diffusion.sde import FlowSDE, Kernel
from digenrl.diffusion.sigmas import static_grid
from digenrl.diffusion.steps import AllButLast, StepSelection
from digenrl.types import CellBlock, TrainBatch
from tests.sampling import sample


class ToyAdapter:
    """The trained residual of a toy policy."""

    def __init__(self, transformer: nn.Module) -> None:
        self._transformer = transformer
        self.on = True

    @contextmanager
    def reference(self) -> Iterator[None]:
        self.on = False
        try:
            yield
        finally:
            self.on = True

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._transformer.named_parameters())

    def parameters_without_gradient(self) -> list[str]:
        return [
            name for name, parameter in self.trained_parameters().items() if parameter.grad is None
        ]


class ToyPolicy(nn.Module):
    """v(x, s, c) of a small MLP over packed latents [N, C]; the base is frozen under a trained
    residual that begins at 0."""

    family = "toy"
    guidance_scale = 1.0
    drawn = None
    own_levels = False
    sampling_digest = None

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        latent_shape: tuple[int, ...] = (3, 4),
    ) -> None:
        super().__init__()
        self.latent_shape = self.drawn_shape = latent_shape
        self.dtype = dtype
        channels = self.latent_shape[-1]
        generator = torch.Generator().manual_seed(seed)
        self.base = nn.Sequential(
            nn.Linear(channels + 2, 16), nn.Tanh(), nn.Linear(16, channels)
        ).requires_grad_(False)
        self.transformer = nn.Sequential(
            nn.Linear(channels + 2, 16), nn.Tanh(), nn.Linear(16, channels)
        )
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
        with torch.no_grad():
            for parameter in self.transformer[2].parameters():
                parameter.zero_()
        self.to(dtype)
        self.adapter = ToyAdapter(self.transformer)
        self.calls = 0

    def to_device(self, host: Tensor) -> Tensor:
        return host

    def paced(self, velocity: Tensor, sigmas: Tensor, following: Tensor) -> Tensor:
        return velocity

    def velocity(self, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
        """[B, N, C], sigmas [B], condition {"c": [B]} -> [B, N, C]."""
        self.calls += 1
        x = latents.to(self.base[0].weight.dtype)
        rows = torch.stack([sigmas.to(x), condition["c"].to(x)], dim=-1)[:, None].expand(
            *x.shape[:2], 2
        )
        features = torch.cat([x, rows], dim=-1)
        out = self.base(features)
        return out + self.transformer(features) if self.adapter.on else out


def condition(value: float = 0.5) -> dict[str, Tensor]:
    return {"c": torch.tensor([value])}


def roll(
    policy: ToyPolicy,
    kernel: Kernel | None = None,
    selection: StepSelection | None = None,
    steps: int = 5,
    groups: int = 2,
    samples: int = 4,
    storage: torch.dtype = torch.float32,
    seed: int = 0,
    step: int = 0,
    sigmas: Tensor | None = None,
    version: int = 0,
) -> list[CellBlock]:
    """One block of all trained steps per group, with means and finals."""
    kernel, selection = kernel or FlowSDE(0.7), selection or AllButLast()
    grid = static_grid(steps, 3.0) if sigmas is None else sigmas
    plan = selection.plan_steps(seed, step, steps)
    blocks = []
    for group in range(groups):
        key = denoise.SampleKey(seed, step, 100 + group, tuple(range(samples)))
        made = sample(policy, condition(group), key, grid, kernel, plan, storage, keep_means=True)
        blocks.append(
            CellBlock(
                step=step,
                group=group,
                uid=100 + group,
                first_sample=0,
                version=version,
                steps=made.steps,
                sigmas=grid,
                latents=made.latents,
                next_latents=made.next_latents,
                log_probs=made.log_probs,
                condition=condition(group),
                final=made.final,
                means=made.means,
            )
        )
    return blocks


def batch(
    blocks: Sequence[CellBlock],
    rewards: Tensor | None = None,
    denominator: float | None = None,
    update: int = 0,
    version: int = 0,
) -> TrainBatch:
    """A micro-batch of `blocks`; rewards [P, G] default to random ones."""
    if rewards is None:
        groups = max(block.group for block in blocks) + 1
        rewards = torch.rand(groups, blocks[0].samples, generator=torch.Generator().manual_seed(7))
    cells = sum(block.samples * len(block.steps) for block in blocks)
    return TrainBatch(
        tuple(blocks), {"r": rewards}, {"r": 1.0}, denominator or float(cells), update, version
    )
