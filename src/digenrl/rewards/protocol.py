"""What a scorer is, and the checks that keep a wrong score from becoming a gradient.

A *scorer* is any callable `scorer(media, prompts) -> scores`:

- `media`: fp32 in [0, 1]; images [B, C, H, W], videos [B, F, C, H, W]; C is 3 (RGB) or 1 (grey). Any device.
- `prompts`: B `Prompt`s, row i of `media` was made from prompt i; `target` and `metadata` travel untouched.
- `scores`: [B] floating point on any device, each finite, or NaN for a sample without a score; larger is better.
  Infinity counts as NaN: no advantage can be made of it.

A scorer owns its device and dtype, and never returns 0 in place of a failure. Two attributes name it: `model_id` (what
is scored with) and `weights_digest` (hex digest of its weights, "none" where it has none); see `identity_of`.
Two methods are optional: `check_prompts(prompts)`, static, raises ValueError for a prompt that it could never score;
`close()` ends processes and connections. A scorer that looks at the images of prompts says `reads_images = True`: then
a service is sent them, and `source_images` gives them in the size of the media.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from pydantic import ConfigDict, Field
from torch import Tensor
from torch.nn import functional

from digenrl.images import ImageError, PromptImage
from digenrl.types import Prompt

MISSING_IMAGE = "name a file in the field {role} of its line, in a .jsonl prompt file."


class RewardError(RuntimeError):
    """A reward cannot be trusted (wrong shape, changed identity, repeated nonsense): the run must stop."""


class RewardUnavailable(RewardError):
    """A scorer could not answer this time (down, slow, refused): its samples are missing (NaN), and counted."""

    def __init__(self, cause: str, scores: Tensor | None = None) -> None:
        """`scores` [B]: what could be scored all the same, NaN elsewhere; None = nothing."""
        super().__init__(cause)
        self.scores = scores


@runtime_checkable
class Scorer(Protocol):
    """See the module's docstring."""

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [B] of `media` [B, ...]; NaN = missing."""
        ...


@dataclass(frozen=True)
class Identity:
    """What answered: pinned by a run, so that a swapped reward model is noticed. The bounds hold on the wire."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")
    model_id: Annotated[str, Field(min_length=1, max_length=1024)]
    """Name of the model and of the settings that change its scores."""
    weights_digest: Annotated[str, Field(min_length=1, max_length=256)]
    """Hex digest of the weights; "none" for a scorer without any."""


def identity_of(scorer: Scorer) -> Identity:
    """The identity that `scorer` declares; its class name where it declares none."""
    model_id = getattr(scorer, "model_id", None) or type(scorer).__qualname__
    return Identity(str(model_id), str(getattr(scorer, "weights_digest", None) or "none"))


def check_media(media: Tensor, prompts: Sequence[Prompt]) -> None:
    """Raises ValueError unless `media` is [B, C, H, W] or [B, F, C, H, W] floating in [0, 1] with B = len(prompts)."""
    if media.dim() not in (4, 5) or media.shape[-3] not in (1, 3) or 0 in media.shape:
        raise ValueError(
            f"media has shape {list(media.shape)}: "
            "a scorer takes images [B, C, H, W] or videos [B, F, C, H, W] with C of 1 or 3."
        )
    if media.shape[0] != len(prompts):
        raise ValueError(f"{media.shape[0]} samples but {len(prompts)} prompts: pass one prompt per sample.")
    if not media.is_floating_point():
        raise ValueError(f"media has dtype {media.dtype}: pass floating point in [0, 1] (divide uint8 by 255).")
    low, high = media.aminmax()
    if not (low >= -1e-3 and high <= 1 + 1e-3):
        raise ValueError(
            f"media spans [{low:.4g}, {high:.4g}]: a scorer takes [0, 1]; decode() must clamp, NaN is a fault."
        )


def check_scores(name: str, scores: object, samples: int) -> Tensor:
    """`scores` as [samples] fp32 on CPU, with NaN where a score is not finite.

    Raises RewardError if they are not a floating tensor of exactly that shape.
    """
    if not isinstance(scores, Tensor) or not scores.is_floating_point() or tuple(scores.shape) != (samples,):
        got = f"{scores.dtype} {list(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
        raise RewardError(
            f"Reward `{name}` returned {got}: a scorer returns a floating tensor [{samples}], one score a sample."
        )
    scores = scores.detach().to("cpu", torch.float32)
    return scores.masked_fill(scores.isinf(), torch.nan)


@contextmanager
def contained(name: str) -> Iterator[None]:
    """Turn what ends a thread or a process (SystemExit, KeyboardInterrupt, CancelledError) into a failure of the
    scorer: nobody would otherwise learn of the end of a scorer's thread. Ctrl-C of a user passes.

    Args:
        name: of the scorer.

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
            f"Scorer `{name}` raised {type(error).__name__}{said}, which would end its process: a scorer reports a "
            "failure by an Exception, and a missing score by RewardUnavailable."
        ) from error


def as_frames(media: Tensor) -> Tensor:
    """[B, F, C, H, W] of images (F = 1) or videos, as a view."""
    return media.unsqueeze(1) if media.dim() == 4 else media


def as_rgb(media: Tensor) -> Tensor:
    """`media` with three channels: grey is repeated, RGB passes."""
    shape = list(media.shape)
    shape[-3] = 3
    return media.expand(shape)


def source_images(media: Tensor, prompts: Sequence[Prompt], role: str = "image") -> Tensor:
    """[B, 3, H, W] fp32 in [0, 1] on the CPU: each prompt's first image of `role`, fitted to the size of `media`.

    Raises RewardError for a prompt without one, or whose file has changed.
    """
    pictures = []
    for prompt in prompts:
        found = [image for image in prompt.images if image.role == role]
        if not found:
            raise RewardError(f"'{prompt.text[:60]}' has no {role}: {MISSING_IMAGE.format(role=role)}")
        pictures.append(_fitted(found[0], media.shape[-2], media.shape[-1]))
    return torch.stack(pictures)


def require_images(prompts: Sequence[Prompt], *roles: str) -> None:
    """For `check_prompts`: raise ValueError for a prompt that lacks an image of one of `roles`."""
    for prompt in prompts:
        for role in roles:
            if all(image.role != role for image in prompt.images):
                raise ValueError(f"it has no {role}; {MISSING_IMAGE.format(role=role)}")


@lru_cache(maxsize=64)
def _fitted(image: PromptImage, height: int, width: int) -> Tensor:
    try:
        picture = np.asarray(image.fitted(height, width), dtype=np.float32)
    except ImageError as error:
        raise RewardError(str(error)) from error
    return torch.from_numpy(picture / 255.0).movedim(-1, 0)


def luma(media: Tensor) -> Tensor:
    """[B, F, H, W] brightness (ITU-R BT.601) of images or videos."""
    frames = as_rgb(as_frames(media)).float()
    return (frames * frames.new_tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(2)


def laplacian(frames: Tensor) -> Tensor:
    """[B, F, H, W] 3x3 Laplacian with replicated borders."""
    kernel = frames.new_tensor([[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]]).view(1, 1, 3, 3)
    padded = functional.pad(frames.flatten(0, 1).unsqueeze(1), (1, 1, 1, 1), mode="replicate")
    return functional.conv2d(padded, kernel).squeeze(1).unflatten(0, frames.shape[:2])


def sample_frames(media: Tensor, count: int) -> Tensor:
    """[B, min(F, count), C, H, W]: evenly spaced frames, each the middle of its share of the video; all of an image."""
    frames = as_frames(media)
    total = frames.shape[1]
    if total <= count:
        return frames
    index = [(2 * i + 1) * total // (2 * count) for i in range(count)]
    return frames[:, index]


def rgb_bytes(media: Tensor, count: int) -> Tensor:
    """[B, min(F, count), 3, H, W] uint8 on the CPU: `sample_frames` of `media` as pictures."""
    return as_rgb(sample_frames(media, count)).clamp(0, 1).mul(255).round().to("cpu", torch.uint8)


def resolve_device(device: str) -> torch.device:
    """`auto` = the current CUDA device where there is one, else the CPU; anything else as torch reads it.

    A CUDA device comes with its index: a scorer is called in another thread than built, where device 0 is current.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    resolved = torch.device(device)
    if resolved.type == "cuda" and resolved.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return resolved


def build_scorer(node: Mapping[str, Any]) -> Scorer:
    """The scorer that a YAML node describes. Raises what Hydra raises, and ValueError if the result is not callable."""
    from hydra.utils import instantiate

    scorer = instantiate(plain(node), _convert_="all")
    if not callable(scorer):
        raise ValueError(
            f"`{node['_target_']}` builds {type(scorer).__name__}, which cannot be called: a scorer is callable."
        )
    return scorer


def plain(node: Mapping[str, Any]) -> dict[str, Any]:
    """`node` as plain containers with interpolations resolved (an OmegaConf node, or a dict as it is)."""
    from omegaconf import DictConfig, OmegaConf

    if isinstance(node, DictConfig):
        return OmegaConf.to_container(node, resolve=True)  # type: ignore[return-value]
    return dict(node)
