"""Preservation: how alike sample and source look, by LPIPS (arXiv:1801.03924) on AlexNet's
features.

The distance is torchmetrics', which brings its five linear layers; AlexNet's weights are a file of
the user's. A copy of the source scores 1, so it belongs beside a reward of what should have
changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torchmetrics.functional.image.lpips import _LPIPS
from torchvision.models import alexnet
from torchvision.transforms.v2 import functional as pixels

from digenrl.rewards.protocol import (
    as_rgb,
    require_images,
    resolve_device,
    sample_frames,
    source_images,
)
from digenrl.types import Prompt
from reward_models.region import outside
from reward_models.weights import checkpoint, module_digest, read_state

_TINY_FILE = "alexnet.safetensors"
CHUNK = 32
"""Pictures per forward."""


class LpipsSimilarity:
    """1 - LPIPS of a sample and its `image`. The prompt's region shows the source in both, and the
    distance is divided by the share that is left.

    Args:
        path: torchvision's AlexNet, `.pth` (read with weights_only=True) or `.safetensors`; the
            tiny build needs none.
        build: "real" or "tiny" (a random AlexNet through the same code).
        side: both pictures are stretched to a square of so many pixels.
        frames: frames sampled from a video.
        device: "auto", or as torch reads it.

    Raises:
        FileNotFoundError: no weights at `path`.
        ValueError: they are not AlexNet's, or too small a `side`.
    """

    reads_images = True

    def __init__(
        self,
        path: str | None = None,
        build: str = "real",
        side: int = 256,
        frames: int = 4,
        device: str = "auto",
    ) -> None:
        if side < 64:
            raise ValueError(f"side = {side}: AlexNet's last features need at least 64 pixels.")
        with checkpoint(path, build, _make_alexnet) as source:
            file = Path(source).expanduser() / (_TINY_FILE if build == "tiny" else "")
            weights = read_state(
                file, "give `path` the file alexnet-owt-7be5be79.pth of download.pytorch.org/models"
            )
        self._distance = _LPIPS(
            net="alex", pnet_rand=True
        )  # else the library would download them by itself
        features = self._distance.net
        try:
            own = {
                name: weights[f"features.{name.partition('.')[2]}"]
                for name in features.state_dict()
            }
            features.load_state_dict(own)
        except (KeyError, RuntimeError) as error:
            raise ValueError(
                f"{path}: holds other weights than torchvision's AlexNet ({error})."
            ) from error
        self._device, self._side, self._frames = resolve_device(device), side, frames
        self._distance.to(self._device)
        self.model_id = (
            f"lpips_similarity({path if build == 'real' else 'tiny'}, side={side}, frames={frames})"
        )
        self.weights_digest = module_digest(self._distance)

    @staticmethod
    def check_prompts(prompts: Sequence[Prompt]) -> None:
        """Raise ValueError for a prompt without `image`, or with a `region` that is none or
        everything."""
        require_images(prompts, "image")
        for prompt in prompts:
            outside(prompt, 64, 64)

    @torch.no_grad()
    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Return [B], at most 1; a video gives the mean of its sampled frames."""
        sampled = as_rgb(sample_frames(media, self._frames)).float().cpu()
        rows = torch.arange(len(sampled)).repeat_interleave(sampled.shape[1])
        sources = self._squares(source_images(media, prompts))[rows]
        own = self._squares(sampled.flatten(0, 1))
        counted = torch.stack([outside(prompt, self._side, self._side) for prompt in prompts])[
            rows, None
        ]
        both = torch.stack([torch.where(counted, own, sources), sources]).to(self._device)
        found = [
            self._distance(*pair, normalize=True).flatten().cpu()
            for pair in both.split(CHUNK, dim=1)
        ]
        shares = counted.float().mean((1, 2, 3))
        return 1.0 - (torch.cat(found) / shares).view(len(sampled), -1).mean(1)

    def _squares(self, pictures: Tensor) -> Tensor:
        """Return [N, 3, side, side] in [0, 1]."""
        size = [self._side, self._side]
        return pixels.resize(
            pictures, size, pixels.InterpolationMode.BICUBIC, antialias=True
        ).clamp(0, 1)


def _make_alexnet(directory: Path) -> None:
    """Write a random AlexNet, named as torchvision's weights are."""
    features = alexnet().features.state_dict()
    save_file(
        {f"features.{name}": value for name, value in features.items()}, directory / _TINY_FILE
    )
