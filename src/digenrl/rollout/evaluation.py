"""What an evaluation draws: the same prompts with the same noise every time, in pieces that any
rank makes alike.

A piece is one prompt with all its samples. A rank draws, decodes and scores a piece as one batch.
The numbers of an evaluation therefore do not depend on which rank made which piece.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from digenrl.extension import installed
from digenrl.rollout.engine import Pictures as Pictures
from digenrl.rollout.engine import RolloutEngine
from digenrl.types import Prompt


def joined(parts: Sequence[Pictures]) -> Pictures:
    """Concatenate `parts` in their order."""
    return Pictures(
        media=torch.cat([part.media for part in parts]),
        prompts=tuple(prompt for part in parts for prompt in part.prompts),
        rewards={
            name: torch.cat([part.rewards[name] for part in parts]) for name in parts[0].rewards
        },
        kl=torch.cat([part.kl for part in parts]),
    )


@dataclass(frozen=True)
class FixedSamples:
    """The samples of every evaluation of a run."""

    prompts: tuple[Prompt, ...]
    per_prompt: int
    seed: int
    """Seed of the noise."""
    steps: int | None
    """Steps of the ODE. None: `sampling.eval.steps`."""
    kl_samples: int
    """Samples of each prompt whose divergence from the base model is measured, if there is a base
    model."""

    def draw(
        self,
        engine: RolloutEngine,
        numbers: Sequence[int],
        before_step: Callable[[], None] = lambda: None,
    ) -> Pictures:
        """The pieces `numbers`, by the weights that `engine` has. `before_step`: as in
        `RolloutEngine.evaluate`."""
        parts, compared = (
            [],
            self.kl_samples if engine.policy.has_reference and installed("divergence") else 0,
        )
        for number in numbers:
            asked = [self.prompts[number]]
            made = engine.evaluate(
                asked, self.per_prompt, self.seed, self.steps, before_step, compared
            )
            media = made.media.mul(255.0).round().to(torch.uint8).cpu()
            scores = {name: values.float().cpu() for name, values in made.rewards.items()}
            parts.append(replace(made, media=media, rewards=scores))
        return joined(parts)


def tensors_of(piece: Pictures) -> dict[str, Tensor]:
    """Return a piece as it is sent, without its prompt."""
    rewards = {f"rewards/{name}": scores for name, scores in piece.rewards.items()}
    return {"media": piece.media, "kl": piece.kl, **rewards}


def pictures_of(tensors: Mapping[str, Tensor], prompt: Prompt) -> Pictures:
    """Invert `tensors_of`."""
    rewards = {
        key.removeprefix("rewards/"): scores
        for key, scores in tensors.items()
        if key.startswith("rewards/")
    }
    media = tensors["media"]
    return Pictures(media, (prompt,) * len(media), rewards, tensors["kl"])
