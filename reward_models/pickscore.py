"""Human preference: PickScore (arXiv:2305.01569), a CLIP-H tuned on pairs that people chose between.

Score = exp(logit_scale) x cosine / 26, which puts pictures around 0.8-0.9: the scaling of Flow-GRPO
(yifan123/flow_grpo `flow_grpo/pickscore_scorer.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from digenrl.types import Prompt
from reward_models.clip_backbone import ClipBackbone

_SCALE = 26.0


class PickScore:
    """Scaled preference logit; a video scores the mean of its sampled frames.

    Args:
        path: checkpoint with its tokenizer, directory or hub id.
        build: "real" or "tiny".
        frames: frames sampled from a video.
        device: "auto", or as torch reads it.
        dtype: of the model.
    """

    def __init__(
        self,
        path: str | None = "yuvalkirstain/PickScore_v1",
        build: str = "real",
        frames: int = 4,
        device: str = "auto",
        dtype: str = "float32",
    ) -> None:
        self.clip, self.frames = ClipBackbone(path, build, device, dtype), frames
        self.model_id = f"pickscore({self.clip.name}, frames={frames})"
        self.weights_digest = self.clip.digest

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """[B] scores."""
        texts = self.clip.texts([prompt.text for prompt in prompts])
        cosines = (self.clip.frames(media, self.frames) * texts[:, None]).sum(-1).mean(1)
        return self.clip.logit_scale * cosines / _SCALE
