"""Low-rank adapters of a transformer: which layers get one, and how it computes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from digenrl.keys import generator

ADAPTER = "default"
"""diffusers keeps LoRA metadata (alpha) only for this adapter name when it saves."""
Names = Mapping[str, Mapping[tuple[str, ...], str]]
"""Pattern of a block's name in diffusers -> its layers that a checkpoint holds as one -> the
checkpoint's name for them.

The braces {} in a name stand for the block's number. An empty mapping means that the names are the
same.
"""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of trained weights, noise levels and velocities: fp32, or fp64 if the policy
    computes in fp64."""
    return torch.promote_types(dtype, torch.float32)


class CastLinear(nn.Linear):
    """A linear layer that computes in the dtype of its input, for an adapter's fp32 weights.

    The weights are cast on use, as by autocast. So the backward pass keeps the input once, in 16
    bits, for all layers that read the same input. In peft each adapted layer keeps an fp32 copy of
    its input, and multiplies in fp32.
    """

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight.to(input.dtype))


class AdaptedLinear(LoraLinear):
    """A linear layer with its adapter, whose output is written once.

    peft scales the adapter's output and adds it, in two more passes over the activations, each way.
    Here the scale is part of the second factor, and the sum part of its product.
    """

    start_a: Tensor | None
    """Factors that training started from, if the reference is the loaded adapter; buffers."""
    start_b: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.base_layer(x)  # [..., out]
        if not self._disable_adapters:
            low: Tensor = self.lora_A[ADAPTER](x)  # [..., rank]
            up = self.lora_B[ADAPTER].weight
        elif self.start_a is not None and self.start_b is not None:
            low, up = nn.functional.linear(x, self.start_a.to(x.dtype)), self.start_b
        else:
            return rows
        # Cast first: a rank that only generates holds what the cast gives.
        second = up.to(rows.dtype) * self.scaling[ADAPTER]  # [out, rank]
        # rows + low x second^T in one pass over the output.
        return torch.addmm(rows.flatten(0, -2), low.flatten(0, -2), second.t()).view(rows.shape)


PRESETS = ("attention", "attention_ff")
"""Values of `targets` that mean a family's own layers."""


class LoraKeys(TypedDict):
    """Keys of `model.lora`, which are those of `LoraSpec`."""

    rank: int
    alpha: float
    targets: str | Sequence[str]
    expected: NotRequired[int | None]
    seed: NotRequired[int | None]
    path: NotRequired[str | None]


@dataclass(frozen=True)
class LoraSpec:
    """The linear layers of the transformer that get a low-rank adapter, and its size; scale = alpha
    / rank."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Regular expressions. A layer is adapted when one of them matches a dot-aligned suffix of its
    name."""
    expected: int | None = None
    """Number of layers that must match; None = only zero is an error."""
    seed: int = 0
    """Seed of the A matrices (B is 0), so that every rank starts from the same adapter
    (`first_factor`)."""
    path: str | None = None
    """Adapter to go on from: a file, or a directory of diffusers, PEFT or a run; None: a new
    one."""

    @classmethod
    def from_config(cls, config: LoraKeys) -> LoraSpec:
        """Return the spec of the group `model.lora`.

        Raises:
            ValueError: the mapping has another key.
        """
        allowed = set(LoraKeys.__annotations__)
        for key in config:
            if key not in allowed:
                nearest = difflib.get_close_matches(str(key), allowed, n=1)
                hint = f"; did you mean lora.{nearest[0]}?" if nearest else ""
                raise ValueError(
                    f"unknown key lora.{key}; allowed: {', '.join(sorted(allowed))}{hint}"
                )
        missing = sorted({"rank", "alpha", "targets"} - set(config))
        if missing:
            raise ValueError(
                f"lora needs {', '.join(missing)}; set model.lora.{missing[0]} or model.lora=null"
            )
        targets, expected, path = config["targets"], config.get("expected"), config.get("path")
        return cls(
            rank=int(config["rank"]),
            alpha=float(config["alpha"]),
            targets=(targets,) if isinstance(targets, str) else tuple(targets),
            expected=None if expected is None else int(expected),
            seed=int(config.get("seed") or 0),
            path=None if path is None else str(path),
        )

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha <= 0:
            raise ValueError(
                f"lora.rank must be >= 1 and lora.alpha > 0, got rank={self.rank}, "
                f"alpha={self.alpha}"
            )


def lora_modules(transformer: nn.Module, targets: Sequence[str]) -> list[str]:
    """Return the names of the linear layers that `targets` match.

    Raises:
        ValueError: a target matches nothing; the message names the first one.
    """
    linear = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    matched: set[str] = set()
    for target in targets:
        pattern = re.compile(rf"(?:.*\.)?(?:{target})")
        hits = [name for name in linear if pattern.fullmatch(name)]
        if not hits:
            suffixes = sorted({re.sub(r"^.*\.\d+\.", "", name) for name in linear})
            nearest = difflib.get_close_matches(target, suffixes, n=1)
            hint = f"; nearest: {nearest[0]}" if nearest else ""
            raise ValueError(
                f"LoRA target '{target}' matches no linear layer of "
                f"{type(transformer).__name__}{hint}. Layers end in: {', '.join(suffixes)}"
            )
        matched.update(hits)
    return [name for name in linear if name in matched]


def inject_lora(transformer: nn.Module, spec: LoraSpec) -> list[str]:
    """Add the adapter to `transformer` (base frozen, adapter in fp32), and return the names of the
    adapted layers.

    A is Gaussian and B zero, as Flow-GRPO initialises (yifan123/flow_grpo scripts/train_sd3.py).

    Raises:
        ValueError: a target matches nothing, the number of layers is not `spec.expected`, or the
            scale is not alpha / rank.
    """
    names = lora_modules(transformer, spec.targets)
    if spec.expected is not None and len(names) != spec.expected:
        raise ValueError(
            f"LoRA would adapt {len(names)} layers of {type(transformer).__name__}, expected "
            f"{spec.expected}: the checkpoint's architecture or lora.targets={list(spec.targets)} "
            f"changed; if intended, set model.lora.expected={len(names)}"
        )
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,  # type: ignore[arg-type]  # peft types int, but keeps and divides whatever it is given
        target_modules=names,
    )
    with torch.random.fork_rng(devices=[]):  # peft draws an A of its own
        transformer.add_adapter(config, adapter_name=ADAPTER)  # type: ignore[operator]
    adapted = {name: m for name, m in transformer.named_modules() if isinstance(m, BaseTunerLayer)}
    if sorted(adapted) != sorted(names):
        differing = sorted(set(names) ^ set(adapted))
        raise ValueError(
            f"peft adapted {len(adapted)} layers, {len(names)} were named: {differing}"
        )
    for name, module in adapted.items():
        factor = module.lora_A[ADAPTER].weight  # type: ignore[attr-defined]
        if not factor.is_meta:  # `deferred.fill_parameters` draws those
            factor.data.copy_(first_factor(spec, name, factor.shape[1]))
        scale = module.scaling[ADAPTER]  # type: ignore[attr-defined]
        if scale != spec.alpha / spec.rank:
            raise ValueError(
                f"LoRA scale of {name} is {scale}, not alpha / rank = {spec.alpha / spec.rank}"
            )
    # After the injection the factors alone require a gradient.
    for parameter in transformer.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(wide_dtype(parameter.dtype))
    for adapted_layer in adapted.values():
        layer: Any = adapted_layer
        # Another class for the same modules, so that peft's names and its saving stay.
        layer.__class__ = AdaptedLinear
        layer.start_a = layer.start_b = None
        for factor in (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]):
            factor.__class__ = CastLinear
    return names


def first_factor(spec: LoraSpec, layer: str, inputs: int) -> Tensor:
    """Return A of a layer, [rank, inputs] fp32 on the CPU: Gaussian with deviation 1 / rank, as
    peft's "gaussian".

    It is drawn by the layer's name through `keys`, and not by torch, whose numbers differ
    in the last bit between kinds of processors. Ranks of unequal machines begin with equal
    adapters, in whatever order they draw them.
    """
    drawn = generator(spec.seed, "lora_A", layer).standard_normal((spec.rank, inputs), np.float32)
    return torch.from_numpy(drawn) / spec.rank
