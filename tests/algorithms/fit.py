"""Rolling out and training a toy policy: by a bare loop, or by Lightning's Trainer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from digenrl.algorithms.advantages import Advantage
from digenrl.algorithms.base import PolicyModule
from digenrl.algorithms.grpo import GRPO
from digenrl.algorithms.surrogates import Clipped
from digenrl.diffusion.sde import FlowSDE
from digenrl.diffusion.steps import AllButLast
from digenrl.types import TrainBatch
from tests.algorithms.toy_policy import ToyPolicy, batch, roll

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)


def grpo(policy: ToyPolicy, **changes: Any) -> GRPO:
    """Flow-GRPO on a toy policy; `changes` are constructor arguments."""
    arguments: dict[str, Any] = {
        "sde": FlowSDE(0.7),
        "train_steps": AllButLast(),
        "optimizer": ADAMW,
        "advantage": Advantage(),
        "surrogate": Clipped(),
        "clip_range": 1e-2,
    }
    return GRPO(policy, **(arguments | changes))


def rl_steps(
    module: PolicyModule,
    policy: ToyPolicy,
    reward: Callable[[Tensor], Tensor],
    count: int,
    samples: int = 24,
) -> list[float]:
    """`count` RL steps without a Trainer, one update each; mean reward of every step's rollouts."""
    optimizer = module.configure_optimizers()
    module.on_train_start()
    module.train()
    curve = []
    for step in range(count):
        with module.rollout_weights():
            blocks = roll(
                policy, module.sde, module.train_steps, 5, 2, samples, step=step, version=step
            )
        finals = torch.stack([block.final for block in blocks if block.final is not None])
        rewards = reward(finals)
        curve.append(float(rewards.mean()))
        optimizer.zero_grad()
        module.training_step(batch(blocks, rewards, version=step), 0).backward()
        optimizer.step()
    return curve


class RollingData(pl.LightningDataModule):
    """Rolls out with the module's present weights at the start of every epoch; `cut` makes the
    micro-batches."""

    def __init__(
        self, policy: ToyPolicy, cut: Callable[[list[Any], Tensor, int], Sequence[TrainBatch]]
    ) -> None:
        super().__init__()
        self.policy, self.cut = policy, cut

    def train_dataloader(self) -> torch.utils.data.DataLoader[TrainBatch]:
        assert self.trainer is not None
        step = self.trainer.current_epoch
        blocks = roll(self.policy, step=step, version=step)
        rewards = torch.stack(
            [-(block.final - 1.0).square().flatten(1).mean(1) for block in blocks]
        )
        items = list(self.cut(blocks, rewards, step))
        return torch.utils.data.DataLoader(items, batch_size=None, collate_fn=None)  # type: ignore[arg-type]


class Metrics(pl.Callback):
    """What a callback sees at the end of every RL step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def fit(
    module: PolicyModule,
    policy: ToyPolicy,
    cut: Callable[[list[Any], Tensor, int], Sequence[TrainBatch]],
    epochs: int = 3,
    accumulate: int = 1,
    ckpt_path: str | None = None,
) -> tuple[pl.Trainer, list[dict[str, float]]]:
    metrics = Metrics()
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[metrics],
        reload_dataloaders_every_n_epochs=1,
        accumulate_grad_batches=accumulate,
    )
    trainer.fit(module, datamodule=RollingData(policy, cut), ckpt_path=ckpt_path, weights_only=True)
    return trainer, metrics.steps
