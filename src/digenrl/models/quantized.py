"""The linear layers of a network's blocks, with frozen weights in 8 or 4 bits.

Weights are quantized on the CPU while the policy is built, before any adapter is added. The numbers
are therefore the same on every rank, whatever its device. Every forward and backward pass writes a
layer's weights in 16 bits again and multiplies with those, whatever the number of rows and with or
without gradients. Rollouts thus sample with exactly the network that trainers replay. bitsandbytes'
own layers choose another kernel for few rows, and the first ratio would not be 1.

    nf4    4-bit NormalFloat with an fp32 scale per 64 weights (QLoRA, arXiv:2305.14314),
           by bitsandbytes
    int8   8 bits with an fp32 scale per row (the weights of LLM.int8(), arXiv:2208.07339)

Layers outside of the blocks (embeddings, the last projection) keep 16 bits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.machinery import PathFinder
from typing import Any

import torch
from torch import Tensor, nn

from digenrl import extras

BLOCK = 64
"""Weights that share a scale in nf4."""


class QuantizedLinear(nn.Linear):
    """A linear layer whose frozen weight [O, I] is stored in `kind`, nf4 or int8.

    `weight` holds the stored numbers: uint8 [O * I / 2, 1], or int8 [O, I].
    """

    def __init__(self, layer: nn.Linear, kind: str) -> None:
        # On meta: no memory for a weight that is replaced at once.
        super().__init__(layer.in_features, layer.out_features, device="meta")
        self.kind, self.bias = kind, layer.bias
        stored, scale = (_to_nf4 if kind == "nf4" else _to_int8)(layer.weight.detach())
        self.weight = nn.Parameter(stored, requires_grad=False)
        self.register_buffer("scale", scale)

    def dequantize_weight(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [O, I] in `dtype`."""
        scale: Any = self.scale
        if self.kind == "int8":
            return self.weight.to(dtype) * scale.to(dtype)  # [O, I] x [O, 1]
        from bitsandbytes.functional import QuantState, dequantize_4bit

        size = torch.Size((self.out_features, self.in_features))
        state = QuantState(scale, shape=size, blocksize=BLOCK, quant_type="nf4", dtype=dtype)
        return dequantize_4bit(self.weight, state)

    def forward(self, input: Tensor) -> Tensor:
        product: Tensor = _Product.apply(input, self)
        return product if self.bias is None else product + self.bias.to(product.dtype)


class _Product(torch.autograd.Function):
    """The product of rows [..., I] with a quantized weight. The backward pass dequantizes it again,
    so that no copy in 16 bits waits for it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        return nn.functional.linear(rows, layer.dequantize_weight(rows.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.layer.dequantize_weight(gradient.dtype), None  # [..., O] x [O, I]


def require_library(kind: str) -> None:
    """Raise ValueError if the library that makes `kind` is not installed."""
    if kind == "nf4" and PathFinder.find_spec("bitsandbytes") is None:
        raise ValueError(
            "model.quantize = nf4: needs bitsandbytes, which is not installed; run "
            f"`{extras.install_command('quantized')}`, or set model.quantize=int8."
        )


def quantize_blocks(blocks: Iterable[nn.Module], kind: str) -> None:
    """Replace every linear layer of `blocks` by one with frozen weights in `kind` (nf4, int8)."""
    if (
        sys.modules.get("bitsandbytes", quantize_blocks) is None
    ):  # hidden from the launcher (cli/train.py)
        del sys.modules["bitsandbytes"]
    for block in blocks:
        for name, module in list(block.named_modules()):
            # A subclass may compute something else.
            if type(module) is nn.Linear:
                block.set_submodule(name, QuantizedLinear(module, kind))


def _to_nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of two weights per byte, and the scale of each `BLOCK`."""
    from bitsandbytes.functional import quantize_4bit

    stored, state = quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
    return stored, state.absmax


def _to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights from -127 to 127, and the scale of each row."""
    # [O, 1]. A row of zeros gets the least scale, so that 0 / 0 never arises.
    scale = (weight.abs().amax(1, True).float() / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return (weight / scale).round().to(torch.int8), scale
