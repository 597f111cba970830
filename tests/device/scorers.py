"""A scorer that says where it is: its score is the number of its device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from digenrl.rewards.protocol import resolve_device
from digenrl.types import Prompt


class DeviceNumber:
    """Score of every sample: the number of the device that this scorer computes on."""

    model_id, weights_digest = "device-number", "none"

    def __init__(self, device: str = "auto") -> None:
        self.device = resolve_device(device)

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Return scores [B]; -1 on the CPU, and -2 where the calling thread is on another device."""
        if self.device.type == "cpu":
            return torch.full((len(prompts),), -1.0)
        if torch.accelerator.current_device_index() != self.device.index:
            return torch.full((len(prompts),), -2.0)
        number = torch.full((len(prompts),), float(self.device.index), device=self.device)
        return number.cpu()
