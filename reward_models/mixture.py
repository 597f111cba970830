"""The rewards of the tilted mixture (`extensions.tasks.mixture`): a coordinate, and the likelihood
under the base."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from digenrl.types import Prompt


def points(media: Tensor, span: float) -> Tensor:
    """Return [B, D] of grey pictures [B, 1, H, W], in which -span is black and span white."""
    return (media.flatten(1) - 0.5) * 2 * span


class Coordinate:
    """The coordinate along the signed axis that a prompt's target names, such as -3.

    Args:
        span: of the pictures.
    """

    model_id, weights_digest = "mixture coordinate", "none"

    def __init__(self, span: float) -> None:
        self.span = span

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Return scores [B]."""
        targets = [prompt.target or "" for prompt in prompts]
        signs = torch.tensor(
            [-1.0 if target.startswith("-") else 1.0 for target in targets], device=media.device
        )
        axes = torch.tensor([int(target[1:]) for target in targets], device=media.device)
        return signs * points(media, self.span).gather(1, axes[:, None])[:, 0]

    @staticmethod
    def check_prompts(prompts: Sequence[Prompt]) -> None:
        """Raise ValueError for a prompt whose target names no signed axis."""
        for prompt in prompts:
            if not (prompt.target or "")[1:].isdecimal():
                raise ValueError(
                    f"prompt {prompt.text!r}: its target is {prompt.target!r}, and must be such as "
                    "+0 or -3."
                )


class LogLikelihood:
    """log p(x) under the base mixture: what a tilt costs.

    Args:
        means, weights, deviation: of the mixture.
        span: of the pictures.

    Raises:
        ValueError: the model is no mixture.
    """

    model_id, weights_digest = "mixture log-likelihood", "none"

    def __init__(
        self,
        means: Sequence[Sequence[float]] | None,
        weights: Sequence[float] | None,
        deviation: float | None,
        span: float,
    ) -> None:
        if means is None or weights is None or deviation is None:
            raise ValueError(
                "reward=mixture scores the points of model=mixture, and the model is another: "
                "choose that."
            )
        self.means = torch.tensor([list(mean) for mean in means])
        self.log_weights, self.deviation, self.span = (
            torch.tensor(list(weights)).log(),
            deviation,
            span,
        )

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Return scores [B]."""
        x = points(media, self.span).cpu()
        square = (x[:, None] - self.means).square().sum(-1) / self.deviation**2
        constant = x.shape[1] * (math.log(self.deviation) + 0.5 * math.log(2 * math.pi))
        return torch.logsumexp(self.log_weights - square / 2, dim=1) - constant
