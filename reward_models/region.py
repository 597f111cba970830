"""The region of a prompt: what an edit may change. Metadata `region: [left, top, right, bottom]` in
shares of width and height; without it nothing may change."""

from __future__ import annotations

import torch
from torch import Tensor

from digenrl.types import Prompt


def outside(prompt: Prompt, rows: int, columns: int) -> Tensor:
    """Return [rows, columns] bool: the cells of such a grid whose centre lies outside of the
    prompt's region.

    Raises:
        ValueError: the region is none, or leaves nothing outside.
    """
    region = prompt.metadata.get("region")
    if region is None:
        return torch.ones(rows, columns, dtype=torch.bool)
    if not (
        isinstance(region, list)
        and len(region) == 4
        and all(isinstance(edge, int | float) for edge in region)
    ):
        raise ValueError(
            f"region = {region!r:.60}: give [left, top, right, bottom] in shares of width and "
            "height."
        )
    left, top, right, bottom = region
    y, x = ((torch.arange(cells) + 0.5) / cells for cells in (rows, columns))
    within = ((y >= top) & (y < bottom))[:, None] & (x >= left) & (x < right)
    if not (0 <= left < right <= 1 and 0 <= top < bottom <= 1) or within.all():
        raise ValueError(
            f"region = {region}: needs 0 <= left < right <= 1, 0 <= top < bottom <= 1 and a rest."
        )
    return ~within
