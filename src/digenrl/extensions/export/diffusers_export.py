"""Write trained weights in the layout that a plain diffusers pipeline loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor

from digenrl.extensions.export.lora_layouts import in_layout
from digenrl.models.lora import ADAPTER
from digenrl.models.policy import Policy

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, ModelMixin

LORA_FILE, FIRST = "pytorch_lora_weights.safetensors", ".lora_A.weight"


class ExportError(RuntimeError):
    """The weights cannot be written in the layout that was asked for."""


def export_policy(policy: Policy, folder: Path) -> list[Path]:
    """Write the policy's weights into `folder` and return the files.

    An adapter becomes `pytorch_lora_weights.safetensors` with its configuration in the header.
    Without the header diffusers would assume alpha = rank, a scale that the policy was not trained
    with. Full weights become `transformer/`, in their own dtype. Raises ExportError for adapters
    that no pipeline reads.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if policy.adapter.lora is None:
        return _export_transformers(policy, folder)
    transformer: Any = policy.transformer
    files = []
    for subfolder, layers in _component_adapters(policy):
        metadata = transformer.peft_config[ADAPTER].to_dict()
        metadata["target_modules"] = sorted(
            name.removesuffix(FIRST) for name in layers if name.endswith(FIRST)
        )
        file = folder / lora_file(subfolder)
        lora_pipeline(policy).save_lora_weights(
            folder,
            transformer_lora_layers=layers,
            transformer_lora_adapter_metadata=metadata,
            weight_name=file.name,
        )
        files.append(file)
    return files


def lora_pipeline(policy: Policy | type[Policy]) -> type[DiffusionPipeline]:
    """Return the diffusers class that reads and writes the family's adapters."""
    import diffusers

    name = policy.lora_pipeline or next(iter(policy.pipelines), None)
    if name is None:
        raise ExportError(
            f"no pipeline of diffusers reads adapters of {policy.family}: use merge=true"
        )
    found: type[DiffusionPipeline] = getattr(diffusers, name)
    return found


def _component_adapters(policy: Policy) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield (subfolder, tensors of the adapter) for every component."""
    transformer: Any = policy.transformer
    layers = get_peft_model_state_dict(transformer)
    for subfolder, prefix in policy.components.items():
        own = {
            name.removeprefix(prefix): value
            for name, value in layers.items()
            if name.startswith(prefix)
        }
        yield subfolder, {name: value.detach().cpu().contiguous() for name, value in own.items()}


def component_network(policy: Policy, prefix: str) -> ModelMixin:
    """Return the network whose tensor names begin with `prefix` in the policy's transformer."""
    return policy.transformer.get_submodule(prefix.removesuffix("."))


def lora_file(subfolder: str) -> str:
    """Return the name of a component's adapter file. A second transformer's name has its number."""
    return LORA_FILE.replace("weights", f"weights{subfolder.removeprefix('transformer')}")


def export_layout(policy: Policy, folder: Path, layout: str) -> list[Path]:
    """Write the adapter into `folder` under the names of another tool's layout
    (`lora_layouts.LAYOUTS`).

    Raises ExportError if all weights were trained, or if names are not known.
    """
    if policy.adapter.lora is None:
        raise ExportError(
            f"format={layout} is for adapters, and this run trained all weights: use "
            "format=diffusers"
        )
    files = []
    for subfolder, layers in _component_adapters(policy):
        try:
            names, swapped = policy.checkpoint_names, policy.swapped_halves
            renamed = in_layout(layers, policy.adapter.lora.alpha, names, layout, swapped)
        except ValueError as error:
            raise ExportError(f"format={layout}: {error}") from error
        file = folder / f"lora_{layout}{subfolder.removeprefix('transformer')}.safetensors"
        save_file({name: value.contiguous() for name, value in renamed.items()}, file)
        files.append(file)
    return files


def _export_transformers(policy: Policy, folder: Path) -> list[Path]:
    written = list[Path]()
    for subfolder, prefix in policy.components.items():
        target = folder / subfolder
        component_network(policy, prefix).save_pretrained(target)
        written += [target / "config.json", *sorted(target.glob("*.safetensors"))]
    return written
