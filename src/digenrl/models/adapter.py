"""The trained part of a network: a low-rank adapter or all weights, and the base model behind it.

An `Adapter` is no `nn.Module`: the network and its frozen copy are submodules of the policy alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from digenrl.models.lora import (
    ADAPTER,
    AdaptedLinear,
    CastLinear,
    LoraKeys,
    LoraSpec,
    inject_lora,
    wide_dtype,
)


def cast_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Return the module's own parameters that autocast casts in every forward: those of matrix
    products and convolutions."""
    if isinstance(module, (nn.Linear, nn.Conv2d, nn.Conv3d)):
        yield from module.parameters(recurse=False)


class Adapter:
    """Trained parameters of `transformer` by their names in a checkpoint, and its base model.

    Args:
        family: name of the model family, for messages.
        transformer: the network; with LoRA already in its storage dtype, usually `dtype`.
        lora: the low-rank adapter to inject. None trains all weights in fp32 and computes under
            autocast to `dtype`; `reference` then needs the copy of `keep_reference`.
        dtype: dtype of the forward.
        keep_reference: keep a frozen copy of weights that are all trained. With LoRA the base under
            the adapter serves.
    """

    def __init__(
        self,
        family: str,
        transformer: nn.Module,
        lora: LoraKeys | LoraSpec | None,
        dtype: torch.dtype,
        keep_reference: bool = False,
    ) -> None:
        self.family, self.dtype = family, dtype
        self.lora = (
            lora if isinstance(lora, LoraSpec) or lora is None else LoraSpec.from_config(lora)
        )
        self.frozen_copy: nn.Module | None = None
        if self.lora is None:
            transformer.requires_grad_(True)
            for parameter in transformer.parameters():
                parameter.data = parameter.data.to(wide_dtype(dtype))
            if keep_reference:
                # After the cast, so that both compute alike.
                self.frozen_copy = copy.deepcopy(transformer).requires_grad_(False)
            self.lora_layers: list[str] = []
        else:
            self.lora_layers = inject_lora(transformer, self.lora)
        self._transformer = transformer
        self._adapted = tuple(
            layer for layer in transformer.modules() if isinstance(layer, AdaptedLinear)
        )
        self.in_reference = False
        """Whether velocities are the base model's at present."""
        self.samples = False
        """Whether velocities are those of the sampling adapter at present, where there is one."""
        self.loaded = self.lora is not None and self.lora.path is not None
        """Whether training starts from an adapter of a file."""

    def linear_sizes(self) -> dict[str, tuple[int, int]]:
        """Return the (input, output) features of every linear layer of the network."""
        return {
            # peft puts the layer itself under `base_layer`, beside its factors.
            name.removesuffix(".base_layer"): (module.in_features, module.out_features)
            for name, module in self._transformer.named_modules()
            if isinstance(module, nn.Linear) and not isinstance(module, CastLinear)
        }

    @torch.no_grad()
    def start_from(self, factors: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Give each adapted layer its factors A [r, in] and B [out, r]; rows where they are
        sharded."""
        for name, (down, up) in factors.items():
            layer: Any = self._transformer.get_submodule(name)
            layer.lora_A[ADAPTER].weight.copy_(down)
            layer.lora_B[ADAPTER].weight.copy_(up)

    def refer_to_start(self) -> None:
        """Let `reference` be the adapter of the file on the base, in place of the base alone.

        Raises:
            ValueError: no file was loaded.
        """
        if not self.loaded:
            raise ValueError(
                "algorithm.reference = start with model.lora.path = null: nothing was loaded, and "
                "a new adapter is the base itself; set algorithm.reference=base"
            )
        for adapted in self._adapted:
            layer: Any = adapted
            for key, factor in (("start_a", layer.lora_A), ("start_b", layer.lora_B)):
                # register_buffer refuses the name of an attribute that exists.
                delattr(layer, key)
                weight = factor[ADAPTER].weight.detach().clone()
                # Not persistent: no checkpoint of a run holds it.
                layer.register_buffer(key, weight, persistent=False)

    # ---- the base model

    @property
    def has_reference(self) -> bool:
        """Whether this rank has the base model: under an adapter, or as a frozen copy."""
        return self.lora is not None or self.frozen_copy is not None

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Make `Policy.velocity` that of the base model while the context is open: adapters off, or
        as they were loaded (`refer_to_start`), or the copy of full fine-tuning.

        Raises:
            RuntimeError: full fine-tuning without `keep_reference=True`.
        """
        if not self.has_reference:
            raise RuntimeError(
                "full fine-tuning keeps no reference model; set model.keep_reference=true or train "
                "LoRA"
            )
        before, self.in_reference = self.in_reference, True
        # peft's enable_adapters() would also switch requires_grad of every layer, twice per forward
        # of the base.
        for layer in self._adapted:
            layer._disable_adapters = True
        try:
            yield
        finally:
            self.in_reference = before
            for layer in self._adapted:
                layer._disable_adapters = before

    # ---- a constant adapter that only samples (`sampling.lora`)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Let forwards add the constant adapter of `sample_with` while the context is open. Without
        one nothing changes."""
        before, self.samples = self.samples, True
        try:
            yield
        finally:
            self.samples = before

    def sample_with(
        self, networks: Sequence[nn.Module], factors: Mapping[str, tuple[Tensor, Tensor]]
    ) -> None:
        """Add a constant adapter to the layers of each of `networks`, which counts inside
        `sampling` alone.

        Its factors are buffers in the dtype of the forward: nobody trains, publishes or saves them,
        and every rank adds the same bits. It stands beside the weights, and is not merged into
        them, so that a trainer can leave it between two forwards.

        Args:
            factors: layer -> (A [r, in], B [out, r]), the scale in B.
        """
        for network in networks:
            for name, (down, up) in factors.items():
                layer: Any = network.get_submodule(name)
                # Under a trained adapter: the layer itself stays what peft and exports know.
                linear: Any = layer.get_base_layer() if isinstance(layer, AdaptedLinear) else layer
                device = linear.weight.device if not linear.weight.is_meta else "cpu"
                for key, factor in (("sampling_a", down), ("sampling_b", up)):
                    buffer = factor.to(device, self.dtype)
                    linear.register_buffer(key, buffer, persistent=False)
                linear.register_forward_hook(self._add_sampling)

    def _add_sampling(self, linear: Any, inputs: tuple[Tensor, ...], rows: Tensor) -> Tensor | None:
        """Return a layer's output [..., out] with the constant adapter's; None: as it is."""
        if not self.samples:
            return None
        low = nn.functional.linear(inputs[0], linear.sampling_a.to(inputs[0].dtype))
        second = linear.sampling_b.to(rows.dtype)
        flat = torch.addmm(rows.flatten(0, -2), low.flatten(0, -2).to(rows.dtype), second.t())
        return flat.view(rows.shape)

    # ---- trained parameters

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Return name in the transformer -> parameter that requires a gradient, in the
        transformer's own order."""
        return {
            name: value
            for name, value in self._transformer.named_parameters()
            if value.requires_grad
        }

    def load_trained_parameters(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy `tensors` (names and shapes of `trained_parameters()`) into the network; ValueError
        on any mismatch."""
        own = self.trained_parameters()
        unknown, absent = sorted(set(tensors) - set(own)), sorted(set(own) - set(tensors))
        if unknown or absent:
            raise ValueError(
                f"trained parameters do not match this policy ({self.family}): {len(unknown)} "
                f"unknown {unknown[:3]}, "
                f"{len(absent)} missing {absent[:3]}; use the run's own model and lora settings"
            )
        with torch.no_grad():
            for name, parameter in own.items():
                if parameter.shape != tensors[name].shape:
                    raise ValueError(
                        f"{name} has shape {tuple(tensors[name].shape)}, policy "
                        f"{tuple(parameter.shape)}"
                    )
                parameter.copy_(tensors[name])

    def parameters_without_gradient(self) -> list[str]:
        """Return the names of trained parameters whose .grad is None. After a backward pass there
        must be none."""
        return [
            name for name, parameter in self.trained_parameters().items() if parameter.grad is None
        ]

    def merge(self) -> None:
        """Add the adapter to the weights that it adapts, rounded once to their dtype. Nothing of
        the network is trained afterwards.

        Raises:
            ValueError: a sum is not finite.
        """
        transformer: Any = self._transformer
        transformer.fuse_lora(safe_fusing=True)
        transformer.unload_lora()
        self.lora, self.lora_layers, self._adapted = None, [], ()

    # ---- ranks that only generate

    def only_generate(self) -> None:
        """Keep in `dtype` the weights that every forward casts to it anyway.

        A rank that never trains then needs half the memory, and a version half the bytes. The
        velocities are the same, bit by bit.
        """
        for parameter in self._cast_in_forwards():
            parameter.data = parameter.data.to(self.dtype)

    def generating_parameters(self) -> dict[str, Tensor]:
        """Return the trained parameters as a rank holds them that only generates: shapes and dtypes
        (meta tensors)."""
        cast = {id(parameter) for parameter in self._cast_in_forwards()}
        return {
            name: torch.empty(
                value.shape, dtype=self.dtype if id(value) in cast else value.dtype, device="meta"
            )
            for name, value in self.trained_parameters().items()
        }

    def _cast_in_forwards(self) -> list[nn.Parameter]:
        """Return the fp32 parameters that every forward casts to `dtype`.

        Autocast casts most of them. An adapter casts its own factors, unless the adapted layer
        computes in fp32.
        """
        modules = list(self._transformer.modules())
        if self.lora is not None:
            layers = [
                layer
                for layer in self._adapted
                if layer.get_base_layer().weight.dtype != wide_dtype(self.dtype)
            ]
            modules = [
                factor
                for layer in layers
                for factor in layer.modules()
                if isinstance(factor, CastLinear)
            ]
        return [parameter for module in modules for parameter in cast_parameters(module)]
