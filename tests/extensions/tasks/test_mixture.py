"""The tilted mixture: its flow, its optimum in closed form, and how near Flow-GRPO comes to
that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from benchmarks.mixture import at_kl, reached, tilted, weighted
from benchmarks.mixture_compress import every_second
from benchmarks.mixture_study import STEPS, Loop, divergence_of_points, grown, settings
from digenrl.extensions.tasks.mixture import MixtureFlow, MixturePolicy
from digenrl.types import Prompt, TrainBatch
from reward_models.mixture import Coordinate, LogLikelihood

SETTINGS = yaml.safe_load((Path(__file__).parents[3] / "configs/model/mixture.yaml").read_text())
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
    """E[eps - x | x_s] is estimated by weighting drawn pairs with the likelihood of x_s."""
    network, s = policy().transformer, 0.6
    assert isinstance(network, MixtureFlow)
    data = drawn(400_000)
    for x in drawn(3, seed=1) * 0.7:
        noise = (x - (1 - s) * data) / s
        weights = (-noise.square().sum(1) / 2).double().softmax(dim=0)
        expected = (weights[:, None] * (noise - data)).sum(0)
        found = network.mixture_velocity(x[None], torch.tensor([[s]]))[0]
        assert float((found - expected).abs().max()) < 0.1
        assert float((found + expected).abs().max()) > 0.5


def test_rewards_read_points_from_pictures_and_the_base_is_the_reference_at_first() -> None:
    made, x = policy(), drawn(6)
    media, prompts = (
        made.codec.decode(x),
        [Prompt(f"along {axis}", target=axis) for axis in ("+0", "-7", "+3") * 2],
    )
    assert media.shape == (6, 1, 2, 4)
    torch.testing.assert_close(
        Coordinate(8.0)(media, prompts)[:3], torch.stack([x[0, 0], -x[1, 7], x[2, 3]])
    )
    normal = torch.distributions.Normal(MEANS, DEVIATION)
    expected = (
        normal.log_prob(x[:, None]).sum(-1).logsumexp(1) - torch.tensor(float(len(MEANS))).log()
    )
    torch.testing.assert_close(
        LogLikelihood(**MIXTURE, span=8.0)(media, prompts), expected, rtol=1e-4, atol=1e-4
    )
    condition, sigmas = made.codec.encode(prompts), torch.full((6,), 0.5)
    with torch.no_grad(), made.adapter.reference():
        base = made.velocity(x, sigmas, condition)
    assert torch.equal(made.velocity(x, sigmas, condition), base)
    with pytest.raises(ValueError, match="along \\+0"):
        made.codec.encode([Prompt("along +8")])


@pytest.mark.heavy
def test_both_forms_of_the_optimum_agree() -> None:
    directions = torch.eye(8, dtype=torch.float64)[:3]
    rewards = (drawn(200_000).double() @ directions.T).T
    network = policy().transformer
    assert isinstance(network, MixtureFlow)
    for kl in (0.1, 0.5):
        best = at_kl(kl, lambda beta: tilted(network, directions, beta))[1]
        assert best == pytest.approx(at_kl(kl, lambda beta: weighted(rewards, beta))[1], rel=0.02)


def test_the_divergence_of_points_is_that_of_two_gaussians() -> None:
    """One component and a push that does not depend on the point: the ODE draws two Gaussians of
    equal deviation."""
    made = MixturePolicy([[0.3] * 8], [1.0], 0.7, keep_reference=True)
    network = made.transformer
    assert isinstance(network, MixtureFlow)
    with torch.no_grad():
        network.leave.bias.copy_(torch.linspace(-0.2, 0.3, 8))
    noise, aim = (
        torch.randn(2000, 8, generator=torch.Generator().manual_seed(0)),
        torch.zeros(2000, 8),
    )
    points, found = divergence_of_points(made, noise, aim)
    deviation, base = torch.tensor(1.0), noise
    for pair in made.sigma_grid(STEPS).unfold(0, 2, 1):
        with made.adapter.reference():
            base, growth = grown(made, base, aim, pair)
        deviation *= (growth[0] / 8).exp()
    push = points - base
    torch.testing.assert_close(push, push[:1].expand_as(push), rtol=1e-4, atol=1e-4)
    assert found == pytest.approx(float((push[0] / deviation).square().sum() / 2), rel=0.05)
    assert found > 0.05


def test_a_run_of_the_study_repeats_and_starts_on_policy() -> None:
    setting = next(
        setting for setting in settings("stale") if setting.name == "clipped" and setting.stale
    )
    runs = [Loop(setting, 5), Loop(setting, 5)]
    for run in runs:
        first = run.generated(0, 0)
        assert first.rewards.shape == (16, 16)
        assert sorted(
            n for blocks in first.updates for block in blocks for n in block.numbers
        ) == list(range(256))
        run.module.training_step(
            TrainBatch(first.updates[0], {"r": first.rewards}, {"r": 1.0}, 1152.0, 0, 0), 0
        )
        assert float(run.module.collect_metrics()["ratio_max_dev"]) < 1e-5
        run.run(2)
        assert run.module.collect_metrics()["ratio_max_dev/stale_1"] > 0
    mine, theirs = (run.policy.adapter.trained_parameters() for run in runs)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_two_trainers_of_the_study_have_the_gradient_of_one() -> None:
    (setting,) = (s for s in settings("frontier") if (s.name, s.value) == ("flowgrpo", 1.0))
    loop = Loop(setting, 3)
    batch = loop.generated(0, 0)
    blocks, parameters = batch.updates[0], loop.policy.adapter.trained_parameters()
    halves = [tuple(every_second(block, rank) for block in blocks) for rank in range(2)]
    assert sorted(n for half in halves for block in half for n in block.numbers) == sorted(
        n for block in blocks for n in block.numbers
    )
    found = []
    for given in (blocks, *halves):
        cells = float(sum(block.samples * len(block.steps) for block in given))
        loop.optimizer.zero_grad()
        made = TrainBatch(given, {"r": batch.rewards}, {"r": 1.0}, cells, 0, 0)
        loop.module.training_step(made, 0).backward()
        found.append(torch.cat([p.grad.flatten().clone() for p in parameters.values()]))
    torch.testing.assert_close((found[1] + found[2]) / 2, found[0])


@pytest.mark.slow
@pytest.mark.processes
def test_flow_grpo_comes_near_the_optimum_at_its_kl(running: Any) -> None:
    train = running("experiment=mixture_flowgrpo", "logger=none", tiny=())
    assert train.finish() == 0, train.stderr
    found = reached(train.run_dir, samples=1000)
    assert found.kl > 0.2, "far enough from the base to mean something"
    assert found.share >= 0.9, found
    assert found.share <= 1.02, "nothing beats the optimum"
