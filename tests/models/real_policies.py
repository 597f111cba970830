"""Policies of all families at published size: on the meta device, or as fake tensors on a GPU that does not exist.

Fake tensors have shapes, dtypes and devices, and no values; a backward pass over them would ask for a driver.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLHunyuanVideo15,
    AutoencoderKLLTX2Video,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
)
from torch import Tensor, nn

from benchmarks.count_facts import MODELS
from digenrl.models import pretrained, tiny_builds
from digenrl.models.pipeline import DiffusersPolicy
from tests.models.tiny_policies import FAMILIES

MODEL = {
    "wan": "wan21_14b",
    "wan22": "wan21_14b",
    "wan_i2v": "wan21_i2v_14b",
    "hunyuan_video": "hunyuan_video",
    "hunyuan_video15": "hunyuan_video15",
    "ltx2": "ltx2",
    "flux": "flux1_dev",
    "flux_kontext": "flux1_kontext",
    "qwen_image": "qwen_image",
    "qwen_image_edit": "qwen_image_edit",
    "sd3": "sd35_medium",
    "aura_flow": "aura_flow",
    "z_image": "z_image",
    "flux2_klein": "flux2_klein_4b",
}
"""Family -> entry of `benchmarks.count_facts.MODELS`."""
LORA = {"rank": 64, "alpha": 128, "targets": "attention_ff"}
KL: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 16,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "scaling_factor": 0.36,
    "shift_factor": 0.11,
}
VAES: dict[str, Any] = {
    "wan": AutoencoderKLWan,
    "wan22": AutoencoderKLWan,
    "wan_i2v": AutoencoderKLWan,
    "hunyuan_video": AutoencoderKLHunyuanVideo,
    "hunyuan_video15": AutoencoderKLHunyuanVideo15,
    "ltx2": lambda: AutoencoderKLLTX2Video(spatial_compression_ratio=32, temporal_compression_ratio=8),
    "qwen_image": AutoencoderKLQwenImage,
    "qwen_image_edit": AutoencoderKLQwenImage,
    "flux": lambda: AutoencoderKL(**KL),
    "flux_kontext": lambda: AutoencoderKL(**KL),
    "sd3": lambda: AutoencoderKL(**KL),
    "aura_flow": lambda: AutoencoderKL(**KL | {"latent_channels": 4}),
    "z_image": lambda: AutoencoderKL(**KL),
    "flux2_klein": AutoencoderKLFlux2,
}


def real(family: str, lora: bool, **arguments: Any) -> DiffusersPolicy:
    """A family's policy and decoder on the meta device, at 256 x 256 pixels; its sigma grid is the tiny build's."""

    def component(kind: type, path: str, name: str, dtype: torch.dtype) -> nn.Module:
        made: nn.Module = MODELS[MODEL[family]]["build"](None) if name.startswith("transformer") else VAES[family]()
        return made.to(dtype).eval()

    frames = {"frames": 9 if family == "ltx2" else 5} if FAMILIES[family].temporal_stride else {}
    with pytest.MonkeyPatch.context() as patch, torch.device("meta"):
        patch.setattr(pretrained, "load_component", component)
        path = str(tiny_builds.ensure(family))
        policy = FAMILIES[family](path, 256, 256, lora=LORA if lora else None, **(frames | arguments))
        assert policy._vae is not None
    return policy


def place(module: nn.Module, device: torch.device) -> None:
    """Replace every tensor of `module` by an empty one on `device`; fake ones inside a FakeTensorMode."""

    def empty(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(empty(parameter), requires_grad=parameter.requires_grad)
        for store in (part._buffers, part.__dict__):
            store |= {name: empty(value) for name, value in store.items() if isinstance(value, Tensor)}


def plainly(module: nn.Module, change: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
    """`nn.Module._apply` without swapping tensors in place, which fake ones refuse."""
    for owner in module.modules():
        for name, value in owner._parameters.items():
            if value is not None:
                owner._parameters[name] = nn.Parameter(change(value.detach()), value.requires_grad)
        owner._buffers.update({n: change(value) for n, value in owner._buffers.items() if value is not None})
    return module
