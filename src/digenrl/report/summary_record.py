"""What summary.json holds: the keys of one run's figures, with their types and units."""

from __future__ import annotations

from typing import TypedDict


class PublishedCurve(TypedDict):
    """A published curve of the run's recipe beside what the run reached. The run's own values are
    None before its first step."""

    reward: str
    first: float
    last: float
    steps: float | None
    """RL steps from `first` to `last`, where the source says so."""
    gpu_hours: float | None
    measured: str
    source: str
    own_first: float | None
    own_last: float | None
    own_steps: float
    tiny: bool
    """Whether the run has a tiny build, which no published curve is to be compared with."""


class StageSeconds(TypedDict):
    """Seconds per unit of work (`stages.UNITS`)."""

    planned_s: float
    measured_s: float | None


class RoleMemory(TypedDict):
    """GiB of a role's ranks. A plan counts the context and workspaces of a GPU too (1.5 GiB); what
    is measured is what tensors held at most. None means not planned, or not measured."""

    planned_gib: float | None
    peak_gib: float | None
    ranks: dict[str, dict[str, float]]
    """Rank -> stage -> GiB."""


class Planned(TypedDict, total=False):
    """The planner's prediction of the run that it chose."""

    schedule: str
    step_s: float
    sync_step_s: float | None
    """Seconds of a step with schedule=sync; None where that does not fit."""


class Summary(TypedDict):
    """summary.json. A figure that the run's files do not hold is None."""

    experiment: str
    status: str
    """completed, stopped, failed or unfinished."""
    cause: str | None
    rl_steps: int
    attempts: int
    wall_s: float | None
    step_s: float | None
    """Median seconds of an RL step."""
    samples_per_s: float | None
    reward_first: float | None
    reward_last: float | None
    """Batch means of the first and the last RL step."""
    heldout_first: float | None
    heldout_last: float | None
    """Means of the first and the last evaluation."""
    heldout_error: float | None
    """Standard error of the change of the held-out mean; None where it was not recorded."""
    diversity_ratio: float | None
    nn_distance_first: float | None
    nn_distance_last: float | None
    first_ratio_max_dev: float | None
    recompiled: int | None
    """Graphs that torch.compile made after the first RL step."""
    clipped_first: float | None
    staleness_max: int | None
    staleness_allowed: int
    gradient_share: float | None
    """Share of each gradient's values that travelled between trainers in its own update. None:
    all, so that updates were exact."""
    bubble: dict[str, dict[str, float]]
    """Role -> cause -> seconds waited, summed over ranks."""
    predicted_step_s: float | None
    planned: Planned | None
    stages: dict[str, StageSeconds]
    memory: dict[str, RoleMemory]
    """Role -> memory of its ranks."""
    cells: dict[str, int]
    groups: dict[str, int]
    """Outcome -> groups."""
    prompt_store: dict[str, int] | None
    dropped: dict[str, int]
    """Reason -> samples."""
    published: list[PublishedCurve] | None
    """None for an embedded task."""
    missing: dict[str, int]
    """Reward -> scores."""
    alarms: list[str]
    restarts: int
    """Attempts after the first, and ranks that were lost while the run continued."""
    lost: list[str]
    """Causes of lost ranks."""
    restarted: list[str]
    """Causes of attempts that the run began by itself."""
    unwritten: dict[str, int]
    """File -> lines."""
    loggers: dict[str, int]
    """Logger -> failures."""
    world: dict[str, int]
    """Role -> ranks."""
    warnings: list[str]
