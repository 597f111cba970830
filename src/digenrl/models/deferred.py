"""A network that is built without memory, sharded, and only then given its values. No rank ever
holds all of them.

    empty: parameters on the meta device  ->  strategy: shard  ->  fill: memory for this rank's
    part, its rows read

Every rank reads its own rows of each tensor from the checkpoint. The page cache serves all ranks of
a node, so the file is read from disk once. Adapters are drawn again, from the same seed as when
they were injected.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache, partial
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from accelerate import init_empty_weights
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from digenrl.models import pretrained
from digenrl.models.lora import LoraSpec, first_factor

if TYPE_CHECKING:
    from diffusers import ModelMixin

_FILE = "diffusion_pytorch_model.safetensors"


def build_empty(
    component: type[ModelMixin], path: str, subfolder: str, dtype: torch.dtype
) -> nn.Module:
    """Return the network that `pretrained.load_component` gives, in its dtypes, without values.

    Raises:
        PretrainedError: its configuration is not on this machine.
    """
    config = pretrained.component_config(component, path, subfolder)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # as from_pretrained builds
    try:
        with init_empty_weights(include_buffers=False):  # what modules compute when built is real
            network: nn.Module = component.from_config(config)
    finally:
        torch.set_default_dtype(usual)
    # Layers that diffusers keeps in fp32, whatever dtype is asked for.
    exact = set(getattr(network, "_keep_in_fp32_modules", None) or ())
    for name, tensor in [*network.named_parameters(), *_kept_buffers(network)]:
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if exact & set(name.split(".")) else dtype)
    return network.eval()


@torch.no_grad()
def fill_parameters(
    network: nn.Module,
    path: str,
    subfolders: Mapping[str, str],
    lora: LoraSpec | None,
    device: torch.device,
    loaded: Mapping[str, tuple[Tensor, Tensor]] | None = None,
) -> None:
    """Allocate every parameter of `network` that has no memory on `device`, and read this rank's
    part of its values.

    Args:
        subfolders: subfolder of the checkpoint -> prefix of its tensors' names in `network`.
        loaded: factors of the adapter's layers, by layer; None: they are drawn from the seed.

    Raises:
        PretrainedError: the checkpoint is absent, lacks a tensor, or has a tensor of another shape.
    """
    network._apply(
        # empty_like of a sharded tensor takes memory for the local part alone.
        lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor
    )
    stored = {prefix: _Stored(path, subfolder) for subfolder, prefix in subfolders.items()}
    factors = {} if lora is None else dict(_adapter_factors(network, lora, loaded))
    for name, parameter in [*network.named_parameters(), *_kept_buffers(network)]:
        if name in factors:
            _copy_rows(parameter, factors.pop(name))
        else:
            prefix = next(prefix for prefix in stored if name.startswith(prefix))
            # Under an adapter peft has moved the layer's own weight.
            original = name.removeprefix(prefix).replace(".base_layer.", ".")
            _copy_rows(parameter, stored[prefix].open_tensor(original, tuple(parameter.shape)))
    for name, (down, up) in (loaded or {}).items():
        layer: Any = network.get_submodule(name)
        if layer.start_a is not None:  # the reference is what was loaded
            layer.start_a.copy_(down)
            layer.start_b.copy_(up)


def _adapter_factors(
    network: nn.Module,
    lora: LoraSpec,
    loaded: Mapping[str, tuple[Tensor, Tensor]] | None,
) -> Iterator[tuple[str, Tensor]]:
    for name, (down, up) in (loaded or {}).items():
        yield f"{name}.lora_A.default.weight", down
        yield f"{name}.lora_B.default.weight", up
    if loaded is not None:
        return
    layers: list[tuple[str, Any]] = [
        pair for pair in network.named_modules() if isinstance(pair[1], BaseTunerLayer)
    ]
    for name, layer in layers:
        a = first_factor(lora, name, layer.in_features)
        a = a.to(layer.get_base_layer().weight.dtype)  # which an adapter first gets from peft
        yield f"{name}.lora_A.default.weight", a
        yield f"{name}.lora_B.default.weight", torch.zeros(layer.out_features, lora.rank)


def _kept_buffers(network: nn.Module) -> list[tuple[str, Tensor]]:
    """Buffers that a checkpoint holds."""
    held = network.state_dict()
    return [(name, buffer) for name, buffer in network.named_buffers() if name in held]


class Rows(Protocol):
    """Rows to read: a tensor, or a tensor of a file (`safe_open.get_slice`)."""

    def __getitem__(self, rows: slice | EllipsisType, /) -> Tensor: ...


def _copy_rows(target: Tensor, source: Rows) -> None:
    """Copy into `target`, or into its local rows if it is sharded."""
    start, local = 0, target
    if isinstance(target, DTensor):
        local = target.to_local()
        # The first dimension is sharded, so a shard is a run of rows.
        _, (start, *_) = compute_local_shape_and_global_offset(
            target.shape, target.device_mesh, target.placements
        )
    # A small tensor may have no rows for this rank.
    if local.numel():
        local.copy_(source[start : start + local.shape[0]] if local.dim() else source[...])


class _Stored:
    """Tensors of a diffusers component in safetensors, by name. Rows can be read without the
    rest."""

    def __init__(self, path: str, subfolder: str) -> None:
        self._path, self._folder = path, pretrained.folder_of(path, subfolder) / subfolder
        index = self._folder / f"{_FILE}.index.json"
        self._files: Mapping[str, str] = (
            json.loads(index.read_text())["weight_map"] if index.is_file() else {}
        )
        # Every file is opened once.
        self._open = cache(partial(safe_open, framework="pt"))

    def open_tensor(self, name: str, shape: tuple[int, ...]) -> Rows:
        """Return the rows of one tensor, none of them read yet.

        Raises:
            PretrainedError: see `fill_parameters`.
        """
        file = self._folder / self._files.get(name, _FILE)
        try:
            if not file.is_file():  # a pipe would be waited for
                raise FileNotFoundError("no such file")
            rows = self._open(file).get_slice(name)
        except Exception as error:  # OSError without the file, SafetensorError without the tensor
            wanted, reason = f"{self._folder.name}/{file.name}", f"{name}: {error}"[:200]
            raise pretrained.missing_error(self._path, wanted, reason) from error
        if tuple(rows.get_shape()) != shape:
            raise pretrained.PretrainedError(
                f"{self._path}/{self._folder.name} has {name} in shape {tuple(rows.get_shape())}, "
                f"the network takes {shape}: half a checkpoint, or another architecture; fetch it "
                f"again with `hf download {self._path}`"
            )
        found: Rows = rows
        return found
