"""`DisaggregatedStrategy`: rollout ranks generate while trainer ranks learn. This file is wiring and hooks.

Lightning sees the trainers only (see `world`). On a trainer rank the fit loop is stock: the Strategy replaces the train
dataloader by a `FragmentStream`, scales the loss in `backward`, reduces gradients once per optimizer update, and
publishes weights after the last update of a logical batch. On a rollout rank the fit loop is replaced by a
`RolloutWorker`. One Lightning epoch is one RL step.

Researchers override the four hooks `plan_tasks`, `cut_fragment`, `place_timesteps`, `on_bubble`; each is a thin call
into the pure `digenrl.schedule`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from digenrl.cluster.claims import Claims
from digenrl.cluster.control import Aborted, Control, join_store
from digenrl.cluster.world import RoleEnvironment, Session, World
from digenrl.data import PromptSampler
from digenrl.record.run_dir import append_event
from digenrl.record.span_log import SpanLog
from digenrl.rollout.engine import RolloutEngine
from digenrl.schedule import ScheduleSpec, Task, micro_batches_per_update, next_fragment, place, queue, resumed_queue
from digenrl.schedule.order import later_fragments
from digenrl.strategy import gradients, shard
from digenrl.strategy.learner import Learner, PublishedCopy
from digenrl.strategy.lending import Lender
from digenrl.strategy.loops import Begin, RolloutLoop, run_free
from digenrl.strategy.measured_shares import Shares
from digenrl.strategy.step_ledger import StepBook
from digenrl.strategy.stream import FragmentStream
from digenrl.strategy.worker import RolloutWorker, TaskRunner
from digenrl.transport.cells import Placement, StepBoard
from digenrl.transport.link import SocketLink
from digenrl.transport.weights import publish

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
        split_claims: divide every queue equally beforehand instead of claiming (what published colocated loops do).
    """

    strategy_name = "disaggregated"

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
        split_claims: bool = False,
        checkpoint_io: Any = None,
    ) -> None:
        timeout = timedelta(seconds=session.timeout_s)
        super().__init__(cluster_environment=RoleEnvironment(world), checkpoint_io=checkpoint_io, timeout=timeout)
        self.world, self.session, self.spec, self.engine = world, session, spec, engine
        self.sharding, self._shard_group, self._split_claims = sharding, shard_group, split_claims
        self._sampler, self._last_step = sampler, last_step
        self.micro_batches_per_update = micro_batches_per_update(spec, world.trainers)
        self.version = 0
        """Logical batches published so far = the RL step in progress."""
        self.updates_done = 0
        """Optimizer updates done within the step in progress."""
        self.previous: dict[str, Tensor] | None = None
        """Weights of version-1, kept for an exact resume of one-step asynchrony (part of the checkpoint)."""
        self.current: dict[str, Tensor] = {}
        """Weights of `version`, kept for the same."""
        self._first_step = 0
        self._accumulating = False
        self._loan = 0
        """Tasks still to be taken of the loan that the last search granted."""
        self._asked: tuple[int, int] | None = None

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
        if self.world.rollouts == 0:
            return int(self.lockstep or not self.runner.declines(self.version))
        queues = (self.plan_tasks(self.version - 1), self.plan_tasks(self.version))
        return self.lender.decide(queues, pending, board.step, self.spans.now())

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
        where = (session.store_host, session.store_port, session.prefix)
        store = join_store(*where)
        self.control = Control(store, world.rank, session.patience_s)
        self.link = SocketLink(self.control, world.rank, session.host, session.token, watched=session.watched)
        self._state_control = Control(join_store(*where), world.rank, session.patience_s)
        path = session.run_dir / "spans" / f"rank-{world.rank:03d}.jsonl"
        self.spans = SpanLog(path, world.rank, world.role, session.epoch, self.show)
        self.published = PublishedCopy(self.engine.policy, self.spec, sharding=self.sharding)
        self.claims = Claims(self.control, world.rank)
        self.lender = Lender(self.spec, world, self.claims, interruptible=not self.lockstep)
        self.book = StepBook(self.spec, world, self.spans, self.lender, session.run_dir)
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
        self.runner = TaskRunner(
            self.spec,
            lambda version: self.plan_tasks(version),
            lambda fragment, step: self.place_timesteps(fragment, step),
            world.rank,
            world.trainers,
            self.engine,
            self._sampler,
            self.control,
            self.link,
            self.spans,
            self._generators,
            split=self._split_claims,
        )

    @property
    def _generators(self) -> range:
        """Ranks that generate by trade."""
        return self.world.rollout_ranks if self.world.rollouts else range(self.world.trainers)

    def setup_environment(self) -> None:
        super().setup_environment()
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if self.world.is_trainer:  # before every other callback, so that rollouts work while the first evaluation runs
            trainer.callbacks.insert(0, Begin(self))  # type: ignore[attr-defined]
            run_free(trainer.fit_loop)
        else:
            trainer.fit_loop = RolloutLoop.replacing(trainer.fit_loop)
            trainer.callbacks, trainer.loggers = [], []  # type: ignore[attr-defined]

    def configure_ddp(self) -> None:
        """Replicas need no wrapper: `gradients.average` reduces once per update. Otherwise FSDP2 shards in place."""
        if self.sharding != "ddp" and self.world.is_trainer:
            device = self.root_device.type
            shard.shard(
                self.engine.policy, shard.mesh_of(self.sharding, self.world.trainers, self._shard_group, device)
            )

    @property
    def learner(self) -> Learner:
        """The algorithm."""
        return cast(Learner, self.lightning_module)

    # ---- data

    def process_dataloader(self, dataloader: Any) -> Any:
        assert self.lightning_module is not None
        if self.world.is_trainer and self.lightning_module.trainer.training:
            return FragmentStream(self)
        return dataloader

    @property
    def may_lend(self) -> bool:
        """Whether this trainer may generate: its weights are the published version, or it keeps a copy of that."""
        lends = self.world.rollouts == 0 or self.spec.tag
        return lends and (self.updates_done == 0 or (self.published.kept and self.world.rollouts > 0))

    def owes_generation(self, pending: Sequence[tuple[int, ...]]) -> bool:
        """Whether tasks must be generated before the fragment at hand is trained: it is the last before an optimizer
        step that is not the batch's last, and afterwards colocated ranks no longer hold the published version."""
        leaves_version = self.updates_done < self.spec.updates_per_batch - 1 and len(pending) == 1
        return self.world.rollouts == 0 and leaves_version and self.runner.remaining(self.version) > 0

    @property
    def lockstep(self) -> bool:
        """Whether trainers must decide together: sharded forwards are collectives, and this one may generate."""
        lends = self.spec.tag or self.world.rollouts == 0
        return lends and self.sharding != "ddp" and self.world.trainers > 1

    def agree(self, choice: int) -> int:
        """Trainer 0's `choice`, on every trainer."""
        tensor = torch.tensor(choice, device=self.root_device)
        dist.broadcast(tensor, src=0)
        return int(tensor)

    def wants_loan(self, board: StepBoard, pending: Sequence[tuple[int, ...]]) -> bool:
        """Whether this idle trainer should generate one more task. The search is asked once per loan and per finished
        task: its answer cannot change before something happens."""
        if self._loan == 0:
            event = (len(board.completed), self.runner.remaining(self.version))
            if event[1] == 0 or (self.world.rollouts and event == self._asked):
                return False
            self._asked = event
            self._loan = self.on_bubble(board, [*pending, *later_fragments(self.spec, self.updates_done)])
        granted = self._loan > 0
        self._loan -= granted
        return granted

    def lend(self, board: StepBoard, pending: Sequence[tuple[int, ...]]) -> Task | None:
        """A rollout task for this idle trainer, or None."""
        return self.runner.claim(self.version) if self.wants_loan(board, pending) else None

    def heir(self, board: StepBoard, pending: Sequence[tuple[int, ...]], task: Task) -> int | None:
        """Hand-off of a loan: the rollout rank that will be free first, as soon as a fragment is ready to train."""
        if task.step != self.version or self.cut_fragment(pending, board) is None:
            return None
        return self.lender.first_free(self.spans.now())

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
        return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Undo Lightning's division by the accumulation count and the mean over ranks: losses are sums already."""
        scaled = closure_loss * (self.micro_batches_per_update * self.world.trainers)
        loss = super().backward(scaled, optimizer, *args, **kwargs)
        self.shares.end()
        if not self._accumulating:
            self.book.end_fragment()  # what follows belongs to the update
            with self.spans.span("optimizer", step=self.version, what="reduce"):
                gradients.average(self._trained().values(), self.world.trainers)
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
        """Make the current weights (or `tensors`) version `version` and send them to every rollout rank.

        Raises:
            WeightsError: replicated trainers disagree about their weights.
        """
        with self.spans.span("publish", version=version) as facts:
            self.shares.tell()
            source = tensors if tensors is not None else self.learner.rollout_parameters()
            ranks = self.claims.published(version, self.world.rollout_ranks) if self.is_global_zero else ()
            agree = partial(gradients.assert_equal_digests, trainers=self.world.trainers, version=version)
            made = publish(version, source, self.link, ranks, agree)
            facts["digest"] = made.digest
            self.published.keep(made.tensors)
            self.shares.fix(version)
            if self.spec.async_steps:
                self.previous, self.current = self.current or None, dict(made.tensors)
            if self.is_global_zero:
                append_event(self.session.run_dir, "publish", {"version": version, "digest": made.digest})
                self.claims.forget(version)
        self.version = version

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
        self.book.close(self.version)
        self.updates_done, self._loan, self._asked = 0, 0, None
        if self.reduce_boolean_decision(self.control.stopping, all=False):
            self.lightning_module.trainer.should_stop = True

    def step_facts(self) -> dict[str, float]:
        """Numbers of the last finished RL step, for the recorder."""
        return dict(self.book.facts)

    def show(self, text: str) -> None:
        """Say on the store what this rank does now."""
        self._state_control.set(f"state/{self.world.rank}", text)

    def on_train_end(self) -> None:
        if self.is_global_zero:
            self.control.set("done", "1")
        self.barrier()  # no trainer closes its link before rollouts, which still send, can know that the run is over

    def on_exception(self, exception: BaseException) -> None:
        if hasattr(self, "control") and not isinstance(exception, Aborted):
            self.control.report(self.world.is_trainer, exception)

    def teardown(self) -> None:
        if hasattr(self, "link"):
            self.link.close()
            self.spans.close()
        self.engine.close()
        super().teardown()
        if dist.is_initialized():
            dist.destroy_process_group()

    def run_rollouts(self) -> None:
        """The life of a rollout rank (called in place of the fit loop)."""
        self._first_step = int(self.control.wait_for("first_step", "the trainers to start"))
        world, handoff = self.world, self.spec.handoff
        policy, peers = self.engine.policy, world.rollout_ranks
        RolloutWorker(self.runner, policy, self.control, self.link, self.spans, world.rank, peers, handoff).run()

    # ---- checkpoints: whole tensors, whatever the sharding

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return shard.full_state(self.lightning_module)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        shard.load_full_state(self.lightning_module, dict(checkpoint["state_dict"]))

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        if self.sharding == "ddp":
            return dict(super().optimizer_state(optimizer))
        return shard.full_optimizer_state(self.engine.policy, optimizer)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if not self.world.is_trainer:  # rollouts adopt what is published
            return None
        if self.sharding == "ddp":
            return super().load_optimizer_state_dict(checkpoint)
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            shard.load_full_optimizer_state(self.engine.policy, optimizer, state)

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        return self.engine.policy.trained_parameters()
