"""What a rank is given before it reaches the others: its place, the schedule, the engine and the
choices of the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from digenrl.cluster.control import Control
from digenrl.cluster.world import Session, World
from digenrl.data import PromptSampler
from digenrl.record.span_log import SpanLog
from digenrl.rollout.engine import RolloutEngine
from digenrl.rollout.evaluation import FixedSamples
from digenrl.schedule import ScheduleSpec, micro_batches_per_update
from digenrl.strategy.shared import Hooks, Learner, TrainerState
from digenrl.transport.link import Link, LinkMaker, socket_link


@dataclass(frozen=True)
class RankSetup:
    """Everything from which the Strategy of a rank is built. `run.build_rank` fills this in before
    the rank reaches the others."""

    world: World
    """This process's rank, and the number of trainers and rollouts."""
    session: Session
    """How to reach the run."""
    spec: ScheduleSpec
    engine: RolloutEngine
    """Generates tasks, and draws evaluations."""
    sampler: PromptSampler
    """Prompts of each RL step, the same on every rank."""
    last_step: int
    """Index of the last RL step (max_rl_steps - 1)."""
    sharding: str = "ddp"
    """How trainers hold the model: ddp (replicas), hsdp or fsdp."""
    shard_group: int = 1
    """Trainers that hold one copy of the weights under hsdp."""
    gradient_share: float | None = None
    """Share of the gradient's values that replicas exchange in an update; None: all."""
    unequal_gpus: bool = False
    """Whether trainers stand on GPUs of several kinds, whose updates may differ in a last bit."""
    split_claims: bool = False
    """Divide every queue equally beforehand instead of claiming, as published colocated loops
    do."""
    expected: Mapping[tuple[str, int], float] = field(default_factory=dict)
    """(stage, rank) -> seconds by the hardware profile, as `Scheduler.expected` takes them."""
    record_bytes: float = math.inf
    """Most bytes of this rank's spans, and of its decisions. More are left out."""
    evaluated: FixedSamples | None = None
    """Samples that rollouts draw for evaluations. None: trainers evaluate by themselves."""
    link: LinkMaker = socket_link
    """Makes the link with which this rank sends and receives."""

    @property
    def micro_batches_per_update(self) -> int:
        """Micro-batches of one optimizer update, equal on every trainer."""
        return micro_batches_per_update(self.spec, self.world.trainers)

    @property
    def loss_scale(self) -> int:
        """Factor of a loss, which is a sum over its cells already. It undoes Lightning's division
        by the accumulation count, and the mean over trainers."""
        return self.micro_batches_per_update * self.world.trainers

    @property
    def levelled(self) -> bool:
        """Whether copies of the weights take those of trainer 0, or of its node, at every
        publication."""
        return self.unequal_gpus and self.sharding != "fsdp"

    @property
    def shards(self) -> int:
        """Neighbouring trainers that hold one copy of the weights."""
        return {"ddp": 1, "hsdp": self.shard_group, "fsdp": self.world.trainers}[self.sharding]

    @property
    def lockstep(self) -> bool:
        """Whether every forward is a collective of trainers, which share its weights or its
        tokens."""
        return (self.sharding != "ddp" and self.world.trainers > 1) or self.spec.context > 1


@dataclass(frozen=True)
class RankRuntime:
    """What the parts of a running rank share. The Strategy fills it when it joins the
    process group, as soon as the rank has reached the others."""

    setup: RankSetup
    hooks: Hooks
    """The Strategy's: the researcher's decisions."""
    learner: Learner
    """The algorithm, which says what weights rollouts use."""
    state: TrainerState
    """Counters and weights of this trainer."""
    control: Control
    link: Link
    spans: SpanLog
