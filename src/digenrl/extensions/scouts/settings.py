"""Rules for the keys of `sampling.scouts`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def scout_problems(get: Callable[[str], Any]) -> Iterator[str]:
    """Yield the reasons why a configuration cannot have the scouts that it asks for."""
    candidates = get("sampling.scouts.candidates")
    if candidates > 1 and get("sampling.same_noise"):
        yield (
            f"sampling.scouts.candidates = {candidates} with sampling.same_noise = true: scouts "
            "choose among initial noises, and there is one; set sampling.same_noise=false."
        )
    if candidates > 1 and get("sampling.task_size") < 2:
        yield (
            f"sampling.scouts.candidates = {candidates} with sampling.task_size = 1: a task keeps "
            "its best and its worst samples, and has one; set sampling.task_size to 2 or more."
        )
