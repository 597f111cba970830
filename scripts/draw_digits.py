"""Draw the digits that fine-tuning and offline DPO read, into src/digenrl/prompts:
`.venv/bin/python -m scripts.draw_digits` writes them again, byte for byte.

digits/ holds the first sixteen real pictures of each digit among those that judge A learned from.
Judge B has seen none of them. digits_sft.jsonl names them under their prompts as `media`.
digits_preferences.jsonl names them as `preferred`, and pictures of other digits as `rejected`.
"""

from __future__ import annotations

import json
from pathlib import Path

from torchvision.transforms.v2.functional import to_pil_image

from reward_models.digit_judge import WORDS, judge_half

FOLDER = Path(__file__).resolve().parents[1] / "src" / "digenrl" / "prompts"
EACH = 16
"""Pictures of a digit."""


def drawn(folder: Path) -> dict[str, list[str]]:
    """Write the pictures below `folder`, and return file -> lines."""
    images, labels = judge_half("a")
    (folder / "digits").mkdir(parents=True, exist_ok=True)
    for digit in range(10):
        for number, image in enumerate(images[labels == digit][:EACH]):
            to_pil_image(image).save(folder / name(digit, number))
    lines: dict[str, list[str]] = {"digits_sft.jsonl": [], "digits_preferences.jsonl": []}
    for digit, word in enumerate(WORDS):
        asked = {"prompt": f"number {word}", "target": str(digit)}
        own = [name(digit, number) for number in range(EACH)]
        others = [name((digit + 1 + number % 9) % 10, number) for number in range(EACH)]
        lines["digits_sft.jsonl"].append(json.dumps(asked | {"media": own}))
        pair = {"preferred": own, "rejected": others}
        lines["digits_preferences.jsonl"].append(json.dumps(asked | pair))
    return lines


def name(digit: int, number: int) -> str:
    """Return the path of a picture, relative to the prompt files."""
    return f"digits/{digit}_{number:02d}.png"


if __name__ == "__main__":
    for file, lines in drawn(FOLDER).items():
        (FOLDER / file).write_text("\n".join(lines) + "\n", encoding="utf-8")
