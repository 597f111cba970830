"""One way to run an experiment: the choices that the planner compares."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack

from digenrl.recompute import Recompute
from digenrl.schedule import ScheduleSpec


class Choices(TypedDict, total=False):
    """Values for some fields of `Candidate` and of its `ScheduleSpec`, which explain them."""

    trainers: int
    rollouts: int
    sharding: str
    first: str | None
    recompute: Recompute | None
    encoders: bool
    shares: bool
    static_claims: bool
    shard_group: int | None
    task_size: int
    gap: int
    tsp_batch: int
    tsp_shard: bool
    tag: bool
    context: int
    skip_zero: bool
    async_steps: int
    stale_fraction: float


@dataclass(frozen=True)
class Candidate:
    """One way to run an experiment: the choices that the planner compares."""

    trainers: int
    rollouts: int
    spec: ScheduleSpec
    """Schedule without shares, which `Costing.spec` adds."""
    sharding: str = "ddp"
    first: str | None = None
    """Pool that trainers are taken from first; None = the profile's order and roles."""
    recompute: Recompute | None = None
    """Activations that blocks keep for the backward pass; None = as many as fit on each trainer
    (auto)."""
    encoders: bool = False
    """Whether text encoders and VAE stay on the GPUs that generate
    (model.offload_encoders=false)."""
    shares: bool = False
    """Whether trainers get parts in proportion to their speed."""
    static_claims: bool = False
    """Whether tasks are split equally beforehand (schedule.claims=split)."""
    shard_group: int | None = None
    """Trainers in an hsdp group; None = the trainers of a node."""

    def with_changes(self, **changes: Unpack[Choices]) -> Candidate:
        """Return a copy with other values for fields of the candidate or of its schedule."""
        values: dict[str, Any] = dict(changes)
        own = {name: values.pop(name) for name in changes if name in _OWN}
        return replace(self, **own, spec=replace(self.spec, **values) if values else self.spec)

    @property
    def name(self) -> str:
        """Short name of the schedule, such as `gap_tsp` or `colocated`."""
        spec = self.spec
        if self.rollouts == 0:
            return "colocated_split" if self.static_claims else "colocated"
        if spec.async_steps:
            return "full" if spec.tag else "async"
        words = [
            word
            for word, on in (("gap", spec.gap), ("tsp", spec.tsp_shard), ("tag", spec.tag))
            if on
        ]
        return "_".join(words) or "sync"


_OWN = frozenset(Candidate.__dataclass_fields__)
