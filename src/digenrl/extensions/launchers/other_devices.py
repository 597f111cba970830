"""Lightning's view of a kind of device that Lightning does not know (XPU, NPU)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lightning.pytorch.accelerators import Accelerator

from digenrl import accelerator


def _numbers(devices: int | Sequence[int]) -> Sequence[int]:
    return range(devices) if isinstance(devices, int) else devices


class OtherAccelerator(Accelerator):
    """Devices of this process's kind, through `torch.accelerator`."""

    parse_devices = staticmethod(_numbers)
    get_parallel_devices = staticmethod(
        lambda devices: [torch.device(accelerator.kind(), number) for number in devices]
    )
    auto_device_count = staticmethod(accelerator.count)
    is_available = staticmethod(lambda: accelerator.count() > 0)
    name = staticmethod(accelerator.kind)

    def setup_device(self, device: torch.device) -> None:
        """Make `device` the current one."""
        torch.accelerator.set_device_index(device)

    teardown = staticmethod(torch.accelerator.empty_cache)
