"""The policy protocol: the network of a model family, and what guidance makes of its forwards.

A policy has three parts. The network is here: everything that computes a velocity. Its `codec`
(`digenrl.models.codec`) turns prompts into conditioning and latents into media. Its `adapter`
(`digenrl.models.adapter`) knows what is trained, and the base model behind it.

A family implements `predict` (one conditional forward) and `sigma_grid`, and names its codec.

Shapes: B rows, *L latent dimensions of one sample (packed families: [N, C]), T denoising steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, Literal, TypedDict

import torch
from torch import Tensor, nn

from digenrl import accelerator
from digenrl.models import checkpointing
from digenrl.models.adapter import Adapter
from digenrl.models.codec import Codec
from digenrl.models.guidance import NEGATIVE
from digenrl.models.lora import LoraKeys, LoraSpec, Names, wide_dtype
from digenrl.models.lora_files import digest_of, read_adapter, read_sampling_adapter
from digenrl.recompute import parse_recompute


class ModelKeys(TypedDict, total=False):
    """Keys of the group `model` that are read before a policy is built."""

    build: Literal["tiny", "real"]
    path: str | None
    height: int
    width: int
    frames: int
    lora: LoraKeys | None
    quantize: Literal["nf4", "int8"] | None
    attention_backend: str | None
    compile: bool


RecomputeConfig = bool | float | str | Mapping[str, float] | None
"""`model.gradient_checkpointing` (see `digenrl.recompute`)."""


class Policy(nn.Module, ABC):
    """A frozen or trained velocity network with its codec and its adapter (see the module
    docstring).

    Args:
        transformer: the network. With LoRA it is already in its storage dtype, usually `dtype`.
        codec: encoders and decoder around `transformer`, with the scales of guidance.
        lora, dtype, keep_reference: see `Adapter`.
        gradient_checkpointing: see `digenrl.recompute`.
    """

    family: ClassVar[str]
    codec_class: ClassVar[type[Codec]]
    """Encoders and decoder of the family."""
    adapter_class: ClassVar[type[Adapter]] = Adapter
    codec: Codec
    adapter: Adapter
    block_lists: ClassVar[tuple[str, ...]] = ("transformer_blocks",)
    """The transformer's lists of blocks."""
    pipelines: ClassVar[tuple[str, ...]] = ()
    """Pipelines of diffusers (`_class_name` of model_index.json) whose checkpoints the family
    reads."""
    lora_pipeline: ClassVar[str | None] = None
    """Pipeline that reads and writes adapters, unless that is the first of `pipelines`."""
    swapped_halves: ClassVar[tuple[str, ...]] = ()
    """Layers of a block whose two halves of outputs a checkpoint has in the other order."""
    checkpoint_names: ClassVar[Names | None] = None
    """Names of the network's layers in the model's own checkpoint; None: not known."""
    components: ClassVar[Mapping[str, str]] = {"transformer": ""}
    """Subfolder of a checkpoint in diffusers layout -> prefix of its tensors' names in
    `transformer`."""
    context_plan: ClassVar[dict[str, Any]] = {}
    """Layers at which a context group splits the tokens of a forward and gathers them again, in the
    form of diffusers' hooks. {}: the tokens cannot be split."""
    transformer: nn.Module
    latent_shape: tuple[int, ...]
    """*L of one sample at the configured height, width and frames."""
    drawn: int | None = None
    """Number of leading tokens of packed latents that an SDE draws, see `Kernel.transition`; None:
    all."""
    modalities: ClassVar[tuple[str, ...]] = ()
    """Modalities that are trained beside each other ("video", "audio"), see
    `Codec.modality_tokens`. (): one, which has no name."""
    own_levels: ClassVar[bool] = False
    """Whether the tokens that are not drawn have noise levels of their own, see `paced`. Methods
    that noise clean samples refuse such a family."""
    embedded_guidance: ClassVar[bool] = False
    """Whether the guidance scale is an input of the network, not a second forward."""
    sampling_digest: str | None = None
    """Digest of the adapter that samples (`sample_with`); None: there is none."""
    detach_unconditional: bool = False
    """Whether only the conditional branch of classifier-free guidance gets gradient
    (`algorithm.detach_uncond`)."""

    def __init__(
        self,
        transformer: nn.Module,
        codec: Codec,
        lora: LoraKeys | LoraSpec | None = None,
        dtype: torch.dtype | str = torch.float32,
        gradient_checkpointing: RecomputeConfig = False,
        keep_reference: bool = False,
    ) -> None:
        super().__init__()
        self.codec = codec
        self.latent_shape = codec.latent_shape
        self.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        self.adapter = self.adapter_class(
            self.family, transformer, lora, self.dtype, keep_reference
        )
        if (factors := self.loaded_factors()) is not None:
            self.adapter.start_from(factors)
        # Submodules of the policy alone: what moves, shards or saves it finds each network once.
        self.reference_transformer = self.adapter.frozen_copy
        self.transformer = transformer
        # The blocks of a reference copy have no backward pass.
        trained = set(transformer.modules())
        checkpointing.enable_recompute(
            transformer,
            [b for b in self.wrap_units() if b in trained],
            parse_recompute(gradient_checkpointing),
        )

    def loaded_factors(self) -> dict[str, tuple[Tensor, Tensor]] | None:
        """Return the factors A and B of each adapted layer from the file of `model.lora.path`; None
        where the adapter is a new one.

        Raises:
            LoraFileError: the file is no adapter of these layers.
        """
        spec = self.adapter.lora
        if spec is None or spec.path is None:
            return None
        return read_adapter(
            spec,
            self.adapter.lora_layers,
            self.adapter.linear_sizes(),
            self.components,
            self.checkpoint_names,
            self.swapped_halves,
        )

    def sample_with(self, path: str) -> None:
        """Load the adapter of `sampling.lora`, which counts inside `adapter.sampling()` alone. A
        second call changes nothing.

        Raises:
            LoraFileError: the file is no adapter of this network.
        """
        if self.sampling_digest is not None:
            return
        sizes = self.adapter.linear_sizes()
        names = self.checkpoint_names, self.swapped_halves
        factors = read_sampling_adapter(path, sizes, self.components, *names)
        self.adapter.sample_with(self.all_networks(), factors)
        self.sampling_digest = digest_of(factors)

    @classmethod
    def outline(cls, settings: ModelKeys) -> nn.Module | None:
        """Return the network of a model config (its YAML's keys) without weights, on the device
        "meta"; None where nobody knows its layers."""
        return None

    @classmethod
    def check(cls, settings: ModelKeys) -> None:
        """Refuse a model config (its YAML's keys) that cannot be built, as far as small files show
        it, before any rank starts.

        Raises:
            ValueError: the config cannot be built.
        """

    # ---- what a family implements

    @abstractmethod
    def predict(self, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
        """Run `self.network` once: latents [B, *L] in `self.dtype`, sigmas [B] fp32 -> velocity [B,
        *L]."""

    @abstractmethod
    def sigma_grid(self, steps: int) -> Tensor:
        """Return [steps + 1] fp32 on CPU, from about 1 down to 0, with the family's own shift."""

    def add_family_parts(self) -> None:
        """Add what a family has beside its network; the constructor calls this last.

        A family overrides this method instead of `__init__`: the configuration's keys are checked
        against the arguments of `__init__`, which `**kwargs` would hide.
        """

    def wrap_units(self) -> list[nn.Module]:
        """Return the blocks that FSDP wraps one by one, of the trained network and of the reference
        copy if there is one."""
        return [
            block
            for network in self.all_networks()
            for name in self.block_lists
            for block in getattr(network, name)
        ]

    def attention_used(self, device: torch.device) -> dict[str, str]:
        """Return the attention that the network uses on `device`, for the run's record. `backend`
        is its name. `kernel` is what PyTorch chooses for attention without a mask, if PyTorch
        chooses. {}: the family does not say."""
        return {}

    def all_networks(self) -> list[nn.Module]:
        """Return the trained network, and the reference copy if there is one."""
        return [
            network
            for network in (self.transformer, self.reference_transformer)
            if network is not None
        ]

    def guide(self, conditional: Tensor, unconditional: Tensor, scale: float | Tensor) -> Tensor:
        """Return the classifier-free guidance of two fp32 velocities [B, *L] (Ho & Salimans 2022,
        arXiv:2207.12598).

        `scale` is one number, or one per row.
        """
        return unconditional + scale * (conditional - unconditional)

    def cfg_scale_at(self, sigmas: Tensor) -> float | Tensor:
        """Return the scale for rows of these noise levels [B], as `guide` takes it."""
        return self.cfg_scale

    def paced(self, velocity: Tensor, sigmas: Tensor, following: Tensor) -> Tensor:
        """Return the velocity [B, *L] of a step between the noise levels `sigmas` and `following`
        [B]. A family whose undrawn tokens have noise levels of their own scales theirs, so that the
        one Euler step takes them to their next level."""
        return velocity

    # ---- what everybody calls

    @property
    def network(self) -> nn.Module:
        """Transformer that `predict` must call: the trained one, or the reference inside
        `adapter.reference()`."""
        if self.adapter.in_reference and self.reference_transformer is not None:
            return self.reference_transformer
        return self.transformer

    @property
    def drawn_shape(self) -> tuple[int, ...]:
        """Shape of the drawn part of a sample. Means have this shape, over which log-probs are
        averaged."""
        return self.latent_shape if self.drawn is None else (self.drawn, *self.latent_shape[1:])

    @property
    def guidance_scale(self) -> float:
        """`sampling.guidance_scale`."""
        return self.codec.guidance.scale

    @property
    def cfg_scale(self) -> float:
        """Scale of guidance by a second, unconditional forward; 1 = off."""
        return self.codec.guidance.cfg_scale

    @property
    def two_forwards(self) -> bool:
        """Whether `velocity` needs the `negative_...` conditioning."""
        return self.codec.guidance.two_forwards

    @property
    def device(self) -> torch.device:
        """Device of the transformer's weights."""
        return next(self.transformer.parameters()).device

    def to_device(self, host: Tensor) -> Tensor:
        """Return a tensor of the host on this device. An accelerator copies it from pinned memory
        in the order of its stream; from other memory the host would wait for the velocity."""
        own = accelerator.is_own(self.device)
        return (host.pin_memory() if own else host).to(self.device, non_blocking=own)

    def velocity(self, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
        """Return the guided velocity eps - x0, differentiable.

        latents [B, *L], sigmas [B] (one noise level per row), condition with leading dimension B ->
        [B, *L] fp32. Both branches of classifier-free guidance share one forward of 2B rows, the
        unconditional rows first. With `detach_unconditional` each has a forward of its own, without
        gradient in the unconditional one.
        """
        latents = latents.to(self.dtype)
        # Noise levels stay in fp32 at least: bf16 rounds them by up to 0.2 %.
        sigmas = sigmas.to(wide_dtype(self.dtype))
        positive = {key: value for key, value in condition.items() if not key.startswith(NEGATIVE)}
        # With an adapter, frozen weights are stored in `dtype`, and its factors cast themselves.
        autocast = self.adapter.lora is None and self.dtype != wide_dtype(self.dtype)
        # Every weight is cast once per forward: a cache of the casts would only hold a second copy
        # of the network.
        half = (
            torch.autocast(latents.device.type, dtype=self.dtype, cache_enabled=False)
            if autocast
            else None
        )
        with half or nullcontext():
            if not self.two_forwards:
                return self._velocity_of(latents, self.predict(latents, sigmas, positive))
            scale = self.cfg_scale
            if self.detach_unconditional:
                with torch.no_grad():
                    output = self.predict(
                        latents,
                        sigmas,
                        {key: _negative_part(condition, key, scale) for key in positive},
                    )
                output = torch.cat([output, self.predict(latents, sigmas, positive)])  # [2B, *L]
            else:
                both = {
                    key: torch.cat([_negative_part(condition, key, scale), value])
                    for key, value in positive.items()
                }
                # [2B, *L] of latents [2B, *L] and sigmas [2B]
                output = self.predict(torch.cat([latents] * 2), torch.cat([sigmas] * 2), both)
        # The unconditional rows come first.
        unconditional, conditional = (self._velocity_of(latents, each) for each in output.chunk(2))
        return self.guide(conditional, unconditional, self.cfg_scale_at(sigmas))

    def _velocity_of(self, latents: Tensor, output: Tensor) -> Tensor:
        """Return the output of `predict`, at least in fp32. Another shape would be broadcast to a
        wrong velocity, and is refused."""
        if output.shape != latents.shape:
            raise ValueError(
                f"{self.family}: `predict` gave {[*output.shape]} for latents {[*latents.shape]}; "
                "it must return the velocity in their shape: override `predict`, or "
                "`latent_shape_of` of the codec"
            )
        # [B, *L]
        return output.to(wide_dtype(output.dtype))

    @contextmanager
    def guided_by(self, scale: float | None) -> Iterator[None]:
        """Replace sampling.guidance_scale by `scale` while the context is open, in `codec.encode`
        too (evaluation). None changes nothing.

        Raises:
            ValueError: the family knows no guidance.
        """
        guidance = self.codec.guidance
        before = guidance.scale
        if scale is not None and scale != before:
            if not (guidance.cfg or self.embedded_guidance):
                raise ValueError(
                    f"sampling.eval.guidance_scale = {scale}: {self.family} has no unconditional "
                    "branch; set it to null"
                )
            # The codec holds the same object, so it encodes negative prompts where they are needed
            # now.
            guidance.scale = float(scale)
        try:
            yield
        finally:
            guidance.scale = before

    def fill(self, device: torch.device) -> None:
        """Give parameters that were built without memory their values, on `device`. The others stay
        where they are."""


def _negative_part(condition: dict[str, Tensor], key: str, scale: float) -> Tensor:
    """Return a part of the unconditional branch's conditioning."""
    try:
        return condition[NEGATIVE + key]
    except KeyError:
        raise ValueError(
            f"guidance scale {scale} needs condition['{NEGATIVE}{key}'], got "
            f"{sorted(condition)}: encode the prompts with this policy"
        ) from None
