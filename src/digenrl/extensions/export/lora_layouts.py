"""Write LoRA factors under the names of the models' own checkpoints, which ComfyUI and kohya's
tools read.

diffusers splits some layers that a checkpoint holds as one (queries, keys, values). Their adapters
become one adapter again. The down factors are stacked, the up factors form a block diagonal, and
alpha is multiplied by their number. This gives the same update.

Sources: the converters in diffusers.loaders (lora_conversion_utils, single_file_utils), read
backwards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from digenrl.models.lora import Names

LAYOUTS = {"comfyui": ("diffusion_model.", "."), "kohya": ("lora_unet_", "_")}
"""Layout -> (prefix of a layer's name, separator of its parts)."""
_WIDER = {"proj_mlp": 4}
"""Layers that are wider than the others of their group, by this factor."""


def in_layout(
    layers: Mapping[str, Tensor],
    alpha: float,
    names: Names | None,
    layout: str,
    swapped: tuple[str, ...] = (),
) -> dict[str, Tensor]:
    """Return `LAYER.lora_A.weight` [r, in] and `LAYER.lora_B.weight` [out, r] as lora_down, lora_up
    and alpha.

    Args:
        names: `checkpoint_names` of the adapter's family.
        layout: key of `LAYOUTS`.
        swapped: `swapped_halves` of the family.

    Raises:
        ValueError: the names of the family or of one of its layers are not known.
    """
    if names is None:
        raise ValueError(
            "the names of this family's layers in other tools are not known (checkpoint_names is "
            "None)"
        )
    prefix, separator = LAYOUTS[layout]
    left = {
        name.removesuffix(".lora_A.weight") for name in layers if name.endswith(".lora_A.weight")
    }
    found: dict[str, Tensor] = {}
    while left:
        group, target = _checkpoint_group(min(left), names)
        down, up = _join_factors(
            [_layer_factors(layers, name) for name in group],
            [_WIDER.get(n.split(".")[-1], 1) for n in group],
        )
        if group[0].endswith(swapped):
            up = torch.cat(up.chunk(2)[::-1])
        base = prefix + target.replace(".", separator)
        found[f"{base}.lora_down.weight"], found[f"{base}.lora_up.weight"] = down, up
        found[f"{base}.alpha"] = torch.tensor(float(alpha) * len(group))
        left -= set(group)
    return found


def _checkpoint_group(layer: str, names: Names) -> tuple[list[str], str]:
    """Return the layers that are one layer in the checkpoint, in its order, and the checkpoint's
    name for it."""
    if not names:
        return [layer], layer
    for pattern, groups in names.items():
        if block := re.match(pattern, layer):
            for members, target in groups.items():
                if layer[block.end() :] in members:
                    return [block[0] + member for member in members], target.format(block[1])
    raise ValueError(
        f"the name of layer {layer} in other tools is not known; train "
        "model.lora.targets=attention_ff"
    )


def _layer_factors(layers: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor] | None:
    if f"{name}.lora_A.weight" not in layers:
        return None
    return layers[f"{name}.lora_A.weight"], layers[f"{name}.lora_B.weight"]


def _join_factors(
    parts: list[tuple[Tensor, Tensor] | None], widths: list[int]
) -> tuple[Tensor, Tensor]:
    """Return (down, up) of all parts together; a part without an adapter is zero."""
    down, up = next(part for part in parts if part is not None)
    unit = next(
        part[1].shape[0] // width
        for part, width in zip(parts, widths, strict=True)
        if part is not None
    )
    whole = [
        part or (torch.zeros_like(down), up.new_zeros(unit * width, up.shape[1]))
        for part, width in zip(parts, widths, strict=True)
    ]
    return torch.cat([a for a, _ in whole]), torch.block_diag(*(b for _, b in whole))
