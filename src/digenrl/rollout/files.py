"""Samples that come from files instead of the model (`data.samples=files`): for supervised
fine-tuning and offline preferences.

A line of the prompt file names them: `media`, or `preferred` and `rejected`, each one path or
several. Where there are preferences, even samples of a group are preferred and odd ones rejected.
"""

from __future__ import annotations

from dataclasses import replace

from digenrl import keys
from digenrl.images import PREFERENCE, PromptImage
from digenrl.prompts import Prompt
from digenrl.rollout.engine import Generation, RolloutEngine


class FileEngine(RolloutEngine):
    """Rollout engine that reads the samples of a task in place of its denoising steps. Whatever
    comes after (decoding, scores, fragments, records) is as for generated samples."""

    def take_step(self, generation: Generation) -> Generation:
        """Encode the files of all rows. It takes the place of all denoising steps."""
        task, prompt, state = generation.task, generation.prompt, generation.state
        files = [file_of(prompt, number, self.seed, task.step) for number in state.key.samples]
        latents = self.policy.codec.encode_media(files).to(state.latents)  # [b, *L]
        done = replace(state, latents=latents, next_step=self.sampling.steps)
        return replace(generation, state=done)


def file_of(prompt: Prompt, number: int, seed: int, step: int) -> PromptImage:
    """Return the file that is sample `number` of a group in RL step `step`.

    The files of a role are shuffled anew in every RL step, and follow each other in a group.

    Example:
        >>> cat = Prompt("cat", images=tuple(PromptImage("media", name) for name in "abc"))
        >>> [file_of(cat, number, seed=0, step=0).digest for number in range(4)]
        ['a', 'c', 'b', 'a']
        >>> pair = Prompt("cat", images=tuple(PromptImage(role, role[:1]) for role in PREFERENCE))
        >>> [file_of(pair, number, seed=0, step=0).digest for number in range(4)]
        ['p', 'r', 'p', 'r']
    """
    labelled = any(image.role in PREFERENCE for image in prompt.images)
    role = PREFERENCE[number % 2] if labelled else "media"
    files = [image for image in prompt.images if image.role == role]
    order = keys.generator(seed, "files", step, prompt.uid, role).permutation(len(files))
    # Samples 2i (preferred) and 2i + 1 (rejected) are the i-th files of their roles.
    return files[order[(number // 2 if labelled else number) % len(files)]]
