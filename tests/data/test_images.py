"""Images of prompts: what is refused before a run, what identifies them, and how they reach a
reward service."""

from __future__ import annotations

import io
import json
import os
import struct
import zlib
from pathlib import Path

import pytest
import torch
from PIL import Image

from digenrl import config as configuration
from digenrl import prompts
from digenrl.data import load_prompts
from digenrl.images import ImageError, ImageLimits
from digenrl.rewards.protocol import source_images
from digenrl.types import Prompt


def picture(colour: str, size: tuple[int, int] = (40, 30), kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise(size, 60).convert("RGB").save(
        buffer, kind
    ) if colour == "noise" else Image.new("RGB", size, colour).save(buffer, kind)
    return buffer.getvalue()


def bomb(side: int) -> bytes:
    """A PNG that claims side x side pixels and holds a few."""
    head = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    parts = (head, b"IDAT" + zlib.compress(b"\0" * 1000))
    chunks = (
        struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part))
        for part in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def file_of(folder: Path, *lines: dict[str, object]) -> Path:
    path = folder / "edits.jsonl"
    path.write_text("".join(json.dumps({"prompt": "make it red"} | line) + "\n" for line in lines))
    return path


def test_every_unusable_image_is_named_with_its_line(tmp_path: Path) -> None:
    jpeg = picture("noise", (200, 200), "JPEG")
    animation = io.BytesIO()
    Image.new("RGB", (8, 8)).save(
        animation, "WEBP", save_all=True, append_images=[Image.new("RGB", (8, 8), "red")]
    )
    contents = {
        "cut.jpg": (jpeg[: len(jpeg) // 2], "is broken"),
        "cut.png": (picture("noise")[:-40], "is broken"),
        "bomb.png": (bomb(9_000), r"9000x9000 pixels, at most 67108864 \(data.image_max_pixels\)"),
        "far.png": (bomb(50_000), "far too many pixels"),
        "text.png": (b"hello", "is no PNG, JPEG or WEBP file"),
        "large.png": (b"\0" * (33 << 20), r"has 33.0 MiB, at most 32 \(data.image_max_mib\)"),
        "moving.webp": (animation.getvalue(), "is an animation"),
    }
    for name, (content, _) in contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "fine.png").write_bytes(picture("red"))
    lines = [{"image": "fine.png"}, *({"image": name} for name in contents)]
    lines += [
        {"image": "gone.png"},
        {"image": "http://a/b.png"},
        {"image": 3},
        {"images": "fine.png"},
    ]
    lines += [{"image": "fine.png", "images": ["fine.png"]}, {"imag": "fine.png"}]
    file = file_of(tmp_path, *lines)
    with pytest.raises(prompts.PromptFileError) as caught:
        prompts.read_prompt_file(file, ImageLimits())
    problems = [reason for _, reason in contents.values()]
    problems += [
        "No such file",
        "is an address",
        "must be text",
        "must be a list",
        "not both",
        "no such field",
    ]
    for line, reason in enumerate(problems, start=2):
        assert caught.match(rf"{file}:{line}: [^;]*{reason}"), reason
    assert f"{file}:1:" not in str(caught.value)


def test_a_configuration_with_a_broken_image_is_refused_and_a_limit_is_a_key(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.png").write_bytes(picture("red"))
    words = [
        "experiment=flux1_kontext_flowgrpo",  # of digenrl.extensions.zoo
        "hardware=cpu_tiny",
        "data.heldout=null",
        "data.prompts_per_batch=2",
    ]
    words.append(
        f"data.prompts={file_of(tmp_path, {'image': 'a.png'}, {'image': 'a.png', 'id': 2})}"
    )
    configuration.load(words)
    with pytest.raises(
        configuration.ConfigError, match=r"edits\.jsonl:1: .*40x30 pixels, at most 100 "
    ):
        configuration.load([*words, "data.image_max_pixels=100"])


def test_what_is_no_regular_file_is_refused_and_never_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "endless.png").symlink_to("/dev/zero")
    names = ["/dev/zero", "pipe.png", "endless.png", "."]
    file = file_of(tmp_path, *({"image": name} for name in names))
    for limits in (None, ImageLimits()):
        with pytest.raises(prompts.PromptFileError) as caught:
            prompts.read_prompt_file(file, limits)
        for line, name in enumerate(names, start=1):
            assert (
                f"{file}:{line}: image = {name}: is no regular file; name a picture's file"
                in str(caught.value)
            )


def test_identity_is_that_of_role_and_content(tmp_path: Path) -> None:
    for name, colour in (("a.png", "red"), ("b.png", "blue"), ("elsewhere.png", "red")):
        (tmp_path / name).write_bytes(picture(colour))
    lines = [
        {"image": "a.png"},
        {"image": "b.png"},
        {"last_image": "a.png"},
        {"images": ["a.png", "b.png"]},
        {},
    ]
    loaded = load_prompts(file_of(tmp_path, *lines, {"image": "elsewhere.png"}))
    assert len(loaded) == len({prompt.uid for prompt in loaded}) == 5, "the last repeats the first"
    assert loaded[4].uid == Prompt("make it red").uid, "prompts without images are what they were"
    assert [image.role for image in loaded[3].images] == ["image", "image"]
    (tmp_path / "a.png").write_bytes(picture("green"))
    with pytest.raises(ImageError, match=r"a\.png changed after the prompts were read"):
        loaded[0].images[0].read_content()


def test_scorers_get_the_middle_of_an_image_in_the_size_of_the_samples(tmp_path: Path) -> None:
    wide = Image.new("RGBA", (60, 20), (255, 0, 0, 0))  # transparent: white
    wide.paste((0, 0, 255, 255), (20, 0, 40, 20))
    wide.save(tmp_path / "a.png")
    (prompt,) = load_prompts(file_of(tmp_path, {"image": "a.png"}))
    found = source_images(torch.zeros(1, 3, 10, 10), [prompt])
    assert torch.allclose(found[0].mean(dim=(1, 2)), torch.tensor([0.0, 0.0, 1.0]), atol=0.05)
    found = source_images(torch.zeros(1, 5, 3, 10, 30), [prompt])
    assert torch.equal(found[0, :, 5, 2], torch.ones(3))
