"""MiniMax-H3 text-to-video with its sound: states of Qwen3-VL, one stream of text, sound and video,
no guidance.

Latents are rows of 32 numbers, [N, 32]. A token of the video is three of them; each of the two
channels of sound follows behind with one row per 25 ms. Only the video is trained. The sound
follows the ODE, on noise levels of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, ClassVar

import diffusers
import torch
from torch import Tensor
from torch.nn.functional import pad

from digenrl.extensions.zoo.blocks import run_block
from digenrl.extensions.zoo.since import require_diffusers
from digenrl.models import latents as sizes
from digenrl.models import pretrained
from digenrl.models.lora import Names
from digenrl.models.pipeline import DiffusersPolicy
from digenrl.models.pipeline_codec import DiffusersCodec
from digenrl.models.policy import ModelKeys

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, ModelMixin

require_diffusers(
    "0.42", "MiniMaxH3Transformer3DModel", "AutoencoderKLMiniMaxH3", "MiniMaxH3Scheduler"
)

from diffusers.modular_pipelines.minimax_h3 import encoders  # noqa: E402

VIDEO, TEXT, SOUND = 0, 1, 2
"""Numbers of the modalities in the network's tables, three for each noise level."""
LAYER = 50
"""State of Qwen3-VL that the network reads."""
PIXEL_MEAN, PIXEL_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""What the autoencoder's colours are normalised by."""
CHUNK, LATENTS = 17, 5
"""Frames of a chunk of the autoencoder, and its latent frames; a video ends with 5 frames in 2."""
ROW = 32
"""Numbers of a row of latents."""
SOUNDS_PER_FRAME = 40 / 24
"""Rows of each channel of sound per frame: 40 and 24 a second."""


def token_positions(grid: tuple[int, int, int], sounds: int, device: torch.device) -> Tensor:
    """Return time, row and column [sounds + tokens, 3], fp64, of the rows of two channels of sound,
    and of the video's tokens in `grid`. Time is counted in rows of sound.

    A picture is 32 wide and high in the mean of both, and its middle lies at 16. The channels of
    sound are at its first and last column.
    """
    order = [torch.arange(size, device=device, dtype=torch.float64) for size in grid]
    frames = CHUNK * (order[0] // LATENTS) + (4 * (order[0] % LATENTS) - 3).clamp(min=0)
    mean = math.sqrt(grid[1] * grid[2])
    sides = [
        16.0 + 32.0 * (each - size / 2) / mean
        for each, size in zip(order[1:], grid[1:], strict=True)
    ]
    video = torch.meshgrid(SOUNDS_PER_FRAME * frames, *sides, indexing="ij")
    heard = torch.arange(sounds // 2, device=device, dtype=torch.float64)
    columns = torch.stack([sides[1][0], sides[1][-1]]).repeat_interleave(sounds // 2)
    sound = torch.stack([heard.repeat(2), torch.zeros_like(columns), columns], dim=1)
    return torch.cat([sound, torch.stack([axis.flatten() for axis in video], dim=1)])


class MiniMaxH3Transformer3DModel(diffusers.MiniMaxH3Transformer3DModel):
    """diffusers' network for one row of text-to-video, under the name that checkpoints use.

    The original has no padding. Here the padding of a prompt is masked, and the video's time begins
    behind the words that are read.
    """

    @wraps(diffusers.MiniMaxH3Transformer3DModel.__init__)  # type: ignore[misc]  # configurations are read by it
    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)

    def forward(
        self,
        video: Tensor,
        sound: Tensor,
        text: Tensor,
        levels: Tensor,
        grid: tuple[int, int, int],
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the velocities of video and sound, towards the data.

        Args:
            video, sound: [1, tokens, numbers].
            text: [1, words, d]; mask: [1, words], which of them are read, None = all.
            levels: [2], 1 - sigma of video and of sound.
            grid: frames, rows and columns of the video's tokens.
        """
        words, ends = text.shape[1], (text.shape[1], text.shape[1] + sound.shape[1])
        behind = token_positions(grid, sound.shape[1], text.device)
        order = torch.arange(words, device=text.device, dtype=behind.dtype)
        behind[:, 0] += words if mask is None else mask.sum()
        rotary = self.rope(torch.cat([pad(order[:, None], (0, 2)), behind]))
        read = whole = None
        if mask is not None:
            read = mask.bool()[:, None, None]
            whole = pad(read, (0, len(behind)), value=True)
        states = self.context_embedder(text.to(self.context_embedder.weight.dtype))
        for block in self.token_refiner.refiner_blocks:
            states = states + block.attn(block.norm1(states), None, read)
            states = states + block.ff(block.norm2(states))
        states = self.token_refiner.final_norm(states)
        inputs = (
            layer(tokens.to(layer.weight.dtype)).to(states)
            for layer, tokens in ((self.audio_proj_in, sound), (self.proj_in, video))
        )
        states = torch.cat([states, *inputs], dim=1)
        clock = self.time_proj(levels).to(self.time_embedder.linear_1.weight.dtype)
        clock = self.time_embedder(clock)
        counts = (words, TEXT), (sound.shape[1], 3 + SOUND), (video.shape[1], VIDEO)
        table = torch.cat(
            [torch.full((count,), row, device=states.device) for count, row in counts]
        )
        given = clock, table, rotary, whole
        for block in self.transformer_blocks:
            states = run_block(self, block, states, *given)
        states = self.norm_out(states, clock, table // 3).to(self.proj_out.weight.dtype)
        return self.proj_out(states[:, ends[1] :]), self.audio_proj_out(
            states[:, ends[0] : ends[1]]
        )


class MiniMaxH3Codec(DiffusersCodec):
    """Qwen3-VL texts, videos in rows of 32 numbers."""

    vae_class = diffusers.AutoencoderKLMiniMaxH3
    channels = 24
    vae_stride = 16
    spatial_stride = 32
    temporal_stride = 4
    encoders = ("text_encoder", "tokenizer", "processor")
    has_sound = True
    sound_decoders: ClassVar[Mapping[str, tuple[type[Any], ...]]] = {
        "audio_vae": (diffusers.AutoencoderKLMiniMaxH3Audio,)
    }

    @property
    def token_grid(self) -> tuple[int, int, int]:
        """Frames, rows and columns of the video's tokens."""
        return self._grid_shape(self.height, self.width, self.frames)

    @property
    def video_rows(self) -> int:
        """Number of rows of latents that the video takes. The sound's follow."""
        return 3 * math.prod(self.token_grid)

    @cached_property
    def _pipeline(self) -> DiffusionPipeline:
        pretrained.hide_progress_bars()
        pipeline = diffusers.MiniMaxH3ModularPipeline(
            pretrained_model_name_or_path=str(pretrained.folder_of(self.path, "model_index.json")),
            workflow="t2va",
            local_files_only=True,
        )
        pipeline.load_components([*self.encoders], dtype=self.dtype, local_files_only=True)
        absent = [name for name in self.encoders if getattr(pipeline, name) is None]
        if absent:  # diffusers logs why
            raise pretrained.missing_error(self.path, ", ".join(absent), "see the log")
        return pipeline

    def encode_text(self, pipeline: DiffusionPipeline, text: str) -> dict[str, Tensor]:
        """Return Qwen3-VL states [1, max_sequence_length, d], zero-padded, and the mask [1,
        max_sequence_length]."""
        self.report_long_prompt(pipeline.tokenizer, text, self.max_sequence_length)
        ids = pipeline.tokenizer(text or " ", add_special_tokens=False).input_ids
        states = encoders.get_qwen3vl_prompt_embeds(
            pipeline.text_encoder,
            pipeline.processor,
            ids[: self.max_sequence_length],
            text_encoder_layer=LAYER,
            device=pipeline.text_encoder.device,
            dtype=pipeline.text_encoder.dtype,
        )
        padding = self.max_sequence_length - states.shape[1]
        mask = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
        return {"text": pad(states, (0, 0, 0, padding)), "mask": pad(mask, (0, padding))}

    def decode_latents(self, vae: ModelMixin, latents: Tensor) -> Tensor:
        """Decode the rows of the video only."""
        tokens = latents[:, : self.video_rows].unflatten(1, (*self.token_grid, 3)).flatten(4)
        video = tokens.unflatten(4, (self.channels, 2, 2)).permute(0, 4, 1, 2, 5, 3, 6)
        video = video.flatten(5).flatten(3, 4)
        mean, std, pixel_mean, pixel_std = (
            video.new_tensor(values).view(1, -1, 1, 1, 1)
            for values in (
                vae.config.latents_mean,
                vae.config.latents_std,
                PIXEL_MEAN,
                PIXEL_STD,
            )
        )
        decoded = vae.decode(video * std + mean, return_dict=False)[0]
        return (decoded * pixel_std + pixel_mean) * 2.0 - 1.0

    def decode_waveform(self, decoders: Sequence[ModelMixin], latents: Tensor) -> Tensor:
        """Decode the rows of each of the two channels of sound by itself."""
        (autoencoder,) = decoders
        # [B, 2 * rows, 32] -> [B * 2, 32, rows]
        sound = latents[:, self.video_rows :].unflatten(1, (2, -1)).flatten(0, 1).transpose(1, 2)
        mean, std = (
            sound.new_tensor(values).view(1, -1, 1)
            for values in (autoencoder.config.latents_mean, autoencoder.config.latents_std)
        )
        decoded = autoencoder.decode(sound * std + mean, return_dict=False)[0]  # [B * 2, 1, n]
        return decoded.unflatten(0, (-1, 2)).flatten(2)

    @classmethod
    def check_size(cls, family: str, height: int, width: int, frames: int) -> None:
        for name, side in (("height", height), ("width", width)):
            sizes.require_multiple(name, side, cls.spatial_stride)

    @classmethod
    def _grid_shape(cls, height: int, width: int, frames: int) -> tuple[int, int, int]:
        """Return (frames, rows, columns) of the video's tokens. Of five latent frames the first
        stands for one frame, and the others for four each."""
        chunks, rest = divmod(frames - 1, CHUNK)
        latent = chunks * LATENTS + 1 + -(-rest // cls.temporal_stride)
        return latent, height // cls.spatial_stride, width // cls.spatial_stride

    @classmethod
    def latent_shape_of(cls, height: int, width: int, frames: int) -> tuple[int, ...]:
        grid = cls._grid_shape(height, width, frames)
        return 3 * math.prod(grid) + 2 * round(SOUNDS_PER_FRAME * frames), ROW


CHECKPOINT_NAMES: Names = {
    r"transformer_blocks\.(\d+)\.": {
        ("attn.to_q", "attn.to_k", "attn.to_v"): "blocks.{}.attn.qkv_proj",
        ("attn.to_out.0",): "blocks.{}.attn.out_proj",
        ("ff.net.0.proj",): "blocks.{}.mlp.fc1",
        ("ff.net.2",): "blocks.{}.mlp.fc2",
    }
}
"""Names in the published single files, which hold queries, keys and values one after the other."""


class MiniMaxH3Policy(DiffusersPolicy):
    """Policy of MiniMax-H3 text-to-video; arguments in `DiffusersPolicy`.

    The network takes one sample at a time. Another solver than Euler is refused: it would count the
    sound on the video's noise levels.
    """

    family = "minimax_h3"
    codec_class = MiniMaxH3Codec
    codec: MiniMaxH3Codec
    pipelines = ("MiniMaxH3ModularPipeline",)
    transformer_class = MiniMaxH3Transformer3DModel
    checkpoint_names = CHECKPOINT_NAMES
    swapped_halves = ("ff.net.0.proj",)  # there the gate comes first
    own_levels = True
    attention = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")
    feed_forward = ("ff.net.0.proj", "ff.net.2")
    unused = ("audio_proj_out",)

    def add_family_parts(self) -> None:
        self.drawn = self.codec.video_rows
        self.shifts = [
            float(
                pretrained.component_config(diffusers.MiniMaxH3Scheduler, self.path, name)["shift"]
            )
            for name in ("scheduler", "audio_scheduler")
        ]
        if self.shift is not None:
            self.shifts[0] = self.shift

    def sound_levels(self, sigmas: Tensor) -> Tensor:
        """Return the noise levels of the sound where those of the video are `sigmas`: one grid,
        shifted differently."""
        video, sound = self.shifts
        plain = sigmas / (video - (video - 1.0) * sigmas)
        return sound * plain / (1.0 + (sound - 1.0) * plain)

    def paced(self, velocity: Tensor, sigmas: Tensor, following: Tensor) -> Tensor:
        """Return the velocity as `Policy.paced` says."""
        steps = self.sound_levels(following) - self.sound_levels(sigmas)
        ratio = (steps / (following - sigmas)).view(-1, 1, 1).to(velocity)
        return torch.cat(
            [velocity[:, : self.drawn], velocity[:, self.drawn :] * ratio],
            dim=1,
        )

    def predict(self, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
        text, mask = condition["text"], condition.get("mask")
        levels = 1.0 - torch.stack([sigmas, self.sound_levels(sigmas)], dim=1)
        video = latents[:, : self.drawn].unflatten(1, (-1, 3)).flatten(2)
        velocities = []
        for row in range(len(latents)):
            one = slice(row, row + 1)
            seen, heard = self.network(
                video[one],
                latents[one, self.drawn :],
                text[one],
                levels[row],
                self.codec.token_grid,
                None if mask is None else mask[one],
            )
            rows = seen.unflatten(2, (3, ROW)).flatten(1, 2)
            velocities.append(torch.cat([rows, heard.to(rows)], dim=1))
        return -torch.cat(velocities)  # theirs leads to the data

    def sigma_grid(self, steps: int) -> Tensor:
        """Return [steps + 1] fp32: the pipeline counts the last noise level, 0, as a step."""
        scheduler = diffusers.MiniMaxH3Scheduler(self.shifts[0])
        scheduler.set_timesteps(steps + 1)
        return scheduler.sigmas

    @classmethod
    def check(cls, settings: ModelKeys) -> None:
        """Refuse also videos that the autoencoder cannot decode."""
        super().check(settings)
        sizes.require_multiple("frames", settings.get("frames", 1), CHUNK, offset=LATENTS)
