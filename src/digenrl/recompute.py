"""What the blocks of a network keep for the backward pass: activation checkpointing, graded.

    all         everything that autograd asks for; nothing is computed twice
    products    the outputs of attention and of the large linear layers; the cheap work between them is repeated
    attention   the outputs of attention and of linear layers with several inputs per output (the second of a
                feed-forward), which cost the most FLOPs per byte; the other linear layers are
                repeated too
    inputs      the block's input alone; the whole block is repeated
    offload     everything, in pinned memory of the host: nothing is computed twice, but all of it is copied twice,
                beside the other blocks' work

Gradients are the same bits in every case. Values of `model.gradient_checkpointing`:

    false, true                      all, inputs
    products, attention, offload     every block does so
    a number                         share of the blocks that keep their inputs alone; the others keep all
    {products: 0.3, inputs: 0.2}     shares of the blocks, of products|attention|inputs|offload
    auto                             the least repetition that fits into the memory of each rank's GPU

auto asks `extensions/planner/memory.py` and never off-loads. For a tiny build it repeats nothing if
memory is ample. A run's config.yaml has what was chosen.

Pure: standard library only. Chen et al. 2016 (arXiv:1604.06174); selective: Korthikanti et al. 2022
(arXiv:2205.05198).
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

ALL, PRODUCTS, ATTENTION, INPUTS, OFFLOAD = "all", "products", "attention", "inputs", "offload"
MODES = (ALL, PRODUCTS, ATTENTION, INPUTS)
"""Modes among which `auto` chooses, from the most memory to the least."""
CHANGES = (PRODUCTS, ATTENTION, INPUTS, OFFLOAD)
"""What blocks may do instead of keeping all."""
AUTO = "auto"


@dataclass(frozen=True)
class Recompute:
    """Shares of the blocks by what they keep. The other blocks keep all."""

    products: float = 0.0
    attention: float = 0.0
    inputs: float = 0.0
    offload: float = 0.0

    def __post_init__(self) -> None:
        shares = tuple(getattr(self, mode) for mode in CHANGES)
        if min(shares) < 0.0 or sum(shares) > 1.0 + 1e-9:
            raise ValueError(
                f"model.gradient_checkpointing = {self.config}: shares of the blocks must be 0 .. "
                "1, their sum too"
            )

    @cached_property
    def shares(self) -> dict[str, float]:
        """Mode -> share of the blocks; they sum to 1."""
        changes = {mode: getattr(self, mode) for mode in CHANGES}
        return {ALL: max(0.0, 1.0 - sum(changes.values()))} | changes

    @property
    def config(self) -> bool | str | dict[str, float]:
        """The shortest value of `model.gradient_checkpointing` that means the same."""
        some = {m: s for m in CHANGES if (s := getattr(self, m)) > 0.0}
        if not some:
            return False
        if list(some.values()) == [1.0]:
            (mode,) = some
            return True if mode == INPUTS else mode
        return some

    def modes_of(self, blocks: int) -> tuple[str, ...]:
        """Return what each of `blocks` keeps. Every mode is spread evenly over the depth."""
        credit = dict.fromkeys(self.shares, 0.0)
        chosen = []
        for _ in range(blocks):
            for mode, share in self.shares.items():
                credit[mode] += share
            best = max(credit, key=lambda mode: credit[mode])
            credit[best] -= 1.0
            chosen.append(best)
        return tuple(chosen)


def parse_recompute(value: object) -> Recompute:
    """Return what a value of `model.gradient_checkpointing` means. An auto that nobody has resolved
    means inputs.

    Raises:
        ValueError: the value is not allowed; the message lists those that are.
    """
    if isinstance(value, Recompute):
        return value
    if value is None or isinstance(value, bool):
        return Recompute(inputs=float(bool(value)))
    if value == AUTO:
        return Recompute(inputs=1.0)
    if isinstance(value, str) and value in (ALL, *CHANGES):
        return Recompute(**{value: 1.0}) if value != ALL else Recompute()
    if isinstance(value, (int, float)):
        return Recompute(inputs=float(value))
    if isinstance(value, Mapping) and set(value) <= set(CHANGES):
        return Recompute(**{str(mode): float(share) for mode, share in value.items()})
    raise ValueError(
        f"model.gradient_checkpointing = {value}: use true, false, auto, {', '.join(CHANGES)}, a "
        f"share of the blocks 0 .. 1, or a mapping of {', '.join(CHANGES)} to shares"
    )
