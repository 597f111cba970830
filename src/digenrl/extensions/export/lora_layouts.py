"""LoRA factors under the names of the models' own checkpoints, which ComfyUI and kohya's tools read.

diffusers splits layers that FLUX.1 and SD3.5 hold as one (queries, keys, values). Their adapters become one adapter
again: the down factors one above the other, the up factors on a block diagonal, alpha times their number, which is the
same update.
Sources: the converters in diffusers.loaders (lora_conversion_utils, single_file_utils), read backwards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

LAYOUTS = {"comfyui": ("diffusion_model.", "."), "kohya": ("lora_unet_", "_")}
"""Layout -> prefix of a layer's name, and what separates its parts."""
_QKV, _ADDED = ("attn.to_q", "attn.to_k", "attn.to_v"), ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
_FLUX: dict[str, dict[tuple[str, ...], str]] = {
    r"transformer_blocks\.(\d+)\.": {
        _QKV: "double_blocks.{}.img_attn.qkv",
        _ADDED: "double_blocks.{}.txt_attn.qkv",
        ("attn.to_out.0",): "double_blocks.{}.img_attn.proj",
        ("attn.to_add_out",): "double_blocks.{}.txt_attn.proj",
        ("ff.net.0.proj",): "double_blocks.{}.img_mlp.0",
        ("ff.net.2",): "double_blocks.{}.img_mlp.2",
        ("ff_context.net.0.proj",): "double_blocks.{}.txt_mlp.0",
        ("ff_context.net.2",): "double_blocks.{}.txt_mlp.2",
    },
    r"single_transformer_blocks\.(\d+)\.": {
        (*_QKV, "proj_mlp"): "single_blocks.{}.linear1",
        ("proj_out",): "single_blocks.{}.linear2",
    },
}
_SD3: dict[str, dict[tuple[str, ...], str]] = {
    r"transformer_blocks\.(\d+)\.": {
        _QKV: "joint_blocks.{}.x_block.attn.qkv",
        _ADDED: "joint_blocks.{}.context_block.attn.qkv",
        ("attn2.to_q", "attn2.to_k", "attn2.to_v"): "joint_blocks.{}.x_block.attn2.qkv",
        ("attn.to_out.0",): "joint_blocks.{}.x_block.attn.proj",
        ("attn.to_add_out",): "joint_blocks.{}.context_block.attn.proj",
        ("attn2.to_out.0",): "joint_blocks.{}.x_block.attn2.proj",
        ("ff.net.0.proj",): "joint_blocks.{}.x_block.mlp.fc1",
        ("ff.net.2",): "joint_blocks.{}.x_block.mlp.fc2",
        ("ff_context.net.0.proj",): "joint_blocks.{}.context_block.mlp.fc1",
        ("ff_context.net.2",): "joint_blocks.{}.context_block.mlp.fc2",
    }
}
_WAN: dict[str, dict[tuple[str, ...], str]] = {
    r"blocks\.(\d+)\.": {
        **{
            (f"attn{number}.{ours}",): f"blocks.{{}}.{part}.{theirs}"
            for number, part in ((1, "self_attn"), (2, "cross_attn"))
            for ours, theirs in (("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "o"))
        },
        ("attn2.add_k_proj",): "blocks.{}.cross_attn.k_img",
        ("attn2.add_v_proj",): "blocks.{}.cross_attn.v_img",
        ("ffn.net.0.proj",): "blocks.{}.ffn.0",
        ("ffn.net.2",): "blocks.{}.ffn.2",
    }
}
NAMES: dict[str, dict[str, dict[tuple[str, ...], str]]] = {
    "FluxTransformer2DModel": _FLUX,
    "LTX2VideoTransformer3DModel": {},
    "QwenImageTransformer2DModel": {},
    "SD3Transformer2DModel": _SD3,
    "WanTransformer3DModel": _WAN,
}
"""Transformer class -> block's name in diffusers -> its layers, split or not -> the checkpoint's layer; {}: the same
names."""
_WIDER = {"proj_mlp": 4}
"""Layers that are wider than the others of their group, by this factor."""


def in_layout(layers: Mapping[str, Tensor], alpha: float, network: str, layout: str) -> dict[str, Tensor]:
    """`LAYER.lora_A.weight` [r, in] and `LAYER.lora_B.weight` [out, r] of diffusers -> lora_down, lora_up and alpha.

    Args:
        network: class of the transformer.
        layout: key of `LAYOUTS`.

    Raises:
        ValueError: names of such a network, or of one of its layers, are not known.
    """
    if network not in NAMES:
        raise ValueError(f"the names of {network} in other tools are not known here, only of {', '.join(NAMES)}")
    prefix, separator = LAYOUTS[layout]
    left = {name.removesuffix(".lora_A.weight") for name in layers if name.endswith(".lora_A.weight")}
    found: dict[str, Tensor] = {}
    while left:
        group, target = _group(min(left), NAMES[network])
        down, up = _joined([_factors(layers, name) for name in group], [_WIDER.get(n.split(".")[-1], 1) for n in group])
        base = prefix + target.replace(".", separator)
        found[f"{base}.lora_down.weight"], found[f"{base}.lora_up.weight"] = down, up
        found[f"{base}.alpha"] = torch.tensor(float(alpha) * len(group))
        left -= set(group)
    return found


def _group(layer: str, names: Mapping[str, Mapping[tuple[str, ...], str]]) -> tuple[list[str], str]:
    """Layers that are one in the checkpoint, in its order, and its name for them."""
    if not names:
        return [layer], layer
    for pattern, groups in names.items():
        if block := re.match(pattern, layer):
            for members, target in groups.items():
                if layer[block.end() :] in members:
                    return [block[0] + member for member in members], target.format(block[1])
    raise ValueError(f"the name of layer {layer} in other tools is not known; train model.lora.targets=attention_ff")


def _factors(layers: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor] | None:
    if f"{name}.lora_A.weight" not in layers:
        return None
    return layers[f"{name}.lora_A.weight"], layers[f"{name}.lora_B.weight"]


def _joined(parts: list[tuple[Tensor, Tensor] | None], widths: list[int]) -> tuple[Tensor, Tensor]:
    """(down, up) of all parts; one that has no adapter is zero."""
    down, up = next(part for part in parts if part is not None)
    unit = next(part[1].shape[0] // width for part, width in zip(parts, widths, strict=True) if part is not None)
    whole = [
        part or (torch.zeros_like(down), up.new_zeros(unit * width, up.shape[1]))
        for part, width in zip(parts, widths, strict=True)
    ]
    return torch.cat([a for a, _ in whole]), torch.block_diag(*(b for _, b in whole))
