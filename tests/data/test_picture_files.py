"""One rule for the pictures of prompts, scored folders and references, whatever their depth,
transparency, orientation, number of frames or name."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor

from digenrl.extensions.bench.media_files import MediaError, media_files, read_media
from digenrl.images import ImageError, ImageLimits, read_image
from digenrl.images.reader import list_files
from reward_models.clip_statistics import ClipStatistics, pictures_of

RAMP = np.tile(np.arange(64, dtype=np.float64) / 63, (64, 1))
"""Grey from 0 to 1, 64 levels."""


def from_score(file: Path) -> Tensor:
    read = read_media(file, 4, 1 << 20)
    return read.expand(3, -1, -1)


def from_prompt(file: Path) -> Tensor:
    image = read_image("image", file.name, file.parent, ImageLimits())
    with Image.open(file) as opened:
        upright = opened.getexif().get(0x0112, 1) < 5
        size = opened.size[::-1] if upright else opened.size
    return pil_to_tensor(image.fit_to_size(*size)).float() / 255


def from_reference(file: Path) -> Tensor:
    (picture,) = pictures_of(file.parent, 5)
    return picture.float().expand(3, -1, -1) / 255


READERS = [from_score, from_prompt, from_reference]
Reader = Callable[[Path], Tensor]


def saved(folder: Path, name: str, picture: Image.Image, **options: object) -> Path:
    picture.save(folder / name, **options)  # type: ignore[arg-type]
    return folder / name


def near(found: Tensor, grey: np.ndarray, most: float = 1.01 / 255) -> bool:
    return bool((found - torch.from_numpy(grey).float()).abs().max() <= most)


@pytest.mark.parametrize("reader", READERS)
def test_16_bits_keep_their_levels(tmp_path: Path, reader: Reader) -> None:
    deep = Image.fromarray((RAMP * 65535).astype("uint16"))
    assert near(reader(saved(tmp_path, "deep.png", deep)), RAMP)


@pytest.mark.parametrize("reader", [from_score, from_reference])
@pytest.mark.parametrize("kind", ["uint16", "float32"])
def test_tiffs_keep_their_levels(tmp_path: Path, reader: Reader, kind: str) -> None:
    most = 65535 if kind == "uint16" else 1
    assert near(reader(saved(tmp_path, "a.tif", Image.fromarray((RAMP * most).astype(kind)))), RAMP)


@pytest.mark.parametrize(
    "values",
    [RAMP.astype("float32") * 255, RAMP.astype("float32") - 0.5, (RAMP * 65535).astype("int32")],
)
def test_a_depth_whose_white_is_unknown_is_refused_with_its_cause(
    tmp_path: Path, values: np.ndarray
) -> None:
    file = saved(tmp_path, "a.tiff", Image.fromarray(values))
    with pytest.raises(MediaError, match="white is unknown"):
        read_media(file, 1, 1 << 20)
    saved(tmp_path, "b.tiff", Image.fromarray(values))
    with pytest.raises(ValueError, match=r"a\.tiff.*white is unknown"):
        ClipStatistics(build="tiny", reference=str(tmp_path))


@pytest.mark.parametrize("reader", READERS)
def test_transparency_is_white(tmp_path: Path, reader: Reader) -> None:
    for name, picture in {
        "clear.png": Image.new("RGBA", (8, 8), (255, 0, 0, 0)),
        "half.webp": Image.new("RGBA", (8, 8), (0, 0, 0, 0)),
        "grey.png": Image.new("LA", (8, 8), (0, 0)),
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        options = {"lossless": True} if name.endswith("webp") else {}
        assert reader(saved(folder, name, picture, **options)).min() == 1, name
    folder = tmp_path / "deep"
    folder.mkdir()
    deep = Image.fromarray(np.full((8, 8), 7, dtype="uint16"))
    assert reader(saved(folder, "deep.png", deep, transparency=7)).min() == 1
    folder = tmp_path / "palette"
    folder.mkdir()
    palette = Image.new("RGBA", (8, 8), (0, 0, 0, 0)).quantize(4)
    assert reader(saved(folder, "p.png", palette)).min() == 1


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "deep.png"])
@pytest.mark.parametrize("turn", [3, 6, 8])
def test_a_photograph_is_upright(tmp_path: Path, reader: Reader, name: str, turn: int) -> None:
    shown = np.zeros((16, 32), dtype="uint8")
    shown[:, :16] = 255  # white on the left
    quarter = {3: 2, 6: 1, 8: 3}[turn]
    stored = np.ascontiguousarray(np.rot90(shown, quarter))
    picture = Image.fromarray(stored.astype("uint16") * 257 if name == "deep.png" else stored)
    exif = Image.Exif()
    exif[0x0112] = turn
    found = reader(saved(tmp_path, name, picture, exif=exif))
    assert tuple(found.shape[-2:]) == (16, 32)
    assert found[..., :12].min() > 0.9
    assert found[..., 20:].max() < 0.1


@pytest.mark.parametrize("reader", READERS)
def test_of_a_phones_jpeg_the_first_picture_counts(tmp_path: Path, reader: Reader) -> None:
    thumb = Image.new("RGB", (8, 8), "black")
    file = tmp_path / "phone.jpg"
    Image.new("RGB", (32, 32), "white").save(
        file, format="MPO", save_all=True, append_images=[thumb]
    )
    assert reader(file).min() > 0.95


@pytest.mark.parametrize("name", ["a.png", "a.webp", "a.tif"])
def test_what_holds_several_pictures_is_refused(tmp_path: Path, name: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("white", "black")]
    file = saved(tmp_path, name, frames[0], save_all=True, append_images=frames[1:], duration=9)
    with pytest.raises(MediaError, match=r"is an animation|has several pages"):
        read_media(file, 4, 1 << 20)
    if name != "a.tif":
        with pytest.raises(ImageError, match="an animation"):
            read_image("image", name, tmp_path, ImageLimits())


def test_hidden_files_are_no_pictures_and_names_are_counted_as_people_do(tmp_path: Path) -> None:
    for name in ("10.png", "2.png", "1.PNG", "b2.png", "b10.jpg", "notes.txt"):
        (tmp_path / name).write_bytes(picture_bytes())
    for name in ("._2.png", ".hidden.jpg"):
        (tmp_path / name).write_bytes(b"Mac")
    (tmp_path / "folder.png").mkdir()
    expected = ["1.PNG", "2.png", "10.png", "b2.png", "b10.jpg"]
    assert [path.name for path in media_files(tmp_path)] == expected
    assert [path.name for path in list_files(tmp_path, (".png", ".jpg"))] == expected
    assert len(list(pictures_of(tmp_path, 99))) == 5


def picture_bytes() -> bytes:
    held = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(held, format="PNG")
    return held.getvalue()
