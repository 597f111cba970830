"""Activation checkpointing of diffusers' transformers, block by block (see `digenrl.recompute` for
the grades)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from digenrl.models.offload import Offload
from digenrl.recompute import ALL, ATTENTION, INPUTS, OFFLOAD, Recompute

if TYPE_CHECKING:
    from diffusers import ModelMixin

_PRODUCTS: Mapping[object, int] = {
    torch.ops.aten.mm.default: 0,
    torch.ops.aten.bmm.default: 0,
    torch.ops.aten.addmm.default: 1,
    torch.ops.aten.baddbmm.default: 1,
}
"""Matrix products -> position of their left factor among the arguments."""
PRODUCTS_FROM, ATTENTION_FROM = 0.17, 2.0
"""Grade -> inner over outer dimension from which a matrix product is kept.

A product costs as many FLOPs per byte of its output as its inner dimension. Below the first value,
repeating is as cheap as keeping (the second factor of a low-rank adapter, modulations). Above the
second are the products that close a block.
"""


def enable_recompute(
    transformer: ModelMixin, blocks: Sequence[nn.Module], recompute: Recompute
) -> None:
    """Make each of `blocks` of `transformer` (a diffusers model) keep the activations that
    `recompute` selects.

    The state of random generators is not restored, because the policies run without dropout.
    """
    modes = dict(zip(blocks, recompute.modes_of(len(blocks)), strict=True))
    if set(modes.values()) <= {ALL}:
        return
    offload: Offload | None = None
    if OFFLOAD in modes.values():
        offload = Offload()
    # diffusers calls it in place of torch's checkpoint, with a block and its arguments.
    transformer.enable_gradient_checkpointing(partial(_run_block, modes, offload))


def _run_block(
    modes: dict[nn.Module, str], offload: Offload | None, block: nn.Module, *args: object
) -> object:
    mode = modes.get(block, ALL)
    if mode == ALL:
        return block(*args)
    if mode == OFFLOAD:
        assert offload is not None
        return offload(block, *args)
    selected: dict[str, Any] = {}
    if mode != INPUTS:
        keeps = partial(_keeps_output, ATTENTION_FROM if mode == ATTENTION else PRODUCTS_FROM)
        selected["context_fn"] = partial(create_selective_checkpoint_contexts, keeps)
    return checkpoint(block, *args, use_reentrant=False, preserve_rng_state=False, **selected)


def _keeps_output(
    least: float, _: object, operator: object, *args: Tensor, **kwargs: object
) -> CheckpointPolicy:
    """Keep the output of fused attention, by any backend, and of products with at least `least`
    inputs per output."""
    first = _PRODUCTS.get(operator)
    if first is None:
        # By name, because every backend of attention has an operator of its own.
        name = str(operator)
        kept = ("attention" in name or "flash_attn" in name) and "backward" not in name
    else:
        left, right = args[first], args[first + 1]
        # [..., inner] x [inner, outer]: repeating costs `inner` for each output that is kept.
        kept = left.shape[-1] >= least * right.shape[-1]
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
