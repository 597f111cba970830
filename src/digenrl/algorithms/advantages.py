"""Turn rewards [P, G] into advantages [P, G], in fp64.

P prompts, G samples of a group. NaN = missing: it takes no part in any statistic and its advantage
is 0. One convention for all variants: population standard deviation unless `unbiased`, eps added
outside the root, groups whose rewards are all equal get exactly 0. The choices of the field's
repositories are listed at the options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args, get_type_hints

import torch
from torch import Tensor


@dataclass(frozen=True)
class Advantages:
    """Result for one logical batch; rows of groups without rewards yet are 0."""

    values: Tensor
    """[P, G] fp32, clipped."""
    total: Tensor
    """[P, G] fp64: the weighted sum of the optimised rewards; NaN where one of them is missing."""
    zero_variance: Tensor
    """[P] bool: all present rewards of the group are equal, so that it gives no gradient."""
    saturated: Tensor
    """[P, G] bool: `clip` has cut the value."""


@dataclass(frozen=True)
class Advantage:
    """Rule that turns rewards into advantages; `algorithm.advantage` in YAML."""

    std: Literal["group", "batch", "max_group", "none"] = "group"
    """What divides: the group's own deviation (DanceGRPO), the whole logical batch's (Flow-GRPO
    `global_std`, default for images), the largest of the groups' (LongCat, ModelTC/GenRL
    stat_tracking.py:45), or nothing (Dr. GRPO)."""
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """leave_one_out: the mean of the group's other samples (RLOO, arXiv 2402.14740) = mean baseline
    times n/(n-1)."""
    combine: Literal["sum", "per_reward"] = "sum"
    """sum: weighted sum of raw rewards, then one normalisation (Flow-GRPO). per_reward: each reward
    normalised by its own group first, then the weighted sum (GenRL `weight_advantages`,
    advantages.py:87)."""
    renormalise: bool = False
    """Whether `per_reward` normalises the sum over the whole batch again (GDPO, arXiv 2601.05242;
    Flow-Factory's default)."""
    unbiased: bool = False
    """n-1 instead of n (DanceGRPO, verl-omni); sqrt(G/(G-1)) larger: 2.1% at G=24, 15% at G=4."""
    eps: float = 1e-4
    """Added to the deviation (Flow-GRPO); 1e-8 (DanceGRPO) turns reward noise of near-constant groups into
    +-sqrt(G)."""  # noqa: E501
    clip: float | None = 5.0
    """Bound of |A|, before `best_and_worst` scales; null = none (Flow-DPPO)."""
    best_and_worst: int | None = None
    """Number k of the best and of the worst samples of a group, by advantage, that are trained.
    DanceGRPO's HunyuanVideo recipe trains 4 + 4 of 24. Their advantages are scaled by G/(2k), so
    that the group weighs as much as before: DanceGRPO divides by the kept samples
    (train_grpo_hunyuan.py:399-461). null = all."""

    def __post_init__(self) -> None:
        for key in ("std", "baseline", "combine"):
            one_of(f"advantage.{key}", getattr(self, key), get_type_hints(Advantage)[key])
        if self.eps < 0 or (self.clip is not None and self.clip <= 0):
            raise ValueError(
                f"advantage.eps must be >= 0 and clip positive or null, got eps={self.eps}, "
                f"clip={self.clip}"
            )
        if self.renormalise and self.combine != "per_reward":
            raise ValueError("advantage.renormalise=true needs advantage.combine=per_reward (GDPO)")
        if self.best_and_worst is not None and self.best_and_worst < 1:
            raise ValueError(
                f"advantage.best_and_worst must be >= 1 or null, got {self.best_and_worst}"
            )

    def teaching_groups(
        self, rewards: Mapping[str, Tensor], weights: Mapping[str, float]
    ) -> Tensor:
        """Return [P] bool: groups in which a normalised reward differs between samples, judged by
        each group's own rewards.

        Arguments are those of a call.
        """
        scored = [weights[name] * rewards[name].double() for name in sorted(weights)]
        parts = scored if self.combine == "per_reward" else [torch.stack(scored).sum(dim=0)]
        return ~torch.stack([_constant_groups(part) for part in parts]).all(dim=0)

    def __call__(self, rewards: Mapping[str, Tensor], weights: Mapping[str, float]) -> Advantages:
        """Return the advantages of a batch.

        `rewards` has name -> [P, G], in which NaN marks a missing reward. `weights` names the
        optimised rewards. Raises ValueError on a name in `weights` without rewards.

        Example:
            A missing reward counts nowhere, and a group that scores alike teaches nothing:

            >>> rewards = torch.tensor([[0.0, 2.0, torch.nan], [1.0, 1.0, 1.0]])  # [P, G]
            >>> Advantage(eps=1e-8)({"ocr": rewards}, {"ocr": 1.0}).values
            tensor([[-1.,  1.,  0.],
                    [ 0.,  0.,  0.]])
        """
        missing = sorted(set(weights) - set(rewards))
        if missing or not weights:
            raise ValueError(
                f"optimised rewards {sorted(weights)} must be non-empty and among the scored "
                f"{sorted(rewards)}; "
                f"missing: {missing}"
            )
        scored = {name: rewards[name].double() for name in sorted(weights)}  # [P, G] each
        # [P, G]. NaN + x = NaN: a sample that lacks one reward has no total.
        total = sum(
            (weights[name] * value for name, value in scored.items()),
            start=torch.zeros(()).double(),
        )
        absent = total.isnan()
        if self.combine == "sum":
            values = self._normalise_reward(total)
        else:
            # A sample that lacks one reward has no sum, so its other rewards say nothing about the
            # group either.
            # [P, G] each, NaN wherever `total` is.
            whole = {name: torch.where(absent, total, value) for name, value in scored.items()}
            values = torch.stack(
                [weights[name] * self._normalise_reward(value) for name, value in whole.items()]
            ).sum(dim=0)
            if self.renormalise:
                values, spread = _batch_centred(torch.where(absent, total, values), self.unbiased)
                values = _divide_spread(values, spread + self.eps)
        # [P, G]. Judged before `best_and_worst` scales: the clip bounds |A| itself.
        saturated = (
            torch.zeros_like(absent) if self.clip is None else (values.abs() > self.clip) & ~absent
        )
        # [P, G]: 0 for a sample that is not trained.
        weight = (
            (~absent).double()
            if self.best_and_worst is None
            else _select_extremes(values, total, self.best_and_worst)
        )
        # Replaced and not weighted away: 0 * NaN is NaN.
        values = torch.where(absent, torch.zeros_like(values), values)
        if self.clip is not None:
            values = values.clamp(-self.clip, self.clip)
        return Advantages((values * weight).float(), total, _constant_groups(total), saturated)

    def _normalise_reward(self, rewards: Tensor) -> Tensor:
        """Normalise one reward [P, G] by baseline and deviation; 0 where missing and in constant
        groups."""
        present = ~rewards.isnan()  # [P, G]
        count = present.sum(dim=1, keepdim=True)  # [P, 1]
        filled = torch.where(present, rewards, torch.zeros_like(rewards))
        # [P, 1]. 0 / 0 of a group without rewards is NaN, which reaches no present entry.
        mean = filled.sum(dim=1, keepdim=True) / count
        centred = torch.where(present, rewards - mean, torch.zeros_like(rewards))
        # Set to 0 exactly: the mean's rounding error over eps alone would look like an advantage.
        constant = _constant_groups(rewards)[:, None]
        centred = torch.where(constant, torch.zeros_like(centred), centred)
        group_std = (
            centred.square().sum(dim=1, keepdim=True) / _degrees_of_freedom(count, self.unbiased)
        ).sqrt()
        if self.baseline == "leave_one_out":
            # r - mean of the others = (r - mean) * n / (n - 1); a single sample keeps its 0.
            centred = centred * (count / (count - 1).clamp(min=1))
        if self.std == "none":
            return centred
        if self.std == "group":
            spread = group_std
        elif self.std == "max_group":
            spread = group_std.max()
        else:
            spread = _batch_centred(rewards, self.unbiased)[1]
        return _divide_spread(centred, spread + self.eps)


def reward_statistics(advantages: Advantages, rewards: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return statistics of a complete logical batch.

    They are means over its samples, the deviation of the optimised sum, number and share of groups
    without a gradient, and the share of advantages that were clipped. Groups that lack an optimised
    reward and missing scores are left out.
    """
    whole = torch.isfinite(advantages.total).all(dim=1)
    if not whole.any():
        return {}
    total = advantages.total[whole]  # [complete groups, G]
    present = {
        name: row[~row.isnan()]
        for name, table in rewards.items()
        for row in [table[whole].double()]
    }
    found = {f"reward/{name}": values.mean() for name, values in present.items() if len(values)}
    found |= {"reward": total.mean(), "reward_std": total.std(unbiased=False)}
    constant = advantages.zero_variance[whole]
    found |= {
        "zero_variance_groups": constant.sum(),
        "zero_variance_share": constant.double().mean(),
    }
    found["advantage_saturation"] = advantages.saturated[whole].double().mean()
    return {name: value.float() for name, value in found.items()}


def _divide_spread(centred: Tensor, spread: Tensor) -> Tensor:
    """Return centred / spread; 0 stays 0, even if the spread is 0 (equal rewards with eps=0)."""
    return torch.where(centred == 0, centred, centred / spread)


def _batch_centred(values: Tensor, unbiased: bool) -> tuple[Tensor, Tensor]:
    """Return (values [P, G] less the mean of all present ones, their deviation); 0 where
    missing."""
    present = ~values.isnan()
    count = present.sum()
    mean = torch.where(present, values, torch.zeros_like(values)).sum() / count  # []
    centred = torch.where(present, values - mean, torch.zeros_like(values))
    return centred, (centred.square().sum() / _degrees_of_freedom(count, unbiased)).sqrt()


def _select_extremes(values: Tensor, total: Tensor, k: int) -> Tensor:
    """Return [P, G] weights of `values`: n/(2k) for the k largest and k smallest present entries of
    each group, else 0.

    Example:
        >>> values = torch.tensor([[3.0, 0.0, 1.0, 5.0]])
        >>> _select_extremes(values, values, k=1).tolist()
        [[0.0, 2.0, 0.0, 2.0]]
    """
    present = ~total.isnan()
    count = present.sum(dim=1, keepdim=True)
    highest = values.masked_fill(~present, -torch.inf).argsort(dim=1, descending=True, stable=True)
    rank = highest.argsort(dim=1)  # the inverse permutation
    # [P, G]. A group of fewer than 2k present samples keeps all of them, each once.
    keep = present & ((rank < k) | (rank >= count - k))
    share = count / keep.sum(dim=1, keepdim=True)
    return torch.where(keep, share, torch.zeros_like(share)).double()


def _constant_groups(rewards: Tensor) -> Tensor:
    """Return [P] bool: every present reward of the group is the same number; False for groups
    without any."""
    present = ~rewards.isnan()
    low = torch.where(present, rewards, torch.full_like(rewards, torch.inf)).amin(dim=1)
    high = torch.where(present, rewards, torch.full_like(rewards, -torch.inf)).amax(dim=1)
    # The smallest equals the largest: exact, where a deviation near 0 would depend on rounding.
    return present.any(dim=1) & (low == high)


def _degrees_of_freedom(count: Tensor, unbiased: bool) -> Tensor:
    return (count - int(unbiased)).clamp(min=1)


def one_of(key: str, value: str, allowed: object) -> None:
    """Raise ValueError unless `value` is one of the values of the Literal `allowed`."""
    if value not in get_args(allowed):
        raise ValueError(f"{key} must be one of {', '.join(get_args(allowed))}, got {value!r}")
