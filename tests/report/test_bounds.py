"""What is read of a foreign run has a bound and a format: pictures, arrays and YAML."""

from __future__ import annotations

import ast
import io
import resource
import zipfile
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from digenrl import config
from digenrl.config.commands import to_continue
from digenrl.extensions.bench.media_files import MediaError, read_media
from digenrl.images.reader import read_picture
from digenrl.record.stored_yaml import checked_text, read_plain
from digenrl.report.pictures import read_samples
from digenrl.report.read_run import read_run
from tests.report.synthetic import write_run

ROOT = Path(__file__).parents[2]


def test_every_picture_is_opened_with_the_formats_that_it_may_have() -> None:
    calls = [
        (file, node)
        for folder in ("src", "reward_models", "scripts", "benchmarks", "examples")
        for file in (ROOT / folder).rglob("*.py")
        if "Image.open" in (text := file.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Image.open")
    ]
    assert len(calls) >= 4
    bare = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file, node in calls
        if not any(keyword.arg == "formats" for keyword in node.keywords)
    ]
    assert not bare


@pytest.mark.parametrize("suffix", [".png", ".gif", ".jpg", ".mp4"])
@pytest.mark.parametrize("made", ["EPS", "PDF", "PCX", "m3u8", "concat"])
def test_a_file_is_what_its_name_may_be_or_is_refused(
    tmp_path: Path, suffix: str, made: str
) -> None:
    file = tmp_path / f"a{suffix}"
    secret = tmp_path / "secret.mp4"
    if made == "m3u8":
        file.write_text(f"#EXTM3U\n#EXTINF:1,\n{secret}\n#EXT-X-ENDLIST\n")
    elif made == "concat":
        file.write_text(f"ffconcat version 1.0\nfile {secret}\n")
    else:
        Image.new("RGB", (8, 8)).save(file, made)
    with pytest.raises(MediaError):
        read_media(file, 4, 1 << 20)


def test_a_tiff_with_a_page_without_a_size_is_a_broken_picture(tmp_path: Path) -> None:
    file = tmp_path / "a.tif"
    Image.new("L", (8, 6)).save(file)
    content = bytearray(file.read_bytes())
    first = int.from_bytes(content[4:8], "little")
    after = first + 2 + 12 * int.from_bytes(content[first : first + 2], "little")
    content[after : after + 4] = len(content).to_bytes(4, "little")  # where the next page begins
    file.write_bytes(bytes(content) + bytes(6))
    with pytest.raises(MediaError, match="cannot be read"):
        read_media(file, 4, 1 << 20)
    with pytest.raises(ValueError, match="is broken"):
        read_picture(file, ("TIFF",), 1 << 20)


def test_an_animation_is_read_frame_by_frame(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 6), (value, 0, 0)) for value in (0, 128, 255)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    media = read_media(tmp_path / "a.gif", 2, 1 << 20)
    assert media.shape == (2, 3, 6, 8)
    assert abs(float(media[1, 0].mean()) - 0.5) < 0.02
    with pytest.raises(MediaError, match="pixels or more"):
        read_media(tmp_path / "a.gif", 3, 100)


def array(shape: tuple[int, ...], dtype: str) -> bytes:
    """An .npy file that promises an array, and holds none of it."""
    content = io.BytesIO()
    np.lib.format.write_array_header_2_0(
        content, {"descr": dtype, "fortran_order": False, "shape": shape}
    )
    return content.getvalue()


PROMISES = {
    "media": array((1 << 20, 3, 1024, 1024), "|u1"),
    "prompts": array((1 << 30,), "<U100000"),
    "many scores": array((1 << 40,), "<f4"),
    "negative": array((-1, 3, 4, 4), "|u1"),
    "objects": array((4,), "|O"),
    "no array": b"x" * 100,
    "empty": b"",
}


# An entry is written twice on purpose: readers take the last one, which promises too much.
@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
@pytest.mark.parametrize("name", PROMISES)
def test_samples_are_as_large_as_their_headers_say_before_any_is_read(
    tmp_path: Path, name: str
) -> None:
    file = tmp_path / "eval-4.npz"
    with zipfile.ZipFile(file, "w") as archive:
        for each, content in (
            ("media", array((2, 3, 4, 4), "|u1")),
            ("prompts", array((2,), "<U4")),
        ):
            archive.writestr(f"{each}.npy", content)
        archive.writestr(f"{name}.npy", PROMISES[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError):  # noqa: PT011  # each says another thing
        read_samples(file)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


def test_a_short_file_of_zeros_is_no_gibibyte(tmp_path: Path) -> None:
    file = tmp_path / "eval-4.npz"
    with (
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("media.npy", "w", force_zip64=True) as media,
    ):
        media.write(array((1 << 9, 3, 512, 512), "|u1"))
        for _ in range(384):
            media.write(bytes(1 << 20))
    with pytest.raises(ValueError, match=r"arrays take 402653184 bytes, of \d{6} in the file"):
        read_samples(file)


def test_a_header_is_as_short_as_numpy_writes_it(tmp_path: Path) -> None:
    file, length = tmp_path / "eval-4.npz", 256 << 20
    with (
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("media.npy", "w", force_zip64=True) as media,
    ):
        media.write(b"\x93NUMPY\x02\x00" + length.to_bytes(4, "little"))
        for _ in range(256):
            media.write(b" " * (1 << 20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="header"):
        read_samples(file)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def test_samples_as_they_are_written_are_read(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1)
    for file in (run / "samples").glob("eval-*.npz"):
        samples = read_samples(file)
        assert samples.scores


ALIASES = (
    "a: &x [1]\nb: *x\n",
    "a: &x {k: 1}\nb: {<<: *x}\n",
    "seed: &s 3\nmax_rl_steps: *s\n",
    "a: &a ["
    + ",".join(["x"] * 9)
    + "]\n"
    + "".join(
        f"{chr(98 + k)}: &{chr(98 + k)} [{','.join(['*' + chr(97 + k)] * 9)}]\n" for k in range(9)
    ),
)


@pytest.mark.heavy
@pytest.mark.parametrize("text", ALIASES, ids=range(len(ALIASES)))
def test_an_alias_in_a_stored_configuration_is_refused(tmp_path: Path, text: str) -> None:
    run = config.prepare_run_dir(config.load([f"hydra.run.dir={tmp_path}/run-0"]))
    (run / "config.yaml").write_text((run / "config.yaml").read_text() + text)
    for load in (lambda: config.load([f"resume={run}"]), lambda: config.load([], stored=run)):
        with pytest.raises(config.ConfigError, match="has an alias"):
            load()
    assert any("has an alias" in warning for warning in read_run(run).warnings)
    with pytest.raises(yaml.YAMLError, match="has an alias"):
        to_continue(run)


@pytest.mark.parametrize(
    "content",
    [
        b"a: 1\n" * 900_000,
        b"[" * 5000 + b"]" * 5000,
        b"- 1\n" * 500_000,
        b"\xff\xfe",
        b"a: !!python/object/apply:os.system [true]",
    ],
    ids=["long", "deep", "many", "no text", "an object"],
)
def test_yaml_has_bounds(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(content)
    with pytest.raises((ValueError, yaml.YAMLError)):
        read_plain(file)
    file.write_bytes(b"[" * 100 + b"]" * 100)
    read_plain(file)
    file.write_bytes(b"[" * 101 + b"]" * 101)
    with pytest.raises(yaml.YAMLError, match="100 levels"):
        read_plain(file)
    file.unlink()
    file.symlink_to("/etc/hostname")
    with pytest.raises(OSError, match="symbolic"):
        checked_text(file)


def test_samples_whose_bytes_were_changed_are_damaged_or_read(tmp_path: Path) -> None:
    file, chance = tmp_path / "eval-3.npz", np.random.default_rng(1)
    media = chance.integers(0, 255, (2, 3, 4, 4), dtype=np.uint8)
    np.savez_compressed(file, media=media, prompts=np.array(["a", "b"]), r=np.zeros(2))
    whole, refused = file.read_bytes(), 0
    for _ in range(600):
        changed = np.frombuffer(whole, dtype=np.uint8).copy()
        changed[chance.integers(0, len(whole), 2)] = chance.choice([0, 128, 255])
        file.write_bytes(changed.tobytes())
        try:
            read_samples(file)
        except ValueError:
            refused += 1
    assert refused > 100
