"""Collectives among replicated trainers: one gradient average per optimizer update, and proof of
equal weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from digenrl import accelerator
from digenrl.strategy.shard import REPLICATE
from digenrl.transport.weights import WeightsError

_ODD = 0x2545F4914F6CDD1D
"""Multiplier of `_sum_of_bits`, of xorshift64* (Vigna, arXiv 1402.6246)."""
_PIECE = 1 << 24
"""Values whose bits are summed at once."""
_BACKEND = re.compile(r"gloo|NCCL|ncclSystemError|Connection (reset|closed) by peer")


@torch.no_grad()
def average_grads(parameters: Iterable[Tensor], trainers: int) -> None:
    """Average `.grad` over the trainers, in one flat all-reduce per dtype.

    A gradient that is None on every rank stays None, such as that of a text branch that the output
    does not use. A gradient that is None on some ranks counts as zero there. Sharded parameters are
    skipped: FSDP has reduced them in the backward pass.
    """
    if trainers == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if not isinstance(parameter, DTensor):
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for dtype, members in by_dtype.items():
        # In front of the gradients, in the same collective: 1 for each that this trainer has.
        present = torch.tensor(
            [p.grad is not None for p in members], dtype=dtype, device=members[0].device
        )
        # Zeros in place of what is None are freed before gradients are made below.
        grads = (torch.zeros_like(p) if p.grad is None else p.grad for p in members)
        flat = torch.cat([present, *(grad.flatten() for grad in grads)])  # [members + their sizes]
        dist.all_reduce(flat)
        flat /= trainers
        offset = len(members)
        held = flat[:offset].tolist()  # one wait for the device, not one for each parameter
        for trainers_with_it, parameter in zip(held, members, strict=True):
            piece = flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
            # Some trainer has this gradient; where none has, it stays None, and no optimizer
            # touches it.
            if trainers_with_it > 0:
                if parameter.grad is None:
                    parameter.grad = piece.clone()
                else:
                    parameter.grad.copy_(piece)


@torch.no_grad()
def scale_grads(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply every `.grad` by `factor`."""
    for parameter in parameters if factor != 1.0 else ():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


@torch.no_grad()
def add_averages(
    parameters: Mapping[str, Tensor], waiting: Mapping[str, Tensor], trainers: int
) -> dict[str, Tensor]:
    """Add to averaged gradients the averages of what waits on each trainer, by parameter name.
    Return what goes on waiting: all of it beside gradients that are not finite, otherwise what has
    no gradient on any trainer."""
    held = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    if not waiting or not all(bool(grad.isfinite().all()) for grad in held.values()):
        return dict(waiting)
    for name, grad in held.items():
        if name in waiting:
            average = waiting[name] / trainers
            if trainers > 1:
                dist.all_reduce(average)
            grad += average
    return {name: rest for name, rest in waiting.items() if name not in held}


@torch.no_grad()
def follow_first(tensors: Iterable[Tensor], trainers: int) -> None:
    """Give every replica the values of the first one, where they differ: the same update can differ
    in a last bit on another kind of GPU. Of a sharded tensor, each rank takes the part of the first
    copy's rank that holds the same part. Equal tensors do not travel."""
    by_group: dict[dist.ProcessGroup | None, list[Tensor]] = {}
    for tensor in tensors if trainers > 1 else ():
        if not isinstance(tensor, DTensor):
            by_group.setdefault(None, []).append(tensor.data)
        elif REPLICATE in (tensor.device_mesh.mesh_dim_names or ()):
            copies = tensor.device_mesh.get_group(REPLICATE)
            by_group.setdefault(copies, []).append(tensor.to_local())
    for group, members in by_group.items():
        own = torch.stack([_sum_of_bits(member) for member in members])
        first = own.clone()
        dist.broadcast(first, group=group, group_src=0)
        differs = (own != first).int()
        dist.all_reduce(differs, dist.ReduceOp.MAX, group=group)
        for member, travels in zip(members, differs.tolist(), strict=True):
            if travels:
                dist.broadcast(member, group=group, group_src=0)


def _sum_of_bits(values: Tensor) -> Tensor:
    """Return a checksum [] int64 that no device and no order of summing changes. Equal values in
    other places have another."""
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    for piece in values.reshape(-1).view(whole).split(_PIECE):
        places = torch.arange(len(piece), device=values.device)
        # Multiplied bits fold upon themselves, so that a step up does not undo a step down.
        mixed = (piece.long() + (places << 32)) * _ODD
        total += ((mixed ^ (mixed >> 31)) * _ODD).sum()
    return total


def is_of_a_peer(error: BaseException) -> bool:
    """Return whether `error` is that of a collective whose other end is gone, hangs or was closed.
    gloo raises it as a plain RuntimeError.

    Example:
        >>> is_of_a_peer(RuntimeError("[gloo] Connection closed by peer"))
        True
        >>> is_of_a_peer(RuntimeError("CUDA out of memory"))
        False
    """
    named = isinstance(error, dist.DistError)
    return named or (type(error) is RuntimeError and bool(_BACKEND.search(str(error))))


def assert_equal_digests(own: str, trainers: int, version: int) -> None:
    """Check that all trainers have the same digest of a version. Every trainer calls this.

    Raises:
        WeightsError: the replicas have drifted apart, so nothing that follows could be trusted.
    """
    if trainers == 1:
        return
    kind = accelerator.device_kind()
    # Tensors that are gathered must be where the group's backend takes them: gloo's on the CPU.
    device = kind if dist.get_default_backend_for_device(kind) in dist.get_backend() else "cpu"
    mine = torch.tensor([int(own[:8], 16), int(own[8:], 16)], dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(trainers)]
    dist.all_gather(everyone, mine)
    if any(not torch.equal(other, everyone[0]) for other in everyone):
        raise WeightsError(
            f"trainers hold different weights at version {version}: an update was not the same on "
            "all ranks."
        )
