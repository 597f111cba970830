"""Settings with other values, for tests of what reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from omegaconf import OmegaConf

from digenrl.config import Composed
from digenrl.config.settings import HardwareSettings

ABSENT = object()
"""Value that leaves the key out."""


def but(composed: Composed, **values: Any) -> Composed:
    """Return the configuration with other values at its keys, whose dots are written as `__`."""
    tree: Any = OmegaConf.create(composed.settings.as_plain())
    for key, value in values.items():
        group, _, leaf = key.replace("__", ".").rpartition(".")
        if value is ABSENT:
            (OmegaConf.select(tree, group) if group else tree).pop(leaf, None)
        else:
            OmegaConf.update(tree, f"{group}.{leaf}".lstrip("."), value, force_add=True)
    return replace(composed, settings=type(composed.settings).from_tree(tree))


def hardware_settings(pools: Mapping[str, Any], **more: Any) -> HardwareSettings:
    """Return the group `hardware` with these pools."""
    usual = {"build": "real", "emulate": False, "time_scale": 1.0}
    return HardwareSettings.model_validate({**usual, "pools": pools, **more})
