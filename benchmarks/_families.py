"""Networks of the model families at published size, and forwards of them as the families' own
adapters make them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

import digenrl
from digenrl.facts import ENDING, Facts, facts_by_family
from digenrl.models import tiny as tiny_builds
from digenrl.models.pipeline import DiffusersPolicy

Grid = tuple[int, int, int]
"""Latent frames, rows and columns, in tokens."""


@cache
def models() -> dict[str, Facts]:
    """Return model -> facts of its family, for every option of configs/model that has a published
    size."""
    return {model: facts for facts in facts_by_family().values() for model in facts.models}


def adapter(facts: Facts) -> type[DiffusersPolicy]:
    """Return the family's adapter."""
    inside = facts.file.relative_to(next(iter(digenrl.__path__))).parts
    module = ".".join(("digenrl", *inside)).removesuffix(ENDING)
    found: type[DiffusersPolicy] = getattr(import_module(module), facts.adapter)
    return found


def network(model: str, blocks: int | None = None) -> nn.Module:
    """Return the model's network, with `blocks` of its first list of blocks and the others in
    proportion; None: all."""
    facts = models()[model]
    kind, sizes = adapter(facts), facts.models[model]
    arguments = dict(sizes["network"])
    if blocks is not None:
        depth = arguments[kind.depths[0]]
        arguments |= {
            name: arguments[name] * blocks // depth for name in kind.depths if name in arguments
        }
        arguments |= {
            name: numbers[: len(numbers) * blocks // depth]
            for name, numbers in arguments.items()
            if name.endswith("_layers") and isinstance(numbers, list)
        }
    parts: list[nn.Module] = [kind.transformer_class(**arguments) for _ in kind.components]
    return kind.joined(parts)


def decoder(facts: Facts) -> nn.Module:
    """Return the family's autoencoder at published size."""
    spec = tiny_builds.describe_part(facts, "vae")
    given = {key: value for key, value in spec.items() if key not in ("class", "published")}
    made: nn.Module = adapter(facts).codec_class.vae_class(**given | spec.get("published", {}))
    return made


def policy(facts: Facts, grid: Grid) -> DiffusersPolicy:
    """Return the family's policy on its tiny build, for samples of so many tokens. Its network is
    there to be replaced: `policy(facts, grid).transformer = network(model)`."""
    kind, (frames, rows, columns) = adapter(facts), grid
    codec = kind.codec_class
    stride, length = codec.temporal_stride, codec.text_length
    video: dict[str, Any] = {} if stride is None else {"frames": (frames - 1) * stride + 1}
    text: dict[str, Any] = {} if length is None else {"max_sequence_length": length}
    side = codec.spatial_stride
    return kind("", rows * side, columns * side, build="tiny", dtype="float32", **video, **text)


def conditioning(
    facts: Facts, policy: DiffusersPolicy, text: int, glyphs: int = 0
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of one prompt's conditioning at published size, with `text` tokens."""
    frames, rows, columns = (1, 1, *policy.latent_shape)[-3:]
    sizes = {
        "text": policy.codec.text_length or text,
        "glyphs": glyphs,
        "tokens": policy.latent_shape[0],
    }
    sizes |= {"frames": frames, "rows": rows, "columns": columns}
    return {
        key: tuple(sizes[size] if isinstance(size, str) else size for size in shape)
        for key, shape in facts.conditioning.items()
    }


def inputs(
    policy: DiffusersPolicy,
    rows: int,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    draw: Callable[..., Tensor] = torch.zeros,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return latents, sigmas and conditioning of `rows` samples as `predict` takes them. Every
    token of text is read, so there are no masks."""
    latents = draw(rows, *policy.latent_shape, dtype=dtype)
    given = {
        key: draw(rows, *shape, dtype=dtype)
        for key, shape in shapes.items()
        if not key.endswith("mask")
    }
    return latents, torch.full((rows,), 0.5), given
