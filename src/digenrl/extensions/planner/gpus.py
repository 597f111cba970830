"""What GPUs reach of their data sheets: figures by kind of GPU, fitted to the published rows of
`published.csv`.

A forward takes (products of weights / `generate` + attention / `attention`) / peak + element-wise
traffic / bandwidth, and at least a launch floor per block (`ENGINES`). Kinds, not single GPUs, have
figures: few enough that rows of other models, sizes and engines test them (`python -m
benchmarks.calibration`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from digenrl.hardware import Pool


@dataclass(frozen=True)
class Efficiency:
    """Efficiency of a pool's GPUs. A profile's `efficiency` keys replace the figures of the GPU's
    kind."""

    generate: float = 0.5
    """Share of the peak reached by a forward's products of weights."""
    attention: float = 0.4
    """Share of the peak reached by PyTorch's attention."""
    fused_attention: float = 0.45
    """Share of the peak reached by attention kernels written for the GPU."""
    train: float = 0.9
    """Speed of forward and backward, as a part of the forward's."""
    decode: float = 0.32
    """Share of the memory bandwidth reached by the VAE, as SD3.5 and FLUX.1 reached it at 512 px on
    an H200 (benchmarks/results/real_run-h200-2026-11-26.md)."""
    score: float = 0.5
    """Speed of the scorers, as a part of a forward's products."""
    encode: float = 0.8
    """Speed of the text encoders, as a part of a forward's products."""
    network: float = 0.8
    """Share of the links' nominal bandwidth that is reached."""
    hidden: float = 0.3
    """Share of sharded weights' communication that can overlap with computing. Published training
    rows fit 0.05, but hardly tell 0 from 0.5."""
    launch_seconds: float | None = None
    """Least seconds of a block's forward; None = those of the engine."""
    host_gb_s: float = 20.0
    """GB/s of copies from CPU to GPU."""
    generated: float = 1.0
    """Measured over computed seconds of a denoising step that launches do not bound
    (`measured.py`)."""
    trained: float = 1.0
    """The same of a trained cell."""


@dataclass(frozen=True)
class Engine:
    """A way to run a forward: eager, compiled, or an inference engine."""

    launch_seconds: float
    """Least seconds of one block's forward, in which the processor launches its kernels."""
    adapted_seconds: float
    """The same with an adapter on the block's layers."""
    passes: float
    """Reads and writes of [tokens, hidden] in 16 bit per block, beside those of the products and
    attention."""


ENGINES = {
    "eager": Engine(1.2e-3, 1.7e-3, 80.0),
    "compiled": Engine(1.2e-3, 1.2e-3, 30.0),
    "engine": Engine(1.2e-3, 1.2e-3, 30.0),
}
"""Published rows give the launch floor of 512 px forwards (1.0 to 1.4 ms, eager and compiled alike)
and the traffic of eager and compiled ones. With LoRA on attention and feed-forward FLUX.1 took 1.71
ms eager and .98 ms compiled on an H200 (benchmarks/results/real_size-h200-2026-11-26.md). `engine`:
an inference engine."""

SCALED = {"generate": "generated", "train": "trained"}
"""Stage -> its figure of `Efficiency` where the GPU was measured."""

BACKWARD_LAUNCHES = 2.6
"""Launches of a backward pass, relative to those of a forward. From the same measurement: a
micro-batch of one row that recomputes its blocks took 4.7 (eager) and 5.1 (compiled) times the
seconds of a forward."""


@dataclass(frozen=True)
class Gpu:
    """Data sheet of a GPU, and the GPU's kind."""

    tflops: float
    """Dense bf16 (with fp32 accumulation)."""
    hbm_tb_s: float
    kind: str


@dataclass(frozen=True)
class GpuKind:
    """What GPUs of a kind reach, and whether published rows say so."""

    efficiency: Efficiency = field(default_factory=Efficiency)
    published: bool = False


KINDS = {
    # Hopper at full power: PyTorch's attention does not use its asynchronous units, kernels written
    # for it do.
    "hopper": GpuKind(
        Efficiency(generate=0.60, attention=0.34, fused_attention=0.60), published=True
    ),
    # Hopper with a small peak, Ampere: nothing throttles the products; attention as on Ampere.
    "h20": GpuKind(Efficiency(generate=0.85, attention=0.60, fused_attention=0.75), published=True),
    "ampere": GpuKind(Efficiency(generate=0.70, attention=0.60, fused_attention=0.60)),
    # Ada with a peak that its power and memory sustain, and one (L40S) with twice that on the same
    # memory.
    "ada": GpuKind(Efficiency(generate=0.85, attention=0.85, fused_attention=0.85), published=True),
    "ada_tall": GpuKind(
        Efficiency(generate=0.62, attention=0.62, fused_attention=0.62), published=True
    ),
    # Blackwell with GDDR7: as Ada's tall kind, whose memory per product is alike (an assumption).
    "blackwell_pro": GpuKind(Efficiency(generate=0.62, attention=0.62, fused_attention=0.62)),
    "other": GpuKind(),
}

GPUS = {
    "H20": Gpu(148, 4.0, "h20"),
    "H200": Gpu(989, 4.8, "hopper"),
    "H100-PCIe": Gpu(756, 2.0, "hopper"),
    "H100": Gpu(989, 3.35, "hopper"),
    "H800": Gpu(989, 3.35, "hopper"),
    "GH200": Gpu(989, 4.0, "hopper"),
    "A100": Gpu(312, 2.0, "ampere"),
    "A800": Gpu(312, 2.0, "ampere"),
    "A40": Gpu(150, 0.696, "ampere"),
    "RTX-A6000": Gpu(154.8, 0.768, "ampere"),
    "RTX-3090": Gpu(71, 0.936, "ampere"),
    "L20": Gpu(119.5, 0.864, "ada"),
    "L40S": Gpu(362, 0.864, "ada_tall"),
    "L40": Gpu(181, 0.864, "ada"),
    "L4": Gpu(121, 0.3, "ada"),
    "RTX-4090D": Gpu(147, 1.0, "ada"),
    "RTX-4090": Gpu(165, 1.0, "ada"),
    "RTX-6000-Ada": Gpu(364, 0.96, "ada_tall"),
    "RTX-5090": Gpu(210, 1.79, "ada"),
    "RTX-PRO-6000-Blackwell": Gpu(503.8, 1.79, "blackwell_pro"),
    "B200": Gpu(2250, 8.0, "other"),
}
"""Name -> data sheet. A profile's GPU is the longest of these that its name begins with, without
the maker's words; hyphens and spaces do not count."""
_MAKER = re.compile(r"^(?:(?:NVIDIA|GEFORCE|TESLA)[- ]?)*")


def find_gpu(name: str) -> Gpu | None:
    """Return the data sheet of the GPU that a profile or a row names; None for an unknown GPU.

    Example:
        >>> find_gpu("NVIDIA GeForce RTX 4090") == find_gpu("RTX4090") == GPUS["RTX-4090"]
        True
        >>> find_gpu("RTX-A4000")
    """
    normal = _MAKER.sub("", name.upper())
    found = [key for key in GPUS if _begins_with(normal, key)]
    return GPUS[max(found, key=len)] if found else None


def _begins_with(name: str, key: str) -> bool:
    """Return whether `name`, in capitals, begins with the model number `key`: A4000 is no A40."""
    return re.match(key.upper().replace("-", "[- ]?") + r"(?!\d)", name) is not None


def kind_of(name: str) -> GpuKind:
    """Return the figures for the kind of GPU that this name belongs to."""
    gpu = find_gpu(name)
    return KINDS[gpu.kind if gpu else "other"]


@cache
def efficiency_of(pool: Pool) -> Efficiency:
    """Return the efficiency of a pool's GPUs."""
    given: dict[str, Any] = dict(pool.efficiency)
    return replace(kind_of(pool.gpu).efficiency, **given)
