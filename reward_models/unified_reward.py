"""UnifiedReward (arXiv:2503.05236): a vision-language model that was trained as a judge, behind any
OpenAI-compatible endpoint.

It answers the question that it was trained on, the authors' text: `template` names a file of
CodeGoat24/UnifiedReward (at ff6f520), which is read and never run. Their answers are words: "Final
Score: 4" of 1 to 5, or three such scores of version 2 (alignment, coherence, style), or "Image 1 is
better". Their own loops score an answer of another form as 0; here it is missing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reward_models.vlm_judge import PairJudge, VlmJudge

_BEST = 5.0
_BETTER = re.compile(r"(?:image ([12]) is better|both images are equally good)", re.IGNORECASE)


class UnifiedReward(VlmJudge):
    """Weighted sum of the axes that an answer names, each of 1 to 5 and divided by 5.

    Args:
        url: as of `VlmJudge`, and so are `options`.
        model: name that the endpoint serves.
        template: the authors' file with the question, as
            inference_qwen/image_generation/qwen_point_score_image_generation.py.
        axes: name of a score in the answer -> weight.
    """

    name, key, text_last, max_tokens = "unified_reward", "", True, 512

    def __init__(
        self, url: str, model: str, template: str | None, axes: Mapping[str, float], **options: Any
    ) -> None:
        self.axes = dict(axes)
        said = published_question(template)
        super().__init__(url, model, said, **{**options, "scale": _BEST, "frames": 1})
        weights = ", ".join(f"{axis}={weight:g}" for axis, weight in self.axes.items())
        self.model_id = f"{self.model_id[:-1]}, {weights})"

    def number(self, answer: str) -> float:
        """Return the score; ValueError for an answer that names an axis not once."""
        total = 0.0
        for axis, weight in self.axes.items():
            (value,) = set(
                re.findall(rf"{re.escape(axis)}(?: \(1-5\))?:\s*(\d+(?:\.\d+)?)", answer)
            )
            if not 1 <= float(value) <= _BEST:
                raise ValueError(f"{axis} is {value}, outside of 1..5")
            total += weight * float(value) / _BEST
        return total


class UnifiedPairs(PairJudge):
    """Share of comparisons won, as of `PairJudge`, by the authors' question about two pictures
    (inference_qwen/image_generation/qwen_pair_rank_image_generation.py)."""

    name, key, text_last, max_tokens = "unified_pairs", "", True, 512

    def __init__(self, url: str, model: str, template: str | None, **options: Any) -> None:
        super().__init__(url, model, published_question(template), **options)

    def number(self, answer: str) -> float:
        """Return 1, a half or 0 for the first picture; ValueError for another answer."""
        (better,) = set(_BETTER.findall(answer))
        return {"1": 1.0, "2": 0.0, "": 0.5}[better]


def published_question(template: str | None) -> str:
    """Return the longest formatted string of a Python file that names `prompt`, read without
    running the file; the name stays as {prompt}."""
    text = Path(template).read_text(encoding="utf-8") if template else ""
    found = [
        "".join(
            str(part.value) if isinstance(part, ast.Constant) else "{prompt}"
            for part in node.values
        )
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.JoinedStr) and "{prompt}" in ast.unparse(node)
    ]
    if not found:
        raise ValueError(
            f"template = {template}: has no question with {{prompt}}. Give a file of "
            "https://github.com/CodeGoat24/UnifiedReward, as `digenrl fetch` names it."
        )
    return max(found, key=len)
