"""What several families ask of tokenizers and attention layers of diffusers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from digenrl.models.pipeline_codec import DiffusersCodec

if TYPE_CHECKING:
    from diffusers.models.attention_processor import Attention, AttentionProcessor
    from transformers import PreTrainedTokenizerBase


def attend_with(attention: Attention, processor: AttentionProcessor) -> None:
    """Give an attention layer of diffusers another processor, with the backend of its present
    one."""
    # The network's backend was set on the present processor, and would be lost with it.
    processor._attention_backend = attention.processor._attention_backend
    attention.set_processor(processor)


def require_template(
    codec: DiffusersCodec, tokenizer: PreTrainedTokenizerBase, template: str, expected: int
) -> None:
    """Raise ValueError unless the text before the prompt in `template` has the number of tokens
    that the pipeline cuts."""
    tokens = len(tokenizer(template.split("{}")[0]).input_ids)
    if tokens != expected:
        raise ValueError(
            f"the tokenizer of {codec.path} makes {tokens} tokens of {codec.family}'s prompt "
            f"template, the pipeline cuts {expected}: parts of the prompt would be lost; use "
            "the tokenizer that ships with the model"
        )


def report_long_turn(
    codec: DiffusersCodec, tokenizer: PreTrainedTokenizerBase, text: str, **template: object
) -> None:
    """Warn once of a prompt that is too long inside the tokenizer's chat template, which takes
    `template` and tokens of its own."""
    empty = [{"role": "user", "content": ""}]
    around = tokenizer.apply_chat_template(
        empty, tokenize=False, add_generation_prompt=True, **template
    )
    codec.report_long_prompt(
        tokenizer, text, codec.max_sequence_length - len(tokenizer(around).input_ids)
    )
