"""`model.lora.path`: an adapter of every tool is read layer by layer, and at step 0 the policy draws
what the file's own pipeline draws."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from digenrl.diffusion import denoise
from digenrl.extensions.export.diffusers_export import LORA_FILE, export_layout, export_policy
from digenrl.models.lora_files import LoraFileError
from digenrl.models.pipeline import DiffusersPolicy
from tests.models import tiny_policies
from tests.models.tiny_policies import (
    FAMILIES,
    LORA,
    diffusers_latents,
    make,
    prompt,
    randomise_lora,
)

pytestmark = pytest.mark.heavy

PROMPT = "a red circle on a blue background"
OTHERS = [
    family
    for family, policy in sorted(FAMILIES.items())
    if not policy.codec_class.reads and not policy.codec_class.temporal_stride
]
FIVE = ("flux", "sd3", "wan", *[family for family in OTHERS if family not in ("flux", "sd3")][-2:])
"""Three that every test may name, and two of the others that draw pictures from texts."""


def noise_of(policy: DiffusersPolicy) -> Tensor:
    return torch.randn(1, *policy.latent_shape, generator=torch.Generator().manual_seed(5))


def drawn(policy: DiffusersPolicy) -> Tensor:
    return denoise.ode_sample(
        policy, policy.codec.encode([prompt(PROMPT)]), noise_of(policy), policy.sigma_grid(4)
    )


def factors_of(policy: DiffusersPolicy) -> dict[str, Tensor]:
    return {
        name: value.detach().clone() for name, value in policy.adapter.trained_parameters().items()
    }


# ---- formats


def as_diffusers(policy: DiffusersPolicy, folder: Path) -> Path:
    return export_policy(policy, folder)[0]


def as_diffusers_directory(policy: DiffusersPolicy, folder: Path) -> Path:
    export_policy(policy, folder)
    return folder


def as_peft(policy: DiffusersPolicy, folder: Path) -> Path:
    """Write the adapter's factors as `PeftModel.save_pretrained` does."""
    save_file(
        {
            f"base_model.model.{name.replace('.default', '')}": value.contiguous()
            for name, value in factors_of(policy).items()
        },
        folder / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": LORA["rank"], "lora_alpha": LORA["alpha"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def as_run(policy: DiffusersPolicy, folder: Path) -> Path:
    """A finished run's directory."""
    (folder / "checkpoints" / "last").mkdir(parents=True)
    save_file(factors_of(policy), folder / "checkpoints" / "last" / "policy.safetensors")
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": {"lora": LORA}}))
    return folder


def as_kohya(policy: DiffusersPolicy, folder: Path) -> Path:
    return export_layout(policy, folder, "kohya")[0]


def as_comfyui(policy: DiffusersPolicy, folder: Path) -> Path:
    return export_layout(policy, folder, "comfyui")[0]


FORMATS: tuple[Callable[[DiffusersPolicy, Path], Path], ...] = (
    as_diffusers,
    as_diffusers_directory,
    as_peft,
    as_run,
    as_kohya,
    as_comfyui,
)


def updates_of(policy: DiffusersPolicy) -> dict[str, Tensor]:
    """B A of every adapted layer."""
    return {
        name: layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        for name, layer in policy.transformer.named_modules()
        if hasattr(layer, "lora_A")
    }


@pytest.mark.parametrize("layout", ["comfyui", "kohya"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_familys_own_names_of_other_tools_come_back(
    family: str, layout: str, tmp_path: Path
) -> None:
    """Two networks have two files, in one directory."""
    policy = make(family)
    randomise_lora(policy)
    export_layout(policy, tmp_path, layout)
    again = updates_of(make(family, {**LORA, "path": str(tmp_path)}))
    for name, update in updates_of(policy).items():
        torch.testing.assert_close(update, again[name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("write", FORMATS, ids=lambda write: write.__name__)
@pytest.mark.parametrize("family", FIVE)
def test_every_format_gives_the_adapter_back(family: str, write: Any, tmp_path: Path) -> None:
    policy = make(family)
    randomise_lora(policy)
    path = write(policy, tmp_path)
    again = make(family, {**LORA, "path": str(path)})
    # The rank of a layer that was joined to others may come back in another order of its columns.
    found = updates_of(again)
    for name, update in updates_of(policy).items():
        torch.testing.assert_close(update, found[name], atol=1e-6, rtol=1e-5)
    assert (drawn(policy) - drawn(again)).abs().max() <= 1e-5


@pytest.mark.parametrize("family", FIVE)
def test_step_0_draws_what_the_files_own_pipeline_draws(
    family: str, tmp_path: Path, monkeypatch: Any
) -> None:
    policy = make(family)
    randomise_lora(policy)
    path = as_diffusers(policy, tmp_path)
    row = tiny_policies.ROWS[family]

    def with_adapter(folder: str) -> Any:
        pipeline = row.load(folder)
        pipeline.load_lora_weights(tmp_path, weight_name=LORA_FILE)
        return pipeline

    policy = make(family, {**LORA, "path": str(path)})
    guidance = policy.guidance_scale
    plain = diffusers_latents(family, [PROMPT], noise_of(policy), 4, guidance)
    monkeypatch.setitem(tiny_policies.ROWS, family, replace(row, load=with_adapter))
    theirs = diffusers_latents(family, [PROMPT], noise_of(policy), 4, guidance)
    ours = drawn(policy)
    assert (ours - theirs).abs().max() <= 1e-4
    assert (ours - plain).abs().max() > 1e-3


def test_a_layer_that_a_tool_trained_as_one_is_divided(tmp_path: Path) -> None:
    """Queries, keys and values of one adapter: each takes its rows of the up factor."""
    policy = make("sd3", {**LORA, "targets": ["attn.to_q", "attn.to_k", "attn.to_v"]})
    depth = len(policy.transformer.transformer_blocks)
    width = policy.transformer.get_submodule("transformer_blocks.0.attn.to_q").in_features
    tensors, generator = {}, torch.Generator().manual_seed(0)
    for block in range(depth):
        stem = f"lora_unet_joint_blocks_{block}_x_block_attn_qkv"
        tensors[f"{stem}.lora_down.weight"] = torch.randn(4, width, generator=generator)
        tensors[f"{stem}.lora_up.weight"] = torch.randn(3 * width, 4, generator=generator)
        tensors[f"{stem}.alpha"] = torch.tensor(8.0)
    save_file(tensors, tmp_path / "kohya.safetensors")
    lora = {**LORA, "targets": ["attn.to_q", "attn.to_k", "attn.to_v"]}
    policy = make("sd3", {**lora, "path": str(tmp_path / "kohya.safetensors")})
    layer: Any = policy.transformer.get_submodule("transformer_blocks.1.attn.to_k")
    stem = "lora_unet_joint_blocks_1_x_block_attn_qkv"
    wanted = (
        tensors[f"{stem}.lora_up.weight"][width : 2 * width] @ tensors[f"{stem}.lora_down.weight"]
    )
    torch.testing.assert_close(
        layer.lora_B["default"].weight @ layer.lora_A["default"].weight, wanted
    )


# ---- what KL is against


def test_the_reference_is_the_base_or_the_loaded_adapter(tmp_path: Path) -> None:
    """The reference stays after training has moved the adapter."""
    first = make("flux")
    base = drawn(first)
    randomise_lora(first)
    start = drawn(first)
    path = as_diffusers(first, tmp_path)
    for reference, wanted in (("base", base), ("start", start)):
        policy = make("flux", {**LORA, "path": str(path)})
        if reference == "start":
            policy.adapter.refer_to_start()
        randomise_lora(policy, seed=9)
        with policy.adapter.reference():
            assert torch.equal(drawn(policy), wanted), reference
        assert (drawn(policy) - wanted).abs().max() > 1e-3
        assert len(policy.adapter.trained_parameters()) == len(first.adapter.trained_parameters())
        assert not [name for name in policy.transformer.state_dict() if "start" in name]


def test_a_network_that_is_filled_later_has_the_file_and_the_reference(tmp_path: Path) -> None:
    """Sharded trainers build the network without memory, and fill it later."""
    first = make("flux")
    randomise_lora(first)
    path = as_diffusers(first, tmp_path)
    policy = make("flux", {**LORA, "path": str(path)}, empty=True)
    policy.adapter.refer_to_start()
    policy.fill(torch.device("cpu"))
    assert torch.equal(drawn(policy), drawn(first))
    with policy.adapter.reference():
        assert torch.equal(drawn(policy), drawn(first))


def test_a_start_without_a_file_is_refused() -> None:
    with pytest.raises(ValueError, match=r"algorithm\.reference=base"):
        make("flux").adapter.refer_to_start()


# ---- what is refused


@pytest.fixture(scope="module")
def flux(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("flux")
    policy = make("flux")
    randomise_lora(policy)
    return as_diffusers(policy, folder)


def refusal(path: Path, **lora: Any) -> str:
    with pytest.raises(LoraFileError) as caught:
        make("flux", {**LORA, **lora, "path": str(path)})
    return str(caught.value)


def test_rank_and_scale_are_checked_with_the_words_that_fit(flux: Path) -> None:
    said = refusal(flux, rank=2)
    assert "rank 4, scale 2" in said
    assert "set model.lora.rank=4 model.lora.alpha=8" in said
    assert "set model.lora.rank=4 model.lora.alpha=8" in refusal(flux, alpha=4)


def test_every_layer_that_the_run_would_not_adapt_is_named(flux: Path) -> None:
    said = refusal(flux, targets="attention")
    layers = {name.split(".lora_")[0] for name in load_file(flux)}
    attention = set(make("flux", {**LORA, "targets": "attention"}).adapter.lora_layers)
    outside = {name.removeprefix("transformer.") for name in layers} - attention
    assert f"{len(outside)} in the file, and adapted by no target" in said
    assert all(re.sub(r"\d+", "#", name) in re.sub(r"\{.*?\}|\d+", "#", said) for name in outside)
    (targets,) = re.findall(r"'model\.lora\.targets=\[(.*?)\]'", said)
    again = make("flux", {**LORA, "targets": targets.split(","), "path": str(flux)})
    assert len(again.adapter.lora_layers) == len(layers)


def test_missing_and_unknown_layers_are_all_named(flux: Path, tmp_path: Path) -> None:
    tensors = load_file(flux)
    gone = [name for name in tensors if "single_transformer_blocks.1.attn.to_q" in name]
    assert gone
    for name in gone:
        del tensors[name]
    tensors["text_encoder.layers.0.q_proj.lora_A.weight"] = torch.zeros(4, 8)
    tensors["text_encoder.layers.0.q_proj.lora_B.weight"] = torch.zeros(8, 4)
    tensors["transformer.single_transformer_blocks.0.attn.to_q.dora_scale"] = torch.zeros(1)
    save_file(tensors, tmp_path / "other.safetensors")
    said = refusal(tmp_path / "other.safetensors", alpha=4)  # without a header: alpha is the rank
    assert "1 missing in the file: single_transformer_blocks.1.attn.to_q" in said
    assert "2 in the file, and unknown to this network" in said
    assert "text_encoder.layers.0.q_proj" in said
    assert "dora_scale" in said


def test_other_files_are_refused(flux: Path, tmp_path: Path) -> None:
    (tmp_path / "lora.bin").write_bytes(pickle.dumps({}))
    assert "pickle" in refusal(tmp_path / "lora.bin")
    assert "no such file" in refusal(tmp_path / "absent.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(flux.read_bytes()[:1000])
    assert "cannot be read as safetensors" in refusal(tmp_path / "cut.safetensors")
    (tmp_path / "huge.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    assert "cannot be read as safetensors" in refusal(tmp_path / "huge.safetensors")
    save_file({"x_embedder.weight": torch.zeros(2, 2)}, tmp_path / "whole.safetensors")
    assert "holds no adapter" in refusal(tmp_path / "whole.safetensors")
    (tmp_path / "empty").mkdir()
    assert "name the file" in refusal(tmp_path / "empty")


def test_values_and_shapes_are_looked_at(flux: Path, tmp_path: Path) -> None:
    tensors = load_file(flux)
    name = next(name for name in tensors if name.endswith("ff.net.2.lora_B.weight"))
    for value, said in (
        (torch.full_like(tensors[name], torch.nan), "no finite"),
        (torch.zeros_like(tensors[name]).int(), "no finite floating-point"),
        (tensors[name].to(torch.complex64), "no finite floating-point"),
        (tensors[name][:-1], "the layer takes"),
        (tensors[name][:, :3], "the layer takes"),
    ):
        save_file(tensors | {name: value.contiguous()}, tmp_path / "wrong.safetensors")
        assert said in refusal(tmp_path / "wrong.safetensors", alpha=4)


PACKED = torch.zeros(1, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)


@pytest.mark.parametrize(
    ("alpha", "read"),
    [
        (torch.tensor(8), True),
        (torch.tensor([8.0]).half(), True),
        (torch.tensor(8.0 + 1j), False),
        (torch.tensor([8.0, 8.0]), False),
        (torch.tensor(torch.inf), False),
        (PACKED, False),
    ],
)
def test_an_alpha_is_one_finite_number(tmp_path: Path, alpha: Tensor, read: bool) -> None:
    lora, tensors = {**LORA, "targets": ["attn.to_q"]}, {}
    policy = make("sd3", lora)
    width = policy.transformer.get_submodule("transformer_blocks.0.attn.to_q").in_features
    for block in range(len(policy.transformer.transformer_blocks)):
        stem = f"lora_unet_joint_blocks_{block}_x_block_attn_qkv"
        tensors[f"{stem}.lora_down.weight"] = torch.ones(4, width)
        tensors[f"{stem}.lora_up.weight"] = torch.ones(3 * width, 4)
        tensors[f"{stem}.alpha"] = alpha.clone()
    save_file(tensors, tmp_path / "kohya.safetensors")
    lora |= {"targets": ["attn.to_q", "attn.to_k", "attn.to_v"], "alpha": 8}
    lora["path"] = str(tmp_path / "kohya.safetensors")
    if read:
        make("sd3", lora)
    else:
        with pytest.raises(ValueError, match=r"scale nan"):
            make("sd3", lora)


def test_a_configuration_of_peft_is_needed_and_read(tmp_path: Path) -> None:
    policy = make("flux")
    folder = as_peft(policy, tmp_path)
    config = folder / "adapter_config.json"
    for change, said in (
        ({"use_dora": True}, "use_dora"),
        ({"rank_pattern": {"x": 3}}, "rank_pattern"),
        ({"lora_alpha": "8"}, "lora_alpha = '8'"),
        ({"use_rslora": True}, "set model.lora.rank=4 model.lora.alpha=16"),
    ):
        text = config.read_text()
        config.write_text(json.dumps(json.loads(text) | change))
        assert said in refusal(folder)
        config.write_text(text)
    config.write_text("[" * 100_000)
    assert "no JSON" in refusal(folder)
    config.unlink()
    assert "adapter_config.json" in refusal(folder)


def test_a_runs_own_file_is_read_where_its_run_says_alpha(tmp_path: Path) -> None:
    policy = make("flux")
    folder = as_run(policy, tmp_path / "run")
    make("flux", {**LORA, "path": str(folder / "checkpoints" / "last" / "policy.safetensors")})
    config = folder / "config.yaml"
    config.write_text(f"a: &a {{rank: 4}}\nb: *a\n{config.read_text()}")
    assert "has an alias" in refusal(folder)
    config.unlink()
    assert "name the run's directory" in refusal(folder)


def test_all_families_load_their_own_export(tmp_path: Path) -> None:
    """The names of every family are those of its network, experts included."""
    for family in sorted(set(FAMILIES) - set(FIVE)):
        policy = make(family)
        randomise_lora(policy)
        export_policy(policy, tmp_path / family)
        as_run(policy, tmp_path / family / "run")
        for path in (tmp_path / family, tmp_path / family / "run"):
            again = make(family, {**LORA, "path": str(path)})
            for name, value in factors_of(policy).items():
                assert torch.equal(value, factors_of(again)[name]), (family, name)
