"""What tests know of each model family of digenrl.extensions.zoo beside its facts: one row a family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import diffusers
import diffusers.loaders.single_file_utils as checkpoints
import numpy as np
import torch
import yaml
from torch import Tensor

from digenrl.config import config_directory
from digenrl.facts import facts_by_family
from digenrl.models import pretrained
from digenrl.models.latents import pack_latents

Call = dict[str, Any]
Converter = Callable[[dict[str, Tensor]], dict[str, Tensor]]


class ExplicitEuler(diffusers.FlowMatchEulerDiscreteScheduler):
    """Euler on the explicit grid, for a pipeline that calls set_timesteps(steps) by itself."""

    def set_timesteps(self, num_inference_steps: int, device: Any = None) -> None:
        super().set_timesteps(
            sigmas=np.linspace(1, 1 / num_inference_steps, num_inference_steps), device=device
        )


def as_usual(pipeline: Any, call: Call) -> Call:
    """Leave the call as it is."""
    return call


def explicit_scheduler(pipeline: Any, call: Call) -> Call:
    pipeline.scheduler = ExplicitEuler(shift=3.0)
    return call


def explicit_sigmas(pipeline: Any, call: Call) -> Call:
    steps = call["num_inference_steps"]
    return call | {"sigmas": list(np.linspace(1, 1 / steps, steps))}


def scale_from_zero(pipeline: Any, call: Call) -> Call:
    """Guidance is added to the conditional velocity: 0 = none."""
    return call | {"guidance_scale": call["guidance_scale"] - 1.0}


def true_scale(pipeline: Any, call: Call) -> Call:
    return call | {"true_cfg_scale": call.pop("guidance_scale")}


def own_scale_and_length(pipeline: Any, call: Call) -> Call:
    """A pipeline that does not cut prompts."""
    del call["max_sequence_length"]
    return true_scale(pipeline, call)


def guider(pipeline: Any, call: Call) -> Call:
    """Attributes in place of what others are called with."""
    pipeline.tokenizer_max_length = call.pop("max_sequence_length")
    pipeline.guider = diffusers.ClassifierFreeGuidance(call.pop("guidance_scale"))
    return call


def embedded_negative(pipeline: Any, call: Call) -> Call:
    negative = call.pop("negative_prompt") or call["prompt"]
    length = call["max_sequence_length"]
    return call | {
        "negative_prompt_embeds": pipeline.encode_prompt(negative, max_sequence_length=length)[0]
    }


def plain_guidance(pipeline: Any, call: Call) -> Call:
    """Without the further branches, for the video and for its sound."""
    off = {
        f"{stream}{kind}": 0.0
        for stream in ("", "audio_")
        for kind in ("stg_scale", "guidance_rescale")
    }
    plain = {f"{stream}modality_scale": 1.0 for stream in ("", "audio_")}
    return call | {"audio_guidance_scale": call["guidance_scale"]} | off | plain


def kept_size(pipeline: Any, call: Call) -> Call:
    return call | {"_auto_resize": False, "max_area": 64 * 64}


def latents(noise: Tensor) -> Call:
    return {"latents": noise}


def square(noise: Tensor) -> Call:
    """Tokens as a picture [B, 128, 4, 4]."""
    return {"latents": noise.transpose(1, 2).unflatten(2, (4, 4))}


def streams(noise: Tensor) -> Call:
    """Tokens of the video, and the sound [B, 8, steps, 16]."""
    video, sound = noise.tensor_split([8], dim=1)
    return {"latents": video, "audio_latents": sound.unflatten(2, (8, 16)).transpose(1, 2)}


def joined(pipeline: Any, found: Tensor, *others: Tensor) -> Tensor:
    return torch.cat(
        [found.flatten(2).transpose(1, 2), others[0].transpose(1, 2).flatten(2)], dim=1
    )


def normalised(pipeline: Any, found: Tensor) -> Tensor:
    """The pipeline gives latents of the autoencoder."""
    bn, eps = pipeline.vae.bn, pipeline.vae.config.batch_norm_eps
    normal: Tensor = (pack_latents(found) - bn.running_mean) / torch.sqrt(bn.running_var + eps)
    return normal


def first(pipeline: Any, found: Tensor, *others: Tensor) -> Tensor:
    return found


class Modular:
    """A modular pipeline, called as the others are. It counts the last noise level as a step, and
    gives its latents where no media are asked for."""

    def __init__(self, path: Any, **_: Any) -> None:
        name = pretrained.model_index(str(path))["_class_name"]
        self.pipeline = getattr(diffusers, name)(
            pretrained_model_name_or_path=str(path), workflow="t2va"
        )
        self.pipeline.load_components()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["pipeline"], name)

    @property
    def scheduler(self) -> Any:
        return self.pipeline.scheduler

    def __call__(self, **call: Any) -> Any:
        steps, wanted = call.pop("num_inference_steps"), call.pop("output_type")
        (prompt,) = [call.pop("prompt")] if isinstance(call["prompt"], str) else call.pop("prompt")
        media = wanted != "latent"
        names = ["videos", "audio"] if media else ["latents", "audio_latents"]
        known = {name: call[name] for name in (*KNOWN, "latents", "audio_latents")}
        found = self.pipeline(
            prompt=prompt, num_inference_steps=steps + 1, output_type="np", output=names, **known
        )
        return [found[name] for name in names]


KNOWN = ("height", "width", "num_frames")


def clips_and_channels(noise: Tensor) -> Call:
    """Rows of 32 numbers as latents [1, 24, f, 4, 4] of a video of 37 frames, and [2, 32, steps] of
    its sound."""
    video, sound = noise.tensor_split([3 * 37 * 4], dim=1)
    grid = video.reshape(-1, 37, 2, 2, 24, 2, 2).permute(0, 4, 1, 2, 5, 3, 6)
    return {
        "latents": grid.reshape(-1, 24, 37, 4, 4),
        "audio_latents": sound.reshape(2, -1, 32).transpose(1, 2),
    }


def rows(pipeline: Any, found: Tensor, sound: Tensor) -> Tensor:
    video = found.reshape(-1, 24, 37, 2, 2, 2, 2).permute(0, 2, 3, 5, 1, 4, 6)
    return torch.cat([video.reshape(1, -1, 32), sound.transpose(1, 2).reshape(1, -1, 32)], dim=1)


def as_it_is(media: Tensor) -> Tensor:
    return media


def on_white(media: Tensor) -> Tensor:
    """Four channels, of which the last is alpha."""
    return media[..., :3] * media[..., 3:] + 1.0 - media[..., 3:]


VIDEO = {"height": 32, "width": 32, "frames": 5}


def opened(path: Any) -> Any:
    """Return the pipeline of a tiny build."""
    return diffusers.DiffusionPipeline.from_pretrained(path, local_files_only=True)


@dataclass(frozen=True)
class Row:
    """One family."""

    published: Mapping[str, tuple[float, int, int]]
    """Model -> parameters in billions; megabytes of a LoRA in 16 bit at rank 32, of attention and
    of attention with feed-forward."""
    layers: tuple[int, int]
    """Layers that those two presets adapt in the tiny build."""
    guidance: tuple[tuple[float, float], ...]
    """(guidance_scale, true_cfg_scale) with which samples are compared with those of the family's
    pipeline."""
    size: Mapping[str, int] = field(default_factory=lambda: {"height": 64, "width": 64})
    """Size of a sample, with few tokens."""
    text_length: int = 48
    """Tokens of text in the tiny build."""
    real_text: tuple[int, int] = (512, 0)
    """Tokens of text, and of letters, at published size."""
    counts_tokens: bool = False
    """The pipeline counts tokens of a prompt, which fake tensors do not have."""
    unread: int = 0
    """Tensors that full fine-tuning keeps frozen."""
    sigmas: tuple[int, tuple[float, ...]] = (0, ())
    """Steps, and the last levels of their grid."""
    template: tuple[str, int] | None = None
    """Constant of the adapter's module that counts the tokens of the prompt template, and its
    value."""
    refused: tuple[tuple[Mapping[str, Any], str], ...] = ()
    """Settings that `check` refuses beside those that every family does, and what it says."""
    megabytes: float = 4.0
    """Upper bound of the tiny build."""
    call: Callable[[Any, Call], Call] = as_usual
    """What the family's own pipeline wants to be called with."""
    latents: Callable[[Tensor], Call] = latents
    """The noise as the pipeline takes it, and the reverse."""
    result: Callable[..., Tensor] = first
    decodes: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of a pipeline that only decodes."""
    load: Callable[..., Any] = opened
    """Opens the family's own pipeline at a path."""
    shown: Callable[[Tensor], Tensor] = as_it_is
    """What is made of the pipeline's media [B, ..., H, W, C] before they are scored."""
    converter: Converter | None = None
    """diffusers' own, of the published checkpoint of one network; None: it has none (HunyuanVideo 1.5
    is converted by a script that no package holds), or names are compared elsewhere."""
    converter_width: int = 8
    """Width of a network that the converter reads."""
    unusual: bool = False
    """Whether its batches hold more than latents and one text, or its rows go through several
    networks: every schedule is tried with the family."""
    one_prompt: bool = False
    """The pipeline takes one prompt at a time."""
    patches: Mapping[str, Any] = field(default_factory=dict)
    """Constants of diffusers that are another for small pictures."""


_ROWS: dict[str, Row] = {
    "wan": Row(
        published={"wan21_14b": (14.29, 210, 307), "wan21_1_3b": (1.42, 47, 87)},
        layers=(2 * 8, 2 * 10),
        guidance=((1.0, 1.0), (5.0, 1.0)),
        size=VIDEO,
        text_length=64,
        counts_tokens=True,
        call=explicit_scheduler,
        converter=checkpoints.convert_wan_transformer_to_diffusers,
    ),
    "wan22": Row(
        published={"wan22_a14b": (28.58, 420, 614)},
        layers=(2 * 2 * 8, 2 * 2 * 10),
        unusual=True,
        guidance=((1.0, 1.0), (4.0, 1.0)),
        size=VIDEO,
        text_length=64,
        call=explicit_scheduler,
        converter=checkpoints.convert_wan_transformer_to_diffusers,
    ),
    "wan_i2v": Row(
        published={"wan21_i2v_14b": (16.39, 262, 359)},
        layers=(2 * 10, 2 * 12),
        guidance=((1.0, 1.0), (5.0, 1.0)),
        size=VIDEO,
        text_length=512,
        call=explicit_scheduler,
        converter=checkpoints.convert_wan_transformer_to_diffusers,
    ),
    "hunyuan_video": Row(
        published={"hunyuan_video": (12.82, 110, 228)},
        layers=(8 + 3, 12 + 4),
        guidance=((6.018, 1.0), (6.018, 2.0)),
        size=VIDEO,
        text_length=64,
        real_text=(256, 0),
        sigmas=(10, (0.636, 0.438, 0)),
        template=("TEMPLATE_TOKENS", 95),
        converter=checkpoints.convert_hunyuan_video_transformer_to_diffusers,
        converter_width=3072,
    ),
    "hunyuan_video15": Row(
        published={"hunyuan_video15": (8.33, 113, 253)},
        layers=(8 + 6, 12 + 8),
        guidance=((1.0, 1.0), (6.0, 1.0)),
        size=VIDEO,
        real_text=(300, 9),
        unusual=True,
        unread=17,
        megabytes=30.0,  # a layer of 2048 x 2048 for letters
        call=guider,
    ),
    "ltx2": Row(
        published={"ltx2": (18.88, 264, 390)},
        layers=(2 * 12, 2 * 14),
        guidance=((1.0, 1.0), (4.0, 1.0)),
        size={"height": 64, "width": 64, "frames": 9},
        real_text=(1024, 0),
        unusual=True,
        unread=17,
        megabytes=30.0,  # an autoencoder for sound as wide as its tokens
        call=plain_guidance,
        latents=streams,
        result=joined,
        converter=checkpoints.convert_ltx2_transformer_to_diffusers,
    ),
    "ltx23": Row(
        published={"ltx23": (18.99, 428, 617)},
        layers=(2 * 24, 2 * 28),
        guidance=((1.0, 1.0), (4.0, 1.0)),
        size={"height": 64, "width": 64, "frames": 9},
        real_text=(1024, 0),
        unusual=True,
        megabytes=30.0,
        call=plain_guidance,
        latents=streams,
        result=joined,
        converter=checkpoints.convert_ltx2_transformer_to_diffusers,
    ),
    "minimax_h3": Row(
        published={"minimax_h3": (33.12, 161, 333)},
        layers=(2 * 4, 2 * 6),
        guidance=((1.0, 1.0),),
        size={"height": 64, "width": 64, "frames": 124},
        real_text=(128, 0),
        converter=partial(
            checkpoints.convert_minimax_h3_transformer_checkpoint_to_diffusers, config={}
        ),
        unusual=True,
        unread=2,
        load=Modular,
        megabytes=8.0,
        latents=clips_and_channels,
        result=rows,
        one_prompt=True,
    ),
    "flux": Row(
        published={"flux1_dev": (11.90, 105, 179)},
        layers=(8 + 2 * 3, 12 + 2 * 3),
        guidance=((3.5, 1.0), (3.5, 2.0)),
        text_length=64,
    ),
    "flux_kontext": Row(
        published={"flux1_kontext": (11.90, 105, 179)},
        layers=(8 + 2 * 3, 12 + 2 * 3),
        guidance=((2.5, 1.0), (2.5, 2.0)),
        text_length=64,
        call=kept_size,
        decodes={"_auto_resize": False, "max_area": 64 * 64},
    ),
    "qwen_image": Row(
        published={"qwen_image": (20.43, 189, 425)},
        layers=(8 + 6, 12 + 8),
        guidance=((1.0, 1.0), (4.0, 1.0)),
        real_text=(256, 0),
        counts_tokens=True,
        unread=9,
        sigmas=(4, (0.02, 0)),
        template=("TEMPLATE_TOKENS", 34),
        call=true_scale,
    ),
    "qwen_image_edit": Row(
        published={"qwen_image_edit": (20.43, 189, 425)},
        layers=(8 + 6, 12 + 8),
        guidance=((1.0, 1.0), (4.0, 1.0)),
        text_length=64,
        unread=9,
        template=("EDIT_TEMPLATE_TOKENS", 64),
        call=true_scale,
        unusual=True,
        one_prompt=True,
        patches={
            "diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus.VAE_IMAGE_SIZE": 64 * 64
        },
    ),
    "qwen_image21": Row(
        published={"qwen_image21": (7.12, 67, 168)},
        layers=(2 * 4, 2 * 7),
        guidance=((1.0, 1.0), (4.0, 1.0)),
        real_text=(256, 0),
        refused=(
            ({"width": 272}, r"sampling\.width=272 is not a multiple of 32; nearest valid: 256"),
        ),
        call=own_scale_and_length,
        shown=on_white,
        converter=checkpoints.convert_qwen_image21_transformer_checkpoint_to_diffusers,
        one_prompt=True,  # beside others it counts their padding
        unusual=True,
    ),
    "sd3": Row(
        published={"sd35_medium": (2.24, 37, 83)},
        layers=(8 + 6, 12 + 8),
        guidance=((1.0, 1.0), (4.5, 1.0)),
        real_text=(333, 0),
        unread=3,
        call=explicit_sigmas,
    ),
    "z_image": Row(
        published={"z_image": (6.15, 59, 140)},
        layers=(2 * 4, 2 * 7),
        guidance=((1.0, 1.0), (4.0, 1.0)),
        text_length=64,
        call=scale_from_zero,
        converter=checkpoints.convert_z_image_transformer_checkpoint_to_diffusers,
    ),
    "flux2_klein": Row(
        published={"flux2_klein_4b": (3.88, 75, 96)},
        layers=(8 + 2 * 2, 12 + 2 * 2),
        guidance=((1.0, 1.0), (4.0, 1.0)),
        call=embedded_negative,
        converter=checkpoints.convert_flux2_transformer_checkpoint_to_diffusers,
        latents=square,
        result=normalised,
    ),
}
FAMILIES = {family: row for family, row in _ROWS.items() if family in facts_by_family()}
"""Family -> its row; of the families that are installed."""


def drawn_in_one_step(pipeline: Any, codec: Any, **more: Any) -> Any:
    """What diffusers' own pipeline returns in the codec's size; `more` are arguments of its call."""
    return pipeline(
        prompt="a",
        num_inference_steps=1,
        output_type="np",
        height=codec.height,
        width=codec.width,
        **more,
    )


def experiments(unusual: bool = False) -> dict[str, str]:
    """Return experiment -> model of configs/ at a family's published size, or of unusual families
    alone."""
    rows = [row for row in FAMILIES.values() if row.unusual or not unusual]
    found = {}
    for path in sorted((config_directory() / "experiment").glob("[a-z]*.yaml")):
        content = yaml.safe_load(path.read_text())
        chosen = {
            key: option
            for entry in content.get("defaults", [])
            if isinstance(entry, dict)
            for key, option in entry.items()
        }
        found[path.stem] = (
            chosen.get("override /model")
            if content.get("model", {}).get("build") != "tiny"
            else None
        )
    return {
        name: model
        for name, model in found.items()
        if model and any(model in row.published for row in rows)
    }
