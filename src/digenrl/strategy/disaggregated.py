"""`DisaggregatedStrategy`: rollout ranks generate while trainer ranks learn. This page is wiring
and hooks.

Lightning sees the trainers only (see `cluster/world.py`). On a trainer the fit loop is Lightning's
own. The Strategy replaces the train dataloader, scales the loss, reduces gradients once per update,
and publishes weights after the last update of a logical batch. On a rollout a `RolloutWorker`
replaces the fit loop. A Lightning epoch is an RL step.

Who waits for what, and what unblocks the wait (every wait is bounded, and ends when the run is
aborted):

    role      waits for                      in                              unblocked by
    -------   ----------------------------   -----------------------------   -----------------------------------------
    rollout   the first version              RolloutMail.wait_for_message    Publisher.publish_first_version
    rollout   a task of its version          RolloutMail.wait_for_message    Publisher.publish (the next version)
    rollout   its scorer                     TaskRunner.score                the scorer's thread: a task is scored
    rollout   room in a link's outbox        TaskRunner._send_scored         a trainer: Inbox.receive_message
    trainer   a complete, scored fragment    Lending._wait_for_move          TaskRunner.send_results; or it lends (TAG)
    trainer   trainer 0's choice (lockstep)  Agreement.agree_on_choice       trainer 0: the same call
    trainer   the others, at a piece         StopVote.begin_piece            the slowest trainer, at the piece
    trainer   equal digests                  Publisher._agree_on_digest      the slowest replica: its own digest
    trainer   an evaluation's pieces         Evaluations.finish_evaluation   rollouts: EvaluationWorker.make_piece
    trainer   the checkpoint in writing      Checkpoints.wait_until_written  the writing thread: files are flushed

                 tasks claimed on the control store
                +----------------------------------+
                |                                  v
    rollout:  claim -> generate -> score -> send cells and rewards ----> trainer:  Inbox -> fragment -> micro-batches
                ^                                                                                  |
                +------- adopt <---------- weights of version v+1 <---------- publish <-------- update

Researchers override four hooks: `plan_tasks`, `cut_fragment`, `place_timesteps`, `on_bubble`. Each
is a thin call into the pure `digenrl.schedule`. The parts are built in `wiring.py`.
"""  # noqa: E501

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.optim import Optimizer

from digenrl import accelerator
from digenrl.cluster import vitals
from digenrl.cluster.control import Aborted, Control
from digenrl.cluster.store import StoreClient
from digenrl.cluster.world import RoleEnvironment
from digenrl.record.run_dir import tell_unwritten
from digenrl.record.span_log import SpanLog
from digenrl.schedule import Task, next_fragment, place_fragment, resumed_queue, version_queue
from digenrl.strategy import gradients, shard
from digenrl.strategy.checkpoint_io import DirectoryCheckpointIO
from digenrl.strategy.context import Context
from digenrl.strategy.evaluating import EvaluationWorker
from digenrl.strategy.loops import Begin, RolloutLoop, run_free, stop_between_steps
from digenrl.strategy.publishing import agree_on_sampling_adapter
from digenrl.strategy.rollout_loop import RolloutWorker
from digenrl.strategy.setup import RankRuntime, RankSetup
from digenrl.strategy.shared import Fragment, Learner, TrainerState
from digenrl.strategy.wiring import Wiring, wire_parts
from digenrl.transport.cells import Placement, StepBoard
from digenrl.types import StepGivenUp, out_of_memory

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.utilities.types import STEP_OUTPUT


class DisaggregatedStrategy(DDPStrategy):
    """Roles, schedule, data and weight movement of one run.

    Args:
        rank_setup: place and choices of this rank.
        checkpoint_io: Lightning's plugin, which knows the files of a checkpoint.
    """

    strategy_name = "disaggregated"
    _timeout: timedelta
    """Limit of one collective; Lightning's attribute."""
    parts: Wiring
    """The parts of this rank, from `setup_distributed` on."""
    failed = False
    """Whether an exception ends this rank before the run does."""

    def __init__(self, rank_setup: RankSetup, checkpoint_io: DirectoryCheckpointIO) -> None:
        self.rank_setup, self.state = rank_setup, TrainerState()
        self.world, self.session = rank_setup.world, rank_setup.session
        self.spec, self.engine = rank_setup.spec, rank_setup.engine
        timeout = timedelta(seconds=self.session.limits.collective_s)
        super().__init__(
            cluster_environment=RoleEnvironment(self.world),
            checkpoint_io=checkpoint_io,
            timeout=timeout,
        )

    # ---- hooks for researchers: thin calls into schedule/

    def plan_tasks(self, version: int) -> tuple[Task, ...]:
        """GAP: return the tasks that holders of `version` generate, in claim order."""
        if version == self.state.first_step - 1:
            return resumed_queue(self.spec, self.state.first_step)
        return version_queue(self.spec, version, self.rank_setup.last_step)

    def cut_fragment(self, pending: Sequence[Fragment], board: StepBoard) -> Fragment | None:
        """GAP: return the pending fragment to train now, or None to wait."""
        return next_fragment(self.spec, pending, board.completed)

    def place_timesteps(self, fragment: Fragment, step: int) -> Placement:
        """TSP: return the trainer and the micro-batch of each cell of a fragment of RL step
        `step`."""
        return place_fragment(self.parts.shares.spec_at(step), self.world.trainers, fragment)

    def on_bubble(self, board: StepBoard, pending: Sequence[Fragment]) -> int:
        """TAG: return how many rollout tasks this idle trainer takes now; the bubble-triggered
        search decides.

        Colocated ranks have nobody to wait for. They take one task at a time, unless another rank
        ends it earlier.
        """
        return self.parts.lending.rounds_to_lend(board, pending)

    # ---- roles

    @property
    def world_size(self) -> int:
        return self.world.role_size

    @property
    def is_global_zero(self) -> bool:
        return self.world.rank == 0

    def set_world_ranks(self) -> None:
        setattr(rank_zero_only, "rank", self.world.rank)  # noqa: B010  # rollouts stay silent though each is rank 0 of its own world

    @property
    def learner(self) -> Learner:
        """The algorithm."""
        return cast(Learner, self.lightning_module)

    def setup_distributed(self) -> None:
        """Join the store, open the link, make the role's group the default process group, and build
        the parts."""
        reset_seed()
        self.set_world_ranks()
        setup, session, world = self.rank_setup, self.session, self.world
        store = StoreClient(*session.store)
        self.control = Control(
            store, world.rank, session.limits.start_s
        )  # first: it reports what fails below
        agree_on_sampling_adapter(self.control, world.rank, self.engine.policy.sampling_digest)
        self.link = setup.link(self.control, world, session, self.root_device)
        path = session.run_dir / "spans" / f"rank-{world.rank:03d}.jsonl"
        self.spans = SpanLog(
            path,
            world.rank,
            world.role,
            session.epoch,
            session.progress,
            setup.record_bytes,
            accelerator.mark_work,
        )
        self._process_group_backend = self._get_process_group_backend()
        name = "trainers" if world.is_trainer else f"rollout-{world.rank}"
        dist.init_process_group(
            self._process_group_backend,
            store=dist.PrefixStore(f"world/{name}", store),
            rank=world.role_rank,
            world_size=world.role_size,
            timeout=self._timeout,
            device_id=accelerator.bound_device(self.root_device),
        )
        # A group of its own: a thread writes checkpoints from the host while the default group's
        # collectives go on.
        savers = cast(dist.ProcessGroup, dist.new_group(timeout=self._timeout, backend="gloo"))
        io = cast(DirectoryCheckpointIO, self.checkpoint_io)
        self.runtime = RankRuntime(
            setup, self, self.learner, self.state, self.control, self.link, self.spans
        )
        self.parts = wire_parts(self.runtime, io, savers)

    def setup_environment(self) -> None:
        super().setup_environment()
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if (
            self.world.is_trainer
        ):  # before every other callback, so that rollouts work while the first evaluation runs
            trainer.callbacks.insert(0, Begin(self.begin_training))  # type: ignore[attr-defined]
            run_free(trainer)
            stop_between_steps(trainer, self.agree_on_stop)
        else:
            trainer.fit_loop = RolloutLoop.in_place_of(trainer.fit_loop, self.run_rollouts)
            trainer.callbacks, trainer.loggers = [], []  # type: ignore[attr-defined]

    def model_to_device(self) -> None:
        """Shard the weights if they are to be sharded, before they are read or moved: no rank ever
        holds all."""
        setup, policy, device = self.rank_setup, self.engine.policy, self.root_device
        if setup.sharding != "ddp" and self.world.is_trainer:
            mesh = shard.mesh_of(
                setup.sharding, self.world.trainers, setup.shard_group, device.type
            )
            shard.shard_policy(policy, shard.with_timeout(mesh, self._timeout))
            policy.fill(device)
        super().model_to_device()
        if self.spec.context > 1 and self.world.is_trainer:
            group = Context(policy, self.spec.context, device.type, self._timeout)
            self.parts.step.together = group.share_tokens

    def configure_ddp(self) -> None:
        """Wrap nothing: `GradientExchange` reduces once per update for replicas, and FSDP2 has
        sharded in place."""

    # ---- life of a rank

    def begin_training(self, trainer: pl.Trainer) -> None:
        """Publish the version that training starts from."""
        self.state.first_step = trainer.current_epoch
        self.parts.publisher.publish_first_version()

    def run_rollouts(self) -> None:
        """Live the life of a rollout rank, in place of the fit loop."""
        control, link, spans, runner = self.control, self.link, self.spans, self.parts.runner
        with spans.stage("wait startup"):
            self.state.first_step = int(control.wait_for("first_step", "the trainers to start"))
        if self.world.joined:
            control.add_joined_rank(self.world.rank)
        leave = self.session.leave
        evaluation_worker = EvaluationWorker(self.rank_setup.evaluated, self.runtime, runner)
        RolloutWorker(self.runtime, runner, evaluation_worker).run_until_done()
        if leave.is_set():
            # what this rank has given away is on its way when it says that it has left
            link.drain()

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        with self.session.progress.stage("wait straggler"):
            super().barrier(*args, **kwargs)

    def on_train_end(self) -> None:
        self.wait_for_checkpoint()
        if self.is_global_zero:
            self.control.set("done", "1")
        # no trainer closes its link before rollouts, which still send, can know that the run is
        # over
        self.barrier()

    def on_exception(self, exception: BaseException) -> None:
        self.failed = not isinstance(exception, StepGivenUp)
        if not self.failed:
            self.on_train_end()
        elif hasattr(self, "control") and not isinstance(exception, Aborted):
            if isinstance(exception, torch.OutOfMemoryError):
                doing = self.session.progress.said
                exception.args = (out_of_memory(self.world.rank, doing, exception),)
            if gradients.is_of_a_peer(exception):
                self.control.await_abort(self.session.limits.verdict_s)
            self.control.report_error(self.world.is_trainer, exception, self.session.watched)

    def teardown(self) -> None:
        if hasattr(self, "link"):
            self.link.close()
            self.spans.close(wait=not self.failed)
            if hasattr(self, "parts"):
                self.parts.close()
            tell_unwritten(self.session.run_dir)
        self.engine.close(self.session.limits.leave_s)
        # Lightning's own would copy the network and the optimizer of every rank to the host.
        # After an exception the peers may be in a collective of the group: NCCL would then wait for
        # them, and they wait for this rank. The process exits without (`os._exit`).
        if dist.is_initialized() and not self.failed:
            dist.destroy_process_group()

    # ---- data and updates: `trainer_step.py`

    def process_dataloader(self, dataloader: object) -> object:
        assert self.lightning_module is not None
        trains = self.world.is_trainer and self.lightning_module.trainer.training
        return self.parts.step if trains else dataloader

    def block_backward_sync(self) -> Any:
        """Mark a micro-batch that is not the last one of its update; called by Lightning."""
        return self.parts.step.accumulate_gradients()

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self.parts.step.train_micro_batch(args[0]):
            return super().training_step(*args, **kwargs)

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        scaled = closure_loss * self.rank_setup.loss_scale
        with self.parts.step.tokens_shared():
            loss = super().backward(scaled, optimizer, *args, **kwargs)
        self.parts.step.reduce_gradients()
        return loss

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], object],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> object:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self.parts.step.count_update():
            self.parts.step.publish()
            assert self.lightning_module is not None
            trainer = self.lightning_module.trainer
            trainer.should_stop = self.agree_on_stop(trainer.should_stop or self.control.stopping)
            # all trainers are here, by the reduction, and have read what was agreed
            self.parts.agreement.forget_choices()
        return output

    def agree_on_stop(self, stop: bool) -> bool:
        """Return whether `stop` is true on any trainer. All trainers call this together."""
        with self.session.progress.stage("wait straggler"):
            return self.reduce_boolean_decision(stop, all=False)

    def step_facts(self) -> dict[str, object]:
        """Return the numbers of the last finished RL step, for the recorder.

        `peak_gib` is rank -> stage -> most GiB of its GPU since the rank began, as its last
        heartbeat said; null on processors. `graphs` is how many torch.compile has made on all ranks
        so far; absent without any.
        """
        ranks = [*range(self.world.size), *self.control.joined_ranks()]
        said = self.control.get_all([vitals.facts_key(rank) for rank in ranks])
        told = {rank: json.loads(text) for rank, text in zip(ranks, said, strict=True) if text}
        told[self.world.rank] = vitals.process_facts(self.session.progress)
        gib = {str(r): each["peak_gib"] for r, each in sorted(told.items()) if each["peak_gib"]}
        graphs = sum(each["graphs"] for each in told.values())
        return (
            self.parts.ledger.facts
            | {"peak_gib": gib or None}
            | ({"graphs": graphs} if graphs else {})
            | self.parts.step.exchange.facts
        )

    # ---- checkpoints: `checkpoints.py`

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: a sharded network has no values before, and takes them from the base model then."""
        return True

    def save_checkpoint(
        self, checkpoint: Mapping[str, object], filepath: str | Path, storage_options: object = None
    ) -> None:
        """Begin to write; `wait_for_checkpoint` reports the result. Raises: see
        `wait_for_checkpoint`, of the checkpoint before."""
        self.parts.checkpoints.begin_writing(checkpoint, Path(filepath))

    def wait_for_checkpoint(self) -> None:
        """Wait for the checkpoint in writing. Raises OSError on every trainer if it could not be
        written."""
        self.parts.checkpoints.wait_until_written()

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return self.parts.checkpoints.load_checkpoint(Path(checkpoint_path))

    def lightning_module_state_dict(self) -> dict[str, Tensor]:
        assert self.lightning_module is not None
        return dict(self.lightning_module.state_dict())

    def load_model_state_dict(self, checkpoint: Mapping[str, object], strict: bool = True) -> None:
        """Do nothing: `load_checkpoint` has read the parameters in place."""

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self.parts.checkpoints.optimizer_state(optimizer)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self.parts.checkpoints.load_optimizers(self.optimizers, checkpoint)
