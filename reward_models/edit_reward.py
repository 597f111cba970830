"""Quality of an edit: EditReward (arXiv:2509.26346), Qwen2.5-VL-7B that is shown the source and the
result.

It is asked twice, whether the instruction was followed and whether the result is well made, and
each answer has a head of its own. The score is the mean of both means, as by its authors
(TIGER-AI-Lab/EditReward at edb027e, `EditReward/inference_edit.py` and
`config/EditReward-Qwen2.5-7B-VL.yaml`). The published model has seen one source; of a prompt with
several `image`s all are shown, in their order, before the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from torch import Tensor, nn

from digenrl.rewards.protocol import require_images, rgb_bytes, source_images
from digenrl.types import Prompt
from reward_models.qwen_vl import QwenReward, ranked_head


class EditReward(QwenReward):
    """Larger is better; arguments in `QwenReward`. Of a video its middle frame is judged."""

    name, backbone = "edit_reward", "Qwen2_5_VL"
    reads_images = True
    tokens = ("<|Reward|>",)
    questions = (
        ("INSTRUCTION_EDIT_FOLLOWING", "prompt_with_special_token"),
        ("INSTRUCTION_EDIT_QUALITY", "prompt_with_special_token"),
    )
    tiny_questions = (
        "Was it done: {text_prompt}? <|Reward|>",
        "Is it well made: {text_prompt}? <|Reward|>",
    )
    default_axes: ClassVar = {"following": 0.5, "quality": 0.5}

    @staticmethod
    def check_prompts(prompts: Sequence[Prompt]) -> None:
        """Raise ValueError for a prompt without `image`."""
        require_images(prompts, "image")

    def make_heads(self, width: int) -> nn.Module:
        """Return the two published heads."""
        heads = nn.ModuleDict({f"head_{number}": ranked_head(width) for number in (0, 1)})
        return nn.ModuleDict({"rm_heads": heads})

    def read(self, hidden: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the means of both heads."""
        heads = self.heads["rm_heads"]  # type: ignore[index]
        return {
            axis: heads[f"head_{number}"](states[:, 0])[:, 0]
            for number, (axis, states) in enumerate(zip(self.default_axes, hidden, strict=True))
        }

    def shown(self, media: Tensor, prompts: Sequence[Prompt]) -> list[list[Tensor]]:
        """Return each sample's sources and the sample."""
        results = rgb_bytes(media, 1)[:, 0]
        return [
            [*(rgb_bytes(one, 1)[0, 0] for one in _sources(media, prompt)), result]
            for prompt, result in zip(prompts, results, strict=True)
        ]


def _sources(media: Tensor, prompt: Prompt) -> list[Tensor]:
    """Return the sources of a prompt, each [1, 3, H, W] in the size of `media`."""
    each = [replace(prompt, images=(own,)) for own in prompt.images if own.role == "image"]
    return [source_images(media, [one]) for one in each or [prompt]]
