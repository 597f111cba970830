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
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor
from torch.nn.functional import one_hot

from digenrl.extensions.tasks.digits import EmbeddedCodec, EmbeddedPolicy, word_vector
from digenrl.models.latents import token_positions
from digenrl.models.wording import Wording

BASE_FILE = Path(__file__).with_name("scenes_base.safetensors")
EDIT_BASE_FILE = Path(__file__).with_name("scenes_edit_base.safetensors")
STUDENT_FILE = Path(__file__).with_name("scenes_student.safetensors")
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


def pack_pictures(pictures: Tensor) -> Tensor:
    """Pack pictures [B, 3, 24, 24] in [0, 1] into latents [B, 36, 48]."""
    centred = (pictures - PAPER[:, None, None]) * SCALE
    patches = centred.view(-1, 3, ROWS, PATCH, ROWS, PATCH).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(-1, TOKENS, CHANNELS)


class ScenesCodec(EmbeddedCodec):
    """Hashes of words at their places, pictures in colour."""

    frozen_features = staticmethod(text_features)

    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents [B, 36, 48] to pictures [B, 3, 24, 24], fp32 in [0, 1]."""
        patches = latents.float().view(-1, ROWS, ROWS, 3, PATCH, PATCH).permute(0, 3, 1, 4, 2, 5)
        paper = PAPER[:, None, None].to(latents.device)
        return (patches.reshape(-1, 3, SIDE, SIDE) / SCALE + paper).clamp(0.0, 1.0)


class ScenesEditCodec(ScenesCodec):
    """The scenes' texts and pictures, and the picture that is edited."""

    reads: ClassVar[Mapping[str, tuple[int, int]]] = {"image": (1, 1)}

    def encode_prompts(self, wordings: Sequence[Wording]) -> dict[str, Tensor]:
        """Return the features, and the packed pictures `image` [B, 36, 48]."""
        fitted = np.stack(
            [np.asarray(wording.images[0].fit_to_size(SIDE, SIDE)) for wording in wordings]
        )
        pictures = torch.from_numpy(fitted).movedim(-1, 1) / 255.0
        return {
            **super().encode_prompts(wordings),
            "image": pack_pictures(pictures).to(self.device),
        }


class ScenesPolicy(EmbeddedPolicy):
    """Policy of the scenes flow model (see the module docstring); arguments in `EmbeddedPolicy`."""

    family = "scenes"
    codec_class = ScenesCodec
    side, base_file, command = SIDE, BASE_FILE, "make pretrain-scenes"
    tokens, text_length = (TOKENS, CHANNELS), TEXT_LENGTH
    usual_shift, position_unit = 3.0, 2.0
    where: Tensor

    def add_family_parts(self) -> None:
        where = one_hot(token_positions(ROWS, ROWS)[:, 1:], ROWS).flatten(1).float()
        self.register_buffer("where", where, persistent=False)

    @classmethod
    def build_network(cls) -> FluxTransformer2DModel:
        return build_transformer(len(cls.codec_class.reads))

    def predict(self, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
        """Return the velocity [B, 36, 48] of latents [B, 36, 48] at sigmas [B] under `text` [B, 7,
        40], `pooled` [B, 64]."""
        seen = [
            self.where.expand(len(latents), -1, -1),
            *(condition[role] for role in self.codec.reads),
        ]
        given = torch.cat([latents, *(each.to(latents.dtype) for each in seen)], 2)
        clean = super().predict(given, sigmas, condition)
        return (latents - clean) / sigmas.clamp(min=LEAST_SIGMA).to(latents.dtype)[:, None, None]


class ScenesEditPolicy(ScenesPolicy):
    """Policy of the scenes flow model that edits the picture of its prompt; arguments in
    `EmbeddedPolicy`."""

    family = "scenes_edit"
    codec_class = ScenesEditCodec
    base_file = EDIT_BASE_FILE


class ScenesStudentPolicy(ScenesPolicy):
    """Policy of the scenes flow model that was distilled to two steps; arguments in
    `EmbeddedPolicy`."""

    family = "scenes_student"
    base_file, command = STUDENT_FILE, "make pretrain-scenes ARGS=student"
