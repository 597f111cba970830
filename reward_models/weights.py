"""Weights of scorers: where they come from, their digests, and small random ones for `build: tiny`.

A tiny build writes a checkpoint directory of the real format, and the scorer loads it with the code
for real checkpoints. Only the numbers inside mean nothing. They are the same in every process,
whatever the caller's RNG state.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import xxhash
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import Tensor, nn

from digenrl.model_folder import require_data

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
BUILDS = ("real", "tiny")
_SEED = 20240607


@contextmanager
def checkpoint(path: str | None, build: str, make: Callable[[Path], None]) -> Iterator[str]:
    """The checkpoint to load from: `path` for the real build, a temporary directory filled by
    `make` for the tiny one.

    Raises ValueError for another `build`, and for a real build without a path.
    """
    if build not in BUILDS:
        raise ValueError(f"build is {build!r}: choose one of {', '.join(BUILDS)} (hardware.build).")
    if build == "real":
        if path is None:
            raise ValueError("build=real needs `path`: a local directory or file, or a hub id.")
        require_plain(path)
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="digenrl-tiny-") as directory:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            make(Path(directory))
        yield directory


def require_plain(name: str | Path) -> None:
    """Raise ValueError if the files of a model, in a directory or in the hub's cache, name code."""
    folder = Path(os.path.expanduser(name))
    if not folder.exists() and _HUB_ID.fullmatch(str(name)):
        try:
            folder = Path(snapshot_download(str(name), local_files_only=True))
        except (OSError, ValueError):
            return  # whoever loads it says so
    require_data(folder)


def read_state(file: Path, needed: str) -> dict[str, Tensor]:
    """Return the tensors of a `.safetensors` file, or of a `.pt` / `.pth` one (read with
    weights_only=True).

    Raises FileNotFoundError saying what is `needed`.
    """
    if not file.is_file():
        raise FileNotFoundError(f"No weights at {file}: {needed}.")
    if file.suffix == ".safetensors":
        return load_file(file)
    content = torch.load(file, map_location="cpu", weights_only=True)
    return content.get("state_dict", content)


def files_digest(paths: Sequence[Path]) -> str:
    """Return xxh3-128 (hex) of the names and contents of `paths`, in the order given."""
    digest = xxhash.xxh3_128()
    for path in paths:
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()


def module_digest(*modules: nn.Module) -> str:
    """Return xxh3-128 (hex) of the names, shapes, dtypes and values of the modules' state."""
    digest = xxhash.xxh3_128()
    for module in modules:
        for name, tensor in module.state_dict().items():
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
            digest.update(
                tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
    return digest.hexdigest()


def make_clip(directory: Path) -> None:
    """Write a CLIP (32 pixels, two layers) with a byte-level tokenizer, laid out as the hub's
    checkpoints are."""
    from transformers import CLIPConfig, CLIPModel

    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(directory)
    tower = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    words = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 77,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {**tower, "image_size": 32, "patch_size": 8}
    config = CLIPConfig(text_config={**tower, **words}, vision_config=vision, projection_dim=16)
    CLIPModel(config).save_pretrained(directory, safe_serialization=True)


def byte_tokenizer():  # type: ignore[no-untyped-def]  # the class is transformers', imported late
    """Return a CLIPTokenizer over single bytes, without merges: any text has tokens."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    symbols = sorted(ByteLevel.alphabet())
    symbols += [symbol + "</w>" for symbol in symbols] + ["<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[])
