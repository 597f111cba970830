"""Count what the planner's cost and memory model needs, and write it to src/digenrl/extensions/planner/facts.json.

`python -m benchmarks.count_facts [model ...]` (default: all): parameters and LoRA parameters on the meta device at real
size; bytes that a forward keeps for its backward pass, by what is trained and what blocks keep (`digenrl.recompute`),
on fake tensors at real width; FLOPs of one forward and of one decode with torch's flop counter on the meta device. A
few minutes on one core, no download.
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
    AuraFlowTransformer2DModel,
    AutoencoderKL,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLHunyuanVideo15,
    AutoencoderKLLTX2Video,
    AutoencoderKLWan,
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    HunyuanVideoTransformer3DModel,
    LTX2VideoTransformer3DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    WanTransformer3DModel,
    ZImageTransformer2DModel,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.live_bytes import Bytes, count_bytes
from digenrl.extensions.zoo.hunyuan_video15 import HunyuanVideo15Transformer3DModel
from digenrl.models import checkpointing
from digenrl.models.experts import PARTS, Experts
from digenrl.models.lora import LoraSpec, inject_lora
from digenrl.recompute import ALL, MODES, parse_recompute

ATTENTION = (
    r"(attn[12]?|attention|audio_to_video_attn)\.(to_[qkv]|to_qkv_mlp_proj|to_out(\.0)?|add_[qkv]_proj|to_add_out)"
)
LINEAR = r"(net\.(0\.proj|2)|linear_(in|out|[12])|out_projection)"
FEED_FORWARD = rf"((ff|ff_context|ffn|img_mlp|txt_mlp)\.{LINEAR}|feed_forward\.w[123])"
CASES = ((1, 16, 64), (1, 32, 64), (1, 16, 256), (2, 16, 64))
"""(rows, latent side, text tokens) whose bytes give the four coefficients."""
MANY_TOKENS = (1, 64, 64)
"""The case whose FLOPs are counted: in earnest there are far more latent tokens than text tokens."""
RANK = 64
"""Of the adapters whose activations are counted."""
LISTS = r"(.*blocks|layers)\.\d+\."
TARGETS = {"attn": f"{LISTS}{ATTENTION}", "attn_ff": f"{LISTS}({ATTENTION}|{FEED_FORWARD})"}


def wan(hidden: int, ffn: int, layers: int) -> Callable[..., nn.Module]:
    def build(blocks: int | None) -> nn.Module:
        return WanTransformer3DModel(
            num_attention_heads=hidden // 128,
            ffn_dim=ffn,
            num_layers=blocks or layers,
            attention_head_dim=128,
        )

    return build


def wan_i2v(blocks: int | None) -> nn.Module:
    return WanTransformer3DModel(
        num_attention_heads=40,
        ffn_dim=13824,
        num_layers=blocks or 40,
        in_channels=36,
        out_channels=16,
        image_dim=1280,
        added_kv_proj_dim=5120,
    )


def wan22(blocks: int | None) -> nn.Module:
    """Two experts, of which a forward takes the first."""
    return Experts(*(wan(5120, 13824, 40)(blocks) for _ in PARTS), boundary=None)


def wan_inputs(b: int, f: int, h: int, w: int, text: int, model: nn.Module) -> dict[str, Tensor]:
    return {
        "hidden_states": torch.zeros(b, 16, f, h, w),
        "timestep": torch.full((b,), 500.0),
        "encoder_hidden_states": torch.zeros(b, text, 4096),
    }


def wan_i2v_inputs(b: int, f: int, h: int, w: int, text: int, model: nn.Module) -> dict[str, Tensor]:
    """The network takes no other number of text tokens than 512: here they belong to a row."""
    more = {"encoder_hidden_states_image": torch.zeros(b, 257, 1280), "hidden_states": torch.zeros(b, 36, f, h, w)}
    return wan_inputs(b, f, h, w, 512, model) | more


def hunyuan_inputs(b: int, f: int, h: int, w: int, text: int, model: nn.Module) -> dict[str, Tensor]:
    return {
        "hidden_states": torch.zeros(b, 16, f, h, w),
        "timestep": torch.full((b,), 500),
        "encoder_hidden_states": torch.zeros(b, text, 4096),
        "encoder_attention_mask": torch.ones(b, text, dtype=torch.bool),
        "pooled_projections": torch.zeros(b, 768),
        "guidance": torch.full((b,), 6000.0),
    }


def hunyuan15_inputs(b: int, f: int, h: int, w: int, text: int, model: nn.Module) -> dict[str, Tensor]:
    """A latent pixel is a token, and stands for two by two of the others'."""
    return {
        "hidden_states": torch.zeros(b, 65, f, h // 2, w // 2),
        "timestep": torch.full((b,), 500.0),
        "text": torch.zeros(b, text, 3584),
        "glyph_text": torch.zeros(b, 0, 1472),
    }


def ltx2_inputs(b: int, f: int, h: int, w: int, text: int, model: nn.Module) -> dict[str, Any]:
    """A latent of video is a token, and stands for two by two of the others'; one of its frames lasts as long as eight
    and a third of sound."""
    sound = round(f * 25 / 3)
    return {
        "hidden_states": torch.zeros(b, f * h * w // 4, 128),
        "audio_hidden_states": torch.zeros(b, sound, 128),
        "encoder_hidden_states": torch.zeros(b, text, 3840),
        "audio_encoder_hidden_states": torch.zeros(b, text, 3840),
        "timestep": torch.full((b,), 500.0),
        "num_frames": f,
        "height": h // 2,
        "width": w // 2,
        "audio_num_frames": sound,
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


def kontext_inputs(b: int, f: int, h: int, w: int, text: int, model: nn.Module) -> dict[str, Tensor]:
    """Each token of the noise has one of the image beside it."""
    return flux_inputs(b, f, 2 * h, w, text, model)


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


def qwen_edit_inputs(b: int, f: int, h: int, w: int, text: int, model: nn.Module) -> dict[str, Any]:
    """Each token of the noise has one of the image beside it."""
    both = {"hidden_states": torch.zeros(b, h * w // 2, 64), "img_shapes": [[(1, h // 2, w // 2)] * 2] * b}
    return qwen_inputs(b, f, h, w, text, model) | both


def z_image_inputs(b: int, f: int, h: int, w: int, text: int, model: nn.Module) -> dict[str, Any]:
    return {
        "x": list(torch.zeros(b, 16, 1, h, w)),
        "t": torch.full((b,), 0.5),
        "cap_feats": list(torch.zeros(b, text, 2560)),
    }


def z_image(blocks: int | None) -> nn.Module:
    return ZImageTransformer2DModel(n_layers=blocks or 30)


def aura_flow_inputs(b: int, f: int, h: int, w: int, text: int, model: nn.Module) -> dict[str, Tensor]:
    return {
        "hidden_states": torch.zeros(b, 4, h, w),
        "timestep": torch.full((b,), 0.5),
        "encoder_hidden_states": torch.zeros(b, text, 2048),
    }


def aura_flow(blocks: int | None) -> nn.Module:
    singles = 8 * blocks if blocks else 32
    return AuraFlowTransformer2DModel(
        num_mmdit_layers=blocks or 4, num_single_dit_layers=singles, pos_embed_max_size=9216
    )


def flux2_inputs(b: int, f: int, h: int, w: int, text: int, model: nn.Module) -> dict[str, Any]:
    return {
        "hidden_states": torch.zeros(b, h * w // 4, 128),
        "timestep": torch.full((b,), 0.5),
        "guidance": None,
        "encoder_hidden_states": torch.zeros(b, text, 7680),
        "img_ids": torch.zeros(h * w // 4, 4),
        "txt_ids": torch.zeros(text, 4),
    }


def flux2_klein(blocks: int | None) -> nn.Module:
    return Flux2Transformer2DModel(
        num_layers=blocks or 5,
        num_single_layers=4 * blocks if blocks else 20,
        num_attention_heads=24,
        joint_attention_dim=7680,
        guidance_embeds=False,
    )


def flux(blocks: int | None) -> nn.Module:
    singles = 2 * blocks if blocks else 38
    return FluxTransformer2DModel(
        num_layers=blocks or 19, num_single_layers=singles, num_attention_heads=24, guidance_embeds=True
    )


def hunyuan(blocks: int | None) -> nn.Module:
    singles = 2 * blocks if blocks else 40
    return HunyuanVideoTransformer3DModel(num_layers=blocks or 20, num_single_layers=singles, num_attention_heads=24)


def hunyuan15(blocks: int | None) -> nn.Module:
    return HunyuanVideo15Transformer3DModel(num_layers=blocks or 54, task_type="t2v")


def ltx2(blocks: int | None) -> nn.Module:
    return LTX2VideoTransformer3DModel(num_layers=blocks or 48, rope_type="split")


def qwen(blocks: int | None) -> nn.Module:
    return QwenImageTransformer2DModel(num_layers=blocks or 60, num_attention_heads=24)


def sd35_medium(blocks: int | None) -> nn.Module:
    layers = blocks or 24
    return SD3Transformer2DModel(
        sample_size=128,
        num_layers=layers,
        num_attention_heads=24,
        attention_head_dim=64,
        caption_projection_dim=1536,
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
    "wan22_a14b": {"build": wan22, "inputs": wan_inputs, "blocks": 40, "hidden": 5120,
                   "attention_blocks": 40, "text": 512, "joint": False, "points": [(9, 30, 52), (9, 60, 104)]},
    "wan21_i2v_14b": {"build": wan_i2v, "inputs": wan_i2v_inputs, "blocks": 40, "hidden": 5120,
                      "attention_blocks": 40, "text": 512, "joint": False, "points": [(9, 30, 52), (9, 60, 104)]},
    "hunyuan_video": {"build": hunyuan, "inputs": hunyuan_inputs, "blocks": 20, "hidden": 3072,
                      "attention_blocks": 60, "text": 256, "joint": True, "points": [(14, 60, 60), (9, 60, 104)]},
    "hunyuan_video15": {"build": hunyuan15, "inputs": hunyuan15_inputs, "blocks": 54, "hidden": 2048,
                        "attention_blocks": 54, "text": 128, "joint": True, "points": [(9, 30, 52), (9, 60, 104)]},
    "ltx2": {"build": ltx2, "inputs": ltx2_inputs, "blocks": 48, "hidden": 4096,
             "attention_blocks": 48, "text": 1024, "joint": False, "points": [(16, 32, 48), (16, 64, 96)]},
    "flux1_dev": {"build": flux, "inputs": flux_inputs, "blocks": 19, "hidden": 3072,
                  "attention_blocks": 57, "text": 512, "joint": True, "points": [(1, 64, 64), (1, 128, 128)]},
    "flux1_kontext": {"build": flux, "inputs": kontext_inputs, "blocks": 19, "hidden": 3072,
                      "attention_blocks": 57, "text": 512, "joint": True, "points": [(1, 64, 64), (1, 128, 128)]},
    "qwen_image": {"build": qwen, "inputs": qwen_inputs, "blocks": 60, "hidden": 3072,
                   "attention_blocks": 60, "text": 128, "joint": True, "points": [(1, 64, 64), (1, 128, 128)]},
    "qwen_image_edit": {"build": qwen, "inputs": qwen_edit_inputs, "blocks": 60, "hidden": 3072,
                        "attention_blocks": 60, "text": 300, "joint": True, "points": [(1, 64, 64), (1, 128, 128)]},
    "sd35_medium": {"build": sd35_medium, "inputs": sd3_inputs, "blocks": 24, "hidden": 1536,
                    "attention_blocks": 37, "text": 205, "joint": True, "points": [(1, 64, 64), (1, 128, 128)]},
    "flux2_klein_4b": {"build": flux2_klein, "inputs": flux2_inputs, "blocks": 5, "hidden": 3072,
                       "attention_blocks": 25, "text": 512, "joint": True, "points": [(1, 64, 64), (1, 128, 128)]},
    "aura_flow": {"build": aura_flow, "inputs": aura_flow_inputs, "blocks": 4, "hidden": 3072,
                  "attention_blocks": 36, "text": 256, "joint": True, "points": [(1, 64, 64), (1, 128, 128)]},
    "z_image": {"build": z_image, "inputs": z_image_inputs, "blocks": 34, "hidden": 3840,
                "attention_blocks": 34, "text": 128, "joint": True, "points": [(1, 64, 64), (1, 128, 128)]},
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


def without_attention(counter: FlopCounterMode) -> int:
    """FLOPs that were counted so far in matrix products and convolutions."""
    return sum(n for operator, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(operator))


def fake(model: nn.Module) -> None:
    """Replace the meta tensors of `model` by fake ones on the CPU (inside a FakeTensorMode)."""
    for module in model.modules():
        for store in (module._parameters, module._buffers, module.__dict__):
            for name, tensor in list(store.items()):
                if isinstance(tensor, Tensor):
                    made = torch.empty(tensor.shape, dtype=tensor.dtype)
                    trained = isinstance(tensor, nn.Parameter)
                    store[name] = nn.Parameter(made, tensor.requires_grad) if trained else made


def trainable(entry: dict[str, Any], blocks: int, trained: str) -> nn.Module:
    """A build of `blocks` on the meta device as `models.policy.Policy` holds it: LoRA over a bf16 base, or fp32."""
    model: nn.Module = entry["build"](blocks)
    if trained == "full":
        return model.eval()
    exact = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, parameter in model.named_parameters():
        if not any(part in name for part in exact):
            parameter.data = parameter.data.bfloat16()
    inject_lora(model, LoraSpec(RANK, RANK, (TARGETS[trained].replace(LISTS, ""),)))
    return model.eval()


def halved(value: Any) -> Any:
    """Latents and text in bfloat16, in a list too; one number per row stays as it is."""
    if isinstance(value, list):
        return [halved(item) for item in value]
    wide = isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1
    return value.bfloat16() if wide else value


def activations(entry: dict[str, Any], trained: str) -> tuple[dict[str, Any], dict[str, float], dict[str, float]]:
    """What blocks keep -> bytes of one unit of blocks per latent token, per text token, per row and per forward, by
    differences of builds of one and two units; what they keep -> share of the forward's FLOPs, attention aside, that
    the backward pass repeats; and the bytes at the peak of a forward without gradients.
    """
    table: dict[str, Any] = {}
    spent: dict[str, float] = {}
    with torch.device("meta"):
        models = [trainable(entry, blocks, trained) for blocks in (1, 2)]
    with FakeTensorMode():
        for model in models:
            fake(model)

        def forward(model: nn.Module, rows: int, side: int, text: int) -> Tensor:
            inputs = entry["inputs"](rows, 1, side, side, text, model)
            if trained != "full":
                inputs = {name: halved(value) for name, value in inputs.items()}
            with torch.autocast("cpu", torch.bfloat16, trained == "full", cache_enabled=False):
                output = model(**inputs, return_dict=False)[0]
            return torch.stack(output).float() if isinstance(output, list) else output.float()

        def measure(model: nn.Module, *case: int) -> Bytes:
            return count_bytes(model, lambda: forward(model, *case))[1]

        def linear_flops(model: nn.Module) -> tuple[int, int]:
            """Of a forward, and with its backward pass; attention left out."""
            with FlopCounterMode(display=False) as counter:
                output = forward(model, *MANY_TOKENS)
                alone = without_attention(counter)
                output.sum().backward()
            return alone, without_attention(counter)

        def fit(figures: list[float]) -> dict[str, float]:
            base, image, words, rows = figures
            token, word = (image - base) / 192, (words - base) / 192
            row = rows - base - 64 * token - 64 * word
            return {"token": token, "text": word, "row": row, "forward": base - 64 * token - 64 * word - row}

        with torch.no_grad():
            for model in models:  # rotary tables are cached at first use
                for case in (*CASES, MANY_TOKENS):
                    forward(model, *case)
            peak = fit([measure(models[0], *case).peak for case in CASES])
        for mode in MODES:
            for model in models:
                model.disable_gradient_checkpointing()  # type: ignore[operator]
                blocks = [block for part in lists(model) for block in part]
                checkpointing.enable(model, blocks, parse_recompute(mode))
            small, large = models
            table[mode] = fit([measure(large, *c).kept - measure(small, *c).kept for c in CASES])
            (small_forward, small_whole), (large_forward, large_whole) = (linear_flops(model) for model in models)
            spent[mode] = (large_whole - small_whole) / (large_forward - small_forward)
    return table, {mode: round(whole - spent[ALL], 6) for mode, whole in spent.items()}, peak


def lists(model: nn.Module) -> list[nn.ModuleList]:
    """Of blocks, of one network or of both experts."""
    networks = [*model.children()] if isinstance(model, Experts) else [model]
    return [part for network in networks for part in network.children() if isinstance(part, nn.ModuleList)]


def model_facts(name: str) -> dict[str, Any]:
    entry = MODELS[name]
    with torch.device("meta"):
        model = entry["build"](None)
        points = []
        for f, h, w in entry["points"]:
            inputs = entry["inputs"](1, f, h, w, entry["text"], model)
            points.append({"tokens": f * h * w // 4, "flops": flops(model, inputs)})
    counted = {trained: activations(entry, trained) for trained in ("full", *TARGETS)}
    heaviest = max(sum(p.numel() for p in block.parameters()) for part in lists(model) for block in part)
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
        "kept_bytes": {trained: kept for trained, (kept, _, _) in counted.items()},
        "repeated_flops": {trained: repeated for trained, (_, repeated, _) in counted.items()},
        "forward_bytes": counted["attn"][2],
    }


def decode_flops() -> dict[str, Any]:
    """FLOPs of one VAE decode per latent pixel of 8 x 8 and output frame."""
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
        ltx2_vae = AutoencoderKLLTX2Video(spatial_compression_ratio=32, temporal_compression_ratio=8)
        cases: dict[str, tuple[Any, Tensor, int]] = {
            "flux": (image, torch.empty(1, 16, 64, 64), 1),
            "wan_image": (AutoencoderKLWan(), torch.empty(1, 16, 1, 64, 64), 1),
            "wan": (AutoencoderKLWan(), torch.empty(1, 16, 9, 60, 104), 33),
            "hunyuan": (AutoencoderKLHunyuanVideo(), torch.empty(1, 16, 14, 60, 60), 53),
            "hunyuan15": (AutoencoderKLHunyuanVideo15(), torch.empty(1, 32, 9, 15, 26), 33),
            "ltx2": (ltx2_vae, torch.empty(1, 128, 4, 16, 24), 25),
        }
        table = {}
        for name, (vae, latents, frames) in cases.items():
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                vae.decode(latents)
            side = getattr(vae, "spatial_compression_ratio", 8) // 8
            pixels = latents.shape[-1] * latents.shape[-2] * side**2
            table[name] = {
                "parameters": sum(p.numel() for p in vae.parameters()),
                "flops_per_latent_pixel_frame": counter.get_total_flops() / pixels / frames,
            }
    return table


def main() -> None:
    torch.set_num_threads(1)
    path = Path(__file__).parents[1] / "src/digenrl/extensions/planner/facts.json"
    facts: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    facts["source"] = "python -m benchmarks.count_facts; encoders and rewards: parameters as published, see costs.py"
    facts["vae"] = decode_flops()
    facts.setdefault("models", {})
    for name in sys.argv[1:] or MODELS:
        facts["models"][name] = model_facts(name)
        print(name, json.dumps(facts["models"][name]), flush=True)
        path.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
