"""The device that a benchmark measures: everything that differs between a GPU and a processor, in
one place.

On a processor memory is not measured (None), so that the same benchmark runs on both.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from digenrl import accelerator
from digenrl.extensions.planner.memory import GIB


def find() -> torch.device:
    """The first GPU that torch sees, else the processor."""
    own = accelerator.device_kind()
    return torch.device("cpu") if own == "cpu" else torch.device(own, 0)


def name(device: torch.device) -> str:
    """Return a device's name, as its driver reports it."""
    if not accelerator.is_own(device):
        return "cpu"
    return str(torch.get_device_module(device).get_device_name(device))


def short_name(device: torch.device) -> str:
    """Return a name for files, such as h200 for "NVIDIA H200"."""
    words = re.sub(r"[^a-z0-9]+", "_", name(device).lower()).strip("_")
    return words.removeprefix("nvidia_")


def wait(device: torch.device) -> None:
    """Wait until the work that was given to `device` is done."""
    if accelerator.is_own(device):
        torch.accelerator.synchronize(device)


def release(device: torch.device) -> None:
    """Free memory that nobody holds."""
    gc.collect()
    if accelerator.is_own(device):
        torch.accelerator.empty_cache()


def capacity_gib(device: torch.device) -> float | None:
    """Memory that the device reports."""
    if not accelerator.is_own(device):
        return None
    return float(torch.get_device_module(device).get_device_properties(device).total_memory / GIB)


def watch_peak(device: torch.device) -> None:
    """Begin to look for the most memory in use."""
    if accelerator.is_own(device):
        torch.accelerator.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float | None:
    """The most memory in use since `watch_peak`, the allocator's reserve included."""
    return (
        torch.accelerator.max_memory_reserved(device) / GIB if accelerator.is_own(device) else None
    )


def full(error: BaseException) -> bool:
    """Whether `error` says that the device's memory did not suffice."""
    return isinstance(error, torch.OutOfMemoryError)


def pinned(device: torch.device) -> bool:
    """Whether copies to `device` gain from page-locked memory."""
    return accelerator.is_own(device)


PATIENCE_S, PATIENCE_ON_CPU_S = 4.0, 0.1
"""What the calls of one measurement may take together."""


def seconds(call: Callable[[], Any], device: torch.device, most: int = 7) -> float:
    """Median seconds of `call`, after one that is not counted; as often as patience allows, at
    least once."""
    call()
    wait(device)
    taken: list[float] = []
    patience = PATIENCE_S if accelerator.is_own(device) else PATIENCE_ON_CPU_S
    while not taken or (len(taken) < most and sum(taken) + taken[-1] < patience):
        began = time.perf_counter()
        call()
        wait(device)
        taken.append(time.perf_counter() - began)
    return median(taken)


def matmul_tflops(device: torch.device, side: int) -> float:
    """TFLOP/s of a square bf16 product of random numbers (fp32 on a processor)."""
    dtype = torch.bfloat16 if accelerator.is_own(device) else torch.float32
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return float(2 * side**3 / seconds(lambda: left @ right, device, most=20) / 1e12)


def copy_tb_s(device: torch.device, size: int) -> float:
    """TB/s of a copy inside the device's memory, reads and writes counted."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), device) / 1e12


def host_gb_s(device: torch.device, size: int) -> float:
    """GB/s from the processor's page-locked memory to the device."""
    source = torch.ones(size, dtype=torch.uint8, pin_memory=pinned(device))
    target = torch.empty(size, dtype=torch.uint8, device=device)
    return size / seconds(lambda: target.copy_(source, non_blocking=True), device) / 1e9
