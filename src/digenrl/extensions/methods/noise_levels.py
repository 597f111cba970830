"""Noise levels at which algorithms on the forward process train."""

from __future__ import annotations

from dataclasses import dataclass

from digenrl.diffusion import keys
from digenrl.diffusion.steps import StepPlan, range_of


@dataclass(frozen=True)
class NoiseLevels:
    """Sampling by the ODE alone; cells are noise levels sigmas[k] of the rollout grid
    (DiffusionNFT, online DPO).

    `size` of the levels first..stop-1 are drawn at every RL step by (seed, RL step); null = all of
    them, as UniRL sweeps (algorithms/diffusionnft.py:240). The final sigma 0 carries no noise and
    is never among them.
    """

    size: int | None = None
    first: int = 0
    stop: int | None = None
    """End of the range (exclusive); null = T."""

    def count(self, steps: int) -> int:
        """size or the whole range."""
        first, stop = range_of("NoiseLevels", self.first, self.stop, steps, steps)
        size = stop - first if self.size is None else self.size
        if not 1 <= size <= stop - first:
            raise ValueError(
                f"train_steps.size={size} does not fit the {stop - first} noise levels [{first}, "
                f"{stop})"
            )
        return size

    def plan(self, seed: int, step: int, steps: int, uid: int = 0) -> StepPlan:
        """Keyed by (seed, RL step): equal on all ranks."""
        first, stop = range_of("NoiseLevels", self.first, self.stop, steps, steps)
        chosen = keys.generator(seed, "noise_levels", step).choice(
            stop - first, size=self.count(steps), replace=False
        )
        return StepPlan((), tuple(sorted(first + int(index) for index in chosen)))
