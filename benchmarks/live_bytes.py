"""Bytes that a forward leaves alive for its backward pass (autograd or a checkpoint keeps them),
and its peak.

Works on fake tensors too, so that real widths are counted without their memory.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")


class _Allocations(TorchDispatchMode):
    """Follows the storage of every tensor that an operator returns, as long as it lives."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        owned = [*model.parameters(), *model.buffers()]
        owned += [p.grad for p in model.parameters() if p.grad is not None]
        self._seen: dict[int, Any] = {tensor.untyped_storage()._cdata: None for tensor in owned}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._take(leaf.untyped_storage())
        return out

    def _take(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self.now += size
        self.peak = max(self.peak, self.now)

        def freed(_: Any) -> None:
            self.now -= size
            self._seen.pop(key, None)

        self._seen[key] = weakref.ref(storage, freed)


@dataclass(frozen=True)
class Bytes:
    """What a forward held; weights excluded."""

    kept: int
    """Bytes after the forward has returned."""
    peak: int
    """Most bytes during the forward."""


def count_bytes(model: nn.Module, forward: Callable[[], T]) -> tuple[T, Bytes]:
    """`forward`'s output, and the bytes of the storages made in it."""
    with _Allocations(model) as allocations:
        output = forward()
    gc.collect()
    return output, Bytes(allocations.now, allocations.peak)
