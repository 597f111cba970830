"""Human preference: HPS v2.1 (arXiv:2306.09341), open_clip's ViT-H-14 tuned on people's choices.

Score = cosine of picture and prompt, as in tgxs002/HPSv2 `hpsv2/img_score.py`; pictures lie around 0.2-0.35.
The checkpoint is the published `HPS_v2.1_compressed.pt` (read with weights_only=True), or its safetensors copy.
open_clip's tokenizer ships in its wheel.
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

from digenrl.rewards.protocol import resolve_device, sample_frames
from digenrl.types import Prompt
from reward_models.clip_backbone import CHUNK, clip_pixels
from reward_models.weights import checkpoint, module_digest, read_state

_REAL = "ViT-H-14"
_TINY_FILE = "hps.safetensors"
_TINY_VISION = {"image_size": 32, "layers": 2, "width": 64, "head_width": 32, "patch_size": 8}
_TINY_TEXT = {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}


class HPSv2:
    """Cosine in [-1, 1]; a video scores the mean of its sampled frames.

    Args:
        path: checkpoint of the real build, `.pt` or `.safetensors`.
        build: "real" or "tiny".
        frames: frames sampled from a video.
        device: "auto", or as torch reads it.
        dtype: of the model.
    """

    def __init__(
        self,
        path: str | None = None,
        build: str = "real",
        frames: int = 4,
        device: str = "auto",
        dtype: str = "float32",
    ) -> None:
        self.device, self.dtype, self.frames = resolve_device(device), getattr(torch, dtype), frames
        self.tokenizer = open_clip.SimpleTokenizer()
        with checkpoint(path, build, _write_tiny) as source:
            model = _architecture(build)
            file = Path(source) / _TINY_FILE if build == "tiny" else Path(source)
            model.load_state_dict(read_state(file, "give `path` the downloaded HPS_v2.1_compressed.pt"))
        self.model = model.to(self.device, self.dtype).eval().requires_grad_(False)
        self.image_size = int(self.model.visual.image_size[0])
        self.model_id = f"hpsv2({Path(path).name if path and build == 'real' else 'tiny'}, frames={frames})"
        self.weights_digest = module_digest(self.model)

    @torch.no_grad()
    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """[B] cosines."""
        tokens = self.tokenizer([prompt.text for prompt in prompts]).to(self.device)
        texts = functional.normalize(self.model.encode_text(tokens).float(), dim=-1)
        sampled = sample_frames(media, self.frames)
        pictures = torch.cat([self._embed(chunk) for chunk in sampled.flatten(0, 1).split(CHUNK)])
        return (pictures.unflatten(0, sampled.shape[:2]) * texts[:, None]).sum(-1).mean(1)

    def _embed(self, pictures: Tensor) -> Tensor:
        pixels = clip_pixels(pictures.to(self.device), self.image_size).to(self.dtype)
        return functional.normalize(self.model.encode_image(pixels).float(), dim=-1)


def _architecture(build: str) -> Any:
    if build == "real":
        return open_clip.create_model(_REAL, load_weights=False)
    return open_clip.CLIP(16, dict(_TINY_VISION), dict(_TINY_TEXT))


def _write_tiny(folder: Path) -> None:
    model: nn.Module = _architecture("tiny")
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / _TINY_FILE)
