"""Human preference: HPS v2.1 (arXiv:2306.09341), open_clip's ViT-H-14 tuned on people's choices.

Score = cosine of picture and prompt, as in tgxs002/HPSv2 `hpsv2/img_score.py`; pictures lie around
0.2-0.35. The checkpoint is the published `HPS_v2.1_compressed.pt` (read with weights_only=True), or
its safetensors copy. open_clip's tokenizer ships in its wheel.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import open_clip
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from torchvision.transforms.v2 import functional as pixels

from digenrl.rewards.protocol import as_rgb, resolve_device
from reward_models.clip_backbone import CLIP_MEAN, CLIP_STD, ClipBackbone, CosineScorer
from reward_models.weights import checkpoint, module_digest, read_state

_REAL = "ViT-H-14"
_TINY_FILE = "hps.safetensors"
_TINY_VISION = {"image_size": 32, "layers": 2, "width": 64, "head_width": 32, "patch_size": 8}
_TINY_TEXT = {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}


class OpenClip(ClipBackbone):
    """The open_clip model of an HPS checkpoint, with the interface of `ClipBackbone`."""

    def __init__(
        self, path: str | None, build: str, device: str = "auto", dtype: str = "float32"
    ) -> None:
        self.device, self.dtype = resolve_device(device), getattr(torch, dtype)
        self.tokenizer = open_clip.SimpleTokenizer()
        with checkpoint(path, build, _write_tiny) as source:
            model = _architecture(build)
            file = Path(source) / _TINY_FILE if build == "tiny" else Path(source)
            model.load_state_dict(
                read_state(file, "give `path` the downloaded HPS_v2.1_compressed.pt")
            )
        self.model = model.to(self.device, self.dtype).eval().requires_grad_(False)
        self.name = Path(path).name if path and build == "real" else "tiny"
        self.digest = module_digest(self.model)

    @property
    def image_size(self) -> int:
        """Side of the square picture that the model reads."""
        return int(self.model.visual.image_size[0])

    @torch.no_grad()
    def texts(self, texts: Sequence[str]) -> Tensor:
        """Return unit embeddings [N, D] fp32."""
        return functional.normalize(
            self.model.encode_text(self.tokenizer(list(texts)).to(self.device)).float(), dim=-1
        )

    def _embed_images(self, pictures: Tensor) -> Tensor:
        inputs = whole_pixels(pictures.to(self.device), self.image_size).to(self.dtype)
        return functional.normalize(self.model.encode_image(inputs).float(), dim=-1)


class HPSv2(CosineScorer):
    """Cosine in [-1, 1]; arguments in `CosineScorer`. `path` of the real build is a `.pt` or
    `.safetensors` file."""

    name = "hpsv2"
    backbone = OpenClip


def whole_pixels(pictures: Tensor, size: int) -> Tensor:
    """Return [N, 3, size, size] fp32 normalised pixels of the whole picture: longest side to `size`
    (bicubic, antialiased), black beside it.

    HPS v2's own preparation (`resize_longest_max` of tgxs002/HPSv2 `hpsv2/src/open_clip`). CLIP's,
    which crops, is off by .05 to .11 for pictures that are not square; the score's deviation is
    .115.
    """
    rgb = as_rgb(pictures).float()
    scale = size / max(rgb.shape[-2:])
    height, width = (max(1, round(side * scale)) for side in rgb.shape[-2:])
    mode = pixels.InterpolationMode.BICUBIC
    resized = pixels.resize(rgb, [height, width], mode, antialias=True).clamp(0, 1)
    left, top = (size - width) // 2, (size - height) // 2
    padded = pixels.pad(resized, [left, top, size - width - left, size - height - top])
    return pixels.normalize(padded, list(CLIP_MEAN), list(CLIP_STD))


def _architecture(build: str) -> Any:
    if build == "real":
        return open_clip.create_model(_REAL, load_weights=False)
    return open_clip.CLIP(16, dict(_TINY_VISION), dict(_TINY_TEXT))


def _write_tiny(folder: Path) -> None:
    model: nn.Module = _architecture("tiny")
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()},
        folder / _TINY_FILE,
    )
