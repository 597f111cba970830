"""Other tools' names for an adapter: diffusers' own converters read them back to the same update of
every layer."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel, WanPipeline
from diffusers.loaders.single_file_utils import (
    convert_sd3_transformer_checkpoint_to_diffusers as convert_sd3,
)
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import Tensor

from digenrl.extensions.export.diffusers_export import LORA_FILE, lora_pipeline
from digenrl.extensions.export.lora_layouts import in_layout
from digenrl.models import flux, sd3, wan
from digenrl.models.tiny import ensure
from tests.conftest import ROOT
from tests.models.tiny_policies import FAMILIES, ROWS

RANK, ALPHA, WIDTH = 2, 6.0, 3072
"""diffusers' converter knows FLUX.1 at its real width alone."""


def layer(name: str, out: int, into: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return {
        f"{name}.lora_A.weight": torch.randn(RANK, into, generator=generator),
        f"{name}.lora_B.weight": torch.randn(out, RANK, generator=generator),
    }


def adapter(family: str) -> dict[str, Tensor]:
    attention = ("to_q", "to_k", "to_v", "to_out.0")
    added = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    names: list[tuple[str, int, int]]
    if family == "wan":
        names = [
            (f"blocks.{i}.attn{k}.{n}", 8, 8) for i in (0, 1) for k in (1, 2) for n in attention
        ]
        names += [
            (f"blocks.{i}.attn2.{n}", 8, 8) for i in (0, 1) for n in ("add_k_proj", "add_v_proj")
        ]
        names += [(f"blocks.{i}.ffn.net.{n}", 8, 8) for i in (0, 1) for n in ("0.proj", "2")]
    else:
        names = [(f"transformer_blocks.1.attn.{n}", WIDTH, 8) for n in (*attention, *added)]
        names += [
            (f"transformer_blocks.1.{m}.net.{n}", 8, 8)
            for m in ("ff", "ff_context")
            for n in ("0.proj", "2")
        ]
        names += [(f"single_transformer_blocks.3.attn.{n}", WIDTH, 8) for n in attention[:3]]
    return {key: value for name in names for key, value in layer(*name).items()}


def updates(tensors: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Layer -> scale x B A, of those that change anything."""
    found = {
        name.removesuffix(".lora_A.weight"): scale
        * tensors[name.replace("lora_A", "lora_B")]
        @ down
        for name, down in tensors.items()
        if name.endswith(".lora_A.weight")
    }
    return {name: value for name, value in found.items() if value.any()}


CONVERTED = {
    "flux": (FluxPipeline, flux.CHECKPOINT_NAMES),
    "wan": (WanPipeline, wan.CHECKPOINT_NAMES),
}


@pytest.mark.parametrize("family", CONVERTED)
def test_diffusers_reads_the_same_update_of_every_layer(family: str) -> None:
    pipeline, known = CONVERTED[family]
    layers = adapter(family)
    written = in_layout(layers, ALPHA, known, "kohya")
    read = {
        key.removeprefix("transformer."): v
        for key, v in pipeline.lora_state_dict(dict(written)).items()
    }
    found, ours = updates(read, 1.0), updates(layers, ALPHA / RANK)
    assert found.keys() == ours.keys()
    assert all(torch.allclose(found[name], value, atol=1e-4) for name, value in ours.items())
    dotted = in_layout(layers, ALPHA, known, "comfyui")
    names = {key.removeprefix("diffusion_model.").replace(".", "_"): key for key in dotted}
    assert all(
        torch.equal(dotted[names[key[10:].replace(".", "_")]], value)
        for key, value in written.items()
    )
    assert len(dotted) == len(written)


@pytest.mark.parametrize(
    "family", [name for name, policy in FAMILIES.items() if policy.checkpoint_names == {}]
)
def test_diffusers_reads_the_names_of_checkpoints_that_have_its_own(family: str) -> None:
    """diffusers renames no layer of a block that is adapted."""
    policy = FAMILIES[family]
    layers = {
        key: value
        for part in (*policy.attention, *policy.feed_forward)
        for key, value in layer(f"{policy.block_lists[0]}.1.{part}", 8, 8).items()
    }
    written = in_layout(layers, ALPHA, policy.checkpoint_names, "comfyui")
    read = lora_pipeline(policy).lora_state_dict(
        {key: value for key, value in written.items() if "lora" in key}
    )
    assert {key.split(".lora")[0] for key in read} == {
        f"transformer.{key.split('.lora')[0]}" for key in layers
    }


class Base(dict[str, Tensor]):
    """A checkpoint's tensors; those that nobody gave are zero."""

    def __missing__(self, key: str) -> Tensor:
        return torch.zeros(6, 8)

    def pop(self, key: str, *default: Tensor) -> Tensor:  # type: ignore[override]
        return super().pop(key, self[key])


def test_stable_diffusion_3_adds_it_to_the_weights_that_diffusers_converts() -> None:
    """diffusers reads no adapters of this layout: the updates are read as the weights of a whole
    checkpoint."""
    parts = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn2.to_q",
        "attn2.to_k",
        "attn2.to_v",
    )
    parts += (
        "attn2.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
    )
    parts += ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")
    layers = {
        key: value
        for part in parts
        for key, value in layer(f"transformer_blocks.0.{part}", 8, 8).items()
    }
    layers |= layer(
        "transformer_blocks.1.attn.add_k_proj", 8, 8
    )  # the others of the last block's text are unread
    written = in_layout(layers, ALPHA, sd3.CHECKPOINT_NAMES, "comfyui")
    base = Base()
    for name, down in written.items():
        if name.endswith(".lora_down.weight"):
            stem = name.removesuffix(".lora_down.weight")
            scale = written[f"{stem}.alpha"] / down.shape[0]
            base[stem.removeprefix("diffusion_model.") + ".weight"] = (
                scale * written[f"{stem}.lora_up.weight"] @ down
            )
    read = {
        key.removesuffix(".weight"): value
        for key, value in convert_sd3(base).items()
        if value.any()
    }
    expected = updates(layers, ALPHA / RANK)
    assert read.keys() == expected.keys()
    assert all(torch.allclose(read[name], value, atol=1e-4) for name, value in expected.items())


def whole_weights(
    layers: dict[str, Tensor], family: str, layout: str = "comfyui"
) -> dict[str, Tensor]:
    """The layers that an exported adapter changes, as weights of a checkpoint: each its update."""
    policy = FAMILIES[family]
    written = in_layout(layers, ALPHA, policy.checkpoint_names, layout, policy.swapped_halves)
    found = {}
    for name, down in written.items():
        if name.endswith(".lora_down.weight"):
            stem = name.removesuffix(".lora_down.weight")
            scale = written[f"{stem}.alpha"] / down.shape[0]
            key = stem.removeprefix("diffusion_model.") + ".weight"
            found[key] = scale * written[f"{stem}.lora_up.weight"] @ down
    return found


CONVERTERS = {family: row for family, row in ROWS.items() if row.converter is not None}


@pytest.mark.parametrize("family", CONVERTERS)
def test_diffusers_reads_each_layers_update_as_a_weight_of_the_published_checkpoint(
    family: str,
) -> None:
    """diffusers' own converter of whole checkpoints judges, layer by layer."""
    policy = FAMILIES[family]
    row = CONVERTERS[family]
    wide = row.converter_width
    assert row.converter is not None
    layers = {}
    for blocks, names in zip(
        policy.block_lists,
        (
            policy.attention + policy.feed_forward,
            policy.single_attention + policy.single_feed_forward,
            policy.attention + policy.feed_forward,
        ),
        strict=False,
    ):
        for name in names:
            out = wide if blocks.startswith("single") and name != "proj_mlp" else 8
            out = 4 * wide if name == "proj_mlp" else out
            layers |= layer(f"{blocks}.1.{name}", out, 8)
    read = {
        key.removesuffix(".weight"): value
        for key, value in row.converter(whole_weights(layers, family)).items()
    }
    expected = updates(layers, ALPHA / RANK)
    assert read.keys() == expected.keys()
    assert all(torch.allclose(read[name], value, atol=1e-4) for name, value in expected.items())


def test_every_family_knows_its_names_in_other_tools() -> None:
    assert not [family for family, policy in FAMILIES.items() if policy.checkpoint_names is None]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(
        ValueError, match="names of this family's layers in other tools are not known"
    ):
        in_layout({}, ALPHA, None, "comfyui")
    with pytest.raises(ValueError, match="layer x_embedder"):
        in_layout(layer("x_embedder", 8, 8), ALPHA, flux.CHECKPOINT_NAMES, "kohya")


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["diffusers", "peft"])
def test_a_lora_is_merged_by_the_python_of_the_page(kind: str, tmp_path: Path) -> None:
    (page,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/running.md").read_text(), re.DOTALL)
    base, lora, folder = ensure("flux"), tmp_path / "lora", tmp_path / "out"

    def weights(path: Path) -> FluxTransformer2DModel:
        return FluxTransformer2DModel.from_pretrained(
            path, subfolder="transformer", dtype=torch.bfloat16
        )

    config = LoraConfig(r=2, lora_alpha=6, target_modules=["to_q"], init_lora_weights=False)
    adapted = get_peft_model(weights(base), config)
    if kind == "peft":
        adapted.save_pretrained(lora)
    else:
        layers = get_peft_model_state_dict(adapted)
        lora_pipeline(FAMILIES["flux"]).save_lora_weights(
            lora,
            transformer_lora_layers={
                name.removeprefix("base_model.model."): value for name, value in layers.items()
            },
            transformer_lora_adapter_metadata=config.to_dict(),
        )
        lora /= LORA_FILE
    expected = adapted.merge_and_unload().state_dict()
    names = {"BASE": str(base), "LORA": str(lora), "FOLDER": str(folder)}
    exec(compile(page, "running.md", "exec"), names)
    found, before = weights(folder).state_dict(), weights(base).state_dict()
    moved = max((value - before[name]).abs().max() for name, value in expected.items())
    wrong = max((value - found[name]).abs().max() for name, value in expected.items())
    assert moved > 0
    assert wrong < 0.01 * moved, "diffusers rounds the adapter to bfloat16 before the sum"
