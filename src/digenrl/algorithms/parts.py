"""Parts of a sample that rewards of their own move: `for: [video]` and `for: [audio]` of a reward.

From OmniNFT, arXiv 2605.12480: the advantage of a modality's tokens comes from the rewards of that
modality.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    """Share of the sample's numbers, as a mean over all of them weighs the part; 0 where no reward
    moves it, so that its part of the loss has no gradient."""
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
        tokens = policy.modality_tokens(modality)
        start, stop, _ = tokens.indices(total)
        parts.append(Part(start, stop, (stop - start) / total if own else 0.0, own))
    return tuple(parts)
