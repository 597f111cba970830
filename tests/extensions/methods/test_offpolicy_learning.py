"""Check 21: with each correction a toy reward rises. On-policy each is the plain policy gradient."""

from __future__ import annotations

import pytest

from digenrl.algorithms.surrogates import Surrogate
from digenrl.extensions.methods.offpolicy import CISPO, TOPR, DecoupledPPO, TruncatedIS
from tests.algorithms.fit import grpo
from tests.algorithms.test_learning import gain


@pytest.mark.slow
@pytest.mark.parametrize("surrogate", [DecoupledPPO(), TruncatedIS(), CISPO(), TOPR()])
def test_reward_rises(surrogate: Surrogate) -> None:
    assert gain(lambda policy: grpo(policy, surrogate=surrogate), 1.0, 25) > 0.3
