"""Parts of a sample that rewards of their own move: `for: [video]` and `for: [audio]` of a reward.

From OmniNFT, arXiv 2605.12480: the advantage of a modality's tokens comes from the rewards of that
modality.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from digenrl.algorithms.advantages import Advantage
from digenrl.models.policy import Policy

Routes = Mapping[str, Sequence[str] | None]
"""Optimised reward -> modalities that it moves; None: all."""


@dataclass(frozen=True)
class Part:
    """Tokens of a sample that have one advantage."""

    start: int = 0
    stop: int | None = None
    """Along the first latent dimension; None: its end."""
    share: float = 1.0
    """Share of the sample's numbers, by which a mean over all of them weighs the part. 0: no reward
    moves it, and its part of the loss has no gradient."""
    rewards: frozenset[str] | None = None
    """Rewards that move it; None: all."""

    @property
    def tokens(self) -> slice:
        """Index of the part's tokens."""
        return slice(self.start, self.stop)

    def own_weights(self, weights: Mapping[str, float]) -> dict[str, float]:
        """Return those of the rewards' `weights` that move the part."""
        return {
            name: weight
            for name, weight in weights.items()
            if self.rewards is None or name in self.rewards
        }


WHOLE = (Part(),)
"""A sample as one part, which all rewards move."""


def parts_of(routes: Routes, policy: Policy) -> tuple[Part, ...]:
    """Return the parts of a sample, one for each modality; `WHOLE` if every reward moves all."""
    if all(asked is None or set(asked) == set(policy.modalities) for asked in routes.values()):
        return WHOLE
    total, parts = policy.latent_shape[0], []
    for modality in policy.modalities:
        own = frozenset(n for n, asked in routes.items() if asked is None or modality in asked)
        tokens = policy.codec.modality_tokens(modality)
        start, stop, _ = tokens.indices(total)
        parts.append(Part(start, stop, (stop - start) / total if own else 0.0, own))
    return tuple(parts)


def check_routes(routes: Routes, policy: type[Policy], algorithm: str, splits: bool) -> None:
    """Check that every reward may move what its `for` names.

    Args:
        algorithm: name of the algorithm, for messages.
        splits: whether its loss takes an advantage for each part.

    Raises:
        ValueError: the model does not train a modality that `for` names, or the algorithm has one
            advantage for a whole sample.
    """
    for name, asked in routes.items():
        if asked is None:
            continue
        key = f"reward.rewards.{name}.for = [{', '.join(asked)}]"
        if unknown := [each for each in asked if each not in policy.modalities]:
            trained = " and ".join(policy.modalities) or "one modality"
            raise ValueError(
                f"{key}: {policy.family} trains {trained}, and no {unknown[0]} of its own; leave "
                "`for` out, or take a model that trains both (docs/models_and_rewards.md)."
            )
        if not splits:
            raise ValueError(
                f"{key}: {algorithm} has one loss over video and sound together, which takes one "
                "advantage; use algorithm=nft or rvm, or leave `for` out."
            )


def by_part(parts: Sequence[Part], advantages: Tensor) -> Iterable[tuple[Part, Tensor]]:
    """Return each part with its advantages [b], of advantages [b] or [b, parts]."""
    return zip(parts, advantages.reshape(len(advantages), -1).unbind(1), strict=True)


def advantages_of_parts(
    parts: Sequence[Part],
    advantage: Advantage,
    rewards: Mapping[str, Tensor],
    weights: Mapping[str, float],
) -> Tensor:
    """Return [P, G, parts] fp32: 0 where no reward moves a part. Raises as `advantage` does.

    Args:
        rewards: name -> [P, G], as in `TrainBatch`; weights: name -> weight in the sum.
    """
    nothing = torch.zeros_like(next(iter(rewards.values())))
    found = [
        advantage(rewards, part.own_weights(weights)).values if part.share else nothing
        for part in parts
    ]
    return torch.stack(found, dim=-1)
