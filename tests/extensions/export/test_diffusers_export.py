"""What leaves the project: a plain diffusers pipeline with the exported weights draws what the
policy draws."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file

from digenrl.diffusion import denoise
from digenrl.extensions.export import diffusers_export
from digenrl.extensions.export.card import write_card
from digenrl.report import media as sample_files
from tests.models.tiny_policies import (
    FAMILIES,
    VIDEO,
    diffusers_latents,
    exported,
    make,
    prompt,
    randomise_lora,
)

pytestmark = pytest.mark.heavy

PROMPT = "a red circle on a blue background"


def noise_of(policy) -> torch.Tensor:
    return torch.randn(1, *policy.latent_shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("family", FAMILIES)
def test_exported_adapter_and_merged_weights_in_a_plain_transformer_are_the_policy(
    family, tmp_path
):
    policy = make(family)
    randomise_lora(policy)
    written = diffusers_export.export_policy(policy, tmp_path)
    assert written == [tmp_path / diffusers_export.lora_file(part) for part in policy.components]
    plain = exported(policy, tmp_path)
    condition, sigmas = policy.codec.encode([prompt(PROMPT)]), torch.tensor([0.95, 0.6])
    given = denoise.expand_condition(condition, 2)
    noise = noise_of(policy).expand(2, *policy.latent_shape)
    with torch.no_grad():
        ours = policy.velocity(noise, sigmas, given)
        with policy.adapter.reference():
            base = policy.velocity(noise, sigmas, given)
        policy.adapter.merge()
        diffusers_export.export_policy(policy, tmp_path / "merged")
        whole = exported(policy, tmp_path / "merged")
        policy.transformer = plain
        theirs = policy.velocity(noise, sigmas, given)
        policy.transformer = whole
        merged = policy.velocity(noise, sigmas, given)
    assert (ours - merged).abs().max() <= 1e-5, "the sum of the weights is rounded"
    assert (ours - theirs).abs().max() <= 1e-5, "peft adds the adapter's output in another order"
    assert (ours - base).abs().amax(dim=tuple(range(1, ours.dim()))).min() > 1e-3, (
        "at either noise level"
    )


def test_pipeline_with_the_exported_adapter_draws_the_policys_sample(tmp_path, monkeypatch):
    policy = make("flux", guidance_scale=3.5)
    randomise_lora(policy)
    diffusers_export.export_policy(policy, tmp_path)
    load = diffusers.DiffusionPipeline.from_pretrained

    def with_adapter(*arguments, **settings):
        pipeline = load(*arguments, **settings)
        pipeline.load_lora_weights(tmp_path, weight_name=diffusers_export.LORA_FILE)
        return pipeline

    ours = denoise.ode_sample(
        policy, policy.codec.encode([prompt(PROMPT)]), noise_of(policy), policy.sigma_grid(4)
    )
    plain = diffusers_latents("flux", [PROMPT], noise_of(policy), 4, 3.5)
    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", with_adapter)
    theirs = diffusers_latents("flux", [PROMPT], noise_of(policy), 4, 3.5)
    assert (ours - theirs).abs().max() <= 1e-5
    assert (ours - plain).abs().max() > 1e-3


def test_full_weights_reload_bit_equal(tmp_path):
    policy = FAMILIES["sd3"](
        path="x", build="tiny", height=64, width=64, lora=None, dtype="float32"
    )
    randomise_lora(policy, std=0.01)
    diffusers_export.export_policy(policy, tmp_path)
    again = diffusers.SD3Transformer2DModel.from_pretrained(
        tmp_path, subfolder="transformer"
    ).state_dict()
    trained = policy.adapter.trained_parameters()
    assert len(trained) > 50
    assert all(torch.equal(again[name], value) for name, value in trained.items())


def test_checkpoint_names_round_trip_and_a_foreign_checkpoint_is_refused(tmp_path):
    policy, other = make("wan"), make("wan")
    randomise_lora(policy)
    save_file(
        {k: v.detach() for k, v in policy.adapter.trained_parameters().items()},
        tmp_path / "policy.safetensors",
    )
    other.adapter.load_trained_parameters(load_file(tmp_path / "policy.safetensors"))
    for name, value in policy.adapter.trained_parameters().items():
        assert torch.equal(value, other.adapter.trained_parameters()[name])
    with pytest.raises(ValueError, match="do not match this policy"):
        make("flux").adapter.load_trained_parameters(load_file(tmp_path / "policy.safetensors"))


def test_card_shows_numbers_pictures_and_how_to_load(tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    (run / "samples").mkdir(parents=True)
    (run / "plots").mkdir()
    out.mkdir()
    Image.new("RGB", (4, 4)).save(run / "samples" / "before_after.png")
    Image.new("RGB", (4, 4)).save(run / "plots" / "reward.png")
    (run / "summary.json").write_text(
        json.dumps({"reward_first": 0.25, "reward_last": 0.75, "heldout_first": None})
    )
    config = SimpleNamespace(
        experiment_name="flux1_flowgrpo",
        model={
            "path": "black-forest-labs/FLUX.1-dev",
            "build": "tiny",
            "lora": {"rank": 4, "alpha": 8},
        },
        algorithm={"clip_range": 1e-4},
        sampling={},
        data={},
        reward={},
        seed=0,
    )
    text = write_card(out, run, vars(config), make("flux"), "trained").read_text()
    assert "| reward_last | 0.75 |" in text
    assert "heldout_first" not in text
    assert "tiny random build" in text
    assert 'FluxPipeline.from_pretrained(ensure("flux")' in text
    assert "base_model" not in text
    assert "load_lora_weights" in text
    assert (out / "reward.png").exists()
    assert "![before_after](before_after.png)" in text


HOSTILE = 'x"); import os  # `\n---\nlicense: mine\n```\n<b>[a](http://evil)'


def test_the_words_of_a_run_stay_words_in_its_card(tmp_path: Path) -> None:
    """In YAML, Python and Markdown."""
    policy, run = make("flux"), tmp_path / "run"
    (run / "plots").mkdir(parents=True)
    name = "](javascript:x) <b>.png"
    (run / "plots" / name).write_bytes(b"")
    (run / "summary.json").write_text(json.dumps({"status": HOSTILE}))
    config = dict.fromkeys(("algorithm", "data", "reward", "seed"), HOSTILE) | {
        "sampling": {"height": HOSTILE, "lora": HOSTILE},
        "experiment_name": HOSTILE,
        "model": {"path": HOSTILE, "build": "real", "lora": {"rank": 4, "alpha": 8}},
    }
    text = write_card(tmp_path, run, config, policy, "trained").read_text()
    _, front, card = re.split(r"^---$", text, maxsplit=2, flags=re.MULTILINE)
    assert yaml.safe_load(front)["base_model"] == HOSTILE
    assert "license" not in yaml.safe_load(front)
    (code,) = re.findall(r"^```python$(.*?)^```$", card, re.MULTILINE | re.DOTALL)
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    assert HOSTILE in [
        node.args[0].value for node in calls if node.args and isinstance(node.args[0], ast.Constant)
    ]
    assert not any(
        isinstance(node, ast.Import) and node.names[0].name == "os"
        for node in ast.walk(ast.parse(code))
    )
    (settings,) = re.findall(r"^```json$(.*?)^```$", card, re.MULTILINE | re.DOTALL)
    assert json.loads(settings)["seed"] == HOSTILE
    prose = re.sub(r"^```.*?^```$", "", card, flags=re.MULTILINE | re.DOTALL)
    assert "<b>" not in prose.replace("\\<b\\>", "")
    assert "[a](" not in prose.replace("\\[a\\](", "")
    assert "![\\](javascript:x) \\<b\\>](%5D%28javascript%3Ax%29%20%3Cb%3E.png)" in prose


@pytest.mark.parametrize(
    "family", [name for name, policy in FAMILIES.items() if policy.lora_pipeline]
)
def test_card_of_a_pipeline_that_loads_no_adapters_shows_what_its_network_loads(family, tmp_path):
    policy = make(family)
    randomise_lora(policy)
    (file,) = diffusers_export.export_policy(policy, tmp_path)
    model = {"path": "hub/model", "build": "real", "lora": {"rank": 4, "alpha": 8}}
    config = dict.fromkeys(("algorithm", "data", "reward", "seed"), 0) | {
        "sampling": {"height": 64, "steps": 4},
        "model": model,
    }
    text = write_card(
        tmp_path, tmp_path, config | {"experiment_name": "a"}, policy, "trained"
    ).read_text()
    assert (
        f'pipeline.transformer.load_lora_adapter("PATH/OF/THIS/FOLDER", weight_name="{file.name}")'
        in text
    )
    pipeline = diffusers.DiffusionPipeline.from_pretrained(policy.path)
    pipeline.transformer.load_lora_adapter(tmp_path, weight_name=file.name)
    adapter = pipeline.transformer.peft_config["default_0"]
    assert (adapter.r, adapter.lora_alpha) == (4, 8)


def test_media_files(tmp_path):
    images = torch.zeros(5, 3, 8, 6)
    images[4, 0] = 1
    grid = np.asarray(sample_files.image_grid(images, columns=3))
    assert grid.shape == (18, 22, 3)
    assert (grid[10:18, 8:14] == [255, 0, 0]).all()
    assert (grid[8:10] == 255).all()
    with pytest.raises(ValueError, match="not finite"):
        sample_files.image_grid(torch.full((1, 3, 4, 4), float("nan")))
    videos = (np.arange(2 * 5 * 3 * 31 * 32) % 255).astype(np.uint8).reshape(2, 5, 3, 31, 32)
    sample_files.write_mp4(tmp_path / "video.mp4", videos[0])
    import imageio.v3 as imageio

    assert imageio.imread(tmp_path / "video.mp4", plugin="FFMPEG").shape == (5, 32, 32, 3)


def test_video_families_decode_to_what_the_writer_takes(tmp_path):
    policy = make("wan")
    assert policy.family in VIDEO
    sample_files.write_mp4(tmp_path / "video.mp4", policy.codec.decode(noise_of(policy))[0])
    assert (tmp_path / "video.mp4").stat().st_size > 100


def test_command_exports_a_run(tmp_path, capsys):
    from digenrl import config as configuration
    from digenrl.config.output_dir import prepare_run_dir
    from digenrl.extensions.export.cli import export as command
    from digenrl.strategy.checkpoint_io import DirectoryCheckpointIO
    from digenrl.strategy.checkpoint_storage import PREFIX

    words = [
        "experiment=flux1_flowgrpo",
        "hardware=cpu_tiny",
        f"output_root={tmp_path}",
        "model.lora.rank=4",
    ]
    composed = configuration.load(words)
    run = prepare_run_dir(composed)
    assert command.main([f"run={run}"]) == 1
    assert "Nothing to export" in capsys.readouterr().err
    policy = composed.settings.build("model")
    randomise_lora(policy)
    trained = {
        name: value.detach().clone() for name, value in policy.adapter.trained_parameters().items()
    }
    average = {name: value / 2 for name, value in trained.items()}
    checkpoint = {
        "epoch": 1,
        "state_dict": {PREFIX + name: value for name, value in trained.items()},
        "algorithm": {"ema": average, "ema_steps": 2},
    }
    DirectoryCheckpointIO().save_checkpoint(checkpoint, run / "checkpoints" / "step-000001")
    assert command.main([f"run={run}"]) == 1
    assert (
        "still the base model, because it follows every 8 optimizer steps"
        in capsys.readouterr().err
    )
    checkpoint["algorithm"]["ema_steps"] = 8
    DirectoryCheckpointIO().save_checkpoint(checkpoint, run / "checkpoints" / "step-000002")
    assert command.main([f"run={run}"]) == 0
    folder = run / "export"
    assert capsys.readouterr().out.splitlines()[-1] == str(folder)
    assert {"README.md", diffusers_export.LORA_FILE} <= {path.name for path in folder.iterdir()}
    stored = load_file(folder / diffusers_export.LORA_FILE)
    for name, value in average.items():  # what a run that keeps an average evaluates
        assert torch.equal(stored[f"transformer.{name.replace('.default', '')}"], value)
    assert command.main([f"run={run}", f"out={tmp_path / 'trained'}", "weights=trained"]) == 0
    stored = load_file(tmp_path / "trained" / diffusers_export.LORA_FILE)
    for name, value in trained.items():
        assert torch.equal(stored[f"transformer.{name.replace('.default', '')}"], value)
    assert command.main([f"run={run}", f"out={tmp_path / 'merged'}", "merge=true"]) == 0
    merged, card = tmp_path / "merged", (tmp_path / "merged" / "README.md").read_text()
    assert (merged / "transformer" / "config.json").exists()
    assert not (merged / diffusers_export.LORA_FILE).exists()
    assert "LoRA rank 4, alpha 128.0, added to the base's weights" in card.replace(
        "alpha 128,", "alpha 128.0,"
    )
    assert "FluxTransformer2DModel.from_pretrained" in card
    assert command.main(["run=nowhere"]) == 2
    assert command.main([f"run={run}", "weights=best"]) == 2
