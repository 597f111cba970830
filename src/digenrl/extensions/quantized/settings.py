"""Checks of `model.quantize` between keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def quantize_problems(get: Callable[[str], Any]) -> Iterator[str]:
    """Yield the reasons why a configuration cannot have a quantized base."""
    if (kind := get("model.quantize")) is None:
        return
    if get("model.lora") is None:
        yield (
            f"model.quantize = {kind} with model.lora = null: only frozen weights can be "
            "quantized; train an adapter (model.lora), or set model.quantize=null."
        )
    if (sharding := get("parallel.sharding")) != "ddp" and get("allocation.trainers") != 1:
        yield (
            f"model.quantize = {kind} with parallel.sharding = {sharding}: quantized weights are "
            "not divided among trainers; set parallel.sharding=ddp."
        )
