"""The common part of the diffusers families' codecs: text encoders, autoencoder and sizes.

Text encoders and the VAE are loaded on first use, because a trainer rank never uses them.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from digenrl import accelerator
from digenrl.images import PromptImage
from digenrl.models import latents, pretrained
from digenrl.models.codec import Codec
from digenrl.models.guidance import Guidance
from digenrl.models.wording import Condition, Wording
from digenrl.types import Sound

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, ModelMixin
    from transformers import PreTrainedTokenizerBase

STAYS = 1 << 30
"""Most bytes of a decoder that stays on the GPU: its two moves would cost a fifth of a FLUX task.
A plan leaves more memory than this free on every GPU of 16 GiB or more."""


@dataclass(frozen=True)
class Checkpoint:
    """Location of a codec's components."""

    path: str
    """Directory in diffusers layout, or a hub id."""
    pipeline: str
    """Class of diffusers that encodes prompts."""
    networks: tuple[str, ...]
    """Components that the policy loads, and the codec leaves out."""


@dataclass(frozen=True)
class CodecSettings:
    """What a model configuration says about encoding and decoding.

    `digenrl.models.pipeline.DiffusersPolicy` explains each value.
    """

    height: int
    width: int
    frames: int
    dtype: torch.dtype
    """dtype of the encoders and of the conditioning."""
    max_sequence_length: int
    negative_prompt: str | None
    offload_encoders: bool
    vae_dtype: torch.dtype
    vae_tiling: bool
    decode_pixels: int


class DiffusersCodec(Codec):
    """The encoders and the autoencoder of a diffusers pipeline."""

    vae_class: ClassVar[type[Any]]
    spatial_stride: ClassVar[int] = 16
    """Pixels per token: 8 of the VAE times 2 of the patch."""
    temporal_stride: ClassVar[int | None] = None
    """Frames per latent frame after the first; None = images."""
    channels: ClassVar[int] = latents.CHANNELS
    """Channels of the VAE's latents."""
    vae_stride: ClassVar[int] = latents.STRIDE
    """Pixels per latent pixel and side."""
    packed: ClassVar[bool] = False
    """Whether latents are tokens [N, 4C] of 2x2 patches."""
    encoders: ClassVar[tuple[str, ...]] = ("text_encoder*", "tokenizer*")
    """Components of the checkpoint that turn text into conditioning."""
    sound_decoders: ClassVar[Mapping[str, tuple[type[Any], ...]]] = {}
    """Component that turns latents into sound -> classes that it may have. {}: no sound."""
    rate_key: ClassVar[str] = "sampling_rate"
    """Key of the last such component's configuration that holds the samples per second (Hz)."""
    text_length: ClassVar[int | None] = None
    """Text tokens that the network requires; None = any number."""

    def __init__(
        self,
        family: str,
        network: nn.Module,
        guidance: Guidance,
        checkpoint: Checkpoint,
        settings: CodecSettings,
    ) -> None:
        size = settings.height, settings.width, settings.frames
        super().__init__(family, network, self.latent_shape_of(*size), guidance)
        self.height, self.width, self.frames = size
        self.path, self.dtype = checkpoint.path, settings.dtype
        self.max_sequence_length = settings.max_sequence_length
        self.negative_prompt = settings.negative_prompt
        self.offload_encoders = settings.offload_encoders
        self.vae_dtype, self.vae_tiling = settings.vae_dtype, settings.vae_tiling
        self.keeps_padding = False
        """Whether `encode` keeps the padding of prompts, with a mask for it."""
        self._checkpoint = checkpoint
        self._decoded_together = max(1, settings.decode_pixels // (size[0] * size[1] * size[2]))

    # ---- sizes

    @classmethod
    def check_size(cls, family: str, height: int, width: int, frames: int) -> None:
        """Raise ValueError for a size of samples that the strides do not divide."""
        latents.require_multiple("height", height, cls.spatial_stride)
        latents.require_multiple("width", width, cls.spatial_stride)
        if cls.temporal_stride is not None:
            latents.require_multiple("frames", frames, cls.temporal_stride, offset=1)
        elif frames != 1:
            raise ValueError(
                f"sampling.frames={frames}: {family} makes images; set sampling.frames=1"
            )

    @classmethod
    def latent_shape_of(cls, height: int, width: int, frames: int) -> tuple[int, ...]:
        """Return the shape *L of a sample of this size: [C, h, w], [C, f, h, w] of videos, or [N,
        4C] of packed latents."""
        if cls.packed:
            return ((height // 16) * (width // 16), cls.channels * 4)
        # The first frame is a latent frame by itself.
        video = () if cls.temporal_stride is None else ((frames - 1) // cls.temporal_stride + 1,)
        return (cls.channels, *video, height // cls.vae_stride, width // cls.vae_stride)

    def image_grid(self) -> tuple[int, int]:
        """Latent height and width in pixels of the VAE's output."""
        return self.height // self.vae_stride, self.width // self.vae_stride

    # ---- what a family implements

    @abstractmethod
    def encode_text(self, pipeline: DiffusionPipeline, text: str) -> dict[str, Tensor]:
        """Return the conditioning of one text, leading dimension 1, on the encoders' device."""

    def encode_wording(self, pipeline: DiffusionPipeline, wording: Wording) -> dict[str, Tensor]:
        """Return the conditioning of a text and its images. A family that `reads` images adds their
        part."""
        return self.encode_text(pipeline, wording.text)

    @abstractmethod
    def decode_latents(self, vae: ModelMixin, latents: Tensor) -> Tensor:
        """Decode [B, *L] in the VAE's dtype -> [B, C, H, W] or [B, C, F, H, W] in [-1, 1]."""

    def decode_waveform(self, decoders: Sequence[ModelMixin], latents: Tensor) -> Tensor:
        """Decode the sound in [B, *L] in the VAE's dtype by `sound_decoders` -> [B, channels,
        samples]. Families with `sound_decoders` override this."""
        raise NotImplementedError(f"{self.family} has `sound_decoders` and no `decode_waveform`.")

    def encode_latents(self, vae: ModelMixin, pixels: Tensor) -> Tensor:
        """Encode [B, 3, H, W] in [-1, 1] in the VAE's dtype -> [B, *L], the mode: what
        `decode_latents` inverts. Raises ValueError where samples cannot be read from files."""
        return super().encode_media([])

    def check_encoders(self, pipeline: DiffusionPipeline) -> None:
        """Raise ValueError when a tokenizer does not treat the prompt template as the codec
        expects."""

    def pipeline_components(self) -> dict[str, object]:
        """Return the components that the encoder pipeline must not load by itself, by name; None
        leaves a component out."""
        return dict.fromkeys((*self._checkpoint.networks, "vae", "scheduler"))

    def default_negative(self) -> str | None:
        """Return `negative_prompt` of the model config."""
        return self.negative_prompt

    # ---- prompts

    def encode_prompts(self, wordings: Sequence[Wording]) -> dict[str, Tensor]:
        """Encode one wording at a time, because values must not depend on which prompts happen to
        be encoded together."""
        rows = list(self.encode_each(wordings, self.device))
        if self.offload_encoders:
            for encoder in self._encoder_modules():
                encoder.to("cpu")
        return {key: torch.cat([row[key] for row in rows]) for key in rows[0]}

    @torch.no_grad()
    def encode_each(self, wordings: Sequence[Wording], device: torch.device) -> Iterator[Condition]:
        """Encode one wording after the other, with encoders that stay on `device`."""
        for encoder in self._encoder_modules():
            encoder.to(device)
        for wording in wordings:
            encoded = self.encode_wording(self._pipeline, wording)
            yield {
                key: value.to(self.dtype) if value.is_floating_point() else value
                for key, value in encoded.items()
            }

    def trim_condition(self, condition: Condition) -> Condition:
        """Return the conditioning of one prompt without its padding; that of several prompts
        unchanged.

        The text is cut after the last token that either branch of guidance reads. If nothing is
        left to be masked, the mask is left out, and attention can use kernels without masks. The
        network never reads masked tokens. Velocities are therefore the same up to rounding, here
        and wherever the trajectory is replayed. With several prompts nothing is cut, because a row
        must not depend on the others.
        """
        # The masks are [B, tokens], the texts [B, tokens, d].
        masks = {key: value for key, value in condition.items() if key.endswith("mask")}
        if self.keeps_padding or not masks or any(len(mask) > 1 for mask in masks.values()):
            return condition
        read = torch.cat([*masks.values()]).any(dim=0).nonzero()  # positions [tokens read, 1]
        length = int(read.max()) + 1 if len(read) else 0
        cut = {
            key: value[:, :length] if key.endswith(("text", "mask")) else value
            for key, value in condition.items()
        }
        all_read = all(bool(cut[key].all()) for key in masks)
        return {key: value for key, value in cut.items() if not (all_read and key in masks)}

    def report_long_prompt(self, tokenizer: PreTrainedTokenizerBase, text: str, limit: int) -> None:
        """Warn once per encoder that a prompt is longer than the `limit` tokens that the encoder
        takes."""
        tokens = len(tokenizer(text, truncation=False, verbose=False).input_ids)
        if tokens > limit:
            self.say_once(
                f"{type(tokenizer).__name__} {limit}",
                f"{self.family}: {type(tokenizer).__name__} takes {limit} tokens, prompts beyond "
                f"that are cut (first such prompt: {tokens} tokens, '{text[:60]}...')",
            )

    # ---- media

    def decode(self, latents: Tensor) -> Tensor:
        """Decode [B, *L] -> images [B, C, H, W] or videos [B, F, C, H, W] in [0, 1] fp32; see
        `decode_pixels`."""
        vae = self._vae
        with _moved_to(latents.device, [vae], self.offload_encoders), torch.no_grad():
            rows = [
                self.decode_latents(vae, part.to(self.vae_dtype))
                for part in latents.split(self._decoded_together)
            ]
        media = (torch.cat(rows).float() / 2 + 0.5).clamp(0, 1)  # [B, C, H, W], [B, C, F, H, W]
        if media.shape[-2:] != (self.height, self.width):
            raise ValueError(
                f"{self.family} decodes latents {[*latents.shape]} to {[*media.shape]}, not to "
                f"{self.height} x {self.width} pixels: override `decode_latents`, or `vae_stride` "
                "where the VAE does not shrink by 8"
            )
        # Videos: [B, C, F, H, W] -> [B, F, C, H, W].
        return media if self.temporal_stride is None else media.transpose(1, 2)

    def decode_sound(self, latents: Tensor) -> Sound:
        """Decode the sound in latents [B, *L], as many samples together as `decode` takes."""
        if not self.sound_decoders:
            return super().decode_sound(latents)
        decoders = self._sound_decoders
        with _moved_to(latents.device, decoders, self.offload_encoders), torch.no_grad():
            rows = [
                self.decode_waveform(decoders, part.to(self.vae_dtype))
                for part in latents.split(self._decoded_together)
            ]
        rate = int(decoders[-1].config[self.rate_key])
        return Sound(torch.cat(rows).float().clamp(-1, 1), rate)

    @torch.no_grad()
    def encode_media(self, images: Sequence[PromptImage]) -> Tensor:
        """Return the clean latents [B, *L] fp32 of pictures, one encoded after the other."""
        vae = self._vae.to(self.device)
        pixels = [self.image_pixels(image).to(vae.device, self.vae_dtype) for image in images]
        latents = torch.cat([self.encode_latents(vae, each).float() for each in pixels])
        if latents.shape[1:] != self.latent_shape:
            raise ValueError(
                f"data.samples = files: a picture has latents {[*latents.shape[1:]]}, a sample of "
                f"{self.family} {[*self.latent_shape]}; train videos with data.samples=generated, "
                "or set sampling.frames=1."
            )
        return latents

    def image_pixels(self, image: PromptImage) -> Tensor:
        """Return an image as [1, 3, height, width] fp32 in [-1, 1]."""
        picture = np.asarray(
            image.fit_to_size(self.height, self.width), dtype=np.float32
        )  # [H, W, 3]
        return torch.from_numpy(picture).movedim(-1, 0).unsqueeze(0) / 127.5 - 1.0

    # ---- memory

    def release_encoders(self) -> None:
        """Free the memory of encoders and VAE. The next use reads them again."""
        # Cached properties are made again when their value is gone.
        self.__dict__.pop("_pipeline", None)
        self.__dict__.pop("_vae", None)
        self.__dict__.pop("_sound_decoders", None)
        if accelerator.device_count():
            torch.accelerator.empty_cache()

    def _encoder_modules(self) -> list[nn.Module]:
        encoders = [
            module for module in self._pipeline.components.values() if isinstance(module, nn.Module)
        ]
        # The VAE encodes the images of prompts.
        return [*encoders, self._vae] if self.reads else encoders

    @cached_property
    def _pipeline(self) -> DiffusionPipeline:
        """The family's pipeline with its text encoders alone."""
        import diffusers

        pretrained.hide_progress_bars()
        for name in pretrained.model_index(self.path):
            if name.startswith(("text_encoder", "image_encoder")):
                pretrained.require_shards(self.path, name)
        try:
            pipeline = getattr(diffusers, self._checkpoint.pipeline).from_pretrained(
                pretrained.folder_of(self.path, "model_index.json"),
                dtype=self.dtype,
                local_files_only=True,
                **self.pipeline_components(),
            )
        except (OSError, ValueError) as error:
            wanted = "text encoders or tokenizers"
            raise pretrained.missing_error(self.path, wanted, str(error)[:200]) from error
        # The pipeline says of every cut prompt what `report_long_prompt` says once.
        logging.getLogger(type(pipeline).__module__).setLevel(logging.ERROR)
        self.check_encoders(pipeline)
        return pipeline

    @cached_property
    def _vae(self) -> ModelMixin:
        vae: ModelMixin = pretrained.load_component(
            self.vae_class, self.path, "vae", self.vae_dtype
        )
        vae.requires_grad_(False)
        if self.vae_tiling:
            vae.enable_tiling()
        return vae

    @cached_property
    def _sound_decoders(self) -> tuple[ModelMixin, ...]:
        """The components of `sound_decoders`, in the classes that the checkpoint names."""
        index, found = pretrained.model_index(self.path), []
        for name, kinds in self.sound_decoders.items():
            named = index.get(name, (None, None))[1]
            kind = next((each for each in kinds if each.__name__ == named), None)
            if kind is None:
                known = " or ".join(each.__name__ for each in kinds)
                raise pretrained.PretrainedError(
                    f"the {name} of model.path={self.path} is {named}, and the {self.family} "
                    f"adapter decodes sound by {known}: use the published checkpoint, or no reward "
                    "of sound"
                )
            part = pretrained.load_component(kind, self.path, name, self.vae_dtype)
            found.append(part.requires_grad_(False))
        return tuple(found)


@contextmanager
def _moved_to(
    device: torch.device, decoders: Sequence[ModelMixin], offload: bool
) -> Iterator[None]:
    """Bring decoders to the device for the body. With `offload`, large ones leave afterwards."""
    # Moving asks every module, which costs as much as a small picture: only where it must.
    away = [decoder for decoder in decoders if decoder.device != device]
    for decoder in away:
        decoder.to(device)
    yield
    for decoder in away if offload else ():
        if sum(p.nbytes for p in decoder.parameters()) > STAYS:
            decoder.to("cpu")
