"""Kind of device that this process computes on.

`torch.accelerator`, `torch.Stream` and `torch.Event` serve every kind: CUDA (AMD's GPUs too), XPU,
and kinds that a package adds, as NPU. The code asks for a kind here, and never for one by name.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def device_kind() -> str:
    """Return the type of the devices that this process computes on, as torch names it; `cpu`
    without an accelerator."""
    found = torch.accelerator.current_accelerator(check_available=True)
    # The first run on a Mac computes on the CPU, unless `trainer.accelerator` asks for its GPU.
    return "cpu" if found is None or found.type == "mps" else found.type


def device_count() -> int:
    """Return the number of accelerators that this process sees; 0 on processors."""
    return 0 if device_kind() == "cpu" else torch.accelerator.device_count()


def current_device() -> torch.device:
    """Return the current accelerator with its number, or the CPU."""
    own = device_kind()
    return torch.device(
        *(own,) if own == "cpu" else (own, torch.accelerator.current_device_index())
    )


def is_own(device: torch.device) -> bool:
    """Return whether `device` is an accelerator of this process: it has streams, and copies to it
    start in pinned memory."""
    return device.type != "cpu" and device.type == device_kind()


def bound_device(device: torch.device) -> torch.device | None:
    """Return the `device_id` of a process group whose tensors are on `device`; None on processors.

    Without one, NCCL (torch 2.15) binds a group to the device of the rank's number in it: all
    rollouts, each alone in its group, to the first. None also where gloo knows no such device:
    torch could then make no group for the host beside it.
    """
    beside = dist.Backend.backend_capability["gloo"]
    return device if is_own(device) and device.type in beside else None


def mark_work() -> torch.Event | None:
    """Mark the end of the work given so far to the current stream, to be read when it is done.
    Return None on processors, where work is done when it is given."""
    event = None if device_kind() == "cpu" else torch.Event(device_kind(), enable_timing=True)
    return event and torch.accelerator.current_stream().record_event(event)
