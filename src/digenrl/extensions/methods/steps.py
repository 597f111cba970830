"""Choices of trained steps of single publications (`digenrl.diffusion.steps`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from digenrl import keys
from digenrl.diffusion.steps import (
    StepPlan,
    Untrained,
    check_fraction,
    need_two,
    pool_of,
    with_untrained,
)


@dataclass(frozen=True)
class FirstFraction:
    """Trains the first int(T*fraction) steps, at least 1, at most T-1 (yifan123/flow_grpo
    train_sd3.py:345)."""

    fraction: float = 0.5
    untrained: Untrained = "sde"
    """Sampler of the later steps; the last one follows `last`."""
    last: Untrained = "ode"

    def __post_init__(self) -> None:
        check_fraction(self.fraction)

    def count_trained(self, steps: int) -> int:
        """Return int(T*fraction) within 1..T-1."""
        need_two(steps)
        return min(max(int(steps * self.fraction), 1), steps - 1)

    def plan_steps(self, seed: int, step: int, steps: int, uid: int = 0) -> StepPlan:
        """Return the same plan for every RL step."""
        trained = tuple(range(self.count_trained(steps)))
        return StepPlan(with_untrained(trained, steps, self.untrained, self.last), trained)


@dataclass(frozen=True)
class Window:
    """A contiguous window of `size` SDE steps, all trained, and the ODE elsewhere (MixGRPO, arXiv
    2507.21802, and Flow-GRPO-Fast).

    With order=random the start is drawn at every RL step from (seed, RL step). With
    order=progressive the window moves by size - overlap every `hold` RL steps. The last window ends
    with the range, so that every step of the range is trained (UniRL's floor would leave the
    remainder out). Then the window stays there, or starts again with `wrap`.

    MixGRPO has size 4, hold 25 and wraps. Its `prog_overlap_step=1` is added to the start
    (fastvideo/utils/grpo_states.py:92), so `overlap` is 3. Its start may run to T-2, past the last
    whole window, but that takes more than 500 RL steps of its recipe.
    """

    size: int = 2
    first: int = 0
    stop: int | None = None
    """End of the range (exclusive), at most T-1; null = T-1."""
    order: Literal["random", "progressive"] = "random"
    hold: int = 25
    overlap: int = 0
    wrap: bool = True

    def __post_init__(self) -> None:
        if self.order not in ("random", "progressive"):
            raise ValueError(f"Window.order must be 'random' or 'progressive', got {self.order!r}")
        if self.size < 1 or self.hold < 1:
            raise ValueError(
                f"Window needs size >= 1 and hold >= 1, got size={self.size}, hold={self.hold}"
            )
        if not 0 <= self.overlap < self.size:
            raise ValueError(
                f"Window.overlap must be in 0..{self.size - 1} (below size), got {self.overlap}"
            )

    def count_trained(self, steps: int) -> int:
        """Return the trained steps of a sample, which are `size`."""
        first, stop = pool_of("Window", self.first, self.stop, steps)
        if self.size > stop - first:
            raise ValueError(
                f"Window.size={self.size} does not fit steps [{first}, {stop}) of "
                f"sampling.steps={steps}: "
                f"use size <= {stop - first} or a wider range (the last step is never trained)"
            )
        return self.size

    def window_start(self, seed: int, step: int, steps: int) -> int:
        """Return the first step of the window at RL step `step`."""
        first, stop = pool_of("Window", self.first, self.stop, steps)
        room = stop - first - self.count_trained(steps)
        if self.order == "random":
            return first + int(keys.generator(seed, "window", step).integers(room + 1))
        stride = self.size - self.overlap
        windows = math.ceil(room / stride) + 1
        index = step // self.hold
        index = index % windows if self.wrap else min(index, windows - 1)
        return first + min(index * stride, room)

    def plan_steps(self, seed: int, step: int, steps: int, uid: int = 0) -> StepPlan:
        """Return the window start..start+size-1 as both SDE and trained steps."""
        start = self.window_start(seed, step, steps)
        window = tuple(range(start, start + self.size))
        return StepPlan(window, window)
