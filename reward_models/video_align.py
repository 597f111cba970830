"""Quality of a video: VideoAlign's VideoReward (arXiv:2501.13918), Qwen2-VL-2B with three reward
tokens: visual quality (VQ), motion quality (MQ) and text alignment (TA).

Axis i is output i of the head at token i, brought to mean 0 and deviation 1 over the authors'
videos (KwaiVGI/VideoAlign at 219ab9d, `trainer.py` and `inference.py`). A frame is taken every
half second, at least four, evenly from the first to the last (`vision_process.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from digenrl.rewards.protocol import as_frames
from digenrl.types import Prompt
from reward_models.qwen_vl import QwenReward, frames_of

NORM = {"VQ": (3.6757, 2.2476), "MQ": (1.1646, 1.3811), "TA": (2.8105, 2.5121)}
"""Mean and deviation of each axis, as a document of MindSpeed-MM gives them. The authors' own stand
in the published `model_config.json`, which was not seen here; `norm` takes them."""
_LEAST_FRAMES, _LEAST_PIXELS = 4, 128 * 28 * 28


class VideoAlign(QwenReward):
    """About standard normal in each axis; a picture is judged as a video that stands still.

    Args:
        video_fps: frames per second at which the sampled videos are meant to be shown.
        fps: frames per second that the model looks at.
        norm: axis -> [mean, deviation]; null = `NORM`.
        options: arguments of `QwenReward`.
    """

    name, backbone = "video_align", "Qwen2VL"
    tokens = ("<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>")
    questions = (("DETAILED_PROMPT_WITH_SPECIAL_TOKEN",),)
    tiny_questions = (
        "Sharp? <|VQ_reward|> Smooth? <|MQ_reward|> Shows {text_prompt}? <|TA_reward|>",
    )
    default_axes: ClassVar = {"VQ": 1.0, "MQ": 1.0, "TA": 1.0}
    lora_alpha = 128.0

    def __init__(
        self,
        *args: Any,
        video_fps: float = 16.0,
        fps: float = 2.0,
        norm: Mapping[str, Sequence[float]] | None = None,
        **options: Any,
    ) -> None:
        self.video_fps, self.fps, self.norm = video_fps, fps, {**NORM, **(norm or {})}
        super().__init__(*args, **options)

    def settings(self) -> str:
        """Return the rates and the normalisation."""
        return f", fps={self.fps:g} of {self.video_fps:g}, norm={[*self.norm.values()]}"

    def make_heads(self, width: int) -> nn.Module:
        """Return the published head."""
        return nn.ModuleDict({"rm_head": nn.Linear(width, len(self.tokens), bias=False)})

    def read(self, hidden: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the normalised axes."""
        own = self.heads["rm_head"](hidden[0]).diagonal(dim1=1, dim2=2)  # type: ignore[index]
        return {
            axis: (own[:, index] - self.norm[axis][0]) / self.norm[axis][1]
            for index, axis in enumerate(self.default_axes)
        }

    def shown(self, media: Tensor, prompts: Sequence[Prompt]) -> list[list[Tensor]]:
        """Return each sample's frames."""
        chosen = self.frames(as_frames(media).size(1))
        return [[frames] for frames in frames_of(media, chosen)]

    def frames(self, total: int) -> list[int]:
        """Return which of `total` frames the model sees. An odd number is rounded to an even
        one."""
        if total < 2:
            return [0, 0]
        asked = min(max(total / self.video_fps * self.fps, _LEAST_FRAMES), total // 2 * 2)
        return torch.linspace(0, total - 1, round(asked / 2) * 2).round().long().tolist()

    def least_pixels(self, item: Tensor) -> int:
        """Return the authors' lower bound of a frame."""
        return min(self.pixels, _LEAST_PIXELS)
