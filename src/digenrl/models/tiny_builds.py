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
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from digenrl.models import tiny_tokenizers as tokenizers
from digenrl.models.pretrained import hide_progress_bars

WIDTH = 32
"""Width of every text encoder but SD3's T5."""
TEXT_LENGTH = 64
"""Tokens that a tiny build's main encoder takes: 512 would cost six times the image's."""
_PARTS_FILE = Path(__file__).with_suffix(".yaml")
BUILDERS: dict[str, dict[str, Any]] = yaml.safe_load(_PARTS_FILE.read_text())
"""Family -> the parts that its tiny pipeline is built of."""


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
        pipeline = _pipeline(family)
        for parameter in pipeline.transformer.parameters():
            # Some families initialise modulations and output layers to zero, which would hide every signal.
            if parameter.ndim > 1 and not parameter.detach().any():
                nn.init.normal_(parameter, std=0.02)
    pipeline.save_pretrained(folder)


def _digest() -> str:
    parts = [path.read_bytes() for path in (Path(__file__), Path(tokenizers.__file__), _PARTS_FILE)]
    parts += [f"{name}=={version(name)}".encode() for name in ("diffusers", "transformers", "tokenizers", "torch")]
    return hashlib.blake2b(b"\0".join(parts), digest_size=6).hexdigest()


def _pipeline(family: str) -> Any:
    """The family's pipeline with its parts."""
    import diffusers

    parts: dict[str, Any] = {}
    for name, part in BUILDERS[family].items():
        if name.startswith("text_encoder"):
            tokenizer, parts[name] = ENCODERS[part]()
            parts[name.replace("text_encoder", "tokenizer")] = tokenizer
        elif name != "pipeline":
            parts[name] = getattr(diffusers, part["class"])(**{key: part[key] for key in part if key != "class"})
    return getattr(diffusers, BUILDERS[family]["pipeline"])(**parts)


def _sizes(tokenizer: Any, layers: int) -> dict[str, Any]:
    """What the small CLIP and LLaMA have in common."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": layers,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _clip(projected: bool = False) -> tuple[Any, Any]:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    tokenizer = tokenizers.clip()
    model = CLIPTextModelWithProjection if projected else CLIPTextModel
    return tokenizer, model(CLIPTextConfig(**_sizes(tokenizer, 2), projection_dim=WIDTH))


def _t5(width: int = WIDTH, multilingual: bool = False) -> tuple[Any, Any]:
    from transformers import T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

    tokenizer = tokenizers.t5()
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
    return tokenizer, model_class(config)


def _llama() -> tuple[Any, Any]:
    from transformers import LlamaConfig, LlamaModel

    tokenizer = tokenizers.llama3()
    return tokenizer, LlamaModel(LlamaConfig(**_sizes(tokenizer, 4), num_key_value_heads=2))


def _qwen() -> tuple[Any, Any]:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer, ids = tokenizers.qwen()
    text = {
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
    }
    vision = {
        "depth": 1,
        "hidden_size": WIDTH,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": WIDTH,
        "fullatt_block_indexes": [0],
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        vision_token_id=ids["<|vision_pad|>"],
    )
    return tokenizer, Qwen2_5_VLForConditionalGeneration(config)


ENCODERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "clip": _clip,
    "clip_projected": partial(_clip, projected=True),
    "t5": _t5,
    "wide_t5": partial(_t5, width=2 * WIDTH),
    "umt5": partial(_t5, multilingual=True),
    "llama": _llama,
    "qwen": _qwen,
}
"""Name in tiny_builds.yaml -> (tokenizer, text encoder)."""
