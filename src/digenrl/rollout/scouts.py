"""Rollout engine that tries several initial noises per sample before it generates (Sol-RL,
arXiv:2604.06916)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from digenrl.diffusion import denoise
from digenrl.rewards.suite import combine_scores
from digenrl.rollout.engine import Generation, RolloutEngine
from digenrl.schedule import Task
from digenrl.types import Prompt


class ScoutingEngine(RolloutEngine):
    """Rollout engine that generates each task from the initial noises whose cheap samples score
    best and worst.

    Args:
        candidates: initial noises tried for each sample of a task.
        scout_steps: ODE steps of a try.
        engine: arguments of `RolloutEngine`.
    """

    def __init__(self, *engine: Any, candidates: int, scout_steps: int, **named: Any) -> None:
        super().__init__(*engine, **named)
        self._candidates, self._scout_steps = candidates, scout_steps

    def take_step(self, generation: Generation) -> Generation:
        """Take one denoising step of all rows. The first step starts from the chosen noises."""
        if generation.state.next_step == 0:
            rows = self._choose_noises(generation.task, generation.prompt)
            generation = replace(
                generation, state=self._initial_state(replace(generation.state.key, samples=rows))
            )
        return super().take_step(generation)

    @torch.no_grad()
    def _choose_noises(self, task: Task, prompt: Prompt) -> tuple[int, ...]:
        """Return the numbers of the noises that the task keeps, ascending: the best half and the
        worst half.

        A noise's score is the reward of its ODE sample with few steps. A missing score counts as
        the median. Sol-RL makes its trial samples in FP4. Both work because the initial noise
        largely decides what an ODE draws.
        """
        condition, grid = (
            self.policy.codec.encode([prompt]),
            self.policy.sigma_grid(self._scout_steps),
        )
        # A task of b samples has candidates * b noise numbers of its own, from `first` on.
        first, tried = task.first_sample * self._candidates, []
        for turn in range(self._candidates):
            numbers = range(first + turn * task.samples, first + (turn + 1) * task.samples)
            # b noises at a time: a try needs no more memory than the task itself.
            start = self._initial_state(
                denoise.SampleKey(self.seed, task.step, prompt.uid, tuple(numbers))
            )
            with self.policy.adapter.sampling():
                clean = denoise.ode_sample(self.policy, condition, start.latents, grid)
            media = self.policy.codec.decode(clean)
            prompts = [prompt] * task.samples
            found = self._scorer.submit(media, prompts, sound=self.hear(clean))
            tried.append(combine_scores(found.result(), self._rewards.weights))
        scores = torch.cat(tried)  # [candidates * b]
        order = (
            scores.nan_to_num(float(scores.nanmedian().nan_to_num())).argsort(stable=True).tolist()
        )
        best = (task.samples + 1) // 2
        # `order` ascends: its head are the worst noises, its tail the best. If b is odd, one more
        # of the best is kept.
        kept = order[: task.samples - best] + order[len(order) - best :]
        return tuple(sorted(first + number for number in kept))

    def _initial_state(self, key: denoise.SampleKey) -> denoise.SampleState:
        return denoise.initial_state(
            key, self.policy.latent_shape, self.sampling.storage_dtype, self.policy.device
        )
