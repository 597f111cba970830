"""The project's own policies with random weights, at real or tiny sizes, made on the device: no
file, no download.

Inside `random_weights` the two places where a policy reads weights (one component of diffusers; a
pipeline's text encoders) make them instead. Parameters are built on the meta device and filled
where they stay, so that nothing is held twice. Tokenizers and the scheduler's configuration come
from the tiny builds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import transformers
from accelerate import init_empty_weights
from diffusers import DiffusionPipeline
from torch import nn

from benchmarks import _families
from digenrl.facts import facts_by_family
from digenrl.models import pretrained
from digenrl.models import tiny as tiny_builds

TINY, REAL = "tiny", "real"
FAMILY = {
    next(iter(facts.models)): family
    for family, facts in facts_by_family().items()
    if facts.measured
}
"""Model (configs/model) -> family, of those that are measured."""
STD = 0.02
"""Standard deviation of matrices, as most transformers are initialised. Vectors that scale are 1,
all others 0."""


@contextmanager
def random_weights(model: str, size: str, device: torch.device) -> Iterator[None]:
    """Inside, policies of `model` get random weights on `device`, of the `size` tiny or real."""
    family = FAMILY[model]

    def component(of: type[Any], path: str, subfolder: str, dtype: torch.dtype) -> nn.Module:
        with init_empty_weights(include_buffers=False):
            if size == REAL and subfolder == "transformer":
                made = _families.network(model)
            else:
                config = dict(of.load_config(path, subfolder=subfolder, local_files_only=True))
                made = of.from_config(
                    config | (published(family, subfolder) if size == REAL else {})
                )
        exact = tuple(getattr(made, "_keep_in_fp32_modules", None) or ())
        return fill(made, device, dtype, exact).eval()

    def pipeline(
        of: type[Any], path: str, dtype: torch.dtype, local_files_only: bool, **given: Any
    ) -> Any:
        parts = dict(given)
        for name in (name for name in pretrained.model_index(path) if name not in given):
            if name.startswith("text_encoder"):
                parts[name] = fill(encoder(family, name, size, path), device, dtype)
            elif name.startswith("tokenizer"):
                parts[name] = transformers.AutoTokenizer.from_pretrained(
                    path, subfolder=name, local_files_only=True
                )
        return of(**parts)

    with (
        mock.patch.object(pretrained, "load_component", component),
        mock.patch.object(DiffusionPipeline, "from_pretrained", classmethod(pipeline)),
    ):
        yield


def encoder(family: str, name: str, size: str, path: str) -> nn.Module:
    """Return a text encoder of the family's pipeline, without values."""
    cls = getattr(transformers, tiny_builds.describe_part(facts_by_family()[family], name)["class"])
    config = cls.config_class.from_pretrained(path, subfolder=name, local_files_only=True).to_dict()
    if size == REAL:
        config = merged(config, published(family, name))
    with init_empty_weights(include_buffers=False):
        made: Any = cls(cls.config_class(**config))
    made.tie_weights()  # parameters that are made empty are never the same ones
    frozen: nn.Module = made.eval().requires_grad_(False)
    return frozen


def published(family: str, name: str) -> dict[str, Any]:
    """Return what differs from the tiny build at published size; {} where nothing does."""
    part = (
        tiny_builds.describe_part(facts_by_family()[family], name)
        if name in facts_by_family()[family].tiny
        else {}
    )
    found: dict[str, Any] = part.get("published", {})
    return found


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """`old` with the values of `new`, nested ones one by one. Lists per layer follow from the new
    numbers."""
    kept = {key: value for key, value in old.items() if key != "layer_types"}
    nested = {
        key: merged(kept[key], value)
        for key, value in new.items()
        if isinstance(kept.get(key), dict)
    }
    return kept | new | nested


@torch.no_grad()
def fill(
    module: nn.Module, device: torch.device, dtype: torch.dtype, exact: tuple[str, ...] = ()
) -> nn.Module:
    """Give every parameter values on `device`, in `dtype` (those under a name in `exact`: fp32),
    and move the rest."""
    made: dict[int, nn.Parameter] = {}
    for path, owner in module.named_modules():
        for name, parameter in owner._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:  # tied weights stay tied
                full = f"{path}.{name}"
                kept = torch.float32 if any(part in full for part in exact) else dtype
                value = torch.empty(parameter.shape, dtype=kept, device=device)
                if value.dim() > 1:
                    value.normal_(std=STD)
                else:
                    value.fill_(1.0 if name == "weight" else 0.0)
                made[id(parameter)] = nn.Parameter(value, parameter.requires_grad)
            owner._parameters[name] = made[id(parameter)]
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = buffer.to(device)
    return module
