"""The embedded scenes family: a text-conditional flow model of drawn scenes, 24x24 RGB, that needs
no download.

Like the digits (`extensions/tasks/digits.py`) it is a small diffusers `FluxTransformer2DModel`
(0.83M parameters) on frozen hashes of words, with pixels as latents: 4x4 patches, tokens [36, 48].
Two things let so small a network draw sharp edges. It sees the row and column of each token as 12
more input channels. And its output is the clean picture, from which the velocity follows.

The committed base model (`make pretrain-scenes`) learned from captions of which a share is wrong in
one word on purpose, so that reinforcement learning has something to improve.

`ScenesEditPolicy` is the same network with a picture as further input channels, which it edits. Its
base model began as that of the scenes. It learned from edits of which a share goes wrong on
purpose.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor
from torch.nn.functional import one_hot

from digenrl.diffusion.sigmas import static_grid
from digenrl.extensions.tasks.digits import base_network, word_vector
from digenrl.models.flux import CHECKPOINT_NAMES
from digenrl.models.latents import token_positions
from digenrl.models.policy import Policy, RecomputeConfig
from digenrl.models.prompt_store import Wording

BASE_FILE = Path(__file__).with_name("scenes_base.safetensors")
EDIT_BASE_FILE = Path(__file__).with_name("scenes_edit_base.safetensors")
SIDE = 24
PAPER = torch.tensor((250, 245, 235)) / 255.0
"""Colour of the background (as in `reward_models.drawn_scenes`), which is zero in latents."""
PATCH = 4
ROWS = SIDE // PATCH
TOKENS, CHANNELS = ROWS * ROWS, 3 * PATCH * PATCH
SCALE = 2.5
"""Factor of latents: (picture - paper) * SCALE has about unit variance where objects are."""
LEAST_SIGMA = 0.05
"""Noise level below which the velocity is computed as at this level, so that it stays bounded."""
TEXT_LENGTH = 7
"""Words of a prompt without "of", such as "a red circle left of a blue square"."""


def build_transformer(sources: int = 0) -> FluxTransformer2DModel:
    """Return the untrained network: one double-stream and three single-stream FLUX blocks, 4 heads
    of 24.

    Its input channels are those of the noisy picture, of row and column, and of `sources` pictures
    to edit.
    """
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=CHANNELS + 2 * ROWS + sources * CHANNELS,
        out_channels=CHANNELS,
        num_layers=1,
        num_single_layers=3,
        attention_head_dim=24,
        num_attention_heads=4,
        joint_attention_dim=40,
        pooled_projection_dim=64,
        guidance_embeds=False,
        axes_dims_rope=(4, 10, 10),
    )


def text_features(texts: Sequence[str]) -> dict[str, Tensor]:
    """Return frozen features of B texts: `text` [B, 7, 40] and `pooled` [B, 64].

    `text` has each word's hash and its one-hot place. `pooled` is the bag of the words at their
    places. Places are needed because FLUX gives text tokens no positions, and the order of words
    has a meaning here.
    """
    text, pooled = torch.zeros(len(texts), TEXT_LENGTH, 40), torch.zeros(len(texts), 64)
    for row, content in enumerate(texts):
        words = [word.rstrip("s") for word in re.findall(r"\w+", content.lower()) if word != "of"][
            :TEXT_LENGTH
        ]
        for place, word in enumerate(words):
            text[row, place, :32] = torch.tensor(word_vector(word, "sequence"))
            text[row, place, 32 + place] = 2.0
            halves = (word_vector(f"{place} {word}", salt) for salt in ("bag", "second bag"))
            pooled[row] += torch.cat([torch.tensor(half) for half in halves]) / math.sqrt(
                len(words)
            )
    return {"text": text, "pooled": pooled}


def pack(pictures: Tensor) -> Tensor:
    """Pack pictures [B, 3, 24, 24] in [0, 1] into latents [B, 36, 48]."""
    centred = (pictures - PAPER[:, None, None]) * SCALE
    patches = centred.view(-1, 3, ROWS, PATCH, ROWS, PATCH).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(-1, TOKENS, CHANNELS)


class ScenesPolicy(Policy):
    """Policy of the scenes flow model (see the module docstring).

    Args:
        path: safetensors with the base weights; None = the committed file, "random" = untrained.
        lora: {rank, alpha, targets, ...}, or None to train every weight (0.83M).
        dtype: compute and storage dtype.
        shift: static sigma shift (`digenrl.diffusion.sigmas`).
        guidance_scale: only 1.0: there is no unconditional branch.
        height, width: only 24.
        keep_reference: with lora=None, keep the frozen base for the KL term.
        seed: seed of the untrained weights.

    Raises:
        ValueError: another resolution, guidance, or weights of another network.
        FileNotFoundError: no weights at `path`.
    """

    family = "scenes"
    lora_pipeline = "FluxPipeline"
    checkpoint_names = CHECKPOINT_NAMES
    base_file: ClassVar[Path] = BASE_FILE
    where: Tensor
    paper: Tensor
    block_lists = ("transformer_blocks", "single_transformer_blocks")

    def __init__(
        self,
        path: str | Path | None = None,
        lora: Mapping[str, Any] | None = None,
        dtype: torch.dtype | str = torch.float32,
        guidance_scale: float = 1.0,
        height: int = SIDE,
        width: int = SIDE,
        shift: float = 3.0,
        gradient_checkpointing: RecomputeConfig = False,
        keep_reference: bool = False,
        seed: int = 0,
    ) -> None:
        if (height, width) != (SIDE, SIDE):
            raise ValueError(
                f"scenes are {SIDE}x{SIDE}, got height={height}, width={width}; set "
                f"sampling.height={SIDE} sampling.width={SIDE}"
            )
        if guidance_scale != 1.0:
            raise ValueError(
                f"scenes has no unconditional branch: guidance_scale={guidance_scale}; set "
                "sampling.guidance_scale=1"
            )
        super().__init__(
            base_network(
                partial(build_transformer, len(self.reads)),
                path,
                self.base_file,
                "make pretrain-scenes",
                dtype,
                seed,
            ),
            latent_shape=(TOKENS, CHANNELS),
            guidance_scale=guidance_scale,
            lora=lora,
            dtype=dtype,
            gradient_checkpointing=gradient_checkpointing,
            keep_reference=keep_reference,
        )
        self.shift = float(shift)
        positions = token_positions(ROWS, ROWS)
        self.register_buffer("image_positions", 2 * positions.float(), persistent=False)
        self.register_buffer(
            "where", one_hot(positions[:, 1:], ROWS).flatten(1).float(), persistent=False
        )
        self.register_buffer("text_positions", torch.zeros(TEXT_LENGTH, 3), persistent=False)
        self.register_buffer("paper", PAPER[:, None, None].clone(), persistent=False)

    def predict(self, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
        """Return the velocity [B, 36, 48] of latents [B, 36, 48] at sigmas [B] under `text` [B, 7,
        40], `pooled` [B, 64]."""
        seen = [self.where.expand(len(latents), -1, -1), *(condition[role] for role in self.reads)]
        clean = self.network(
            hidden_states=torch.cat([latents, *(each.to(latents.dtype) for each in seen)], 2),
            timestep=sigmas.to(latents.dtype),
            encoder_hidden_states=condition["text"].to(latents.dtype),
            pooled_projections=condition["pooled"].to(latents.dtype),
            txt_ids=self.text_positions,
            img_ids=self.image_positions,
            return_dict=False,
        )[0]
        return (latents - clean) / sigmas.clamp(min=LEAST_SIGMA).to(latents.dtype)[:, None, None]

    def encode_prompts(self, wordings: Sequence[Wording]) -> dict[str, Tensor]:
        """Return `text_features` on the policy's device."""
        features = text_features([wording.text for wording in wordings])
        return {key: value.to(self.device) for key, value in features.items()}

    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents [B, 36, 48] to pictures [B, 3, 24, 24], fp32 in [0, 1]."""
        patches = latents.float().view(-1, ROWS, ROWS, 3, PATCH, PATCH).permute(0, 3, 1, 4, 2, 5)
        return (patches.reshape(-1, 3, SIDE, SIDE) / SCALE + self.paper).clamp(0.0, 1.0)

    def sigma_grid(self, steps: int) -> Tensor:
        """Return sigmas [steps + 1], fp32 from 1 to 0 with the static shift."""
        return static_grid(steps, self.shift)


class ScenesEditPolicy(ScenesPolicy):
    """Policy of the scenes flow model that edits the picture of its prompt; arguments in
    `ScenesPolicy`."""

    family = "scenes_edit"
    reads: ClassVar[Mapping[str, tuple[int, int]]] = {"image": (1, 1)}
    base_file = EDIT_BASE_FILE

    def encode_prompts(self, wordings: Sequence[Wording]) -> dict[str, Tensor]:
        """Return `text_features`, and the packed pictures `image` [B, 36, 48]."""
        fitted = np.stack(
            [np.asarray(wording.images[0].fitted(SIDE, SIDE)) for wording in wordings]
        )
        pictures = torch.from_numpy(fitted).movedim(-1, 1) / 255.0
        return {**super().encode_prompts(wordings), "image": pack(pictures).to(self.device)}
