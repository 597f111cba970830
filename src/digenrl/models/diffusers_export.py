"""Trained weights in the layout that a plain diffusers pipeline loads, checked by reading them back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from peft.utils import get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from digenrl.models.lora import ADAPTER
from digenrl.models.lora_layouts import in_layout
from digenrl.models.policy import Policy

LORA_FILE = "pytorch_lora_weights.safetensors"
PIPELINES = {
    "WanTransformer3DModel": "WanPipeline",
    "HunyuanVideoTransformer3DModel": "HunyuanVideoPipeline",
    "FluxTransformer2DModel": "FluxPipeline",
    "QwenImageTransformer2DModel": "QwenImagePipeline",
    "SD3Transformer2DModel": "StableDiffusion3Pipeline",
    "ZImageTransformer2DModel": "ZImagePipeline",
    "AuraFlowTransformer2DModel": "AuraFlowPipeline",
    "Flux2Transformer2DModel": "Flux2KleinPipeline",
}
"""Transformer class -> the pipeline whose `load_lora_weights` reads the file."""


class ExportError(RuntimeError):
    """What was read back is not what was written."""


def export_policy(policy: Policy, folder: Path) -> list[Path]:
    """Write the policy's trained weights into `folder`; returns the files.

    LoRA: `pytorch_lora_weights.safetensors` with the adapter's configuration in its header. Without the header
    diffusers takes alpha = rank, a scale that the policy was not trained with. Full fine-tuning: `transformer/`, in
    the weights' own dtype. Raises ExportError when a tensor or the scale does not survive the round trip.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if policy.lora is None:
        return _export_transformer(policy, folder)
    import diffusers

    transformer: Any = policy.transformer
    layers = {key: value.contiguous() for key, value in get_peft_model_state_dict(transformer).items()}
    getattr(diffusers, PIPELINES[type(transformer).__name__]).save_lora_weights(
        folder,
        transformer_lora_layers=layers,
        transformer_lora_adapter_metadata=transformer.peft_config[ADAPTER].to_dict(),
    )
    _check_lora(folder / LORA_FILE, layers, policy.lora.rank, policy.lora.alpha)
    return [folder / LORA_FILE]


def export_layout(policy: Policy, folder: Path, layout: str) -> Path:
    """Write the adapter into `folder` under the names of another tool's layout (`lora_layouts.LAYOUTS`).

    Raises ExportError where all weights were trained, or names are not known.
    """
    if policy.lora is None:
        raise ExportError(f"format={layout} is for adapters, and this run trained all weights: use format=diffusers")
    transformer: Any = policy.transformer
    layers = {name: value.detach().cpu() for name, value in get_peft_model_state_dict(transformer).items()}
    try:
        renamed = in_layout(layers, policy.lora.alpha, type(transformer).__name__, layout)
    except ValueError as error:
        raise ExportError(f"format={layout}: {error}") from error
    file = folder / f"lora_{layout}.safetensors"
    save_file({name: value.contiguous() for name, value in renamed.items()}, file)
    return file


def _check_lora(file: Path, layers: dict[str, Tensor], rank: int, alpha: float) -> None:
    with safe_open(file, framework="pt") as stored:
        names, metadata = set(stored.keys()), stored.metadata() or {}
        expected = {f"transformer.{name}": value for name, value in layers.items()}
        if names != set(expected):
            raise ExportError(f"{file} holds other tensors than the adapter: {sorted(names ^ set(expected))[:4]}")
        for name, value in expected.items():
            if not torch.equal(stored.get_tensor(name), value.detach().cpu()):
                raise ExportError(f"{file}: {name} changed on the way to disk")
    configuration = json.loads(metadata.get("lora_adapter_metadata", "{}"))
    found = (configuration.get("transformer.r"), configuration.get("transformer.lora_alpha"))
    if found != (rank, alpha):
        raise ExportError(f"{file} says rank, alpha = {found}, the policy has {(rank, alpha)}: its scale would be lost")


def _export_transformer(policy: Policy, folder: Path) -> list[Path]:
    transformer: Any = policy.transformer
    target = folder / "transformer"
    transformer.save_pretrained(target)
    trained, seen = policy.trained_parameters(), set()
    files = sorted(target.glob("*.safetensors"))
    for file in files:
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118  # safe_open is no mapping
                seen.add(name)
                if name in trained and not torch.equal(stored.get_tensor(name), trained[name].detach().cpu()):
                    raise ExportError(f"{file}: {name} changed on the way to disk")
    if missing := sorted(set(trained) - seen):
        raise ExportError(f"{target} lacks {len(missing)} trained tensors, first {missing[0]}")
    return [target / "config.json", *files]
