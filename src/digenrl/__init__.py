"""digenrl: reinforcement-learning post-training of visual diffusion and flow models on unequal
GPUs."""

from __future__ import annotations

from typing import Any

__version__ = "0.3.0"
__all__ = ["__version__", "load_run", "plan", "rl_loop", "sample", "score"]


def __getattr__(name: str) -> Any:
    """Return a function of `digenrl.api`, which is imported on first use."""
    if name not in __all__:
        raise AttributeError(
            f"digenrl has no attribute {name}; it has {', '.join(__all__)}, and its modules"
        )
    from digenrl.api import workbench

    return getattr(workbench, name)
