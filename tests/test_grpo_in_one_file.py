"""The system equals a page (I19): a run of ranks computes what examples/grpo_in_one_file.py
computes.

The run is that of the digits, `experiment=digits_flowgrpo`, with another seed and a gradient clip that
binds, for two RL steps of two updates each. The second RL step is drawn by weights that the first
one trained.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import Tensor

from digenrl import config as configuration
from digenrl.config.settings import Settings
from digenrl.data import PromptSampler, load_prompts
from examples import grpo_in_one_file as page
from tests.conftest import ROOT
from tests.strategy.processes import Cell, completed, relative, run_cluster

PAGE = ROOT / "examples" / "grpo_in_one_file.py"
BORROWED = {
    "digenrl.extensions.tasks.digits": {"BASE_FILE", "build_transformer", "text_features"},
    "reward_models.digit_judge": {"JUDGES_FILE", "build_judge"},
}
WORDS = (
    "experiment=digits_flowgrpo",
    "callbacks=default",
    "~callbacks.evaluation",
    "logger=none",
    "allocation.max_restarts=0",
    "max_rl_steps=2",
    "seed=7",
    "data.prompts_per_batch=4",
    "data.group_size=8",
    "sampling.task_size=8",
    "algorithm.max_grad_norm=0.01",
)
ROUNDING = 1e-6
"""Relative error of gradients and weights. I1 promises them to rounding: the system multiplies a
loss by the number of micro-batches and divides by it again, and fp32 rounds at 6e-8. The error
measured is 0, because one trainer sums in the page's order. Otherwise the samples of the second RL
step would differ."""


def test_the_page_is_short_and_borrows_data_alone() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 300
    nodes = list(ast.walk(ast.parse(text)))
    modules = {
        name.name.split(".")[0]
        for node in nodes
        if isinstance(node, ast.Import)
        for name in node.names
    }
    assert not modules & {"digenrl", "reward_models"}
    borrowed = {
        node.module: {name.name for name in node.names}
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        and str(node.module).startswith(("digenrl", "reward_models"))
    }
    assert borrowed == BORROWED


def test_the_page_has_the_values_of_the_first_run() -> None:
    assert (
        settings_of(configuration.load(["experiment=digits_flowgrpo"]).settings) == page.Settings()
    )


@pytest.mark.parametrize("size", [2, 5, 10])
def test_the_prompts_of_every_step_are_those_of_the_system(size: int) -> None:
    sampler = PromptSampler(load_prompts("digits.jsonl"), size, seed=3)
    for step in range(12):
        drawn = page.prompts_of_step(page.Settings(seed=3, prompts_per_batch=size), step)
        assert [prompt.uid for prompt in drawn] == [
            prompt.uid for prompt in sampler.prompts_at(step)
        ]


@pytest.mark.slow
def test_the_page_runs_as_a_command() -> None:
    done = subprocess.run(
        [sys.executable, PAGE, "1"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    before, after = done.stdout.splitlines()
    assert float(before.removeprefix("before: held-out score ")) == pytest.approx(0.54, abs=0.02), (
        "README's figure"
    )
    assert re.fullmatch(r"RL step 0: mean reward 0\.\d{3}, held-out score 0\.\d{3}", after)


@pytest.mark.processes
def test_samples_rewards_and_gradients_of_a_run_are_the_pages(tmp_path: Path) -> None:
    config = configuration.load(WORDS).settings
    settings = settings_of(config)
    assert config.sampling.task_size == config.data.group_size, (
        "the page draws a group in one forward"
    )
    run = completed(run_cluster(tmp_path, 1, 1, config))
    compared, gradients = 0, []
    for rl_step, (policy, groups, found) in enumerate(page.train(settings, config.max_rl_steps)):
        gradients += found
        trained = {
            name: weight.detach()
            for name, weight in policy.named_parameters()
            if weight.requires_grad
        }
        for number, group in enumerate(groups):
            for step in range(settings.steps - 1):
                for sample in range(len(group.rewards)):
                    key = (rl_step, number, sample, step)
                    assert_same(run.cells[key], group, step, sample, str(key))
                    compared += 1
    assert compared == len(run.cells) == 2 * 4 * 8 * 5
    assert len(gradients) == len(run.gradients) == 4
    for update, (theirs, own) in enumerate(zip(run.gradients, gradients, strict=True)):
        assert relative(by_names_of_the_page(theirs), own) <= ROUNDING, (
            f"gradient of update {update}"
        )
        norm = torch.nn.utils.get_total_norm(own.values())
        assert norm > settings.max_grad_norm, f"no clip in update {update}: its norm is {norm}"
    assert relative(by_names_of_the_page(run.weights), trained) <= ROUNDING


def settings_of(config: Settings) -> page.Settings:
    """Return the page's settings with the values of a configuration."""
    algorithm, lora = config.node_at("algorithm"), config.node_at("model.lora")
    optimizer = algorithm.optimizer
    found = {
        "seed": config.seed,
        "prompts_per_batch": config.data.prompts_per_batch,
        "group_size": config.data.group_size,
        "steps": config.sampling.steps,
        "noise_level": algorithm.sde.noise_level,
        "lr": optimizer.lr,
        "betas": tuple(optimizer.betas),
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "lora_rank": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_targets": tuple(lora.targets),
    }
    rest = {
        field.name: algorithm[field.name]
        for field in fields(page.Settings)
        if field.name not in found
    }
    return page.Settings(**found, **rest)


def assert_same(cell: Cell, group: page.Group, step: int, sample: int, key: str) -> None:
    """Assert that a trained cell of the run is, bit by bit, the page's."""
    assert torch.equal(cell.latents, group.latents[step, sample]), f"latents of {key}"
    assert torch.equal(cell.next_latents, group.latents[step + 1, sample]), f"next latents of {key}"
    assert torch.equal(cell.log_prob, group.log_probs[step, sample]), f"log-prob of {key}"
    assert torch.equal(cell.reward, group.rewards[sample]), f"reward of {key}"


def by_names_of_the_page(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of a run by the names of the page, which leave out the adapter's own."""
    return {name.replace(".default.", "."): tensor for name, tensor in tensors.items()}
