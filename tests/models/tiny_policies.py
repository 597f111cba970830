"""Tiny policies of all families (families.py has a row for each), and the plain diffusers pipelines
to compare with."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["HF_HUB_OFFLINE"] = "1"

import torch

from benchmarks._families import adapter
from digenrl.data import load_prompts
from digenrl.extensions.export.diffusers_export import lora_file, lora_pipeline
from digenrl.facts import facts_by_family
from digenrl.models import tiny as tiny_builds
from digenrl.models.pipeline import DiffusersPolicy
from digenrl.types import Prompt
from tests.models.families import FAMILIES as ROWS
from tests.models.families import Row as Row

FACTS = {family: facts_by_family()[family] for family in ROWS}
FAMILIES: dict[str, type[DiffusersPolicy]] = {
    family: adapter(facts) for family, facts in FACTS.items()
}
VIDEO = {family for family, policy in FAMILIES.items() if policy.codec_class.temporal_stride}
HEARD = [family for family, policy in FAMILIES.items() if policy.codec_class.has_sound]
(BOTH,) = (family for family in HEARD if FAMILIES[family].modalities)
"""The family whose sound is trained beside its video."""
MASKED = [
    name
    for name, facts in FACTS.items()
    if "mask" in facts.conditioning and not FAMILIES[name].codec_class.reads
]
"""Families whose attention masks the padding of a text."""
LORA = {"rank": 4, "alpha": 8, "targets": "attention_ff"}
NEGATIVE = "a blue ring"
IMAGES = load_prompts("edits.jsonl")[0].images
"""What families that read images are given."""


def prompt(text: str) -> Prompt:
    """`text` with an image, which most families do not read."""
    return Prompt(text, images=IMAGES)


def size(family: str) -> dict[str, int]:
    """Few tokens: pixels, and frames of a video."""
    return dict(ROWS[family].size)


def make(
    family: str, lora: dict[str, Any] | str | None = None, dtype: str = "float32", **overrides: Any
) -> DiffusersPolicy:
    """The family's policy on its tiny build. lora="full": all weights."""
    arguments = {
        "path": "unused",
        "build": "tiny",
        "lora": LORA if lora is None else None if lora == "full" else lora,
        "dtype": dtype,
        "max_sequence_length": ROWS[family].text_length,
        "negative_prompt": NEGATIVE,
        **size(family),
        **overrides,
    }
    return FAMILIES[family](**arguments)


def randomise_lora(policy: DiffusersPolicy, seed: int = 1, std: float = 0.05) -> None:
    """B matrices are zero at the start; give them values, so that the adapter shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.adapter.trained_parameters().values():
            parameter.add_(std * torch.randn(parameter.shape, generator=generator))


def exported(policy: DiffusersPolicy, folder: Path) -> Any:
    """The transformer that plain diffusers makes of an export and the base model."""
    kind, networks = policy.transformer_class, []
    for part in policy.components:
        if policy.adapter.lora is None:
            networks.append(kind.from_pretrained(folder, subfolder=part))
            continue
        networks.append(kind.from_pretrained(policy.path, subfolder=part))
        state, metadata = lora_pipeline(policy).lora_state_dict(
            folder, weight_name=lora_file(part), return_lora_metadata=True
        )
        networks[-1].load_lora_adapter(state, metadata=metadata, prefix="transformer")
    return policy.joined(networks, policy.path).eval()


def diffusers_latents(
    family: str,
    prompts: list[str],
    noise: torch.Tensor,
    steps: int,
    guidance: float,
    true_cfg: float = 1.0,
    **more: Any,
) -> torch.Tensor:
    """Return final latents of the family's own pipeline on the tiny build, from the same noise.

    `more` is for the call."""
    row, policy = ROWS[family], FAMILIES[family]
    if row.one_prompt and len(prompts) > 1:
        rows = zip(prompts, noise.split(1), strict=True)
        return torch.cat(
            [
                diffusers_latents(family, [text], own, steps, guidance, true_cfg)
                for text, own in rows
            ]
        )
    pipeline = row.load(tiny_builds.ensure(family))
    pipeline.set_progress_bar_config(disable=True)
    call: dict[str, Any] = {
        "prompt": [*prompts],  # a pipeline may write into the list
        "num_inference_steps": steps,
        "output_type": "latent",
        "return_dict": False,
        "max_sequence_length": row.text_length,
        "guidance_scale": guidance,
        "negative_prompt": None,
        **row.latents(noise),
    }
    call |= {"num_frames" if key == "frames" else key: value for key, value in row.size.items()}
    if (true_cfg if policy.embedded_guidance else guidance) > 1:
        call["negative_prompt"] = [NEGATIVE] * len(prompts)
    if policy.embedded_guidance:
        call["true_cfg_scale"] = true_cfg
    if policy.codec_class.reads:
        call["image"] = IMAGES[0].fit_to_size(row.size["height"], row.size["width"])
    with ExitStack() as patches:
        for name, value in row.patches.items():
            patches.enter_context(mock.patch(name, value))
        return row.result(pipeline, *pipeline(**row.call(pipeline, call) | more))
