"""`model.lora.path`: files that diffusers and PEFT themselves wrote, read by a run's configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict

from digenrl.config import load
from digenrl.models import tiny
from tests.models import tiny_policies
from tests.models.test_lora_files import FIVE, PROMPT, drawn, noise_of
from tests.models.tiny_policies import FACTS, NEGATIVE, ROWS, diffusers_latents

pytestmark = pytest.mark.heavy

CONFIG = LoraConfig(
    r=4, lora_alpha=8, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False
)


def by_diffusers(pipeline: Any, folder: Path) -> None:
    """Adapt the pipeline, and write its adapter as diffusers does."""
    pipeline.transformer.add_adapter(CONFIG)
    pipeline.save_lora_weights(
        folder,
        transformer_lora_layers=get_peft_model_state_dict(pipeline.transformer),
        transformer_lora_adapter_metadata={"r": 4, "lora_alpha": 8},
    )


def by_peft(pipeline: Any, folder: Path) -> None:
    """The same, as PEFT does."""
    model = peft.get_peft_model(pipeline.transformer, CONFIG)
    model.save_pretrained(str(folder))
    pipeline.transformer = model.merge_and_unload()


@pytest.mark.parametrize("write", [by_diffusers, by_peft])
@pytest.mark.parametrize("family", FIVE)
def test_step_0_of_a_run_draws_what_the_adapted_pipeline_draws(
    family: str, write: Callable[[Any, Path], None], tmp_path: Path, monkeypatch: Any
) -> None:
    row = ROWS[family]
    torch.manual_seed(3)
    pipeline = row.load(tiny.ensure(family))
    write(pipeline, tmp_path)
    size = [f"sampling.{key}={value}" for key, value in row.size.items()]
    lora = {"rank": 4, "alpha": 8, "targets": "[to_q,to_k,to_v]", "path": tmp_path}
    words = ["experiment=flux1_flowgrpo", f"model={next(iter(FACTS[family].models))}"]
    words += [f"model.lora.{key}={value}" for key, value in lora.items()]
    words += ["hardware=cpu_tiny", f"model.max_sequence_length={row.text_length}", *size]
    words += [f"model.negative_prompt='{NEGATIVE}'", "model.dtype=float32"]
    if "grid" in load(words).settings.node_at("model"):
        words.append("model.grid=explicit")  # as the row calls the pipeline
    policy = load(words).settings.build("model")
    noise, guidance = noise_of(policy), policy.guidance_scale
    plain = diffusers_latents(family, [PROMPT], noise, 4, guidance)
    monkeypatch.setitem(tiny_policies.ROWS, family, replace(row, load=lambda _: pipeline))
    theirs = diffusers_latents(family, [PROMPT], noise, 4, guidance)
    ours = drawn(policy)
    assert (ours - theirs).abs().max() <= 1e-4
    assert (ours - plain).abs().max() > 1e-3
