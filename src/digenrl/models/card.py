"""The model card of an export: what was trained from what, how it went, how to load it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from digenrl.models.diffusers_export import LORA_FILE, PIPELINES

NUMBERS = (
    "status",
    "rl_steps",
    "reward_first",
    "reward_last",
    "heldout_first",
    "heldout_last",
    "diversity_ratio",
    "nn_distance_first",
    "nn_distance_last",
    "wall_s",
    "samples_per_s",
)
"""Entries of summary.json that the card repeats."""


def write_card(
    folder: Path, run: Path, config: Mapping[str, Any], transformer_class: str, weights: str, samples: Sequence[Path]
) -> Path:
    """Write README.md and copy the run's curves and before/after picture beside it.

    config: the run's configuration as plain values. weights: which weights these are. samples: files already in
    `folder`. A picture that the run does not have is left out of the card.
    """
    pictures = [run / "samples" / "before_after.png", *sorted((run / "plots").glob("*.png"))]
    shown = [path for path in pictures if path.exists()]
    for path in shown:
        shutil.copyfile(path, folder / path.name)
    summary = run / "summary.json"
    numbers = json.loads(summary.read_text()) if summary.exists() else {}
    rows = [f"| {key} | {_number(numbers[key])} |" for key in NUMBERS if numbers.get(key) is not None]
    model, lora = config["model"], config["model"].get("lora")
    base = model.get("path")
    lines = [
        "---",
        "library_name: diffusers",
        *([f"base_model: {base}"] if base else []),
        f"tags: [{', '.join(['reinforcement-learning', 'digenrl', *(['lora'] if lora else [])])}]",
        "---",
        "",
        f"# {config['experiment_name']}",
        "",
        f"{_origin(base, model.get('build'))}, post-trained by reinforcement learning with digenrl "
        f"({_adapter(lora)}; {weights} weights). The licence is the base model's.",
        "",
        "## Use",
        "",
        "```python",
        *_usage(base, transformer_class, lora is not None),
        "```",
        "",
        *(["## Numbers of the run", "", "| figure | value |", "|---|---|", *rows, ""] if rows else []),
        "Rewards can be hacked: read the held-out figures and look at the pictures before you trust a rise.",
        "",
        *[f"![{path.stem}]({path.name})" for path in shown],
        *[f"- [{path.name}]({path.name})" for path in samples],
        "",
        "## Settings",
        "",
        "```json",
        json.dumps({key: config[key] for key in ("algorithm", "sampling", "data", "reward", "seed")}, indent=2),
        "```",
        "",
    ]
    card = folder / "README.md"
    card.write_text("\n".join(lines))
    return card


def _origin(base: str | None, build: str | None) -> str:
    if build == "tiny":
        return f"The tiny random build of {base}'s classes (not the real model)"
    return str(base) if base else "The project's embedded model"


def _adapter(lora: Mapping[str, Any] | None) -> str:
    return "all weights" if lora is None else f"LoRA rank {lora['rank']}, alpha {lora['alpha']}"


def _usage(base: str | None, transformer_class: str, lora: bool) -> list[str]:
    pipeline, source = PIPELINES[transformer_class], base
    if base is None:  # an embedded model, whose base weights only digenrl has
        adapter = 'policy.transformer.load_lora_adapter("PATH/OF/THIS/FOLDER", prefix="transformer")'
        whole = f'policy.transformer = {transformer_class}.from_pretrained("PATH/OF/THIS/FOLDER/transformer")'
        loading = adapter if lora else whole
        return ["# policy: the model of config.yaml, built by digenrl with lora=None", loading]
    if lora:
        return [
            "import torch",
            f"from diffusers import {pipeline}",
            "",
            f'pipeline = {pipeline}.from_pretrained("{source}", torch_dtype=torch.bfloat16).to("cuda")',
            f'pipeline.load_lora_weights("PATH/OF/THIS/FOLDER", weight_name="{LORA_FILE}")',
        ]
    return [
        "import torch",
        f"from diffusers import {pipeline}, {transformer_class}",
        "",
        f'transformer = {transformer_class}.from_pretrained("PATH/OF/THIS/FOLDER", subfolder="transformer",',
        "                                            torch_dtype=torch.bfloat16)",
        f'pipeline = {pipeline}.from_pretrained("{source}", transformer=transformer,',
        "                                       torch_dtype=torch.bfloat16)",
    ]


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
