"""Distillation on the student's own trajectories: the formula, the teachers, and a real run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from digenrl import config as configuration
from digenrl.algorithms.advantages import Advantage
from digenrl.config import ConfigError
from digenrl.config.relations import methods as rules
from digenrl.config.relations.view import View
from digenrl.config.settings import Settings
from digenrl.diffusion.sde import FlowSDE
from digenrl.diffusion.steps import AllButLast
from digenrl.extensions.methods.distillation import Distillation, transition_distance
from digenrl.extensions.tasks.digits import DigitsPolicy
from tests.algorithms.fit import ADAMW
from tests.algorithms.test_objectives import SHAPE, normal, uniform
from tests.algorithms.toy_policy import ToyPolicy, batch, roll
from tests.sampling import sample
from tests.strategy.processes import completed, run_cluster

PLAIN = (
    "~callbacks.evaluation",
    "logger=none",
    "schedule=sync",
    "sampling.task_size=4",
    "sampling.steps=4",
    "data.group_size=4",
    "allocation.max_restarts=0",
)


def made(policy: Any, teachers: dict[str, dict[str, Any]], **changes: Any) -> Distillation:
    arguments: dict[str, Any] = {
        "sde": FlowSDE(0.7),
        "train_steps": AllButLast(),
        "optimizer": ADAMW,
        "advantage": Advantage(),
        "updates_per_batch": 1,
        "max_grad_norm": 1.0,
        "ema": None,
        "teachers": teachers,
    }
    return Distillation(policy, **(arguments | changes))


def teacher_file(folder: Path, policy: Any, seed: int) -> Path:
    """Weights that differ from the policy's own."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: value.detach() + 0.2 * torch.randn(value.shape, generator=generator).to(value)
        for name, value in policy.adapter.trained_parameters().items()
    }
    save_file(tensors, folder / f"{seed}.safetensors")
    return folder / f"{seed}.safetensors"


# ---- the formula


@pytest.mark.parametrize("divergence", ["gaussian", "means"])
def test_distance_equals_a_loop_over_numbers(divergence: Any) -> None:
    mean, target, scale = normal(3, 2, *SHAPE), normal(3, 2, *SHAPE, seed=1), uniform(3, 2, seed=2)

    def by_hand() -> Tensor:
        found = torch.zeros(3, 2, dtype=torch.float64)
        for b, k in np.ndindex(3, 2):
            pairs = zip(mean[b, k].flatten(), target[b, k].flatten(), strict=True)
            squares = [(float(m) - float(t)) ** 2 for m, t in pairs]
            variance = float(scale[b, k]) ** 2 if divergence == "gaussian" else 1.0
            found[b, k] = sum(squares) / len(squares) / (2 * variance)
        return found

    found = transition_distance(mean, target, scale, divergence)
    torch.testing.assert_close(found, by_hand(), atol=1e-12, rtol=1e-12)
    assert float(transition_distance(mean, mean, scale, divergence).abs().max()) == 0.0


def test_the_gaussian_distance_is_the_kl_of_two_normals() -> None:
    mean, target, scale = normal(3, 2, *SHAPE), normal(3, 2, *SHAPE, seed=1), uniform(3, 2, seed=2)
    deviation = scale.view(3, 2, *[1] * len(SHAPE)).expand_as(mean)
    ours, theirs = (torch.distributions.Normal(each, deviation) for each in (mean, target))
    expected = torch.distributions.kl_divergence(ours, theirs).flatten(2).mean(2)
    torch.testing.assert_close(transition_distance(mean, target, scale, "gaussian"), expected)


def test_a_prompt_gets_the_weighted_sum_over_its_own_teachers(tmp_path: Path) -> None:
    policy = ToyPolicy(torch.float64)
    files = [teacher_file(tmp_path, policy, seed) for seed in (1, 2)]
    blocks = roll(policy, storage=torch.float64)
    module = made(
        policy,
        {
            "one": {"run": str(files[0]), "weight": 2.0},
            "two": {"run": str(files[1]), "weight": 0.5},
        },
    )
    module.teachers["two"].uids = frozenset({101})  # the second group alone
    assert module.teaching_groups({"r": torch.zeros(2, 4)}, {"r": 1.0}).all()  # equal rewards, too
    module.on_train_start()
    before = {name: value.clone() for name, value in policy.adapter.trained_parameters().items()}
    found = float(module.training_step(batch(blocks), 0).detach())
    assert all(
        torch.equal(value, before[name])
        for name, value in policy.adapter.trained_parameters().items()
    )

    def means(block: Any, file: Path | None) -> tuple[Tensor, Tensor]:
        """Means and deviations of Flow-SDE's transitions (docs/algorithms.md 1.2), step by step."""
        other = ToyPolicy(torch.float64)
        if file is not None:
            other.transformer.load_state_dict(load_file(file))
        at, deviations = [], []
        for k, step in enumerate(block.steps.tolist()):
            s, after = block.sigmas[step].double(), block.sigmas[step + 1].double()
            d = block.sigmas[1].double() if step == 0 else s
            std, h, x = 0.7 * (s / (1 - d)).sqrt(), s - after, block.latents[:, k]
            with torch.no_grad():
                rows = {"c": block.condition["c"].expand(len(x))}
                v = other.velocity(x, s.expand(len(x)), rows)
            at.append(x - v * h - std**2 / (2 * s) * (x + (1 - s) * v) * h)
            deviations.append(std * h.sqrt())
        return torch.stack(at, 1), torch.stack(deviations)

    total, cells = 0.0, 0
    for block in blocks:
        mine, deviation = means(block, None)
        for file, weight in ((files[0], 2.0), (files[1], 0.5 * (block.group == 1))):
            apart = (mine - means(block, file)[0]).square().flatten(2).mean(2) / (2 * deviation**2)
            total += weight * float(apart.sum())
        cells += mine.shape[0] * mine.shape[1]
    assert found == pytest.approx(total / cells, rel=1e-5)
    metrics = module.collect_metrics()
    assert metrics["distance/one"] > 0
    assert metrics["distance/two"] > 0


def test_the_student_becomes_its_teacher() -> None:
    """The student trains on samples of its newest weights. The distance falls to a fraction."""
    policy = ToyPolicy()
    module = made(policy, {"one": {"run": "unused"}})
    generator = torch.Generator().manual_seed(3)
    module.teachers["one"].copy.tensors = {
        name: value.detach() + 0.3 * torch.randn(value.shape, generator=generator)
        for name, value in policy.adapter.trained_parameters().items()
    }
    optimizer, found = module.configure_optimizers(), []
    for step in range(60):
        optimizer.zero_grad()
        loss = module.training_step(batch(roll(policy, step=step, version=step)), 0)
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    assert found[-1] < 0.1 * found[0]


def test_gradients_reach_every_weight_of_the_real_network(tmp_path: Path) -> None:
    lora = {"rank": 4, "alpha": 8, "targets": [r"attn\.to_q", r"ff\.net\.2"]}
    policy = DigitsPolicy(lora=lora)
    module = made(policy, {"one": {"run": str(teacher_file(tmp_path, policy, 1))}})
    module.on_train_start()
    (block,) = roll_digits(policy)
    module.training_step(batch([block]), 0).backward()
    gradients = {name: value.grad for name, value in policy.adapter.trained_parameters().items()}
    assert policy.adapter.parameters_without_gradient() == []
    assert all(
        float(g.abs().max()) > 0 for n, g in gradients.items() if g is not None and "_B" in n
    )


def roll_digits(policy: DigitsPolicy) -> list[Any]:
    from digenrl.data import load_prompts
    from digenrl.diffusion import denoise
    from digenrl.types import CellBlock

    prompt, grid = load_prompts("digits.jsonl")[4], policy.sigma_grid(4)
    condition = policy.codec.encode([prompt])
    key = denoise.SampleKey(0, 0, prompt.uid, (0, 1, 2))
    plan = AllButLast().plan_steps(0, 0, 4)
    samples = sample(policy, condition, key, grid, FlowSDE(0.7), plan)
    own = {name: value for name, value in vars(samples).items() if name != "final"}
    facts = {"step": 0, "group": 0, "uid": prompt.uid, "first_sample": 0, "version": 0}
    return [CellBlock(**facts, **own, sigmas=grid, condition=condition)]


# ---- what is refused


def test_a_teacher_of_another_model_or_without_training_is_refused(tmp_path: Path) -> None:
    policy = ToyPolicy()
    same = {
        name: value.detach().clone() for name, value in policy.adapter.trained_parameters().items()
    }
    cases: list[tuple[dict[str, Tensor], str]] = [
        (same, r"one: .*\.safetensors equals the student: it would teach nothing"),
        (
            same | {"more": torch.zeros(2)},
            r"1 trained tensors differ \(first: more\); train teacher",
        ),
        ({**same, "0.bias": torch.zeros(3)}, r"1 trained tensors differ \(first: 0.bias\)"),
    ]
    for number, (tensors, message) in enumerate(cases):
        file = tmp_path / f"{number}.safetensors"
        save_file(tensors, file)
        with pytest.raises(ValueError, match=message):
            made(policy, {"one": {"run": str(file)}}).on_train_start()


def test_arguments_that_cannot_teach_are_refused() -> None:
    policy, one = ToyPolicy(), {"one": {"run": "unused"}}
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: made(policy, one, divergence="kl"), "divergence = kl: use gaussian or means"),
        (lambda: made(policy, one, sde=FlowSDE(0.0)), "an ODE keeps none: use algorithm/sde=flow"),
    ]
    for make, message in cases:
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.heavy
def test_rules_name_the_teacher_and_the_prompt(tmp_path: Path) -> None:
    words = ["experiment=mixture_distill"]
    configuration.load(words)
    given = ["algorithm.teachers.low.run=null", "algorithm.teachers.high.run=/no/such"]
    with pytest.raises(ConfigError) as refused:
        configuration.load([*words, *given, "algorithm.teachers.high.weight=0"])
    said = str(refused.value)
    assert "algorithm.teachers.low.run = None: no such weights; name a finished run" in said
    assert "algorithm.teachers.high.run = /no/such: no such weights (looked for /no/such)" in said
    assert "algorithm.teachers.high.weight = 0: must be above 0" in said
    with pytest.raises(ConfigError, match=r"NoiseLevels with .*: it compares transitions"):
        configuration.load([*words, "algorithm/train_steps=noise_levels"])
    file = teacher_file(tmp_path, ToyPolicy(), 1)
    configuration.load([*words, f"algorithm.teachers.low.run={file}"])
    with pytest.raises(ConfigError, match=r"none has the prompt of .*mixture.jsonl:9; add it"):
        configuration.load([*words, "algorithm.teachers.high.prompts=mixture_low.jsonl"])
    nobody = View({"algorithm": {"_target_": "some.Distillation", "teachers": {}}}, ())
    assert "nobody teaches; name one" in next(rules._teacher_runs(nobody))


# ---- a whole run


def mixture(experiment: str, *words: str) -> Settings:
    return configuration.load(
        [f"experiment={experiment}", *PLAIN, "max_rl_steps=3", *words]
    ).settings


@pytest.mark.slow
@pytest.mark.processes
def test_two_specialists_become_one_student(tmp_path: Path) -> None:
    """Two runs of three RL steps, then three of distillation from their checkpoints; colocated and
    with a rollout of its own the gradients are equal."""
    teachers = []
    for half in ("low", "high"):
        asked = (f"data.prompts=mixture_{half}.jsonl", "data.prompts_per_batch=8")
        config = mixture("mixture_flowgrpo", *asked, "algorithm.optimizer.lr=0.05")
        run = run_cluster(tmp_path / half, 1, 0, config)
        completed(run)
        teachers.append(f"algorithm.teachers.{half}.run={run.run_dir}")
    config = mixture("mixture_distill", *teachers)
    run = run_cluster(tmp_path / "together", 1, 0, config)
    together = completed(run)
    apart = completed(run_cluster(tmp_path / "apart", 1, 1, config))
    assert len(together.gradients) == 3
    for ours, theirs in zip(together.gradients, apart.gradients, strict=True):
        assert max(float(value.abs().max()) for value in ours.values()) > 0
        for name, value in ours.items():
            torch.testing.assert_close(theirs[name], value, atol=1e-4, rtol=1e-3)
    steps = [row for row in run.metrics() if row["kind"] == "step"]
    assert steps[-1]["distance/low"] < steps[0]["distance/low"]
    assert steps[-1]["distance/high"] < steps[0]["distance/high"]
