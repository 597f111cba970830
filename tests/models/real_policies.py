"""Policies of all families at published size: on the meta device, or as fake tensors on a GPU that
does not exist.

Fake tensors have shapes, dtypes and devices, and no values; a backward pass over them would ask for
a driver.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import _families
from digenrl.models import pretrained
from digenrl.models import tiny as tiny_builds
from digenrl.models.lora import LoraKeys
from digenrl.models.pipeline import DiffusersPolicy
from tests.models.tiny_policies import FACTS, FAMILIES, size

LORA: LoraKeys = {"rank": 64, "alpha": 128, "targets": "attention_ff"}


def real(family: str, lora: bool, **arguments: Any) -> DiffusersPolicy:
    """A family's policy and decoder on the meta device, at 256 x 256 pixels; its sigma grid is the
    tiny build's."""

    def component(kind: type, path: str, name: str, dtype: torch.dtype) -> nn.Module:
        if name == "vae":
            return _families.decoder(FACTS[family]).to(dtype).eval()
        model = next(iter(FACTS[family].models))
        sizes = FACTS[family].models[model]["network"]
        made: nn.Module = FAMILIES[family].transformer_class(**sizes)
        return made.to(dtype).eval()

    path = str(tiny_builds.ensure(family))
    frames = (
        {"frames": size(family)["frames"]} if FAMILIES[family].codec_class.temporal_stride else {}
    )
    with pytest.MonkeyPatch.context() as patch, torch.device("meta"):
        patch.setattr(pretrained, "load_component", component)
        policy = FAMILIES[family](
            path, 256, 256, lora=LORA if lora else None, **(frames | arguments)
        )
        assert policy.codec._vae is not None
    return policy


def place(module: nn.Module, device: torch.device) -> None:
    """Replace every tensor of `module` by an empty one on `device`; fake ones inside a
    FakeTensorMode."""

    def empty(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(
                    empty(parameter), requires_grad=parameter.requires_grad
                )
        for store in (part._buffers, part.__dict__):
            store |= {
                name: empty(value) for name, value in store.items() if isinstance(value, Tensor)
            }


def plainly(module: nn.Module, change: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
    """`nn.Module._apply` without swapping tensors in place, which fake ones refuse."""
    for owner in module.modules():
        for name, value in owner._parameters.items():
            if value is not None:
                owner._parameters[name] = nn.Parameter(change(value.detach()), value.requires_grad)
        owner._buffers.update(
            {n: change(value) for n, value in owner._buffers.items() if value is not None}
        )
    return module


def decoder_moves(family: str, tasks: int) -> list[torch.device]:
    """Return the devices to which the decoder moves while `tasks` samples are decoded one by one.
    The decoder begins on the host, encoders are off-loaded, and the GPU does not exist."""
    policy, moved = real(family, True, offload_encoders=True), list[torch.device]()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        place(policy, torch.device("cuda", 0))
        place(policy.codec._vae, torch.device("cpu"))

        def to(device: Any) -> Any:
            moved.append(torch.device(device))
            place(policy.codec._vae, torch.device(device))
            return policy.codec._vae

        policy.codec._vae.to = to
        for _ in range(tasks):
            policy.codec.decode(
                torch.empty(1, *policy.latent_shape, device=torch.device("cuda", 0))
            )
    return moved
