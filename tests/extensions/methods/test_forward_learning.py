"""Check 21 on the forward process: each method raises a toy reward, and lowers it when the sign of A
is flipped."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from digenrl.algorithms.base import PolicyModule
from digenrl.extensions.methods.dgpo import DGPO
from tests.algorithms.test_learning import gain
from tests.algorithms.toy_policy import ToyPolicy
from tests.extensions.methods.forward import METHODS, build
from tests.extensions.methods.test_dpo import dpo
from tests.extensions.methods.test_nft import nft

pytestmark = pytest.mark.heavy


def make_nft(policy: ToyPolicy) -> PolicyModule:
    return nft(policy, beta=1.0)


def make_dpo(policy: ToyPolicy) -> PolicyModule:
    return dpo(policy, beta=1.0)


def maker(kind: type[PolicyModule]) -> Callable[[ToyPolicy], PolicyModule]:
    # One dimension: a group's errors differ by much more than in 65,536, and a beta of 100 would
    # choose groups by their noise.
    changes = {"beta": 1.0} if kind is DGPO else {}
    return lambda policy: build(kind, policy, **changes)


FORWARD = [make_nft, make_dpo, *(maker(kind) for kind in METHODS)]


@pytest.mark.parametrize("make", FORWARD)
def test_reward_rises(make: Callable[[ToyPolicy], PolicyModule]) -> None:
    assert gain(make, 1.0, 50 if make is make_dpo else 25) > 0.3


@pytest.mark.parametrize("make", FORWARD)
def test_reward_falls_with_the_sign_flipped(make) -> None:
    assert gain(make, -1.0, 15) < -0.3
