"""One way to run an experiment: the choices that the planner compares."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from digenrl.recompute import Recompute
from digenrl.schedule import ScheduleSpec


@dataclass(frozen=True)
class Candidate:
    """Choices that the planner compares."""

    trainers: int
    rollouts: int
    spec: ScheduleSpec
    """Its schedule, without shares: `Costing.spec` adds them."""
    sharding: str = "ddp"
    first: str | None = None
    """Pool that trainers come from first; None = the profile's order and roles."""
    recompute: Recompute | None = None
    """What blocks keep for the backward pass; None = on each trainer the least repetition that fits (auto)."""
    encoders: bool = False
    """Text encoders and VAE stay on the GPUs that generate (model.offload_encoders=false)."""
    shares: bool = False
    """Trainers get parts in proportion to their speed."""
    static_claims: bool = False
    """schedule.claims=split."""
    shard_group: int | None = None
    """Trainers of an hsdp group; None = those of a node."""

    def but(self, **changes: Any) -> Candidate:
        """A copy with other values, of its own fields or of its schedule's."""
        own = {name: changes.pop(name) for name in list(changes) if name in _OWN}
        return replace(self, **own, spec=replace(self.spec, **changes) if changes else self.spec)

    @property
    def name(self) -> str:
        """The schedule in a word."""
        spec = self.spec
        if self.rollouts == 0:
            return "colocated_split" if self.static_claims else "colocated"
        if spec.async_steps:
            return "full" if spec.tag else "async"
        words = [word for word, on in (("gap", spec.gap), ("tsp", spec.tsp_shard), ("tag", spec.tag)) if on]
        return "_".join(words) or "sync"


_OWN = frozenset(Candidate.__dataclass_fields__)
