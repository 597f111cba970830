"""What travels between the rooms of digenrl: frozen dataclasses, a shape per field.

Legend of shapes: P prompts of a logical batch, G samples of a group, b samples of a task, T
denoising steps, S trained steps, K steps of one cell block, *L latent dimensions of one sample
(family-specific), R rewards.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from digenrl.prompts import Prompt as Prompt

_T = TypeVar("_T")


class StepGivenUp(RuntimeError):
    """A stop that cannot wait for the RL step in progress: all trainers drop it, and save the
    version before it."""


def out_of_memory(rank: int, doing: str, error: BaseException) -> str:
    """Return the message of a rank whose device has too little memory for what it is `doing`."""
    training = "schedule.tsp.batch=1, model.gradient_checkpointing=true"
    remedy = training if doing.startswith("train") else "a smaller sampling.task_size"
    cause = str(error).strip().partition("\n")[0]
    return f"rank {rank}, {doing or 'startup'}: use {remedy}, or smaller samples. {cause}"


@dataclass(frozen=True, kw_only=True)
class Transitions:
    """K denoising steps of b samples that share a prompt: of a trajectory all S trained ones, of a
    block some."""

    step: int
    """RL step (logical batch)."""
    group: int
    """Position of the group in the logical batch, 0..P-1; also the row of `TrainBatch.rewards`'
    group axis."""
    uid: int
    first_sample: int
    """The rows are samples first_sample .. first_sample+b-1 of the group."""
    version: int
    """Weight version that generated the rows."""
    steps: Tensor
    """[K] int64: denoising-step indices."""
    sigmas: Tensor
    """[T+1] fp32: the whole grid of the trajectory. Sigmas travel; nobody recomputes them."""
    latents: Tensor
    """[b, K, *L] storage dtype: x at each step, the tensor that the network saw."""
    next_latents: Tensor
    """[b, K, *L] storage dtype: x after each step, rounded before its log-prob was taken."""
    log_probs: Tensor
    """[b, K] fp32: mean-per-dimension log-prob that the *rollout rank* stored."""
    condition: dict[str, Tensor]
    """Conditioning of the one prompt, leading dimension 1; expanded to rows by view."""
    final: Tensor | None = None
    """[b, *L]: the samples' clean latents (forward-process methods: NFT, DPO); None when nobody
    uses them."""
    means: Tensor | None = None
    """[b, K, *L] fp32: rollout means (GRPO-Guard, Flow-DPPO); None when unused."""

    @property
    def samples(self) -> int:
        """b, the number of rows."""
        return self.log_probs.shape[0]


@dataclass(frozen=True, kw_only=True)
class CellBlock(Transitions):
    """The (sample x step) cells of one task at K of its trained steps: the unit that training
    places on a rank.

    Its rows keep the rollout batch's order, so that at K=1 replay has exactly the geometry of the
    rollout.
    """

    rows: tuple[int, ...] | None = None
    """Samples of the group that the rows hold, if samples without a gradient were left out; None:
    all samples."""
    weight: float = 1.0
    """0.0 marks a block that only takes part in collectives (a sharded rank without cells)."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """The sample of the group that each row is."""
        return self.rows or tuple(range(self.first_sample, self.first_sample + self.samples))

    def select_rows(self, keep: Tensor) -> CellBlock:
        """Return the rows at `keep` ([b] bool); all of them without a copy."""
        if bool(keep.all()):
            return self
        batched = ("latents", "next_latents", "log_probs", "final", "means")
        kept = {name: value[keep] for name in batched if (value := getattr(self, name)) is not None}
        return replace(
            self,
            rows=tuple(n for n, here in zip(self.numbers, keep.tolist(), strict=True) if here),
            **kept,
        )


@dataclass(frozen=True)
class TrainBatch:
    """One micro-batch of one trainer rank: blocks to train now, and the rewards needed to weigh
    them."""

    blocks: tuple[CellBlock, ...]
    """Usually one; more on a rank with a larger share, none on a replica that has nothing to
    train."""
    rewards: dict[str, Tensor]
    """name -> [P, G] fp32 of the logical batch. NaN marks a missing reward, and a group that is
    surplus or not complete yet (never a group in `blocks`). Evaluation-only rewards are present
    too."""
    reward_weights: dict[str, float]
    """name -> weight in the optimised sum; a reward absent here is only logged."""
    denominator: float
    """Cells of the whole optimizer update over all ranks; the loss is a *sum* over the
    micro-batch's cells / this."""
    update: int
    """Index of the optimizer update within the logical batch, 0..updates_per_batch-1."""
    version: int
    """Trainer's published version (= RL step in progress); staleness of a block = version -
    block.version."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TrainBatch:
        """Return the batch with every tensor on `device` (Lightning's batch transfer calls
        this)."""
        return move_tensors(self, device, non_blocking)


@dataclass(frozen=True, kw_only=True)
class Trajectory(Transitions):
    """Everything that one finished rollout task produced."""

    index: int
    """Number of the task within its step, group-first."""
    rewards: dict[str, Tensor]
    """name -> [b] fp32; NaN = missing (never 0 for a failed score)."""


@dataclass(frozen=True)
class Sound:
    """Sound of B samples."""

    waveform: Tensor
    """[B, channels, samples] fp32 in [-1, 1]."""
    rate: int
    """Samples per second (Hz)."""

    def rows(self, index: slice | Tensor) -> Sound:
        """Return the sound of the samples at `index` (a slice, numbers, or [B] bool)."""
        return replace(self, waveform=self.waveform[index])


def move_tensors(value: _T, device: torch.device | str, non_blocking: bool = False) -> _T:
    """Return `value` with every tensor inside dataclasses, dicts and tuples on `device`."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=non_blocking)  # type: ignore[return-value]
    if isinstance(value, dict):
        return {key: move_tensors(item, device, non_blocking) for key, item in value.items()}  # type: ignore[return-value]
    if isinstance(value, tuple):
        return tuple(move_tensors(item, device, non_blocking) for item in value)  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value,
            **{
                f.name: move_tensors(getattr(value, f.name), device, non_blocking)
                for f in fields(value)
            },
        )
    return value
