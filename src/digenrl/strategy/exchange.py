"""What replicated trainers exchange of their gradients: all values, or the largest ones with error
feedback (`parallel.compress`).

A trainer adds its gradient to what it has not sent yet. It sends the largest values of this sum and
keeps the others for the next update (Stich et al., arXiv 1809.07599). A low rank (PowerSGD) would
save less: matrices of an adapter have one already. torch's hooks need the buckets of DDP.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as distributed_tensor
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from digenrl.strategy import gradients, shard

UNSENT = "unsent"
"""Entry of a checkpoint: parameter name -> [trainers, *shape], a row for each trainer."""
MOST_VALUES = torch.iinfo(torch.int32).max
"""Most values of a gradient whose places travel in 4 bytes."""


class GradientExchange:
    """Averages the gradients of all trainers, once per update. Every trainer calls `average`.

    Args:
        share: part of the gradient's values that a trainer sends; None: all, in one all-reduce.
            Updates then also take what a checkpoint kept, once there is a gradient.
        trainers: number of replicas.
    """

    def __init__(self, share: float | None, trainers: int) -> None:
        self._share, self._trainers = share, trainers
        self._unsent, self._unsent_before = dict[str, Tensor](), dict[str, Tensor]()
        """Parameter name -> fp32 values that this trainer has not sent yet."""
        self.facts: dict[str, float] = {}
        """Numbers of the last update, for the record; {} without compression."""

    @torch.no_grad()
    def average(self, parameters: Mapping[str, Tensor], scale: float) -> None:
        """Set every `.grad` to `scale` times its average over the trainers, or to an approximation
        that is the same on every trainer. A gradient that is None on every trainer stays None.

        A value that is not finite reaches every trainer, and what was unsent before stays.

        Raises ValueError if more than `MOST_VALUES` values are trained.
        """
        self._unsent_before, self.facts = self._unsent, {}
        if (share := self._share) is None:
            gradients.average_grads(parameters.values(), self._trainers)
            gradients.scale_grads(parameters.values(), scale)
            self._unsent = gradients.add_averages(parameters, self._unsent, self._trainers)
            return
        members = list(parameters.values())
        here = torch.tensor([p.grad is not None for p in members], device=members[0].device)
        sizes = torch.tensor([p.numel() for p in members], device=here.device)
        if (length := int(sizes.sum())) > MOST_VALUES:
            raise ValueError(
                f"parallel.compress = {share:g}: {length} values are trained, at most "
                f"{MOST_VALUES} can be; train an adapter (model.lora), or set it to off."
            )
        # Other unsent values wait: no optimizer may touch what has a gradient nowhere.
        offered = here.repeat_interleave(sizes)  # [N]
        pending = self._add_unsent(parameters, scale)  # [N] fp32
        # NaN counts as the largest.
        places = (pending.abs() * offered).topk(math.ceil(share * length), sorted=False).indices
        sent = torch.where(offered[places], pending[places], 0.0)
        total, held = self._sum_sent(length, places.int(), sent, here)
        if bool(total.isfinite().all()):
            pending[places] -= sent
            self._unsent = _by_name(parameters, pending)
        pieces = _by_name(parameters, total.div_(self._trainers)).values()
        for trainers, parameter, piece in zip(held.tolist(), members, pieces, strict=True):
            if trainers:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad.copy_(piece)

    def _add_unsent(self, parameters: Mapping[str, Tensor], scale: float) -> Tensor:
        """Return [N] fp32: the unsent values and `scale` times the gradients."""
        pieces = []
        for name, p in parameters.items():
            unsent = self._unsent.get(name, torch.zeros_like(p, dtype=torch.float32))
            pieces.append((unsent if p.grad is None else unsent + scale * p.grad.float()).flatten())
        return torch.cat(pieces)

    def _sum_sent(
        self, length: int, places: Tensor, values: Tensor, here: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the sum [length] of what all trainers send, and how many trainers have each
        gradient [members].

        Args:
            places: [k] int32, different from each other; `values` [k] fp32 belong there.
            here: [members] bool, whether this trainer has each gradient.
        """
        # In one message of bytes: a slow line has a long latency.
        own = torch.cat([places.view(torch.uint8), values.view(torch.uint8), here.byte()])
        everyone = [torch.empty_like(own) for _ in range(self._trainers)]
        dist.all_gather(everyone, own)
        total, end = torch.zeros(length, device=own.device), 4 * len(places)
        # One trainer after the other, in the same order everywhere: sums are equal to the bit.
        for told in everyone:
            total[told[:end].view(torch.int32).long()] += told[end : 2 * end].view(torch.float32)
        self.facts = {
            "gradient_share": len(places) / length,
            "gradient_bytes": float((self._trainers - 1) * len(own)),
        }
        return total, torch.stack([told[2 * end :] for told in everyone]).sum(dim=0)

    def checkpoint_entry(self, before: bool = False) -> dict[str, Any]:
        """Return what a checkpoint adds: `UNSENT`, of which this trainer has its own row, or {}.
        Every trainer calls this. `before`: as it was before the last update."""
        kept = self._unsent_before if before else self._unsent
        if not kept:
            return {}
        mesh = _trainers_mesh(next(iter(kept.values())).device)
        # Copies: torch's copy to the host takes no part of a larger tensor.
        own = {name: unsent[None].clone() for name, unsent in kept.items()}
        return {UNSENT: {n: DTensor.from_local(row, mesh, [Shard(0)]) for n, row in own.items()}}

    def load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Take back a checkpoint's entry. Another number of trainers keeps the average of it."""
        self._unsent = {
            name: rows.to_local().sum(dim=0) * (self._trainers / len(rows))
            for name, rows in checkpoint.get(UNSENT, {}).items()
        }


def empty_rows(size: torch.Size, device: torch.device) -> Tensor:
    """Return room for a tensor of a checkpoint's entry, with rows divided among the trainers."""
    mesh, rows = _trainers_mesh(device), [Shard(0)]
    return distributed_tensor.empty(*size, dtype=torch.float32, device_mesh=mesh, placements=rows)


def _trainers_mesh(device: torch.device) -> DeviceMesh:
    return shard.mesh_of("fsdp", dist.get_world_size(), 1, device.type)


def _by_name(parameters: Mapping[str, Tensor], flat: Tensor) -> dict[str, Tensor]:
    """Return the parts of `flat` [N] in the shapes of the parameters."""
    pieces = iter(flat.split([p.numel() for p in parameters.values()]))
    return {name: next(pieces).view_as(p) for name, p in parameters.items()}
