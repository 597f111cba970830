"""What an evaluation draws: the same prompts with the same noise every time, in pieces that any
rank makes alike.

A piece is one prompt with all its samples. A rank draws, decodes and scores a piece as one batch.
The numbers of an evaluation therefore do not depend on which rank made which piece.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from digenrl.rollout.engine import Pictures as Pictures
from digenrl.rollout.engine import RolloutEngine
from digenrl.types import Prompt

REFERENCE_SAMPLES = 4
"""Pictures of the first evaluation that every later one scores again, to notice a reward model that
changed."""


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


class ReferenceSamples:
    """The first few pictures of the first evaluation, which every later evaluation scores again."""

    def __init__(self) -> None:
        self._first: tuple[Tensor, tuple[Prompt, ...], Mapping[str, Tensor]] | None = None

    def look(self, pictures: Pictures, engine: RolloutEngine) -> dict[str, Tensor]:
        """Score the reference pictures again. The first call keeps the first `pictures`, as stored
        with 8 bits.

        Returns:
            name -> [2, REFERENCE_SAMPLES at most]: scores of the first call, and of this one. Empty
            at the first call.
        """
        if self._first is None:
            media = pictures.media[:REFERENCE_SAMPLES].clone()
            prompts = pictures.prompts[:REFERENCE_SAMPLES]
            self._first = media, prompts, engine.rescore(media.float() / 255.0, prompts)
            return {}
        media, prompts, once = self._first
        today = engine.rescore(media.float() / 255.0, prompts)
        return {name: torch.stack([scores, today[name]]) for name, scores in once.items()}


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
        parts, compared = [], self.kl_samples if engine.policy.has_reference else 0
        for number in numbers:
            asked = [self.prompts[number]]
            made = engine.evaluate(
                asked, self.per_prompt, self.seed, self.steps, before_step, compared
            )
            media = made.media.mul(255.0).round().to(torch.uint8).cpu()
            scores = {name: values.float().cpu() for name, values in made.rewards.items()}
            parts.append(replace(made, media=media, rewards=scores))
        return joined(parts)


@dataclass(frozen=True)
class Piece:
    """A piece that another rank has made."""

    pictures: Pictures
    reference_scores: Mapping[str, Tensor] = field(default_factory=dict)
    """What `ReferenceSamples.look` returned on the rank that made the piece. Empty if that rank
    looked just before."""

    def tensors(self) -> dict[str, Tensor]:
        """The piece without its prompt."""
        return {
            "media": self.pictures.media,
            "kl": self.pictures.kl,
            **{f"rewards/{name}": scores for name, scores in self.pictures.rewards.items()},
            **{
                f"reference_scores/{name}": scores for name, scores in self.reference_scores.items()
            },
        }

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], prompt: Prompt) -> Piece:
        """Inverse of `tensors`."""

        def named(kind: str) -> dict[str, Tensor]:
            return {
                key.removeprefix(kind): value
                for key, value in tensors.items()
                if key.startswith(kind)
            }

        media = tensors["media"]
        return cls(
            Pictures(media, (prompt,) * len(media), named("rewards/"), tensors["kl"]),
            named("reference_scores/"),
        )
