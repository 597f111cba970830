"""A non-finite number on order: a callback that spoils one trainer rank's micro-batches at chosen
RL steps.

In a configuration: `+callbacks.poison={_target_: tests.algorithms.poison.Poison, what: ratio, rank:
1, steps: [1, 3]}` with `allow_targets=[tests]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from digenrl.algorithms.advantages import Advantages
from digenrl.algorithms.base import PolicyModule
from digenrl.types import TrainBatch


class Poison(pl.Callback):
    """Callback that spoils one number of a trainer.

    Args:
        what: reward (infinite), advantage (NaN), ratio (overflows) or gradient (NaN).
        rank: trainer rank whose number is spoilt.
        steps: RL steps at which that happens.
    """

    def __init__(self, what: str, rank: int, steps: Sequence[int]) -> None:
        self._spoil: Callable[[TrainBatch], TrainBatch] = {
            "reward": _infinite_reward,
            "advantage": lambda batch: batch,
            "ratio": _overflowing_ratio,
            "gradient": lambda batch: batch,
        }[what]
        self._what, self._rank, self._steps = what, rank, tuple(steps)
        self._now = False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, PolicyModule)
        if trainer.global_rank != self._rank:
            return
        honest, advantage = pl_module.training_step, pl_module.advantage

        def spoilt_step(batch: TrainBatch, batch_idx: int) -> Tensor:
            self._now = batch.version in self._steps
            return honest(self._spoil(batch) if self._now else batch, batch_idx)

        def spoilt_advantage(
            rewards: Mapping[str, Tensor], weights: Mapping[str, float]
        ) -> Advantages:
            made = advantage(rewards, weights)
            return replace(made, values=made.values * torch.nan) if self._now else made

        pl_module.training_step = spoilt_step  # type: ignore[method-assign]
        if self._what == "advantage":
            pl_module.advantage = spoilt_advantage  # type: ignore[assignment]
        if self._what == "gradient":
            parameter: Any = next(iter(pl_module.policy.adapter.trained_parameters().values()))
            parameter.register_hook(
                lambda gradient: gradient * torch.nan if self._now else gradient
            )


def _infinite_reward(batch: TrainBatch) -> TrainBatch:
    def with_infinity(table: Tensor) -> Tensor:
        table = table.clone()
        for block in batch.blocks:
            table[block.group, block.first_sample] = torch.inf
        return table

    return replace(
        batch, rewards={name: with_infinity(table) for name, table in batch.rewards.items()}
    )


def _overflowing_ratio(batch: TrainBatch) -> TrainBatch:
    blocks = [replace(block, log_probs=block.log_probs - 1e4) for block in batch.blocks]
    return replace(batch, blocks=tuple(blocks))
