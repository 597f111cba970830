"""Activation checkpointing of diffusers' transformers, block by block (see `digenrl.recompute` for the grades)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from digenrl.recompute import ALL, ATTENTION, INPUTS, Recompute

_PRODUCTS = {
    torch.ops.aten.mm.default: 0,
    torch.ops.aten.bmm.default: 0,
    torch.ops.aten.addmm.default: 1,
    torch.ops.aten.baddbmm.default: 1,
}
"""Matrix products -> position of their left factor among the arguments."""
NARROW = 4
"""A product whose inner dimension is this much smaller than its outer one is as cheap to repeat as to keep (the second
factor of a low-rank adapter, modulations)."""


def enable(transformer: Any, blocks: Sequence[nn.Module], recompute: Recompute) -> None:
    """Make `transformer` (a diffusers model) keep of each of `blocks` what `recompute` says.

    Generators are not replayed: the policies run without dropout.
    """
    modes = dict(zip(blocks, recompute.modes(len(blocks)), strict=True))
    if set(modes.values()) <= {ALL}:
        return
    transformer.enable_gradient_checkpointing(partial(_run, modes))


def _run(modes: dict[nn.Module, str], block: nn.Module, *args: Any) -> Any:
    mode = modes.get(block, ALL)
    if mode == ALL:
        return block(*args)
    selected: dict[str, Any] = {}
    if mode != INPUTS:
        keeps = _keeps_attention if mode == ATTENTION else _keeps_products
        selected["context_fn"] = partial(create_selective_checkpoint_contexts, keeps)
    return checkpoint(block, *args, use_reentrant=False, preserve_rng_state=False, **selected)


def _keeps_attention(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Fused attention, by whatever backend."""
    name = str(operator)
    kept = ("attention" in name or "flash_attn" in name) and "backward" not in name
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _keeps_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Attention, and products whose inner dimension is not narrow."""
    first = _PRODUCTS.get(operator)
    if first is None:
        return _keeps_attention(context, operator)
    left: Tensor = args[first]
    right: Tensor = args[first + 1]
    wide = left.shape[-1] * NARROW >= right.shape[-1]
    return CheckpointPolicy.MUST_SAVE if wide else CheckpointPolicy.PREFER_RECOMPUTE
