"""Count the kernels that a sampling step and a trained cell of each family launch.

    python -m benchmarks.launches [family ...]

Real classes at published size with an adapter on attention and feed-forward, two samples, and two
branches where the family guides by a negative prompt. Nothing is computed: tensors are fake and lie
on a GPU that does not exist. In a backward pass they lie on a fake processor instead, because
autograd asks CUDA for its driver. An operator that makes or fills a tensor counts as one launch.
Some launch more on a GPU (a split product, a sum in two passes), so that these are least numbers.
Compiled blocks launch fewer, and are not counted.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import _families
from benchmarks.count_facts import attend
from digenrl.diffusion.sde import FlowSDE
from digenrl.models.guidance import NEGATIVE
from digenrl.models.tiny import ensure
from tests.models.real_policies import place, real
from tests.models.tiny_policies import FAMILIES, ROWS

DEFAULTS = ("flux", "sd3", "wan")
DETACHED = ("sd3",)
"""Families whose recipe trains the conditional branch alone (`algorithm.detach_uncond`)."""
NOTHING = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "detach",
    "lift_fresh",
    "_unsafe_view",
}
"""Operators that return a tensor and launch nothing, beside views."""
SAMPLES = 2


class Launches(TorchDispatchMode):
    """Counts operators that launch."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        makes = any(isinstance(leaf, Tensor) for leaf in tree_leaves(out))
        nothing = func.is_view or func.overloadpacket.__name__ in NOTHING
        self.count += makes and not nothing
        return out


class OneKernel(torch.autograd.Function):
    """An RMS norm, which a GPU computes in one kernel and a processor in many."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()


def given(policy: Any, device: torch.device) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return latents, noise levels and conditioning of `SAMPLES` samples."""
    shapes = _families.conditioning(policy.facts(), policy, *ROWS[policy.family].real_text)
    made = {
        key: torch.ones(
            SAMPLES,
            *shape,
            device=device,
            dtype=torch.bool if key.endswith("mask") else policy.dtype,
        )
        for key, shape in shapes.items()
    }
    latents = torch.zeros(SAMPLES, *policy.latent_shape, device=device)
    sigmas = torch.full((SAMPLES,), 0.5, device=device)
    return latents, sigmas, made | {NEGATIVE + key: value for key, value in made.items()}


def step(policy: Any, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
    """Take a step of the SDE; return the log-density of what was drawn."""
    velocity = policy.velocity(latents, sigmas, condition)
    below = sigmas / 2
    following = torch.zeros_like(latents)
    taken = FlowSDE(0.7).transition(
        latents, velocity, sigmas, below, sigmas, next_latents=following
    )
    assert taken.log_prob is not None
    return taken.log_prob


def count(family: str) -> tuple[int, int, int]:
    """Return the launches of a sampling step, of a cell's forward and of its backward pass."""
    ensure(family)
    guided = {} if FAMILIES[family].embedded_guidance else {"guidance_scale": 4.0}
    policy = real(family, True, **guided)
    policy.detach_unconditional = family in DETACHED
    found = list[int]()
    fused = mock.patch.multiple(
        nn.functional,
        scaled_dot_product_attention=attend,
        rms_norm=lambda x, *_: OneKernel.apply(x),
    )
    for device, trains in ((torch.device("cpu"), True), (torch.device("cuda", 0), False)):
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake, fused, torch.set_grad_enabled(trains):
            if not trains:
                policy.adapter.only_generate()
            place(policy, device)
            policy.keep_padding(True)  # what is padding depends on values
            inputs = given(policy, device)
            step(policy, *inputs)  # tables that are made once
            with Launches() as forward:
                likelihood = step(policy, *inputs)
            with Launches() as backward:
                if trains:
                    likelihood.sum().backward()
        found += [forward.count, backward.count]
    trained, back, sampled, _ = found
    return sampled, trained, back


def main() -> None:
    print("| family | sampling step | cell, forward | cell, backward |\n|---|---|---|---|")
    for family in sys.argv[1:] or DEFAULTS:
        print(f"| {family} | {' | '.join(f'{n:,}' for n in count(family))} |", flush=True)


if __name__ == "__main__":
    main()
