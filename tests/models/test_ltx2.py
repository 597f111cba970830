"""LTX-2: what is different from other families."""

from __future__ import annotations

import pytest
import torch

from tests.models.real_policies import decoder_moves


@pytest.mark.slow  # fast, on the strict device: tests/device/inside/test_parts.py
def test_a_large_decoder_leaves_the_device_after_each_task() -> None:
    """The VAE has more than a gibibyte, which trainers and rollouts need for other things."""
    there, back = torch.device("cuda", 0), torch.device("cpu")
    assert decoder_moves("ltx2", tasks=2) == [there, back] * 2
