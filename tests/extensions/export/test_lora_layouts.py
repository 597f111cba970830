"""Other tools' names for an adapter: diffusers' own converters read them back to the same update of every layer."""

from __future__ import annotations

import zlib

import pytest
import torch
from diffusers import FluxPipeline, LTX2Pipeline, QwenImagePipeline, WanPipeline
from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers as convert_sd3
from torch import Tensor

from digenrl.extensions.export.lora_layouts import in_layout

RANK, ALPHA, WIDTH = 2, 6.0, 3072
"""diffusers' converter knows FLUX.1 at its real width alone."""


def layer(name: str, out: int, into: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return {
        f"{name}.lora_A.weight": torch.randn(RANK, into, generator=generator),
        f"{name}.lora_B.weight": torch.randn(out, RANK, generator=generator),
    }


def adapter(network: str) -> dict[str, Tensor]:
    attention = ("to_q", "to_k", "to_v", "to_out.0")
    added = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    names: list[tuple[str, int, int]]
    if network == "WanTransformer3DModel":
        names = [(f"blocks.{i}.attn{k}.{n}", 8, 8) for i in (0, 1) for k in (1, 2) for n in attention]
        names += [(f"blocks.{i}.attn2.{n}", 8, 8) for i in (0, 1) for n in ("add_k_proj", "add_v_proj")]
        names += [(f"blocks.{i}.ffn.net.{n}", 8, 8) for i in (0, 1) for n in ("0.proj", "2")]
    elif network == "QwenImageTransformer2DModel":
        names = [(f"transformer_blocks.1.attn.{n}", 8, 8) for n in (*attention, *added)]
        names += [(f"transformer_blocks.1.{m}.net.{n}", 8, 8) for m in ("img_mlp", "txt_mlp") for n in ("0.proj", "2")]
    else:
        names = [(f"transformer_blocks.1.attn.{n}", WIDTH, 8) for n in (*attention, *added)]
        names += [(f"transformer_blocks.1.{m}.net.{n}", 8, 8) for m in ("ff", "ff_context") for n in ("0.proj", "2")]
        names += [(f"single_transformer_blocks.3.attn.{n}", WIDTH, 8) for n in attention[:3]]
    return {key: value for name in names for key, value in layer(*name).items()}


def updates(tensors: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Layer -> scale x B A, of those that change anything."""
    found = {
        name.removesuffix(".lora_A.weight"): scale * tensors[name.replace("lora_A", "lora_B")] @ down
        for name, down in tensors.items()
        if name.endswith(".lora_A.weight")
    }
    return {name: value for name, value in found.items() if value.any()}


PIPELINES = {
    "FluxTransformer2DModel": FluxPipeline,
    "QwenImageTransformer2DModel": QwenImagePipeline,
    "WanTransformer3DModel": WanPipeline,
}


@pytest.mark.parametrize("network", PIPELINES)
def test_diffusers_reads_the_same_update_of_every_layer(network: str) -> None:
    layers = adapter(network)
    written = in_layout(layers, ALPHA, network, "kohya")
    read = {key.removeprefix("transformer."): v for key, v in PIPELINES[network].lora_state_dict(dict(written)).items()}
    found, ours = updates(read, 1.0), updates(layers, ALPHA / RANK)
    assert found.keys() == ours.keys()
    assert all(torch.allclose(found[name], value, atol=1e-4) for name, value in ours.items())
    dotted = in_layout(layers, ALPHA, network, "comfyui")
    names = {key.removeprefix("diffusion_model.").replace(".", "_"): key for key in dotted}
    assert all(torch.equal(dotted[names[key[10:].replace(".", "_")]], value) for key, value in written.items())
    assert len(dotted) == len(written)


def test_ltx2_has_its_own_names() -> None:
    """diffusers renames no layer of a block that is adapted."""
    parts = [f"{part}.{name}" for part in ("attn1", "audio_to_video_attn") for name in ("to_q", "to_out.0")]
    names = [f"transformer_blocks.1.{part}" for part in (*parts, "ff.net.0.proj", "ff.net.2")]
    layers = {key: value for name in names for key, value in layer(name, 8, 8).items()}
    written = in_layout(layers, ALPHA, "LTX2VideoTransformer3DModel", "comfyui")
    read = LTX2Pipeline.lora_state_dict({key: value for key, value in written.items() if "lora" in key})
    assert {key.split(".lora")[0] for key in read} == {f"transformer.{name}" for name in names}


class Base(dict[str, Tensor]):
    """A checkpoint's tensors; those that nobody gave are zero."""

    def __missing__(self, key: str) -> Tensor:
        return torch.zeros(6, 8)

    def pop(self, key: str, *default: Tensor) -> Tensor:  # type: ignore[override]
        return super().pop(key, self[key])


def test_stable_diffusion_3_adds_it_to_the_weights_that_diffusers_converts() -> None:
    """diffusers reads no adapters of this layout: the updates are read as the weights of a whole checkpoint."""
    parts = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn2.to_q", "attn2.to_k", "attn2.to_v")
    parts += ("attn2.to_out.0", "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out")
    parts += ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")
    layers = {key: value for part in parts for key, value in layer(f"transformer_blocks.0.{part}", 8, 8).items()}
    layers |= layer("transformer_blocks.1.attn.add_k_proj", 8, 8)  # the others of the last block's text are unread
    written = in_layout(layers, ALPHA, "SD3Transformer2DModel", "comfyui")
    base = Base()
    for name, down in written.items():
        if name.endswith(".lora_down.weight"):
            stem = name.removesuffix(".lora_down.weight")
            scale = written[f"{stem}.alpha"] / down.shape[0]
            base[stem.removeprefix("diffusion_model.") + ".weight"] = scale * written[f"{stem}.lora_up.weight"] @ down
    read = {key.removesuffix(".weight"): value for key, value in convert_sd3(base).items() if value.any()}
    expected = updates(layers, ALPHA / RANK)
    assert read.keys() == expected.keys()
    assert all(torch.allclose(read[name], value, atol=1e-4) for name, value in expected.items())


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="names of ZImageTransformer2DModel in other tools are not known"):
        in_layout({}, ALPHA, "ZImageTransformer2DModel", "comfyui")
    with pytest.raises(ValueError, match="layer x_embedder"):
        in_layout(layer("x_embedder", 8, 8), ALPHA, "FluxTransformer2DModel", "kohya")
