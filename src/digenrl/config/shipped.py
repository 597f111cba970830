"""The place of the configurations that ship with digenrl."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def config_directory() -> Path:
    """Return configs/ of the checkout, or the copy that an installed wheel carries."""
    checkout = _PACKAGE.parents[1] / "configs"
    return checkout if (checkout / "train.yaml").is_file() else _PACKAGE / "configs"
