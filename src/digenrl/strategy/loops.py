"""Where the Strategy meets Lightning's loops: the first publication on trainers, another loop on
rollout ranks."""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop


def run_free(trainer: pl.Trainer) -> None:
    """Switch off Lightning's handling of SIGTERM, so that replicas do not wait for each other
    inside an update.

    Before every micro-batch Lightning broadcasts whether rank 0 got the signal. Its signal handler
    would start a collective that nobody joins. Here trainers agree on a stop at the end of a step
    (`Control.stopping`), or at a piece of a step (`StopVote`).
    """
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]


class WholeSteps(_TrainingEpochLoop):
    """Lightning's loop over the micro-batches of an RL step, which ends with the last one of them.

    Lightning's own leaves the step in the middle when a callback (Timer, say) sets
    `trainer.should_stop`. What was trained in part would then be saved as a finished step.
    """

    @property
    def done(self) -> bool:
        return self._is_training_done and self._is_validation_done


def stop_between_steps(trainer: pl.Trainer, agree: Callable[[bool], bool]) -> None:
    """Take `trainer.should_stop` at the end of an RL step, on all trainers or on none.

    Args:
        agree: returns, on every trainer, whether it is true on any of them.
    """
    loop = trainer.fit_loop
    # Lightning has made the loop, with its counters, so its class is changed in place.
    loop.epoch_loop.__class__ = WholeSteps
    end_step = loop.on_advance_end

    def end_step_alike() -> None:
        end_step()  # callbacks that watch a metric (EarlyStopping) come last of all in here
        trainer.should_stop = agree(trainer.should_stop)

    loop.on_advance_end = end_step_alike  # type: ignore[method-assign]


class Begin(Callback):
    """Publishes the first version as soon as training starts, before any other callback runs."""

    def __init__(self, begin: Callable[[pl.Trainer], None]) -> None:
        self._begin = begin

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(trainer)


class RolloutLoop(_FitLoop):
    """Takes the fit loop's place on rollout ranks; shares its epoch loop, so that a checkpoint
    restores counters."""

    _life: Callable[[], None]

    @classmethod
    def in_place_of(cls, loop: _FitLoop, life: Callable[[], None]) -> RolloutLoop:
        """Return a rollout loop in place of the trainer's fit loop. `life` is what it runs."""
        # A checkpoint's counters belong to the epoch loop, which stays the same object.
        new = cls(loop.trainer, loop.min_epochs, loop.max_epochs)
        new.epoch_loop, new._data_source, new._life = loop.epoch_loop, loop._data_source, life
        return new

    def run(self) -> None:
        self._life()

    def teardown(self) -> None:
        """Do nothing: nothing was set up."""
