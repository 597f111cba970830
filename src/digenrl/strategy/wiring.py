"""The parts of a rank, built in the order in which they need each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from digenrl.record.decisions import DecisionLog
from digenrl.record.run_dir import DECISIONS
from digenrl.schedule.ranks import Roles
from digenrl.schedule.scheduler import Scheduler, record_header
from digenrl.strategy.checkpoint_io import DirectoryCheckpointIO
from digenrl.strategy.checkpoints import Checkpoints
from digenrl.strategy.evaluating import Evaluations
from digenrl.strategy.inbox import Inbox
from digenrl.strategy.lending import Lending
from digenrl.strategy.publishing import PublishedCopy, Publisher
from digenrl.strategy.setup import RankRuntime, RankSetup
from digenrl.strategy.shared import Hooks, Learner
from digenrl.strategy.shares import Shares
from digenrl.strategy.step_ledger import StepLedger
from digenrl.strategy.stop_vote import Agreement, StopVote
from digenrl.strategy.tasks import TaskRunner
from digenrl.strategy.trainer_step import TrainerStep
from digenrl.transport.cells import StepBoard
from digenrl.transport.wire import MessageKind


@dataclass(frozen=True)
class Wiring:
    """The parts of one rank. A rollout uses `runner` alone; a trainer uses all."""

    decisions: DecisionLog
    """File of the scheduler's events and decisions."""
    ledger: StepLedger
    """Numbers of the RL step in progress."""
    shares: Shares
    """Shares of the trainers in each RL step."""
    runner: TaskRunner
    """Claims, generates and ships tasks."""
    agreement: Agreement
    """Decisions of trainer 0 that all trainers follow."""
    stop_vote: StopVote
    """Grants pieces of work, or gives the step up."""
    publisher: Publisher
    """Makes weights a version, and sends it."""
    inbox: Inbox
    """Sorts what arrives."""
    evaluations: Evaluations
    """Opens evaluations on rollouts, and waits for their pieces."""
    lending: Lending
    """Waits for fragments, and generates in between."""
    step: TrainerStep
    """The train dataloader, updates, and the end of an RL step."""
    checkpoints: Checkpoints
    """The checkpoint in writing."""

    def close(self) -> None:
        """Close the files of this rank."""
        self.decisions.close()


def wire_parts(
    runtime: RankRuntime, checkpoint_io: DirectoryCheckpointIO, savers: dist.ProcessGroup
) -> Wiring:
    """Build the parts of a rank. Each part is given those above it, so that no part waits for one
    that comes later.

    Hooks are bound here: a hook that a test or a callback replaces on the Strategy counts if it
    does so before `fit`.

    Args:
        savers: process group of the trainers, for checkpoints.
    """
    setup, hooks, learner, state = runtime.setup, runtime.hooks, runtime.learner, runtime.state
    control, link, spans = runtime.control, runtime.link, runtime.spans
    spec, world, session, engine = setup.spec, setup.world, setup.session, setup.engine
    # What is known of the run, and what is decided.
    published = PublishedCopy(engine.policy, learner, spec, world.rollouts)
    roles = Roles(world.trainers, world.rollouts, setup.lockstep, setup.split_claims)
    path = session.run_dir / DECISIONS / f"rank-{world.rank:03d}.jsonl"
    decisions = DecisionLog(path, record_header(spec, roles, setup.last_step), setup.record_bytes)
    # The Strategy's own hook: a rank schedules what a researcher's `plan_tasks` returns.
    scheduler = Scheduler(spec, roles, hooks.plan_tasks, decisions)
    for (stage, rank), seconds in setup.expected.items():
        scheduler.expected(stage, rank, seconds)
    ledger = StepLedger(spec, world, spans, scheduler, session.run_dir)
    shares = Shares(spec, world, control, session.run_dir, timed=setup.sharding == "ddp")
    # What is generated here. A rank that joins has the profile's figure until it has measured.
    known_s = setup.expected.get(("generate", world.size - 1), 0.0) if world.joined else 0.0
    plan, place = hooks.plan_tasks, hooks.place_timesteps
    runner = TaskRunner(
        spec, world, scheduler, plan, place, engine, setup.sampler, control, link, spans, known_s
    )
    # What trainers do together.
    together = control, world, session.progress
    agreement, adapter = Agreement(*together), engine.policy.adapter.lora is not None
    stop_vote = StopVote(*together, setup.lockstep, lambda: state.updates_done == 0 or adapter)
    publisher = Publisher(runtime, runner, shares, published)
    # What arrives, and what is trained of it.
    inbox = Inbox(link, runner.claims, scheduler, ledger, _board_maker(setup, hooks, learner))
    evaluations = Evaluations(
        runtime,
        runner.claims,
        stop_vote,
        ledger,
        inbox.receive_message,
        agreement.agree_on_choice,
        publisher.publish_evaluated,
    )
    inbox.set_handler(
        MessageKind.ASK, lambda message: publisher.send_to_joined(int(message.meta["rank"]))
    )
    inbox.set_handler(MessageKind.EVALUATION, evaluations.add_piece)
    lending = Lending(runtime, runner, inbox, published, agreement, stop_vote)
    step = TrainerStep(runtime, inbox, lending, ledger, shares, stop_vote, publisher)
    checkpoints = Checkpoints(engine.policy, spans, checkpoint_io, savers, state)
    return Wiring(
        decisions=decisions,
        ledger=ledger,
        shares=shares,
        runner=runner,
        agreement=agreement,
        stop_vote=stop_vote,
        publisher=publisher,
        inbox=inbox,
        evaluations=evaluations,
        lending=lending,
        step=step,
        checkpoints=checkpoints,
    )


def _board_maker(setup: RankSetup, hooks: Hooks, learner: Learner) -> Callable[[int], StepBoard]:
    """Return what makes the empty board of an RL step."""
    spec, engine = setup.spec, setup.engine

    def useful_samples(rewards: Mapping[str, Tensor]) -> Tensor:
        return learner.useful_samples(rewards, engine.reward_weights)

    def teaching_groups(rewards: Mapping[str, Tensor]) -> Tensor:
        return learner.teaching_groups(rewards, engine.reward_weights)

    def new_board(step: int) -> StepBoard:
        return StepBoard(
            spec,
            lambda fragment: hooks.place_timesteps(fragment, step),
            setup.world.rank,
            step,
            engine.reward_weights,
            useful_samples if spec.skip_zero else None,
            lockstep=setup.lockstep,
            teaches=teaching_groups if spec.selects else None,
            # Trainers whose forwards are collectives with each other: they share weights, or
            # tokens.
            neighbours=math.lcm(setup.shards, spec.context),
        )

    return new_board
