"""Where the Strategy meets Lightning's loops: the first publication on trainers, another loop on rollout ranks."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.fit_loop import _FitLoop

if TYPE_CHECKING:
    from digenrl.strategy.disaggregated import DisaggregatedStrategy


def run_free(loop: _FitLoop) -> None:
    """Replicas must not wait for each other inside an update, as they do where Lightning broadcasts before every
    micro-batch whether rank 0 got SIGTERM. Stops are agreed at the end of a step (`Control.stopping`)."""
    loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


class Begin(Callback):
    """Publishes the first version as soon as training starts, before any other callback runs."""

    def __init__(self, strategy: DisaggregatedStrategy) -> None:
        self._strategy = strategy
        self._on_sigterm = signal.getsignal(signal.SIGTERM)  # before Lightning takes it over

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        signal.signal(signal.SIGTERM, self._on_sigterm)  # Lightning's handler starts a collective that nobody joins
        self._strategy.begin(trainer)


class RolloutLoop(_FitLoop):
    """Takes the fit loop's place on rollout ranks; shares its epoch loop, so that a checkpoint restores counters."""

    @classmethod
    def replacing(cls, loop: _FitLoop) -> RolloutLoop:
        """The rollout loop of the same trainer."""
        new = cls(loop.trainer, loop.min_epochs, loop.max_epochs)
        new.epoch_loop, new._data_source = loop.epoch_loop, loop._data_source
        return new

    def run(self) -> None:
        self.trainer.strategy.run_rollouts()  # type: ignore[attr-defined]

    def teardown(self) -> None:
        """Nothing was set up."""
