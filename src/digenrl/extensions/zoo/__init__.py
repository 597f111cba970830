"""Model families beside FLUX, Stable Diffusion 3 and Wan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def solver_problems(get: Callable[[str], Any]) -> Iterator[str]:
    """Yield why an evaluation cannot use its solver: a sound with noise levels of its own."""
    solver, model = get("sampling.eval.solver"), get("model._target_")
    if solver != "euler" and model.endswith(".MiniMaxH3Policy"):
        yield (
            f"sampling.eval.solver = {solver}: would count the sound of MiniMax-H3 on the noise "
            "levels of its video; set sampling.eval.solver=euler."
        )


RULES = (solver_problems,)
