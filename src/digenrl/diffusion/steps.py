"""The choice of denoising steps that get SDE noise and that are trained: a pure function of (seed,
RL step, T).

The choice is the same on every rank, because its key holds no rank. It is the same for every sample
of an RL step, so a group is compared on equal steps. The last step is never trained: its sigma
reaches 0, where Flow-SDE leaves the variance std^2*s + std^4/4 in the result and Flow-CPS has no
noise at all.

Of the untrained steps the *last* one uses the ODE by default. Euler from s to 0 gives exactly
x0_hat = x - s*v, which is what DanceGRPO decodes (train_grpo_flux.py:254). Flow-GRPO decodes the
noisy SDE result (sd3_pipeline_with_logprob.py:178), `last="sde"` here. That lowers sample quality,
and therefore the reward's signal, for no gain in exploration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

from digenrl.diffusion import keys

Untrained = Literal["ode", "sde"]


@dataclass(frozen=True)
class StepPlan:
    """Steps of one RL step's trajectories; steps in neither tuple are Euler steps."""

    sde: tuple[int, ...]
    """Ascending indices that get noise. Empty for forward-process methods (NFT, DPO), which sample
    by the ODE."""
    trained: tuple[int, ...]
    """Ascending indices that become cells: a subset of `sde`, or, where `sde` is empty, noise
    levels sigmas[k] to train at."""

    def __post_init__(self) -> None:
        for name, steps in (("sde", self.sde), ("trained", self.trained)):
            if list(steps) != sorted(set(steps)) or any(step < 0 for step in steps):
                raise ValueError(f"StepPlan.{name} must be ascending, unique and >= 0, got {steps}")
        if not self.trained:
            raise ValueError("StepPlan.trained is empty: at least one step must be trained")
        if self.sde and not set(self.trained) <= set(self.sde):
            raise ValueError(
                f"trained steps {self.trained} must be SDE steps, got sde={self.sde}: an ODE step "
                "has no log-prob"
            )

    @property
    def forward_process(self) -> bool:
        """Whether cells are noise levels (NFT, DPO), not transitions."""
        return not self.sde


class StepSelection(Protocol):
    """Choice of the trained steps, `algorithm.train_steps`."""

    def count(self, steps: int) -> int:
        """Return S, the number of trained steps of a T-step trajectory; ValueError if the selection
        does not fit T."""

    def plan(self, seed: int, step: int, steps: int, uid: int = 0) -> StepPlan:
        """Return the plan of RL step `step` for T = `steps` and the prompt `uid`."""


def _noisy(steps: int, last: Untrained) -> tuple[int, ...]:
    if last not in ("ode", "sde"):
        raise ValueError(f"last must be 'ode' or 'sde', got {last!r}")
    return tuple(range(steps if last == "sde" else steps - 1))


def _need_two(steps: int) -> None:
    if steps < 2:
        raise ValueError(
            f"the last step is never trained, so sampling.steps must be >= 2, got {steps}"
        )


@dataclass(frozen=True)
class AllButLast:
    """Trains every step but the last (Flow-GRPO's `timestep_fraction=0.99`, config/base.py)."""

    last: Untrained = "ode"

    def count(self, steps: int) -> int:
        """T - 1."""
        _need_two(steps)
        return steps - 1

    def plan(self, seed: int, step: int, steps: int, uid: int = 0) -> StepPlan:
        """Same for every RL step."""
        return StepPlan(_noisy(steps, self.last), tuple(range(self.count(steps))))


@dataclass(frozen=True)
class FirstFraction:
    """Trains the first int(T*fraction) steps, at least 1, at most T-1 (yifan123/flow_grpo
    train_sd3.py:345)."""

    fraction: float = 0.5
    untrained: Untrained = "sde"
    """Sampler of the later steps; the last one follows `last`."""
    last: Untrained = "ode"

    def __post_init__(self) -> None:
        _check_fraction(self.fraction)

    def count(self, steps: int) -> int:
        """int(T*fraction) within 1..T-1."""
        _need_two(steps)
        return min(max(int(steps * self.fraction), 1), steps - 1)

    def plan(self, seed: int, step: int, steps: int, uid: int = 0) -> StepPlan:
        """Same for every RL step."""
        trained = tuple(range(self.count(steps)))
        return StepPlan(_with_untrained(trained, steps, self.untrained, self.last), trained)


@dataclass(frozen=True)
class RandomSubset:
    """A random subset of the steps first..stop-1, drawn anew at every RL step.

    DanceGRPO trains int((T-1)*0.6) of the first T-1 steps and keeps noise on the others
    (train_grpo_flux.py:511-572); UniRL and Flow-Factory take `size` of a pool and run the others by
    the ODE (untrained="ode").
    """

    fraction: float | None = 0.6
    """Share of the pool; null = use `size`."""
    size: int | None = None
    """Number of steps; overrides `fraction`."""
    first: int = 0
    stop: int | None = None
    """End of the pool (exclusive); null = T-1."""
    untrained: Untrained = "sde"
    last: Untrained = "ode"
    per_prompt: bool = False
    """Whether each prompt gets its own subset, shared by its samples (Flash-GRPO, arXiv
    2605.15980)."""

    def __post_init__(self) -> None:
        if self.size is None and self.fraction is None:
            raise ValueError(
                "RandomSubset needs size or fraction: set train_steps.size to a number of steps"
            )
        if self.fraction is not None:
            _check_fraction(self.fraction)

    def count(self, steps: int) -> int:
        """size, or int(pool*fraction), at least 1."""
        first, stop = _pool("RandomSubset", self.first, self.stop, steps)
        pool = stop - first
        size = self.size if self.size is not None else max(int(pool * (self.fraction or 0.0)), 1)
        if not 1 <= size <= pool:
            raise ValueError(
                f"train_steps.size={size} does not fit the pool of {pool} steps [{first}, {stop}) "
                f"of sampling.steps={steps}"
            )
        return size

    def plan(self, seed: int, step: int, steps: int, uid: int = 0) -> StepPlan:
        """Return a plan keyed by (seed, RL step), and by the prompt if `per_prompt`: equal on all
        ranks."""
        first, stop = _pool("RandomSubset", self.first, self.stop, steps)
        own = (uid,) if self.per_prompt else ()
        drawn = keys.generator(seed, "train_steps", step, *own)
        chosen = drawn.choice(stop - first, size=self.count(steps), replace=False)
        trained = tuple(sorted(first + int(index) for index in chosen))
        return StepPlan(_with_untrained(trained, steps, self.untrained, self.last), trained)


@dataclass(frozen=True)
class Window:
    """A contiguous window of `size` SDE steps, all trained, and the ODE elsewhere (MixGRPO, arXiv
    2507.21802, and Flow-GRPO-Fast).

    random: start drawn at every RL step by (seed, RL step). progressive: the window moves by size -
    overlap every `hold` RL steps; the last window is anchored at the end of the range so that every
    step of it is trained (UniRL's floor would leave the remainder out), then stays there or, with
    `wrap`, starts again. MixGRPO: size 4, hold 25, roll back, and overlap 3, for its
    `prog_overlap_step=1` is added to the start (fastvideo/utils/grpo_states.py:92); it lets the
    start run to T-2, past the last whole window, which takes more than 500 RL steps of its recipe.
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

    def count(self, steps: int) -> int:
        """size."""
        first, stop = _pool("Window", self.first, self.stop, steps)
        if self.size > stop - first:
            raise ValueError(
                f"Window.size={self.size} does not fit steps [{first}, {stop}) of "
                f"sampling.steps={steps}: "
                f"use size <= {stop - first} or a wider range (the last step is never trained)"
            )
        return self.size

    def start(self, seed: int, step: int, steps: int) -> int:
        """Return the first step of the window at RL step `step`."""
        first, stop = _pool("Window", self.first, self.stop, steps)
        room = stop - first - self.count(steps)
        if self.order == "random":
            return first + int(keys.generator(seed, "window", step).integers(room + 1))
        stride = self.size - self.overlap
        windows = math.ceil(room / stride) + 1
        index = step // self.hold
        index = index % windows if self.wrap else min(index, windows - 1)
        return first + min(index * stride, room)

    def plan(self, seed: int, step: int, steps: int, uid: int = 0) -> StepPlan:
        """Window start..start+size-1 as both SDE and trained steps."""
        start = self.start(seed, step, steps)
        window = tuple(range(start, start + self.size))
        return StepPlan(window, window)


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
        first, stop = _range("NoiseLevels", self.first, self.stop, steps, steps)
        size = stop - first if self.size is None else self.size
        if not 1 <= size <= stop - first:
            raise ValueError(
                f"train_steps.size={size} does not fit the {stop - first} noise levels [{first}, "
                f"{stop})"
            )
        return size

    def plan(self, seed: int, step: int, steps: int, uid: int = 0) -> StepPlan:
        """Keyed by (seed, RL step): equal on all ranks."""
        first, stop = _range("NoiseLevels", self.first, self.stop, steps, steps)
        chosen = keys.generator(seed, "noise_levels", step).choice(
            stop - first, size=self.count(steps), replace=False
        )
        return StepPlan((), tuple(sorted(first + int(index) for index in chosen)))


def _with_untrained(
    trained: tuple[int, ...], steps: int, untrained: Untrained, last: Untrained
) -> tuple[int, ...]:
    if untrained not in ("ode", "sde"):
        raise ValueError(f"untrained must be 'ode' or 'sde', got {untrained!r}")
    return _noisy(steps, last) if untrained == "sde" else trained


def _pool(name: str, first: int, stop: int | None, steps: int) -> tuple[int, int]:
    _need_two(steps)
    return _range(name, first, stop, steps, steps - 1)


def _range(name: str, first: int, stop: int | None, steps: int, limit: int) -> tuple[int, int]:
    end = limit if stop is None else stop
    if not 0 <= first < end <= limit:
        raise ValueError(
            f"{name} range [{first}, {end}) lies outside the usable steps [0, {limit}) of "
            f"sampling.steps={steps}: "
            f"lower train_steps.stop to at most {limit}, or raise sampling.steps"
        )
    return first, end


def _check_fraction(fraction: float) -> None:
    if not 0 < fraction <= 1:
        raise ValueError(f"train_steps.fraction must be in (0, 1], got {fraction}")
