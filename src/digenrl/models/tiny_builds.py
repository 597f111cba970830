"""Tiny builds: every family's real classes and latent geometry with small widths and depths, random weights, and
tokenizers trained here on a few hundred captions and the models' prompt templates. Nothing is downloaded.

A build is made on first use (`ensure`) and kept under a name that hashes everything it is made from, so that a changed
recipe or library never reads an old build. It is byte-reproducible: same seed and libraries, same files.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from digenrl.models import tiny_tokenizers as tokenizers
from digenrl.models.pretrained import hide_progress_bars

TEXT_LENGTH = 64
"""Tokens that a tiny build's main encoder takes: 512 would cost six times the image's."""
_PARTS_FILE = Path(__file__).with_suffix(".yaml")
_ENCODERS_FILE = Path(__file__).with_name("tiny_encoders.yaml")
BUILDERS: dict[str, dict[str, Any]] = yaml.safe_load(_PARTS_FILE.read_text())
"""Family -> the parts that its tiny pipeline is built of."""
ENCODERS: dict[str, dict[str, Any]] = yaml.safe_load(_ENCODERS_FILE.read_text())
"""Text encoder in `BUILDERS` -> its tokenizer, class and configuration."""


def cache_root(kind: str = "tiny") -> Path:
    """Where builds are kept, or another `kind` of what can be made again: $DIGENRL_CACHE, else .cache/ of a source
    checkout, else the user's cache directory."""
    if os.environ.get("DIGENRL_CACHE"):
        return Path(os.environ["DIGENRL_CACHE"]) / kind
    checkout = Path(__file__).resolve().parents[3]
    if (checkout / "pyproject.toml").exists():
        return checkout / ".cache" / kind
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "digenrl" / kind


def ensure(family: str, seed: int = 0, root: Path | None = None) -> Path:
    """Directory of the family's tiny build in diffusers layout, built now if it is not there.

    Safe to call from several ranks at once: a build appears by one rename, and the first one wins.
    """
    require(family)
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


def require(family: str) -> None:
    """Raise ValueError for a family that has no tiny build."""
    if family not in BUILDERS:
        raise ValueError(
            f"no tiny build of family '{family}'; known: {', '.join(BUILDERS)}. Describe one in {_PARTS_FILE.name}, or "
            "set hardware.build=real."
        )


def build(family: str, folder: Path, seed: int = 0) -> None:
    """Make the family's pipeline with weights drawn from `seed` and save it into `folder`."""
    hide_progress_bars()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = _pipeline(family)
        transformers = [part for name, part in pipeline.components.items() if name.startswith("transformer") and part]
        for parameter in (parameter for network in transformers for parameter in network.parameters()):
            # Some families initialise modulations and output layers to zero, which would hide every signal.
            if parameter.ndim > 1 and not parameter.detach().any():
                nn.init.normal_(parameter, std=0.02)
    pipeline.save_pretrained(folder)


def _digest() -> str:
    files = (Path(__file__), Path(tokenizers.__file__), tokenizers.DATA, _PARTS_FILE, _ENCODERS_FILE)
    parts = [path.read_bytes() for path in files]
    parts += [f"{name}=={version(name)}".encode() for name in ("diffusers", "transformers", "tokenizers", "torch")]
    return hashlib.blake2b(b"\0".join(parts), digest_size=6).hexdigest()


def _pipeline(family: str) -> Any:
    """The family's pipeline with its parts."""
    import diffusers

    made = getattr(diffusers, BUILDERS[family]["pipeline"])
    own = sys.modules[made.__module__]  # knows parts that nobody else has
    parts: dict[str, Any] = {}
    for name, part in BUILDERS[family].items():
        if name.startswith("text_encoder"):
            parts[name.replace("text_encoder", "tokenizer")], parts[name] = _encoder(part)
        elif name == "image_encoder":
            parts["image_processor"], parts[name] = _encoder(part)
        elif name == "processor":
            parts[name] = _processor(part, parts["tokenizer"])
        elif isinstance(part, dict):
            kind = getattr(diffusers, part["class"], None) or getattr(own, part["class"])
            parts[name] = kind(**{key: part[key] for key in part if key != "class"})
        elif name != "pipeline":
            parts[name] = part
    return made(**parts)


def _processor(pixels: dict[str, int], tokenizer: Any) -> Any:
    import transformers

    images = transformers.Qwen2VLImageProcessor(size=pixels)
    return transformers.Qwen2VLProcessor(images, tokenizer, transformers.Qwen2VLVideoProcessor())


def _encoder(name: str) -> tuple[Any, Any]:
    """(tokenizer or image processor, encoder) of an entry of tiny_encoders.yaml."""
    import transformers

    spec = ENCODERS[name]
    if "processor" in spec:
        processor = transformers.CLIPImageProcessor(**spec["processor"])
        vision = getattr(transformers, spec["class"])
        return processor, vision(vision.config_class(**spec["config"]))
    tokenizer = getattr(tokenizers, spec["tokenizer"])()

    def resolved(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: resolved(item) for key, item in value.items()}
        if isinstance(value, str) and value.startswith("<"):
            return len(tokenizer) if value == "<vocabulary>" else tokenizer.convert_tokens_to_ids(value)
        return value

    model = getattr(transformers, spec["class"])
    return tokenizer, model(model.config_class(**resolved(spec["config"])))
