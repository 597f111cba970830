"""One rule for the pictures of prompts, scored folders and references, whatever their depth,
transparency, orientation, number of frames or name."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms, ImageOps
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


def tiff_of(folder: Path, values: bytes, bits: int, form: int = 1) -> Path:
    """Write a grey TIFF of 2 x 1 numbers with `bits` bits; `form` 2 = signed."""
    tags = {256: 2, 257: 1, 258: bits, 259: 1, 262: 1, 273: 146, 277: 1, 278: 1, 279: len(values)}
    entries = [struct.pack("<HHII", tag, 4, 1, held) for tag, held in (tags | {339: form}).items()]
    head = b"II*\0" + struct.pack("<IH", 8, len(entries)) + b"".join(entries) + bytes(4)
    (folder / "a.tif").write_bytes(head.ljust(146, b"\0") + values)
    return folder / "a.tif"


def png_of(folder: Path, bits: int, colour: int, row: bytes, *chunks: tuple[bytes, bytes]) -> Path:
    """Write a PNG of 2 x 1 pixels."""
    head = struct.pack(">IIBBBBB", 2, 1, bits, colour, 0, 0, 0)
    parts = [(b"IHDR", head), *chunks, (b"IDAT", zlib.compress(b"\0" + row)), (b"IEND", b"")]
    content = b"".join(
        struct.pack(">I", len(held)) + name + held + struct.pack(">I", zlib.crc32(name + held))
        for name, held in parts
    )
    (folder / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + content)
    return folder / "a.png"


def as_bytes(found: Tensor) -> list[list[int]]:
    return (found[:, 0] * 255).round().int().tolist()


@pytest.mark.parametrize("reader", [from_score, from_reference])
@pytest.mark.parametrize(
    ("bits", "values"), [(8, b"\x80\xff"), (12, b"\x80\x0f\xff"), (16, b"\0\x80\xff\xff")]
)
def test_white_is_the_largest_number_of_a_depth(
    tmp_path: Path, reader: Reader, bits: int, values: bytes
) -> None:
    assert as_bytes(reader(tiff_of(tmp_path, values, bits))) == [[128, 255]] * 3


@pytest.mark.parametrize("bits", [8, 16])
def test_signed_numbers_are_refused(tmp_path: Path, bits: int) -> None:
    with pytest.raises(MediaError, match="white is unknown"):
        read_media(tiff_of(tmp_path, b"\x80\x7f\xff\x7f"[: bits // 4], bits, form=2), 1, 1 << 20)


@pytest.mark.parametrize("reader", [from_score, from_reference])
@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("compression", [None, "tiff_lzw"])
def test_every_turned_tiff_is_upright(
    tmp_path: Path, reader: Reader, turn: int, compression: str | None
) -> None:
    stored = Image.fromarray(np.arange(12, dtype="uint8").reshape(3, 4) * 20)
    exif = Image.Exif()
    exif[0x0112] = turn
    file = saved(tmp_path, "a.tif", stored, exif=exif, compression=compression)
    saved(tmp_path / "..", "twin.png", stored, exif=exif)
    with Image.open(tmp_path / ".." / "twin.png") as twin:
        shown = np.array(ImageOps.exif_transpose(twin))
    assert (reader(file)[0] * 255).round().int().tolist() == shown.tolist()


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("bits", "colour", "row", "key", "shown"),
    [
        (1, 0, b"\x40", [0], [255, 255]),
        (2, 0, b"\x60", [1], [255, 170]),
        (4, 0, b"\x5a", [5], [255, 170]),
        (8, 0, b"\x05\xaa", [5], [255, 170]),
        (16, 0, b"\0\x05\xaa\xaa", [5], [255, 170]),
        (8, 2, b"\5\5\5\xaa\xaa\xaa", [5, 5, 5], [255, 170]),
        (16, 2, b"\x05\x01" * 3 + b"\xaa\xaa" * 3, [0x501] * 3, [255, 170]),
    ],
)
def test_a_transparent_colour_is_white_at_every_depth(
    tmp_path: Path,
    reader: Reader,
    bits: int,
    colour: int,
    row: bytes,
    key: list[int],
    shown: list[int],
) -> None:
    chunk = (b"tRNS", struct.pack(f">{len(key)}H", *key))
    assert as_bytes(reader(png_of(tmp_path, bits, colour, row, chunk))) == [shown] * 3


@pytest.mark.parametrize("reader", READERS)
def test_colours_are_those_that_the_file_means(tmp_path: Path, reader: Reader) -> None:
    linear, usual = (struct.pack(">I", each) for each in (100000, 45455))
    row = b"\x80" * 3 + b"\xff" * 3
    assert as_bytes(reader(png_of(tmp_path, 8, 2, row, (b"gAMA", linear)))) == [[186, 255]] * 3
    assert as_bytes(reader(png_of(tmp_path, 8, 2, row, (b"gAMA", usual)))) == [[128, 255]] * 3
    told = (b"sRGB", b"\0"), (b"gAMA", linear)
    assert as_bytes(reader(png_of(tmp_path, 8, 2, row, *told))) == [[128, 255]] * 3


def swapped_profile() -> bytes:
    """An sRGB profile in which red and blue have changed places."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    renamed = profile.replace(b"rXYZ", b"tXYZ").replace(b"bXYZ", b"rXYZ").replace(b"tXYZ", b"bXYZ")
    return renamed.replace("sRGB".encode("utf-16-be"), "mine".encode("utf-16-be"))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P"])
def test_a_colour_profile_is_applied(tmp_path: Path, reader: Reader, mode: str) -> None:
    red = Image.new("RGB", (8, 8), (255, 0, 0)).convert(mode)
    found = reader(saved(tmp_path, "a.png", red, icc_profile=swapped_profile()))
    assert np.abs(found[:, 0, 0].numpy() - [0, 0, 1]).max() < 0.02


def test_a_profile_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    for name, profile in {"broken": b"nothing", "cut": swapped_profile()[:200]}.items():
        file = saved(tmp_path, f"{name}.png", Image.new("RGB", (8, 8)), icc_profile=profile)
        with pytest.raises(MediaError, match=r"colour profile cannot be applied.*save it as sRGB"):
            read_media(file, 1, 1 << 20)
        with pytest.raises(ImageError, match="colour profile cannot be applied"):
            read_image("image", file.name, tmp_path, ImageLimits())
    picture = Image.new("CMYK", (8, 8))
    file = saved(tmp_path, "a.jpg", picture, icc_profile=swapped_profile())
    with pytest.raises(MediaError, match="colours are CMYK, and its colour profile is of RGB"):
        read_media(file, 1, 1 << 20)


@pytest.mark.parametrize("size", [(1, 1), (3, 1), (1, 300), (7, 9), (4000, 1)])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_prompt_may_have_a_picture_of_any_size(
    tmp_path: Path, size: tuple[int, int], kind: str
) -> None:
    saved(tmp_path, "a", Image.new("RGB", size, "white"), format=kind)
    image = read_image("image", "a", tmp_path, ImageLimits())
    assert np.asarray(image.fit_to_size(8, 8)).min() > 250


@pytest.mark.parametrize("name", ["a.heic", "b.AVIF", "c.jxl", "d.gif", "e.mp4"])
def test_no_picture_of_a_reference_is_left_out_unsaid(tmp_path: Path, name: str) -> None:
    for number in range(3):
        saved(tmp_path, f"{number}.png", Image.new("RGB", (8, 8)))
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=rf"{name}: is not read here .*convert it"):
        ClipStatistics(build="tiny", reference=str(tmp_path))
    (tmp_path / name).unlink()
    (tmp_path / "notes.txt").write_text("left out")
    ClipStatistics(build="tiny", reference=str(tmp_path))


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    saved(tmp_path, "a.png", Image.new("RGB", (8, 8)))
    (tmp_path / "b.png").symlink_to(tmp_path / "gone.png")
    with pytest.raises(ValueError, match=r"b\.png: is a link to nothing; fetch"):
        media_files(tmp_path)


def test_natural_order_knows_no_digits_but_ours(tmp_path: Path) -> None:
    names = ["1\N{SUPERSCRIPT TWO}3.png", "\N{ARABIC-INDIC DIGIT THREE}.png", "2.png", "10.png"]
    for name in names:
        saved(tmp_path, name, Image.new("RGB", (8, 8)))
    found = [path.name for path in media_files(tmp_path)]
    assert sorted(found) == sorted(names)
    assert found.index("2.png") < found.index("10.png")
