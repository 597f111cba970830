"""Families with sound: the waveform of their latents is that of diffusers' own pipeline."""

# Its experiments need digenrl.extensions.methods.
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from digenrl import config as configuration
from digenrl.extensions.tools.downloads import find_downloads
from digenrl.models import pretrained
from digenrl.models import tiny as tiny_builds
from digenrl.parts import check_parts
from tests.models.families import drawn_in_one_step
from tests.models.tiny_policies import BOTH, HEARD, ROWS, make


def test_three_families_have_sound_and_the_others_say_that_they_have_none() -> None:
    assert len(HEARD) == 3
    policy = make("wan")
    with pytest.raises(ValueError, match=r"wan makes no sound: use a model that does"):
        policy.codec.decode_sound(torch.zeros(1, *policy.latent_shape))


def give_statistics(autoencoder: Any) -> None:
    """Give the latents of sound a mean and a deviation: those of tiny builds are 0 and 1."""
    draw, tensors = (
        torch.Generator().manual_seed(5),
        "latents_mean" in dict(autoencoder.named_buffers()),
    )
    numbers = 128 if tensors else 32
    mean, std = torch.randn(numbers, generator=draw), torch.rand(numbers, generator=draw) + 0.5
    if tensors:
        autoencoder.latents_mean.copy_(mean)
        autoencoder.latents_std.copy_(std)
    else:
        autoencoder.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())


@pytest.mark.heavy
@pytest.mark.parametrize("family", HEARD)
def test_sound_equals_that_of_the_diffusers_pipeline(family: str) -> None:
    """The pipeline's schedulers leave the latents as they are, so that both decode the same."""
    policy, row = make(family), ROWS[family]
    latents = torch.randn(1, *policy.latent_shape, generator=torch.Generator().manual_seed(3))
    pipeline = row.load(tiny_builds.ensure(family))
    pipeline.set_progress_bar_config(disable=True)
    for autoencoder in (policy.codec._sound_decoders[0], pipeline.audio_vae):
        give_statistics(autoencoder)
    for scheduler in (pipeline.scheduler, getattr(pipeline, "audio_scheduler", None)):
        if scheduler is not None:
            scheduler.step = lambda output, t, sample, **_: (sample,)
    more = row.latents(latents) | {"num_frames": policy.codec.frames}
    # A pipeline whose autoencoder holds the statistics normalises the sound that it is given.
    if "latents_mean" in dict(pipeline.audio_vae.named_buffers()):
        given, of = latents[:, policy.codec.video_tokens :], pipeline.audio_vae
        more["audio_latents"] = given * of.latents_std + of.latents_mean
    output = drawn_in_one_step(pipeline, policy.codec, **more)
    sound, theirs = policy.codec.decode_sound(latents), torch.as_tensor(output[1]).float()
    assert sound.waveform.dtype == torch.float32
    assert sound.waveform.shape == theirs.shape
    assert sound.waveform.shape[:2] == (1, 2)
    found = [part.config.get(policy.codec.rate_key) for part in policy.codec._sound_decoders]
    assert sound.rate == found[-1] > 20000
    assert (sound.waveform[:, 0] - sound.waveform[:, 1]).abs().max() > 1e-3
    assert (sound.waveform - theirs).abs().max() <= 1e-6
    two = policy.codec.decode_sound(torch.cat([latents.roll(1, 1), latents]))
    torch.testing.assert_close(two.waveform[1:], sound.waveform)
    assert not torch.allclose(two.waveform[0], two.waveform[1])


@pytest.mark.heavy
def test_what_makes_sound_is_loaded_when_somebody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, read = list[str](), pretrained.load_component

    def counting(kind: Any, path: str, name: str, dtype: torch.dtype) -> Any:
        loaded.append(name)
        return read(kind, path, name, dtype)

    monkeypatch.setattr(pretrained, "load_component", counting)
    policy = make(BOTH)
    latents = torch.zeros(1, *policy.latent_shape)
    policy.codec.decode(latents)
    assert loaded == ["transformer", "vae"]
    policy.codec.decode_sound(latents)
    policy.codec.decode_sound(latents)
    assert loaded == ["transformer", "vae", "audio_vae", "vocoder"]
    policy.codec.release_encoders()
    policy.codec.decode_sound(latents)
    assert loaded[-2:] == ["audio_vae", "vocoder"]


@pytest.mark.heavy
def test_a_decoder_of_another_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make(HEARD[0])
    index = pretrained.model_index(policy.path) | {"vocoder": ["diffusers", "OtherVocoder"]}
    monkeypatch.setattr(pretrained, "model_index", lambda path: index)
    with pytest.raises(
        pretrained.PretrainedError, match=r"vocoder .* is OtherVocoder.*LTX2VocoderWithBWE"
    ):
        policy.codec.decode_sound(torch.zeros(1, *policy.latent_shape))


@pytest.mark.heavy
def test_a_reward_of_sound_is_refused_for_a_model_without(tmp_path: Path) -> None:
    words = ["hardware=cpu_tiny", "reward=clap", f"output_root={tmp_path}"]
    silent = configuration.load(["experiment=wan21_flowgrpo", *words]).settings
    with pytest.raises(
        ValueError,
        match=r"reward\.rewards\.clap\.scorer: scores sound, and wan makes none; take a model with",
    ):
        check_parts(silent)
    check_parts(configuration.load(["experiment=ltx23_flowgrpo", *words]).settings)


def test_what_makes_sound_is_fetched_where_a_reward_listens() -> None:
    words = ["experiment=ltx2_flowgrpo"]
    deaf, _ = find_downloads(configuration.load(words).settings)
    wanted, _ = find_downloads(configuration.load([*words, "reward=clap"]).settings)
    model, heard = (
        next(each for each in found if each.key == "model.path") for found in (deaf, wanted)
    )
    assert set(heard.files) - set(model.files) == {"audio_vae/*", "vocoder/*"}
    weights = next(each for each in wanted if each.to_set)
    assert weights.command == "hf download laion/clap-htsat-unfused pytorch_model.bin"
    assert not weights.ignored
    assert "*.bin" in heard.ignored
