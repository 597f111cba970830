"""Flow-GRPO and its family as one LightningModule: another SDE, window, advantage or surrogate is
another YAML.

Flow-GRPO arXiv 2505.05470, DanceGRPO 2505.07818, MixGRPO 2507.21802, Flow-CPS 2509.05952,
GRPO-Guard 2510.22319.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Literal, Unpack

import torch
from torch import Tensor
from torch.optim import Optimizer

from digenrl.algorithms.advantages import one_of
from digenrl.algorithms.base import CommonArguments, PolicyModule
from digenrl.algorithms.copies import BatchStart
from digenrl.algorithms.first_ratios import FirstRatios
from digenrl.algorithms.objectives import (
    gaussian_kl,
    h_free_kl,
    longcat_weight,
    mean_square_kl,
    rectified_weight,
)
from digenrl.algorithms.surrogates import Cells, Surrogate
from digenrl.diffusion.denoise import ReplayedTransitions, replay
from digenrl.diffusion.sde import FlowSDE, Kernel
from digenrl.diffusion.sigmas import step_sigmas
from digenrl.models.policy import Policy
from digenrl.types import CellBlock, TrainBatch

logger = logging.getLogger(__name__)

KlKind = Literal["gaussian", "h_free", "mean_square"]
StepWeight = Literal["none", "std", "longcat", "rectified"]
JOINT, JOINT_SQUARE = "joint_ratio", "joint_ratio_square"
MOST_LOG_RATIO = 40.0
"""Cap on joint log-ratios in the effective sample size, so that exp(2 * cap) fits fp32."""
JOINT_CLIP_SPAN = (1e-2, 5e3)
"""clip_range * D of every published recipe lies within: 2e-6 at D=36,864 (Guard) to 1e-3 at
D=2,096,640 (LongCat)."""


class GRPO(PolicyModule):
    """Policy gradient over stored transitions: loss = w * surrogate(r, A) + kl_weight * KL(new ||
    base), per cell."""

    def __init__(
        self,
        policy: Policy,
        surrogate: Surrogate,
        clip_range: float | Sequence[float] = 1e-4,
        kl_weight: float = 0.0,
        kl_kind: KlKind = "gaussian",
        step_weight: StepWeight = "none",
        detach_uncond: bool = False,
        ratio_bound: float | None = None,
        **common: Unpack[CommonArguments],
    ) -> None:
        """Take the settings of `algorithm`.

        `clip_range` is c, or [low, high]. A `kl_weight` of 0 runs no base model. `ratio_bound` is
        what `first_ratio_max_dev` may reach. null = a quarter of the clip range, and at most 1e-5
        for forwards in fp32 and 1e-3 in 16 bits (`rounding.first_ratio_bound`).

        `step_weight` chooses the weight w of a cell. none: 1. std: std/sqrt(h) (yifan123/flow_grpo
        scripts/train_wan2_1.py at 32b48fd). longcat: `objectives.longcat_weight`, and its square on
        the KL. rectified: `objectives.rectified_weight`.

        With `detach_uncond` only the conditional branch of classifier-free guidance is trained
        (yifan123/flow_grpo train_sd3.py:190, ac4c86e).

        Raises:
            ValueError: a combination that has no meaning.
        """
        super().__init__(policy, **common)
        self.surrogate = surrogate
        self.clip = _clip_pair(clip_range)
        self.kl_weight = kl_weight
        self.kl_kind: KlKind = kl_kind
        self.step_weight: StepWeight = step_weight
        policy.detach_unconditional = detach_uncond
        self._check_options(policy)
        self._batch_start = BatchStart()
        clip = self.clip if surrogate.clips else None
        self._first_ratios = FirstRatios(policy.dtype, ratio_bound, clip)

    def _check_options(self, policy: Policy) -> None:
        check_kernel(self.sde, self.surrogate)
        if self.kl_weight < 0:
            raise ValueError(f"algorithm.kl_weight must be >= 0, got {self.kl_weight}")
        for key, kinds in (("kl_kind", KlKind), ("step_weight", StepWeight)):
            one_of(f"algorithm.{key}", getattr(self, key), kinds)
        if self.step_weight == "longcat" and not isinstance(self.sde, FlowSDE):
            raise ValueError(
                "algorithm.step_weight=longcat is FlowSDE's, and algorithm.sde is "
                f"{type(self.sde).__name__}: use "
                "algorithm/sde=longcat (or flow), or algorithm.step_weight=std"
            )
        dimensions = math.prod(policy.drawn_shape)
        joint = max(self.clip) * dimensions
        low, high = JOINT_CLIP_SPAN
        if not low <= joint <= high:
            message = (
                f"algorithm.clip_range={max(self.clip):g} looks too "
                f"{'small' if joint < low else 'large'}: log-probs "
                f"here are means per dimension (D={dimensions}), so it bounds the joint log-ratio "
                "at clip_range*D = "
                f"{joint:.3g}, while published recipes lie in {low:g}..{high:g} (1e-6..1e-3 at "
                "image and video sizes); "
                f"a joint-ratio clip of 0.2 corresponds to {0.2 / dimensions:.1e}"
            )
            logger.warning(message)

    @property
    def needs_means(self) -> bool:
        """Whether rollouts must store their means, with which GRPO-Guard and Flow-DPPO compare."""
        return self.surrogate.needs_means

    def useful_samples(self, rewards: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
        """Return which samples can have a gradient. Without a KL term, samples of advantage 0 have
        none."""
        if self.kl_weight > 0:
            return super().useful_samples(rewards, weights)
        return self.advantage(rewards, weights).values != 0

    def training_step(self, batch: TrainBatch, batch_idx: int) -> Tensor:
        """Return the micro-batch's loss; keep the weights at the start of a logical batch if the
        surrogate needs them."""
        if self.surrogate.needs_proximal and self.updates_per_batch > 1:
            self._batch_start.keep_start(self.policy.adapter.trained_parameters(), batch.version)
        return super().training_step(batch, batch_idx)

    def cell_losses(
        self, block: CellBlock, advantages: Tensor, batch: TrainBatch, live: bool
    ) -> Tensor:
        """Return w * surrogate + kl_weight * KL, [b, K]."""
        if self.needs_means and block.means is None:
            raise ValueError(
                f"{type(self.surrogate).__name__} needs rollout means and the block has none: "
                "keep_means=True"
            )
        staleness = batch.version - block.version
        proximal = self._proximal_log_probs(block, batch)
        reference = None
        if self.kl_weight > 0:
            # Before the forward that keeps a graph: the two never need memory at once.
            with torch.no_grad(), self.policy.adapter.reference():
                reference = replay(self.policy, block, self.sde).mean
        new = replay(self.policy, block, self.sde)  # fields [b, K] and [b, K, *L]
        cells = Cells(
            log_prob=new.log_prob,
            old_log_prob=block.log_probs,
            advantages=advantages[:, None],  # [b, 1]
            mean=new.mean,
            scale=new.scale,
            sqrt_h=new.sqrt_h,
            clip=self.clip,
            old_mean=block.means,
            # None: not needed, or the first update, which begins with the present weights.
            proximal_log_prob=new.log_prob.detach() if proximal is None else proximal,
        )
        weight, kl_weight = self._step_weights(block, new)
        losses = weight * self.surrogate.loss(cells)  # [b, K]
        if reference is not None:
            kl = self._kl_per_cell(new, reference)  # [b, K]
            losses = losses + self.kl_weight * kl_weight * kl
            # `live` as 0 or 1: a block of weight 0 joins the collectives and counts nothing.
            self._meters.update("kl", kl.sum() * live, kl.numel() * live)
        with torch.no_grad():
            self._count_ratios(cells, batch.update, staleness, live)
        return losses

    def _step_weights(
        self, block: CellBlock, new: ReplayedTransitions
    ) -> tuple[Tensor | float, Tensor | float]:
        """Return what multiplies the policy loss and the KL, each broadcastable to [b, K]."""
        if self.step_weight == "std":
            return new.std / new.sqrt_h, 1.0
        if self.step_weight == "longcat":
            sigma, _, guard = step_sigmas(block.sigmas, block.steps)
            weight = longcat_weight(sigma, guard, new.sqrt_h)  # [b, K]
            return weight, weight**2
        if self.step_weight == "rectified":
            return rectified_weight(self.sde, block.sigmas, block.steps), 1.0  # [K]
        return 1.0, 1.0

    def _proximal_log_probs(self, block: CellBlock, batch: TrainBatch) -> Tensor | None:
        """Return [b, K] log-probs under the weights at the beginning of the logical batch; None
        where these are the present ones."""
        if not self.surrogate.needs_proximal or batch.update == 0:
            return None
        with (
            torch.no_grad(),
            self._batch_start.swapped_into(self.policy.adapter.trained_parameters()),
        ):
            return replay(self.policy, block, self.sde).log_prob

    def _kl_per_cell(self, new: ReplayedTransitions, reference: Tensor) -> Tensor:
        if self.kl_kind == "gaussian":
            return gaussian_kl(new.mean, reference, new.scale)
        if self.kl_kind == "h_free":
            return h_free_kl(new.mean, reference, new.std)
        return mean_square_kl(new.mean, reference)

    def _count_ratios(self, cells: Cells, update: int, staleness: int, live: bool) -> None:
        ratio = cells.ratio  # [b, K]
        deviations = (ratio - 1.0).abs()
        deviation = deviations.amax()
        clipped = self.surrogate.bounded_cells(cells).sum() * live
        self._meters.update("clip_fraction", clipped, ratio.numel() * live)
        if self.sde.gaussian:
            # [b, K]. Log-probs are means over D dimensions, so the joint log-ratio is D times
            # theirs.
            joint = (cells.log_prob - cells.old_log_prob).double() * math.prod(
                self.policy.drawn_shape
            )
            joint = joint.clamp(max=MOST_LOG_RATIO).exp()
            self._meters.update(JOINT, joint.sum() * live, ratio.numel() * live)
            self._meters.update(JOINT_SQUARE, joint.square().sum() * live, ratio.numel() * live)
        self._meters.update_peak("ratio_max_dev", deviation, float(live))
        # Before the step's first update the weights are those that made the samples of age 0.
        first = self.surrogate.clips and live and staleness == 0 and update == 0
        self._meters.update("clip_fraction/first", clipped * first, ratio.numel() * first)
        # A sample is at most one version old (I9).
        for age in (0, 1):
            here = live and staleness == age
            self._meters.update(f"clip_fraction/stale_{age}", clipped * here, ratio.numel() * here)
            self._meters.update(f"ratio/stale_{age}", ratio.sum() * here, ratio.numel() * here)
            self._meters.update_peak(f"ratio_max_dev/stale_{age}", deviation, float(here))
        if self.first_ratio_max_dev is None and live:
            self._first_ratios.keep_deviations(deviations)

    def collect_metrics(self) -> dict[str, Tensor]:
        """Return the metrics with `effective_samples`: mean(r)^2 / mean(r^2) of the cells' joint
        ratios (Kish 1965). A value of 1 says that all cells count alike, 1/n that one of n counts.
        """
        found = super().collect_metrics()
        if JOINT in found:
            found["effective_samples"] = found.pop(JOINT) ** 2 / found.pop(JOINT_SQUARE)
        return found

    def on_fit_start(self) -> None:
        """Print the bound for the first ratios."""
        if self.first_ratio_max_dev is None:
            logger.info(
                "max |ratio-1| before the first optimizer step must be at most %g",
                self._first_ratios.bound,
            )

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients. Before the run's first optimizer step, also check the ratios of all
        ranks."""
        if self.first_ratio_max_dev is None:
            self.first_ratio_max_dev = self._first_ratios.largest_deviation(self)
        super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)


def check_kernel(sde: Kernel, surrogate: Surrogate) -> None:
    """Raise ValueError for a kernel whose log-probs the surrogate cannot train on."""
    if not sde.stochastic:
        raise ValueError(
            "algorithm.sde has noise level 0: without noise there is no log-prob to train, use "
            "e.g. 0.7"
        )
    if surrogate.needs_gaussian and not sde.gaussian:
        raise ValueError(
            f"{type(surrogate).__name__} needs a Gaussian log-prob, and {type(sde).__name__} drops "
            "the variance: "
            "use algorithm/sde=flow (or dance), or another algorithm/surrogate"
        )


def _clip_pair(value: float | Sequence[float]) -> tuple[float, float]:
    low, high = (value, value) if isinstance(value, (int, float)) else tuple(value)
    if not 0 < low < 1 or high <= 0:
        raise ValueError(
            "algorithm.clip_range must be c or [low, high] with 0 < low < 1 and high > 0, got "
            f"{value}"
        )
    return float(low), float(high)
