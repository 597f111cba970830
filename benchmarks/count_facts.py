"""Count what the planner's cost and memory model needs, and write it to src/digenrl/simulate/facts.json.

`python benchmarks/count_facts.py [model ...]` (default: all): parameters and LoRA parameters on the meta device at real
size; bytes saved for the backward pass with `saved_tensors_hooks` on builds of a quarter of the width and few blocks
(CPU, bf16; they are proportional to the width); FLOPs of one forward and of one decode with torch's flop counter on the
meta device. A few minutes on one core, no download.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLWan,
    FluxTransformer2DModel,
    HunyuanVideoTransformer3DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    WanTransformer3DModel,
)
from peft import LoraConfig
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

ATTENTION = r"(attn[12]?\.)(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)"
FEED_FORWARD = r"(ff|ff_context|ffn|img_mlp|txt_mlp)\.net\.(0\.proj|2)"
SCALE = 4
"""Divides the width of the builds whose saved bytes are counted."""
TARGETS = {"attn": rf".*blocks\.\d+\.{ATTENTION}", "attn_ff": rf".*blocks\.\d+\.({ATTENTION}|{FEED_FORWARD})"}


def wan(hidden: int, ffn: int, layers: int) -> Callable[..., nn.Module]:
    def build(blocks: int | None, scale: int = 1) -> nn.Module:
        return WanTransformer3DModel(
            num_attention_heads=hidden // 128 // scale,
            ffn_dim=ffn // scale,
            num_layers=blocks or layers,
            attention_head_dim=128,
        )

    return build


def wan_inputs(b: int, f: int, h: int, w: int, text: int, model: nn.Module) -> dict[str, Tensor]:
    return {
        "hidden_states": torch.zeros(b, 16, f, h, w),
        "timestep": torch.full((b,), 500.0),
        "encoder_hidden_states": torch.zeros(b, text, 4096),
    }


def hunyuan_inputs(b: int, f: int, h: int, w: int, text: int, model: nn.Module) -> dict[str, Tensor]:
    return {
        "hidden_states": torch.zeros(b, 16, f, h, w),
        "timestep": torch.full((b,), 500),
        "encoder_hidden_states": torch.zeros(b, text, 4096),
        "encoder_attention_mask": torch.ones(b, text, dtype=torch.bool),
        "pooled_projections": torch.zeros(b, 768),
        "guidance": torch.full((b,), 6000.0),
    }


def flux_inputs(b: int, f: int, h: int, w: int, text: int, model: nn.Module) -> dict[str, Tensor]:
    return {
        "hidden_states": torch.zeros(b, h * w // 4, 64),
        "timestep": torch.full((b,), 0.5),
        "guidance": torch.full((b,), 3.5),
        "encoder_hidden_states": torch.zeros(b, text, 4096),
        "pooled_projections": torch.zeros(b, 768),
        "img_ids": torch.zeros(h * w // 4, 3),
        "txt_ids": torch.zeros(text, 3),
    }


def sd3_inputs(b: int, f: int, h: int, w: int, text: int, model: nn.Module) -> dict[str, Tensor]:
    return {
        "hidden_states": torch.zeros(b, 16, h, w),
        "timestep": torch.full((b,), 500.0),
        "encoder_hidden_states": torch.zeros(b, text, 4096),
        "pooled_projections": torch.zeros(b, 2048),
    }


def qwen_inputs(b: int, f: int, h: int, w: int, text: int, model: nn.Module) -> dict[str, Any]:
    return {
        "hidden_states": torch.zeros(b, h * w // 4, 64),
        "timestep": torch.full((b,), 0.5),
        "encoder_hidden_states": torch.zeros(b, text, 3584),
        "encoder_hidden_states_mask": None,
        "img_shapes": [[(1, h // 2, w // 2)]] * b,
    }


def flux(blocks: int | None, scale: int = 1) -> nn.Module:
    singles = 2 * blocks if blocks else 38
    return FluxTransformer2DModel(
        num_layers=blocks or 19, num_single_layers=singles, num_attention_heads=24 // scale, guidance_embeds=True
    )


def hunyuan(blocks: int | None, scale: int = 1) -> nn.Module:
    singles = 2 * blocks if blocks else 40
    return HunyuanVideoTransformer3DModel(
        num_layers=blocks or 20, num_single_layers=singles, num_attention_heads=24 // scale
    )


def qwen(blocks: int | None, scale: int = 1) -> nn.Module:
    return QwenImageTransformer2DModel(num_layers=blocks or 60, num_attention_heads=24 // scale)


def sd35_medium(blocks: int | None, scale: int = 1) -> nn.Module:
    layers = blocks or 24
    return SD3Transformer2DModel(
        sample_size=128,
        num_layers=layers,
        num_attention_heads=24 // scale,
        attention_head_dim=64,
        caption_projection_dim=1536 // scale,
        joint_attention_dim=4096,
        pooled_projection_dim=2048,
        pos_embed_max_size=384,
        dual_attention_layers=tuple(range(13 if blocks is None else max(1, round(layers * 13 / 24)))),
        qk_norm="rms_norm",
    )


MODELS: dict[str, dict[str, Any]] = {
    "wan21_14b": {"build": wan(5120, 13824, 40), "inputs": wan_inputs, "blocks": 40, "hidden": 5120,
                  "attention_blocks": 40, "text": 512, "joint": False, "points": [(9, 30, 52), (9, 60, 104)]},
    "wan21_1_3b": {"build": wan(1536, 8960, 30), "inputs": wan_inputs, "blocks": 30, "hidden": 1536,
                   "attention_blocks": 30, "text": 512, "joint": False, "points": [(9, 30, 52), (9, 60, 104)]},
    "hunyuan_video": {"build": hunyuan, "inputs": hunyuan_inputs, "blocks": 20, "hidden": 3072,
                      "attention_blocks": 60, "text": 256, "joint": True, "points": [(14, 60, 60), (9, 60, 104)]},
    "flux1_dev": {"build": flux, "inputs": flux_inputs, "blocks": 19, "hidden": 3072,
                  "attention_blocks": 57, "text": 512, "joint": True, "points": [(1, 64, 64), (1, 128, 128)]},
    "qwen_image": {"build": qwen, "inputs": qwen_inputs, "blocks": 60, "hidden": 3072,
                   "attention_blocks": 60, "text": 128, "joint": True, "points": [(1, 64, 64), (1, 128, 128)]},
    "sd35_medium": {"build": sd35_medium, "inputs": sd3_inputs, "blocks": 24, "hidden": 1536,
                    "attention_blocks": 37, "text": 205, "joint": True, "points": [(1, 64, 64), (1, 128, 128)]},
}  # fmt: skip


def lora_per_rank(model: nn.Module, pattern: str) -> int:
    """LoRA parameters per unit of rank: sum of (in + out) over the target layers."""
    chosen = [m for name, m in model.named_modules() if isinstance(m, nn.Linear) and re.fullmatch(pattern, name)]
    return sum(m.in_features + m.out_features for m in chosen)


def flops(model: nn.Module, inputs: dict[str, Any]) -> float:
    """FLOPs of one forward, attention included (meta device)."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**inputs, return_dict=False)
    return float(counter.get_total_flops())


def saved_bytes(model: nn.Module, inputs: dict[str, Any]) -> int:
    """Unique bytes that autograd keeps for the backward pass, parameters excluded."""
    owned = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, int] = {}
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            seen[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**inputs, return_dict=False)[0].float().sum()
    return sum(seen.values())


def activations(entry: dict[str, Any], lora: bool) -> dict[str, float]:
    """Saved bytes per latent and per text token of one unit of blocks, by differences of builds in bf16."""

    def measure(blocks: int, side: int, text: int) -> int:
        model = entry["build"](blocks, SCALE).bfloat16()
        if lora:
            model.requires_grad_(False)
            model.add_adapter(LoraConfig(r=32 // SCALE, lora_alpha=64, target_modules=TARGETS["attn_ff"]))
            model = model.bfloat16()
        model.train()
        inputs = entry["inputs"](1, 1, side, side, text, model)
        inputs = {
            key: item.bfloat16() if isinstance(item, Tensor) and item.is_floating_point() and item.dim() > 1 else item
            for key, item in inputs.items()
        }
        return saved_bytes(model, inputs)

    base = measure(2, 16, 64) - measure(1, 16, 64)  # 64 tokens, 64 text
    more_image = measure(2, 32, 64) - measure(1, 32, 64)  # 256 tokens
    more_text = measure(2, 16, 256) - measure(1, 16, 256)
    per_token = (more_image - base) / 192
    per_text = (more_text - base) / 192
    fixed = base - 64 * per_token - 64 * per_text
    return {"token": SCALE * per_token, "text": SCALE * per_text, "fixed": SCALE * fixed}


def model_facts(name: str) -> dict[str, Any]:
    entry = MODELS[name]
    with torch.device("meta"):
        model = entry["build"](None)
        points = []
        for f, h, w in entry["points"]:
            inputs = entry["inputs"](1, f, h, w, entry["text"], model)
            points.append({"tokens": f * h * w // 4, "flops": flops(model, inputs)})
    lists = [part for part in model.children() if isinstance(part, nn.ModuleList)]
    heaviest = max(sum(p.numel() for p in block.parameters()) for part in lists for block in part)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "largest_block_parameters": heaviest,
        "tensors": sum(1 for _ in model.parameters()),
        "lora_parameters_per_rank": {key: lora_per_rank(model, pattern) for key, pattern in TARGETS.items()},
        "blocks": entry["blocks"],
        "hidden": entry["hidden"],
        "attention_blocks": entry["attention_blocks"],
        "text_tokens": entry["text"],
        "joint_attention": entry["joint"],
        "flops": points,
        "saved_bytes_per_block": {"full": activations(entry, False), "lora": activations(entry, True)},
    }


def decode_flops() -> dict[str, Any]:
    """FLOPs of one VAE decode per latent pixel and output frame."""
    with torch.device("meta"):
        image = AutoencoderKL(
            block_out_channels=(128, 256, 512, 512),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=2,
            latent_channels=16,
            use_quant_conv=False,
            use_post_quant_conv=False,
        )
        cases = {
            "flux": (image, torch.empty(1, 16, 64, 64), 1),
            "wan_image": (AutoencoderKLWan(), torch.empty(1, 16, 1, 64, 64), 1),
            "wan": (AutoencoderKLWan(), torch.empty(1, 16, 9, 60, 104), 33),
            "hunyuan": (AutoencoderKLHunyuanVideo(), torch.empty(1, 16, 14, 60, 60), 53),
        }
        table = {}
        for name, (vae, latents, frames) in cases.items():
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                vae.decode(latents)
            pixels = latents.shape[-1] * latents.shape[-2]
            table[name] = {
                "parameters": sum(p.numel() for p in vae.parameters()),
                "flops_per_latent_pixel_frame": counter.get_total_flops() / pixels / frames,
            }
    return table


def main() -> None:
    torch.set_num_threads(1)
    path = Path(__file__).parents[1] / "src/digenrl/simulate/facts.json"
    facts: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    facts["source"] = "python benchmarks/count_facts.py; encoders and rewards: parameters as published, see costs.py"
    facts["vae"] = decode_flops()
    facts.setdefault("models", {})
    for name in sys.argv[1:] or MODELS:
        facts["models"][name] = model_facts(name)
        print(name, json.dumps(facts["models"][name]), flush=True)
        path.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
