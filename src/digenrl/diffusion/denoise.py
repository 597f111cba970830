"""Sampling and replay of trajectories through one transition kernel.

`SampleState` is everything that a trajectory is between two denoising steps. A trajectory can be
suspended after any step, sent to another rank and resumed there. The result is bit-equal on equal
kernels and batch geometry (I12), because noise comes from keys, not generators.

Legend of shapes: b samples of a task, T denoising steps, S trained steps, K steps of a cell block,
*L latent dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from digenrl import keys
from digenrl.diffusion.sde import Kernel, Transition, ode_step
from digenrl.diffusion.sigmas import step_sigmas
from digenrl.diffusion.steps import StepPlan
from digenrl.types import CellBlock

if TYPE_CHECKING:
    from digenrl.models.policy import Policy

Solver = Literal["euler", "dpm2"]


@dataclass(frozen=True)
class SampleKey:
    """Identity of the rows: everything on which their randomness depends."""

    seed: int
    step: int
    """RL step."""
    uid: int
    samples: tuple[int, ...]
    """Indices within the group, one per row."""


@dataclass(frozen=True)
class SampleState:
    """A trajectory between two denoising steps."""

    key: SampleKey
    latents: Tensor
    """[b, *L] storage dtype: next input of the network."""
    next_step: int = 0
    """Number of denoising steps done; T = finished."""
    kept_latents: tuple[Tensor, ...] = ()
    """[b, *L] at each trained step passed so far."""
    kept_next_latents: tuple[Tensor, ...] = ()
    kept_log_probs: tuple[Tensor, ...] = ()
    """[b] fp32 each."""
    kept_means: tuple[Tensor, ...] = ()
    """[b, *L] fp32 each; empty unless means are kept."""


@dataclass(frozen=True)
class FinishedSamples:
    """Finished trajectories of one task."""

    steps: Tensor
    """[S] int64 on CPU."""
    latents: Tensor
    """[b, S, *L] storage dtype; [b, S, 0] for forward-process methods, which noise `final`
    themselves."""
    next_latents: Tensor
    """Like `latents`."""
    log_probs: Tensor
    """[b, S] fp32; zeros for forward-process methods."""
    final: Tensor
    """[b, *L] storage dtype: the clean latent, to decode."""
    means: Tensor | None = None
    """[b, S, *L] fp32 if kept."""


@dataclass(frozen=True)
class ReplayedTransitions:
    """The transitions of a block's cells with the present weights, differentiable."""

    log_prob: Tensor
    """[b, K]."""
    mean: Tensor
    """[b, K, *L]."""
    std: Tensor
    """[b, K], without sqrt(h)."""
    sqrt_h: Tensor
    """[b, K]."""
    velocity: Tensor
    """[b, K, *L]."""

    @property
    def scale(self) -> Tensor:
        """[b, K] S = std*sqrt(h), the standard deviation of a step's noise."""
        return self.std * self.sqrt_h


def initial_state(
    key: SampleKey,
    shape: Sequence[int],
    storage_dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    same_noise: bool = False,
) -> SampleState:
    """Return the state before the first step: initial noise rounded to the storage dtype. `shape` =
    *L, one sample.

    same_noise: all samples of a group begin with the same noise (DanceGRPO `--use_same_noise`,
    MixGRPO).
    """
    # Every row then asks for the noise of sample 0, and gets the same.
    samples = [0] * len(key.samples) if same_noise else key.samples
    noise = keys.noise(key.seed, key.step, key.uid, samples, keys.INITIAL, shape)  # [b, *L] fp32
    return SampleState(key, noise.to(storage_dtype).to(device))


@torch.no_grad()
def advance_state(
    policy: Policy,
    condition: dict[str, Tensor],
    state: SampleState,
    sigmas: Tensor,
    kernel: Kernel,
    plan: StepPlan,
    keep_means: bool = False,
) -> SampleState:
    """Make one denoising step of all rows. condition: leading dimension 1 or b. sigmas [T+1].
    Raises when already finished."""
    k, latents = state.next_step, state.latents  # latents [b, *L]
    if k >= sigmas.numel() - 1:
        raise ValueError(
            f"the trajectory has finished its {sigmas.numel() - 1} denoising steps: call finish()"
        )
    rows = latents.shape[0]
    steps = torch.full((rows,), k, dtype=torch.int64, device=latents.device)  # [b]
    sigma, next_sigma, guard = step_sigmas(sigmas.to(latents.device), steps)  # each [b]
    rows_of, key = expand_condition(condition, rows), state.key
    velocity = policy.paced(policy.velocity(latents, sigma, rows_of), sigma, next_sigma)  # [b, *L]
    # A step without noise has no density, so nothing of it is kept for training.
    if k not in plan.sde:
        following = ode_step(latents, velocity, sigma, next_sigma, latents.dtype)
        return replace(state, latents=following, next_step=k + 1)
    # Drawn by the processor while the GPU still computes the velocity.
    noise = policy.to_device(
        keys.noise(key.seed, key.step, key.uid, key.samples, k, latents.shape[1:])
    )
    out = kernel.transition(
        latents,
        velocity,
        sigma,
        next_sigma,
        guard,
        noise=noise,
        storage_dtype=latents.dtype,
        drawn=policy.drawn,
    )
    # This step explores but is no cell: only its result goes on.
    if k not in plan.trained:
        return replace(state, latents=out.next_latents, next_step=k + 1)
    return replace(
        state,
        latents=out.next_latents,
        next_step=k + 1,
        # The tensors that the network saw and made, rounded: replay gets the same bits.
        kept_latents=(*state.kept_latents, latents),
        kept_next_latents=(*state.kept_next_latents, out.next_latents),
        kept_log_probs=(*state.kept_log_probs, _log_prob(out)),
        kept_means=(*state.kept_means, out.mean) if keep_means else (),
    )


def finished_samples(state: SampleState, plan: StepPlan) -> FinishedSamples:
    """Return the stored tensors of a trajectory that has made all its steps. Raises if trained
    steps are missing."""
    steps, final = torch.tensor(plan.trained, dtype=torch.int64), state.latents
    rows, count = final.shape[0], len(plan.trained)
    if plan.forward_process:
        # [b, S, 0]: cells are noise levels, so S counts, and no transition is stored.
        empty = final.new_empty(rows, count, 0)
        return FinishedSamples(
            steps, empty, empty, torch.zeros(rows, count, device=final.device), final
        )
    if len(state.kept_latents) != count:
        raise ValueError(
            f"the trajectory stopped after denoising step {state.next_step} with "
            f"{len(state.kept_latents)} of the "
            f"{count} trained steps {plan.trained}: call advance() until all steps are done"
        )
    return FinishedSamples(
        steps=steps,
        latents=torch.stack(state.kept_latents, dim=1),  # [b, S, *L]
        next_latents=torch.stack(state.kept_next_latents, dim=1),
        log_probs=torch.stack(state.kept_log_probs, dim=1),  # [b, S]
        final=final,
        means=torch.stack(state.kept_means, dim=1) if state.kept_means else None,
    )


@torch.no_grad()
def ode_sample(
    policy: Policy,
    condition: dict[str, Tensor],
    noise: Tensor,
    sigmas: Tensor,
    before_step: Callable[[], None] = lambda: None,
    solver: Solver = "euler",
) -> Tensor:
    """Sample for evaluation, always without SDE noise (flow_grpo train_sd3.py:258): noise [b, *L]
    -> final [b, *L].

    dpm2: DPM-Solver++ 2M (Lu et al. 2022, arXiv 2211.01095, algorithm 2), first order at the first
    and the last step, where log-SNR is infinite.
    """
    latents, rows = noise, noise.shape[0]  # latents [b, *L]
    grid, before = sigmas.to(noise.device), None
    for k in range(grid.numel() - 1):
        before_step()
        sigma, next_sigma = grid[k].expand(rows), grid[k + 1].expand(rows)
        velocity = policy.velocity(latents, sigma, expand_condition(condition, rows))
        clean = latents - grid[k] * velocity  # x0_hat [b, *L]
        if solver == "dpm2" and before is not None and next_sigma[0] > 0:
            # Its step is Euler's along the velocity that leads to x0 extrapolated over log-SNR.
            snr = torch.log(1 / grid[k - 1 : k + 2].double() - 1)  # [3] log((1 - s) / s)
            # On a grid from 1, snr[0] is -inf at k = 1, and `ahead` is 0.
            ahead = 0.5 * float((snr[2] - snr[1]) / (snr[1] - snr[0]))
            velocity = velocity - ahead * (clean - before) / grid[k]
        velocity = policy.paced(velocity, sigma, next_sigma)
        latents, before = ode_step(latents, velocity, sigma, next_sigma, noise.dtype), clean
    return latents


def replay(policy: Policy, block: CellBlock, kernel: Kernel) -> ReplayedTransitions:
    """Replay a block's stored transitions with the present weights: one forward over (sample x
    step) rows, sample-major.

    At K = 1 the rows are those of the rollout, so that log-probs are bit-equal on equal weights and
    kernels. For the base model's transitions call this under `torch.no_grad()` inside
    `policy.adapter.reference()`.
    """
    rows, count = block.latents.shape[:2]  # b, K
    # [b*K, *L], sample-major: row i is sample i // K at the block's step i % K.
    latents, following = block.latents.flatten(0, 1), block.next_latents.flatten(0, 1)
    sigma, next_sigma, guard = step_sigmas(block.sigmas, block.steps.repeat(rows))  # each [b*K]
    # Not paced as in the rollout: pacing changes only tokens that are not drawn, and these have no
    # log-prob.
    velocity = policy.velocity(latents, sigma, expand_condition(block.condition, rows * count))
    out = kernel.transition(
        latents, velocity, sigma, next_sigma, guard, next_latents=following, drawn=policy.drawn
    )
    return ReplayedTransitions(
        log_prob=_log_prob(out).unflatten(0, (rows, count)),
        mean=out.mean.unflatten(0, (rows, count)),
        std=out.std.unflatten(0, (rows, count)),
        sqrt_h=out.sqrt_h.unflatten(0, (rows, count)),
        velocity=velocity.unflatten(0, (rows, count)),
    )


def expand_condition(condition: dict[str, Tensor], rows: int) -> dict[str, Tensor]:
    """Return one prompt's conditioning (leading dimension 1) as views with leading dimension
    `rows`.

    Conditioning that has one row per sample is returned unchanged.

    Example:
        >>> condition = {"text": torch.zeros(1, 7), "image": torch.zeros(3, 2)}
        >>> {name: tuple(value.shape) for name, value in expand_condition(condition, 3).items()}
        {'text': (3, 7), 'image': (3, 2)}
    """
    return {
        name: value.expand(rows, *value.shape[1:]) if value.shape[0] == 1 else value
        for name, value in condition.items()
    }


def _log_prob(out: Transition) -> Tensor:
    if out.log_prob is None:
        raise ValueError(
            "the kernel's noise level is 0, so its steps have no log-prob to train: raise "
            "algorithm.sde's level"
        )
    return out.log_prob
