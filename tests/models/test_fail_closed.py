"""Silent mistakes that must be loud: wrong paths and sizes, adapters that match nothing, dropped
options."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from digenrl import parts
from digenrl.config import load
from digenrl.extensions.zoo.since import require_diffusers
from digenrl.models import pretrained
from digenrl.models import tiny as tiny_builds
from digenrl.models.latents import pack_latents, unpack_latents
from digenrl.models.lora_files import LoraFileError, _adapter_files
from digenrl.models.pretrained import PretrainedError, require_shards
from digenrl.types import Prompt
from tests.conftest import ROOT
from tests.models.tiny_policies import FACTS, FAMILIES, LORA, ROWS, make, prompt


def real(family: str, path, **overrides):
    return make(family, build="real", path=str(path), **overrides)


def test_the_same_call_loads_a_directory(tmp_path):
    assert real("wan", tiny_builds.ensure("wan")).path == str(tiny_builds.ensure("wan"))


def test_wrong_path_says_what_is_expected(tmp_path):
    with pytest.raises(PretrainedError, match=r"has no model_index\.json .*diffusers layout"):
        real("wan", tmp_path / "nothing")


def test_weights_that_are_not_here_name_file_licence_and_command():
    with pytest.raises(PretrainedError) as caught:
        real("flux", "black-forest-labs/FLUX.1-dev")
    message = str(caught.value)
    assert "model_index.json" in message
    assert "https://huggingface.co/black-forest-labs/FLUX.1-dev" in message
    assert "hf auth login" in message
    assert "hf download black-forest-labs/FLUX.1-dev" in message


def test_a_family_of_a_newer_diffusers_says_which_release_to_install() -> None:
    require_diffusers("0.1", "FluxTransformer2DModel")
    with pytest.raises(ImportError, match=r"has no NoModel: .* 9\.9 or newer; run `pip install -U"):
        require_diffusers("9.9", "FluxTransformer2DModel", "NoModel")
    require_diffusers("0.1", FluxTransformer2DModel="in_channels")
    with pytest.raises(ImportError, match=r"has no FluxTransformer2DModel\(sound=...\): "):
        require_diffusers("9.9", FluxTransformer2DModel="sound")


def test_a_family_without_a_tiny_build_is_refused_before_any_rank_starts():
    class OtherPolicy(FAMILIES["wan"]):
        family = "other"

    with pytest.raises(
        ValueError, match=r"no tiny build of family 'other'; known: .*wan.* hardware.build=real"
    ):
        OtherPolicy.check({"height": 64, "width": 64, "build": "tiny"})


class NarrowCodec(FAMILIES["sd3"].codec_class):
    """A codec that says a wrong number of channels of its VAE."""

    channels = 4


class NarrowPolicy(FAMILIES["sd3"]):
    codec_class = NarrowCodec


class FlatCodec(FAMILIES["sd3"].codec_class):
    def decode_latents(self, vae, latents):
        return super().decode_latents(vae, latents)[..., ::2, ::2]


class FlatPolicy(FAMILIES["sd3"]):
    codec_class = FlatCodec

    def predict(self, latents, sigmas, condition):
        return super().predict(latents, sigmas, condition).flatten(1)


def test_latents_of_another_shape_than_the_networks_say_what_to_override():
    settings = {"height": 64, "width": 64, "build": "tiny"}
    for name, family in FAMILIES.items():
        family.check({"build": "tiny", **ROWS[name].size})
    with pytest.raises(
        ValueError,
        match=r"NarrowCodec: its latents have 4 channels .* takes 16: set .*`channels`.*`packed`",
    ):
        NarrowPolicy.check(settings)
    here = {"build": "real", "path": str(tiny_builds.ensure("sd3"))}
    with pytest.raises(
        ValueError, match=r"latents of 16 channels.* adapter counts on 4 .*override `channels`"
    ):
        NarrowPolicy.check(settings | here)
    policy = FlatPolicy("unused", 64, 64, build="tiny", max_sequence_length=16)
    latents = torch.randn(1, *policy.latent_shape)
    with pytest.raises(
        ValueError,
        match=r"`predict` gave \[1, 1024\] for latents \[1, 16, 8, 8\].*override `predict`",
    ):
        policy.velocity(latents, torch.tensor([0.5]), policy.codec.encode([Prompt("a")]))
    with pytest.raises(
        ValueError, match=r"to \[1, 3, 32, 32\], not to 64 x 64 pixels: override `decode_latents`"
    ):
        policy.codec.decode(latents)


@pytest.mark.parametrize("family", [family for family, row in ROWS.items() if row.refused])
def test_settings_that_one_family_refuses(family):
    for settings, message in ROWS[family].refused:
        FAMILIES[family].check({**ROWS[family].size, "build": "tiny"})
        with pytest.raises(ValueError, match=message):
            FAMILIES[family].check({**ROWS[family].size, "build": "tiny"} | settings)


def test_half_a_checkpoint(tmp_path):
    from safetensors.torch import load_file, save_file

    whole = tiny_builds.ensure("sd3")
    without_folder = shutil.copytree(whole, tmp_path / "a")
    shutil.rmtree(without_folder / "transformer")
    with pytest.raises(PretrainedError, match="has no transformer/"):
        real("sd3", without_folder)
    without_tensor = shutil.copytree(whole, tmp_path / "b")
    weights = without_tensor / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    del tensors["proj_out.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(PretrainedError, match=r"half a checkpoint|proj_out"):
        real("sd3", without_tensor)
    without_encoder = shutil.copytree(whole, tmp_path / "c")
    (without_encoder / "text_encoder_3" / "model.safetensors").unlink()
    policy = real("sd3", without_encoder)
    with pytest.raises(PretrainedError, match="text_encoder_3"):
        policy.codec.encode([Prompt("a")])


def test_foreign_family(tmp_path):
    with pytest.raises(
        PretrainedError, match="holds a WanPipeline, and the flux adapter reads FluxPipeline"
    ):
        real("flux", tiny_builds.ensure("wan"))
    other = shutil.copytree(tiny_builds.ensure("wan"), tmp_path / "other")
    config = json.loads((other / "vae" / "config.json").read_text())
    (other / "vae" / "config.json").write_text(
        json.dumps(config | {"z_dim": 48, "scale_factor_spatial": 16})
    )
    settings = {"height": 32, "width": 32, "frames": 5, "path": str(other)}
    with pytest.raises(
        PretrainedError,
        match=r"48 channels, one for 16 x 16 pixels; the wan .* override `channels`",
    ):
        FAMILIES["wan"].check(settings)


@pytest.mark.parametrize(
    ("family", "size", "message"),
    [
        (
            "flux",
            {"height": 70},
            r"sampling\.height=70 is not a multiple of 16; nearest valid: 64 or 80",
        ),
        (
            "wan",
            {"width": 40},
            r"sampling\.width=40 is not a multiple of 16; nearest valid: 32 or 48",
        ),
        (
            "wan",
            {"frames": 6},
            r"sampling\.frames=6 is not 1 \+ a multiple of 4; nearest valid: 5 or 9",
        ),
        ("wan", {"height": 8}, r"nearest valid: 16"),
        ("sd3", {"frames": 5}, r"sampling\.frames=5: sd3 makes images"),
    ],
)
def test_sizes_that_do_not_fit_name_the_nearest_that_do(family, size, message):
    with pytest.raises(ValueError, match=message):
        make(family, **size)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (
            {"rank": 4, "alpha": 8, "targets": ["attn1.to_quarry"]},
            r"matches no linear layer .*nearest: attn1\.to_q",
        ),
        (
            {"rank": 4, "alpha": 8, "targets": ["attn1.to_q"], "expected": 3},
            r"would adapt 2 layers .*expected 3",
        ),
        (
            {"rank": 4, "alhpa": 8, "targets": "attention"},
            r"unknown key lora\.alhpa.*did you mean lora\.alpha",
        ),
        ({"rank": 4, "targets": "attention"}, r"lora needs alpha"),
        ({"rank": 0, "alpha": 8, "targets": "attention"}, r"lora\.rank must be >= 1"),
    ],
)
def test_lora_settings_that_would_train_something_else(lora, message):
    with pytest.raises(ValueError, match=message):
        make("wan", lora=lora)


@pytest.mark.heavy
@pytest.mark.parametrize("family", FAMILIES)
def test_lora_presets_adapt_exactly_the_named_layers(family):
    for preset, layers in zip(("attention", "attention_ff"), ROWS[family].layers, strict=True):
        policy = make(family, lora=LORA | {"targets": preset})
        assert len(policy.adapter.lora_layers) == layers
        assert len(policy.adapter.trained_parameters()) == 2 * layers
        assert not any("refiner" in name for name in policy.adapter.lora_layers)


def test_ranks_start_from_the_same_adapter_whatever_the_global_seed():
    torch.manual_seed(1)
    first = make("flux")
    torch.manual_seed(2)
    second = make("flux")
    for name, value in first.adapter.trained_parameters().items():
        assert torch.equal(value, second.adapter.trained_parameters()[name])
        assert value.dtype == torch.float32


def test_auto_dtype_is_float32_for_the_tiny_build_and_bfloat16_for_the_real_one():
    assert make("wan", dtype="auto").dtype == torch.float32
    policy = real("wan", tiny_builds.ensure("wan"), dtype="auto")
    assert policy.dtype == torch.bfloat16
    assert policy.transformer.proj_out.weight.dtype == torch.bfloat16
    assert {value.dtype for value in policy.adapter.trained_parameters().values()} == {
        torch.float32
    }


def test_options_that_a_family_cannot_use_are_refused():
    with pytest.raises(ValueError, match=r"true_cfg_scale=2\.0 is for guidance-distilled"):
        make("wan", true_cfg_scale=2.0)
    with pytest.raises(ValueError, match=r"model\.grid=karras: expected explicit or scheduler"):
        make("wan", grid="karras")
    with pytest.raises(ValueError, match=r"model\.dtype=half: expected auto"):
        make("wan", dtype="half")
    with pytest.raises(ValueError, match=r"hardware\.build=small"):
        make("wan", build="small")


def test_guidance_for_a_network_without_it_is_refused(tmp_path):
    folder = shutil.copytree(tiny_builds.ensure("flux"), tmp_path / "schnell")
    config = json.loads((folder / "transformer" / "config.json").read_text())
    from safetensors.torch import load_file, save_file

    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    kept = {name: value for name, value in load_file(weights).items() if "guidance" not in name}
    save_file(kept, weights, metadata={"format": "pt"})
    (folder / "transformer" / "config.json").write_text(
        json.dumps(config | {"guidance_embeds": False})
    )
    with pytest.raises(ValueError, match="would be dropped"):
        real("flux", folder, guidance_scale=3.5)
    assert real("flux", folder, guidance_scale=1.0).guidance_scale == 1.0


def test_missing_negative_prompt_under_guidance():
    policy = make("sd3", guidance_scale=4.0, negative_prompt=None)
    with pytest.raises(
        ValueError, match=r"needs a negative prompt, and 'a star' has none.*model\.negative_prompt"
    ):
        policy.codec.encode([Prompt("a star")])
    assert "negative_text" in policy.codec.encode([Prompt("a star", negative="a ring")])


def test_ignored_negative_and_cut_prompts_are_reported_once(caplog):
    policy = make("flux", guidance_scale=3.5)
    long = " ".join(["red"] * 90)
    with caplog.at_level(logging.WARNING, logger="digenrl.models.codec"):
        for _ in range(2):
            policy.codec.encode(
                [Prompt(long, negative="a ring"), Prompt(long + " ring"), Prompt("a")]
            )
    said = [
        record.getMessage() for record in caplog.records if record.name == "digenrl.models.codec"
    ]
    assert len(said) == len(set(said))
    assert any("negative prompts are ignored" in text for text in said)
    assert sum("takes 64 tokens" in text for text in said) == 1
    assert sum("takes 77 tokens" in text for text in said) == 1


@pytest.mark.heavy
@pytest.mark.parametrize("family", [family for family, row in ROWS.items() if row.template])
def test_template_of_another_length_is_refused(family, monkeypatch):
    name, length = ROWS[family].template
    module = sys.modules[FAMILIES[family].__module__]
    assert getattr(module, name) == length
    monkeypatch.setattr(module, name, length + 1)
    with pytest.raises(ValueError, match=rf"makes {length} tokens .*template"):
        make(family).codec.encode([prompt("a star")])


@pytest.mark.heavy
@pytest.mark.parametrize(
    "family",
    [name for name, facts in FACTS.items() if {"image", "mask"} <= set(facts.conditioning)],
)
def test_an_image_that_leaves_no_room_for_text_is_refused(family):
    with pytest.raises(
        ValueError, match=r"max_sequence_length=16: the image takes \d+ tokens .*set it to"
    ):
        make(family, max_sequence_length=16).codec.encode([prompt("a star")])


@pytest.mark.heavy
def test_embeddings_do_not_depend_on_the_prompts_encoded_with_them():
    for family in FAMILIES:
        together = make(family).codec.encode(
            [prompt("a star"), prompt("a long sentence about a cat in the rain")]
        )
        alone = make(family).codec.encode([prompt("a star")])
        for key, value in alone.items():  # of one prompt without its padding
            length = value.shape[1]
            assert torch.equal(value, together[key][:1, :length]), (family, key)
            assert (
                key != "text" or "mask" not in together or not together["mask"][:1, length:].any()
            ), family


def test_reference_of_full_fine_tuning_needs_the_kept_copy():
    arguments = {
        "path": "x",
        "build": "tiny",
        "height": 64,
        "width": 64,
        "lora": None,
        "dtype": "float32",
    }
    policy = FAMILIES["sd3"](**arguments)
    with (
        pytest.raises(RuntimeError, match=r"model\.keep_reference=true"),
        policy.adapter.reference(),
    ):
        pass
    kept = FAMILIES["sd3"](**arguments, keep_reference=True)
    assert len(kept.wrap_units()) == 2 * len(policy.wrap_units()) == 4
    noise = torch.randn(1, *kept.latent_shape)
    condition, sigma = kept.codec.encode([Prompt("a")]), torch.tensor([0.5])
    with torch.no_grad():
        before = kept.velocity(noise, sigma, condition)
        for parameter in kept.adapter.trained_parameters().values():
            parameter.add_(0.01)
        assert not torch.equal(kept.velocity(noise, sigma, condition), before)
        with kept.adapter.reference():
            assert torch.equal(kept.velocity(noise, sigma, condition), before)


def test_packing_is_its_own_inverse():
    latents = torch.randn(2, 16, 4, 6)
    assert pack_latents(latents).shape == (2, 6, 64)
    assert torch.equal(unpack_latents(pack_latents(latents), 4, 6), latents)


def test_what_can_be_made_again_lies_in_the_users_cache_outside_of_a_checkout(
    tmp_path, monkeypatch
):
    monkeypatch.delenv("DIGENRL_CACHE", raising=False)
    assert pretrained.cache_root("tiny") == ROOT / ".cache/tiny"
    monkeypatch.setattr(pretrained, "__file__", str(tmp_path / "a/b/c/d.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert pretrained.cache_root("tiny") == tmp_path / "digenrl/tiny"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert pretrained.cache_root("tiny") == tmp_path / "home/.cache/digenrl/tiny"
    monkeypatch.setenv("DIGENRL_CACHE", str(tmp_path / "own"))
    assert pretrained.cache_root("tiny") == tmp_path / "own/tiny"


def test_no_rank_asks_a_server_for_a_part_of_a_checkpoint(tmp_path: Path, monkeypatch) -> None:
    asked = []

    class Part(torch.nn.Linear):
        @classmethod
        def from_pretrained(cls, folder, **how):
            asked.append((folder, how))
            return cls(1, 1), {"missing_keys": [], "mismatched_keys": []}

        @classmethod
        def load_config(cls, folder, **how):
            asked.append((folder, how))
            return {"a": 1}

    def snapshot(name, **how):
        asked.append((name, how))
        return str(tmp_path)

    monkeypatch.setattr(pretrained, "snapshot_download", snapshot)
    assert pretrained.folder_of("a/b", "vae/") == tmp_path
    assert not pretrained.load_component(Part, str(tmp_path), "vae", torch.float32).training
    assert pretrained.component_config(Part, str(tmp_path), "vae") == {"a": 1}
    assert [where for where, _ in asked] == ["a/b", tmp_path, tmp_path]
    assert all(how["local_files_only"] for _, how in asked)
    assert asked[0][1]["allow_patterns"] == "model_index.json", "a run needs not all of it"


def test_files_of_components_are_found_by_their_names(tmp_path: Path) -> None:
    wanted = [tmp_path / name for name in ("text_encoder/a.json", "text_encoder_2/sub/b.bin")]
    for file in (*wanted, tmp_path / "vae" / "c.json"):
        file.parent.mkdir(parents=True)
        file.touch()
    assert pretrained.component_files(str(tmp_path), "text_encoder*", "tokenizer*") == wanted
    with pytest.raises(PretrainedError, match=r"has no tokenizer\*/"):
        pretrained.component_files(str(tmp_path), "tokenizer*")


def test_a_file_that_an_index_names_must_be_there(tmp_path: Path) -> None:
    """transformers would fill what is missing with random numbers."""
    folder = tmp_path / "text_encoder"
    folder.mkdir()
    with pytest.raises(PretrainedError, match="no weights in safetensors format"):
        require_shards(str(tmp_path), "text_encoder")
    named = {f"layer.{n}": f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    (folder / named["layer.1"]).touch()
    with pytest.raises(PretrainedError, match=r"model-00002-of-00003.*2 files missing"):
        require_shards(str(tmp_path), "text_encoder")
    for name in named.values():
        (folder / name).touch()
    require_shards(str(tmp_path), "text_encoder")
    require_shards(str(tmp_path), "no_such_encoder")


def test_a_cache_that_cannot_be_written_is_said_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout that others own, here with a file in the place of its folder."""
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / ".cache").write_text("")
    monkeypatch.delenv("DIGENRL_CACHE", raising=False)
    monkeypatch.setattr(pretrained, "__file__", str(tmp_path / "a/b/c/d.py"))
    settings = load(["experiment=sd35_flowgrpo", "hardware=cpu_tiny"]).settings
    with pytest.raises(ValueError, match=r"\.cache/tiny: cannot be written .*DIGENRL_CACHE"):
        parts.check_parts(settings)
    monkeypatch.setenv("DIGENRL_CACHE", str(tmp_path / "own"))
    parts.check_parts(settings)


def test_a_pipe_in_a_folder_of_weights_is_no_file(tmp_path: Path) -> None:
    encoder = tmp_path / "text_encoder"
    encoder.mkdir()
    os.mkfifo(encoder / "a.safetensors")
    (encoder / "b.safetensors").write_bytes(b"")
    os.mkfifo(encoder / "other.index.json")
    (encoder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "a.safetensors"}}')
    with pytest.raises(PretrainedError, match=r"a\.safetensors"):
        require_shards(str(tmp_path), "text_encoder")
    (encoder / "b.safetensors").unlink()
    with pytest.raises(LoraFileError, match="0 files end in"):
        _adapter_files(encoder, {"transformer": ""}, "model.lora.path")
