"""How fast this machine's kernels run one unit of blocks of each family at its real width: what
`efficiency` in a hardware profile assumes.

    python -m benchmarks.kernels [models=flux1_dev,wan21_14b,...] [rows=1,2,4] [point=0]
    [compile=true] [quick=true]

Random weights, one unit of blocks (a double and two single ones where a family has both), with
gradients of the weights. On a GPU in bfloat16, at the first (`point=0`) or second published size:
TFLOP/s of a forward and of a forward with backward, and the compiled blocks over the eager ones. On
a processor in float32 and at a small size: the figures say nothing about a GPU. FLOPs are counted
by torch; a backward counts twice its forward.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import _families
from benchmarks._shared import Report, options
from benchmarks.count_facts import flops

DEFAULTS = {
    "models": ",".join(_families.models()),
    "rows": "1,2,4",
    "point": "0",
    "compile": "false",
    "repeats": "7",
}
QUICK = {"models": "flux1_dev", "rows": "1", "repeats": "2"}
COLUMNS = (
    "      model",
    "rows",
    "tokens",
    "forward ms",
    "TFLOP/s",
    "training ms",
    "TFLOP/s",
    "compiled / eager",
)
ON_CPU = (1, 8, 8), 64
"""Tokens of the picture by frames, rows and columns, and text tokens, without a GPU."""
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}


def main(words: list[str]) -> int:
    """Print one row per model and batch size; returns the exit code."""
    given = options(words, DEFAULTS, QUICK)
    chosen, repeats = given["models"].split(","), int(given["repeats"])
    if unknown := sorted(set(chosen) - set(_families.models())):
        raise SystemExit(
            f"models={','.join(unknown)}: unknown; known: {', '.join(_families.models())}."
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = (
        f"{torch.cuda.get_device_name()}, bfloat16"
        if device.type == "cuda"
        else "no GPU: small sizes, float32"
    )
    report = Report(
        "Kernels", f"{where}; one unit of blocks at real width, {repeats} repeats.", COLUMNS
    )
    for name in chosen:
        model = build(name, device)
        for rows in map(int, given["rows"].split(",")):
            predict = forward_of(name, rows, int(given["point"]), device)
            work, tokens = counted(name, rows, int(given["point"]), device)

            def forward(
                model: nn.Module = model, predict: Callable[[nn.Module], Tensor] = predict
            ) -> Tensor:
                return predict(model)

            def training(model: nn.Module = model, forward: Callable[[], Tensor] = forward) -> None:
                model.zero_grad(set_to_none=True)
                forward().float().square().mean().backward()

            with torch.no_grad():
                eager = seconds(forward, repeats, device)
            trained = seconds(training, repeats, device)
            ratio = "-"
            if given["compile"] == "true":
                compile_blocks(model)
                with torch.no_grad():
                    ratio = f"{eager / seconds(forward, repeats, device):.2f}"
                model = build(name, device)
            report.row(
                name, rows, tokens, f"{1e3 * eager:.1f}", f"{work / eager / 1e12:.2f}", f"{1e3 * trained:.1f}",
                f"{3 * work / trained / 1e12:.2f}", ratio,
            )  # fmt: skip
        del model
    return report.close(given)


def build(name: str, device: torch.device) -> nn.Module:
    """One unit of blocks at real width, random."""
    torch.manual_seed(0)
    with device:
        model = _families.network(name, 1)
    return model.to(DTYPES[device.type]).eval()


def forward_of(
    name: str, rows: int, point: int, device: torch.device
) -> Callable[[nn.Module], Tensor]:
    """Return a forward of `rows` samples of noise on `device`, which takes the network."""
    grid, text = shape(name, point, device)
    facts = _families.models()[name]
    policy = _families.policy(facts, grid)
    shapes = _families.conditioning(facts, policy, text)
    with device:
        inputs = _families.inputs(policy, rows, shapes, DTYPES[device.type], torch.randn)

    def forward(model: nn.Module) -> Tensor:
        policy.transformer = model
        return policy.predict(*inputs)

    return forward


def counted(name: str, rows: int, point: int, device: torch.device) -> tuple[float, int]:
    """Return (FLOPs of a forward, latent tokens) of `rows` samples."""
    grid, text = shape(name, point, device)
    with torch.device("meta"):
        model = _families.network(name, 1)
    return flops(name, model, grid, text, rows), rows * math.prod(grid)


def shape(name: str, point: int, device: torch.device) -> tuple[_families.Grid, int]:
    """Return the tokens of a sample, by frames, rows and columns, and its text tokens."""
    if device.type == "cpu":
        return ON_CPU
    sizes = _families.models()[name].models[name]
    return tuple(sizes["points"][point]), int(sizes["text_tokens"])


def compile_blocks(model: nn.Module) -> None:
    """Regional compilation, as `model.compile=true` does it."""
    for part in model.children():
        for block in part if isinstance(part, nn.ModuleList) else ():
            block.compile(fullgraph=True)


def seconds(call: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Median seconds of `call`, after one that is not counted."""

    def once() -> float:
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    once()
    return median(once() for _ in range(repeats))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
