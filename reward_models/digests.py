"""Digests that tell one set of scorer weights from another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import xxhash
from torch import nn


def files_digest(paths: Sequence[Path]) -> str:
    """xxh3-128 (hex) of the names and contents of `paths`, in the order given."""
    digest = xxhash.xxh3_128()
    for path in paths:
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def module_digest(*modules: nn.Module) -> str:
    """xxh3-128 (hex) of the names, shapes, dtypes and values of the modules' state."""
    digest = xxhash.xxh3_128()
    for module in modules:
        for name, tensor in module.state_dict().items():
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
