"""What an emulated rank (`hardware.emulate=true`) builds in place of networks and rewards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from digenrl.advisor import StandIn
from digenrl.config import Composed, instantiate
from digenrl.extensions.planner.durations import Durations, rank_durations

if TYPE_CHECKING:
    from digenrl.models.policy import Policy
    from digenrl.rewards.suite import RewardSuite
    from digenrl.transport.link import PeerLine

_REWARD: dict[str, Any] = {
    "_target_": "digenrl.rewards.suite.RewardSuite",
    "_recursive_": False,
    "placement": "inline",
    "rewards": {
        "jpeg_size": {"scorer": {"_target_": "reward_models.jpeg_size.JpegSize"}, "weight": 1.0}
    },
}
"""A real scorer that takes almost no time. The profile's scoring time is part of the emulated
decode."""


@dataclass(frozen=True)
class EmulatedRank:
    """The `StandIn` of one rank."""

    durations: Durations
    adapter: bool
    """Whether only a part of the weights is trained, as with LoRA."""

    def build_policy(self) -> Policy:
        """Return a policy that sleeps as long as the real network would compute."""
        from digenrl.extensions.planner.emulated import EmulatedPolicy  # plans load no torch

        return EmulatedPolicy(self.durations, self.adapter)

    def build_rewards(self) -> RewardSuite:
        """Return a real suite whose scorer takes almost no time."""
        suite: RewardSuite = instantiate(_REWARD)
        return suite

    def line_to(self, peer: int) -> PeerLine:
        """Return a line that is as slow as the one between this rank's place and the trainers."""
        from digenrl.extensions.planner.emulated import EmulatedLine

        return EmulatedLine(self.durations.fetch, self.durations.send)


def stand_ins(composed: Composed, trainers: int, rollouts: int) -> tuple[StandIn, ...]:
    """Return the stand-ins that each rank of an emulated run builds; () where the networks are
    real.

    Raises:
        ValueError: as `durations`.
    """
    adapter = composed.settings.model.get("lora") is not None
    return tuple(EmulatedRank(own, adapter) for own in rank_durations(composed, trainers, rollouts))
