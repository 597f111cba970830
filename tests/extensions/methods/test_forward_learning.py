"""Check 21 on the forward process: each method raises a toy reward, and lowers it when the sign of A
is flipped."""

from __future__ import annotations

import pytest

from digenrl.algorithms.base import PolicyModule
from tests.algorithms.test_learning import gain
from tests.algorithms.toy_policy import ToyPolicy
from tests.extensions.methods.test_dpo import dpo
from tests.extensions.methods.test_nft import nft

pytestmark = pytest.mark.heavy


def make_nft(policy: ToyPolicy) -> PolicyModule:
    return nft(policy, beta=1.0)


def make_dpo(policy: ToyPolicy) -> PolicyModule:
    return dpo(policy, beta=1.0)


def test_reward_rises() -> None:
    assert gain(make_nft, 1.0, 25) > 0.3
    assert gain(make_dpo, 1.0, 50) > 0.3


@pytest.mark.parametrize("make", [make_nft, make_dpo])
def test_reward_falls_with_the_sign_flipped(make) -> None:
    assert gain(make, -1.0, 15) < -0.3
