"""Gradients that are taken while samples are generated: those of the replay, and no transition computed twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from digenrl import config as configuration
from digenrl import run
from digenrl.algorithms.advantages import Advantage
from digenrl.algorithms.surrogates import (
    CISPO,
    TOPR,
    Cells,
    Clipped,
    DecoupledPPO,
    FlowDPPO,
    Guard,
    Surrogate,
    TruncatedIS,
    Uncorrected,
)
from digenrl.cluster.world import World
from digenrl.diffusion import denoise
from digenrl.diffusion.sde import DanceSDE, FlowCPS, FlowSDE, Kernel
from digenrl.diffusion.sigmas import static_grid
from digenrl.diffusion.steps import RandomSubset
from digenrl.extensions.tasks.digits import DigitsPolicy
from digenrl.models.policy import Policy
from digenrl.types import CellBlock, Prompt
from tests.algorithms.fit import grpo
from tests.algorithms.toy_policy import ToyPolicy, batch, condition
from tests.strategy.processes import FP64, SGD, completed, configured, relative, run_cluster
from tests.strategy.test_equality import LIGHT

STEPS, SAMPLES = 6, 4
GRID = static_grid(STEPS, 3.0)


class Squared(Surrogate):
    """Its gradient is that of the squared advantage."""

    def loss(self, cells: Cells) -> Tensor:
        return cells.advantages**2 * cells.ratio


def made(
    policy: Policy | ToyPolicy, kernel: Kernel, weigh: Callable[[Tensor, Tensor], Tensor] | None, task_size: int = 1
) -> list[CellBlock]:
    """Samples of one group, task by task, each with its trained steps; `weigh` as of `RolloutEngine`."""
    plan, blocks = RandomSubset(size=3).plan(0, 0, STEPS), []
    asked = condition() if isinstance(policy, ToyPolicy) else policy.encode([Prompt("a three", negative="a one")])
    for first in range(0, SAMPLES, task_size):
        key = denoise.SampleKey(0, 0, 7, tuple(range(first, first + task_size)))
        state = denoise.start(key, policy.latent_shape, torch.float64)
        for k in range(STEPS):
            weight = weigh(GRID, torch.tensor([k])) if weigh is not None and k in plan.trained else None
            state = denoise.advance(policy, asked, state, GRID, kernel, plan, keep_means=True, weight=weight)
        found = vars(denoise.finish(state, plan))
        identity = {"step": 0, "group": 0, "uid": 7, "first_sample": first, "version": 0}
        blocks.append(CellBlock(**identity, sigmas=GRID, condition=asked, **found))
    return blocks


def moved(policy: Policy | ToyPolicy) -> None:
    """Away from the beginning, where the residual is 0 and half of the gradients are 0 too."""
    with torch.no_grad():
        for parameter in policy.trained_parameters().values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))


CASES = (
    (FlowSDE(0.7), Clipped(), "longcat"),
    (DanceSDE(0.3), Clipped(), "rectified"),
    (FlowCPS(0.8), Clipped(), "none"),
    (FlowSDE(0.7), Guard(), "none"),
    (FlowSDE(0.7), Clipped(), "none"),
    (FlowSDE(0.7), Clipped(), "std"),
    (FlowSDE(0.7), FlowDPPO(), "none"),
    (FlowSDE(0.7), DecoupledPPO(), "none"),
    (FlowSDE(0.7), TruncatedIS(), "std"),
    (FlowSDE(0.7), CISPO(), "none"),
    (FlowSDE(0.7), TOPR(), "none"),
    (FlowSDE(0.7), Uncorrected(), "none"),
)
NAMES = ("kernel", "surrogate", "step_weight")


@pytest.mark.parametrize(NAMES, CASES)
def test_the_gradient_is_the_replays_without_a_second_forward(
    kernel: Kernel, surrogate: Surrogate, step_weight: str
) -> None:
    policy = ToyPolicy(torch.float64)
    moved(policy)
    module = grpo(policy, sde=kernel, surrogate=surrogate, step_weight=step_weight)
    rewards = torch.tensor([[0.1, 0.9, 0.4, 0.6]])
    found = {}
    for name, weigh in (("replay", None), ("taken", module.log_prob_weights)):
        module.zero_grad()
        policy.calls = 0
        blocks = made(policy, kernel, weigh)
        assert all(p.grad is None for p in policy.trained_parameters().values())
        loss = module.training_step(batch(blocks, rewards), 0)
        loss.backward()
        assert policy.calls == SAMPLES * (STEPS + (weigh is None))
        found[name] = {key: p.grad.clone() for key, p in policy.trained_parameters().items()} | {"loss": loss.detach()}
        assert (blocks[0].latents.numel() == 0) == (weigh is not None)
        assert not any(
            value.requires_grad for block in blocks for value in vars(block).values() if torch.is_tensor(value)
        )
    assert relative(found["taken"], found["replay"]) <= 1e-10


def adapted(**settings: Any) -> DigitsPolicy:
    """Digits in fp64 with a moved adapter."""
    lora = {"rank": 4, "alpha": 8, "targets": ["to_q", "to_k", "to_v", r"norm1\.linear", r"net\.2", "proj_out"]}
    policy = DigitsPolicy(lora=lora, dtype=torch.float64, **settings)
    moved(policy)
    return policy


@pytest.mark.parametrize(NAMES, [*CASES[:4], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[4:])])
def test_adapters_take_the_gradients_of_several_samples_apart(
    kernel: Kernel, surrogate: Surrogate, step_weight: str
) -> None:
    """The network turns positions in fp32, which rounds a gradient by its scale; a power of two commutes with that."""
    check_apart(adapted(), kernel, surrogate, step_weight, 1e-10)


def test_gradients_are_apart_under_guidance_and_where_blocks_are_repeated() -> None:
    policy = adapted(gradient_checkpointing=True)
    policy.cfg_scale = 2.0  # as in a family with an unconditional branch
    check_apart(policy, FlowSDE(0.7), Clipped(), "none", 1e-10)


def test_what_cannot_be_taken_apart_is_refused() -> None:
    policy = adapted()
    latents, sigmas = torch.zeros(2, *policy.latent_shape, dtype=torch.float64), torch.ones(2)
    condition = denoise.expand_condition(policy.encode([Prompt("a three")]), 2)
    with policy.samples_apart(3), pytest.raises(ValueError, match=r"2 rows for 3 samples.*sampling\.task_size=1"):
        policy.velocity(latents, sigmas, condition)
    with pytest.raises(ValueError, match=r"set sampling\.task_size=1"), DigitsPolicy().samples_apart(2):
        pass


def check_apart(policy: Policy, kernel: Kernel, surrogate: Surrogate, step_weight: str, bound: float) -> None:
    module = grpo(policy, sde=kernel, surrogate=surrogate, step_weight=step_weight, advantage=Advantage(std="none"))
    rewards, found = torch.tensor([[1.0, -1.0, 0.5, -0.5]]), {}
    for name, weigh in (("replay", None), ("taken", module.log_prob_weights)):
        module.zero_grad()
        blocks = made(policy, kernel, weigh, task_size=2)
        kept = [blocks[0], blocks[1].narrowed(torch.tensor([False, True]))]
        module.training_step(batch(kept, rewards, denominator=16.0), 0).backward()
        found[name] = {key: p.grad.clone() for key, p in policy.trained_parameters().items() if p.grad is not None}
        assert all(layer.apart is None for layer in policy._adapted)
    assert relative(found["taken"], found["replay"]) <= bound


def test_a_loss_that_is_not_proportional_to_the_advantage_is_refused() -> None:
    module = grpo(ToyPolicy(), surrogate=Squared())
    with pytest.raises(ValueError, match=r"not proportional to the advantage.*schedule\.gradients=replay"):
        module.log_prob_weights(GRID, torch.tensor([1]))


TINY = ("schedule=colocated", "schedule.tsp.batch=1", "algorithm.kl_weight=0")
ONE = "sampling.task_size=1"
FEW = ("data.prompts_per_batch=4", "data.group_size=4", "sampling.steps=4", "sampling.eval.steps=4", "max_rl_steps=2")
MIXTURE = (
    "experiment=mixture_flowgrpo",
    "callbacks=default",
    "~callbacks.evaluation",
    "logger=none",
    *SGD,
    *FP64,
    *FEW,
    ONE,
)
"""All weights are trained, and nothing computes in fp32."""


BEST_AND_WORST = ("algorithm/advantage=best_and_worst", "algorithm.advantage.best_and_worst=1")
"""2 of each group's 4 samples have an advantage: some tasks of 2 have one useful row."""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ranks", "bound", "words"),
    [
        pytest.param(2, 1e-10, (*MIXTURE, "data.oversample=1", "data.zero_variance_groups=drop"), id="mixture-2"),
        pytest.param(1, 1e-10, MIXTURE, id="mixture-1", marks=pytest.mark.slow),
        pytest.param(1, 1e-5, (*LIGHT, ONE), id="digits-1", marks=pytest.mark.slow),
        pytest.param(1, 1e-5, (*LIGHT, *BEST_AND_WORST), id="digits-1-rows", marks=pytest.mark.slow),
        pytest.param(2, 1e-5, (*LIGHT, "schedule.gap=1"), id="digits-2-gap", marks=pytest.mark.slow),
        pytest.param(2, 1e-6, (*LIGHT, *FP64, "schedule.claims=split"), id="digits-2-fp64", marks=pytest.mark.slow),
        pytest.param(2, 1e-5, (*LIGHT, "experiment=digits_guard"), id="guard-2", marks=pytest.mark.slow),
    ],
)
def test_colocated_ranks_take_the_replays_gradients(
    tmp_path: Path, ranks: int, bound: float, words: tuple[str, ...]
) -> None:
    runs, forwards = {}, {}
    for where in ("replay", "generation"):
        directory = tmp_path / where

        def counted(rank: run.Rank, world: World, directory: Path = directory) -> None:
            """Writes one byte for each forward."""
            policy, calls = rank.strategy.engine.policy, (directory / f"calls-{world.rank}").open("ab", buffering=0)
            forward = policy.velocity

            def velocity(latents: Tensor, *others: object) -> Tensor:
                calls.write(b"." * len(latents))
                return forward(latents, *others)

            policy.velocity = velocity

        words = (*words, *TINY, f"schedule.gradients={where}")
        config = configuration.load(words).config if words[0].startswith("experiment=mix") else configured(*words)
        runs[where] = completed(run_cluster(directory, ranks, 0, config, after_build=counted))
        forwards[where] = sum(path.stat().st_size for path in directory.glob("calls-*"))
    assert len(runs["replay"].gradients) == config.max_rl_steps
    for mine, theirs in zip(runs["generation"].gradients, runs["replay"].gradients, strict=True):
        assert relative(mine, theirs) <= bound
    assert runs["generation"].cells.keys() == runs["replay"].cells.keys()
    groups = config.data.prompts_per_batch + config.data.oversample
    generated = config.max_rl_steps * groups * config.data.group_size * config.sampling.steps
    assert forwards == {"generation": generated, "replay": generated + len(runs["replay"].cells)}
