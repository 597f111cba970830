"""Attention of a context group (Ulysses, arXiv:2309.14509).

Each rank holds a part of the tokens and computes attention for a part of the heads. It gets all
tokens of its heads from the other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    SeqAllToAllDim,
    dispatch_attention_fn,
)
from torch import Tensor

if TYPE_CHECKING:
    from diffusers.models._modeling_parallel import ParallelConfig


def attend_together(
    parallel: ParallelConfig,
    own: Sequence[Tensor],
    common: Sequence[Tensor] = (),
    mask: Tensor | None = None,
    backend: AttentionBackendName | None = None,
) -> list[Tensor]:
    """Compute attention among the tokens of all ranks, and the tokens that every rank holds whole.

    Args:
        parallel: diffusers' `ParallelConfig` of the group, as attention processors carry it.
        own: query, key and value of this rank's tokens, [B, tokens of the rank, heads, d].
        common: query, key and value of the tokens that all ranks hold, as many as there are; () =
            there are none.
        mask: mask of the keys, with the keys of `common` last.
        backend: backend of diffusers' dispatcher.

    Returns:
        The attention output of `own`, and of `common` if there is such, [B, tokens, heads x d].
    """
    mesh = parallel.context_parallel_config._ulysses_mesh
    group, ranks, rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()
    # [B, tokens of the rank, heads, d] -> [B, all tokens, heads / ranks, d]
    parts = [SeqAllToAllDim.apply(group, part) for part in own]
    tokens = parts[0].shape[1]
    # This rank's heads of the common tokens: [B, common tokens, heads / ranks, d].
    heads = [part.chunk(ranks, dim=2)[rank] for part in common]
    query, key, value = (
        (torch.cat(pair, dim=1) for pair in zip(parts, heads, strict=True)) if heads else parts
    )
    # [B, all and common tokens, heads / ranks, d]
    read = dispatch_attention_fn(query, key, value, attn_mask=mask, backend=backend)
    found = [read[:, :tokens]]
    if heads:  # every rank gets all heads of these tokens, for which they are sent once to each
        found.append(read[:, tokens:].repeat(1, ranks, 1, 1))
    # [B, all tokens, heads / ranks, d] -> [B, tokens of the rank, heads x d]
    return [SeqAllToAllDim.apply(group, part, 1, 2).flatten(2, 3) for part in found]
