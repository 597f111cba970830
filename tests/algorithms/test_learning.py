"""Check 21: every algorithm raises a toy reward in 50 RL steps, and lowers it when the sign of A is
flipped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from digenrl.algorithms.base import PolicyModule
from digenrl.algorithms.surrogates import Clipped
from digenrl.diffusion.sde import FlowSDE
from digenrl.extensions.methods.sde import DanceSDE, FlowCPS
from digenrl.extensions.methods.steps import Window
from digenrl.extensions.methods.surrogates import FlowDPPO, Guard
from tests.algorithms.fit import grpo, rl_steps
from tests.algorithms.toy_policy import ToyPolicy

pytestmark = pytest.mark.heavy

MAKERS: dict[str, Callable[[ToyPolicy], PolicyModule]] = {
    "flow": lambda p: grpo(p),
    "dance": lambda p: grpo(p, sde=DanceSDE(0.3)),
    "cps": lambda p: grpo(p, sde=FlowCPS(0.8)),
    "mix": lambda p: grpo(p, train_steps=Window(2, order="progressive", hold=5)),
    "guard": lambda p: grpo(p, surrogate=Guard()),
    "dppo": lambda p: grpo(p, surrogate=FlowDPPO(1e-2)),
    "kl": lambda p: grpo(p, sde=FlowSDE(0.7), surrogate=Clipped(), kl_weight=1e-3),
}


def gain(make: Callable[[ToyPolicy], PolicyModule], sign: float, count: int) -> float:
    """Rise of the mean reward -(x0-1)^2 from the first 5 RL steps to the last 5, when `sign` times
    it is optimised."""
    torch.set_num_threads(1)
    policy = ToyPolicy(latent_shape=(1, 1))

    def reward(final: Tensor) -> Tensor:
        return -sign * (final - 1.0).square().flatten(2).mean(2)

    curve = [sign * value for value in rl_steps(make(policy), policy, reward, count, samples=12)]
    return sum(curve[-5:]) / 5 - sum(curve[:5]) / 5


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name == "kl" else ()) for name in sorted(MAKERS)],
)
def test_reward_rises(name: str) -> None:
    assert gain(MAKERS[name], 1.0, 25) > 0.3


@pytest.mark.parametrize("name", ["flow", "cps", "guard", "dppo"])
def test_reward_falls_with_the_sign_flipped(name: str) -> None:
    """The sensitivity of the test above."""
    assert gain(MAKERS[name], -1.0, 15) < -0.3
