"""What each algorithm makes of the tilted mixture, where the best reward at every KL is known:
hundreds of short runs.

    python -m benchmarks.mixture_study [study=frontier,stale,...] [seeds=5] [steps=100] [minutes=60]

Studies:
    frontier    every algorithm at the same samples and learning rate, with four values of its own knob; another
                seed has chosen them so that the KL lies between about 0.1 and 1.5
    controls    in the table of frontier: fine-tuning on the best of a group, Flow-GRPO on a random reward, the best
                of N at sampling
    stale       every surrogate, on-policy and with every sample one version old, paired by seed
    stale_fast  the same at five times the learning rate
    bases       three algorithms on other base models

A run takes seconds, because it is a loop in this process. It uses the real policy, kernel, step
selection, advantages and losses, with all prompts of an update in one forward. There is no rank, no
launcher and no reward service, and the noise is the study's own. Finished runs are lines of
benchmarks/results/mixture_runs.jsonl and are not repeated; `minutes` bounds what is added. Writes a
table and a picture per study, benchmarks/results/mixture_<study>.md and .png, from the runs that
are there.

All runs are measured alike, with noise in every step of Flow-SDE. The directions of the reward are
ones that no run trains on. The noise is the same for the base and for every run. `share` is the
gain in reward over the best gain at the run's KL. `score` is gain - beta KL over its best value,
for the beta whose optimum has a KL of 0.4. 0 is the base, 1 the optimum, and an over-optimised run
falls again. `to optimum` is the KL to the optimum of equal KL to the base, in nats.
"""

from __future__ import annotations

import functools
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from benchmarks import mixture_tables
from benchmarks._shared import RESULTS, options
from benchmarks.mixture import BASE_SAMPLES, base_rewards, rolled, weighted
from digenrl import config as configuration
from digenrl import keys
from digenrl.algorithms.advantages import Advantages
from digenrl.algorithms.base import PolicyModule
from digenrl.algorithms.objectives import mean_dims
from digenrl.config.settings import Settings
from digenrl.diffusion.sde import FlowSDE, ode_step
from digenrl.diffusion.sigmas import step_sigmas
from digenrl.diffusion.steps import StepPlan
from digenrl.extensions.methods.dgpo import DGPO
from digenrl.extensions.methods.dpo import DPO
from digenrl.extensions.methods.noised import noise_cells
from digenrl.extensions.tasks.mixture import MixturePolicy
from digenrl.types import CellBlock, TrainBatch

RUNS = RESULTS / "mixture_runs.jsonl"
MEASURED = FlowSDE(0.9)
STEPS, GROUP = 10, 16
"""Denoising steps; samples of a group."""
PARTS, OF_PART = 4, 64
"""An evaluation is so many of so many samples of each direction; their spread is its noise."""
REFERENCE_KL = 0.4

MIXTURE = (
    "model=mixture",
    "sampling=mixture",
    "reward=mixture",
    "data=mixture",
    "callbacks=default",
    "logger=none",
)
NOISY_END = "algorithm.train_steps.last=sde"


def drawn_means(components: int, dimensions: int, spread: float) -> list[list[float]]:
    """[components][dimensions], centred."""
    found = keys.generator(0, "means", components, dimensions).standard_normal(
        (components, dimensions)
    )
    return [[float(value) for value in row] for row in spread * (found - found.mean(axis=0))]


BASES: Mapping[str, Mapping[str, Any]] = {
    "overlapping": {},
    "apart": {"means": drawn_means(4, 8, 1.6), "deviation": 0.5},
    "16 dimensions": {"means": drawn_means(8, 16, 0.6), "weights": [0.125] * 8},
}
"""Name -> what differs from configs/model/mixture.yaml."""


@dataclass(frozen=True)
class Setting:
    """A run but for its seed."""

    study: str
    name: str
    words: tuple[str, ...]
    knob: str
    value: float
    base: str = "overlapping"
    stale: bool = False
    """Whether every sample is one version old, except in the first step."""
    reward: str = "coordinate"
    """What is rewarded: coordinate or random."""


def algorithm(name: str, *words: str) -> tuple[str, ...]:
    """The digits recipe on the mixture."""
    return (f"experiment=digits_{name}", *MIXTURE, *words)


WIDE = "algorithm.clip_range=2e-2"
"""A ratio's clip, of the mean over 8 dimensions."""
LEVELS = "algorithm.train_steps.size=4"
"""Noise levels of an RL step, for methods on the forward process."""
ALGORITHMS: Mapping[str, tuple[tuple[str, ...], str, tuple[float, ...]]] = {
    "flowgrpo": (
        algorithm("flowgrpo", WIDE, NOISY_END),
        "algorithm.kl_weight",
        (0.5, 0.7, 1.0, 1.5),
    ),
    "dancegrpo": (
        algorithm("dancegrpo", WIDE, NOISY_END),
        "algorithm.kl_weight",
        (0.15, 0.2, 0.3, 0.5),
    ),
    "cps": (
        algorithm("cps", "algorithm.clip_range=1e-2"),
        "algorithm.kl_weight",
        (0.25, 0.35, 0.5, 0.9),
    ),
    "mixgrpo": (algorithm("mixgrpo", WIDE), "algorithm.kl_weight", (0.7, 1.0, 1.5, 2.0)),
    "guard": (
        algorithm("guard", "algorithm.clip_range=8e-3", NOISY_END),
        "algorithm.kl_weight",
        (2.5, 3.5, 5.0, 7.0),
    ),
    "dppo": (
        algorithm("dppo", "algorithm.surrogate.threshold=8e-3", NOISY_END),
        "algorithm.kl_weight",
        (0.5, 0.7, 1.0, 1.5),
    ),
    "flashgrpo": (algorithm("flashgrpo", WIDE), "algorithm.kl_weight", (2.5, 3.5, 5.0, 7.0)),
    "nft": (algorithm("nft", LEVELS), "algorithm.kl_weight", (0.2, 0.3, 0.5, 1.0)),
    "dpo": (algorithm("dpo", LEVELS), "algorithm.beta", (100.0, 200.0, 500.0, 1000.0)),
    "awm": (algorithm("awm", LEVELS), "algorithm.kl_weight", (0.03, 0.05, 0.08, 0.15)),
    "dgpo": (algorithm("dgpo", LEVELS), "algorithm.beta", (5.0, 10.0, 15.0, 40.0)),
    "rvm": (algorithm("rvm", LEVELS), "algorithm.kl_weight", (0.035, 0.05, 0.07, 0.12)),
    "solrl": (algorithm("solrl", LEVELS), "algorithm.kl_weight", (0.2, 0.3, 0.5, 1.0)),
}
"""Name -> (words, its knob, the four values tried)."""
SURROGATES: Mapping[str, tuple[float, tuple[str, ...]]] = {
    **dict.fromkeys(
        ("uncorrected", "clipped", "decoupled", "truncated_is", "cispo", "topr"), (1.0, ())
    ),
    "dppo": (1.0, ("algorithm.surrogate.threshold=8e-3",)),
    "guard": (6.0, ("algorithm.clip_range=8e-3",)),
}
"""Name -> (KL weight that gives about the reference KL on-policy, further words)."""


FAST = "algorithm.optimizer.lr=1e-2"
"""Five times the others' rate, so that a version is further from the one before."""
STUDIES = ("stale", "frontier", "controls", "stale_fast", "bases")


def settings(study: str) -> list[Setting]:
    """Return the settings of a study, in the order of their runs. Raises ValueError for an unknown
    study."""
    frontier = [
        Setting("frontier", name, words, knob, value)
        for name, (words, knob, values) in ALGORITHMS.items()
        for value in values
    ]
    if study == "frontier":
        return frontier
    if study == "controls":
        words, knob, values = ALGORITHMS["flowgrpo"]
        best = [Setting(study, "best of group", words, "kept", kept) for kept in (1, 2, 4, 8)]
        return best + [
            Setting(study, "random reward", words, knob, value, reward="random") for value in values
        ]
    if study in ("stale", "stale_fast"):
        rate = (FAST,) if study == "stale_fast" else ()
        return [
            Setting(
                study,
                name,
                algorithm(
                    "flowgrpo", WIDE, NOISY_END, f"algorithm/surrogate={name}", *words, *rate
                ),
                "algorithm.kl_weight",
                weight,
                stale=stale,
            )
            for name, (weight, words) in SURROGATES.items()
            for stale in (False, True)
        ]
    if study == "bases":
        return [
            replace(setting, study=study, base=base)
            for base in list(BASES)[1:]
            for setting in frontier
            if setting.name in ("flowgrpo", "cps", "nft")
        ]
    raise ValueError(f"study={study}: use {', '.join(STUDIES)}")


# ---- one run


class BestOfGroup(PolicyModule):
    """Rejection-sampling fine-tuning: flow matching on the best samples of each group that the base
    has drawn."""

    needs_final = True
    stream: ClassVar[str] = "best of group"

    def cell_losses(
        self, block: CellBlock, advantages: Tensor, batch: TrainBatch, live: bool
    ) -> Tensor:
        """[b, K], 0 for the others."""
        cells = noise_cells(block, range(block.samples), block.numbers, 0, self.stream)
        return advantages[:, None] * mean_dims(
            (cells.predict_velocity(self.policy) - cells.target) ** 2
        )


@dataclass(frozen=True)
class Kept:
    """Weights [P, G] in place of advantages: G / kept for the best of a group."""

    kept: int

    def __call__(self, rewards: Mapping[str, Tensor], weights: Mapping[str, float]) -> Advantages:
        """Return advantages with the interface of `Advantage`."""
        (total,) = rewards.values()
        values = torch.zeros_like(total)
        values.scatter_(1, total.topk(self.kept, dim=1).indices, total.shape[1] / self.kept)
        nothing = torch.zeros_like(values, dtype=torch.bool)
        return Advantages(values, total.double(), nothing[:, 0], nothing)


@dataclass(frozen=True)
class Together:
    """The advantages of all groups in one row, so that one block may hold samples of many
    prompts."""

    own: Callable[[Mapping[str, Tensor], Mapping[str, float]], Advantages]

    def __call__(self, rewards: Mapping[str, Tensor], weights: Mapping[str, float]) -> Advantages:
        """values [1, P*G]."""
        found = self.own(rewards, weights)
        return replace(found, values=found.values.reshape(1, -1))


@functools.cache
def composed(words: tuple[str, ...]) -> Settings:
    """The configuration, as `make train` would have it."""
    return configuration.load(list(words)).settings


@dataclass(frozen=True)
class Batch:
    """What an RL step trains on."""

    updates: tuple[tuple[CellBlock, ...], ...]
    rewards: Tensor
    """[P, G]."""


class Loop:
    """RL steps of one run."""

    def __init__(self, setting: Setting, seed: int) -> None:
        of_group = setting.knob == "kept"
        config = composed(
            setting.words if of_group else (*setting.words, f"{setting.knob}={setting.value}")
        )
        config = config.with_values({"seed": seed})
        self.setting, self.seed = setting, seed
        self.policy: MixturePolicy = config.build("model", seed=seed, **BASES[setting.base])
        self.module: PolicyModule = config.build("algorithm", policy=self.policy)
        if of_group:
            own = self.module
            self.module = BestOfGroup(
                self.policy,
                own.sde,
                composed(ALGORITHMS["nft"][0]).build("algorithm.train_steps"),
                own._optimizer,
                Kept(int(setting.value)),  # type: ignore[arg-type]
                own.updates_per_batch,
                own.max_grad_norm,
                None,
            )
        self.sampler = self.policy.adapter.reference if of_group else self.module.rollout_weights
        """Context in which the policy has the weights that generate."""
        self.pairs = isinstance(self.module, (DPO, DGPO))
        """Whether the loss compares the samples of a block. A block then holds a single prompt."""
        self.module.advantage = Together(self.module.advantage)
        self.module.first_ratio_max_dev = 0.0  # a run's own check, which asks all ranks
        self.grid, self.scouts = self.policy.sigma_grid(STEPS), config.sampling.scouts
        self.directions = signed_axes(self.policy.latent_shape[0])
        self.optimizer = self.module.configure_optimizers()
        self.module.on_train_start()
        self.module.train()

    def run(self, steps: int) -> None:
        """All RL steps."""
        batch = self.generated(0, 0)
        for step in range(steps):
            following = self.generated(step + 1, step) if self.setting.stale else None
            self.learn(batch, step)
            batch = following or self.generated(step + 1, step + 1)

    @torch.no_grad()
    def generated(self, step: int, version: int) -> Batch:
        """The samples of RL step `step`, by the present weights."""
        rewards = torch.zeros(len(self.directions), GROUP)
        updates = []
        for members in torch.arange(len(self.directions)).chunk(self.module.updates_per_batch):
            alike: dict[StepPlan, list[int]] = {}
            for group in members.tolist():
                plan = self.module.train_steps.plan_steps(self.seed, step, STEPS, group)
                alike.setdefault(plan, []).append(group)
            made = [self.block(step, version, plan, groups) for plan, groups in alike.items()]
            for block, groups in zip(made, alike.values(), strict=True):
                assert block.final is not None
                aim = self.directions[groups].repeat_interleave(GROUP, 0)
                rewards[groups] = (block.final * aim).sum(1).unflatten(0, (-1, GROUP))
            updates.append(
                tuple(part for block in made for part in (single(block) if self.pairs else [block]))
            )
        if self.setting.reward == "random":
            rewards = keys.noise(self.seed, step, 0, [0], 0, rewards.shape, "reward")[0]
        return Batch(tuple(updates), rewards)

    def block(self, step: int, version: int, plan: StepPlan, groups: list[int]) -> CellBlock:
        """All samples of `groups`, whose steps are alike."""
        aim = self.directions[groups].repeat_interleave(GROUP, 0)

        def noise(denoise_step: int) -> Tensor:
            return keys.noise(self.seed, step, groups[0], [0], denoise_step, aim.shape)[0]

        x, kept = noise(keys.INITIAL), list[tuple[Tensor, ...]]()
        with self.sampler():
            if self.scouts.candidates > 1:
                x = self.scouted(
                    x, [noise(keys.INITIAL - 1 - k) for k in range(1, self.scouts.candidates)], aim
                )
            for k in range(STEPS):
                sigmas = step_sigmas(self.grid, torch.full((len(x),), k))
                velocity = self.policy.velocity(x, sigmas[0], {"direction": aim})
                if k not in plan.sde:
                    x = ode_step(x, velocity, *sigmas[:2])
                    continue
                made = self.module.sde.transition(x, velocity, *sigmas, noise=noise(k))
                if k in plan.trained:
                    assert made.log_prob is not None
                    kept.append((x, made.next_latents, made.log_prob, made.mean))
                x = made.next_latents
        count = len(plan.trained)
        nothing = (
            x.new_empty(len(x), count, 0),
            x.new_empty(len(x), count, 0),
            x.new_zeros(len(x), count),
            None,
        )
        latents, following, log_probs, means = (
            nothing
            if plan.forward_process
            else [torch.stack(parts, 1) for parts in zip(*kept, strict=True)]
        )
        return CellBlock(
            step=step,
            group=0,
            uid=groups[0],
            first_sample=0,
            version=version,
            steps=torch.tensor(plan.trained),
            sigmas=self.grid,
            latents=latents,
            next_latents=following,
            log_probs=log_probs,
            condition={"direction": aim.repeat_interleave(count, 0)},
            final=x,
            means=means,
            rows=tuple(group * GROUP + sample for group in groups for sample in range(GROUP)),
        )

    def scouted(self, first: Tensor, others: list[Tensor], aim: Tensor) -> Tensor:
        """Return the initial noises of each group whose few-step samples score best and worst, half
        each."""
        tries = torch.stack([first, *others], 1)
        drawn = ode_points(
            self.policy,
            tries.flatten(0, 1),
            aim.repeat_interleave(tries.shape[1], 0),
            self.scouts.steps,
        )
        rewards = (drawn.unflatten(0, tries.shape[:2]) * aim[:, None]).sum(2)
        order = rewards.reshape(len(first) // GROUP, -1).argsort(1)
        chosen = torch.cat([order[:, : GROUP // 2], order[:, -(GROUP - GROUP // 2) :]], 1)
        found = tries.reshape(*order.shape, -1).gather(
            1, chosen[..., None].expand(-1, -1, first.shape[1])
        )
        return found.flatten(0, 1)

    def learn(self, batch: Batch, step: int) -> None:
        """The updates of one RL step."""
        for update, blocks in enumerate(batch.updates):
            self.optimizer.zero_grad()
            cells = sum(block.samples * len(block.steps) for block in blocks)
            given = TrainBatch(blocks, {"r": batch.rewards}, {"r": 1.0}, float(cells), update, step)
            self.module.training_step(given, 0).backward()
            self.module.configure_gradient_clipping(self.optimizer)
            self.optimizer.step()


def single(block: CellBlock) -> Iterator[CellBlock]:
    """A block of clean latents, prompt by prompt."""
    assert block.final is not None
    for first in range(0, block.samples, GROUP):
        part = slice(first, first + GROUP)
        condition = {
            name: value[first * len(block.steps)][None] for name, value in block.condition.items()
        }
        yield replace(
            block,
            uid=block.numbers[first] // GROUP,
            latents=block.latents[part],
            next_latents=block.next_latents[part],
            log_probs=block.log_probs[part],
            condition=condition,
            final=block.final[part],
            rows=block.numbers[part],
        )


def signed_axes(dimensions: int) -> Tensor:
    """[2 D, D]: the directions of the prompts."""
    return torch.cat([torch.eye(dimensions), -torch.eye(dimensions)])


def heldout_directions(dimensions: int) -> Tensor:
    """[2 D, D] unit vectors that no prompt names."""
    found = keys.noise(0, 0, 0, [0], 0, (2 * dimensions, dimensions), "held out")[0]
    return found / found.norm(dim=1, keepdim=True)


# ---- what a run has reached


@dataclass(frozen=True)
class Optimum:
    """The optimum of the base sampler towards some directions, over beta."""

    betas: np.ndarray
    """[B], falling."""
    kls: np.ndarray
    """[B], rising."""
    gains: np.ndarray

    def at(self, kl: float) -> tuple[float, float]:
        """(beta, gain) at this KL."""
        beta = float(np.exp(np.interp(kl, self.kls, np.log(self.betas))))
        return beta, float(np.interp(kl, self.kls, self.gains))


def optimum(rewards: Tensor) -> Optimum:
    """rewards [directions, samples] of the base."""
    betas = np.geomspace(100.0, 0.05, 200)
    kls, gains = zip(*(weighted(rewards, float(beta)) for beta in betas), strict=True)
    return Optimum(betas, np.array(kls), np.array(gains))


@dataclass(frozen=True)
class Measured:
    """Means over directions; the fields of a line of the record."""

    kl: float
    """KL of trajectories with noise. The next four fields are of the same trajectories."""
    gain: float
    best: float
    to_optimum: float
    score: float
    evaluation_sd: float
    """Standard error of `score` by the evaluation's own noise."""
    diversity: float
    """Variance around each direction's mean, over the base's."""
    trained_kl: float
    """KL on the prompts that were trained, as in the next two fields."""
    trained_gain: float
    trained_best: float
    points_kl: float
    """KL of the points that the ODE draws, as in the next two fields."""
    points_gain: float
    points_best: float


class Judge:
    """Judge of the runs on one base model."""

    def __init__(self, policy: MixturePolicy) -> None:
        (axes,) = policy.latent_shape
        self.aims = heldout_directions(axes), signed_axes(axes)
        self.rewards = [
            base_rewards(policy, MEASURED, aim, STEPS, torch.Generator().manual_seed(1))
            for aim in self.aims
        ]
        """[directions, samples] of the base."""
        self.optima = [optimum(rewards) for rewards in self.rewards]
        self.beta, best = self.optima[0].at(REFERENCE_KL)
        self.best = best - self.beta * REFERENCE_KL
        self.base = [self.trajectories(policy, aim, trained=False)[0] for aim in self.aims]
        aim = self.aims[0].repeat_interleave(BASE_SAMPLES, 0)
        with policy.adapter.reference():
            drawn = ode_points(
                policy, torch.randn(aim.shape, generator=torch.Generator().manual_seed(2)), aim
            )
            self.of_points = optimum((drawn * aim).sum(1).unflatten(0, (-1, BASE_SAMPLES)).double())
            self.noise, self.rows = self._noise(self.aims[0])
            self.ode_base = ode_points(policy, self.noise, self.rows)

    @staticmethod
    def _noise(aim: Tensor) -> tuple[Tensor, Tensor]:
        """The same for every policy: initial noise, and what its rows are asked for."""
        rows = aim.repeat_interleave(2 * OF_PART, 0)
        return torch.randn(rows.shape, generator=torch.Generator().manual_seed(3)), rows

    @staticmethod
    def trajectories(
        policy: MixturePolicy, aim: Tensor, trained: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Points [directions, samples, D] and KL [directions, samples], from the same noise
        whatever the policy."""
        generator = torch.Generator().manual_seed(0)
        rows = aim.repeat_interleave(PARTS * OF_PART, 0)
        points, kl = rolled(policy, MEASURED, rows, STEPS, generator, trained)
        return points.unflatten(0, (len(aim), -1)), kl.unflatten(0, (len(aim), -1))

    def score(self, kl: float, gain: float) -> float:
        """0 for the base, 1 for the optimum."""
        return (gain - self.beta * kl) / self.best

    @torch.no_grad()
    def measured(self, policy: MixturePolicy) -> Measured:
        """Measure the present weights of `policy`."""
        (points, kls), (others, other_kls) = (self.trajectories(policy, aim) for aim in self.aims)
        gains = ((points - self.base[0]) * self.aims[0][:, None]).sum(2)
        parts = [
            self.score(float(kl.mean()), float(gain.mean()))
            for kl, gain in zip(kls.split(OF_PART, 1), gains.split(OF_PART, 1), strict=True)
        ]
        kl, gain, trained_kl = float(kls.mean()), float(gains.mean()), float(other_kls.mean())
        beta, best = self.optima[0].at(kl)
        trained_gain = ((others - self.base[1]) * self.aims[1][:, None]).sum(2)
        drawn, points_kl = divergence_of_points(policy, self.noise, self.rows)
        return Measured(
            kl,
            gain,
            best,
            (best - gain) / beta,
            self.score(kl, gain),
            float(np.std(parts, ddof=1) / math.sqrt(PARTS)),
            float(points.var(dim=1).sum() / self.base[0].var(dim=1).sum()),
            trained_kl,
            float(trained_gain.mean()),
            self.optima[1].at(trained_kl)[1],
            points_kl,
            float(((drawn - self.ode_base) * self.rows).sum(1).mean()),
            self.of_points.at(points_kl)[1],
        )


@torch.no_grad()
def ode_points(policy: MixturePolicy, x: Tensor, aim: Tensor, steps: int = STEPS) -> Tensor:
    """The points [B, D] that the ODE draws from noise `x`."""
    for sigma, following in policy.sigma_grid(steps).unfold(0, 2, 1):
        x = x + (following - sigma) * policy.velocity(x, sigma.expand(len(x)), {"direction": aim})
    return x


def divergence_of_points(policy: MixturePolicy, noise: Tensor, aim: Tensor) -> tuple[Tensor, float]:
    """Return (points, KL of their distribution to the base's). Both densities follow from the
    change of variables of each Euler step. The base's density is taken at the noise from which the
    base would have drawn the point. All is exact except the mean over points. It uses log r + 1/r -
    1 for log r, which has the same mean and less spread (Schulman, "Approximating KL
    divergence")."""
    x, log_det = noise, torch.zeros(len(noise))
    grid = policy.sigma_grid(STEPS).unfold(0, 2, 1)
    for pair in grid:
        x, growth = grown(policy, x, aim, pair)
        log_det += growth
    points, log_q = x, -noise.square().sum(1) / 2 - log_det
    log_det.zero_()
    with policy.adapter.reference():
        for sigma, following in grid.flip(0):
            before = x
            for _ in range(12):  # a contraction by about a tenth
                velocity = policy.velocity(before, sigma.expand(len(x)), {"direction": aim})
                before = x - (following - sigma) * velocity
            x = before
            log_det += grown(policy, x, aim, (sigma, following))[1]
    log_ratio = log_q + x.square().sum(1) / 2 + log_det
    return points, float((log_ratio + torch.exp(-log_ratio) - 1).mean())


@torch.enable_grad()
def grown(
    policy: MixturePolicy, x: Tensor, aim: Tensor, sigmas: tuple[Tensor, Tensor] | Tensor
) -> tuple[Tensor, Tensor]:
    """One Euler step: (points [B, D], log of its Jacobian's determinant [B])."""
    sigma, following = sigmas
    x = x.detach().requires_grad_()
    after = x + (following - sigma) * policy.velocity(x, sigma.expand(len(x)), {"direction": aim})
    rows = [
        torch.autograd.grad(column.sum(), x, retain_graph=True)[0] for column in after.unbind(1)
    ]
    return after.detach(), torch.linalg.slogdet(torch.stack(rows, 1)).logabsdet


@functools.cache
def judge(base: str) -> Judge:
    """One for all runs on a base model."""
    return Judge(composed(ALGORITHMS["flowgrpo"][0]).build("model", **BASES[base]))


# ---- the record


def identity(setting: Setting, seed: int, steps: int) -> dict[str, Any]:
    """What tells a run from others."""
    facts = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(setting).items()
    }
    return facts | {"seed": seed, "steps": steps}


def recorded() -> list[dict[str, Any]]:
    """The lines of the record."""
    return [json.loads(line) for line in RUNS.read_text().splitlines()] if RUNS.exists() else []


def add_to_record(row: dict[str, Any]) -> None:
    """Write a run's line."""
    RUNS.parent.mkdir(parents=True, exist_ok=True)
    with RUNS.open("a") as file:
        file.write(json.dumps(row) + "\n")


def made(
    wanted: Iterable[tuple[Setting, int]], steps: int, minutes: float, keep: bool = True
) -> list[dict[str, Any]]:
    """The lines of the wanted runs: those of the record, and those that fit into `minutes`, which
    `keep` adds to it."""
    known, rows, ends = recorded(), [], time.monotonic() + 60 * minutes
    for setting, seed in wanted:
        own = identity(setting, seed, steps)
        row = next((old for old in known if own.items() <= old.items()), None)
        if row is None and time.monotonic() < ends:
            judging, began = judge(setting.base), time.process_time()
            loop = Loop(setting, seed)
            loop.run(steps)
            clipped = loop.module.collect_metrics().get("clip_fraction", torch.tensor(math.nan))
            row = own | asdict(judging.measured(loop.policy))
            row |= {"clip_fraction": float(clipped), "cpu_s": round(time.process_time() - began, 3)}
            if keep:
                add_to_record(row)
            print(
                f"{setting.study:<9} {setting.name:<14} {setting.value:<6g} {setting.base:<12} "
                f"{'stale' if setting.stale else '':<6} seed {seed}  KL {row['kl']:.3f}  "
                f"share {row['gain'] / row['best']:.3f}  score {row['score']:.3f}  of points "
                f"{row['points_kl']:.3f} "
                f"{row['points_gain'] / row['points_best']:.3f}  {row['cpu_s']:.1f} s",
                flush=True,
            )
        if row is not None:
            rows.append(row)
    return rows


def best_of(judging: Judge) -> Iterator[tuple[int, float, float, float]]:
    """(N, KL, gain, best gain at that KL) of taking the best of N samples of the base. Their KL is
    at most log N - (N-1)/N (Beirami et al. 2024, arXiv 2401.01879), and equals it for rewards
    without ties."""
    rewards = judging.rewards[0]
    for count in (2, 4, 8, 16):
        kl = math.log(count) - (count - 1) / count
        tops = rewards[:, : rewards.shape[1] // count * count].unflatten(1, (-1, count)).amax(2)
        yield count, kl, float(tops.mean() - rewards.mean()), judging.optima[0].at(kl)[1]


def tables(rows: Sequence[dict[str, Any]], wanted: Mapping[str, int]) -> None:
    """Write the tables of the studies that have runs."""
    by_study = {study: [row for row in rows if row["study"] == study] for study in wanted}
    if by_study.get("frontier"):
        both = by_study["frontier"] + by_study.get("controls", [])
        expected = wanted["frontier"] + wanted.get("controls", 0)
        mixture_tables.frontier(both, expected, list(best_of(judge("overlapping"))))
    if by_study.get("stale"):
        both = by_study["stale"] + by_study.get("stale_fast", [])
        mixture_tables.staleness(both, wanted["stale"] + wanted.get("stale_fast", 0))
    if by_study.get("bases"):
        mixture_tables.bases(by_study["bases"], wanted["bases"])


def main(words: Sequence[str]) -> int:
    """Run what is missing; the exit code."""
    given = options(
        words,
        {"study": ",".join(STUDIES), "seeds": "5", "steps": "100", "minutes": "60"},
        {"seeds": "1", "steps": "2"},
    )
    torch.set_num_threads(1)
    pairs = [
        (setting, seed)
        for study in given["study"].split(",")
        for seed in range(1, int(given["seeds"]) + 1)
        for setting in settings(study)
    ]
    keep = given["quick"] != "true"
    rows = made(pairs, int(given["steps"]), float(given["minutes"]), keep)
    if keep:
        tables(rows, Counter(setting.study for setting, _ in pairs))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
