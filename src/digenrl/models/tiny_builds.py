"""Tiny builds: every family's real classes and latent geometry with small widths and depths, random weights, and
tokenizers trained here on a few hundred captions and the models' prompt templates. Nothing is downloaded.

A build is made on first use (`ensure`) and kept under a name that hashes everything it is made from, so that a changed
recipe or library never reads an old build. It is byte-reproducible: same seed and libraries, same files.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from digenrl.models import tiny_tokenizers as tokenizers
from digenrl.models.pretrained import hide_progress_bars

WIDTH = 32
"""Width of every text encoder; SD3's T5 is twice as wide, because its two CLIPs are concatenated."""
TEXT_LENGTH = 64
"""Tokens that a tiny build's main encoder takes: 512 would cost six times the image's."""


def cache_root() -> Path:
    """Where builds are kept: $DIGENRL_CACHE, else .cache/ of a source checkout, else the user's cache directory."""
    if os.environ.get("DIGENRL_CACHE"):
        return Path(os.environ["DIGENRL_CACHE"]) / "tiny"
    checkout = Path(__file__).resolve().parents[3]
    if (checkout / "pyproject.toml").exists():
        return checkout / ".cache" / "tiny"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "digenrl" / "tiny"


def ensure(family: str, seed: int = 0, root: Path | None = None) -> Path:
    """Directory of the family's tiny build in diffusers layout, built now if it is not there.

    Safe to call from several ranks at once: a build appears by one rename, and the first one wins.
    """
    if family not in BUILDERS:
        raise ValueError(f"no tiny build of family '{family}'; known: {', '.join(BUILDERS)}")
    root = cache_root() if root is None else root
    target = root / f"{family}-{seed}-{_digest()}"
    if target.exists():
        return target
    root.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{family}-", dir=root))
    try:
        build(family, scratch, seed)
        os.replace(scratch, target)
    except OSError:
        if not target.exists():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def build(family: str, folder: Path, seed: int = 0) -> None:
    """Make the family's pipeline with weights drawn from `seed` and save it into `folder`."""
    hide_progress_bars()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = BUILDERS[family]()
        for parameter in pipeline.transformer.parameters():
            # Some families initialise modulations and output layers to zero, which would hide every signal.
            if parameter.ndim > 1 and not parameter.detach().any():
                nn.init.normal_(parameter, std=0.02)
    pipeline.save_pretrained(folder)


def _digest() -> str:
    parts = [Path(__file__).read_bytes(), Path(tokenizers.__file__).read_bytes()]
    parts += [f"{name}=={version(name)}".encode() for name in ("diffusers", "transformers", "tokenizers", "torch")]
    return hashlib.blake2b(b"\0".join(parts), digest_size=6).hexdigest()


def _clip_config(tokenizer: Any) -> Any:
    from transformers import CLIPTextConfig

    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=64,
        num_attention_heads=4,
        num_hidden_layers=2,
        projection_dim=WIDTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _t5(tokenizer: Any, width: int = WIDTH, multilingual: bool = False) -> Any:
    from transformers import T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

    config_class, model_class = (UMT5Config, UMT5EncoderModel) if multilingual else (T5Config, T5EncoderModel)
    config = config_class(
        vocab_size=len(tokenizer),
        d_model=width,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )
    return model_class(config).eval()


def _image_vae(shift: float, scale: float) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 16, 16),
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=shift,
        scaling_factor=scale,
    ).eval()


def _wan() -> Any:
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

    tokenizer = tokenizers.t5()
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=_t5(tokenizer, multilingual=True),
        vae=AutoencoderKLWan(
            base_dim=4,
            z_dim=16,
            dim_mult=[1, 2, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
        ).eval(),
        transformer=WanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            text_dim=WIDTH,
            freq_dim=32,
            ffn_dim=64,
            num_layers=2,
        ),
        # The scheduler of the Wan2.1 repositories (480p).
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
        ),
    )


def _hunyuan_video() -> Any:
    from diffusers import (
        AutoencoderKLHunyuanVideo,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideoPipeline,
        HunyuanVideoTransformer3DModel,
    )
    from transformers import CLIPTextModel, LlamaConfig, LlamaModel

    tokenizer, clip_tokenizer = tokenizers.llama3(), tokenizers.clip()
    llama = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=4,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return HunyuanVideoPipeline(
        tokenizer=tokenizer,
        text_encoder=LlamaModel(llama).eval(),
        tokenizer_2=clip_tokenizer,
        text_encoder_2=CLIPTextModel(_clip_config(clip_tokenizer)).eval(),
        vae=AutoencoderKLHunyuanVideo(
            latent_channels=16,
            block_out_channels=(8, 8, 8, 8),
            layers_per_block=1,
            norm_num_groups=4,
        ).eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        transformer=HunyuanVideoTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            text_embed_dim=WIDTH,
            pooled_projection_dim=WIDTH,
            rope_axes_dim=(4, 6, 6),
        ),
    )


def _flux() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextModel

    clip_tokenizer, t5_tokenizer = tokenizers.clip(), tokenizers.t5()
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            shift=3.0,
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=1.15,
            base_image_seq_len=256,
            max_image_seq_len=4096,
        ),
        vae=_image_vae(0.1159, 0.3611),
        text_encoder=CLIPTextModel(_clip_config(clip_tokenizer)).eval(),
        tokenizer=clip_tokenizer,
        text_encoder_2=_t5(t5_tokenizer),
        tokenizer_2=t5_tokenizer,
        transformer=FluxTransformer2DModel(
            in_channels=64,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=WIDTH,
            pooled_projection_dim=WIDTH,
            guidance_embeds=True,
            axes_dims_rope=(4, 6, 6),
        ),
    )


def _qwen_image() -> Any:
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer, ids = tokenizers.qwen()
    config = Qwen2_5_VLConfig(
        text_config={
            "hidden_size": WIDTH,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "vocab_size": len(tokenizer),
            "rope_theta": 1e6,
            "rope_scaling": {"mrope_section": [2, 3, 3], "rope_type": "default", "type": "default"},
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
        },
        vision_config={
            "depth": 1,
            "hidden_size": WIDTH,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": WIDTH,
            "fullatt_block_indexes": [0],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        vision_token_id=ids["<|vision_pad|>"],
    )
    return QwenImagePipeline(
        # The scheduler of Qwen/Qwen-Image: shift_terminal and the long max_image_seq_len are the model's own.
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=0.9,
            base_image_seq_len=256,
            max_image_seq_len=8192,
            shift_terminal=0.02,
        ),
        vae=AutoencoderKLQwenImage(
            base_dim=4,
            z_dim=16,
            dim_mult=[1, 2, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
        ).eval(),
        text_encoder=Qwen2_5_VLForConditionalGeneration(config).eval(),
        tokenizer=tokenizer,
        transformer=QwenImageTransformer2DModel(
            in_channels=64,
            out_channels=16,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=WIDTH,
            axes_dims_rope=(4, 6, 6),
        ),
    )


def _sd3() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
    from transformers import CLIPTextModelWithProjection

    first, second, t5_tokenizer = tokenizers.clip(), tokenizers.clip(), tokenizers.t5()
    return StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_image_vae(0.0609, 1.5305),
        text_encoder=CLIPTextModelWithProjection(_clip_config(first)).eval(),
        tokenizer=first,
        text_encoder_2=CLIPTextModelWithProjection(_clip_config(second)).eval(),
        tokenizer_2=second,
        text_encoder_3=_t5(t5_tokenizer, width=2 * WIDTH),
        tokenizer_3=t5_tokenizer,
        transformer=SD3Transformer2DModel(
            sample_size=32,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=2 * WIDTH,
            caption_projection_dim=32,
            pooled_projection_dim=2 * WIDTH,
            pos_embed_max_size=32,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        ),
    )


BUILDERS = {
    "wan": _wan,
    "hunyuan_video": _hunyuan_video,
    "flux": _flux,
    "qwen_image": _qwen_image,
    "sd3": _sd3,
}
