"""What an evaluation draws: the same prompts with the same noise every time, in pieces that any
rank makes alike.

A piece is one prompt with all its samples, or several prompts if `sampling.eval.batch` has room for
theirs. A rank draws and scores a piece as one batch. The numbers of an evaluation therefore do not
depend on which rank made which piece.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from digenrl.rollout.engine import Pictures as Pictures
from digenrl.rollout.engine import RolloutEngine, join_sounds
from digenrl.types import Prompt, Sound

NOISY_PIECES = 6
"""Number of pieces whose first prompt is also drawn with the run's own noise, if `noise` is set."""


def join_pictures(parts: Sequence[Pictures]) -> Pictures:
    """Concatenate `parts` in their order."""
    return Pictures(
        media=torch.cat([part.media for part in parts]),
        prompts=tuple(prompt for part in parts for prompt in part.prompts),
        rewards={
            name: torch.cat([part.rewards[name] for part in parts]) for name in parts[0].rewards
        },
        kl=torch.cat([part.kl for part in parts]),
        noisy=torch.cat([part.noisy for part in parts]),
        sound=join_sounds([part.sound for part in parts if part.sound is not None]),
    )


@dataclass(frozen=True)
class FixedSamples:
    """What every evaluation of a run draws: prompts, samples of each, noise seed and steps."""

    prompts: tuple[Prompt, ...]
    per_prompt: int
    seed: int
    """Seed of the noise."""
    steps: int | None
    """Steps of the ODE. None: `sampling.eval.steps`."""
    kl_samples: int
    """Samples of each prompt whose divergence from the base model is measured, if there is a base
    model."""
    batch: int | None = None
    """`sampling.eval.batch`."""

    @property
    def pieces(self) -> tuple[tuple[Prompt, ...], ...]:
        """The prompts of each piece. All pieces have equally many, because sharded weights need the
        same forwards everywhere.

        Example:
            >>> prompts = tuple(map(Prompt, "abcdef"))
            >>> [len(FixedSamples(prompts, 2, 0, None, 0, batch).pieces) for batch in (None, 4, 10)]
            [6, 3, 2]
        """
        total, most = len(self.prompts), max(1, (self.batch or 1) // self.per_prompt)
        # The largest divisor of the number of prompts for which the batch has room.
        size = max(n for n in range(1, most + 1) if total % n == 0)
        return tuple(self.prompts[first : first + size] for first in range(0, total, size))

    def draw_pieces(
        self,
        engine: RolloutEngine,
        numbers: Sequence[int],
        before_step: Callable[[], None] = lambda: None,
        noise: bool = False,
        before_piece: Callable[[int], None] = lambda number: None,
    ) -> Pictures:
        """Return the pieces `numbers`, by the weights that `engine` has.

        Args:
            before_step: as in `RolloutEngine.evaluate_prompts`.
            before_piece: called with the number of each piece before it is drawn.
            noise: also draw a sample with the noise of rollouts for the first prompt of each of the
                first `NOISY_PIECES` entries of `numbers`. Every rank does so, because sharded
                weights need equal forwards. `Pictures.noisy` keeps only those of pieces
                0 .. NOISY_PIECES - 1, so that no number depends on which rank draws a piece.
        """
        parts, kl_samples = [], self.kl_samples if engine.policy.adapter.has_reference else 0
        for place, number in enumerate(numbers):
            before_piece(number)
            asked = self.pieces[number], self.per_prompt, self.seed, self.steps
            made = engine.evaluate_prompts(
                *asked, before_step, kl_samples, noise and place < NOISY_PIECES
            )
            # Drawn only for equal forwards on all ranks; see `noise`.
            if number >= NOISY_PIECES:
                made = replace(made, noisy=torch.full_like(made.noisy, torch.nan))
            # [n, C, H, W] or [n, F, C, H, W]. Rounded here, so that files and statistics see the
            # same values.
            media = made.media.mul(255.0).round().to(torch.uint8).cpu()
            scores = {name: values.float().cpu() for name, values in made.rewards.items()}
            parts.append(replace(made, media=media, rewards=scores))
        return join_pictures(parts)


def tensors_of(piece: Pictures) -> dict[str, Tensor]:
    """Return a piece as it is sent, without its prompts."""
    rewards = {f"rewards/{name}": scores for name, scores in piece.rewards.items()}
    sound = {}
    if piece.sound is not None:
        rate = torch.tensor([piece.sound.rate])
        sound = {"sound": piece.sound.waveform, "sound_rate": rate}
    return {"media": piece.media, "kl": piece.kl, "noisy": piece.noisy, **sound, **rewards}


def pictures_of(tensors: Mapping[str, Tensor], prompts: Sequence[Prompt]) -> Pictures:
    """Invert `tensors_of`. `prompts` are the piece's distinct prompts, in order."""
    rewards = {
        key.removeprefix("rewards/"): scores
        for key, scores in tensors.items()
        if key.startswith("rewards/")
    }
    media = tensors["media"]
    rows = tuple(prompt for prompt in prompts for _ in range(len(media) // len(prompts)))
    sound = None
    if "sound" in tensors:
        sound = Sound(tensors["sound"], int(tensors["sound_rate"]))
    return Pictures(media, rows, rewards, tensors["kl"], tensors["noisy"], sound)
