"""What people look at of an evaluation: pictures and videos with prompt and score, encoded for a
page or a logger.

The report and the loggers choose and draw with the same functions. No torch.

Media are uint8 [C, H, W], a video [F, C, H, W], with C 1 or 3.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from digenrl.report.media import Track, encode_mp4

STRIP_FRAMES = 5
"""Frames of a video where only a picture can be shown."""
SMALLEST, LARGEST = 96, 320
"""Pixels of a tile's longer side: smaller pictures are enlarged with hard edges, larger ones
reduced."""
WIDEST = 4096
"""Most pixels of a side of a picture that was enlarged: one of a single row would fill the
memory."""
_INK, _FAINT = (32, 36, 43), (102, 112, 128)


@dataclass(frozen=True)
class Tile:
    """One sample of a gallery."""

    media: NDArray[np.uint8]
    """[C, H, W], or [F, C, H, W]."""
    prompt: str
    """Whole."""
    score: float
    """The weighted sum of the optimised rewards; NaN: missing."""
    source: NDArray[np.uint8] | None = None
    """[3, H, W]: the image that it was made from, shown at its left; None: the prompt names
    none."""
    sound: Track | None = None
    """Sound of a video; None: it was not kept."""

    @property
    def is_video(self) -> bool:
        """Whether the media has a frame axis."""
        return self.media.ndim == 4


def total_scores(
    scores: Mapping[str, NDArray[np.float32]], weights: Mapping[str, float], count: int
) -> NDArray[np.float64]:
    """Return [count] fp64: each sample's weighted sum of the optimised rewards, NaN where a reward
    is missing. Without an optimised reward the first score counts."""
    chosen = {name: weight for name, weight in weights.items() if name in scores}
    chosen = chosen or dict.fromkeys(list(scores)[:1], 1.0)
    if not chosen:
        return np.full(count, np.nan)
    return sum(
        (weight * scores[name].astype(np.float64) for name, weight in chosen.items()),
        np.zeros(count),
    )


def make_tiles(
    media: NDArray[np.uint8],
    prompts: Sequence[str],
    score: NDArray[np.float64],
    rows: Sequence[int],
    sources: Sequence[NDArray[np.uint8]] | NDArray[np.uint8] | None = None,
    sound: Track | None = None,
) -> tuple[Tile, ...]:
    """Return the samples `rows` of media [N, ...], prompts [N], score [N] and, if prompts name
    images, sources [N], with the sound of the N samples if it was kept."""
    return tuple(
        Tile(
            media[row],
            prompts[row],
            float(score[row]),
            None if sources is None else sources[row],
            None if sound is None else sound.of_row(row),
        )
        for row in rows
    )


def by_prompt(prompts: Sequence[str]) -> dict[str, list[int]]:
    """Prompt -> its rows, in the order of their first sample."""
    rows: dict[str, list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows.setdefault(prompt, []).append(row)
    return rows


def extreme_rows(score: NDArray[np.float64], count: int) -> tuple[list[int], list[int]]:
    """Rows of the `count` best and worst of score [N], the extreme first; none is in both, missing
    ones in neither."""
    order = [int(row) for row in np.argsort(-score, kind="stable") if not math.isnan(score[row])]
    count = min(count, len(order) // 2)
    return order[:count], order[::-1][:count]


def still_image(media: NDArray[np.uint8], source: NDArray[np.uint8] | None = None) -> Image.Image:
    """Return a picture of reasonable size, with its source at the left. A video becomes a strip of
    its frames."""
    media = film_strip(media) if media.ndim == 4 else media
    longer = max(media.shape[1:]) if media.shape[2] <= 2 * media.shape[1] else media.shape[1]
    image = Image.fromarray(_join_source(source, to_pixels(media)))
    times = min(math.ceil(SMALLEST / longer), WIDEST // max(image.size))
    if times > 1:
        return image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST)
    factor = min(1.0, LARGEST / longer)
    return image.resize((max(1, round(image.width * factor)), max(1, round(image.height * factor))))


def film_strip(video: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Some frames of a video [F, C, H, W], one beside the other: [C, H, n*W]."""
    last = len(video) - 1
    shown = np.linspace(0, last, min(STRIP_FRAMES, last + 1)).round().astype(int)
    return np.concatenate([video[frame] for frame in shown], axis=2)


def to_pixels(media: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return pixels [..., H, W, 3] of media [..., C, H, W]."""
    array = np.moveaxis(media, -3, -1)
    return np.ascontiguousarray(array if array.shape[-1] == 3 else np.repeat(array, 3, axis=-1))


def _join_source(source: NDArray[np.uint8] | None, shown: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Prepend the source [3, H, W] to every frame of [..., H, W, 3]. Return the frames unchanged if
    there is no source."""
    if source is None:
        return shown
    left = to_pixels(source)
    return np.concatenate([np.broadcast_to(left, (*shown.shape[:-3], *left.shape)), shown], axis=-2)


def encode_image(image: Image.Image) -> tuple[str, bytes]:
    """Return (MIME type, bytes) of a picture. A small or flat picture is a PNG, others are
    JPEGs."""
    png, jpeg = io.BytesIO(), io.BytesIO()
    image.save(png, "PNG", optimize=True)
    if png.tell() <= 32 << 10:
        return "image/png", png.getvalue()
    image.save(jpeg, "JPEG", quality=88)
    return "image/jpeg", jpeg.getvalue()


def encode_video(tile: Tile) -> bytes:
    """Return a video as H.264 MP4, with its sound and with its source at the left. Raises
    ImportError without imageio."""
    return encode_mp4(_join_source(tile.source, to_pixels(tile.media)), sound=tile.sound)


def score_caption(tile: Tile) -> str:
    """Return the score of a tile as the text below its picture."""
    return (
        "no score"
        if math.isnan(tile.score)
        else f"{tile.score:.3f}"
        if abs(tile.score) < 100
        else f"{tile.score:.4g}"
    )


def draw_sheet(shown: Sequence[Tile]) -> Image.Image:
    """Tiles beside each other, score below each, the prompt above: once, where all have the
    same."""
    stills = [still_image(tile.media, tile.source) for tile in shown]
    gap, line, font = 8, 16, ImageFont.load_default(12)
    width = max(sum(image.width + gap for image in stills) - gap, 240)
    common = len({tile.prompt for tile in shown}) == 1
    head = textwrap.wrap(shown[0].prompt, max(12, width // 6)) if common else []
    notes = [
        [
            score_caption(tile),
            *([] if common else textwrap.wrap(tile.prompt, max(12, image.width // 6))),
        ]
        for tile, image in zip(shown, stills, strict=True)
    ]
    top, tallest = line * len(head), max(image.height for image in stills)
    canvas = Image.new("RGB", (width, top + tallest + line * max(map(len, notes)) + 4), "white")
    pen, x = ImageDraw.Draw(canvas), 0
    for row, text in enumerate(head):
        pen.text((0, row * line), text, fill=_INK, font=font)
    for image, note in zip(stills, notes, strict=True):
        canvas.paste(image, (x, top))
        for row, text in enumerate(note):
            pen.text(
                (x, top + tallest + 2 + row * line), text, fill=_FAINT if row else _INK, font=font
            )
        x += image.width + gap
    return canvas
