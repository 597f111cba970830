"""Diffusion-DPO: the best and worst samples of a task, or preferred and rejected files, against
each other, at equal noise and noise level.

Wallace et al. 2023, arXiv 2311.12908; online form of yifan123/flow_grpo train_sd3_dpo.py. See
`losses.dpo_loss`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Unpack

import torch
from torch import Tensor

from digenrl.algorithms.base import CommonArguments, PolicyModule
from digenrl.algorithms.copies import ParameterCopy
from digenrl.algorithms.objectives import mean_dims
from digenrl.extensions.methods.forward_losses import dpo_loss
from digenrl.extensions.methods.noised import noise_cells
from digenrl.models.policy import Policy
from digenrl.types import CellBlock, TrainBatch

STREAM = "pairs"


class DPO(PolicyModule):
    """Pairs are formed within a block's samples: with sampling.task_size = data.group_size, within
    the group, as published. No block has samples of two updates, so no pair has
    (`data.updates_split`).

    Row i of the best meets row i of the worst; pairs with equal rewards have no gradient (verl-omni
    and Flow-GRPO train ties in an arbitrary direction).
    """

    needs_final = True
    compares_with_base = True

    def __init__(
        self,
        policy: Policy,
        seed: int,
        beta: float = 100.0,
        pairs: int = 1,
        reference_every: int | None = None,
        **common: Unpack[CommonArguments],
    ) -> None:
        """`beta`, for errors that are means over dimensions: 100 in Flow-GRPO's and Flow-Factory's
        recipes, 2000 in the paper. `pairs` per task: 1 = argmax against argmin. `reference_every`:
        RL steps after which the reference becomes the present weights (Flow-GRPO sets 40); null =
        always the base model. `seed` keys the noise."""
        super().__init__(policy, **common)
        if beta <= 0 or pairs < 1 or (reference_every is not None and reference_every < 1):
            raise ValueError(
                "DPO needs beta > 0, pairs >= 1 and reference_every >= 1 or null, got "
                f"beta={beta}, pairs={pairs}, reference_every={reference_every}"
            )
        self.seed, self.beta, self.pairs, self.reference_every = seed, beta, pairs, reference_every
        self._reference = self.copies["reference"] = (
            ParameterCopy()
        )  # empty while it is the base model

    def cell_losses(
        self, block: CellBlock, advantages: Tensor, batch: TrainBatch, live: bool
    ) -> Tensor:
        """Return [pairs, K], scaled by b/pairs: the sum weighs as much as b x K cells."""
        chosen, rejected, informative = self.pair_samples(block, advantages)
        count = len(chosen)
        names = [block.first_sample + index for index in range(count)]
        cells = noise_cells(block, chosen + rejected, names + names, self.seed, STREAM)
        with torch.no_grad(), self._reference_weights():
            reference = mean_dims((cells.predict_velocity(self.policy) - cells.target) ** 2)
        error = mean_dims((cells.predict_velocity(self.policy) - cells.target) ** 2)
        losses = dpo_loss(
            error[:count],
            error[count:],
            reference[:count],
            reference[count:],
            self.beta,
        )
        losses = losses * informative[:, None]
        margin = (reference - error).detach()
        right = (margin[:count] > margin[count:]) & informative[:, None]
        judged = float(informative.sum()) * live
        self._meters.update("preference_accuracy", right.sum() * live, judged * right.shape[1])
        self._meters.update("informative_pairs", informative.sum() * live, count * live)
        return losses * (block.samples / count)

    def pair_samples(
        self, block: CellBlock, advantages: Tensor
    ) -> tuple[list[int], list[int], Tensor]:
        """Return the rows of the better and of the worse samples, pair by pair, and which pairs
        have a gradient ([pairs] bool)."""
        if 2 * self.pairs > block.samples:
            raise ValueError(
                f"algorithm.pairs={self.pairs} needs at least {2 * self.pairs} samples in a task, "
                f"got {block.samples}: raise sampling.task_size or lower algorithm.pairs"
            )
        order = advantages.argsort(descending=True, stable=True).tolist()
        chosen, rejected = order[: self.pairs], order[::-1][: self.pairs]
        return chosen, rejected, (advantages[chosen] > 0) & (advantages[rejected] < 0)

    def _reference_weights(self) -> AbstractContextManager[None]:
        if self._reference.tensors:
            return self._reference.swapped_into(self.policy.adapter.trained_parameters())
        return self.policy.adapter.reference()

    def after_update(self, batch: TrainBatch, changed: bool) -> None:
        """Refresh the reference when it is due."""
        super().after_update(batch, changed)
        last = batch.update == self.updates_per_batch - 1
        if (
            last
            and self.reference_every is not None
            and (batch.version + 1) % self.reference_every == 0
        ):
            self._reference.follow_parameters(self.policy.adapter.trained_parameters())


class OfflineDPO(DPO):
    """Diffusion-DPO on preference files (`data.samples=files`): of a group, every even sample is
    preferred to the odd one after it. Rewards do not matter."""

    rewarded = False

    def pair_samples(
        self, block: CellBlock, advantages: Tensor
    ) -> tuple[list[int], list[int], Tensor]:
        """Return the rows of all even samples, of all odd ones, and that each pair counts."""
        even, odd = (
            [row for row, number in enumerate(block.numbers) if number % 2 == rest]
            for rest in (0, 1)
        )
        return even, odd, torch.ones(len(even), dtype=torch.bool, device=advantages.device)
