"""Human preference: ImageReward (arXiv:2304.05977), a BLIP whose text encoder looks at the picture,
and a small head.

Score = (head(first token) - 0.167) / 1.033, normalised as by its authors (THUDM/ImageReward
`ImageReward.py`): about standard normal over the pictures that people ranked. BLIP is
transformers'; the published `ImageReward.pt` is loaded by renaming its tensors. A prompt is cut
after 35 tokens, as by its authors.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    BertTokenizer,
    BlipTextConfig,
    BlipTextModel,
    BlipVisionConfig,
    BlipVisionModel,
)

from digenrl.rewards.protocol import resolve_device, sample_frames
from digenrl.types import Prompt
from reward_models.aesthetic import AestheticHead
from reward_models.clip_backbone import CHUNK, clip_pixels
from reward_models.weights import checkpoint, module_digest, read_state, require_plain

MEAN, STD = 0.16717362830052426, 1.0333394966054072
MAX_TOKENS = 35
RENAMED = (
    ("blip.visual_encoder.cls_token", "vision.embeddings.class_embedding"),
    ("blip.visual_encoder.pos_embed", "vision.embeddings.position_embedding"),
    ("blip.visual_encoder.patch_embed.proj.", "vision.embeddings.patch_embedding."),
    ("blip.visual_encoder.norm.", "vision.post_layernorm."),
    ("blip.visual_encoder.blocks.", "vision.encoder.layers."),
    ("blip.text_encoder.", "text."),
    ("mlp.", "head."),
)
"""(prefix in the published file, prefix here); inside a block of the vision encoder also
`INSIDE`."""
INSIDE = ((".norm1.", ".layer_norm1."), (".norm2.", ".layer_norm2."), (".attn.proj.", ".self_attn.projection."),  # noqa: E501
          (".attn.qkv.", ".self_attn.qkv."))  # fmt: skip
_UNUSED = ("blip.vision_proj.", "blip.text_proj.", "blip.text_encoder.embeddings.position_ids")
_FILE, _TOKENIZER = "image_reward.safetensors", "tokenizer"


class ImageRewardModel(nn.Module):
    """The three parts, of the published sizes or tiny ones."""

    def __init__(self, build: str) -> None:
        super().__init__()
        vision: dict[str, Any] = {"image_size": 224, "patch_size": 16, "hidden_size": 1024, "intermediate_size": 4096,  # noqa: E501
                                  "num_hidden_layers": 24, "num_attention_heads": 16}  # fmt: skip
        text: dict[str, Any] = {"vocab_size": 30524, "hidden_size": 768, "intermediate_size": 3072,
                                "num_hidden_layers": 12, "num_attention_heads": 12}  # fmt: skip
        if build == "tiny":
            small = {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
            }
            vision |= small | {"image_size": 32, "patch_size": 8}
            text |= small | {"vocab_size": len(_tiny_vocabulary())}
        vision |= {"layer_norm_eps": 1e-6, "hidden_act": "gelu"}
        # A decoder's layers look at pictures.
        text |= {"encoder_hidden_size": vision["hidden_size"], "is_decoder": True}
        self.vision = BlipVisionModel(BlipVisionConfig(**vision))
        self.text = BlipTextModel(BlipTextConfig(**text), add_pooling_layer=False)
        self.head = AestheticHead(text["hidden_size"])

    @property
    def image_size(self) -> int:
        """Side of the square picture that the model reads."""
        return int(self.vision.config.image_size)

    def forward(self, pixels: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """Scores [N] fp32 of pixels [N, 3, S, S] and tokens [N, L] with their mask."""
        seen = self.vision(pixel_values=pixels).last_hidden_state
        read = self.text(
            input_ids=ids,
            attention_mask=mask,
            encoder_hidden_states=seen,
            encoder_attention_mask=torch.ones(
                seen.shape[:-1], dtype=torch.long, device=seen.device
            ),
        ).last_hidden_state
        return (self.head(read[:, 0].float()) - MEAN) / STD


class ImageReward:
    """Normalised preference; a video scores the mean of its sampled frames.

    Args:
        path: the published `ImageReward.pt`, or its safetensors copy.
        tokenizer: BERT's uncased tokenizer, directory or hub id; ignored by the tiny build.
        build: "real" or "tiny".
        frames: frames sampled from a video.
        device: "auto", or as torch reads it.
        dtype: of BLIP; the head runs in fp32.
    """

    def __init__(
        self,
        path: str | None = None,
        tokenizer: str = "google-bert/bert-base-uncased",
        build: str = "real",
        frames: int = 4,
        device: str = "auto",
        dtype: str = "float32",
    ) -> None:
        self.device, self.dtype, self.frames = resolve_device(device), getattr(torch, dtype), frames
        with checkpoint(path, build, _write_tiny) as source:
            file = Path(source) / _FILE if build == "tiny" else Path(source)
            model = ImageRewardModel(build)
            model.load_state_dict(
                renamed(read_state(file, "give `path` the downloaded ImageReward.pt"))
            )
            words = Path(source) / _TOKENIZER if build == "tiny" else tokenizer
            require_plain(words or source)
            self.tokenizer = BertTokenizer.from_pretrained(words, local_files_only=True)
        self.model = model.to(self.device, self.dtype).eval().requires_grad_(False)
        self.model.head.float()
        self.model_id = (
            f"image_reward({Path(path).name if path and build == 'real' else 'tiny'}, "
            f"frames={frames})"
        )
        self.weights_digest = module_digest(self.model)

    @torch.no_grad()
    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Return [B] scores."""
        sampled = sample_frames(media, self.frames)
        tokens = self.tokenizer(
            [prompt.text for prompt in prompts],
            padding="max_length",
            truncation=True,
            max_length=MAX_TOKENS,
            return_tensors="pt",
        ).to(self.device)
        rows = torch.arange(len(prompts), device=self.device).repeat_interleave(sampled.shape[1])
        parts = [
            self.model(
                self._pixels(pictures), tokens.input_ids[index], tokens.attention_mask[index]
            )
            for pictures, index in zip(
                sampled.flatten(0, 1).split(CHUNK), rows.split(CHUNK), strict=True
            )
        ]
        return torch.cat(parts).unflatten(0, sampled.shape[:2]).mean(1)

    def _pixels(self, pictures: Tensor) -> Tensor:
        return clip_pixels(pictures.to(self.device), self.model.image_size).to(self.dtype)


def renamed(published: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the published checkpoint under the names of `ImageRewardModel`; ValueError for a
    tensor of another model."""
    return {
        _rename(name): tensor for name, tensor in published.items() if not name.startswith(_UNUSED)
    }


def _rename(name: str, way: int = 1) -> str:
    """Return the name here of a published tensor; with `way` -1 the inverse, for the tiny
    checkpoint."""
    for old, new in (pair[::way] for pair in RENAMED):
        if name.startswith(old):
            name = new + name.removeprefix(old)
            for before, after in (
                (pair[::way] for pair in INSIDE) if "vision.encoder.layers." in (old, new) else ()
            ):
                name = name.replace(before, after)
            return name
    raise ValueError(
        f"{name} is no tensor of ImageReward: give `path` the file ImageReward.pt of "
        "THUDM/ImageReward."
    )


def _tiny_vocabulary() -> dict[str, int]:
    letters = [chr(code) for code in range(33, 127)]
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *letters,
        *(f"##{letter}" for letter in letters),
    ]
    return {word: number for number, word in enumerate(words)}


def _write_tiny(folder: Path) -> None:
    state = ImageRewardModel("tiny").state_dict()
    save_file(
        {_rename(name, -1): tensor.contiguous() for name, tensor in state.items()}, folder / _FILE
    )
    BertTokenizer(vocab=_tiny_vocabulary()).save_pretrained(folder / _TOKENIZER)
