"""The tilted mixture: its flow, its optimum in closed form, and how near Flow-GRPO comes to that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from benchmarks.mixture import at_kl, reached, tilted, weighted
from digenrl.models.mixture import MixtureFlow, MixturePolicy
from digenrl.types import Prompt
from reward_models.mixture import Coordinate, LogLikelihood
from tests.training import commands

SETTINGS = yaml.safe_load((Path(__file__).parents[2] / "configs/model/mixture.yaml").read_text())
MIXTURE = {name: SETTINGS[name] for name in ("means", "weights", "deviation")}
MEANS, DEVIATION = torch.tensor(MIXTURE["means"]), MIXTURE["deviation"]


def policy() -> MixturePolicy:
    return MixturePolicy(**MIXTURE, keep_reference=True)


def drawn(count: int, seed: int = 0) -> Tensor:
    """Points of the mixture."""
    generator = torch.Generator().manual_seed(seed)
    component = torch.randint(len(MEANS), (count,), generator=generator)
    return MEANS[component] + DEVIATION * torch.randn(count, MEANS.shape[1], generator=generator)


@torch.no_grad()
def test_the_velocity_is_the_mean_of_noise_minus_data() -> None:
    """By weighting drawn pairs with how likely they make x_s: E[eps - x | x_s]."""
    network, s = policy().transformer, 0.6
    assert isinstance(network, MixtureFlow)
    data = drawn(400_000)
    for x in drawn(3, seed=1) * 0.7:
        noise = (x - (1 - s) * data) / s
        weights = (-noise.square().sum(1) / 2).double().softmax(dim=0)
        expected = (weights[:, None] * (noise - data)).sum(0)
        found = network.base(x[None], torch.tensor([[s]]))[0]
        assert float((found - expected).abs().max()) < 0.1
        assert float((found + expected).abs().max()) > 0.5


def test_rewards_read_points_from_pictures_and_the_base_is_the_reference_at_first() -> None:
    made, x = policy(), drawn(6)
    media, prompts = made.decode(x), [Prompt(f"along {axis}", target=axis) for axis in ("+0", "-7", "+3") * 2]
    assert media.shape == (6, 1, 2, 4)
    torch.testing.assert_close(Coordinate(8.0)(media, prompts)[:3], torch.stack([x[0, 0], -x[1, 7], x[2, 3]]))
    normal = torch.distributions.Normal(MEANS, DEVIATION)
    expected = normal.log_prob(x[:, None]).sum(-1).logsumexp(1) - torch.tensor(float(len(MEANS))).log()
    torch.testing.assert_close(LogLikelihood(**MIXTURE, span=8.0)(media, prompts), expected, rtol=1e-4, atol=1e-4)
    condition, sigmas = made.encode(prompts), torch.full((6,), 0.5)
    with torch.no_grad(), made.reference():
        base = made.velocity(x, sigmas, condition)
    assert torch.equal(made.velocity(x, sigmas, condition), base)
    with pytest.raises(ValueError, match="along \\+0"):
        made.encode([Prompt("along +8")])


def test_both_forms_of_the_optimum_agree() -> None:
    directions = torch.eye(8, dtype=torch.float64)[:3]
    rewards = (drawn(200_000).double() @ directions.T).T
    network = policy().transformer
    assert isinstance(network, MixtureFlow)
    for kl in (0.1, 0.5):
        best = at_kl(kl, lambda beta: tilted(network, directions, beta))
        assert best == pytest.approx(at_kl(kl, lambda beta: weighted(rewards, beta)), rel=0.02)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Any]:
    """Starts train commands, and leaves none behind."""
    yield from commands(tmp_path)


@pytest.mark.slow
@pytest.mark.processes
def test_flow_grpo_comes_near_the_optimum_at_its_kl(running: Any) -> None:
    train = running("experiment=mixture_flowgrpo", "logger=none", tiny=())
    assert train.finish() == 0, train.stderr
    found = reached(train.run_dir, samples=1000)
    assert found.kl > 0.2, "far enough from the base to mean something"
    assert found.share >= 0.9, found
    assert found.share <= 1.02, "nothing beats the optimum"
