"""Counter-based randomness: a number depends on its purpose alone, never on rank, GPU or batch size
(design, I11).

A 128-bit BLAKE2b digest of the identifying tuple keys one Philox stream (Salmon et al., SC'11) per
sample and denoising step. `torch.Generator` on CPU keeps only 32 bits of a seed, so unrelated
tuples would collide. Philox takes all 128.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

INITIAL = -1
"""`denoise_step` of the initial noise."""


def generator(seed: int, *parts: int | str) -> np.random.Generator:
    """Return a generator for choices (trained steps, windows, pairs) that depends on `seed` and
    `parts` alone."""
    text = "\x1f".join([str(int(seed)), *(f"{type(part).__name__}:{part}" for part in parts)])
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest, dtype=np.uint64)))


def noise(
    seed: int,
    step: int,
    uid: int,
    samples: Sequence[int],
    denoise_step: int,
    shape: Sequence[int],
    stream: str = "rollout",
) -> Tensor:
    """Return standard normal [b, *shape] fp32 on CPU, one independent stream per sample.

    The key consists of seed, step (RL step), uid (prompt), samples (indices within the group) and
    denoise_step (-1 = initial noise). `stream` separates uses that share these numbers
    (forward-process methods draw their own noise).

    Example:
        Samples 2 and 3 get the same noise wherever they are drawn:

        >>> whole = noise(seed=0, step=1, uid=7, samples=[0, 1, 2, 3], denoise_step=5, shape=[2])
        >>> part = noise(seed=0, step=1, uid=7, samples=[2, 3], denoise_step=5, shape=[2])
        >>> whole[2:].equal(part)
        True
    """
    import torch  # here, so that the planner asks step selections for their counts without it

    rows = [
        generator(
            seed, stream, int(step), int(uid), int(sample), int(denoise_step)
        ).standard_normal(tuple(shape), dtype=np.float32)
        for sample in samples
    ]
    return torch.from_numpy(np.stack(rows))
