"""Keys and values that configurations once had, so that who gives one reads why it is gone."""

from __future__ import annotations

from typing import Any

REMOVED: dict[str, str] = {
    "model.compile=graphs": "torch.compile has a mode for CUDA graphs; set model.compile=true",
    "schedule.gradients": "trainers compute every trained step again, as replay did",
    "schedule.order": "fragments are trained in the order of their groups",
}
"""Dotted key (a group of keys too), or `key=value`, -> what replaces it, or why it went."""

FORGOTTEN: dict[str, tuple[Any, ...]] = {
    "schedule.gradients": ("replay",),
    "schedule.order": ("canonical", "arrival"),
}
"""Removed key -> its values without which a stored run computes what it did: such a run goes on without the key."""


def reason(key: str, value: Any) -> str | None:
    """Return why `key`, a group around it, or this value of it was removed; None: it was not."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    parts = key.split(".")
    names = (f"{key}={text}", *(".".join(parts[:count]) for count in range(len(parts), 0, -1)))
    return next((REMOVED[name] for name in names if name in REMOVED), None)
