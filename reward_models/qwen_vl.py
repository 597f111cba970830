"""What reward models on Qwen-VL share: a question about pictures goes in, and heads read the hidden
states of reward tokens in it.

The published models number all tokens 0, 1, 2 ... and give pictures no rows and columns. Their
authors' forward passes embeddings without ids, and transformers then counts tokens
(KwaiVGI/VideoAlign `trainer.py`, MizzenAI/HPSv3 `hpsv3/model/qwen2vl_trainer.py`,
TIGER-AI-Lab/EditReward `EditReward/model/qwen2_5_vl_trainer.py`). The same numbers are passed here.

Questions are the authors' texts. `published_texts` reads the authors' Python files without running
them.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import resize
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from digenrl.rewards.protocol import as_frames, resolve_device, rgb_bytes
from digenrl.types import Prompt
from reward_models.weights import checkpoint, module_digest, read_state, require_plain

PIXELS = 256 * 28 * 28
"""Pixels to which all three authors bring a picture."""
_TINY_FILE, _TINY_PIXELS = "reward.safetensors", 4 * 28 * 28
_MARKS = "endoftext im_start im_end vision_start vision_end image_pad video_pad"
_OLD_NAMES = (
    ("base_model.model.", ""),
    ("visual.", "model.visual."),
    ("model.layers.", "model.language_model.layers."),
    ("model.embed_tokens.", "model.language_model.embed_tokens."),
    ("model.norm.", "model.language_model.norm."),
)
"""(prefix in a published file, prefix in transformers 5), applied in this order."""


class QwenReward:
    """Weighted sum of a reward model's axes. Subclasses say what is asked and how heads are read.

    Args:
        path: file of the published weights.
        processor: directory or hub id of the Qwen-VL that was trained on: its config, tokenizer and
            picture processor.
        template: the authors' Python file, or their folder of files, with the questions.
        axes: axis -> weight in the score; null = `default_axes`.
        build: "real" or "tiny". The tiny build ignores the three paths.
        batch: pictures or videos in one forward.
        device: "auto", or as torch reads it.
        dtype: of the backbone; heads run in fp32.
    """

    name: str
    backbone: str
    """Class of transformers without its suffix: Qwen2VL or Qwen2_5_VL."""
    tokens: tuple[str, ...]
    """Reward tokens, in the order in which a question has them."""
    questions: tuple[tuple[str, ...], ...]
    """For each question the names of the authors' texts that it joins."""
    tiny_questions: tuple[str, ...]
    default_axes: ClassVar[Mapping[str, float]]
    lora_alpha = 0.0
    """Scale of low-rank weights in the file: alpha / rank. 0 = the file has none."""

    def __init__(
        self,
        path: str | None = None,
        processor: str | None = None,
        template: str | None = None,
        axes: Mapping[str, float] | None = None,
        build: str = "real",
        batch: int = 8,
        device: str = "auto",
        dtype: str = "bfloat16",
    ) -> None:
        self.axes = dict(self.default_axes if axes is None else axes)
        if unknown := sorted(set(self.axes) - set(self.default_axes)):
            raise ValueError(
                f"axes names {unknown}: {self.name} has {', '.join(self.default_axes)}."
            )
        if build == "real" and (processor is None or template is None):
            raise ValueError(
                "build=real needs `processor` (a Qwen-VL) and `template` (the authors' file with "
                f"{', '.join(dict.fromkeys(sum(self.questions, ())))})."
            )
        self.device, self.batch = resolve_device(device), batch
        self.pixels = PIXELS if build == "real" else _TINY_PIXELS
        self.texts = self.tiny_questions if build == "tiny" else self._published(str(template))
        with checkpoint(path, build, self._write_tiny) as source:
            file, words = (
                (Path(source) / _TINY_FILE, source)
                if build == "tiny"
                else (Path(source), processor)
            )
            require_plain(words or source)
            self.processor = transformers.AutoProcessor.from_pretrained(
                words, padding_side="right", local_files_only=True
            )
            self.processor.tokenizer.add_tokens(list(self.tokens), special_tokens=True)
            config = transformers.AutoConfig.from_pretrained(words, local_files_only=True)
            state = renamed(read_state(file, "give `path` the published file"), self.lora_alpha)
            config.text_config.vocab_size = state["model.language_model.embed_tokens.weight"].size(
                0
            )
            heads = self.make_heads(config.text_config.hidden_size)
            self.model, found = getattr(transformers, f"{self.backbone}Model").from_pretrained(
                None,
                config=config,
                state_dict={
                    key[6:]: value for key, value in state.items() if key.startswith("model.")
                },
                dtype=getattr(torch, dtype),
                output_loading_info=True,
            )
        if lost := sorted({*found["missing_keys"], *found["unexpected_keys"]}):
            raise ValueError(f"{file} is no {self.name}: {', '.join(lost[:5])} ({len(lost)} names)")
        heads.load_state_dict(
            {key: value for key, value in state.items() if key.startswith("rm_head")}
        )
        self.heads = heads.to(self.device).float().eval().requires_grad_(False)
        self.model.to(self.device).eval().requires_grad_(False)
        asked = hashlib.blake2b("\0".join(self.texts).encode(), digest_size=4).hexdigest()
        said = ", ".join(f"{axis}={weight:g}" for axis, weight in self.axes.items())
        self.model_id = (
            f"{self.name}({Path(path).name if path and build == 'real' else 'tiny'}, {said}, "
            f"question={asked}{self.settings()})"
        )
        self.weights_digest = module_digest(self.model, self.heads)

    @torch.no_grad()
    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Return [B] scores."""
        shown = self.shown(media, prompts)
        parts = [
            self._axes(shown[start : start + self.batch], prompts[start : start + self.batch])
            for start in range(0, len(prompts), self.batch)
        ]
        values = {axis: torch.cat([part[axis] for part in parts]) for axis in self.axes}
        return torch.stack([weight * values[axis] for axis, weight in self.axes.items()]).sum(0)

    # ---- what a subclass gives

    def make_heads(self, width: int) -> nn.Module:
        """Return the heads under their published names (rm_head...), for hidden states of
        `width`."""
        raise NotImplementedError

    def read(self, hidden: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return axis -> [B] from each question's hidden states [B, tokens, width] fp32."""
        raise NotImplementedError

    def shown(self, media: Tensor, prompts: Sequence[Prompt]) -> list[list[Tensor]]:
        """Return for each sample the pictures [3, H, W] or videos [F, 3, H, W], uint8, in the order
        shown."""
        return [[frames] for frames in rgb_bytes(media, 1)[:, 0]]

    def settings(self) -> str:
        """Return further settings that change scores, for the identity."""
        return ""

    # ---- shared

    def _published(self, template: str) -> tuple[str, ...]:
        texts = published_texts(Path(template))
        if lacking := sorted({*sum(self.questions, ())} - texts.keys()):
            raise ValueError(f"template = {template}: has no text {', '.join(lacking)}.")
        return tuple("".join(texts[name] for name in names) for names in self.questions)

    def _axes(self, shown: Sequence[Sequence[Tensor]], prompts: Sequence[Prompt]) -> dict[str, Any]:
        values = self.read([self._hidden(text, shown, prompts) for text in self.texts])
        return {axis: value.float().cpu() for axis, value in values.items()}

    def _hidden(
        self, question: str, shown: Sequence[Sequence[Tensor]], prompts: Sequence[Prompt]
    ) -> Tensor:
        """Return the hidden states [B, tokens, width] fp32 of the reward tokens in one question."""
        kinds = [["video" if item.dim() == 4 else "image" for item in items] for items in shown]
        texts = [
            self.processor.apply_chat_template(
                [{"role": "user", "content": [*({"type": kind} for kind in row), said]}],
                tokenize=False,
                add_generation_prompt=True,
            )
            for row, said in zip(kinds, self._asked(question, prompts), strict=True)
        ]
        sized = [self._sized(item) for items in shown for item in items]
        inputs = self.processor(
            text=texts,
            images=[item for item in sized if item.dim() == 3] or None,
            videos=[item for item in sized if item.dim() == 4] or None,
            padding=True,
            return_tensors="pt",
            images_kwargs={"do_resize": False},
            videos_kwargs={"do_resize": False, "do_sample_frames": False},
        ).to(self.device)
        ids = inputs["input_ids"]
        places = torch.arange(ids.size(1), device=self.device).expand(3, *ids.shape)
        inputs.pop("mm_token_type_ids", None)
        last = self.model(**inputs, position_ids=places, use_cache=False).last_hidden_state
        known = self.processor.tokenizer.convert_tokens_to_ids(list(self.tokens))
        at = torch.stack([(ids == token).int().argmax(1) for token in known], 1)
        return last.gather(1, at.unsqueeze(-1).expand(-1, -1, last.size(-1))).float()

    @staticmethod
    def _asked(question: str, prompts: Sequence[Prompt]) -> list[dict[str, str]]:
        # A prompt that spells a control token must not become one.
        texts = (prompt.text.replace("<|", "< |") for prompt in prompts)
        return [{"type": "text", "text": question.replace("{text_prompt}", text)} for text in texts]

    def _sized(self, item: Tensor) -> Tensor:
        """Return a picture or video with the authors' number of pixels, sides in multiples of
        28."""
        size = smart_resize(
            *item.shape[-2:], 28, min_pixels=self.least_pixels(item), max_pixels=self.pixels
        )
        return resize(item, list(size), InterpolationMode.BICUBIC, antialias=True)

    def least_pixels(self, item: Tensor) -> int:
        """Return the pixels below which a picture or frame is enlarged."""
        return self.pixels

    def _write_tiny(self, folder: Path) -> None:
        network = write_tiny(folder, self.backbone, len(self.tokens))
        tensors = published_names(network.state_dict())
        tensors |= self.make_heads(network.config.text_config.hidden_size).state_dict()
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / _TINY_FILE)


def published_texts(path: Path) -> dict[str, str]:
    """Return name -> text of the string constants that Python files assign, without running
    them."""
    return {
        target.id: node.value.value
        for file in (sorted(path.glob("*.py")) if path.is_dir() else [path])
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def renamed(state: Mapping[str, Tensor], lora_alpha: float = 0.0) -> dict[str, Tensor]:
    """Return published tensors under transformers' present names, low-rank weights merged: W +
    alpha / rank x B A (arXiv:2106.09685, eq. 3)."""
    tensors: dict[str, Tensor] = {}
    for key, value in state.items():
        for old, new in _OLD_NAMES:
            key = new + key.removeprefix(old) if key.startswith(old) else key
        tensors[key.replace(".base_layer.", ".")] = value
    for key in [key for key in tensors if ".lora_A." in key]:
        low, high = tensors.pop(key), tensors.pop(key.replace(".lora_A.", ".lora_B."))
        whole = key.partition(".lora_A.")[0] + ".weight"
        delta = lora_alpha / low.size(0) * (high.float() @ low.float())
        tensors[whole] = (tensors[whole].float() + delta).to(tensors[whole].dtype)
    return {key: value for key, value in tensors.items() if not key.startswith("lm_head.")}


def published_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of a present network under the names of the published files."""
    tensors = {}
    for key, value in state.items():
        for old, new in reversed(_OLD_NAMES[1:]):
            key = old + key.removeprefix(new) if key.startswith(new) else key
        tensors[key] = value
    return tensors


def ranked_head(width: int, outputs: int = 2) -> nn.Sequential:
    """Return the head of HPSv3 and EditReward: a mean, and the logarithm of a deviation."""
    return nn.Sequential(
        nn.Linear(width, 1024),
        nn.ReLU(),
        nn.Dropout(0.05),
        nn.Linear(1024, 16),
        nn.ReLU(),
        nn.Linear(16, outputs),
    )


def frames_of(media: Tensor, indices: Sequence[int]) -> Tensor:
    """Return chosen frames of videos or images, [B, len(indices), 3, H, W] uint8."""
    chosen = as_frames(media)[:, list(indices)]
    return rgb_bytes(chosen, chosen.size(1))


def write_tiny(folder: Path, backbone: str, more: int = 0) -> Any:
    """Write config, tokenizer and picture processor of a random Qwen-VL of tiny width, and return
    the network.

    Args:
        backbone: "Qwen2VL" or "Qwen2_5_VL".
        more: tokens beyond the tokenizer's for which there are embeddings.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    marks = [f"<|{mark}|>" for mark in _MARKS.split()]
    letters = sorted(ByteLevel.alphabet())
    words = {word: index for index, word in enumerate(letters + marks)}
    tokenizer = transformers.Qwen2Tokenizer(
        vocab=words,
        merges=[],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=marks,
    )
    chat = (
        "{% for turn in messages %}<|im_start|>{{ turn.role }}\n{% for part in turn.content %}"
        "{% if part.type == 'text' %}{{ part.text }}{% else %}<|vision_start|><|"
        "{{ part.type }}_pad|><|vision_end|>{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    transformers.Qwen2VLProcessor(
        transformers.Qwen2VLImageProcessor(),
        tokenizer,
        transformers.Qwen2VLVideoProcessor(),
        chat_template=chat,
    ).save_pretrained(folder)
    old = backbone == "Qwen2VL"
    vision: dict[str, Any] = {"depth": 2, "num_heads": 2, "hidden_size": 32}
    vision |= (
        {"embed_dim": 32, "mlp_ratio": 2}
        if old
        else {"out_hidden_size": 32, "intermediate_size": 64, "fullatt_block_indexes": [1]}
    )
    text = {
        "initializer_range": 0.3,  # else attention is even, and no position counts
        "vocab_size": len(words) + more,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [2, 3, 3],
        },
        "bos_token_id": words["<|endoftext|>"],
        "eos_token_id": words["<|im_end|>"],
        "pad_token_id": words["<|endoftext|>"],
    }
    config = getattr(transformers, f"{backbone}Config")(
        text_config=text,
        vision_config=vision,
        image_token_id=words["<|image_pad|>"],
        video_token_id=words["<|video_pad|>"],
        vision_start_token_id=words["<|vision_start|>"],
        vision_end_token_id=words["<|vision_end|>"],
    )
    network = getattr(transformers, f"{backbone}ForConditionalGeneration")(config)
    config.save_pretrained(folder)
    return network
