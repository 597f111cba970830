"""FLOPs and bytes of one sample's forwards, backwards and decodes, from what was counted of its
model."""

from __future__ import annotations

from digenrl.extensions.planner.workload import Workload
from digenrl.facts import Fitted
from digenrl.recompute import ALL, INPUTS


def attention_flops(work: Workload) -> float:
    """Return the FLOPs of the attention products in one forward: 4 x hidden x blocks x
    tokens^2."""
    return _attention_flops_of(work, work.tokens, work.text_tokens)


def _attention_flops_of(work: Workload, tokens: int, text: int) -> float:
    length = tokens + text * work.sizes["joint_attention"]
    return float(4 * work.sizes["hidden"] * work.sizes["attention_blocks"] * length**2)


def forward_flops(work: Workload) -> float:
    """Return the FLOPs of one forward of one sample: attention exactly, the rest bilinear in
    latent and text tokens, through four counted points."""
    points = work.sizes["flops"]
    (few, text), *_, (many, less) = ((at["tokens"], at["text"]) for at in points)
    a, b, c, d = (
        at["flops"] - _attention_flops_of(work, at["tokens"], at["text"]) for at in points
    )
    x, y = (work.tokens - few) / (many - few), (work.text_tokens - text) / (less - text)
    return attention_flops(work) + a + x * (b - a) + y * (c - a) + x * y * (d - c - b + a)


def generating_flops(work: Workload) -> float:
    """Return the FLOPs of one forward of one sample while it generates: with the constant
    adapter, whose layers see latent and text tokens alike (an upper bound)."""
    added = 2.0 * work.sampling_parameters * (work.tokens + work.text_tokens)
    return forward_flops(work) + added


def backward_flops(work: Workload) -> float:
    """Return the FLOPs of one backward.

    Attention takes twice its forward. The rest takes twice its forward if all weights are
    trained, and once with LoRA, because the frozen base has no weight gradients.
    """
    attention = attention_flops(work)
    rest = forward_flops(work) - attention
    return 2.0 * attention + (2.0 if work.lora_rank is None else 1.0) * rest


def repeated_flops(work: Workload, mode: str) -> float:
    """Return the FLOPs that a backward repeats of one sample's forward when all blocks keep
    `mode`.

    Attention is exact. Of the rest it is the counted share.
    """
    attention = attention_flops(work)
    share = work.sizes["repeated_flops"][_trained_kind(work)][mode]
    return (attention if mode == INPUTS else 0.0) + share * (forward_flops(work) - attention)


def repeated_bytes(work: Workload, mode: str) -> float:
    """Return the bytes that a repeated forward writes and reads: twice the activations that were
    not kept."""
    return 2.0 * work.sizes["blocks"] * (kept_bytes(work, ALL, 1) - kept_bytes(work, mode, 1))


def kept_bytes(work: Workload, mode: str, rows: int, context: int = 1) -> float:
    """Return the bytes that one unit of blocks keeps of a forward of `rows` samples for the
    backward pass.

    `context` ranks share the tokens of the picture, and each of them holds all text tokens.
    """
    return _fitted_bytes(work, work.sizes["kept_bytes"][_trained_kind(work)][mode], rows, context)


def beside_bytes(work: Workload, mode: str, rows: int, context: int = 1) -> float:
    """Return the bytes beside those that blocks keep at the peak of a forward and backward
    pass, if they keep all or their inputs."""
    entry = work.sizes["beside_bytes"][_counted_variant(work)][mode]
    return _fitted_bytes(work, entry, rows, context)


def forward_bytes(work: Workload, rows: int) -> float:
    """Return the peak bytes of a denoising step of `rows` samples, with weights in 16 bit."""
    return _fitted_bytes(work, work.sizes["forward_bytes"][_counted_variant(work)], rows)


def _counted_variant(work: Workload) -> str:
    # Adapters on attention alone need less than those on both.
    return "full" if work.lora_rank is None else "attn_ff"


def _fitted_bytes(work: Workload, entry: Fitted, rows: int, context: int = 1) -> float:
    row = entry["row"] + entry["text"] * work.text_tokens
    return entry["forward"] + rows * (row + entry["token"] * work.tokens / context)


def decode_flops(work: Workload) -> float:
    """Return the FLOPs of one sample's VAE decode."""
    shown = (work.height // 8) * (work.width // 8) * work.frames
    return work.sizes["decode"]["flops_per_latent_pixel_frame"] * shown


def encode_flops(work: Workload) -> float:
    """Return the FLOPs of the text encoders per prompt. The negative prompt is equal for all
    and stays in the cache."""
    return 2.0 * work.sizes["encoders"]["parameters"] * work.sizes["encoders"]["tokens"]


def _trained_kind(work: Workload) -> str:
    """Return the key into the counts that differ between LoRA and full training."""
    return "full" if work.lora_rank is None else work.lora_targets
