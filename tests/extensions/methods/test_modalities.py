"""`for: [video]` and `for: [audio]`: each modality has the advantage of its own rewards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from digenrl import config as configuration
from digenrl.algorithms.parts import WHOLE, Part
from digenrl.diffusion.sde import FlowSDE
from digenrl.extensions.methods.forward_losses import nft_loss
from digenrl.extensions.methods.nft import NFT, OldPolicySchedule
from digenrl.extensions.methods.noise_levels import NoiseLevels
from digenrl.extensions.methods.noised import NoisedCells
from digenrl.extensions.methods.rvm import RVM
from digenrl.parts import check_parts
from digenrl.types import TrainBatch
from tests.algorithms.fit import grpo
from tests.algorithms.toy_policy import ToyPolicy, roll
from tests.extensions.methods.forward import build
from tests.models.tiny_policies import BOTH

VIDEO, AUDIO = {"video": ["video"], "audio": ["audio"]}, {"both": None, "audio": ["audio"]}
SEEN, HEARD = slice(2), slice(2, None)


class Layout:
    """Two tokens of video, then the sound."""

    def modality_tokens(self, modality: str) -> slice:
        return {"video": SEEN, "audio": HEARD}[modality]


class Streams(ToyPolicy):
    """A toy of two tokens of video and one of sound, which begins away from its base."""

    modalities = ("video", "audio")

    def __init__(self) -> None:
        super().__init__()
        self.codec = Layout()
        with torch.no_grad():
            self.transformer[2].bias.add_(0.3)
        self.velocities: list[Tensor] = []

    def velocity(self, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
        found = super().velocity(latents, sigmas, condition)
        if found.requires_grad:
            found.retain_grad()
            self.velocities.append(found)
        return found


def made(kind: Any, policy: ToyPolicy, **changes: Any) -> Any:
    old: dict[str, Any] = {"old_policy": OldPolicySchedule()} if kind is NFT else {}
    module: Any = build(kind, policy, **(old | changes))
    module.on_train_start()
    with torch.no_grad():  # away from the old policy too
        policy.transformer[2].bias.add_(0.2)
    return module


def batch_of(policy: ToyPolicy, names: Any, **rewards: Tensor) -> TrainBatch:
    blocks = roll(policy, FlowSDE(0.0), NoiseLevels(size=3))
    draw = torch.Generator().manual_seed(7)
    scores = {name: torch.rand(2, 4, generator=draw) for name in names} | rewards
    return TrainBatch(tuple(blocks), scores, dict.fromkeys(scores, 1.0), 24.0, 0, 0)


def output_gradient(module: Any, item: TrainBatch) -> Tensor:
    """Gradient of the loss by the velocities, [cells, tokens, channels]."""
    module.zero_grad()
    module.policy.velocities.clear()
    module.training_step(item, 0).backward()
    return torch.cat([each.grad for each in module.policy.velocities])


@pytest.mark.parametrize("kind", [NFT, RVM])
def test_without_routes_every_bit_is_as_before(kind: Any) -> None:
    """Rewards for all modalities are one part, whose loss is that of the formula over the whole
    sample."""
    losses = []
    for routes in ({}, {"a": None, "b": None}, {"a": ["audio", "video"], "b": None}):
        module = made(kind, Streams())
        item = batch_of(module.policy, "ab")
        module.route_rewards(routes)
        assert module.parts == WHOLE
        losses.append(module.training_step(item, 0))
    assert losses[0] == losses[1] == losses[2]
    if kind is NFT:
        plain = sum((_whole_loss(module, item, number).sum() for number in (0, 1)), torch.zeros(()))
        assert losses[0] == plain / 24.0


def _whole_loss(module: NFT, item: TrainBatch, number: int) -> Tensor:
    from digenrl.extensions.methods.forward_process import STREAM
    from digenrl.extensions.methods.noised import noise_cells

    block = item.blocks[number]
    cells: NoisedCells = noise_cells(block, range(4), block.numbers, module.seed, STREAM)
    own = module.advantage(item.rewards, item.reward_weights).values[number]
    return nft_loss(
        cells.predict_velocity(module.policy),
        module.old_velocity(cells),
        cells.noisy,
        cells.clean,
        cells.sigma[None],
        own[:, None],
        module.beta,
        module.max_advantage,
    )


@pytest.mark.parametrize("kind", [NFT, RVM])
def test_a_modality_without_rewards_has_no_gradient_at_all(kind: Any) -> None:
    module = made(kind, Streams())
    item = batch_of(module.policy, ["audio"])
    module.route_rewards({"audio": ["audio"]})
    found = output_gradient(module, item)
    assert (found[:, SEEN] == 0).all()
    assert (found[:, HEARD] != 0).any()
    assert module.policy.adapter.parameters_without_gradient() == []


@pytest.mark.parametrize("kind", [NFT, RVM])
def test_each_modality_has_the_gradient_of_its_own_rewards(kind: Any) -> None:
    """The gradient through the video's velocities does not change with the rewards for sound, and
    the other way round. A reward for both changes both."""
    module = made(kind, Streams())
    module.route_rewards(VIDEO)
    item = batch_of(module.policy, VIDEO)
    first = output_gradient(module, item)
    other = batch_of(module.policy, VIDEO, audio=-item.rewards["audio"])
    second = output_gradient(module, other)
    assert torch.equal(first[:, SEEN], second[:, SEEN])
    assert not torch.allclose(first[:, HEARD], second[:, HEARD])
    module.route_rewards(AUDIO)
    both = batch_of(module.policy, AUDIO)
    third = output_gradient(module, both)
    fourth = output_gradient(module, batch_of(module.policy, AUDIO, both=-both.rewards["both"]))
    assert not torch.allclose(third[:, SEEN], fourth[:, SEEN])
    assert not torch.allclose(third[:, HEARD], fourth[:, HEARD])


def test_parts_are_weighed_by_their_numbers() -> None:
    """Equal rewards for both modalities give each the advantage that one reward for all gives: the
    loss of RVM, which is a plain mean, is then that of the whole sample."""
    whole, parts = made(RVM, Streams()), made(RVM, Streams())
    parts.route_rewards(VIDEO)
    assert parts.parts == (
        Part(0, 2, 2 / 3, frozenset({"video"})),
        Part(2, 3, 1 / 3, frozenset({"audio"})),
    )
    same = torch.rand(2, 4, generator=torch.Generator().manual_seed(3))
    item = batch_of(parts.policy, (), video=same, audio=same)
    alone = batch_of(whole.policy, (), r=same)
    torch.testing.assert_close(output_gradient(parts, item), output_gradient(whole, alone))


def test_groups_and_samples_are_useful_if_one_modality_learns_from_them() -> None:
    """Rewards whose sum is constant, but not their parts."""
    module = made(RVM, Streams())
    module.route_rewards(VIDEO)
    up = torch.tensor([[0.0, 1.0, 2.0, 3.0], [1.0, 1.0, 1.0, 1.0]])
    rewards = {"video": up, "audio": 3.0 - up}
    weights = {"video": 1.0, "audio": 1.0}
    assert module.teaching_groups(rewards, weights).tolist() == [True, False]
    assert module.useful_samples(rewards, weights).tolist() == [[True] * 4, [False] * 4]
    module.parts = WHOLE
    assert module.teaching_groups(rewards, weights).tolist() == [False, False]


def test_what_cannot_be_routed_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"a\.for = \[audio\]: GRPO has one loss.*algorithm=nft"):
        grpo(Streams()).route_rewards({"a": ["audio"]})
    silent = made(NFT, ToyPolicy())
    type(silent.policy).modalities = ()
    with pytest.raises(
        ValueError, match=r"a\.for = \[audio\]: toy trains one modality.*trains both"
    ):
        silent.route_rewards({"a": ["audio"]})


@pytest.mark.heavy
def test_a_configuration_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    words = ["hardware=cpu_tiny", "reward=clap", f"output_root={tmp_path}"]
    route = "+reward.rewards.clap.for=[audio]"
    for experiment, said in (
        ("ltx23_flowgrpo", r"clap\.for = \[audio\]: GRPO has one loss"),
        ("ltx2_flowgrpo", r"clap\.for = \[audio\]: \w+ trains one modality"),
    ):
        settings = configuration.load([f"experiment={experiment}", *words, route]).settings
        with pytest.raises(ValueError, match=said):
            check_parts(settings)
    fits = ["experiment=zimage_turbo_nft", f"model={BOTH}", "sampling=ltx2_512x768x121"]
    check_parts(configuration.load([*fits, *words, route]).settings)


def test_a_batch_without_optimised_rewards_is_refused_and_not_trained_by_zeros() -> None:
    policy = Streams()
    item = replace(batch_of(policy, ["a"]), reward_weights={})
    for module in (made(NFT, policy), grpo(policy)):
        with pytest.raises(ValueError, match="must be non-empty"):
            module.training_step(item, 0)
