"""Name the tensors of a micro-batch that are not finite."""

from __future__ import annotations

from torch import Tensor

from digenrl.types import CellBlock, TrainBatch


def not_finite(batch: TrainBatch) -> list[str]:
    """Return names of the batch's tensors that hold an infinity or NaN; a NaN reward is a missing
    one and does not count."""
    names = [f"reward/{name}" for name, table in batch.rewards.items() if bool(table.isinf().any())]
    for index, block in enumerate(batch.blocks):
        names += [
            f"{index}/{name}"
            for name, value in tensors_of(block).items()
            if not bool(value.isfinite().all())
        ]
    return names


def tensors_of(block: CellBlock) -> dict[str, Tensor]:
    """Return the tensors of a block by name."""
    return {name: value for name, value in vars(block).items() if isinstance(value, Tensor)}
