"""Wan2.2 text-to-video A14B (arXiv:2503.20314): two transformers, for much and for little noise.

Both are parts of one module, so parameters, blocks and adapters of both are found as usual.
Training, publication, checkpoints and memory need no code for experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from diffusers import ModelMixin
from diffusers.loaders import PeftAdapterMixin
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from digenrl.models import pretrained
from digenrl.models.adapter import Adapter
from digenrl.models.wan import WanPolicy

if TYPE_CHECKING:
    from diffusers.configuration_utils import FrozenDict

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
    def config(self) -> FrozenDict:
        """Configuration of the transformer; the same for either expert."""
        return self.transformer.config

    @property
    def blocks(self) -> list[nn.Module]:
        """Blocks of both experts in turn, so that a share of the list is the same share of each
        expert."""
        first: Any = self.transformer.blocks
        second: Any = self.transformer_2.blocks
        return [block for pair in zip(first, second, strict=True) for block in pair]

    def high_noise_rows(self, timesteps: Tensor) -> list[bool]:
        """Return which rows [B] belong to the first expert. This waits for the device."""
        if self.boundary is None:
            return [True] * len(timesteps)
        found: list[bool] = (timesteps >= self.boundary).tolist()
        return found

    def forward(
        self, hidden_states: Tensor, timestep: Tensor, return_dict: bool = False, **rows: Tensor
    ) -> tuple[Tensor]:
        """Compute hidden_states [B, ...], timestep [B], other inputs of the experts [B, ...] ->
        (velocity [B, ...],).

        Sharded trainers gather both experts in every forward, or they would wait for each other. An
        expert without rows therefore computes the first row, times zero.
        """
        inputs = {"hidden_states": hidden_states, "timestep": timestep, **rows}
        high = self.high_noise_rows(timestep)
        if len(set(high)) == 1 and not isinstance(self, FSDPModule):
            only = self.transformer if high[0] else self.transformer_2
            return only(**inputs, return_dict=False)
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


class ExpertsAdapter(Adapter):
    """Trained parameters of two experts, of which an update may reach one alone."""

    def parameters_without_gradient(self) -> list[str]:
        """Return the names of trained parameters without gradient, or [] if they are all parameters
        of one expert.

        An expert gets no gradient when no cell of the update has its noise levels. The other expert
        then has all gradients.
        """
        absent, trained = super().parameters_without_gradient(), self.trained_parameters()
        for part in PARTS:
            own = [name for name in trained if name.startswith(f"{part}.")]
            if len(own) < len(trained) and set(own) == set(absent):
                return []
        return absent


class WanExpertsPolicy(WanPolicy):
    """Wan2.2 text-to-video A14B; arguments in `DiffusersPolicy`, and

    guidance_scale_2: the scale at noise levels of the second transformer; None = as for the first.
    """

    family = "wan22"
    adapter_class = ExpertsAdapter
    components: ClassVar[Mapping[str, str]] = {part: f"{part}." for part in PARTS}
    context_plan: ClassVar[dict[str, Any]] = {}

    def __init__(self, *args: Any, guidance_scale_2: float | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if guidance_scale_2 is not None and guidance_scale_2 < 1.0:
            raise ValueError(
                f"model.guidance_scale_2={guidance_scale_2}: use 1 (off) or more, or null"
            )
        self.guidance_scale_2 = guidance_scale_2

    @classmethod
    def joined(cls, networks: list[ModelMixin], path: str | None = None) -> ModelMixin:
        """Return both experts as one network, with the boundary that the checkpoint names."""
        boundary = None if path is None else pretrained.model_index(path)["boundary_ratio"] * 1000
        high, low = networks
        return Experts(high, low, boundary)

    def cfg_scale_at(self, sigmas: Tensor) -> float | Tensor:
        """Return each expert's own scale [B, 1, 1, 1, 1]."""
        if self.guidance_scale_2 is None:
            return self.cfg_scale
        experts: Any = self.transformer
        high = sigmas * 1000 >= experts.boundary
        return torch.where(high, self.cfg_scale, self.guidance_scale_2).view(-1, 1, 1, 1, 1)
