"""GenEval as a training reward: objects that a detector finds, held against the prompt's rules.

The rules are those of the benchmark (`digenrl.extensions.bench.geneval`). The detector is a model
of transformers that takes class names as text, such as OWLv2 or Grounding DINO. CLIP names colours.
Flow-GRPO trains with GenEval's own tool, Mask2Former of mmdet, behind a server (arXiv:2505.05470,
section 5). Scores of the two are not comparable: docs/benchmarks.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from digenrl.extensions.bench.detectors import TransformersDetector
from digenrl.extensions.bench.geneval import Rules, find_fault, training_terms
from digenrl.rewards.protocol import rgb_bytes
from digenrl.types import Prompt
from reward_models.weights import byte_tokenizer, checkpoint, make_clip, module_digest


class GenEval:
    """How far a picture fulfils its prompt's rules: 1 is wholly, surplus objects may make it
    negative; a video scores its middle frame.

    Args:
        path: directory of the detector.
        colours: directory of the CLIP model that names colours.
        strict: 1 where every rule holds, else 0 (the benchmark). false: the mean of
            `geneval.training_terms`, Flow-GRPO's training reward.
        threshold, counting_threshold, max_overlap: as of the benchmark. Flow-GRPO's server has .3,
            .9 and 1 (it keeps every box) with Mask2Former, whose scores are higher than OWLv2's.
    """

    def __init__(
        self,
        path: str | None,
        colours: str | None,
        build: str = "real",
        strict: bool = False,
        threshold: float = 0.3,
        counting_threshold: float = 0.3,
        max_overlap: float = 0.5,
    ) -> None:
        self.strict, self.threshold, self.counting = strict, threshold, counting_threshold
        least = min(threshold, counting_threshold)
        with contextlib.ExitStack() as open_until:
            detector, clip = (
                Path(open_until.enter_context(checkpoint(given, build, make)))
                for given, make in ((path, make_owl), (colours, make_colours))
            )
            self.detector = TransformersDetector(detector, clip, least, max_overlap)
        self.model_id = f"geneval({path}, {colours}, strict={strict}, {threshold}, {self.counting})"
        self.weights_digest = module_digest(*self.detector.networks)

    @staticmethod
    def check_prompts(prompts: Sequence[Prompt]) -> None:
        """Raise ValueError for a prompt without GenEval's rules."""
        for prompt in prompts:
            if not isinstance(prompt.metadata.get("include"), list) or "tag" not in prompt.metadata:
                raise ValueError(
                    f"The prompt {prompt.text!r} has no GenEval rules: give its line `tag` and "
                    "`include` (digenrl fetch prompts=geneval fetches such prompts)."
                )

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Return [B] scores, at most 1."""
        pictures = rgb_bytes(media, 1)[:, 0].float() / 255
        scores = [
            self.score_picture(picture, cast(Rules, prompt.metadata))
            for picture, prompt in zip(pictures, prompts, strict=True)
        ]
        return torch.tensor(scores, dtype=torch.float32)

    def score_picture(self, picture: Tensor, rules: Rules) -> float:
        """Return the score of one picture [3, H, W] against a line of the suite."""
        if self.strict:
            return float(
                not find_fault(rules, picture, self.detector, self.threshold, self.counting)
            )
        terms = training_terms(rules, picture, self.detector, self.threshold, self.counting)
        return sum(terms) / len(terms)


def make_owl(directory: Path) -> None:
    """Write a small random OWLv2 as the hub lays it out."""
    from transformers import (
        Owlv2Config,
        Owlv2ForObjectDetection,
        Owlv2ImageProcessor,
        Owlv2Processor,
    )

    tokenizer = byte_tokenizer()
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    tower["num_attention_heads"] = 2
    words = {"vocab_size": len(tokenizer), "max_position_embeddings": 64}
    words |= {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos")}
    words["pad_token_id"] = tokenizer.pad_token_id
    config = Owlv2Config(
        text_config={**tower, **words},
        vision_config={**tower, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    Owlv2ForObjectDetection(config).save_pretrained(directory)
    size = {"height": 32, "width": 32}
    Owlv2Processor(Owlv2ImageProcessor(size=size), tokenizer).save_pretrained(directory)


def make_colours(directory: Path) -> None:
    """Write a small random CLIP with its image processor."""
    from transformers import CLIPImageProcessor

    make_clip(directory)
    CLIPImageProcessor(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    ).save_pretrained(directory)
