"""Human preference: HPSv3 (arXiv:2508.03789), Qwen2-VL-7B with a head that gives a mean and a
deviation.

The score is the mean `mu`, as by its authors (MizzenAI/HPSv3 `hpsv3/inference.py` at 72b7eba).
`sigma` is exp of the second output, the deviation in their loss. axes={mu: 1, sigma: -1} prefers
what the model is sure of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from reward_models.qwen_vl import QwenReward, ranked_head


class HPSv3(QwenReward):
    """About -10 to 15, larger is better; arguments in `QwenReward`. Of a video its middle frame is
    judged."""

    name, backbone = "hpsv3", "Qwen2VL"
    tokens = ("<|Reward|>",)
    questions = (("INSTRUCTION", "prompt_with_special_token"),)
    tiny_questions = ("How well does the picture show: {text_prompt}? <|Reward|>",)
    default_axes: ClassVar = {"mu": 1.0, "sigma": 0.0}

    def make_heads(self, width: int) -> nn.Module:
        """Return the published head."""
        return nn.ModuleDict({"rm_head": ranked_head(width)})

    def read(self, hidden: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return mean and deviation."""
        mu, log_sigma = self.heads["rm_head"](hidden[0][:, 0]).unbind(-1)  # type: ignore[index]
        return {"mu": mu, "sigma": log_sigma.exp()}
