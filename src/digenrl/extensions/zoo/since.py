"""Model families that only newer releases of diffusers have."""

from __future__ import annotations

import diffusers


def require(release: str, *classes: str) -> None:
    """Raise ImportError, which names the `release` to install, unless diffusers has `classes`."""
    absent = [name for name in classes if not hasattr(diffusers, name)]
    if absent:
        raise ImportError(
            f"diffusers {diffusers.__version__} has no {', '.join(absent)}: this model needs "
            f'diffusers {release} or newer; run `pip install -U "diffusers>={release}"`'
        )
