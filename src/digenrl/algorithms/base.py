"""Base of every algorithm's LightningModule: scaling of the loss, safe updates, metrics, averages,
checkpoints.

A Lightning epoch is one RL step. The module knows no rank: it returns a *sum* over its cells
divided by the update's denominator, and reduces metrics with torchmetrics (`meters`).
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar, Literal, NotRequired, TypedDict

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from digenrl.algorithms.advantages import Advantage, reward_statistics
from digenrl.algorithms.copies import Ema, ParameterCopy
from digenrl.algorithms.finite import not_finite
from digenrl.algorithms.meters import Meters
from digenrl.algorithms.parts import (
    WHOLE,
    Part,
    Routes,
    advantages_of_parts,
    check_routes,
    parts_of,
)
from digenrl.algorithms.step_size import small_gradient
from digenrl.diffusion.sde import Kernel
from digenrl.diffusion.steps import StepSelection
from digenrl.models.policy import Policy
from digenrl.types import CellBlock, TrainBatch

logger = logging.getLogger(__name__)

Reference = Literal["base", "start"]
SKIPS_IN_A_ROW = 3
"""Consecutive non-finite updates that stop the run."""


class CommonArguments(TypedDict):
    """Arguments that every algorithm hands on to `PolicyModule`."""

    sde: Kernel
    train_steps: StepSelection
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    advantage: Advantage
    updates_per_batch: NotRequired[int]
    max_grad_norm: NotRequired[float | None]
    ema: NotRequired[Ema | None]
    reference: NotRequired[Reference]


class PolicyModule(pl.LightningModule):
    """Base class of the algorithms. A subclass defines `cell_losses`, and `useful_samples` if it
    knows more."""

    needs_final: ClassVar[bool] = False
    """Whether blocks must carry the clean latents `final`."""
    rewarded: ClassVar[bool] = True
    """Whether rewards decide what is learnt, so that a group of equal ones teaches nothing."""
    splits_parts: ClassVar[bool] = False
    """Whether the loss takes an advantage for each of `parts` (`by_part`)."""
    compares_with_base: ClassVar[bool] = False
    """Whether the loss runs the base model always. Other losses run it where `kl_weight` > 0."""

    def __init__(
        self,
        policy: Policy,
        sde: Kernel,
        train_steps: StepSelection,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        advantage: Advantage,
        updates_per_batch: int = 1,
        max_grad_norm: float | None = 1.0,
        ema: Ema | None = None,
        reference: Reference = "base",
    ) -> None:
        """Rollouts sample with `sde` and `train_steps`. `optimizer` is a partial that lacks only
        the parameters. `reference` says what KL is against: the base model, or the loaded adapter
        on it."""
        super().__init__()
        if updates_per_batch < 1:
            raise ValueError(f"algorithm.updates_per_batch must be >= 1, got {updates_per_batch}")
        if max_grad_norm is not None and max_grad_norm <= 0:
            raise ValueError(
                f"algorithm.max_grad_norm must be positive or null, got {max_grad_norm}: 1.0 is "
                "usual"
            )
        if reference == "start":
            policy.adapter.refer_to_start()
        self.policy = policy
        self.sde = sde
        self.train_steps = train_steps
        self.advantage = advantage
        self.updates_per_batch = updates_per_batch
        self.max_grad_norm = max_grad_norm
        self.ema = ema
        self.parts: tuple[Part, ...] = WHOLE
        """Parts of a sample that have advantages of their own."""
        self.first_ratio_max_dev: float | None = None
        """max |ratio-1| over every cell of all ranks before the run's first optimizer step; None
        without ratios or before."""
        self.copies: dict[str, ParameterCopy] = {}
        """Further weights of the algorithm, by their names in a checkpoint."""
        self.skipped_updates = 0
        # A checkpoint holds the trained parameters alone.
        self.strict_loading = False
        self._optimizer = optimizer
        self._meters = Meters()
        self._skips_in_a_row = 0
        self._reached = self._trains = False
        """Whether the loss is known to reach every trained parameter; whether this rank has trained
        a cell."""
        self._small_gradient_told = False
        self._suspect: tuple[TrainBatch, Tensor] | None = None
        """The first micro-batch of the update with a non-finite loss, else the latest, and its
        loss."""

    # ---- what an algorithm is

    @abstractmethod
    def cell_losses(
        self, block: CellBlock, advantages: Tensor, batch: TrainBatch, live: bool
    ) -> Tensor:
        """Return losses whose sum is the block's share: one per cell, [b, K], or one per pair.
        advantages [b], or [b, parts] if the sample has several (`splits_parts`). `live` False
        marks a block of weight 0 that must not count in metrics."""

    @property
    def needs_means(self) -> bool:
        """Whether rollouts must store the means of their transitions."""
        return False

    def rollout_parameters(self) -> dict[str, Tensor]:
        """Return the weights that rollouts must use, by the names of
        `policy.adapter.trained_parameters()`."""
        return dict(self.policy.adapter.trained_parameters())

    def rollout_weights(self) -> AbstractContextManager[None]:
        """Give this rank's policy `rollout_parameters()` during the body (colocated or lent
        generation)."""
        return nullcontext()

    def averaged(self) -> AbstractContextManager[None]:
        """Give the policy the moving average, if there is one, during the body (evaluation)."""
        return (
            nullcontext()
            if self.ema is None
            else self.ema.copy.swapped_into(self.policy.adapter.trained_parameters())
        )

    def evaluated_parameters(self) -> dict[str, Tensor]:
        """Return the weights inside `averaged`, by the names of `Adapter.trained_parameters`:
        themselves where there is no average."""
        average = {} if self.ema is None else self.ema.copy.tensors
        return {
            name: average.get(name, own)
            for name, own in self.policy.adapter.trained_parameters().items()
        }

    def route_rewards(self, routes: Routes) -> None:
        """Give each modality the advantage of its own rewards. Raises as `check_routes`."""
        check_routes(routes, type(self.policy), type(self).__name__, self.splits_parts)
        self.parts = parts_of(routes, self.policy)

    def useful_samples(self, rewards: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
        """Return [P, G] bool: samples whose cells can have a gradient. rewards as in `TrainBatch`;
        rows of groups that are not complete mean nothing."""
        return torch.ones_like(next(iter(rewards.values())), dtype=torch.bool)

    def teaching_groups(
        self, rewards: Mapping[str, Tensor], weights: Mapping[str, float]
    ) -> Tensor:
        """Return [P] bool: groups whose samples do not all score alike, every group unless
        `rewarded`; arguments as of `useful_samples`."""
        found = [
            self.advantage.teaching_groups(rewards, part.own_weights(weights))
            for part in self.parts
            if part.share
        ]
        return torch.stack(found).any(dim=0) | (not self.rewarded)

    # ---- one micro-batch

    def training_step(self, batch: TrainBatch, batch_idx: int) -> Tensor:
        """Return the sum over the cells of all blocks / `batch.denominator`.

        The gradient does not depend on the order and size of micro-batches. A micro-batch without
        blocks costs nothing and gives no parameter a gradient.
        """
        advantages = advantages_of_parts(
            self.parts, self.advantage, batch.rewards, batch.reward_weights
        )
        # Lightning calls backward on every loss. Without blocks nothing else gives this one a
        # graph.
        total = torch.zeros((), device=self.device, requires_grad=not batch.blocks)
        cells = 0
        for block in batch.blocks:
            live = block.weight != 0.0
            # [b], or [b, parts]
            of_rows = advantages[block.group, list(block.numbers)].squeeze(1)
            losses = self.cell_losses(block if live else _zeroed_block(block), of_rows, batch, live)
            total = total + block.weight * losses.sum()
            cells += block.samples * len(block.steps) if live else 0
        self._trains = self._trains or cells > 0
        loss = total / batch.denominator
        self._meters.update("loss", loss, cells / batch.denominator)
        # The test reads the loss before this one, so the host does not wait for the present
        # forward. The first loss that is not finite stays, for the message.
        if self._suspect is None or bool(torch.isfinite(self._suspect[1])):
            self._suspect = batch, loss.detach()
        return loss

    # ---- the update

    def configure_optimizers(self) -> Optimizer:
        """Return the optimizer that the YAML names, such as AdamW, over the trained parameters
        only."""
        optimizer = self._optimizer(list(self.policy.adapter.trained_parameters().values()))
        optimizer.register_step_post_hook(self._call_after_update)
        return optimizer

    def train(self, mode: bool = True) -> PolicyModule:
        """Keep the policy in eval mode: dropout would make replay differ from the rollout."""
        super().train(mode)
        self.policy.eval()
        return self

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip to `max_grad_norm`; a non-finite gradient becomes an exact no-op: no gradient, no
        decay, no optimizer state.

        Gradients are equal (or shards of one gradient) on all ranks here, so all ranks decide
        alike.

        Raises RuntimeError at the first update for trained parameters that the loss does not reach.
        """
        if self._trains and not self._reached:
            self._require_gradients()
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        if all(p.grad is None for p in trained):
            # Nobody had anything to train. The optimizer moves on as with a gradient of zero, which
            # this is.
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
        parameters = [p for p in trained if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        # Sharded: each rank has its part of the norm, and the sum is a collective.
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        finite = bool(torch.isfinite(norm))
        self._meters.update(
            "update_skipped", torch.tensor(float(not finite), device=self.device), 1.0
        )
        if not finite:
            self._skip_update(optimizer, float(norm))
            return
        self._skips_in_a_row = 0
        self._meters.update("grad_norm", norm, 1.0)
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.max_grad_norm, norm)
            norm = norm.clamp(max=self.max_grad_norm)
        self._meters.update("grad_norm_clipped", norm, 1.0)
        if not self._small_gradient_told and self.global_rank == 0:
            told = small_gradient(optimizer, parameters, float(norm))
            self._small_gradient_told = told is not None
            if told is not None:
                logger.warning(told)

    def _require_gradients(self) -> None:
        if unreached := self.policy.adapter.parameters_without_gradient():
            trained = len(self.policy.adapter.trained_parameters())
            raise RuntimeError(
                f"{len(unreached)} of {trained} trained parameters got no gradient in the first "
                "update (first: "
                f"{unreached[0]}): the loss does not reach them, so they would never change. Leave "
                "them out of "
                "model.lora.targets, or freeze them in the adapter (`unread`)."
            )
        self._reached = True

    def _skip_update(self, optimizer: Optimizer, norm: float) -> None:
        # None and not 0: optimizers pass over such parameters, their decay and moments too.
        optimizer.zero_grad(set_to_none=True)
        self._skips_in_a_row += 1
        self.skipped_updates += 1
        assert self._suspect is not None, "an optimizer step follows a training_step"
        batch, loss = self._suspect
        here = ", ".join(not_finite(batch)) or "nothing"
        reason = (
            f"gradient norm is {norm}: the update is skipped on all ranks, no weight changed "
            f"(version {batch.version}, "
            f"update {batch.update}, {self._skips_in_a_row} of {SKIPS_IN_A_ROW} in a row; this "
            "rank's loss is "
            f"{float(loss):.4g}; not finite in its micro-batch: {here}). Usual causes: an infinite "
            "reward, a "
            "latent outside the storage dtype, a ratio that overflowed"
        )
        logger.warning(reason)
        if self._skips_in_a_row >= SKIPS_IN_A_ROW:
            raise RuntimeError(
                f"{SKIPS_IN_A_ROW} updates in a row were not finite, stopping: {reason}"
            )

    def on_train_start(self) -> None:
        """Start the average from the weights that training starts from."""
        if self.ema is not None:
            self.ema.begin_average(self.policy.adapter.trained_parameters())

    def _call_after_update(
        self, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        """Call `after_update` right after the optimizer, so that a publication that follows sees
        its changes."""
        if (
            self._suspect is None
        ):  # torch's own dummy step, which creates the state that a checkpoint fills
            return
        batch, _ = self._suspect
        self._suspect = None
        self.after_update(batch, changed=self._skips_in_a_row == 0)

    def after_update(self, batch: TrainBatch, changed: bool) -> None:
        """Run after every optimizer step. `changed` is False if it was skipped. `batch` is a
        micro-batch of the update."""
        if self.ema is not None and changed:
            self.ema.update_average(self.policy.adapter.trained_parameters())

    def on_train_batch_end(self, outputs: object, batch: TrainBatch, batch_idx: int) -> None:
        """After the RL step's last micro-batch, log its metrics: before callbacks read them at the
        end of the epoch. Every rank has all rewards by then."""
        # The last micro-batch of all updates: an epoch is one RL step.
        if self.trainer.is_last_batch:
            self._log_step(batch)

    def _log_step(self, batch: TrainBatch) -> None:
        advantages, found = (
            self.advantage(batch.rewards, batch.reward_weights),
            self.collect_metrics(),
        )
        for name, value in (found | reward_statistics(advantages, batch.rewards)).items():
            self.log(name, value.to(self.device), on_step=False, on_epoch=True, batch_size=1)

    def collect_metrics(self) -> dict[str, Tensor]:
        """Return the RL step's metrics, equal on all ranks; empties the meters."""
        return self._meters.collect_metrics()

    # ---- checkpoints: trained parameters, averages, counters

    def state_dict(  # type: ignore[override]
        self, *, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, object]:
        """Trained parameters only; the base model is in its own files."""
        trained = {
            prefix + name for name, parameter in self.named_parameters() if parameter.requires_grad
        }
        state = super().state_dict(prefix=prefix, keep_vars=keep_vars)
        return {name: value for name, value in state.items() if name in trained}

    def on_save_checkpoint(self, checkpoint: dict[str, object]) -> None:
        """Add the run's first ratio, the average and the algorithm's copies to the checkpoint."""
        checkpoint["algorithm"] = {
            "first_ratio_max_dev": self.first_ratio_max_dev,
            "skipped_updates": self.skipped_updates,
            "sampling_adapter": self.policy.sampling_digest,
            "ema_steps": 0 if self.ema is None else self.ema.steps,
            "ema": {} if self.ema is None else self.ema.copy.state_dict(),
            **{name: copy.state_dict() for name, copy in self.copies.items()},
        }

    def on_load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Read these entries back. Raises ValueError if only one of checkpoint and run has an
        average, or if they sample with different adapters."""
        saved = checkpoint["algorithm"]
        own = self.policy.sampling_digest  # None also where nothing has been drawn yet
        if own is not None and saved.get("sampling_adapter") != own:
            raise ValueError(
                f"sampling.lora: the checkpoint was made with an adapter of digest "
                f"{saved.get('sampling_adapter')}, the file has {own} now; put the first file back"
            )
        self.first_ratio_max_dev = saved["first_ratio_max_dev"]
        self.skipped_updates = saved["skipped_updates"]
        if bool(saved["ema"]) and self.ema is None:
            raise ValueError(
                "the checkpoint keeps a moving average and this run does not: set algorithm.ema as "
                "it was"
            )
        if self.ema is not None:
            self.ema.steps = saved["ema_steps"]
            self.ema.copy.load_state_dict(saved["ema"])
        for name, copy in self.copies.items():
            copy.load_state_dict(saved[name])


def _zeroed_block(block: CellBlock) -> CellBlock:
    """Return a block of weight 0 with finite data of the same shapes: it runs the same collectives,
    and 0 * NaN cannot arise."""
    names = ("latents", "next_latents", "log_probs", "final", "means")
    zeros: dict[str, Any] = {
        name: torch.zeros_like(value)
        for name in names
        if (value := getattr(block, name)) is not None
    }
    return replace(block, **zeros)
