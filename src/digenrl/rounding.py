"""How far replay rounds away from sampling, and how far it may.

Every ratio of a first on-policy update is 1 but for rounding: kernels add up in another order where
a forward has another shape, or is compiled. Rounding that reaches the clip range would clip samples
of the present policy, half of them on the side that takes their gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

WHOLE_PRECISION = ("float32", "float64")
"""Dtypes whose rounding is far below every clip range in use."""
WHOLE_BOUND, HALF_BOUND = 1e-5, 1e-3
"""Largest first |ratio - 1| that counts as rounding, whatever the clip range: for
`WHOLE_PRECISION`, and for 16 bits. verl-omni measures 1e-5 at 65,536 dimensions in 16 bits (docs
rollout_correction.md:99). Small latents average over fewer dimensions, so the bound is larger."""
PARTS_OF_CLIP = 4.0
"""Rounding may take this part of the clip range, 1 / 4."""
_BY_STEPS = {1: 0.0, 2: 1.2e-5, 4: 3.5e-5}
_COMPILED, MEASURED_DIMENSIONS = 1.1e-5, 65_536
"""Denoising steps in one forward -> largest first |ratio - 1|; the same for compiled blocks; the
latent's dimensions. Measured on one H200 with FLUX.1, LoRA, bf16, 512 px (benchmarks/results,
2026-11-26). One step has the rollout's own shape, so nothing rounds differently."""


def first_ratio_bound(dtype: str, clip: Sequence[float] | None) -> float:
    """Return what the first |ratio - 1| may reach.

    Args:
        dtype: in which forwards compute, as torch names it.
        clip: distances below and above 1 at which ratios are clipped; None: nothing is clipped.

    Example:
        >>> first_ratio_bound("bfloat16", None), first_ratio_bound("bfloat16", (1e-4, 1e-4))
        (0.001, 2.5e-05)
        >>> first_ratio_bound("float32", (1e-4, 2e-4))
        1e-05
    """
    bound = WHOLE_BOUND if dtype in WHOLE_PRECISION else HALF_BOUND
    return bound if clip is None else min(bound, min(clip) / PARTS_OF_CLIP)


def replay_rounding(steps: int, compiled: bool, dimensions: int) -> float:
    """Return the |ratio - 1| to expect of 16-bit replay.

    Log-probs are means over the latent's dimensions, so rounding falls with the square root of
    their number (assumed). Between and beyond the measured numbers of steps the next measured one
    counts, above the last in proportion.

    Example:
        >>> [replay_rounding(steps, False, 65_536) for steps in (1, 2, 3, 8)]
        [0.0, 1.2e-05, 3.5e-05, 7e-05]
    """
    last = max(_BY_STEPS)
    known = min((k for k in _BY_STEPS if k >= steps), default=last)
    found = _BY_STEPS[known] * max(1.0, steps / last)
    return max(found, _COMPILED if compiled else 0.0) * math.sqrt(MEASURED_DIMENSIONS / dimensions)


def most_steps_per_forward(bound: float, dtype: str, dimensions: int, trained: int) -> int:
    """Return the most denoising steps in one forward with which replay stays within `bound`.

    Example:
        >>> [most_steps_per_forward(c / 4, "bfloat16", 65_536, 10) for c in (4e-6, 1e-4, 1e-3)]
        [1, 2, 10]
    """
    if dtype in WHOLE_PRECISION:
        return trained
    fitting = (
        steps
        for steps in range(trained, 0, -1)
        if replay_rounding(steps, False, dimensions) <= bound
    )
    return next(fitting, 1)
