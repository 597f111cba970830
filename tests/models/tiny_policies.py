"""Tiny policies of all families, and the plain diffusers pipelines to compare them with."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["HF_HUB_OFFLINE"] = "1"

import diffusers
import numpy as np
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus

from digenrl.data import load_prompts
from digenrl.extensions.export.diffusers_export import PIPELINES, lora_file
from digenrl.extensions.zoo.aura_flow import AuraFlowPolicy
from digenrl.extensions.zoo.flux2 import Flux2KleinPolicy
from digenrl.extensions.zoo.hunyuan_video import HunyuanVideoPolicy
from digenrl.extensions.zoo.hunyuan_video15 import HunyuanVideo15Policy
from digenrl.extensions.zoo.ltx2 import LTX2Policy
from digenrl.extensions.zoo.qwen_image import QwenImageEditPolicy, QwenImagePolicy
from digenrl.extensions.zoo.z_image import ZImagePolicy
from digenrl.models import latents, tiny_builds
from digenrl.models.flux import FluxKontextPolicy, FluxPolicy
from digenrl.models.pipeline import DiffusersPolicy
from digenrl.models.sd3 import SD3Policy
from digenrl.models.wan import WanExpertsPolicy, WanImageToVideoPolicy, WanPolicy
from digenrl.types import Prompt

FAMILIES: dict[str, type[DiffusersPolicy]] = {
    "wan": WanPolicy,
    "wan22": WanExpertsPolicy,
    "wan_i2v": WanImageToVideoPolicy,
    "hunyuan_video": HunyuanVideoPolicy,
    "hunyuan_video15": HunyuanVideo15Policy,
    "ltx2": LTX2Policy,
    "flux": FluxPolicy,
    "flux_kontext": FluxKontextPolicy,
    "qwen_image": QwenImagePolicy,
    "qwen_image_edit": QwenImageEditPolicy,
    "sd3": SD3Policy,
    "aura_flow": AuraFlowPolicy,
    "z_image": ZImagePolicy,
    "flux2_klein": Flux2KleinPolicy,
}
VIDEO = {"wan", "wan22", "wan_i2v", "hunyuan_video", "hunyuan_video15", "ltx2"}
LORA = {"rank": 4, "alpha": 8, "targets": "attention_ff"}
TEXT_LENGTH = {
    "wan": 64,
    "wan22": 64,
    "wan_i2v": 512,
    "hunyuan_video": 64,
    "hunyuan_video15": 48,
    "ltx2": 48,
    "flux": 64,
    "flux_kontext": 64,
    "qwen_image": 48,
    "qwen_image_edit": 64,
    "sd3": 48,
    "aura_flow": 48,
    "z_image": 64,
    "flux2_klein": 48,
}
NEGATIVE = "a blue ring"
IMAGES = load_prompts("edits.jsonl")[0].images
"""What families that read images are given."""


def prompt(text: str) -> Prompt:
    """`text` with an image, which most families do not read."""
    return Prompt(text, images=IMAGES)


def size(family: str) -> dict[str, int]:
    """Few tokens: pixels, and frames of a video."""
    if family == "ltx2":
        return {"height": 64, "width": 64, "frames": 9}
    return {"height": 32, "width": 32, "frames": 5} if family in VIDEO else {"height": 64, "width": 64}


def make(
    family: str, lora: dict[str, Any] | str | None = None, dtype: str = "float32", **overrides: Any
) -> DiffusersPolicy:
    """The family's policy on its tiny build. lora="full": all weights."""
    arguments = {
        "path": "unused",
        "build": "tiny",
        "lora": LORA if lora is None else None if lora == "full" else lora,
        "dtype": dtype,
        "max_sequence_length": TEXT_LENGTH[family],
        "negative_prompt": NEGATIVE,
        **size(family),
        **overrides,
    }
    return FAMILIES[family](**arguments)


def randomise_lora(policy: DiffusersPolicy, seed: int = 1, std: float = 0.05) -> None:
    """B matrices are zero at the start; give them values, so that the adapter shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.trained_parameters().values():
            parameter.add_(std * torch.randn(parameter.shape, generator=generator))


def exported(policy: DiffusersPolicy, folder: Path) -> Any:
    """The transformer that plain diffusers makes of an export and the base model."""
    kind, networks = policy.transformer_class, []
    for part in policy.components:
        if policy.lora is None:
            networks.append(kind.from_pretrained(folder, subfolder=part))
            continue
        networks.append(kind.from_pretrained(policy.path, subfolder=part))
        state, metadata = getattr(diffusers, PIPELINES[kind.__name__]).lora_state_dict(
            folder, weight_name=lora_file(part), return_lora_metadata=True
        )
        networks[-1].load_lora_adapter(state, metadata=metadata, prefix="transformer")
    return policy.joined(networks).eval()


class ExplicitEuler(diffusers.FlowMatchEulerDiscreteScheduler):
    """Euler on the explicit grid, for a pipeline that calls set_timesteps(steps) by itself (Wan)."""

    def set_timesteps(self, num_inference_steps: int, device: Any = None) -> None:  # type: ignore[override]
        super().set_timesteps(sigmas=np.linspace(1, 1 / num_inference_steps, num_inference_steps), device=device)


def streams(noise: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tokens of LTX-2 as its pipeline takes them: those of the video, and the sound [B, 8, steps, 16]."""
    video, sound = noise.tensor_split([8], dim=1)
    return {"latents": video, "audio_latents": sound.unflatten(2, (8, 16)).transpose(1, 2)}


def diffusers_latents(
    family: str,
    prompts: list[str],
    noise: torch.Tensor,
    steps: int,
    guidance: float,
    true_cfg: float = 1.0,
    **more: Any,
) -> torch.Tensor:
    """Final latents of the family's own pipeline on the tiny build, from the same noise; `more` is for its call."""
    if family == "qwen_image_edit" and len(prompts) > 1:  # its pipeline takes one
        rows = zip(prompts, noise.split(1), strict=True)
        return torch.cat([diffusers_latents(family, [text], row, steps, guidance, true_cfg) for text, row in rows])
    pipeline = diffusers.DiffusionPipeline.from_pretrained(tiny_builds.ensure(family), local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    call: dict[str, Any] = {
        "prompt": [*prompts],  # ZImagePipeline writes into the list
        "latents": noise,
        "num_inference_steps": steps,
        "output_type": "latent",
        "return_dict": False,
        "max_sequence_length": TEXT_LENGTH[family],
    }
    call |= {"num_frames" if key == "frames" else key: value for key, value in size(family).items()}
    if family in ("qwen_image", "qwen_image_edit"):
        call |= {"true_cfg_scale": guidance, "negative_prompt": [NEGATIVE] * len(prompts) if guidance > 1 else None}
    elif family in ("flux", "flux_kontext", "hunyuan_video"):
        negative = [NEGATIVE] * len(prompts) if true_cfg > 1 else None
        call |= {"guidance_scale": guidance, "true_cfg_scale": true_cfg, "negative_prompt": negative}
    else:
        call |= {"guidance_scale": guidance, "negative_prompt": [NEGATIVE] * len(prompts) if guidance > 1 else None}
    if family == "z_image":
        call["guidance_scale"] -= 1.0  # added to the conditional velocity; 0 = none
    if family == "flux2_klein":  # takes latents [B, 128, h, w], and gives those of the autoencoder
        call["latents"] = noise.transpose(1, 2).unflatten(2, (4, 4))
        del call["negative_prompt"]
        call["negative_prompt_embeds"] = pipeline.encode_prompt(
            [NEGATIVE] * len(prompts), max_sequence_length=TEXT_LENGTH[family]
        )[0]
    if family == "flux_kontext":
        call |= {"image": IMAGES[0].fitted(64, 64), "_auto_resize": False, "max_area": 64 * 64}
    if family == "qwen_image_edit":
        call |= {"image": IMAGES[0].fitted(64, 64)}
    if family == "wan_i2v":
        call |= {"image": IMAGES[0].fitted(32, 32)}
    if family in ("wan", "wan22", "wan_i2v"):
        pipeline.scheduler = ExplicitEuler(shift=3.0)
    if family in ("sd3", "aura_flow"):
        call |= {"sigmas": list(np.linspace(1, 1 / steps, steps))}
    if family == "hunyuan_video15":  # what others are called with it keeps as attributes
        del call["guidance_scale"]
        pipeline.tokenizer_max_length = call.pop("max_sequence_length")
        pipeline.guider = diffusers.ClassifierFreeGuidance(guidance)
    if family == "ltx2":
        call |= streams(noise) | {"audio_guidance_scale": guidance}
        call |= {f"{stream}{kind}": 0.0 for stream in ("", "audio_") for kind in ("stg_scale", "guidance_rescale")}
        call |= {f"{stream}modality_scale": 1.0 for stream in ("", "audio_")}
    call |= more
    with mock.patch.object(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", 64 * 64):
        found, *others = pipeline(**call)
    if family == "ltx2":
        found = torch.cat([found.flatten(2).transpose(1, 2), others[0].transpose(1, 2).flatten(2)], dim=1)
    if family == "flux2_klein":
        bn, eps = pipeline.vae.bn, pipeline.vae.config.batch_norm_eps
        found = (latents.pack(found) - bn.running_mean) / torch.sqrt(bn.running_var + eps)
    return found
