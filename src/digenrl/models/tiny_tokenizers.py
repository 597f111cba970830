"""Tokenizers of the tiny builds: the real classes over vocabularies learned here, in a second, from
the corpus below.

Vocabularies are learned in plain Python. The trainers of the `tokenizers` library are
multi-threaded and break ties in hash order, so two runs give two vocabularies. A build must be
byte-reproducible.

The corpus repeats the models' prompt templates often enough that a template's words become single
tokens, as in the real vocabularies. The templates then have the real lengths, which the adapters'
`check_encoders` require.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

if TYPE_CHECKING:
    from transformers import (
        ByT5Tokenizer,
        CLIPTokenizer,
        GemmaTokenizer,
        PreTrainedTokenizerFast,
        Qwen2Tokenizer,
        T5TokenizerFast,
    )

DATA = Path(__file__).with_suffix(".yaml")
"""The captions' parts, and the special tokens and word splits of the real tokenizers."""
_DATA: dict[str, Any] = yaml.safe_load(DATA.read_text(encoding="utf-8"))
TEMPLATE_REPEATS = 50
MERGES = 600
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def training_corpus(templates: list[str] | None = None) -> list[str]:
    """Return captions, and the templates (by default those of the data) `TEMPLATE_REPEATS`
    times."""
    colours, shapes = _DATA["colours"], _DATA["shapes"]
    captions = [
        f"a {a} {s} on a {b} background" for a, s, b in itertools.product(colours, shapes, colours)
    ]
    return captions + _DATA["sentences"] + (templates or _DATA["templates"]) * TEMPLATE_REPEATS


def clip() -> CLIPTokenizer:
    """Return a CLIPTokenizer: lower case, words end in </w>, 77 tokens."""
    from transformers import CLIPTokenizer

    split = pre_tokenizers.Split(Regex(_DATA["clip_split"]), behavior="removed", invert=True)
    vocabulary, merges = _train_bpe(
        pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)]),
        [text.lower() for text in training_corpus()],
        suffix="</w>",
    )
    for special in ("<|startoftext|>", "<|endoftext|>"):
        vocabulary[special] = len(vocabulary)
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=77)


def t5() -> T5TokenizerFast:
    """Return a T5TokenizerFast over a unigram vocabulary (the corpus's words, and letters for all
    others), 512 tokens."""
    from transformers import T5TokenizerFast

    pieces = Counter(f"▁{word}" for text in training_corpus() for word in text.split())
    total = sum(pieces.values())
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    words = [(piece, math.log(count / total)) for piece, count in sorted(pieces.items())]
    # Far less likely than any word, so that words win.
    letters = [(chr(code), -20.0) for code in range(33, 127)] + [("▁", -20.0)]
    known = {piece for piece, _ in words}
    vocabulary = special + words + [letter for letter in letters if letter[0] not in known]
    return T5TokenizerFast(
        vocab=vocabulary, extra_ids=0, additional_special_tokens=[], model_max_length=512
    )


def qwen(templates: list[str] | None = None) -> Qwen2Tokenizer:
    """Return a Qwen2Tokenizer with the special tokens of Qwen2.5-VL."""
    from transformers import Qwen2Tokenizer

    special = _DATA["qwen_special"]
    vocabulary, merges = _train_byte_level(special, templates)
    vocabulary |= {token: len(vocabulary) + index for index, token in enumerate(special)}
    return Qwen2Tokenizer(
        vocab=vocabulary,
        merges=merges,
        # The class adds the first one, <|endoftext|>, by itself.
        additional_special_tokens=special[1:],
        model_max_length=2048,
    )


def gemma() -> GemmaTokenizer:
    """Return a GemmaTokenizer: words begin with ▁, unknown words become bytes, and texts are padded
    on the left."""
    from transformers import GemmaTokenizer

    texts = training_corpus()
    entries, merges = _train_bpe(pre_tokenizers.Metaspace(), texts)
    special = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        "<mask>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
    ]
    names = dict.fromkeys([*special, *sorted(set("".join(texts))), *entries])
    vocabulary = {entry: index for index, entry in enumerate(names)}
    return GemmaTokenizer(vocab=vocabulary, merges=merges, model_max_length=1024)


def byt5() -> ByT5Tokenizer:
    """Return a ByT5Tokenizer, which has no vocabulary: bytes are tokens."""
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer()


def qwen3(templates: list[str] | None = None) -> Qwen2Tokenizer:
    """Return `qwen`'s tokenizer with a chat template of Qwen's shape: each turn between
    <|im_start|> and <|im_end|>."""
    tokenizer = qwen(templates)
    tokenizer.chat_template = _DATA["qwen_chat"]
    return tokenizer


def llama3() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with LLaMA 3's special tokens. Every text starts with
    <|begin_of_text|>."""
    from transformers import PreTrainedTokenizerFast

    special = _DATA["llama_special"]
    vocabulary, merges = _train_byte_level(special)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = _byte_level()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    start = special[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[start, "$A"], special_tokens=[(start, tokenizer.token_to_id(start))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=start,
        eos_token="<|end_of_text|>",
        pad_token="<pad>",
        padding_side="right",
        model_max_length=512,
    )


def _byte_level() -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(_DATA["gpt_split"]), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, byte_level])


def _train_byte_level(
    special: list[str], templates: list[str] | None = None
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    texts = training_corpus(templates)
    # Special tokens must not be learned as pieces of words.
    for token in special:
        texts = [text.replace(token, "") for text in texts]
    return _train_bpe(_byte_level(), texts)


def _train_bpe(
    pre_tokenizer: pre_tokenizers.PreTokenizer, texts: list[str], suffix: str = ""
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return vocabulary and merges of a byte-pair encoding of `texts` (arXiv:1508.07909), ties
    broken alphabetically.

    The vocabulary starts with every byte (and every byte as a last letter), so no text has an
    unknown token.
    """
    counts = Counter(word for text in texts for word, _ in pre_tokenizer.pre_tokenize_str(text))
    # CLIP marks the last letter of a word, so that `a` inside a word is another token.
    words = {word: [*word[:-1], word[-1] + suffix] for word in counts}
    merges: list[tuple[str, str]] = []
    while len(merges) < MERGES:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, symbols in words.items():
            for pair in itertools.pairwise(symbols):
                pairs[pair] += counts[word]
        if not pairs:
            break
        # The most frequent pair. The alphabet breaks ties, so that every machine agrees.
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        words = {word: _merge_pair(symbols, best) for word, symbols in words.items()}
    entries = (
        BYTES
        + ([byte + suffix for byte in BYTES] if suffix else [])
        + ["".join(pair) for pair in merges]
    )
    return {entry: index for index, entry in enumerate(dict.fromkeys(entries))}, merges


def _merge_pair(symbols: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    index = 0
    while index < len(symbols):
        if tuple(symbols[index : index + 2]) == pair:
            merged.append("".join(pair))
            index += 2
        else:
            merged.append(symbols[index])
            index += 1
    return merged
