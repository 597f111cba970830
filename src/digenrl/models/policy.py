"""The policy protocol: everything that sampling, replay, the algorithms and the Strategy may ask of
any model family.

Shapes: B rows, *L latent dimensions of one sample (packed families: [N, C]), T denoising steps.

A family implements `predict` (one conditional forward), `encode_prompts`, `decode`, `sigma_grid`
and `wrap_units`. This module has what is the same for all families: guidance by two forwards, the
embedding cache, LoRA, the reference model and dtypes.
"""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from digenrl import accelerator
from digenrl.images import PromptImage
from digenrl.models import checkpointing
from digenrl.models.lora import AdaptedLinear, CastLinear, LoraSpec, Names, inject_lora, wide
from digenrl.models.wording import Condition, ConditionStore, Wording
from digenrl.recompute import parse_recompute
from digenrl.types import Prompt, move

logger = logging.getLogger(__name__)

NEGATIVE = "negative_"
"""Prefix of the conditioning of the unconditional branch of classifier-free guidance."""
RecomputeConfig = bool | float | str | Mapping[str, float] | None
"""`model.gradient_checkpointing` (see `digenrl.recompute`)."""
CACHED_TEXTS = 1024
"""Wordings whose embeddings stay on the CPU (4 MB each at 512 tokens x 4096 in bf16). The least
recently used go first."""


def _widen(tensor: Tensor) -> Tensor:
    return tensor.to(wide(tensor.dtype))


def cast_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Return the module's own parameters that autocast casts in every forward: those of matrix
    products and convolutions."""
    if isinstance(module, (nn.Linear, nn.Conv2d, nn.Conv3d)):
        yield from module.parameters(recurse=False)


class Policy(nn.Module, ABC):
    """A frozen or trained velocity network with its text encoders and decoder (see the module
    docstring)."""

    family: ClassVar[str]
    reads: ClassVar[Mapping[str, tuple[int, int]]] = {}
    """Role of an image (`digenrl.images.ROLES`) -> least and largest number of such images that a
    prompt has here."""
    block_lists: ClassVar[tuple[str, ...]] = ("transformer_blocks",)
    """The transformer's lists of blocks."""
    pipelines: ClassVar[tuple[str, ...]] = ()
    """Pipelines of diffusers (`_class_name` of model_index.json) whose checkpoints the family
    reads."""
    lora_pipeline: ClassVar[str | None] = None
    """Pipeline that reads and writes adapters, unless that is the first of `pipelines`."""
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
    own_levels: ClassVar[bool] = False
    """Whether the tokens that are not drawn have noise levels of their own, see `paced`. Methods
    that noise clean samples refuse such a family."""
    guidance_scale: float
    embedded_guidance: ClassVar[bool] = False
    """Whether the guidance scale is an input of the network, not a second forward."""
    detach_unconditional: bool = False
    """Whether only the conditional branch of classifier-free guidance gets gradient
    (`algorithm.detach_uncond`)."""

    def __init__(
        self,
        transformer: nn.Module,
        latent_shape: tuple[int, ...],
        guidance_scale: float = 1.0,
        lora: Mapping[str, Any] | LoraSpec | None = None,
        dtype: torch.dtype | str = torch.float32,
        gradient_checkpointing: RecomputeConfig = False,
        keep_reference: bool = False,
        cfg: bool = False,
    ) -> None:
        """Take `transformer` (with LoRA: already in its storage dtype, usually `dtype`) and make it
        trainable.

        `lora=None` trains all weights in fp32 and computes under autocast to `dtype`; `reference()`
        then needs the frozen copy that `keep_reference=True` makes (with LoRA the base under the
        adapter serves). `cfg=True` means guidance by a second, unconditional forward whenever
        guidance_scale > 1; False leaves it to `predict`.
        """
        super().__init__()
        self.latent_shape = tuple(latent_shape)
        self.guidance_scale = float(guidance_scale)
        self.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        self._cfg, self.cfg_scale = cfg, self.guidance_scale if cfg else 1.0
        self.lora = (
            lora if isinstance(lora, LoraSpec) or lora is None else LoraSpec.from_config(lora)
        )
        self.reference_transformer: nn.Module | None = None
        if self.lora is None:
            transformer.requires_grad_(True)
            for parameter in transformer.parameters():
                parameter.data = parameter.data.to(wide(self.dtype))
            if keep_reference:
                self.reference_transformer = copy.deepcopy(transformer).requires_grad_(False)
            self.lora_layers: list[str] = []
        else:
            self.lora_layers = inject_lora(transformer, self.lora)
        self._adapted = tuple(
            layer for layer in transformer.modules() if isinstance(layer, AdaptedLinear)
        )
        self.transformer = transformer
        trained = set(transformer.modules())
        checkpointing.enable(
            transformer,
            [b for b in self.wrap_units() if b in trained],
            parse_recompute(gradient_checkpointing),
        )
        self.in_reference = False
        """Whether `velocity` is the base model's at present."""
        self._embeddings: OrderedDict[Wording, Condition] = OrderedDict()
        self.store: ConditionStore | None = None
        self._said: set[str] = set()

    @classmethod
    def check(cls, settings: Mapping[str, Any]) -> None:
        """Refuse a model config (its YAML's keys) that cannot be built, as far as small files show
        it, before any rank starts.

        Raises:
            ValueError: the config cannot be built.
        """

    @classmethod
    def check_prompt(cls, prompt: Prompt) -> None:
        """Raise ValueError for a prompt with fewer or more images of a role than the family
        takes."""
        for role, (least, most) in cls.reads.items():
            given = sum(image.role == role for image in prompt.images)
            if not least <= given <= most:
                takes = least if least == most else f"{least} to {most}"
                raise ValueError(
                    f"{cls.family} takes {takes} images of role {role}, the prompt has {given}."
                )

    # ---- what a family implements

    @abstractmethod
    def predict(self, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
        """Run `self.network` once: latents [B, *L] in `self.dtype`, sigmas [B] fp32 -> velocity [B,
        *L]."""

    @abstractmethod
    def encode_prompts(self, wordings: Sequence[Wording]) -> dict[str, Tensor]:
        """Return the conditioning of `wordings` on `self.device`. Every tensor has leading
        dimension len(wordings).

        Shapes and values of a row must not depend on the other wordings, so that rows of different
        prompts can be concatenated.
        """

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents [B, *L] -> media in [0, 1] fp32: images [B, C, H, W], videos [B, F, C, H,
        W]."""

    def encode_media(self, images: Sequence[PromptImage]) -> Tensor:
        """Return the clean latents [B, *L] of B pictures: what `decode` inverts.

        Raises:
            ValueError: the family cannot read samples from files.
        """
        raise ValueError(
            f"data.samples = files: {self.family} has no `encode_media`, which turns a picture "
            "into latents; write it, or use data.samples=generated."
        )

    @abstractmethod
    def sigma_grid(self, steps: int) -> Tensor:
        """Return [steps + 1] fp32 on CPU, from about 1 down to 0, with the family's own shift."""

    def wrap_units(self) -> list[nn.Module]:
        """Return the blocks that FSDP wraps one by one, of the trained network and of the reference
        copy if there is one."""
        return [
            block
            for network in self.networks()
            for name in self.block_lists
            for block in getattr(network, name)
        ]

    def attention_used(self, device: torch.device) -> dict[str, str]:
        """Return the attention that the network uses on `device`, for the run's record: `backend`,
        and the `kernel` without a mask where PyTorch chooses it. {}: the family does not say."""
        return {}

    def networks(self) -> list[nn.Module]:
        """Return the trained network, and the reference copy if there is one."""
        return [
            network
            for network in (self.transformer, self.reference_transformer)
            if network is not None
        ]

    def default_negative(self) -> str | None:
        """Return the text of the unconditional branch when a prompt brings none; None = there is no
        default."""
        return None

    def guide(self, conditional: Tensor, unconditional: Tensor, scale: float | Tensor) -> Tensor:
        """Return the classifier-free guidance of two fp32 velocities [B, *L] (Ho & Salimans 2022,
        arXiv:2207.12598).

        `scale` is one number, or one per row.
        """
        return unconditional + scale * (conditional - unconditional)

    def guidance(self, sigmas: Tensor) -> float | Tensor:
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
        `reference()`."""
        if self.in_reference and self.reference_transformer is not None:
            return self.reference_transformer
        return self.transformer

    @property
    def drawn_shape(self) -> tuple[int, ...]:
        """Shape of the drawn part of a sample. Means have this shape, over which log-probs are
        averaged."""
        return self.latent_shape if self.drawn is None else (self.drawn, *self.latent_shape[1:])

    @property
    def two_forwards(self) -> bool:
        """Whether `velocity` needs the `negative_...` conditioning."""
        return self.cfg_scale > 1.0

    @property
    def device(self) -> torch.device:
        """Device of the transformer's weights."""
        return next(self.transformer.parameters()).device

    def sent(self, host: Tensor) -> Tensor:
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
        sigmas = sigmas.to(wide(self.dtype))
        positive = {key: value for key, value in condition.items() if not key.startswith(NEGATIVE)}
        autocast = self.lora is None and self.dtype != wide(self.dtype)
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
            if self.detach_unconditional:
                with torch.no_grad():
                    output = self.predict(
                        latents, sigmas, {key: self._negative(condition, key) for key in positive}
                    )
                output = torch.cat([output, self.predict(latents, sigmas, positive)])
            else:
                both = {
                    key: torch.cat([self._negative(condition, key), value])
                    for key, value in positive.items()
                }
                output = self.predict(torch.cat([latents] * 2), torch.cat([sigmas] * 2), both)
        unconditional, conditional = (self._velocity_of(latents, each) for each in output.chunk(2))
        return self.guide(conditional, unconditional, self.guidance(sigmas))

    def _velocity_of(self, latents: Tensor, output: Tensor) -> Tensor:
        """Return the output of `predict`, at least in fp32. Another shape would be broadcast to a
        wrong velocity, and is refused."""
        if output.shape != latents.shape:
            raise ValueError(
                f"{self.family}: `predict` gave {[*output.shape]} for latents {[*latents.shape]}; "
                "it must return the velocity in their shape: override `predict`, or `_latent_shape`"
            )
        return _widen(output)

    def encode(self, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        """Return the conditioning with leading dimension len(prompts), on `self.device`. Each
        wording is encoded once and kept.

        With classifier-free guidance the conditioning includes the `negative_...` tensors.

        Raises:
            ValueError: a negative prompt is needed, and neither the prompt nor the family has one.
        """
        positive, negative = self.wordings(prompts)
        wanted = list(dict.fromkeys(positive + negative))
        missing = [
            each for each in wanted if each not in self._embeddings and not self._stored(each)
        ]
        if missing:
            with torch.no_grad():
                encoded = self.encode_prompts(missing)
            for row, each in enumerate(missing):
                self._embeddings[each] = {
                    key: value[row : row + 1].cpu().clone() for key, value in encoded.items()
                }
        for each in wanted:
            self._embeddings.move_to_end(each)
        condition = self._rows(positive)
        if negative:
            condition |= {NEGATIVE + key: value for key, value in self._rows(negative).items()}
        elif any(prompt.negative for prompt in prompts):
            message = (
                f"negative prompts are ignored: {self.family} runs without classifier-free "
                "guidance here"
            )
            self.say_once("negative", message)
        if not self.reads and any(
            image.role in ("image", "last_image") for prompt in prompts for image in prompt.images
        ):
            self.say_once("images", f"images of prompts are ignored: {self.family} reads none")
        while len(self._embeddings) > CACHED_TEXTS:
            self._embeddings.popitem(last=False)
        return move(self.trimmed(condition), self.device)

    def trimmed(self, condition: Condition) -> Condition:
        """Return the kept conditioning (on the CPU) as `encode` gives it. A family may leave out
        what no row reads.

        The result must not depend on which prompts were asked for together.
        """
        return condition

    def say_once(self, topic: str, message: str) -> None:
        """Log `message` as a warning, the first time that this policy warns about `topic`."""
        if topic not in self._said:
            self._said.add(topic)
            logger.warning(message)

    @contextmanager
    def guided(self, scale: float | None) -> Iterator[None]:
        """Replace sampling.guidance_scale by `scale` while the context is open, in `encode` too
        (evaluation). None changes nothing.

        Raises:
            ValueError: the family knows no guidance.
        """
        own = self.guidance_scale, self.cfg_scale
        if scale is not None and scale != self.guidance_scale:
            if not (self._cfg or self.embedded_guidance):
                raise ValueError(
                    f"sampling.eval.guidance_scale = {scale}: {self.family} has no unconditional "
                    "branch; set it to null"
                )
            self.guidance_scale = float(scale)
            self.cfg_scale = self.guidance_scale if self._cfg else self.cfg_scale
        try:
            yield
        finally:
            self.guidance_scale, self.cfg_scale = own

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Make `velocity` that of the base model while the context is open: adapters off, or the
        copy of full fine-tuning.

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

    @property
    def has_reference(self) -> bool:
        """Whether this rank has the base model: under an adapter, or as a frozen copy."""
        return self.lora is not None or self.reference_transformer is not None

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Return name in `transformer` -> parameter that requires a gradient, in the transformer's
        own order."""
        return {
            name: value
            for name, value in self.transformer.named_parameters()
            if value.requires_grad
        }

    def load_trained_parameters(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy `tensors` (names and shapes of `trained_parameters()`) into the policy; ValueError
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

    def merge_adapter(self) -> None:
        """Add the adapter to the weights that it adapts, rounded once to their dtype. Nothing of
        the policy is trained afterwards.

        Raises:
            ValueError: a sum is not finite.
        """
        transformer: Any = self.transformer
        transformer.fuse_lora(safe_fusing=True)
        transformer.unload_lora()
        self.lora, self.lora_layers, self._adapted = None, [], ()

    def only_generate(self) -> None:
        """Keep in `self.dtype` the weights that every forward casts to it anyway.

        A rank that never trains then needs half the memory, and a version half the bytes. The
        velocities are the same, bit by bit.
        """
        for parameter in self._cast_in_forwards():
            parameter.data = parameter.data.to(self.dtype)

    def fill(self, device: torch.device) -> None:
        """Give parameters that were built without memory their values, on `device`. The others stay
        where they are."""

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
        """Return the fp32 parameters that every forward casts to `self.dtype`.

        Autocast casts most of them. An adapter casts its own factors, unless the adapted layer
        computes in fp32.
        """
        modules = list(self.transformer.modules())
        if self.lora is not None:
            layers = [
                layer
                for layer in self._adapted
                if layer.get_base_layer().weight.dtype != wide(self.dtype)
            ]
            modules = [
                factor
                for layer in layers
                for factor in layer.modules()
                if isinstance(factor, CastLinear)
            ]
        return [parameter for module in modules for parameter in cast_parameters(module)]

    def parameters_without_gradient(self) -> list[str]:
        """Return the names of trained parameters whose .grad is None. After a backward pass there
        must be none."""
        return [
            name for name, parameter in self.trained_parameters().items() if parameter.grad is None
        ]

    def wordings(self, prompts: Iterable[Prompt]) -> tuple[list[Wording], list[Wording]]:
        """Return the wordings that are encoded for the two branches of guidance, both with the
        prompt's images.

        The second list is empty if one forward serves. Raises as `check_prompt` does.
        """
        positive, negative = list[Wording](), list[Wording]()
        for prompt in prompts:
            self.check_prompt(prompt)
            images = tuple(image for image in prompt.images if image.role in self.reads)
            positive.append(Wording(prompt.text, images))
            if self.two_forwards:
                negative.append(Wording(self._negative_text(prompt), images))
        return positive, negative

    def _stored(self, wording: Wording) -> bool:
        """Return whether the store has the wording, after taking it from there."""
        found = None if self.store is None else self.store.read(wording)
        if found is not None:
            self._embeddings[wording] = found
        return found is not None

    def _rows(self, wordings: Sequence[Wording]) -> dict[str, Tensor]:
        rows = [self._embeddings[each] for each in wordings]
        return {key: torch.cat([row[key] for row in rows]) for key in rows[0]}

    def _negative_text(self, prompt: Prompt) -> str:
        negative = self.default_negative() if prompt.negative is None else prompt.negative
        if negative is None:
            raise ValueError(
                f"guidance scale {self.cfg_scale} needs a negative prompt, and "
                f"'{prompt.text[:60]}' has none: "
                'add "negative" to the prompt file, set model.negative_prompt, or '
                "sampling.guidance_scale=1"
            )
        return negative

    def _negative(self, condition: dict[str, Tensor], key: str) -> Tensor:
        try:
            return condition[NEGATIVE + key]
        except KeyError:
            raise ValueError(
                f"guidance scale {self.cfg_scale} needs condition['{NEGATIVE}{key}'], got "
                f"{sorted(condition)}: encode the prompts with this policy"
            ) from None
