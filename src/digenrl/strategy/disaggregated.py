"""`DisaggregatedStrategy`: rollout ranks generate while trainer ranks learn. This file is wiring and hooks.

Lightning sees the trainers only (see `world`). On a trainer rank the fit loop is stock: the Strategy replaces the train
dataloader by a `FragmentStream`, scales the loss in `backward`, reduces gradients once per optimizer update, and
publishes weights after the last update of a logical batch. On a rollout rank the fit loop is replaced by a
`RolloutWorker`. One Lightning epoch is one RL step.

Researchers override the four hooks `plan_tasks`, `cut_fragment`, `place_timesteps`, `on_bubble`; each is a thin call
into the pure `digenrl.schedule`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from digenrl.cluster.claims import note_digest, note_version
from digenrl.cluster.control import Aborted, Control
from digenrl.cluster.store import StoreClient
from digenrl.cluster.world import RoleEnvironment, Session, World
from digenrl.data import PromptSampler
from digenrl.record.decision_log import DecisionLog
from digenrl.record.run_dir import DECISIONS, append_event, tell_unwritten
from digenrl.record.span_log import SpanLog
from digenrl.rollout.engine import RolloutEngine
from digenrl.rollout.evaluation import FixedSamples
from digenrl.schedule import ScheduleSpec, Task, micro_batches_per_update, next_fragment, place, queue, resumed_queue
from digenrl.schedule.policy import SchedulePolicy, header
from digenrl.schedule.ranks import Roles
from digenrl.strategy import gradients, shard
from digenrl.strategy.checkpoint_io import DirectoryCheckpointIO, Writing, read
from digenrl.strategy.checkpoint_storage import PREFIX
from digenrl.strategy.context import Context
from digenrl.strategy.evaluating import Evaluations, EvaluationWorker, evaluation_version
from digenrl.strategy.learner import Learner, PublishedCopy
from digenrl.strategy.lending import Hooks, Lending
from digenrl.strategy.loops import Begin, RolloutLoop, run_free
from digenrl.strategy.measured_shares import Shares
from digenrl.strategy.step_ledger import StepLedger
from digenrl.strategy.stop_vote import StopVote
from digenrl.strategy.stream import FragmentSource, FragmentStream, Inbox, NoTrajectoryRecord, TrajectoryRecord
from digenrl.strategy.worker import RolloutWorker, TaskRunner
from digenrl.transport.cells import Placement, StepBoard
from digenrl.transport.link import LinkMaker, socket_link
from digenrl.transport.weights import attest, publish, take_part
from digenrl.types import StepGivenUp

if TYPE_CHECKING:
    import lightning.pytorch as pl


class DisaggregatedStrategy(DDPStrategy):
    """Roles, schedule, data and weight movement of one run.

    Args:
        world: this process's rank and the number of trainers and rollouts.
        session: how to reach the run.
        spec: the schedule.
        engine: generates one task; also used by evaluation.
        sampler: prompts of each RL step, the same on every rank.
        last_step: index of the final RL step (max_rl_steps - 1).
        sharding: how trainers hold the model: ddp (replicas), hsdp or fsdp.
        shard_group: trainers that hold one copy of the weights under hsdp.
        unequal: replicas stand on GPUs of several kinds.
        split_claims: divide every queue equally beforehand instead of claiming (what published colocated loops do).
        expected: (stage, rank) -> seconds, as `SchedulePolicy.expected` takes them: what the hardware profile says.
        record_bytes: of this rank's spans, and of its decisions; more are left out.
        recording: is told everything that this trainer trains on.
        source: makes, of the trainer's parts, where fragments come from; None: from ranks that generate.
        evaluated: what rollouts draw for evaluations; None: nothing, trainers evaluate by themselves.
        link: makes the link with which this rank sends and receives.
    """

    strategy_name = "disaggregated"
    _timeout: timedelta
    """Of one collective; Lightning's."""

    def __init__(
        self,
        world: World,
        session: Session,
        spec: ScheduleSpec,
        engine: RolloutEngine,
        sampler: PromptSampler,
        last_step: int,
        sharding: str = "ddp",
        shard_group: int = 1,
        unequal: bool = False,
        split_claims: bool = False,
        expected: Mapping[tuple[str, int], float] | None = None,
        record_bytes: float = math.inf,
        recording: TrajectoryRecord | None = None,
        source: Callable[[Inbox, Hooks, PromptSampler, SpanLog], FragmentSource] | None = None,
        evaluated: FixedSamples | None = None,
        checkpoint_io: Any = None,
        link: LinkMaker = socket_link,
    ) -> None:
        timeout = timedelta(seconds=session.limits.collective_s)
        super().__init__(cluster_environment=RoleEnvironment(world), checkpoint_io=checkpoint_io, timeout=timeout)
        self.world, self.session, self.spec, self.engine = world, session, spec, engine
        self.sharding, self._shard_group, self._split_claims = sharding, shard_group, split_claims
        self._unequal = unequal and sharding == "ddp"
        self._expected, self._record_bytes = expected or {}, record_bytes
        self._recording, self._make_source = recording or NoTrajectoryRecord(), source
        self._sampler, self._last_step, self._evaluated, self._make_link = sampler, last_step, evaluated, link
        self.micro_batches_per_update = micro_batches_per_update(spec, world.trainers)
        self.version = 0
        """Logical batches published so far = the RL step in progress."""
        self.updates_done = 0
        """Optimizer updates done within the step in progress."""
        self.previous: dict[str, Tensor] | None = None
        """Weights of version-1, kept for an exact resume of one-step asynchrony (part of the checkpoint)."""
        self.saving: Writing | None = None
        """The checkpoint that is being written."""
        self.current: dict[str, Tensor] = {}
        """Weights of `version`, on trainer 0: for an exact resume, and for a rank that joins while no rollout holds
        them."""
        self._first_step = 0
        self._agreed = 0
        """Decisions that sharded trainers have taken together."""
        self._forgotten = 0
        """... of them, those that are no longer on the store."""
        self._accumulating = False
        self._context: Context | None = None

    # ---- hooks for researchers: thin calls into schedule/

    def plan_tasks(self, version: int) -> tuple[Task, ...]:
        """GAP: the tasks that holders of `version` generate, in claim order."""
        if version == self._first_step - 1:
            return resumed_queue(self.spec, self._first_step)
        return queue(self.spec, version, self._last_step)

    def cut_fragment(self, pending: Sequence[tuple[int, ...]], board: StepBoard) -> tuple[int, ...] | None:
        """GAP: which of the pending fragments to train now, or None to wait."""
        return next_fragment(self.spec, pending, board.completed)

    def place_timesteps(self, fragment: tuple[int, ...], step: int) -> Placement:
        """TSP: which trainer rank trains which cells of a fragment of RL step `step`, and in which micro-batch."""
        return place(self.shares.spec_at(step), self.world.trainers, fragment)

    def on_bubble(self, board: StepBoard, pending: Sequence[tuple[int, ...]]) -> int:
        """TAG: how many rollout tasks this idle trainer should take now; the bubble-triggered search decides. Colocated
        ranks have nobody to wait for and take one at a time, unless another one ends it earlier."""
        return self._lending.rounds(board, pending)

    # ---- roles

    @property
    def world_size(self) -> int:
        return self.world.role_size

    @property
    def is_global_zero(self) -> bool:
        return self.world.rank == 0

    def set_world_ranks(self) -> None:
        setattr(rank_zero_only, "rank", self.world.rank)  # noqa: B010  # rollouts stay silent though each is rank 0 of its own world

    def setup_distributed(self) -> None:
        """Join the store, open the data link, and make the role's group the default process group."""
        reset_seed()
        self.set_world_ranks()
        session, world = self.session, self.world
        limits, progress = session.limits, session.progress
        store = StoreClient(*session.store)
        self.control = Control(store, world.rank, limits.start_s)
        self.link = self._make_link(self.control, world, session, self.root_device)
        path = session.run_dir / "spans" / f"rank-{world.rank:03d}.jsonl"
        self.spans = SpanLog(path, world.rank, world.role, session.epoch, progress, self._record_bytes)
        self.published = PublishedCopy(self.engine.policy, self.spec, sharding=self.sharding)
        roles = Roles(world.trainers, world.rollouts, self._sharded, self._split_claims, self.published.kept)
        head = header(self.spec, roles, self._last_step)
        self._decisions = DecisionLog(session.run_dir / DECISIONS / path.name, head, self._record_bytes)
        self.policy = SchedulePolicy(self.spec, roles, lambda version: self.plan_tasks(version), self._decisions)
        for (stage, rank), seconds in self._expected.items():
            self.policy.expected(stage, rank, seconds)
        self.ledger = StepLedger(self.spec, world, self.spans, self.policy, session.run_dir)
        self.shares = Shares(self.spec, world, self.control, session.run_dir, timed=self.sharding == "ddp")
        self._process_group_backend = self._get_process_group_backend()
        name = "trainers" if world.is_trainer else f"rollout-{world.rank}"
        dist.init_process_group(
            self._process_group_backend,
            store=dist.PrefixStore(f"world/{name}", store),
            rank=world.role_rank,
            world_size=world.role_size,
            timeout=self._timeout,
        )
        # Checkpoints are written from the host, beside what the default group does.
        self._savers = cast(dist.ProcessGroup, dist.new_group(timeout=self._timeout, backend="gloo"))
        self.runner = TaskRunner(
            self.spec,
            world,
            self.policy,
            lambda version: self.plan_tasks(version),
            lambda fragment, step: self.place_timesteps(fragment, step),
            self.engine,
            self._sampler,
            self.control,
            self.link,
            self.spans,
            self._expected.get(("generate", world.size - 1), 0.0) if world.joined else 0.0,
        )
        self.inbox = Inbox(
            self.link,
            self.runner.claims,
            self.policy,
            self.ledger,
            self._new_board,
            self._serve,
            self._recording.take,
            lambda message: self.evaluations.add(message),
        )
        hooks = Hooks(
            plan_tasks=lambda version: self.plan_tasks(version),
            cut_fragment=lambda pending, board: self.cut_fragment(pending, board),
            on_bubble=lambda board, pending: self.on_bubble(board, pending),
            receive=self.inbox.receive,
            published=self._published_weights,
            agree=self._agree,
            versions=lambda: (self.previous, self.current),
        )
        self.stop_vote = StopVote(self.control, world, self._sharded, self._droppable)
        self.evaluations = Evaluations(
            self._evaluated,
            world,
            self.control,
            self.stop_vote,
            self.spans,
            self.ledger,
            self.inbox.receive,
            self._agree,
            self._publish_evaluated,
        )
        self._lending = Lending(
            self.spec, world, self.runner, hooks, self.control, self.link, self.spans, self.stop_vote
        )
        self._source: FragmentSource = self._lending
        if self._make_source is not None:
            self._source = self._make_source(self.inbox, hooks, self._sampler, self.spans)

    def _new_board(self, step: int) -> StepBoard:
        return StepBoard(
            self.spec,
            lambda fragment: self.place_timesteps(fragment, step),
            self.world.rank,
            step,
            self.engine.reward_weights,
            self._useful if self.spec.skip_zero else None,
            lockstep=self._sharded,
            teaches=self._teaches if self.spec.selects else None,
            neighbours=math.lcm(self._shards, self.spec.context),
        )

    def _teaches(self, rewards: Mapping[str, Tensor]) -> Tensor:
        """[P] bool: groups whose samples do not all score alike."""
        return self.learner.teaches(rewards, self.engine.reward_weights)

    def _useful(self, rewards: Mapping[str, Tensor]) -> Tensor:
        """[P, G] bool: samples whose cells can have a gradient."""
        return self.learner.useful(rewards, self.engine.reward_weights)

    def _published_weights(self, updates_done: int) -> AbstractContextManager[None]:
        """Inside, the model holds the published version (I6)."""
        return self.published.in_use(self.learner, updates_done)

    def setup_environment(self) -> None:
        super().setup_environment()
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if self.world.is_trainer:  # before every other callback, so that rollouts work while the first evaluation runs
            trainer.callbacks.insert(0, Begin(self.begin))  # type: ignore[attr-defined]
            run_free(trainer)
            self.learner.keep_base_means = self._recording.keep_base_means
        else:
            trainer.fit_loop = RolloutLoop.replacing(trainer.fit_loop, self.run_rollouts)
            trainer.callbacks, trainer.loggers = [], []  # type: ignore[attr-defined]

    def model_to_device(self) -> None:
        """Weights that are to be sharded are sharded first, and read or moved in parts: no rank ever holds all."""
        if self.sharding != "ddp" and self.world.is_trainer:
            device = self.root_device.type
            mesh = shard.mesh_of(self.sharding, self.world.trainers, self._shard_group, device)
            shard.shard(self.engine.policy, shard.bounded(mesh, self._timeout))
            self.engine.policy.fill(self.root_device)
        super().model_to_device()
        if self.spec.context > 1 and self.world.is_trainer:
            self._context = Context(self.engine.policy, self.spec.context, self.root_device.type, self._timeout)

    def configure_ddp(self) -> None:
        """Replicas need no wrapper: `gradients.average` reduces once per update. FSDP2 has sharded in place."""

    @property
    def learner(self) -> Learner:
        """The algorithm."""
        return cast(Learner, self.lightning_module)

    # ---- data

    def process_dataloader(self, dataloader: Any) -> Any:
        assert self.lightning_module is not None
        if self.world.is_trainer and self.lightning_module.trainer.training:
            per_update = self.micro_batches_per_update
            return FragmentStream(
                self.spec, per_update, lambda: self.version, self.inbox, self._source, self.ledger, self.stop_vote
            )
        return dataloader

    @property
    def _shards(self) -> int:
        """Neighbouring trainers that hold one copy of the weights."""
        return {"ddp": 1, "hsdp": self._shard_group, "fsdp": self.world.trainers}[self.sharding]

    @property
    def _sharded(self) -> bool:
        """Whether every forward is a collective of trainers: they share its weights or its tokens."""
        return (self.sharding != "ddp" and self.world.trainers > 1) or self.spec.context > 1

    def _droppable(self) -> bool:
        return self.updates_done == 0 or self.engine.policy.lora is not None

    def _agree(self, choice: int) -> int:
        """Trainer 0's `choice`, on every trainer. It travels over the store: trainer 0 may decide after longer than a
        collective may last. Who shares no weights with it may be several decisions behind."""
        self._agreed += 1
        key = f"agreed/{self._agreed}"
        if not self.is_global_zero:
            with self._turn_of_others():
                return int(self.control.wait_for(key, "trainer 0 to decide what all do next"))
        self.control.set(key, str(choice))
        return choice

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        with self._turn_of_others():
            super().barrier(*args, **kwargs)

    def _turn_of_others(self) -> AbstractContextManager[None]:
        """Inside, this trainer waits for a slower one."""
        return self.session.progress.stage("wait straggler")

    # ---- gradients: the one place that scales (design, "Scaling of gradients")

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning's mark of every micro-batch but the last of an update."""
        self._accumulating = True
        shard.synchronise_gradients(self.engine.policy, on=False)
        try:
            yield
        finally:
            self._accumulating = False
            shard.synchronise_gradients(self.engine.policy, on=True)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.shares.begin(args[0])
        with self._tokens_shared():
            return super().training_step(*args, **kwargs)

    def _tokens_shared(self) -> AbstractContextManager[None]:
        """Make a context group compute together what is trained; each rank generates and evaluates alone."""
        return nullcontext() if self._context is None else self._context.shared()

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Undo Lightning's division by the accumulation count and the mean over ranks: losses are sums already."""
        scaled = closure_loss * (self.micro_batches_per_update * self.world.trainers)
        with self._tokens_shared():
            loss = super().backward(scaled, optimizer, *args, **kwargs)
        self.shares.end()
        self.session.progress.tick()
        if not self._accumulating:
            self.ledger.end_fragment()  # what follows belongs to the update
            if self.world.trainers > 1:
                with self.spans.span("wait", cause="straggler", step=self.version):
                    self.stop_vote.begin_update()
                    dist.barrier()
            with self.spans.span("optimizer", step=self.version, what="reduce"):
                trained = self._trained().values()
                gradients.average(trained, self.world.trainers)
                gradients.scale(trained, self.inbox.open(self.version).gradient_scale(self.updates_done))
        return loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self.updates_done += 1
        if self.updates_done == self.spec.updates_per_batch:
            self.publish(self.version + 1)
            self._finish_step()
        return output

    # ---- weights and life cycle

    def publish(self, version: int, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Make the current weights (or `tensors`) version `version` and send them to every rollout rank. Of the
        trainers, number 0 alone holds what is sent.

        Raises:
            WeightsError: replicated trainers disagree about their weights.
        """
        with self.spans.span("publish", version=version) as facts:
            self.shares.tell()
            if self._unequal:
                gradients.follow_first(self._trained().values(), self.world.trainers)
            source = tensors if tensors is not None else self.learner.rollout_parameters()
            like = self.engine.policy.generating_parameters()
            replicas = 1 if self.sharding == "fsdp" else self.world.trainers
            agree = partial(self._agree_on_digest, version, replicas)
            if self.is_global_zero:
                note_version(self.control, version)
                routes = self._routes(version)
                kept, self.current = self.current if self.spec.async_steps else {}, {}  # two copies would be too many
                made = publish(version, source, self.link, routes, agree, like, version == 0)
                facts["digest"] = made.digest
                self.previous, self.current = kept or None, dict(made.tensors)
                append_event(self.session.run_dir, "publish", {"version": version, "digest": made.digest})
                self.runner.claims.forget(version)
            elif replicas == 1:
                take_part(source)
            else:
                facts["digest"] = attest(source, like)
                agree(facts["digest"])
            if not self.is_global_zero:
                self.previous = None  # a checkpoint gave it to all
            self.published.keep(source)
            self.shares.fix(version)
        self.version = version

    def _publish_evaluated(self, version: int) -> str:
        """Send rollouts the weights that the evaluation of `version` is of; their digest, "" where they hold them."""
        source, held = self.learner.evaluated_parameters(), self.learner.rollout_parameters()
        if all(source[name] is held[name] for name in source):
            return ""
        with self.spans.span("publish", version=version, evaluated=True) as facts:
            if self.is_global_zero:
                like, number = self.engine.policy.generating_parameters(), evaluation_version(version)
                made = publish(number, source, self.link, self._routes(version), lambda digest: None, like)
                facts["digest"] = made.digest
                return made.digest
            if self.sharding != "ddp":
                take_part(source)
        return ""

    def _agree_on_digest(self, version: int, replicas: int, digest: str) -> None:
        with self._turn_of_others():
            gradients.assert_equal_digests(digest, replicas, version)
        if self.is_global_zero:
            note_digest(self.control, version, digest)

    def _serve(self, rank: int) -> None:
        """Send the present version to `rank`, which joined, and asked for it because no rollout holds it."""
        publish(self.version, self.current, self.link, {rank: ()}, agree=lambda digest: None)

    def _routes(self, version: int) -> dict[int, list[int]]:
        """Return who gets `version` from here, and the ranks of that rank's node to which it passes the version on.

        The weights that a run begins with are not sent, so nobody waits for the addresses of rollouts that still load.
        """
        ranks = self.control.survivors(self.world.rollout_ranks)
        if self.session.watched or version == 0:
            return {rank: [] for rank in ranks}
        routes: dict[int, list[int]] = {}
        first: dict[str, int] = {}
        for rank in ranks:
            host = self.control.wait_for(f"address/{rank}", f"the address of rank {rank}").rpartition(":")[0]
            if host != self.session.host and host in first:
                routes[first[host]].append(rank)
            else:
                first[host], routes[rank] = rank, []
        return routes

    def begin(self, trainer: pl.Trainer) -> None:
        """Publish the version that training starts from (and, for an exact asynchronous resume, the one before)."""
        self._first_step = self.version = trainer.current_epoch
        if self.is_global_zero:
            self.control.set("first_step", str(self._first_step))
        if self.previous is not None and self._first_step > 0:
            self.publish(self._first_step - 1, self.previous)
        self.publish(self._first_step)

    def _finish_step(self) -> None:
        assert self.lightning_module is not None
        self.ledger.close(self.version)
        self._recording.finish(self.version - 1)
        self.updates_done = 0
        if self.reduce_boolean_decision(self.control.stopping, all=False):
            self.lightning_module.trainer.should_stop = True
        for number in range(self._forgotten, self._agreed) if self.is_global_zero else ():
            self.control.delete(f"agreed/{number + 1}")  # all trainers are here, and have read it
        self._forgotten = self._agreed

    def step_facts(self) -> dict[str, float]:
        """Numbers of the last finished RL step, for the recorder."""
        return dict(self.ledger.facts)

    def on_train_end(self) -> None:
        self.saved()
        if self.is_global_zero:
            self.control.set("done", "1")
        self.barrier()  # no trainer closes its link before rollouts, which still send, can know that the run is over

    def on_exception(self, exception: BaseException) -> None:
        if isinstance(exception, StepGivenUp):
            self.on_train_end()
        elif hasattr(self, "control") and not isinstance(exception, Aborted):
            self.control.report(self.world.is_trainer, exception)

    def teardown(self) -> None:
        if hasattr(self, "link"):
            self.link.close()
            self.spans.close()
            self._decisions.close()
            self._recording.close()
            tell_unwritten(self.session.run_dir)
        self.engine.close(self.session.limits.leave_s)
        super().teardown()
        if dist.is_initialized():
            dist.destroy_process_group()

    def run_rollouts(self) -> None:
        """The life of a rollout rank (called in place of the fit loop)."""
        with self.spans.stage("wait startup"):
            self._first_step = int(self.control.wait_for("first_step", "the trainers to start"))
        model = self.engine.policy
        if self.world.joined:
            self.control.join(self.world.rank)
        leave, evaluation_worker = (
            self.session.leave,
            EvaluationWorker(self._evaluated, self.engine, self.control, self.world.rank),
        )
        RolloutWorker(
            self.world, self.runner, model, self.control, self.link, self.spans, leave, evaluation_worker
        ).run()
        if leave.is_set():
            self.link.drain()  # what this rank has given away is on its way when it says that it has left

    # ---- checkpoints: each trainer what it holds

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """A sharded network has no values before, and takes them from the base model then."""
        return True

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Begin to write; `saved` tells how it went. Raises: see `saved`, of the one before."""
        self.saved()
        io, previous = cast(DirectoryCheckpointIO, self.checkpoint_io), (self.previous or {}).values()
        with self.spans.stage("checkpoint"):
            stage = partial(self.session.progress.stage, "checkpoint")
            self.saving = io.begin(checkpoint, Path(filepath), self._savers, stage, previous)

    def saved(self) -> None:
        """Wait until the checkpoint that is being written is complete, if there is one.

        Raises:
            OSError: it could not be written; every trainer is told.
        """
        saving, self.saving = self.saving, None
        if saving is not None:
            with self.spans.stage("wait checkpoint"):
                saving.result()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Each trainer its own part, the parameters where they belong."""
        return read(Path(checkpoint_path), group=self._savers, room=self._room)

    def _room(self, place: str, size: torch.Size, dtype: torch.dtype) -> Tensor:
        """Where a tensor of a checkpoint is read to: a parameter itself; what is kept for each of its elements is where
        and as the parameter is."""
        parameters = self._trained()
        if place.startswith("state_dict/"):
            return parameters[place.removeprefix(f"state_dict/{PREFIX}")].detach()
        name = next((part for part in place.split("/") if part in parameters), None)
        if name is None or parameters[name].shape != size:
            return torch.empty(size, dtype=dtype)
        return torch.empty_like(parameters[name], dtype=dtype).detach()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return dict(self.lightning_module.state_dict())

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """`load_checkpoint` has read the parameters where they belong."""

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The optimizer's state by the names of the parameters."""
        names, state = list(self._trained()), optimizer.state_dict()
        groups = [{**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]]
        return {"state": {names[i]: kept for i, kept in state["state"].items()}, "param_groups": groups}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        return self.engine.policy.trained_parameters()
