"""Videos with sound, as files that players open."""

from __future__ import annotations

import wave
from pathlib import Path

import imageio.v3 as imageio
import numpy as np

from digenrl.report.media import Track, encode_mp4, write_wav

TONE = (np.sin(np.arange(16000) / 10) * 2**14).astype(np.int16)
FRAMES = np.zeros((12, 16, 16, 3), dtype=np.uint8)


def test_a_video_lasts_as_long_as_its_sound(tmp_path: Path) -> None:
    """12 frames beside half a second are 24 a second."""
    heard, silent = tmp_path / "heard.mp4", tmp_path / "silent.mp4"
    heard.write_bytes(encode_mp4(FRAMES, sound=Track(np.stack([TONE[:8000]] * 2), 16000)))
    silent.write_bytes(encode_mp4(FRAMES))
    meta = imageio.immeta(heard, plugin="FFMPEG")
    assert meta["audio_codec"] == "aac"
    assert meta["fps"] == 24
    assert imageio.imread(heard, plugin="FFMPEG").shape == FRAMES.shape
    assert "audio_codec" not in imageio.immeta(silent, plugin="FFMPEG")


def test_channels_of_a_wave_file_are_those_of_the_sound(tmp_path: Path) -> None:
    track = Track(np.stack([[TONE, -TONE], [TONE // 2, TONE * 0]]), 16000).of_row(1)
    write_wav(str(tmp_path / "a.wav"), track)
    with wave.open(str(tmp_path / "a.wav")) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (2, 2, 16000)
        found = np.frombuffer(file.readframes(16000), "<i2").reshape(-1, 2)
    assert np.array_equal(found.T, track.samples)
