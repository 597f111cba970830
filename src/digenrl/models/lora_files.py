"""Read the adapter from which training starts (`model.lora.path`), or with which rollouts sample
(`sampling.lora`). Known formats: diffusers, PEFT, kohya's tools, ComfyUI, an export, a run.

The file is foreign: only safetensors are read, names and shapes are checked before a tensor is
loaded, and every layer that is missing or unknown is named.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from digenrl.models.lora import LoraSpec, Names
from digenrl.record.stored_yaml import read_plain

Size = tuple[int, int]
"""(input features, output features) of a linear layer."""
_OF_DIFFUSERS, _OF_PEFT = "pytorch_lora_weights{}.safetensors", "adapter_model.safetensors"
_OF_EXPORTS = (_OF_DIFFUSERS, "lora_comfyui{}.safetensors", "lora_kohya{}.safetensors")
_PEFT_CONFIG, _LAST_WEIGHTS = "adapter_config.json", "checkpoints/last/policy.safetensors"
_METADATA = "lora_adapter_metadata"
"""Key of a file's header under which diffusers keeps rank and alpha."""
_PREFIXES = ("base_model.model.", "transformer.", "diffusion_model.", "lora_unet_")
_DOWN = (".lora_A.default.weight", ".lora_A.weight", ".lora_down.weight", ".lora.down.weight")
_UP = (".lora_B.default.weight", ".lora_B.weight", ".lora_up.weight", ".lora.up.weight")
_OWN = ".default.weight"
"""Ends the names of a run's own tensors."""
_LONGEST, _MOST_TENSORS, _MOST_NAMED = 4 << 20, 100_000, 40
"""Most bytes of a configuration, tensors of a file, and patterns of names in a message."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_START, _SAMPLING = "model.lora.path", "sampling.lora"
"""Keys that name an adapter."""


class LoraFileError(ValueError):
    """The file is no adapter of this network."""


@dataclass
class _Layer:
    """What a file holds of one layer, under the file's name for it."""

    down: str = ""
    up: str = ""
    alpha: str = ""


@dataclass
class _Found:
    """An adapter as it is put together."""

    factors: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    """Layers of the network that this run would not adapt, and that the file adapts."""
    wrong: list[str] = field(default_factory=list)
    """Layers of another shape, rank or scale, with the reason."""
    sizes: set[tuple[int, float]] = field(default_factory=set)
    """(rank, alpha) of the layers in `wrong` that differ by these alone."""


def read_adapter(
    spec: LoraSpec,
    adapted: Sequence[str],
    linears: Mapping[str, Size],
    components: Mapping[str, str],
    names: Names | None,
    swapped: tuple[str, ...] = (),
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return layer -> (A [r, in], B [out, r]) of every adapted layer.

    Args:
        adapted: layers of the network that have an adapter.
        linears: all linear layers of the network.
        components: subfolder of the checkpoint -> prefix of its layers' names.
        names: `checkpoint_names` of the family, for files of kohya's tools and of ComfyUI.
        swapped: `swapped_halves` of the family, in such files.

    Raises:
        LoraFileError: no such file, no adapter, or one of other layers, ranks or scale.
    """
    assert spec.path is not None
    found, path = _Found(), Path(os.path.expanduser(spec.path))
    for file, prefix in _adapter_files(path, components, _START):
        wanted = {name.removeprefix(prefix) for name in adapted if name.startswith(prefix)}
        _read_file(file, prefix, spec, wanted, _part(linears, prefix), names, found, swapped)
    missing = sorted(
        set(adapted) - set(found.factors) - {each.split(":")[0] for each in found.wrong}
    )
    if not (missing or found.unknown or found.outside or found.wrong):
        return found.factors
    said = f"{_START} = {path} is no adapter of this run's layers"
    # The remedies first, because the lists of layers may be long.
    remedies = _remedies(spec, found, missing)
    raise LoraFileError("; ".join([said, *remedies, *_complaints(found, missing)]))


def read_sampling_adapter(
    path: str | Path,
    linears: Mapping[str, Size],
    components: Mapping[str, str],
    names: Names | None,
    swapped: tuple[str, ...] = (),
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return layer -> (A [r, in], B [out, r]) of every layer that the file adapts. Each layer may
    have a rank and a scale of its own; the scale is part of B. Arguments as of `read_adapter`.

    Raises:
        LoraFileError: no such file, no adapter, or an adapter of another network.
    """
    found, path = _Found(), Path(os.path.expanduser(path))
    for file, prefix in _adapter_files(path, components, _SAMPLING):
        _read_file(file, prefix, None, set(), _part(linears, prefix), names, found, swapped)
    if found.unknown or found.wrong:
        said = f"{_SAMPLING} = {path} is no adapter of this network"
        remedy = f"name an adapter of this model, or set {_SAMPLING}=null"
        raise LoraFileError("; ".join([said, remedy, *_complaints(found, [])]))
    return found.factors


def digest_of(factors: Mapping[str, tuple[Tensor, Tensor]]) -> str:
    """Return a digest of an adapter's layers and numbers (xxh3)."""
    state = xxhash.xxh3_64()
    for name, (down, up) in sorted(factors.items()):
        state.update(f"{name} {tuple(down.shape)} {tuple(up.shape)}".encode())
        for part in (down, up):
            # In fp32, so that equal numbers in another dtype have an equal digest.
            state.update(part.float().cpu().contiguous().numpy().data)
    return state.hexdigest()


def _part(linears: Mapping[str, Size], prefix: str) -> dict[str, Size]:
    """Return the layers of one component, without its prefix."""
    return {name.removeprefix(prefix): s for name, s in linears.items() if name.startswith(prefix)}


def _adapter_files(path: Path, components: Mapping[str, str], key: str) -> list[tuple[Path, str]]:
    """Return the files of an adapter, each with the prefix of its layers' names in the network.
    `key` names it."""
    first = next(iter(components.values()))
    if path.suffix in _PICKLES:
        raise LoraFileError(
            f"{key} = {path}: {path.suffix} is a pickle, which can run code when it is "
            "read; convert it to safetensors"
        )
    if path.is_file():
        # A run's own file holds all components under the network's names.
        return [(path, "" if path.name == "policy.safetensors" else first)]
    if not path.is_dir():
        raise LoraFileError(f"{key} = {path}: there is no such file or directory")
    if (last := path / _LAST_WEIGHTS).is_file():
        return [(last, "")]
    for name in _OF_EXPORTS:
        of_parts = [
            (path / name.format(subfolder.removeprefix("transformer")), prefix)
            for subfolder, prefix in components.items()
        ]
        # The first network's file decides. A file of the others may be absent.
        if of_parts[0][0].is_file():
            return [(file, prefix) for file, prefix in of_parts if file.is_file()]
    if (file := path / _OF_PEFT).is_file():
        return [(file, first)]
    files = sorted(file for file in path.glob("*.safetensors") if file.is_file())
    if len(files) == 1:
        return [(files[0], first)]
    raise LoraFileError(
        f"{key} = {path}: no {_LAST_WEIGHTS}, {_OF_DIFFUSERS.format('')} or {_OF_PEFT}, "
        f"and {len(files)} files end in .safetensors; name the file"
    )


def _read_file(
    file: Path,
    prefix: str,
    spec: LoraSpec | None,
    wanted: set[str],
    linears: Mapping[str, Size],
    names: Names | None,
    found: _Found,
    swapped: tuple[str, ...],
) -> None:
    """Add to `found` what one file holds. Names lack the prefix of their component. spec: None
    takes every layer, whatever its rank and scale. Otherwise only the layers in `wanted` are
    taken."""
    try:
        with safe_open(file, framework="pt") as opened:
            keys = list(opened.keys())
            if len(keys) > _MOST_TENSORS:
                raise LoraFileError(f"{file} has {len(keys)} tensors: that is no adapter")
            layers = _group_layers(keys, found)
            if not layers:
                raise LoraFileError(
                    f"{file} holds no adapter (of {len(keys)} tensors none is a low-rank factor); "
                    "weights of a whole network are a model.path"
                )
            stated = _stated_scale(file, opened.metadata() or {}, keys)
            table = _layer_aliases(linears, names)
            own_names = {name.replace(".", "_") for name in linears}
            for name, layer in layers.items():
                members = table.get(name)
                if members is None or not (layer.down and layer.up):
                    found.unknown.append(name)
                    continue
                # Names of another tool: the tensor has that tool's order of halves, too.
                renamed = name not in linears and name not in own_names
                turned = renamed and members[0].endswith(swapped)
                _add_layer(
                    opened, layer, members, prefix, spec, stated, wanted, linears, found, turned
                )
    except (SafetensorError, OSError) as error:
        raise LoraFileError(f"{file} cannot be read as safetensors: {error}") from error


def _group_layers(keys: list[str], found: _Found) -> dict[str, _Layer]:
    """Return the file's layers under their names without the tool's prefix; what is no factor is
    unknown."""
    layers: dict[str, _Layer] = defaultdict(_Layer)
    strange = []
    for key in keys:
        for kind, endings in (("down", _DOWN), ("up", _UP), ("alpha", (".alpha",))):
            ending = next((each for each in endings if key.endswith(each)), None)
            if ending is not None:
                stem = key.removesuffix(ending)
                # A run writes its network's own names; one of two networks has such a prefix.
                for prefix in () if key.endswith(_OWN) else _PREFIXES:
                    stem = stem.removeprefix(prefix)
                setattr(layers[stem], kind, key)
                break
        else:
            strange.append(key)
    if layers:  # else the whole file is something else, and its caller says so
        found.unknown += strange
    return dict(layers)


def _layer_aliases(linears: Mapping[str, Size], names: Names | None) -> dict[str, list[str]]:
    """Return name in a file -> the network's layers that are this layer there, in its order.

    kohya's tools write underscores for dots.
    """
    table = {name: [name] for name in linears}
    for pattern, groups in (names or {}).items():
        for name in linears:
            if block := re.match(pattern, name):
                for members, target in groups.items():
                    whole = [block[0] + member for member in members]
                    if all(member in linears for member in whole):
                        table[target.format(block[1])] = whole
    # The right operand wins: an exact name means its own layer, even if it equals another layer's
    # name in kohya's spelling.
    return {name.replace(".", "_"): members for name, members in table.items()} | table


def _add_layer(
    opened: safe_open,
    layer: _Layer,
    members: list[str],
    prefix: str,
    spec: LoraSpec | None,
    stated: float | None,
    wanted: set[str],
    linears: Mapping[str, Size],
    found: _Found,
    turned: bool,
) -> None:
    """Add one layer of a file, which may be several of the network's."""
    # Shapes come from the header, so that a wrong file costs no memory.
    down_size, up_size = (opened.get_slice(key).get_shape() for key in (layer.down, layer.up))
    # Layers that the file holds as one have one input, and their outputs one after the other.
    inputs, outputs = linears[members[0]][0], sum(linears[member][1] for member in members)
    told = prefix + members[0]
    if len(down_size) != 2 or down_size[1:] != [inputs] or up_size != [outputs, down_size[0]]:
        found.wrong.append(
            f"{told}: factors {down_size} and {up_size}, the layer takes {inputs} and gives "
            f"{outputs}"
        )
        return
    if down_size[0] > 4096:
        found.wrong.append(f"{told}: rank {down_size[0]}, at most 4096")
        return
    factors = [opened.get_tensor(key) for key in (layer.down, layer.up)]
    down, up = (_real_numbers(each) if each.is_floating_point() else None for each in factors)
    if down is None or up is None:
        found.wrong.append(f"{told}: values that are no finite floating-point numbers")
        return
    if turned:
        # The halves are of the outputs, which are the rows of B.
        up = torch.cat(up.chunk(2)[::-1])
    # kohya's tools state alpha beside each layer, others once. Unstated, it is the rank.
    scale = stated if stated is not None else 1.0
    if layer.alpha:
        alpha = _real_numbers(opened.get_tensor(layer.alpha))
        # NaN is close to no scale, so the layer is refused below.
        scale = math.nan if alpha is None or alpha.numel() != 1 else float(alpha) / down_size[0]
    start = 0
    for member in members:
        rows = up[start : start + linears[member][1]]
        start += linears[member][1]
        if spec is not None and member not in wanted:
            # Rows of zeros adapt nothing.
            if bool(rows.any()):
                found.outside.append(prefix + member)
            continue
        own_down, own_up = _trim_rank(down, rows, 1 if spec is None else spec.rank)
        rank = own_down.shape[0]
        if spec is None:
            own_up = own_up * scale
        elif rank != spec.rank or not math.isclose(scale, spec.alpha / spec.rank, rel_tol=1e-6):
            found.wrong.append(f"{prefix}{member}: rank {rank}, scale {scale:g}")
            found.sizes.add((rank, scale * rank))
            continue
        if not math.isfinite(scale):
            found.wrong.append(f"{prefix}{member}: alpha is no number")
        elif prefix + member in found.factors:
            found.wrong.append(f"{prefix}{member}: given twice")
        else:
            found.factors[prefix + member] = own_down.contiguous(), own_up.contiguous()


def _real_numbers(value: Tensor) -> Tensor | None:
    """Return `value` in fp32; None where it holds anything but finite real numbers, or packs
    several of them into a byte."""
    if value.is_complex() or value.dtype == torch.float4_e2m1fn_x2:
        return None
    value = value.float()
    return value if bool(value.isfinite().all()) else None


def _trim_rank(down: Tensor, up: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the factors without columns that add nothing, down to `rank`: of several layers that
    were one in the file each has its own part of the rank."""
    if len(down) <= rank:
        return down, up
    # Columns in use first, and otherwise in their order.
    order = up.any(dim=0).int().argsort(descending=True, stable=True)
    used = int(up.any(dim=0).sum())
    kept = order[: max(used, rank)].sort().values
    return down[kept], up[:, kept]


def _stated_scale(file: Path, metadata: Mapping[str, str], keys: list[str]) -> float | None:
    """Return alpha / rank as the file's tool states it beside the factors; None: not at all."""
    if (text := metadata.get(_METADATA)) is not None and len(text) <= _LONGEST:
        stated = {
            key.rpartition(".")[2]: value for key, value in _parse_mapping(file, text).items()
        }
        return _peft_scale(file, stated)
    if (config := file.parent / _PEFT_CONFIG).is_file() and file.name == _OF_PEFT:
        if config.stat().st_size > _LONGEST:
            raise LoraFileError(f"{config} is longer than {_LONGEST} bytes")
        return _peft_scale(
            config, _parse_mapping(config, config.read_text(encoding="utf-8", errors="replace"))
        )
    if any(key.startswith("base_model.model.") for key in keys):
        raise LoraFileError(
            f"{file} is of PEFT, whose alpha is in {_PEFT_CONFIG}: put that file beside it"
        )
    if any(key.endswith(_OWN) for key in keys):
        # RUN/checkpoints/NAME/policy.safetensors
        config = file.parent.parent.parent / "config.yaml"
        try:
            stored: Any = read_plain(config)
            lora = stored["model"]["lora"]
            return float(lora["alpha"]) / int(lora["rank"])
        # A foreign YAML may fail in any way, and the remedy is the same.
        except Exception as error:
            raise LoraFileError(
                f"{file} is of a run, whose alpha is in {config}, and that cannot be read "
                f"({str(error)[:120]}); name the run's directory"
            ) from error
    return None


def _parse_mapping(file: Path, text: str) -> dict[str, object]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LoraFileError(f"{file}: the adapter's configuration is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise LoraFileError(f"{file}: the adapter's configuration is no mapping")
    return content


def _peft_scale(file: Path, stated: Mapping[str, object]) -> float:
    """Return the scale of a PEFT configuration.

    Raises:
        LoraFileError: it is no plain adapter.
    """
    for key in ("use_dora", "alpha_pattern", "rank_pattern"):
        if stated.get(key):
            raise LoraFileError(
                f"{file} has {key}, which adapters here do not have: merge it into the base "
                "(docs/running.md) and set model.path, or train one of one rank and alpha"
            )
    alpha, rank = stated.get("lora_alpha"), stated.get("r")
    if not isinstance(alpha, int | float) or not isinstance(rank, int) or rank < 1 or alpha <= 0:
        raise LoraFileError(f"{file} has lora_alpha = {alpha!r} and r = {rank!r}")
    # Rank-stabilised LoRA (arXiv:2312.03732) divides by the root.
    return alpha / math.sqrt(rank) if stated.get("use_rslora") else alpha / rank


def _complaints(found: _Found, missing: list[str]) -> Iterator[str]:
    """Yield what a file lacks, and what is wrong in it."""
    for title, names in (
        ("missing in the file", missing),
        ("in the file, and adapted by no target of this run", found.outside),
        ("in the file, and unknown to this network", found.unknown),
        ("of another shape, rank or scale", found.wrong),
    ):
        if names:
            told = list(shorten_names(names))
            more = f" and {len(told) - _MOST_NAMED} more" if len(told) > _MOST_NAMED else ""
            yield f"{len(names)} {title}: {', '.join(told[:_MOST_NAMED])}{more}"


def _remedies(spec: LoraSpec, found: _Found, missing: list[str]) -> list[str]:
    """Return the words with which a run would take the file."""
    remedies = []
    if len(found.sizes) == 1:
        ((rank, alpha),) = found.sizes
        remedies.append(f"set model.lora.rank={rank} model.lora.alpha={alpha:g}")
    if missing or found.outside:
        held = [*found.factors, *found.outside, *(each.split(":")[0] for each in found.wrong)]
        # Without the blocks' numbers. A dot in a target matches itself too.
        if layers := {re.sub(r"^.*?\.\d+\.", "", name) for name in held}:
            targets = ",".join(sorted(layers))
            remedies.append(f"set 'model.lora.targets=[{targets}]', the layers of the file")
    return remedies or [
        f"name a file of this model, of rank {spec.rank} and alpha {spec.alpha:g}, or set "
        f"{_START}=null"
    ]


def shorten_names(names: Sequence[str]) -> Iterator[str]:
    """Yield names with the numbers of their blocks as ranges.

    Example:
        >>> list(shorten_names(["blocks.0.to_q", "blocks.1.to_q", "blocks.3.to_q", "out"]))
        ['blocks.{0-1,3}.to_q', 'out']
    """
    blocks: dict[tuple[str, str], list[int]] = defaultdict(list)
    for name in names:
        if match := re.search(r"(?<=[._])\d+(?=[._])", name):
            blocks[name[: match.start()], name[match.end() :]].append(int(match[0]))
        else:
            blocks[name, ""] = []
    for (before, after), numbers in blocks.items():
        if len(set(numbers)) < 2:
            yield before + "".join(map(str, set(numbers))) + after
            continue
        spans: list[list[int]] = []
        for number in sorted(set(numbers)):
            if spans and spans[-1][1] == number - 1:
                spans[-1][1] = number
            else:
                spans.append([number, number])
        told = ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in spans)
        yield f"{before}{{{told}}}{after}"
