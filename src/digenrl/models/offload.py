"""Offload of activations: the tensors that autograd keeps of a block wait in host memory for the
backward pass.

    forward    block i computes | the tensors kept of block i-1 are copied out
    backward   block i computes | the tensors kept of block i-1 are copied back

Copies run on a stream of their own, from and to pinned memory. The device holds the activations of
two blocks: a forward waits for the copies of the block before the last. Without a GPU the same
copies happen, one after the other.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from digenrl import accelerator

SMALL = 4096
"""Bytes of a storage below which it stays on the device. Its copies would cost launches and free
nothing."""


@dataclass(frozen=True)
class _Part:
    """A saved tensor, as a view of a storage in host memory."""

    storage: tuple[StorageWeakRef, int]
    """Storage, and the version of its content. A storage is copied once for all its views."""
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class Offload:
    """Runs the blocks of a network one after the other, with their activations in host memory."""

    def __init__(self) -> None:
        self._last: weakref.ref[_Kept] | None = None
        """Kept tensors of the last block that ran."""
        self._given: set[StorageWeakRef] = set()
        """Storages of the arguments of that block."""

    def __call__(self, block: nn.Module, *args: object) -> object:
        """Run `block(*args)`. Arguments that the block before was given too (modulations, rotary
        tables) stay on the device."""
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        given = {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors}
        kept = _Kept(block, given & self._given, self._last, tensors[0].device)
        # Weak, so that the host memory goes with the block's part of the graph.
        self._last, self._given = weakref.ref(kept), given
        with saved_tensors_hooks(kept.pack, kept.unpack):
            output = block(*args)
        kept.record_copies()
        return output


class _Kept:
    """Tensors that autograd keeps of one block. The object lives as long as the block's part of the
    graph.

    Args:
        stays: storages that are left on the device.
        before: kept tensors of the block before.
    """

    def __init__(
        self,
        block: nn.Module,
        stays: set[StorageWeakRef],
        before: weakref.ref[_Kept] | None,
        device: torch.device,
    ) -> None:
        self._block, self._stays, self._before, self._device = block, stays, before, device
        self._host: dict[tuple[StorageWeakRef, int], Tensor] = {}
        """Copies in host memory."""
        self._back: dict[tuple[StorageWeakRef, int], UntypedStorage] = {}
        """Copies on the device again; empty until the backward pass is near."""
        self._copied = torch.Event(device) if accelerator.is_own(device) else None
        if (
            (previous := self.before) is not None
            and (second := previous.before) is not None
            and second._copied is not None
        ):
            # The host waits here, so that the device never holds a third block.
            second._copied.synchronize()

    @property
    def before(self) -> _Kept | None:
        """Object of the block before, or None once that block's part of the graph is freed."""
        return self._before() if self._before is not None else None

    def pack(self, tensor: Tensor) -> Tensor | _Part:
        """Return, in the forward pass, the tensor itself if it stays, else a description of its
        place in host memory."""
        # Here and not in `__init__`: sharded weights have these storages only inside the forward.
        if not self._host:
            self._stays |= {
                StorageWeakRef(weight.untyped_storage()) for weight in self._block.parameters()
            }
        storage = tensor.untyped_storage()
        key = StorageWeakRef(storage), tensor._version
        if storage.nbytes() < SMALL or key[0] in self._stays or tensor.device != self._device:
            return tensor
        if key not in self._host:
            self._host[key] = self._copy_out(_storage_bytes(storage, self._device))
        return _Part(key, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())

    def unpack(self, packed: Tensor | _Part) -> Tensor:
        """Return the tensor in the backward pass, and start the copies of the block before, which
        is next."""
        if isinstance(packed, Tensor):
            return packed
        self._bring_back()
        if (before := self.before) is not None:
            before._bring_back()
        if self._copied is not None:
            # The stream waits for the copies, and the host does not.
            torch.accelerator.current_stream(self._device).wait_event(self._copied)
        empty = torch.empty(0, dtype=packed.dtype, device=self._device)
        # The view of the forward, on the storage that came back.
        return empty.set_(self._back[packed.storage], packed.offset, packed.shape, packed.stride)

    def record_copies(self) -> None:
        """Record an event after all copies of this block."""
        if self._copied is not None:
            self._copied.record(_copy_stream(self._device))

    def _copy_out(self, source: Tensor) -> Tensor:
        if self._copied is None:
            return source.clone()
        # The copy begins when the tensor has been computed.
        side = _copy_stream(self._device)
        side.wait_stream(torch.accelerator.current_stream(self._device))
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        with side:
            host.copy_(source, non_blocking=True)
        # The allocator must not reuse this memory before the copy has read it.
        source.record_stream(side)
        return host

    def _bring_back(self) -> None:
        if self._back:
            return
        if self._copied is None:
            self._back = {key: host.untyped_storage() for key, host in self._host.items()}
            return
        side = _copy_stream(self._device)
        buffers = {
            key: torch.empty_like(host, device=self._device) for key, host in self._host.items()
        }
        side.wait_stream(
            torch.accelerator.current_stream(self._device)
        )  # the buffers' memory may be in use until here
        with side:
            for key, buffer in buffers.items():
                buffer.copy_(self._host[key], non_blocking=True)
                buffer.record_stream(side)
        self._back = {key: buffer.untyped_storage() for key, buffer in buffers.items()}
        self.record_copies()


_SIDES: dict[torch.device, torch.Stream] = {}


def _copy_stream(device: torch.device) -> torch.Stream:
    """Return the stream that copies."""
    if device not in _SIDES:
        _SIDES[device] = torch.Stream(device)
    return _SIDES[device]


def _storage_bytes(storage: UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
