"""Rules for `sampling.lossy`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def lossy_problems(get: Callable[[str], Any]) -> Iterator[str]:
    """Yield the reasons why samples of a configuration must be the network's own."""
    if (lossy := get("sampling.lossy")) == "none":
        return
    says, instead = f"sampling.lossy = {lossy} with", "set sampling.lossy=none"
    if not (levels := get("algorithm.train_steps._target_")).endswith(".NoiseLevels"):
        yield (
            f"{says} algorithm.train_steps = {levels}: the loss replays the steps of the sampler, "
            f"and a forecast is no step of the network, so that ratios would not be 1; {instead}, "
            "or train on the forward process (algorithm=nft or dpo)."
        )
    if get("data.samples") == "files":
        yield f"{says} data.samples = files: nothing is generated for training; {instead}."
    if (candidates := get("sampling.scouts.candidates")) > 1:
        yield (
            f"{says} sampling.scouts.candidates = {candidates}: not built together; {instead}, or "
            "sampling.scouts.candidates=1."
        )
    if (sharding := get("parallel.sharding")) in ("hsdp", "fsdp"):
        yield (
            f"{says} parallel.sharding = {sharding}: sharded ranks meet in every forward, and a "
            f"forecast leaves one out; {instead}, or parallel.sharding=ddp."
        )
