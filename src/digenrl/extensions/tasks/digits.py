"""The embedded digits family: a text-conditional flow model of 8x8 handwritten digits that needs no
download.

The network is a small diffusers `FluxTransformer2DModel` (the architecture class of FLUX.1, 312k
parameters), so a run exercises the transformer, LoRA and SDE paths of the real families. Two things
are simpler, on purpose:

* There is no VAE. Latents are pixels in [-1, 1], in 2x2 patches packed as FLUX packs its VAE
  latents -> [16, 4].
* There is no tokenizer and no text encoder. Text features are frozen hashes: a word is a fixed
  pseudo-random vector. The sequence input is a prompt's first words, the pooled input their bag. A
  word unseen in pretraining means nothing.

The committed base model (`make pretrain`) learned from captions of which a share is wrong *on
purpose*. Without these errors pretraining solves the task (0.96 of samples right), and
reinforcement learning has nothing to improve.
"""

from __future__ import annotations

import hashlib
import math
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file
from torch import Tensor, nn

from digenrl.diffusion.sigmas import static_grid
from digenrl.images import PromptImage
from digenrl.models.codec import Codec
from digenrl.models.guidance import Guidance
from digenrl.models.latents import pack_latents as pack_latents
from digenrl.models.latents import token_positions, unpack_latents
from digenrl.models.lora import LoraKeys
from digenrl.models.policy import Policy, RecomputeConfig
from digenrl.models.wording import Wording

BASE_FILE = Path(__file__).with_name("digits_base.safetensors")
SIDE = 8
PATCH = 2
TOKENS = (SIDE // PATCH) ** 2
CHANNELS = PATCH * PATCH
TEXT_WIDTH = 32
TEXT_LENGTH = 4
"""Words of the sequence input. Later words reach the model only through the pooled bag."""


def build_transformer() -> FluxTransformer2DModel:
    """Return the untrained network: one double-stream and two single-stream FLUX blocks, 4 heads of
    16."""
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=CHANNELS,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        guidance_embeds=False,
        axes_dims_rope=(4, 6, 6),
    )


@lru_cache(maxsize=4096)
def word_vector(word: str, salt: str) -> tuple[float, ...]:
    """Return 32 values of unit variance from the word's 64-byte hash, equal on every machine and
    library version."""
    digest = hashlib.blake2b(f"{salt}:{word}".encode(), digest_size=2 * TEXT_WIDTH).digest()
    units = [int.from_bytes(digest[2 * i : 2 * i + 2], "big") for i in range(TEXT_WIDTH)]
    return tuple(math.sqrt(3.0) * ((unit + 0.5) / 32768.0 - 1.0) for unit in units)


def text_features(texts: Sequence[str]) -> dict[str, Tensor]:
    """Return frozen hash features of B texts: `text` [B, 4, 32] (zeros after the last word),
    `pooled` [B, 32], fp32."""
    text = torch.zeros(len(texts), TEXT_LENGTH, TEXT_WIDTH)
    pooled = torch.zeros(len(texts), TEXT_WIDTH)
    for row, content in enumerate(texts):
        words = re.findall(r"\w+", content.lower())
        for position, word in enumerate(words[:TEXT_LENGTH]):
            text[row, position] = torch.tensor(word_vector(word, "sequence"))
        if words:
            bag = torch.tensor([word_vector(word, "bag") for word in words])
            pooled[row] = bag.sum(dim=0) / math.sqrt(len(words))
    return {"text": text, "pooled": pooled}


def base_network(
    build: Callable[[], FluxTransformer2DModel],
    path: str | Path | None,
    committed: Path,
    command: str,
    dtype: torch.dtype | str,
    seed: int,
) -> FluxTransformer2DModel:
    """Return an embedded family's network with weights, in `dtype`.

    Args:
        path: file of the weights; None = the `committed` file, "random" = untrained weights from
            `seed`.
        command: the command that makes the file, for the error message.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the weights belong to another network.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = build()
    if path != "random":
        file = Path(path or committed)
        if not file.is_file():
            raise FileNotFoundError(
                f"no base weights at {file}; run `{command}`, or set model.path=null"
            )
        weights, own = load_file(file), transformer.state_dict()
        wrong = sorted(set(own) ^ set(weights)) or [
            key for key in own if own[key].shape != weights[key].shape
        ]
        if wrong:
            raise ValueError(
                f"{file} holds another network: {len(wrong)} tensors differ ({wrong[0]}, ...); run "
                f"`{command}`"
            )
        transformer.load_state_dict(weights)
    storage = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return transformer if storage == torch.float32 else transformer.to(storage)


class EmbeddedCodec(Codec):
    """Frozen features of texts, and pictures as latents."""

    @staticmethod
    @abstractmethod
    def frozen_features(texts: Sequence[str]) -> dict[str, Tensor]:
        """Return frozen features of B texts: `text` [B, words, d] and `pooled` [B, d], fp32."""

    def encode_prompts(self, wordings: Sequence[Wording]) -> dict[str, Tensor]:
        """Return `frozen_features` on the network's device."""
        features = self.frozen_features([wording.text for wording in wordings])
        return {key: value.to(self.device) for key, value in features.items()}


class EmbeddedPolicy(Policy):
    """Policy of a small FLUX network without autoencoder and text encoder.

    Args:
        path: safetensors with the base weights; None = the committed file, "random" = untrained.
        lora: {rank, alpha, targets, ...}, or None to train every weight.
        dtype: compute and storage dtype; float32 keeps replay bit-equal to sampling for any number
            of steps per forward (measured on x86 CPUs, tests/extensions/tasks/test_digits.py).
        guidance_scale: only 1.0: the base was never trained without a caption, so there is no
            unconditional branch.
        height, width: only `side`; None = `side`.
        shift: static sigma shift (`digenrl.diffusion.sigmas`); None = `usual_shift`.
        keep_reference: with lora=None, keep the frozen base for the KL term.
        seed: seed of the untrained weights.

    Raises:
        ValueError: another resolution, guidance, or weights of another network.
        FileNotFoundError: no weights at `path`.
    """

    lora_pipeline = "FluxPipeline"
    block_lists = ("transformer_blocks", "single_transformer_blocks")
    side: ClassVar[int]
    """Pixels of height and width."""
    base_file: ClassVar[Path]
    """Committed weights of the base model."""
    command: ClassVar[str]
    """Command that makes the committed weights."""
    usual_shift: ClassVar[float] = 1.0
    """Sigma shift of the base model's training; 1 = linear."""
    tokens: ClassVar[tuple[int, int]]
    """Number and channels of latent tokens."""
    position_unit: ClassVar[float] = 1.0
    """Rotary positions between neighbouring tokens."""
    text_length: ClassVar[int]
    """Words of the sequence input."""

    @classmethod
    def check(cls, settings: Mapping[str, Any]) -> None:
        """Build the model, which takes no time, without an adapter: as `Policy.check`."""
        given = {key: held for key, held in settings.items() if not key.startswith("_")}
        try:
            cls(**given | {"lora": None})
        except FileNotFoundError as error:
            raise ValueError(f"model.path: {error}") from error

    def __init__(
        self,
        path: str | Path | None = None,
        lora: LoraKeys | None = None,
        dtype: torch.dtype | str = torch.float32,
        guidance_scale: float = 1.0,
        height: int | None = None,
        width: int | None = None,
        shift: float | None = None,
        gradient_checkpointing: RecomputeConfig = False,
        keep_reference: bool = False,
        seed: int = 0,
    ) -> None:
        side = self.side
        if (height or side, width or side) != (side, side):
            raise ValueError(
                f"{self.family} are {side}x{side}, got height={height}, width={width}; set "
                f"sampling.height={side} sampling.width={side}"
            )
        if guidance_scale != 1.0:
            raise ValueError(
                f"{self.family} has no unconditional branch: guidance_scale={guidance_scale}; set "
                "sampling.guidance_scale=1"
            )
        network = base_network(self.build_network, path, self.base_file, self.command, dtype, seed)
        super().__init__(
            network,
            self.codec_class(self.family, network, self.tokens, Guidance()),
            lora=lora,
            dtype=dtype,
            gradient_checkpointing=gradient_checkpointing,
            keep_reference=keep_reference,
        )
        self.shift = self.usual_shift if shift is None else float(shift)
        rows = math.isqrt(self.tokens[0])
        positions = self.position_unit * token_positions(rows, rows).float()
        self.register_buffer("image_positions", positions, persistent=False)
        self.register_buffer("text_positions", torch.zeros(self.text_length, 3), persistent=False)
        self.add_family_parts()

    @classmethod
    def outline(cls, settings: Mapping[str, object]) -> nn.Module:
        """Return the network without weights."""
        with torch.device("meta"):
            return cls.build_network()

    @classmethod
    @abstractmethod
    def build_network(cls) -> FluxTransformer2DModel:
        """Return the untrained network."""

    def predict(self, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
        """Return the network's output for its input tokens [B, N, C] at sigmas [B]."""
        return self.network(
            hidden_states=latents,
            timestep=sigmas.to(latents.dtype),
            encoder_hidden_states=condition["text"].to(latents.dtype),
            pooled_projections=condition["pooled"].to(latents.dtype),
            txt_ids=self.text_positions,
            img_ids=self.image_positions,
            return_dict=False,
        )[0]

    def sigma_grid(self, steps: int) -> Tensor:
        """Return sigmas [steps + 1], fp32 from 1 to 0 with the static shift."""
        return static_grid(steps, self.shift)


class DigitsCodec(EmbeddedCodec):
    """Hashes of words, grey pictures."""

    frozen_features = staticmethod(text_features)

    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents [B, 16, 4] to images [B, 1, 8, 8], fp32 in [0, 1]."""
        return (unpack_latents(latents.float(), SIDE, SIDE) / 2 + 0.5).clamp(0.0, 1.0)

    def encode_media(self, images: Sequence[PromptImage]) -> Tensor:
        """Return the latents [B, 16, 4] of pictures, whose grey is the mean of their colours."""
        fitted = np.stack([np.asarray(image.fit_to_size(SIDE, SIDE)) for image in images])
        return pack_latents(torch.from_numpy(fitted).float().mean(3)[:, None] / 127.5 - 1.0)


class DigitsPolicy(EmbeddedPolicy):
    """Policy of the digits flow model (see the module docstring); arguments in `EmbeddedPolicy`."""

    family = "digits"
    codec_class = DigitsCodec
    side, base_file, command = SIDE, BASE_FILE, "make pretrain"
    tokens, text_length = (TOKENS, CHANNELS), TEXT_LENGTH
    build_network = staticmethod(build_transformer)
