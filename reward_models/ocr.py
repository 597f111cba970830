"""Text rendering: how well the words in a picture match the words that the prompt asks for.

The score is 1 - min(d, n) / n. d is the edit distance from the recognised text to the target, and n
the target's length. Whitespace and case do not count. Text that contains the target scores 1. This
is the reward of Flow-GRPO (arXiv:2505.05470, yifan123/flow_grpo `flow_grpo/ocr.py`, which reads
with PaddleOCR). With `best_line`, d is the smallest over the whole text and each of its lines.
Other lettering in the picture then does not hide a target that is nearly right.

The reader is RapidOCR (PP-OCR exported to ONNX); its models ship in its wheel, so nothing is
downloaded. Pictures are read one at a time: a batch would be padded to its widest member, and a
score would depend on its neighbours.
"""

from __future__ import annotations

import queue
import re
import unicodedata
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from digenrl import extras
from digenrl.rewards.protocol import rgb_bytes
from digenrl.types import Prompt
from reward_models.weights import files_digest

with extras.named_in_errors("ocr", "the ocr reward"):
    import rapidocr
    from rapidfuzz.distance import Levenshtein

LINE_HEIGHT = 64
"""A picture at most this high and at least twice as wide is one line of text: detection is
skipped."""
_QUOTED = re.compile(r'"([^"]*)"|“([^”]*)”')


class Ocr:
    """Edit-distance score in [0, 1] of the text in each sample; a video scores the mean of its
    sampled frames.

    Args:
        frames: frames read per video, evenly spaced.
        recognition_only: "auto" (by the picture's shape, see `LINE_HEIGHT`), "always" or "never".
        min_confidence: recognised lines below it do not count, so that noise scores 0.
        best_line: also compare each line by itself; false: the whole text alone (Flow-GRPO).
        detection_side: larger pictures are shrunk to this longest side before detection (PP-OCR's
            classic 960).
        threads: pictures read at the same time, each by an engine with one thread. Two such engines
            are twice as fast as one engine with two threads, and other ranks do not slow them down.
            Keep ranks x threads within the cores of the machine.
        device: "cpu", or "cuda" with onnxruntime-gpu installed.
        quoted: which quoted text of a prompt without `target` counts: "first" (Flow-GRPO) or
            "last".
    """

    def __init__(
        self,
        frames: int = 4,
        recognition_only: str = "auto",
        min_confidence: float = 0.5,
        detection_side: int = 960,
        threads: int = 2,
        device: str = "cpu",
        best_line: bool = True,
        quoted: str = "last",
    ) -> None:
        if recognition_only not in ("auto", "always", "never"):
            raise ValueError(
                f"recognition_only is {recognition_only!r}: choose auto, always or never."
            )
        if quoted not in ("first", "last"):
            raise ValueError(f"quoted is {quoted!r}: choose first or last.")
        self.frames, self.recognition_only, self.quoted = frames, recognition_only, quoted
        self.min_confidence, self.best_line = min_confidence, best_line
        if threads < 1:
            raise ValueError(f"threads is {threads}: at least one reads.")
        # An engine keeps state: one picture at a time each.
        self._idle: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for _ in range(threads):
            self._idle.put(_build_engine(detection_side, device))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="ocr")
        self.model_id = (
            f"rapidocr({frames}, {recognition_only}, {min_confidence}, lines={best_line})"
        )
        self.weights_digest = files_digest(
            sorted((Path(rapidocr.__file__).parent / "models").glob("*.onnx"))
        )

    @staticmethod
    def check_prompts(prompts: Sequence[Prompt]) -> None:
        """Raise ValueError for the first prompt without a target."""
        for prompt in prompts:
            ocr_target(prompt)

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Return [B] scores in [0, 1]. Raises ValueError for a prompt without a target."""
        targets = [normalise(ocr_target(prompt, self.quoted)) for prompt in prompts]
        pictures = (
            rgb_bytes(media, self.frames).flip(2).movedim(2, -1).contiguous().numpy()
        )  # the engine reads BGR, [B, F, H, W, C]
        lines = list(self._pool.map(self.read, pictures.reshape(-1, *pictures.shape[2:])))
        count = pictures.shape[1]
        scores = [
            [match(seen, target, self.best_line) for seen in lines[row * count : (row + 1) * count]]
            for row, target in enumerate(targets)
        ]
        return torch.tensor(scores, dtype=torch.float32).mean(1)

    def close(self) -> None:
        """End the reading threads. Idempotent."""
        self._pool.shutdown(cancel_futures=True)

    def read(self, picture: np.ndarray) -> list[str]:
        """Lines of text in one picture [H, W, 3] (uint8, BGR), in reading order, confident ones
        only."""
        height, width = picture.shape[:2]
        is_line = height <= LINE_HEIGHT and width >= 2 * height
        engine = self._idle.get()
        try:
            if self.recognition_only == "always" or (self.recognition_only == "auto" and is_line):
                lines = self._confident(engine(picture, use_det=False, use_cls=False, use_rec=True))
                if lines or self.recognition_only == "always":
                    return lines
            return self._confident(engine(picture, use_det=True, use_cls=False, use_rec=True))
        finally:
            self._idle.put(engine)

    def _confident(self, output: Any) -> list[str]:
        found = zip(output.txts or (), output.scores or (), strict=True)
        return [text for text, confidence in found if confidence >= self.min_confidence]


def ocr_target(prompt: Prompt, which: str = "last") -> str:
    """Return what a picture of `prompt` should say: its `target`, else the text in its first or
    last pair of double quotes (`which`).

    Raises ValueError naming the prompt where there is neither.
    """
    target = prompt.target
    if target is None:
        quoted = [straight or curly for straight, curly in _QUOTED.findall(prompt.text)]
        target = (quoted[0] if which == "first" else quoted[-1]) if quoted else ""
    if not normalise(target):
        raise ValueError(
            f"The prompt {prompt.text!r} says no text to render: put it in double quotes (a sign "
            'that says "OPEN"), '
            "or give the prompt a `target`."
        )
    return target


def normalise(text: str) -> str:
    """Return `text` as it is compared: compatibility forms folded, no whitespace, no case."""
    return "".join(unicodedata.normalize("NFKC", text).split()).casefold()


def match(lines: Sequence[str], target: str, best_line: bool = True) -> float:
    """Score in [0, 1] of recognised `lines` against a normalised, non-empty `target`."""
    whole = normalise("".join(lines))
    if target in whole:
        return 1.0
    texts = [whole, *(normalise(line) for line in lines if best_line)]
    return 1.0 - min(len(target), *(Levenshtein.distance(t, target) for t in texts)) / len(target)


def _build_engine(detection_side: int, device: str) -> Any:
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}: the OCR reader runs on cpu or cuda.")
    if device == "cuda":
        import onnxruntime

        if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            raise ValueError(
                "device=cuda needs onnxruntime-gpu, this one has no CUDA provider: use device=cpu."
            )
    return rapidocr.RapidOCR(
        params={
            "Global.log_level": "critical",
            # detect in wide pictures too: `read` tells lines by shape
            "Global.width_height_ratio": -1,
            "EngineConfig.onnxruntime.intra_op_num_threads": 1,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
            "EngineConfig.onnxruntime.use_cuda": device == "cuda",
            "Det.limit_type": "max",
            "Det.limit_side_len": detection_side,
            "Rec.rec_img_shape": [
                3,
                48,
                96,
            ],  # smallest width that a line is padded to; 320 costs twice the time
        }
    )
