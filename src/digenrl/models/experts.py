"""Two transformers that share the denoising by noise level (Wan2.2 A14B), as one network.

Whatever asks for parameters, blocks or adapters sees both. Training, publication, checkpoints and
memory therefore need no code for experts.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import ModelMixin
from diffusers.loaders import PeftAdapterMixin
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

PARTS = ("transformer", "transformer_2")
"""The high-noise and the low-noise expert: subfolders of the checkpoint."""


class Experts(ModelMixin, PeftAdapterMixin):
    """Sends each row of a forward to the expert of its noise level.

    Args:
        boundary: timestep (0 .. 1000) from which on the first expert serves; None = it serves
            always.
    """

    _supports_gradient_checkpointing = True

    def __init__(
        self, transformer: nn.Module, transformer_2: nn.Module, boundary: float | None
    ) -> None:
        super().__init__()
        self.transformer, self.transformer_2 = transformer, transformer_2
        self.boundary = boundary

    @property
    def config(self) -> Any:
        """Configuration of the transformer; the same for either expert."""
        return self.transformer.config

    @property
    def blocks(self) -> list[nn.Module]:
        """Blocks of both experts in turn, so that a share of the list is the same share of each
        expert."""
        first: Any = self.transformer.blocks
        second: Any = self.transformer_2.blocks
        return [block for pair in zip(first, second, strict=True) for block in pair]

    def high(self, timesteps: Tensor) -> list[bool]:
        """Return which rows [B] belong to the first expert. This waits for the device."""
        if self.boundary is None:
            return [True] * len(timesteps)
        found: list[bool] = (timesteps >= self.boundary).tolist()
        return found

    def forward(
        self, hidden_states: Tensor, timestep: Tensor, return_dict: bool = False, **rows: Tensor
    ) -> Any:
        """Compute hidden_states [B, ...], timestep [B], other inputs of the experts [B, ...] ->
        (velocity [B, ...],).

        Sharded trainers gather both experts in every forward, or they would wait for each other. An
        expert without rows therefore computes the first row, times zero.
        """
        inputs = {"hidden_states": hidden_states, "timestep": timestep, **rows}
        high = self.high(timestep)
        if all(high) and not isinstance(self, FSDPModule):
            return self.transformer(**inputs, return_dict=False)
        if not any(high) and not isinstance(self, FSDPModule):
            return self.transformer_2(**inputs, return_dict=False)
        velocity, idle = None, None
        for expert, own in (
            (self.transformer, high),
            (self.transformer_2, [not row for row in high]),
        ):
            chosen = torch.tensor(
                [index for index, row in enumerate(own) if row] or [0], device=timestep.device
            )
            output = expert(
                **{name: value[chosen] for name, value in inputs.items()}, return_dict=False
            )[0]
            if not any(own):
                idle = output
                continue
            velocity = output.new_empty(hidden_states.shape) if velocity is None else velocity
            velocity = velocity.index_copy(0, chosen, output)
        assert velocity is not None
        return (velocity if idle is None else velocity + 0.0 * idle,)
