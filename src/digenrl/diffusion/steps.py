"""The choice of denoising steps that get SDE noise and that are trained: a pure function of (seed,
RL step, T).

The choice is the same on every rank, because its key holds no rank. It is the same for every sample
of an RL step, so a group is compared on equal steps. The last step is never trained: its sigma
reaches 0, where Flow-SDE leaves the variance std^2*s + std^4/4 in the result and Flow-CPS has no
noise at all.

By default the *last* step, which is never trained, uses the ODE. Euler from s to 0 gives exactly
x0_hat = x - s*v, which is what DanceGRPO decodes (train_grpo_flux.py:254). Flow-GRPO decodes the
noisy SDE result (sd3_pipeline_with_logprob.py:178), `last="sde"` here. That lowers sample quality,
and therefore the reward's signal, for no gain in exploration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from digenrl import keys

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

    def count_trained(self, steps: int) -> int:
        """Return S, the number of trained steps of a T-step trajectory; ValueError if the selection
        does not fit T."""

    def plan_steps(self, seed: int, step: int, steps: int, uid: int = 0) -> StepPlan:
        """Return the plan of RL step `step` for T = `steps` and the prompt `uid`."""


def noisy_steps(steps: int, last: Untrained) -> tuple[int, ...]:
    """Return the steps that get noise when untrained steps do too. `last` says whether the last
    one does ("sde") or not ("ode")."""
    if last not in ("ode", "sde"):
        raise ValueError(f"last must be 'ode' or 'sde', got {last!r}")
    return tuple(range(steps if last == "sde" else steps - 1))


def need_two(steps: int) -> None:
    """Raise ValueError for a trajectory without a step that can be trained."""
    if steps < 2:
        raise ValueError(
            f"the last step is never trained, so sampling.steps must be >= 2, got {steps}"
        )


@dataclass(frozen=True)
class AllButLast:
    """Trains every step but the last (Flow-GRPO's `timestep_fraction=0.99`, config/base.py).

    Example:
        >>> AllButLast().plan_steps(seed=0, step=0, steps=4)
        StepPlan(sde=(0, 1, 2), trained=(0, 1, 2))
        >>> AllButLast(last="sde").plan_steps(seed=0, step=0, steps=4)
        StepPlan(sde=(0, 1, 2, 3), trained=(0, 1, 2))
    """

    last: Untrained = "ode"

    def count_trained(self, steps: int) -> int:
        """Return T - 1."""
        need_two(steps)
        return steps - 1

    def plan_steps(self, seed: int, step: int, steps: int, uid: int = 0) -> StepPlan:
        """Return the same plan for every RL step."""
        return StepPlan(noisy_steps(steps, self.last), tuple(range(self.count_trained(steps))))


@dataclass(frozen=True)
class RandomSubset:
    """A random subset of the steps first..stop-1, drawn anew at every RL step.

    DanceGRPO trains int((T-1)*0.6) of the first T-1 steps and keeps noise on the others
    (train_grpo_flux.py:511-572). UniRL and Flow-Factory train `size` steps of a pool and run the
    others by the ODE (untrained="ode").

    Example:
        >>> RandomSubset(size=2).plan_steps(seed=0, step=0, steps=5)
        StepPlan(sde=(0, 1, 2, 3), trained=(1, 3))
        >>> RandomSubset(size=2, untrained="ode").plan_steps(seed=0, step=2, steps=5)
        StepPlan(sde=(0, 1), trained=(0, 1))
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
            check_fraction(self.fraction)

    def count_trained(self, steps: int) -> int:
        """Return `size`, or int(pool * fraction) but at least 1."""
        first, stop = pool_of("RandomSubset", self.first, self.stop, steps)
        pool = stop - first
        size = self.size if self.size is not None else max(int(pool * (self.fraction or 0.0)), 1)
        if not 1 <= size <= pool:
            raise ValueError(
                f"train_steps.size={size} does not fit the pool of {pool} steps [{first}, {stop}) "
                f"of sampling.steps={steps}"
            )
        return size

    def plan_steps(self, seed: int, step: int, steps: int, uid: int = 0) -> StepPlan:
        """Return a plan keyed by (seed, RL step), and by the prompt if `per_prompt`: equal on all
        ranks."""
        first, stop = pool_of("RandomSubset", self.first, self.stop, steps)
        # No rank and no sample in the key: all samples of a group train the same steps.
        own = (uid,) if self.per_prompt else ()
        drawn = keys.generator(seed, "train_steps", step, *own)
        chosen = drawn.choice(stop - first, size=self.count_trained(steps), replace=False)
        trained = tuple(sorted(first + int(index) for index in chosen))
        return StepPlan(with_untrained(trained, steps, self.untrained, self.last), trained)


def pool_of(name: str, first: int, stop: int | None, steps: int) -> tuple[int, int]:
    """Return (first, end) of the steps from which a selection takes its own; null: T-1."""
    need_two(steps)
    return range_of(name, first, stop, steps, steps - 1)


def range_of(name: str, first: int, stop: int | None, steps: int, limit: int) -> tuple[int, int]:
    """Return (first, end) within [0, limit); null: the limit. Raises ValueError outside of it."""
    end = limit if stop is None else stop
    if not 0 <= first < end <= limit:
        raise ValueError(
            f"{name} range [{first}, {end}) lies outside the usable steps [0, {limit}) of "
            f"sampling.steps={steps}: "
            f"lower train_steps.stop to at most {limit}, or raise sampling.steps"
        )
    return first, end


def with_untrained(
    trained: tuple[int, ...], steps: int, untrained: Untrained, last: Untrained
) -> tuple[int, ...]:
    """Return the steps that get noise beside the `trained` ones."""
    if untrained not in ("ode", "sde"):
        raise ValueError(f"untrained must be 'ode' or 'sde', got {untrained!r}")
    return noisy_steps(steps, last) if untrained == "sde" else trained


def check_fraction(fraction: float) -> None:
    """Raise ValueError unless a share of the steps is in (0, 1]."""
    if not 0 < fraction <= 1:
        raise ValueError(f"train_steps.fraction must be in (0, 1], got {fraction}")
