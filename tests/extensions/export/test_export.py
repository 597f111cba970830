"""`make export`: a plain diffusers pipeline with the exported weights draws a stored evaluation
sample again."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

import digenrl
from digenrl import config as configuration
from digenrl import keys
from digenrl.callbacks.evaluation import save_pictures
from digenrl.config.settings import Settings
from digenrl.diffusion import denoise
from digenrl.extensions.export.cli.export import main
from digenrl.extensions.export.diffusers_export import LORA_FILE
from digenrl.models.policy import Policy
from digenrl.parts import sampling_spec
from digenrl.rollout.engine import EVAL_STREAM, RolloutEngine
from digenrl.strategy.checkpoint_io import DirectoryCheckpointIO
from digenrl.types import Prompt

pytestmark = pytest.mark.heavy

RL_STEP = 7
SHOWN = "callbacks.evaluation.max_prompts=2", "callbacks.evaluation.samples_per_prompt=2"
EMA = "+algorithm.ema={_target_: digenrl.algorithms.copies.Ema, decay: 0.5, every: 1}"


def make_run(directory: Path, *words: str) -> tuple[Settings, Policy]:
    """Make what training leaves: config.yaml, a checkpoint, and the evaluation samples. The
    checkpoint's weights are not the initial ones, its average differs from both, and the samples
    are of the weights that a run evaluates with.
    """
    config = configuration.load([*words, *SHOWN]).settings
    directory.mkdir()
    (directory / "config.yaml").write_text(OmegaConf.to_yaml(config.tree))
    policy = config.build("model")
    module = config.build("algorithm", policy=policy)
    if module.ema is not None:
        module.ema.begin_average(policy.adapter.trained_parameters())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.adapter.trained_parameters().values():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    if module.ema is not None:
        module.ema.update_average(policy.adapter.trained_parameters())
    checkpoint = {"epoch": RL_STEP - 1, "state_dict": module.state_dict()}
    module.on_save_checkpoint(checkpoint)
    DirectoryCheckpointIO().save_checkpoint(
        checkpoint, directory / "checkpoints" / f"step-{RL_STEP:06d}"
    )
    rewards = config.build("reward")
    engine = RolloutEngine(
        policy, rewards, module.sde, module.train_steps, sampling_spec(config), config.seed
    )
    evaluation = config.build("callbacks.evaluation")
    with module.averaged():
        save_pictures(
            directory / "samples" / f"eval-{RL_STEP}.npz",
            evaluation.sample_share(engine),
            per_prompt=2,
        )
    engine.close()
    return config, policy


def stored(directory: Path) -> tuple[np.ndarray, list[str]]:
    with np.load(directory / "samples" / f"eval-{RL_STEP}.npz") as arrays:
        return arrays["media"], [str(text) for text in arrays["prompts"]]


def noise_of(config: Settings, policy: Policy, text: str) -> Tensor:
    """The evaluation noise of a prompt's first two samples, from its key."""
    evaluation = config.build("callbacks.evaluation")
    (uid,) = [prompt.uid for prompt in evaluation.drawn.prompts if prompt.text == text]
    return keys.noise(
        evaluation.drawn.seed, 0, uid, range(2), keys.INITIAL, policy.latent_shape, EVAL_STREAM
    )


def flux(config: Settings, noise: Tensor, text: str, export: Path | None) -> np.ndarray:
    """Two samples [2, H, W, 3] in [0, 1] of a plain FluxPipeline: nothing of digenrl but the
    folder."""
    from digenrl.models import tiny as tiny_builds

    pipeline = diffusers.FluxPipeline.from_pretrained(tiny_builds.ensure("flux"))
    pipeline.set_progress_bar_config(disable=True)
    if export is not None:
        pipeline.load_lora_weights(export, weight_name=LORA_FILE)
    return _images(pipeline, config, noise, text, guidance_scale=config.sampling.guidance_scale)


def sd3(config: Settings, noise: Tensor, text: str, export: Path | None) -> np.ndarray:
    """The same of a plain StableDiffusion3Pipeline, which takes its sigmas from its scheduler's
    default range."""
    from digenrl.models import tiny as tiny_builds

    pipeline = diffusers.StableDiffusion3Pipeline.from_pretrained(tiny_builds.ensure("sd3"))
    pipeline.set_progress_bar_config(disable=True)
    if export is not None:
        pipeline.load_lora_weights(export, weight_name=LORA_FILE)
    steps = config.sampling.eval.steps
    sigmas = None if config.model.grid == "scheduler" else list(np.linspace(1, 1 / steps, steps))
    return _images(
        pipeline, config, noise, text, guidance_scale=config.sampling.guidance_scale, sigmas=sigmas
    )


def _images(
    pipeline: Any, config: Settings, noise: Tensor, text: str, **settings: Any
) -> np.ndarray:
    sampling, length = config.sampling, 64
    drawn: list[np.ndarray] = []
    for row in noise:
        result = pipeline(
            prompt=text, latents=row[None], height=sampling.height, width=sampling.width,
            num_inference_steps=sampling.eval.steps, max_sequence_length=length, output_type="np", **settings,
        )  # fmt: skip
        drawn.append(result.images[0])
    return np.stack(drawn)


@pytest.mark.parametrize(
    ("experiment", "draw", "words"),
    [
        pytest.param("flux1_flowgrpo", flux, (EMA,), marks=pytest.mark.slow),
        ("sd35_flowgrpo", sd3, ("algorithm.ema.every=1", "algorithm.ema.decay=0.5")),
    ],
)
def test_a_plain_pipeline_draws_the_stored_evaluation_samples(
    experiment: str,
    draw: Callable[..., np.ndarray],
    words: tuple[str, ...],
    tmp_path: Path,
    capsys: Any,
) -> None:
    run = tmp_path / "run"
    config, policy = make_run(run, f"experiment={experiment}", "hardware=cpu_tiny", *words)
    assert main([f"run={run}"]) == 0
    export = Path(capsys.readouterr().out.splitlines()[-1])
    media, prompts = stored(run)
    for row in (0, 2):
        noise = noise_of(config, policy, prompts[row])
        wanted = np.moveaxis(media[row : row + 2], 1, -1).astype(int)
        drawn = np.rint(draw(config, noise, prompts[row], export) * 255).astype(int)
        assert np.abs(drawn - wanted).max() <= 1, "8 bits: the last one may round the other way"
        base = np.rint(draw(config, noise, prompts[row], None) * 255).astype(int)
        assert np.abs(base - wanted).max() > 8, "without the adapter another picture"


def as_the_card_says(folder: Path) -> dict[str, Any]:
    """What the Python of a model card makes, on this processor."""
    card = (folder / "README.md").read_text()
    (code,) = re.findall(r"^```python$(.*?)^```$", card, re.MULTILINE | re.DOTALL)
    made: dict[str, Any] = {}
    for said, here in (("PATH/OF/THIS/FOLDER", str(folder)), ('"cuda"', '"cpu"')):
        code = code.replace(said, here)
    exec(code, made)
    return made


def test_the_card_of_a_pipeline_draws(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_run(run, "experiment=flux1_flowgrpo", "hardware=cpu_tiny")
    assert main([f"run={run}", "weights=trained"]) == 0
    (picture,) = as_the_card_says(run / "export")["media"]
    assert picture.size == (64, 64)


def test_the_digits_policy_draws_the_stored_evaluation_samples(tmp_path: Path, capsys: Any) -> None:
    run = tmp_path / "run"
    config, policy = make_run(run, "experiment=digits_flowgrpo")
    (run / "summary.json").write_text(json.dumps({"status": "completed", "heldout_last": 0.5}))
    assert main([f"run={run}", f"out={tmp_path / 'out'}"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "out")
    made = as_the_card_says(tmp_path / "out")
    assert made["media"].shape == (4, 1, 8, 8)
    plain = made["policy"]
    media, prompts = stored(run)
    grid = plain.sigma_grid(config.sampling.eval.steps)
    drawn = denoise.ode_sample(
        plain, plain.codec.encode([Prompt(prompts[0])]), noise_of(config, policy, prompts[0]), grid
    )
    with torch.no_grad():
        assert np.array_equal(plain.codec.decode(drawn).mul(255).round().byte().numpy(), media[:2])
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| heldout_last | 0.5 |" in card


@pytest.mark.slow
def test_the_average_is_exported_only_where_there_is_one(tmp_path: Path, capsys: Any) -> None:
    run = tmp_path / "run"
    make_run(run, "experiment=wan21_flowgrpo", "hardware=cpu_tiny", "algorithm.ema.every=1")
    assert main([f"run={run}"]) == 0
    assert "moving average" in capsys.readouterr().err
    averaged = (run / "export" / LORA_FILE).read_bytes()
    assert main([f"run={run}", "weights=trained"]) == 0
    assert (run / "export" / LORA_FILE).read_bytes() != averaged
    assert main([f"run={run}", "format=comfyui"]) == 0
    read = [
        diffusers.WanPipeline.lora_state_dict(run / "export", weight_name=name)
        for name in (LORA_FILE, "lora_comfyui.safetensors")
    ]
    assert read[0].keys() == read[1].keys()
    other = tmp_path / "other"
    make_run(other, "experiment=digits_flowgrpo")
    assert main([f"run={other}", "weights=average"]) == 1
    assert "keeps no moving average" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "run: missing; allowed: path of a run directory"),
        (["run=/nowhere"], "/nowhere"),
        (
            ["run=x", "weights=best"],
            "weights = best: is none of the choices; allowed: evaluated | trained | average",
        ),
        (
            ["run=x", "merge=true", "format=kohya"],
            "merge = true with format = kohya: that format is for adapters",
        ),
        (["run=x", "wieghts=trained"], "wieghts = trained: no such key; nearest: weights"),
    ],
)
def test_bad_words_are_refused_in_words(arguments: list[str], message: str, capsys: Any) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_a_run_without_a_checkpoint_has_nothing_to_export(tmp_path: Path, capsys: Any) -> None:
    config = configuration.load(["experiment=digits_flowgrpo"]).settings
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(config.tree))
    assert main([f"run={tmp_path}"]) == 1
    assert "Nothing to export" in capsys.readouterr().err


def test_a_new_run_may_begin_with_a_runs_merged_weights(tmp_path: Path) -> None:
    """The commands of docs/running.md, "Another learning rate, or other weights"."""
    make_run(tmp_path / "run", "experiment=digits_flowgrpo")
    assert main([f"run={tmp_path / 'run'}", "merge=true"]) == 0
    merged = tmp_path / "run/export/transformer/diffusion_pytorch_model.safetensors"
    last = digenrl.sample(tmp_path / "run", "number two").media
    words = (f"model.path={merged}",)
    begun = digenrl.sample(tmp_path / "run", "number two", *words, weights="base").media
    base = digenrl.sample(tmp_path / "run", "number two", weights="base").media
    assert abs(begun.astype(int) - last).max() <= 1
    assert abs(begun.astype(int) - base).max() > 1
