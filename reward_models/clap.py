"""Alignment of sound and prompt: the cosine of CLAP's embeddings of both (arXiv:2211.06687), by
transformers.

The checkpoint laion/clap-htsat-unfused (Apache 2.0) hears ten seconds at 48 kHz in one channel.
Channels are averaged, and a longer sound scores the mean of its pieces of ten seconds. The cosine
is not clipped at 0, so that a bad sound still has a ranking.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from scipy.signal import resample_poly
from torch import Tensor

from digenrl.rewards.protocol import resolve_device
from digenrl.types import Prompt, Sound
from reward_models.clip_backbone import unit_rows
from reward_models.weights import checkpoint, module_digest, read_state, require_plain

_FILE, _TINY = "pytorch_model.bin", "model.safetensors"


class Clap:
    """Cosine in [-1, 1] of sound and prompt.

    Args:
        path: the published `pytorch_model.bin` (read as weights alone), or a safetensors copy.
        processor: folder or hub id with the configuration of the model, its feature extractor and
            its tokenizer; ignored by the tiny build.
        build: "real" or "tiny".
        device: "auto", or as torch reads it.
        dtype: of the model.
    """

    hears = True

    def __init__(
        self,
        path: str | None = None,
        processor: str = "laion/clap-htsat-unfused",
        build: str = "real",
        device: str = "auto",
        dtype: str = "float32",
    ) -> None:
        from transformers import ClapConfig, ClapModel, ClapProcessor

        self.device, self.dtype = resolve_device(device), getattr(torch, dtype)
        with checkpoint(path, build, _write_tiny) as source:
            tiny = build == "tiny"
            file, folder = (Path(source) / _TINY, source) if tiny else (Path(source), processor)
            require_plain(folder)
            model, found = ClapModel.from_pretrained(
                None,
                config=ClapConfig.from_pretrained(folder, local_files_only=True),
                state_dict=read_state(file, f"give `path` the downloaded {_FILE}"),
                output_loading_info=True,
            )
            if absent := sorted(found["missing_keys"]):
                raise ValueError(
                    f"{file} lacks {len(absent)} tensors of CLAP (first: {absent[0]}): give `path` "
                    f"the file {_FILE} of {processor}."
                )
            self._processor = ClapProcessor.from_pretrained(folder, local_files_only=True)
        self.model = model.to(self.device, self.dtype).eval().requires_grad_(False)
        self.model_id = f"clap({'tiny' if tiny else processor})"
        self.weights_digest = module_digest(self.model)

    @torch.no_grad()
    def __call__(self, media: Tensor, prompts: Sequence[Prompt], sound: Sound) -> Tensor:
        """Return [B]; the media are not looked at."""
        extractor = self._processor.feature_extractor
        mono = sound.waveform.mean(1).double().cpu().numpy()  # [B, samples]
        heard = resample_rows(mono, sound.rate, extractor.sampling_rate)
        texts, most = self._embed_texts(prompts), extractor.nb_max_samples
        pieces = [heard[:, first : first + most] for first in range(0, heard.shape[1], most)]
        cosines = [(self._embed_sound(piece) * texts).sum(-1) for piece in pieces]
        return torch.stack(cosines).mean(0)

    def _embed_sound(self, heard: NDArray[np.float64]) -> Tensor:
        """Return unit embeddings [B, D] of at most ten seconds [B, samples]."""
        extractor = self._processor.feature_extractor
        features = extractor(
            [*heard], sampling_rate=extractor.sampling_rate, return_tensors="pt"
        ).input_features
        return unit_rows(self.model.get_audio_features(features.to(self.device, self.dtype)))

    def _embed_texts(self, prompts: Sequence[Prompt]) -> Tensor:
        """Return unit embeddings [B, D]; texts longer than the model's context are cut."""
        config = self.model.config.text_config
        tokens = self._processor.tokenizer(
            [prompt.text for prompt in prompts],
            padding=True,
            truncation=True,
            # Positions begin behind the number of the padding.
            max_length=config.max_position_embeddings - config.pad_token_id - 1,
            return_tensors="pt",
        ).to(self.device)
        return unit_rows(self.model.get_text_features(tokens.input_ids, tokens.attention_mask))


def resample_rows(waveform: NDArray[np.float64], rate: int, wanted: int) -> NDArray[np.float64]:
    """Return [B, samples] at `wanted` Hz of [B, samples] at `rate` Hz, by a polyphase filter."""
    if rate == wanted:
        return waveform
    common = gcd(rate, wanted)
    changed: NDArray[np.float64] = resample_poly(waveform, wanted // common, rate // common, axis=1)
    return changed


def _write_tiny(folder: Path) -> None:
    """Write a CLAP of one layer a stage with a byte-level tokenizer, laid out as the hub's."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import (
        ClapConfig,
        ClapFeatureExtractor,
        ClapModel,
        ClapProcessor,
        RobertaTokenizer,
    )

    symbols = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *sorted(ByteLevel.alphabet())]
    tokenizer = RobertaTokenizer(
        vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]
    )
    extractor = ClapFeatureExtractor(truncation="rand_trunc", padding="repeatpad")
    ClapProcessor(extractor, tokenizer).save_pretrained(folder)
    text = {
        "vocab_size": len(symbols),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    audio = {
        "hidden_size": 64,
        "patch_embeds_hidden_size": 8,
        "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 1, 2, 2],
    }
    model = ClapModel(ClapConfig(text_config=text, audio_config=audio, projection_dim=16))
    model.config.save_pretrained(folder)
    save_file(model.state_dict(), folder / _TINY)
