"""The common part of the diffusers families' networks: loading, attention, sigma grid and LoRA
presets.

The transformer is loaded at construction, because every rank needs it. What stands before and
behind it is in `digenrl.models.pipeline_codec`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from digenrl.facts import Facts, of_module
from digenrl.models import deferred, hub_kernels, pretrained, quantized, tiny
from digenrl.models.guidance import Guidance
from digenrl.models.lora import PRESETS, LoraKeys, LoraSpec
from digenrl.models.pipeline_codec import Checkpoint, CodecSettings, DiffusersCodec
from digenrl.models.policy import ModelKeys, Policy, RecomputeConfig
from digenrl.recompute import AUTO, parse_recompute

if TYPE_CHECKING:
    from diffusers import ModelMixin
    from diffusers.configuration_utils import FrozenDict

EXPLICIT, SCHEDULER = "explicit", "scheduler"
FORWARD_ONLY = re.compile(r"_flash_3|_flash_varlen_3|aiter.*|_?sage.*")
"""Attention backends of diffusers that compute no gradient (`attention_dispatch.py`): its wrapper
of an installed FlashAttention-3, AITER and SageAttention."""
COMPILED_CASES = 16
"""Most versions that a block's code is compiled for: the first number of rows, one row, any number;
each with gradients, without them, and without the adapter. PyTorch's own limit is 8, and it raises
beyond that."""


class DiffusersPolicy(Policy):
    """A transformer of diffusers with the rest of its pipeline.

    Args:
        path: directory in diffusers layout, or a hub id that `hf download` has put into the local
            cache.
        build: "real" loads `path`. "tiny" loads a small random build of the same classes, made on
            first use. Its encoder takes at most 64 tokens.
        height, width: pixels; frames: video frames (1 for images).
        guidance_scale: the embedded scale of a guidance-distilled family, else classifier-free
            guidance (1 = off).
        true_cfg_scale: classifier-free guidance on top, guidance-distilled families only (1 = off).
        lora: {rank, alpha, targets}; targets is "attention", "attention_ff" or regular expressions.
            None = full.
        dtype: compute dtype, and storage dtype of frozen weights and encoders. "auto" = bfloat16,
            and float32 for the tiny build: most CPUs emulate bfloat16, three to four times slower
            than float32 on the one measured.
        shift: overrides the checkpoint's sigma shift by this constant one; None = the checkpoint's
            own.
        grid: "explicit" starts from linspace(1, 1/T, T), "scheduler" from the scheduler's default
            range, which ends lower (what diffusers' SD3 pipeline does).
        max_sequence_length: text tokens of the main encoder; every prompt is padded to it. A family
            whose attention masks the padding does without it, see `trimmed`.
        negative_prompt: the unconditional branch's text where a prompt brings none; None = there is
            no default.
        attention_backend: one name of diffusers' attention dispatcher for rollout and replay alike;
            "auto" or None = PyTorch's choice by device, dtype and head size, see `attention_used`.
            A kernel of the hub is "_flash_3_hub@COMMIT" (`digenrl.models.hub_kernels`).
        compile: true: the repeated blocks are compiled (regional compilation); slow to start, fast
            afterwards. Padding stays, so that all prompts have the same shape.
        offload_encoders: move text encoders back to the CPU after each use, and a VAE too if it is
            larger than `STAYS` bytes (`digenrl.models.pipeline_codec`).
        vae_dtype, vae_tiling: dtype of the decoder; decode large videos in tiles.
        decode_pixels: pixels that are decoded together, over samples and frames; one sample at
            least.
        quantize: the frozen linear layers of the blocks in "nf4" or "int8"
            (`digenrl.models.quantized`); None = in `dtype`.
        empty: the transformer has no values until `fill`; a run sets it where weights are sharded
            before.
    """

    codec_class: ClassVar[type[DiffusersCodec]]
    codec: DiffusersCodec
    transformer_class: ClassVar[type[Any]]
    """Class of the network of each of `components`. The first of `pipelines` encodes prompts."""
    attention: ClassVar[tuple[str, ...]]
    """Layers that the LoRA preset "attention" adapts, in each block of the first list."""
    feed_forward: ClassVar[tuple[str, ...]]
    """Layers that the preset "attention_ff" adds, in each block of the first list."""
    single_attention: ClassVar[tuple[str, ...]] = ()
    """Layers that "attention" adapts in each block of the second list (single-stream blocks)."""
    single_feed_forward: ClassVar[tuple[str, ...]] = ()
    depths: ClassVar[tuple[str, ...]] = ("num_layers", "num_single_layers")
    """Names of the lists' lengths in the transformer's configuration."""
    unread: ClassVar[frozenset[str]] = frozenset()
    """Modules of the last block (of the first list) that only its unread text output depends on, or
    that are absent. They would get no gradient. LoRA skips such modules, and full fine-tuning keeps
    their weights frozen."""
    unused: ClassVar[tuple[str, ...]] = ()
    """Modules and parameters of the transformer on which the velocity does not depend. Full
    fine-tuning keeps them frozen."""

    def __init__(
        self,
        path: str,
        height: int,
        width: int,
        frames: int = 1,
        build: str = "real",
        guidance_scale: float = 1.0,
        true_cfg_scale: float = 1.0,
        lora: LoraKeys | None = None,
        dtype: str | Literal["auto"] = "auto",
        shift: float | None = None,
        grid: str = EXPLICIT,
        max_sequence_length: int = 512,
        negative_prompt: str | None = "",
        gradient_checkpointing: RecomputeConfig = False,
        keep_reference: bool = False,
        attention_backend: str | None = AUTO,
        compile: bool = False,
        offload_encoders: bool = True,
        vae_dtype: str = "float32",
        vae_tiling: bool = False,
        decode_pixels: int = 512 * 512,
        quantize: str | None = None,
        empty: bool = False,
    ) -> None:
        self.codec_class.check_size(self.family, height, width, frames)
        if build not in ("tiny", "real"):
            raise ValueError(f"hardware.build={build}: expected tiny or real")
        if grid not in (EXPLICIT, SCHEDULER):
            raise ValueError(f"model.grid={grid}: expected {EXPLICIT} or {SCHEDULER}")
        if true_cfg_scale != 1.0 and not self.embedded_guidance:
            raise ValueError(
                f"model.true_cfg_scale={true_cfg_scale} is for guidance-distilled families; "
                f"{self.family} takes classifier-free guidance from sampling.guidance_scale"
            )
        kept = parse_recompute(gradient_checkpointing)
        if compile and kept.products + kept.attention + kept.offload > 0:
            raise ValueError(
                f"model.gradient_checkpointing={gradient_checkpointing} needs to see the "
                "operators, which compiled blocks do not show: set model.compile=false, or "
                "model.gradient_checkpointing to true, false or a share"
            )
        self.path = str(tiny.ensure(self.facts())) if build == "tiny" else path
        self.check_checkpoint(self.path)
        compute = self._compute_dtype(dtype, build)
        load = deferred.build_empty if empty else pretrained.load_component
        # What is trained is held in fp32, a frozen base in the dtype of its forward.
        stored = torch.float32 if lora is None else compute
        transformer = self.joined(
            [load(self.transformer_class, self.path, part, stored) for part in self.components],
            self.path,
        )
        self._check_guidance(transformer, guidance_scale)
        # Before the policy copies the network as its reference, so that both attend alike.
        self._attend_by(transformer, attention_backend or AUTO)
        # Before adapters are added, whose factors are never quantized.
        if quantize is not None:
            blocks = chain.from_iterable(getattr(transformer, name) for name in self.block_lists)
            quantized.quantize_blocks(blocks, quantize)
        codec = self.codec_class(
            self.family,
            transformer,
            Guidance(float(guidance_scale), not self.embedded_guidance, float(true_cfg_scale)),
            Checkpoint(self.path, self.pipelines[0], tuple(self.components)),
            CodecSettings(
                height=height,
                width=width,
                frames=frames,
                dtype=compute,
                max_sequence_length=self._text_tokens(max_sequence_length, build),
                negative_prompt=negative_prompt,
                offload_encoders=offload_encoders,
                vae_dtype=getattr(torch, vae_dtype),
                vae_tiling=vae_tiling,
                decode_pixels=decode_pixels,
            ),
        )
        super().__init__(
            transformer,
            codec,
            lora=None if lora is None else self._lora_spec(lora, transformer.config),
            dtype=compute,
            gradient_checkpointing=gradient_checkpointing,
            keep_reference=keep_reference,
        )
        # An adapter names its layers; full fine-tuning would train the unread ones, too.
        if lora is None:
            self._freeze_unread()
        # The blocks of a reference copy are among `wrap_units` now, and are compiled too.
        if compile:
            self._compile_blocks()
        # Prompts of equal length, or each length would be compiled anew.
        self.keep_padding(compile)
        self._empty = empty
        self.shift, self.grid = shift, grid
        self.add_family_parts()

    @classmethod
    def facts(cls) -> Facts:
        """Return the family's facts, from the file beside the module that brings the family."""
        found = (of_module(base.__module__).get(cls.family) for base in cls.__mro__)
        return next(
            filter(None, found), Facts(cls.family, cls.__name__, Path(inspect.getfile(cls)))
        )

    @classmethod
    def check(cls, settings: ModelKeys) -> None:
        """Refuse a model config that cannot be built, from small files alone, before any rank
        starts.

        Raises:
            ValueError: the family's strides do not divide a size; the checkpoint is absent or of
                another family; the tiny build has no description; or the latents' channels are not
                the network's.
        """
        codec = cls.codec_class
        size = settings["height"], settings["width"], settings.get("frames", 1)
        codec.check_size(cls.family, *size)
        if settings.get("build", "real") == "real":
            cls.check_checkpoint(str(settings["path"]))
        else:
            tiny.require_place(cls.facts())
        if (kind := settings.get("quantize")) is not None:
            quantized.require_library(kind)
        hub_kernels.require_kernel(str(settings.get("attention_backend")))
        network = cls.network_config(settings)
        # A packed token holds 2 x 2 latent pixels. An image-to-video network takes more channels
        # than it gives (noise, mask and first frame), so either number may match.
        channels = codec.channels * (4 if codec.packed else 1)
        if channels not in (network.get("in_channels"), network.get("out_channels")):
            raise ValueError(
                f"{codec.__name__}: its latents have {channels} channels ({codec.channels} of the "
                f"VAE, packed={codec.packed}), {cls.transformer_class.__name__} takes "
                f"{network.get('in_channels')}: set the class attribute `channels`, or `packed` "
                "where the network takes tokens of 2x2 patches; for any other shape override "
                "`latent_shape_of`"
            )

    @classmethod
    def outline(cls, settings: ModelKeys) -> nn.Module:
        """Return the transformer without weights, its experts included."""
        config = cls.network_config(settings)
        # A config.json also has keys of the library, such as _class_name.
        known = inspect.signature(cls.transformer_class).parameters
        with torch.device("meta"):
            networks = [
                cls.transformer_class(**{key: config[key] for key in config if key in known})
                for _ in cls.components
            ]
            return cls.joined(networks)

    @classmethod
    def network_config(cls, settings: ModelKeys) -> dict[str, object]:
        """Return the transformer's configuration, defaults included, for a model config (its YAML's
        keys)."""
        if settings.get("build", "real") == "tiny":
            given = tiny.describe_part(cls.facts(), "transformer")
        else:
            given = pretrained.component_config(
                cls.transformer_class, str(settings["path"]), "transformer"
            )
        parameters = inspect.signature(cls.transformer_class).parameters.values()
        return {
            each.name: each.default for each in parameters if each.default is not each.empty
        } | dict(given)

    # ---- what a family implements

    @classmethod
    def check_checkpoint(cls, path: str) -> None:
        """Check that the checkpoint at `path` is of this family. Its autoencoder must make the
        latents that the family expects.

        Only small files are read.

        Raises:
            PretrainedError (a ValueError): the checkpoint is of another family, or its latents are
                others.
        """
        pretrained.require_family(path, cls.pipelines, cls.family)
        codec = cls.codec_class
        channels, stride = codec.channels, codec.vae_stride
        vae = pretrained.component_config(codec.vae_class, path, "vae")
        found = vae.get("z_dim", vae.get("latent_channels", channels))
        side = vae.get("scale_factor_spatial", vae.get("spatial_compression_ratio", stride))
        if (found, side) != (channels, stride):
            raise pretrained.PretrainedError(
                f"the autoencoder of model.path={path} makes latents of {found} channels, one for "
                f"{side} x {side} pixels; the {cls.family} adapter counts on {channels} and "
                f"{stride} x {stride}: take a checkpoint of that model, or, in a codec of your "
                "own, override `channels`, `vae_stride` and `spatial_stride`"
            )

    @classmethod
    def joined(cls, networks: list[ModelMixin], path: str | None = None) -> ModelMixin:
        """Return the transformer that consists of `components`, those of the checkpoint at `path`
        if there is one."""
        (network,) = networks
        return network

    def sigma_grid(self, steps: int) -> Tensor:
        """Return [steps + 1] fp32 as the family's pipeline computes them from explicit sigmas (or
        see `grid`), ending in 0."""
        if steps < 1:
            raise ValueError(f"sampling.steps={steps}: at least one denoising step is needed")
        config = dict(pretrained.scheduler_config(self.path))
        if self.shift is not None:
            # A constant shift, and nothing else that would move the grid.
            config |= {"shift": self.shift, "use_dynamic_shifting": False, "shift_terminal": None}
        elif config.get("flow_shift") is not None:
            # Wan ships UniPC, whose flow_shift FlowMatchEuler would silently replace by 1.
            config |= {"shift": config["flow_shift"], "use_dynamic_shifting": False}
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(config)
        # 1, ..., 1/T: the scheduler shifts them and appends 0.
        sigmas = np.linspace(1.0, 1 / steps, steps) if self.grid == EXPLICIT else None
        mu = self._dynamic_shift(config, steps) if scheduler.config.use_dynamic_shifting else None
        scheduler.set_timesteps(steps if sigmas is None else None, sigmas=sigmas, mu=mu)
        grid: Tensor = scheduler.sigmas.float().cpu()
        if not grid.isfinite().all():
            raise ValueError(
                f"sampling.steps={steps}: {self.family}'s sigma grid needs at least 2 steps"
            )
        return grid

    def fill(self, device: torch.device) -> None:
        """Read the values from the checkpoint, and an adapter's from its file or by its seed; see
        `digenrl.models.deferred`."""
        for network in self.all_networks() if self._empty else ():
            spec = self.adapter.lora
            deferred.fill_parameters(
                network, self.path, self.components, spec, device, self.loaded_factors()
            )

    def _freeze_unread(self) -> None:
        """Freeze the parameters on which no velocity depends."""
        last = getattr(self.transformer, self.block_lists[0])[-1]
        for owner, modules in ((last, self.unread), (self.transformer, self.unused)):
            for name, parameter in owner.named_parameters():
                if f"{name}.".startswith(tuple(f"{module}." for module in modules)):
                    parameter.requires_grad_(False)

    def _compile_blocks(self) -> None:
        dynamo = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, COMPILED_CASES)
        for block in self.wrap_units():
            # A break of the graph is an error, and no slow run.
            block.compile(fullgraph=True)

    def _check_guidance(self, transformer: ModelMixin, scale: float) -> None:
        """Raise ValueError where the network has no input for the guidance `scale`."""
        if self.embedded_guidance and scale != 1.0 and not transformer.config.guidance_embeds:
            raise ValueError(
                f"sampling.guidance_scale={scale} would be dropped: {self.path} is not "
                "guidance-distilled; set sampling.guidance_scale=1 and use model.true_cfg_scale"
            )

    def _attend_by(self, transformer: ModelMixin, backend: str) -> None:
        """Give the network its attention backend; raise ValueError for one without a gradient, or
        for a kernel of the hub that is not there."""
        if FORWARD_ONLY.fullmatch(backend.partition("@")[0]):
            raise ValueError(
                f"model.attention_backend={backend}: has no backward pass in diffusers, so that "
                "nothing before it would be trained; set it to auto"
            )
        if backend != AUTO:
            transformer.set_attention_backend(hub_kernels.pin_kernel(backend))
        self.attention_backend = backend

    def attention_used(self, device: torch.device) -> dict[str, str]:
        """Return what `Policy.attention_used` says."""
        if self.attention_backend != AUTO:
            return {"backend": self.attention_backend}
        width = getattr(self.transformer.config, "attention_head_dim", 128)
        # [B, heads, tokens, d] of a call without a mask.
        rows = torch.empty(1, 1, 128, width, dtype=self.dtype, device=device)
        # A private function of torch: the public ones answer for CUDA alone.
        kernel = SDPBackend(torch._fused_sdp_choice(rows, rows, rows))
        return {"backend": "native", "kernel": kernel.name.lower()}

    def keep_padding(self, on: bool) -> None:
        """Set whether the network is given the padding of prompts, with a mask for it."""
        self.codec.keeps_padding = on

    @classmethod
    def lora_names(cls, config: FrozenDict, preset: str) -> list[str]:
        """Return every layer that `preset` ("attention" or "attention_ff") adapts in a transformer
        of this configuration."""
        full = preset == "attention_ff"
        layers = (
            cls.attention + cls.feed_forward * full,
            cls.single_attention + cls.single_feed_forward * full,
        )
        counts = [getattr(config, name, 0) for name in cls.depths]
        return [
            f"{prefix}{blocks}.{i}.{layer}"
            for prefix in cls.components.values()
            for blocks, chosen, count in zip(cls.block_lists, layers, counts, strict=False)
            for i in range(count)
            for layer in chosen
            if i < count - 1 or layer not in cls.unread  # those of the last block get no gradient
        ]

    def _lora_spec(self, lora: LoraKeys, config: FrozenDict) -> LoraSpec:
        spec = LoraSpec.from_config(lora)
        if len(spec.targets) != 1 or spec.targets[0] not in PRESETS:
            return spec
        # Targets are patterns, in which a dot matches any letter. `expected` makes a layer that the
        # network lacks an error.
        names = self.lora_names(config, spec.targets[0])
        return replace(spec, targets=tuple(re.escape(name) for name in names), expected=len(names))

    def _dynamic_shift(self, config: Mapping[str, float], steps: int) -> float:
        """Return mu, linear in the number of packed image tokens (black-forest-labs/flux)."""
        from diffusers.pipelines.flux.pipeline_flux import calculate_shift

        names = {"base_seq_len": "base_image_seq_len", "max_seq_len": "max_image_seq_len"}
        names |= {name: name for name in ("base_shift", "max_shift")}
        given = {argument: config[name] for argument, name in names.items() if name in config}
        codec = self.codec
        tokens = (codec.height // codec.spatial_stride) * (codec.width // codec.spatial_stride)
        return float(calculate_shift(tokens, **given))

    @classmethod
    def _text_tokens(cls, wanted: int, build: str) -> int:
        length = cls.codec_class.text_length
        if length not in (None, wanted):
            raise ValueError(
                f"model.max_sequence_length={wanted}: the network of {cls.family} tells text from "
                f"image by their number of tokens; set it to {length}"
            )
        return min(wanted, length or tiny.TEXT_LENGTH) if build == "tiny" else wanted

    @staticmethod
    def _compute_dtype(dtype: str, build: str) -> torch.dtype:
        if dtype == "auto":
            return torch.float32 if build == "tiny" else torch.bfloat16
        known = {
            name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64")
        }
        if dtype not in known:
            raise ValueError(f"model.dtype={dtype}: expected auto, {', '.join(known)}")
        return known[dtype]
