"""Tiny builds: every family's real classes and latent geometry with small widths and depths, and
random weights.

Tokenizers are trained here on a few hundred captions and the models' prompt templates. Nothing is
downloaded. `tiny` in a family's facts file describes its build. tiny_parts.yaml has the parts that
families share.

A build is made on first use (`ensure`). Its name is a hash of everything that it is made from, so a
changed recipe or library never reads an old build. Builds are byte-reproducible: same seed and
libraries, same files.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from torch import nn

from digenrl.facts import ENDING, Facts, facts_by_family
from digenrl.models import tiny_tokenizers as tokenizers
from digenrl.models.pretrained import cache_root, hide_progress_bars, require_writable

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from transformers import (
        BaseImageProcessor,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        ProcessorMixin,
    )

TEXT_LENGTH = 64
"""Tokens that a tiny build's main encoder takes: 512 would cost six times the image's."""
_SHARED_FILE = Path(__file__).with_name("tiny_parts.yaml")
_SHARED: dict[str, dict[str, Any]] = yaml.safe_load(_SHARED_FILE.read_text())
"""Name -> description of a part that the builds of several families have."""


def ensure(facts: Facts | str, seed: int = 0, root: Path | None = None) -> Path:
    """Return the directory of a family's tiny build in diffusers layout, made on first use.

    Safe to call from several ranks at once: a build appears by one rename, and the first one wins.
    """
    facts = require_facts(facts)
    target = _build_path(facts, seed, root)
    root = target.parent
    if target.exists():
        return target
    require_writable(root)
    with tempfile.TemporaryDirectory(prefix=f".{facts.family}-", dir=root) as scratch:
        made = build_pipeline(facts, Path(scratch) / "build", seed)
        try:
            os.replace(made, target)
        except OSError:  # another rank was first
            if not target.exists():
                raise
    return target


def require_place(facts: Facts | str) -> None:
    """Check that the tiny build of a family is here, or can be written.

    Raises:
        PretrainedError: neither.
    """
    if not (target := _build_path(require_facts(facts))).exists():
        require_writable(target.parent)


def _build_path(facts: Facts, seed: int = 0, root: Path | None = None) -> Path:
    root = cache_root("tiny") if root is None else root
    return root / f"{facts.family}-{seed}-{_build_digest(facts)}"


def require_facts(facts: Facts | str) -> Facts:
    """Return the facts of a family, given themselves or by the family's name. Raise ValueError
    without a tiny build."""
    found = facts_by_family().get(facts) if isinstance(facts, str) else facts
    if found is None or not found.tiny:
        known = [family for family, facts in facts_by_family().items() if facts.tiny]
        raise ValueError(
            f"no tiny build of family '{found.family if found else facts}'; known: "
            f"{', '.join(known)}. Describe one under `tiny` in NAME{ENDING} beside the adapter "
            "NAME.py, or set hardware.build=real."
        )
    return found


def describe_part(facts: Facts, name: str) -> Any:
    """Return the description of part `name` of the family's pipeline; what `like` names is filled
    in."""
    described = require_facts(facts).tiny[name]
    if isinstance(described, str):
        return _SHARED[described]
    if isinstance(described, dict) and "like" in described:
        return {
            key: value
            # The right operand wins: a family's own values.
            for key, value in (_SHARED[described["like"]] | described).items()
            if key != "like"
        }
    return described


def build_pipeline(facts: Facts | str, folder: Path, seed: int = 0) -> Path:
    """Make the family's pipeline with weights drawn from `seed`, save it into `folder`, and return
    `folder`."""
    facts = require_facts(facts)
    hide_progress_bars()
    # The caller's random numbers go on as if nothing had been drawn.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = _assemble_pipeline(facts)
        transformers = [
            part
            for name, part in pipeline.components.items()
            if name.startswith("transformer") and part
        ]
        for parameter in (
            parameter for network in transformers for parameter in network.parameters()
        ):
            # Some families initialise modulations and output layers to zero, which would hide every
            # signal.
            if parameter.ndim > 1 and not parameter.detach().any():
                nn.init.normal_(parameter, std=0.02)
    pipeline.save_pretrained(folder)
    if not list(folder.glob("transformer/*.safetensors")):
        raise RuntimeError(
            f"the tiny build of {facts.family} has no weights: in a process group rank 0 alone "
            "writes them; call digenrl.models.tiny.ensure before the group begins"
        )
    return folder


@functools.cache  # each version is read from the library's metadata, which takes 5 ms
def _library_versions() -> tuple[str, ...]:
    names = ("diffusers", "transformers", "tokenizers", "torch")
    return tuple(f"{name}=={version(name)}" for name in names)


def _build_digest(facts: Facts) -> str:
    files = (Path(__file__), Path(tokenizers.__file__), tokenizers.DATA, _SHARED_FILE)
    parts = [path.read_bytes() for path in files] + [json.dumps(facts.tiny).encode()]
    # Another version may initialise or save the same build otherwise.
    parts += [library.encode() for library in _library_versions()]
    return hashlib.blake2b(b"\0".join(parts), digest_size=6).hexdigest()


def _assemble_pipeline(facts: Facts) -> DiffusionPipeline | _Modular:
    """Return the family's pipeline with its parts."""
    import diffusers

    made = getattr(diffusers, facts.tiny["pipeline"])
    own = sys.modules[made.__module__]  # knows parts that nobody else has
    parts: dict[str, Any] = {}
    for name in facts.tiny:
        if name == "pipeline":
            continue
        spec = describe_part(facts, name)
        if name.startswith("text_encoder"):
            parts[name.replace("text_encoder", "tokenizer")], parts[name] = _make_encoder(spec)
        elif name == "image_encoder":
            parts["image_processor"], parts[name] = _make_encoder(spec)
        elif name == "processor":
            parts[name] = _make_processor(spec, parts["tokenizer"])
        elif isinstance(spec, dict):
            kind = getattr(diffusers, spec["class"], None) or getattr(own, spec["class"])
            parts[name] = kind(
                **{key: spec[key] for key in spec if key not in ("class", "published")}
            )
        else:
            parts[name] = spec
    if hasattr(made, "default_blocks_name"):
        return _Modular(made.__name__, parts)
    if "tokenizer" not in inspect.signature(made).parameters:  # the processor has it
        del parts["tokenizer"]
    return made(**parts)


@dataclass
class _Modular:
    """A modular pipeline: diffusers would write the folder that it is saved to into its index."""

    name: str
    components: dict[str, Any]

    def save_pretrained(self, folder: Path) -> None:
        """Save every component, and an index of their classes."""
        index: dict[str, Any] = {"_class_name": self.name}
        for name, part in self.components.items():
            part.save_pretrained(folder / name)
            index[name] = [type(part).__module__.partition(".")[0], type(part).__name__]
        (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


def _make_processor(spec: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    """Return a processor of texts and pictures, by default that of Qwen2-VL, with the picture sizes
    of `spec`."""
    import transformers

    made = getattr(transformers, spec.get("class", "Qwen2VLProcessor"))
    videos = getattr(transformers, made.__name__.replace("Processor", "VideoProcessor"))
    pixels = {key: spec[key] for key in ("shortest_edge", "longest_edge")}
    images = transformers.Qwen2VLImageProcessor(size=pixels)
    return made(images, tokenizer, videos(), chat_template=spec.get("chat_template"))


def _make_encoder(
    spec: dict[str, Any],
) -> tuple[PreTrainedTokenizerBase | BaseImageProcessor, PreTrainedModel]:
    """Return (tokenizer or image processor, encoder) of a part."""
    import transformers

    if "processor" in spec:
        processor = transformers.CLIPImageProcessor(**spec["processor"])
        vision = getattr(transformers, spec["class"])
        return processor, vision(vision.config_class(**spec["config"]))
    templates = [[spec["template"]]] if "template" in spec else []
    tokenizer = getattr(tokenizers, spec["tokenizer"])(*templates)

    def resolve_value(value: object) -> object:
        if isinstance(value, dict):
            return {key: resolve_value(item) for key, item in value.items()}
        # "<vocabulary>" is the tokenizer's size, any other "<...>" the number of that token.
        if isinstance(value, str) and value.startswith("<"):
            return (
                len(tokenizer)
                if value == "<vocabulary>"
                else tokenizer.convert_tokens_to_ids(value)
            )
        return value

    model = getattr(transformers, spec["class"])
    values = {key: resolve_value(item) for key, item in spec["config"].items()}
    return tokenizer, model(model.config_class(**values))
