"""CLAP through the tiny build: a random checkpoint of the real class, loaded by the real code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import ClapModel, ClapProcessor

from digenrl.types import Prompt, Sound
from reward_models.clap import Clap, _write_tiny, resample_rows

pytestmark = pytest.mark.heavy

PROMPTS = [Prompt("a dog barks"), Prompt("Zürich 東京"), Prompt("x" * 2000)]
MEDIA = torch.zeros(3, 3, 8, 8)


def noise(seconds: float, rate: int = 48000, channels: int = 1) -> Sound:
    draw = torch.Generator().manual_seed(0)
    return Sound(torch.rand(3, channels, int(seconds * rate), generator=draw) * 2 - 1, rate)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("clap")
    torch.manual_seed(5)
    _write_tiny(made)
    return made


def test_it_is_the_cosine_of_transformers(folder: Path) -> None:
    scorer = Clap(str(folder / "model.safetensors"), str(folder), device="cpu")
    sound = noise(1.0)
    scores = scorer(MEDIA[:2], PROMPTS[:2], Sound(sound.waveform[:2], sound.rate))
    model = ClapModel(scorer.model.config).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    processor = ClapProcessor.from_pretrained(folder)
    inputs = processor(
        text=[prompt.text for prompt in PROMPTS[:2]],
        audio=[*sound.waveform[:2, 0].numpy()],
        sampling_rate=48000,
        padding=True,
        return_tensors="pt",
    )
    with torch.no_grad():
        found = model(**inputs)
    theirs = (found.text_embeds * found.audio_embeds).sum(-1)
    torch.testing.assert_close(scores, theirs, atol=1e-5, rtol=1e-5)
    assert (scores[0] - scores[1]).abs() > 1e-4
    assert scorer.weights_digest != Clap(build="tiny", device="cpu").weights_digest


def test_builds_are_alike_and_channels_are_averaged() -> None:
    scorer, again = Clap(build="tiny", device="cpu"), Clap(build="tiny", device="cpu")
    sound = noise(0.5, 24000, channels=2)
    scores = scorer(MEDIA, PROMPTS, sound)
    assert scores.shape == (3,)
    assert torch.equal(scores, again(MEDIA, PROMPTS, sound))
    mono = Sound(sound.waveform.mean(1, keepdim=True), sound.rate)
    torch.testing.assert_close(scores, scorer(MEDIA, PROMPTS, mono))


def test_a_long_sound_scores_the_mean_of_its_pieces() -> None:
    """transformers' extractor would cut a part at random."""
    scorer, sound = Clap(build="tiny", device="cpu"), noise(12.0)
    whole = scorer(MEDIA, PROMPTS, sound)
    assert torch.equal(whole, scorer(MEDIA, PROMPTS, sound))
    cut = 10 * sound.rate
    parts = [sound.waveform[..., :cut], sound.waveform[..., cut:]]
    alone = [scorer(MEDIA, PROMPTS, Sound(part, sound.rate)) for part in parts]
    torch.testing.assert_close(whole, (alone[0] + alone[1]) / 2)


def test_a_tone_is_the_same_tone_at_another_rate() -> None:
    tones = [np.sin(2 * np.pi * 440 * np.arange(rate) / rate)[None] for rate in (24000, 48000)]
    found = resample_rows(tones[0], 24000, 48000)
    assert found.shape == (1, 48000)
    assert np.abs(found - tones[1])[:, 500:-500].max() < 1e-3
    assert resample_rows(tones[1], 48000, 48000) is tones[1]


def test_files_that_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs `path`"):
        Clap(build="real")
    with pytest.raises(FileNotFoundError, match=r"give `path` the downloaded pytorch_model\.bin"):
        Clap(str(tmp_path / "none.bin"), str(folder), device="cpu")
    state = load_file(folder / "model.safetensors")
    del state["audio_projection.linear1.weight"]
    torch.save(state, tmp_path / "half.bin")
    with pytest.raises(ValueError, match=r"lacks 1 tensors of CLAP \(first: audio_projection"):
        Clap(str(tmp_path / "half.bin"), str(folder), device="cpu")
