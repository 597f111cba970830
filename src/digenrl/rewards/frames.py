"""Wire format of requests for scores and their answers: strict JSON and raw tensor bytes, never
pickle.

A *frame* is `MAGIC | json bytes (u32) | payload bytes (u64) | json | payload`, integers big-endian.
A request's payload is the media as contiguous bytes. Their number follows from shape and dtype, so
nothing is ever decompressed. For a scorer that needs them, the sound of the samples and the files
of the prompts' images follow, each once and with declared length. A response is only the JSON of
`ScoreResponse`.

Every model is strict. An unknown field, `true` or "0.5" for a number, NaN, infinity and null are
refused. Each score names its sample.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    JsonValue,
    ValidationError,
    model_validator,
)
from torch import Tensor

from digenrl.images import ROLES, ImageError, ImageLimits, PromptImage, check_image, digest_of
from digenrl.rewards.protocol import Identity
from digenrl.types import Prompt, Sound

MAGIC = b"dgr1"
HEADER = struct.Struct(">4sIQ")
MAX_JSON_BYTES = 4 << 20
WIRE_DTYPES: dict[str, torch.dtype] = {
    "uint8": torch.uint8,
    "float16": torch.float16,
    "float32": torch.float32,
}
DtypeName = Literal["uint8", "float16", "float32"]
_Model = TypeVar("_Model", bound=BaseModel)
_Protocol = Annotated[int, Field(ge=1, le=1)]
_Positive = Annotated[int, Field(ge=1, le=1 << 20)]


class FrameError(ValueError):
    """The bytes are not in the format of this module."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class MediaHeader(_Strict):
    """Shape [B, C, H, W] or [B, F, C, H, W] and dtype of the payload; uint8 means 0..255 for [0,
    1]."""

    shape: list[_Positive] = Field(min_length=4, max_length=5)
    dtype: DtypeName

    @property
    def payload_bytes(self) -> int:
        """Number of bytes that the payload must have."""
        return math.prod(self.shape) * WIRE_DTYPES[self.dtype].itemsize


class WireSound(_Strict):
    """Shape [B, channels, samples] and rate (Hz) of the fp32 sound after the media."""

    shape: list[Annotated[int, Field(ge=1, le=1 << 28)]] = Field(min_length=3, max_length=3)
    rate: _Positive

    @property
    def payload_bytes(self) -> int:
        """Number of bytes that the sound has."""
        return math.prod(self.shape) * torch.float32.itemsize


class WireImage(_Strict):
    """File after media and sound."""

    digest: str = Field(max_length=64)
    size: Annotated[int, Field(ge=1)]
    """Bytes."""


class WireRole(_Strict):
    """Role of an image in a prompt."""

    role: str = Field(max_length=32)
    digest: str = Field(max_length=64)


class WirePrompt(_Strict):
    """Fields of a `Prompt`."""

    text: str
    negative: str | None
    target: str | None
    metadata: dict[str, JsonValue]
    images: list[WireRole] = []


class ScoreRequest(_Strict):
    """Request for scores, from the client to the service."""

    protocol: _Protocol
    request_id: str = Field(min_length=1, max_length=64)
    media: MediaHeader
    ids: list[Annotated[str, Field(max_length=64)]]
    """Unique name of each sample; the answer repeats them in order."""
    prompts: list[WirePrompt]
    sound: WireSound | None = None
    images: list[WireImage] = []
    """Images in the order of the payload."""

    @property
    def images_begin(self) -> int:
        """Bytes of the payload before the first image."""
        return self.media.payload_bytes + (self.sound.payload_bytes if self.sound else 0)

    @property
    def payload_bytes(self) -> int:
        """Number of bytes that the payload must have."""
        return self.images_begin + sum(image.size for image in self.images)

    @model_validator(mode="after")
    def _rows_agree(self) -> ScoreRequest:
        rows = self.media.shape[0]
        if not rows == len(self.ids) == len(self.prompts) or len(set(self.ids)) != rows:
            raise ValueError(
                f"{rows} samples, {len(self.ids)} ids, {len(self.prompts)} prompts: need one "
                "unique id each"
            )
        if self.sound is not None and self.sound.shape[0] != rows:
            raise ValueError(f"{rows} samples, sound of {self.sound.shape[0]}")
        return self


class ScoreItem(_Strict):
    """Answer for one sample: either a finite score, or the reason why there is none."""

    id: str
    score: FiniteFloat | None = None
    missing: str | None = Field(default=None, min_length=1, max_length=1024)

    @model_validator(mode="after")
    def _one_of_both(self) -> ScoreItem:
        if (self.score is None) == (self.missing is None):
            raise ValueError("give `score` or `missing`, not both and not neither")
        return self


class ScoreResponse(_Strict):
    """Scores, from the service to the client, which also compares ids, order and identity."""

    protocol: _Protocol
    request_id: str
    identity: Identity
    scores: list[ScoreItem]


class WireLimits(_Strict):
    """Limits of one request to a service. The client cuts its batches accordingly."""

    max_body_bytes: Annotated[int, Field(ge=1)]
    max_samples: _Positive
    max_pixels: Annotated[int, Field(ge=1)]
    """Most pixels (F x H x W) of one sample."""


class ServiceDescription(_Strict):
    """Answer of GET /identity."""

    protocol: _Protocol
    identity: Identity
    limits: WireLimits
    images: bool = False
    """Whether the scorer needs the images of prompts. Otherwise the client sends none."""


def encode_frame(document: str, payload: bytes = b"") -> bytes:
    """Return one frame."""
    raw = document.encode()
    return HEADER.pack(MAGIC, len(raw), len(payload)) + raw + payload


def parse_header(raw: bytes) -> tuple[int, int]:
    """Return (json bytes, payload bytes) of a frame's first `HEADER.size` bytes. Raises
    WireError."""
    magic, json_bytes, payload_bytes = HEADER.unpack(raw)
    if magic != MAGIC:
        raise FrameError(f"A frame begins with {MAGIC!r}, these bytes with {magic!r}.")
    if json_bytes > MAX_JSON_BYTES:
        raise FrameError(
            f"The frame declares {json_bytes} bytes of JSON; at most {MAX_JSON_BYTES} are read."
        )
    return json_bytes, payload_bytes


def encode_request(
    media: Tensor,
    prompts: Sequence[Prompt],
    request_id: str,
    dtype: DtypeName = "float32",
    images: bool = False,
    sound: Sound | None = None,
) -> bytes:
    """Return the frame that asks for scores of `media` [B, ...] in [0, 1] with their `sound`; with
    `images`, it carries those of the prompts.

    Raises WireError if a prompt's metadata is no JSON, and ImageError for an image that changed
    since it was read.
    """
    if dtype == "uint8":
        media = media.clamp(0, 1).mul(255).round()
    tensor = media.detach().to("cpu", WIRE_DTYPES[dtype]).contiguous()
    sent = {image.digest: image for prompt in prompts for image in prompt.images} if images else {}
    files = {digest: image.read_content() for digest, image in sent.items()}
    document = {
        "protocol": 1,
        "request_id": request_id,
        "media": {"shape": list(tensor.shape), "dtype": dtype},
        "ids": [f"{request_id[:8]}-{row}" for row in range(len(prompts))],
        "prompts": [
            {
                "text": p.text,
                "negative": p.negative,
                "target": p.target,
                "metadata": dict(p.metadata),
            }
            | (
                {"images": [{"role": image.role, "digest": image.digest} for image in p.images]}
                if sent
                else {}
            )
            for p in prompts
        ],
    }
    if sent:  # a service from before there were images knows no such field
        document["images"] = [
            {"digest": digest, "size": len(content)} for digest, content in files.items()
        ]
    heard = b""
    if sound is not None:
        waveform = sound.waveform.detach().to("cpu", torch.float32).contiguous()
        document["sound"] = {"shape": list(waveform.shape), "rate": sound.rate}
        heard = waveform.numpy().tobytes()
    try:
        text = json.dumps(document, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise FrameError(
            f"Prompt metadata must be JSON (finite numbers, strings, lists, objects): {error}"
        ) from error
    return encode_frame(text, tensor.numpy().tobytes() + heard + b"".join(files.values()))


def decode_request(document: bytes, payload_bytes: int) -> ScoreRequest:
    """Return the request of a frame's JSON, checked against the length of its payload. Raises
    WireError."""
    request = _validate_document(ScoreRequest, document)
    if request.payload_bytes != payload_bytes:
        raise FrameError(
            f"Media {request.media.shape} {request.media.dtype}, sound and {len(request.images)} "
            f"images have {request.payload_bytes} bytes, the frame carries {payload_bytes}."
        )
    return request


def decode_media(header: MediaHeader, payload: bytearray) -> Tensor:
    """Return the media, fp32 in [0, 1], from the beginning of a payload. They share its memory if
    the dtype allows."""
    array = np.frombuffer(payload, dtype=np.dtype(header.dtype), count=math.prod(header.shape))
    media = torch.from_numpy(array).reshape(header.shape)
    return media.float().div(255) if header.dtype == "uint8" else media.float()


def decode_sound(request: ScoreRequest, payload: bytes | bytearray) -> Sound | None:
    """Return the sound in a request's payload; None where it has none."""
    if (asked := request.sound) is None:
        return None
    begin, count = request.media.payload_bytes, math.prod(asked.shape)
    # A copy: the media's bytes before it may end where no number may begin.
    part = bytes(payload[begin : begin + asked.payload_bytes])
    waveform = np.frombuffer(part, dtype=np.float32, count=count).reshape(asked.shape)
    return Sound(torch.from_numpy(waveform.copy()), asked.rate)


def decode_prompts(
    request: ScoreRequest, payload: bytes | bytearray = b"", max_pixels: int = 1 << 26
) -> list[Prompt]:
    """Return the request's prompts, with the images at the end of its payload.

    Raises WireError for an image that is broken, has more than `max_pixels`, or was not sent.
    """
    found: dict[str, bytes] = {}
    start = request.images_begin
    for image in request.images:
        found[image.digest] = bytes(payload[start : start + image.size])
        start += image.size

    @cache
    def image_of(role: str, digest: str) -> PromptImage:
        if role not in ROLES or digest not in found:
            raise FrameError(
                f"No image {digest!r} of role {role!r} came with the request; roles: "
                f"{', '.join(ROLES)}."
            )
        try:
            content = found[digest]
            if digest_of(content) != digest:
                raise ImageError(f"image {digest[:64]} is not what its digest says.")
            check_image(content, ImageLimits(max_pixels=max_pixels))
            return PromptImage(role, digest, len(content), data=content)
        except ImageError as error:
            raise FrameError(f"The image {digest!r} {error}") from error

    return [
        Prompt(
            p.text,
            p.negative,
            p.target,
            p.metadata,
            tuple(image_of(each.role, each.digest) for each in p.images),
        )
        for p in request.prompts
    ]


def encode_response(request: ScoreRequest, scores: Tensor, identity: Identity) -> str:
    """Return the JSON that answers `request` with `scores` [B]; NaN becomes `missing`."""
    items: list[dict[str, Any]] = [
        {"id": id_, "missing": "the scorer gave no score"}
        if math.isnan(score)
        else {"id": id_, "score": score}
        for id_, score in zip(request.ids, scores.tolist(), strict=True)
    ]
    document = {
        "protocol": 1,
        "request_id": request.request_id,
        "identity": vars(identity),
        "scores": items,
    }
    return json.dumps(document, allow_nan=False)


def decode_response(document: bytes, request_id: str, samples: int) -> tuple[Tensor, Identity]:
    """Return (scores [samples] fp32 with NaN = missing, identity) of a response to request
    `request_id`.

    Raises WireError unless it is exactly that: same request, every id, in order, finite fp32
    numbers.
    """
    response = _validate_document(ScoreResponse, document)
    if response.request_id != request_id:
        raise FrameError(
            f"The response answers request {response.request_id!r}, asked was {request_id!r}."
        )
    expected = [f"{request_id[:8]}-{row}" for row in range(samples)]
    got = [item.id for item in response.scores]
    if got != expected:
        raise FrameError(
            f"{len(got)} scores for ids {got[:4]}..., expected {samples} for {expected[:4]}..., in "
            "this order."
        )
    scores = torch.tensor(
        [math.nan if item.score is None else item.score for item in response.scores]
    )
    if torch.isinf(scores).any():
        raise FrameError("A score exceeds the range of fp32.")
    return scores, response.identity


def decode_description(document: bytes) -> ServiceDescription:
    """Return the answer of GET /identity. Raises WireError."""
    return _validate_document(ServiceDescription, document)


def _validate_document(model: type[_Model], document: bytes) -> _Model:
    try:
        return model.model_validate_json(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "document"
        raise FrameError(f"Not a {model.__name__}: {where}: {first['msg']}.") from error
