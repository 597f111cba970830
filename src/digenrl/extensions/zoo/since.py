"""Model families that only newer releases of diffusers have."""

from __future__ import annotations

import inspect

import diffusers


def require_diffusers(release: str, *classes: str, **arguments: str) -> None:
    """Raise ImportError, which names the `release` to install, unless diffusers has `classes`, and
    each class of `arguments` takes its argument."""
    absent = [name for name in (*classes, *arguments) if not hasattr(diffusers, name)]
    absent = absent or [
        f"{name}({argument}=...)"
        for name, argument in arguments.items()
        if argument not in inspect.signature(getattr(diffusers, name)).parameters
    ]
    if absent:
        raise ImportError(
            f"diffusers {diffusers.__version__} has no {', '.join(absent)}: this model needs "
            f'diffusers {release} or newer; run `pip install -U "diffusers>={release}"`'
        )
