"""Noise levels at which algorithms on the forward process train."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from digenrl import keys
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
    stratified: bool = False
    """Whether each of `size` parts of the range gives one level, in place of `size` levels from
    anywhere (scxue/advantage_weighted_matching train_sd3_awm.py:1197-1204)."""

    def count_trained(self, steps: int) -> int:
        """Return the trained noise levels of a sample: `size`, or the whole range."""
        first, stop = range_of("NoiseLevels", self.first, self.stop, steps, steps)
        size = stop - first if self.size is None else self.size
        if not 1 <= size <= stop - first:
            raise ValueError(
                f"train_steps.size={size} does not fit the {stop - first} noise levels [{first}, "
                f"{stop})"
            )
        return size

    def plan_steps(self, seed: int, step: int, steps: int, uid: int = 0) -> StepPlan:
        """Keyed by (seed, RL step): equal on all ranks."""
        first, stop = range_of("NoiseLevels", self.first, self.stop, steps, steps)
        draw, size = keys.generator(seed, "noise_levels", step), self.count_trained(steps)
        if self.stratified:
            ends = [first + (stop - first) * part // size for part in range(size + 1)]
            chosen = [int(draw.integers(low, high)) for low, high in pairwise(ends)]
            return StepPlan((), tuple(chosen))
        indices = draw.choice(stop - first, size=size, replace=False)
        return StepPlan((), tuple(sorted(first + int(index) for index in indices)))
