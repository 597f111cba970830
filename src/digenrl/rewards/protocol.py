"""Protocol of scorers, and the checks that keep a wrong score from becoming a gradient.

A *scorer* is any callable `scorer(media, prompts) -> scores`:

- `media`: fp32 in [0, 1] on any device. Images are [B, C, H, W], videos [B, F, C, H, W]. C is 3
  (RGB) or 1 (grey).
- `prompts`: B `Prompt`s. Row i of `media` was made from prompt i. `target` and `metadata` are
  passed on unchanged.
- `scores`: [B] floating point on any device. Each is finite, or NaN for a sample without a score;
  larger is better. Infinity counts as NaN, because no advantage can be made of it.

A scorer of sound sets `hears = True` and is called as `scorer(media, prompts, sound)`, with the
`Sound` of the same samples.

A scorer owns its device and dtype, and never returns 0 in place of a failure. Two attributes name
it (see `identity_of`): `model_id` names the model, and `weights_digest` is the hex digest of its
weights ("none" without weights).

Two methods are optional. The static `check_prompts(prompts)` raises ValueError for a prompt that it
could never score. `close()` ends processes and connections. A scorer that looks at the images of
prompts sets `reads_images = True`. Then a service gets the images, and `source_images` returns them
in the size of the media.

A scorer that waits for people sets `asks_people = True` and has `join_run(run_dir, tick)`.
`RewardSuite` calls that method before the first batch, and the scorer calls `tick` while it waits.
Missing scores are not asked for again, and an evaluation leaves such a reward out.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar, Protocol, cast, runtime_checkable

import numpy as np
import torch
from pydantic import ConfigDict, Field
from torch import Tensor
from torch.nn import functional

from digenrl import accelerator
from digenrl.images import ImageError, PromptImage
from digenrl.types import Prompt, Sound

MISSING_IMAGE = "name a file in the field {role} of its line, in a .jsonl prompt file."


class RewardError(RuntimeError):
    """A reward cannot be trusted (wrong shape, changed identity), so the run must stop."""


class RewardUnavailable(RewardError):
    """A scorer could not answer this time (down, slow, refused). Its samples are missing (NaN) and
    counted."""

    def __init__(self, cause: str, scores: Tensor | None = None) -> None:
        """Store `scores` [B], which holds the scores that exist and NaN elsewhere; None = no
        scores."""
        super().__init__(cause)
        self.scores = scores


@runtime_checkable
class Scorer(Protocol):
    """Scorer of media; see the module's docstring."""

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Return scores [B] of `media` [B, ...]; NaN = missing."""
        ...


class HearingScorer(Protocol):
    """Scorer of media and their sound, with the attribute `hears` set."""

    def __call__(self, media: Tensor, prompts: Sequence[Prompt], sound: Sound) -> Tensor:
        """Return scores [B] of `media` [B, ...] with `sound`; NaN = missing."""
        ...


@dataclass(frozen=True)
class Identity:
    """Identity of a scorer. Services and scorer processes must keep theirs; all are recorded.
    Lengths are checked only in a service's messages."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")
    model_id: Annotated[str, Field(min_length=1, max_length=1024)]
    """Name of the model and of the settings that change its scores."""
    weights_digest: Annotated[str, Field(min_length=1, max_length=256)]
    """Hex digest of the weights; "none" for a scorer without any."""


def identity_of(scorer: Scorer) -> Identity:
    """Return the identity that `scorer` declares, or its class name if it declares none."""
    model_id = getattr(scorer, "model_id", None) or type(scorer).__qualname__
    return Identity(str(model_id), str(getattr(scorer, "weights_digest", None) or "none"))


def check_media(media: Tensor, prompts: Sequence[Prompt]) -> None:
    """Raise ValueError unless `media` is [B, C, H, W] or [B, F, C, H, W] floating in [0, 1] with B
    = len(prompts)."""
    if media.dim() not in (4, 5) or media.shape[-3] not in (1, 3) or 0 in media.shape:
        raise ValueError(
            f"media has shape {list(media.shape)}: "
            "a scorer takes images [B, C, H, W] or videos [B, F, C, H, W] with C of 1 or 3."
        )
    if media.shape[0] != len(prompts):
        raise ValueError(
            f"{media.shape[0]} samples but {len(prompts)} prompts: pass one prompt per sample."
        )
    if not media.is_floating_point():
        raise ValueError(
            f"media has dtype {media.dtype}: pass floating point in [0, 1] (divide uint8 by 255)."
        )
    low, high = media.aminmax()
    if not (low >= -1e-3 and high <= 1 + 1e-3):
        raise ValueError(
            f"media spans [{low:.4g}, {high:.4g}]: a scorer takes [0, 1]; decode() must clamp, NaN "
            "is a fault."
        )


def call_scorer(
    scorer: Scorer, media: Tensor, prompts: Sequence[Prompt], sound: Sound | None
) -> Tensor:
    """Return what a scorer answers. Only one that `hears` is given the sound.

    Raises ValueError if it hears and there is no sound, or none of [B, channels, samples] finite
    numbers.
    """
    if not getattr(scorer, "hears", False):
        return scorer(media, prompts)
    if sound is None:
        raise ValueError(
            f"{type(scorer).__name__} scores sound, and these samples have none: take a model with "
            "sound (docs/models_and_rewards.md), or another reward."
        )
    waveform = sound.waveform
    if waveform.dim() != 3 or len(waveform) != len(prompts) or not waveform.isfinite().all():
        raise ValueError(
            f"sound has shape {list(waveform.shape)} for {len(prompts)} prompts: a scorer takes "
            "[B, channels, samples] of finite numbers; NaN is a fault."
        )
    return cast(HearingScorer, scorer)(media, prompts, sound)


def check_scores(name: str, scores: object, samples: int) -> Tensor:
    """Return `scores` as [samples] fp32 on the CPU, with NaN where a score is not finite.

    Raises RewardError if they are not a floating tensor of exactly that shape.

    Example:
        >>> check_scores("ocr", torch.tensor([0.5, float("inf")]), samples=2).tolist()
        [0.5, nan]
    """
    if (
        not isinstance(scores, Tensor)
        or not scores.is_floating_point()
        or tuple(scores.shape) != (samples,)
    ):
        got = (
            f"{scores.dtype} {list(scores.shape)}"
            if isinstance(scores, Tensor)
            else type(scores).__name__
        )
        raise RewardError(
            f"Reward `{name}` returned {got}: a scorer returns a floating tensor [{samples}], one "
            "score a sample."
        )
    scores = scores.detach().to("cpu", torch.float32)
    return scores.masked_fill(scores.isinf(), torch.nan)


@contextmanager
def contain_exits(name: str) -> Iterator[None]:
    """Turn an exception that ends a thread or process (SystemExit, KeyboardInterrupt,
    CancelledError) into RewardError.

    Otherwise the end of a scorer's thread would go unnoticed. A user's Ctrl-C passes.

    Args:
        name: name of the scorer.

    Raises:
        RewardError: in place of a `BaseException` that is no `Exception`.
    """
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        in_main = threading.current_thread() is threading.main_thread()
        if isinstance(error, KeyboardInterrupt) and in_main and interruptible:
            raise
        said = f": {error}" if str(error) else ""
        raise RewardError(
            f"Scorer `{name}` raised {type(error).__name__}{said}, which would end its process: a "
            "scorer reports a failure by an Exception, and a missing score by RewardUnavailable."
        ) from error


def as_frames(media: Tensor) -> Tensor:
    """Return images (F = 1) or videos as a view [B, F, C, H, W]."""
    return media.unsqueeze(1) if media.dim() == 4 else media


def as_rgb(media: Tensor) -> Tensor:
    """Return `media` with three channels. Grey is repeated, RGB passes."""
    shape = list(media.shape)
    shape[-3] = 3
    return media.expand(shape)


def source_images(media: Tensor, prompts: Sequence[Prompt], role: str = "image") -> Tensor:
    """Return each prompt's first image of `role`, fitted to the size of `media`: [B, 3, H, W] fp32
    in [0, 1] on the CPU.

    Raises RewardError for a prompt without one, or whose file has changed.
    """
    pictures = []
    for prompt in prompts:
        found = [image for image in prompt.images if image.role == role]
        if not found:
            raise RewardError(
                f"'{prompt.text[:60]}' has no {role}: {MISSING_IMAGE.format(role=role)}"
            )
        pictures.append(_fitted_picture(found[0], media.shape[-2], media.shape[-1]))
    return torch.stack(pictures)


def require_images(prompts: Sequence[Prompt], *roles: str) -> None:
    """Raise ValueError for a prompt that lacks an image of one of `roles`. For use in
    `check_prompts`."""
    for prompt in prompts:
        for role in roles:
            if all(image.role != role for image in prompt.images):
                raise ValueError(f"it has no {role}; {MISSING_IMAGE.format(role=role)}")


@lru_cache(maxsize=64)
def _fitted_picture(image: PromptImage, height: int, width: int) -> Tensor:
    try:
        picture = np.asarray(image.fit_to_size(height, width), dtype=np.float32)
    except ImageError as error:
        raise RewardError(str(error)) from error
    return torch.from_numpy(picture / 255.0).movedim(-1, 0)


def luma(media: Tensor) -> Tensor:
    """Return the brightness (ITU-R BT.601) of images or videos, [B, F, H, W]."""
    frames = as_rgb(as_frames(media)).float()
    return (frames * frames.new_tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(2)


def laplacian(frames: Tensor) -> Tensor:
    """Return the 3x3 Laplacian of `frames` [B, F, H, W], borders replicated, in the same shape."""
    kernel = frames.new_tensor([[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]]).view(
        1, 1, 3, 3
    )
    padded = functional.pad(frames.flatten(0, 1).unsqueeze(1), (1, 1, 1, 1), mode="replicate")
    return functional.conv2d(padded, kernel).squeeze(1).unflatten(0, frames.shape[:2])


def sample_frames(media: Tensor, count: int) -> Tensor:
    """Return evenly spaced frames [B, min(F, count), C, H, W], each the middle of its share of the
    video.

    Example:
        >>> video = torch.arange(8.0).reshape(1, 8, 1, 1, 1)  # [B, F, C, H, W]
        >>> sample_frames(video, count=2).flatten()
        tensor([2., 6.])
    """
    frames = as_frames(media)
    total = frames.shape[1]
    if total <= count:
        return frames
    index = [(2 * i + 1) * total // (2 * count) for i in range(count)]
    return frames[:, index]


def rgb_bytes(media: Tensor, count: int) -> Tensor:
    """Return `sample_frames` of `media` as pictures [B, min(F, count), 3, H, W], uint8 on the
    CPU."""
    return as_rgb(sample_frames(media, count)).clamp(0, 1).mul(255).round().to("cpu", torch.uint8)


def resolve_device(device: str) -> torch.device:
    """Return the device: for `auto` the current accelerator, or the CPU without one; anything else
    as torch reads it.

    An accelerator always has an index: a scorer is called in another thread than the one that built
    it, and in that thread device 0 is current.
    """
    resolved = torch.device(accelerator.device_kind() if device == "auto" else device)
    unnumbered = accelerator.is_own(resolved) and resolved.index is None
    return accelerator.current_device() if unnumbered else resolved


def build_scorer(node: Mapping[str, object]) -> Scorer:
    """Build the scorer that a YAML node describes. Raises Hydra's errors, and ValueError if the
    result is not callable."""
    from hydra.utils import instantiate

    scorer = instantiate(plain_node(node), _convert_="all")
    if not callable(scorer):
        raise ValueError(
            f"`{node['_target_']}` builds {type(scorer).__name__}, which cannot be called: a "
            "scorer is callable."
        )
    return scorer


def plain_node(node: Mapping[str, object]) -> dict[str, object]:
    """Return `node` as plain containers with interpolations resolved (an OmegaConf node, or a dict
    as it is)."""
    from omegaconf import DictConfig, OmegaConf

    if isinstance(node, DictConfig):
        return OmegaConf.to_container(node, resolve=True)  # type: ignore[return-value]
    return dict(node)
