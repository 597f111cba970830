"""Where the Strategy meets Lightning's loops: the first publication on trainers, another loop on rollout ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.fit_loop import _FitLoop

if TYPE_CHECKING:
    from digenrl.strategy.disaggregated import DisaggregatedStrategy


class Begin(Callback):
    """Publishes the first version as soon as training starts, before any other callback runs."""

    def __init__(self, strategy: DisaggregatedStrategy) -> None:
        self._strategy = strategy

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
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
