"""Rollout engine that forecasts every second velocity of the ODE (`sampling.lossy=taylorseer`).

TaylorSeer (arXiv:2503.06923) forecasts a network's features along their Taylor series. This engine
forecasts the network's output to first order, as diffusers does in `use_lite_mode`. With v_a and
v_b the last computed velocities, at the noise levels a > b:

    v(s) = v_b + (s - b) / (b - a) * (v_b - v_a)

No module is hooked, so the engine serves every family, compiled or quantized. Steps are chosen by
their number alone: a sample does not depend on the others of its batch. A task that another rank
goes on with is computed there until two velocities are known.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from digenrl.diffusion.denoise import SampleKey, expand_condition
from digenrl.diffusion.sde import ode_step
from digenrl.rollout.engine import Generation, RolloutEngine

FIRST = 3
"""Number of first steps that are all computed, as diffusers' TaylorSeer does."""


class ForecastingEngine(RolloutEngine):
    """Rollout engine of methods without SDE steps. Evaluations compute every velocity."""

    def __init__(self, *engine: Any, **named: Any) -> None:
        super().__init__(*engine, **named)
        self._key: SampleKey | None = None
        self._found: tuple[tuple[Tensor, Tensor], ...] = ()
        """The last two computed velocities of the rows `_key`, each after its noise level."""

    @torch.no_grad()
    def advance(self, generation: Generation) -> Generation:
        """Take one step of the ODE for all rows."""
        state, (condition, grid) = generation.state, self._inputs(generation.prompt)
        k, latents, rows = state.next_step, state.latents, len(state.latents)
        if k == 0 or state.key != self._key:
            self._key, self._found = state.key, ()
        sigma, following = grid[k].expand(rows), grid[k + 1].expand(rows)
        if k >= FIRST and k % 2 and len(self._found) == 2:
            (a, before), (b, last) = self._found
            velocity = last + (grid[k] - b) / (b - a) * (last - before)
        else:
            velocity = self.policy.velocity(latents, sigma, expand_condition(condition, rows))
            self._found = (*self._found[-1:], (grid[k], velocity))
        velocity = self.policy.paced(velocity, sigma, following)
        latents = ode_step(latents, velocity, sigma, following, latents.dtype)
        return replace(generation, state=replace(state, latents=latents, next_step=k + 1))
