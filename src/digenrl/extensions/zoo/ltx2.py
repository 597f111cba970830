"""LTX-2 (arXiv:2601.03233): Gemma 3 text, classifier-free guidance, latents [N, 128] of a video and
then its sound.

Video and sound are one state of the network. In each block, each of the two reads the other. Only
the video is trained. Video tokens get the noise of an SDE and have log-probs.
Sound tokens follow the ODE from each sample's own noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2.pipeline_ltx2 import calculate_shift
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder, LTX2VocoderWithBWE
from torch import Tensor

from digenrl.models import pretrained
from digenrl.models.lora import Names
from digenrl.models.pipeline import DiffusersPolicy
from digenrl.models.pipeline_codec import DiffusersCodec

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, ModelMixin

FRAMES_PER_SECOND, SOUNDS_PER_SECOND = 24.0, 25.0
"""Frames per second of videos (the pipeline's default), and latents per second of sound. Sound has
16000 samples a second, a spectrogram step per 160 samples, and a latent per four steps."""


class LTX2Codec(DiffusersCodec):
    """Gemma texts through the connectors, videos with sound."""

    vae_class = AutoencoderKLLTX2Video
    channels = 128
    vae_stride = 32
    spatial_stride = 32
    temporal_stride = 8
    encoders = (*DiffusersCodec.encoders, "connectors")
    has_sound = True
    sound_decoders: ClassVar[Mapping[str, tuple[type[Any], ...]]] = {
        "audio_vae": (AutoencoderKLLTX2Audio,),
        "vocoder": (LTX2Vocoder, LTX2VocoderWithBWE),
    }
    rate_key = "output_sampling_rate"

    @property
    def video_grid(self) -> tuple[int, int, int]:
        """Frames, rows and columns of the video's tokens."""
        return self._grid_shape(self.height, self.width, self.frames)

    @property
    def video_tokens(self) -> int:
        """Number of the video's tokens. The sound's follow."""
        return math.prod(self.video_grid)

    def pipeline_components(self) -> dict[str, object]:
        """Return the components, also without those that make sound from latents."""
        return super().pipeline_components() | {"audio_vae": None, "vocoder": None}

    def check_encoders(self, pipeline: DiffusionPipeline) -> None:
        """Check that padding becomes learned registers, which are read like text: the adapter has
        no mask."""
        if pipeline.connectors.config.video_connector_num_learnable_registers is None:
            raise ValueError(
                f"the connectors of {self.path} have no learned registers, and leave padding to a "
                f"mask that the {self.family} adapter does not have: use Lightricks/LTX-2"
            )

    def encode_text(self, pipeline: DiffusionPipeline, text: str) -> dict[str, Tensor]:
        """Return the connectors' outputs from all of Gemma's states, for video and for sound, each
        [1, max_sequence_length, d]."""
        self.report_long_prompt(pipeline.tokenizer, text, self.max_sequence_length)
        states, mask, *_ = pipeline.encode_prompt(
            text,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
            device=pipeline.device,
        )
        video, sound, _ = pipeline.connectors(
            states, mask, padding_side=pipeline.tokenizer.padding_side
        )
        return {"text": video, "audio_text": sound}

    def decode_latents(self, vae: AutoencoderKLLTX2Video, latents: Tensor) -> Tensor:
        """Decode the tokens of the video only."""
        video = latents[:, : self.video_tokens].transpose(1, 2).unflatten(2, self.video_grid)
        mean, std = (
            value.view(1, -1, 1, 1, 1).to(video) for value in (vae.latents_mean, vae.latents_std)
        )
        return vae.decode(video * std / vae.config.scaling_factor + mean, None, return_dict=False)[
            0
        ]

    def decode_waveform(self, decoders: Sequence[ModelMixin], latents: Tensor) -> Tensor:
        """Decode the tokens of the sound: to a spectrogram, and that to both channels."""
        autoencoder, vocoder = decoders
        sound = latents[:, self.video_tokens :]
        sound = sound * autoencoder.latents_std.to(sound) + autoencoder.latents_mean.to(sound)
        bins = autoencoder.config.mel_bins // autoencoder.mel_compression_ratio
        # [B, tokens, channels * bins] -> [B, channels, tokens, bins]
        spectrogram = sound.unflatten(2, (-1, bins)).transpose(1, 2)
        return vocoder(autoencoder.decode(spectrogram, return_dict=False)[0])

    def modality_tokens(self, modality: str) -> slice:
        tokens = self.video_tokens
        return slice(tokens) if modality == "video" else slice(tokens, None)

    @classmethod
    def _grid_shape(cls, height: int, width: int, frames: int) -> tuple[int, int, int]:
        """Return (frames, rows, columns) of the video's tokens."""
        return (
            (frames - 1) // cls.temporal_stride + 1,
            height // cls.vae_stride,
            width // cls.vae_stride,
        )

    @classmethod
    def latent_shape_of(cls, height: int, width: int, frames: int) -> tuple[int, ...]:
        sound = round(frames / FRAMES_PER_SECOND * SOUNDS_PER_SECOND)
        return math.prod(cls._grid_shape(height, width, frames)) + sound, cls.channels


class LTX2Policy(DiffusersPolicy):
    """Policy of LTX-2 text-to-video; arguments in `DiffusersPolicy`.

    Guidance is plain. The pipeline's further branches (without self-attention in some blocks,
    without the other stream) and its rescaling are off. LoRA adapts the layers that video tokens go
    through. Full fine-tuning trains also the layers whose output they read.
    """

    family = "ltx2"
    codec_class = LTX2Codec
    codec: LTX2Codec
    pipelines = ("LTX2Pipeline",)
    transformer_class = LTX2VideoTransformer3DModel
    attention = tuple(
        f"{part}.{name}"
        for part in ("attn1", "attn2", "audio_to_video_attn")
        for name in ("to_q", "to_k", "to_v", "to_out.0")
    )
    feed_forward: ClassVar[tuple[str, ...]] = ("ff.net.0.proj", "ff.net.2")
    checkpoint_names: ClassVar[Names] = {}
    unread = frozenset({"video_to_audio_attn", "audio_ff"})
    unused: ClassVar[tuple[str, ...]] = ("audio_proj_out", "audio_scale_shift_table")

    def add_family_parts(self) -> None:
        self.drawn = self.codec.video_tokens

    @classmethod
    def check_checkpoint(cls, path: str) -> None:
        """Refuse also autoencoders that decode with a noise level of their own."""
        super().check_checkpoint(path)
        if pretrained.component_config(cls.codec_class.vae_class, path, "vae").get(
            "timestep_conditioning"
        ):
            raise pretrained.PretrainedError(
                f"the autoencoder of model.path={path} adds noise before it decodes, which the "
                f"{cls.family} adapter does not: use Lightricks/LTX-2"
            )

    def predict(self, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
        tokens = self.codec.video_tokens
        video, sound = latents[:, :tokens], latents[:, tokens:]
        frames, height, width = self.codec.video_grid
        velocities = self.network(
            hidden_states=video,
            audio_hidden_states=sound,
            encoder_hidden_states=condition["text"],
            audio_encoder_hidden_states=condition["audio_text"],
            timestep=sigmas * 1000,
            sigma=sigmas * 1000,
            num_frames=frames,
            height=height,
            width=width,
            fps=FRAMES_PER_SECOND,
            audio_num_frames=sound.shape[1],
            return_dict=False,
        )
        return torch.cat(velocities, dim=1)

    def _dynamic_shift(self, config: Mapping[str, float], steps: int) -> float:
        """Return the shift mu, linear in the number of video tokens, between the pipeline's own
        bounds (Lightricks/LTX-2)."""
        bounds = {
            "base_image_seq_len": 1024,
            "max_image_seq_len": 4096,
            "base_shift": 0.95,
            "max_shift": 2.05,
        }
        return float(
            calculate_shift(
                self.codec.video_tokens,
                *(config.get(name, usual) for name, usual in bounds.items()),
            )
        )
