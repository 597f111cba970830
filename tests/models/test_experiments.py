"""The experiments: what `hardware=cpu_tiny` may change of them (design, section 6)."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from digenrl import config as configuration
from tests.models.families import experiments

pytestmark = pytest.mark.heavy

EXPERIMENTS = experiments()
TINY_CHANGES = {
    "hardware",
    "allocation.trainers",
    "allocation.rollouts",
    "sampling.height",
    "sampling.width",
    "sampling.frames",
    "sampling.steps",
    "sampling.task_size",
    "sampling.eval.steps",
    "callbacks.evaluation.steps",
    "callbacks.evaluation.max_prompts",
    "callbacks.evaluation.samples_per_prompt",
    "data.prompts_per_batch",
    "data.group_size",
    "model.build",
    "model.height",
    "model.width",
    "model.frames",
}
SCORER_CHANGES = (".scorer.build", ".scorer.path")


@cache
def composed(experiment: str, *words: str) -> dict[str, Any]:
    loaded = configuration.load([f"experiment={experiment}", *words])
    plain: Any = loaded.settings.as_plain()
    return plain


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {path: tree}
    return {
        key: value
        for name, item in tree.items()
        for key, value in flat(item, f"{path}.{name}".strip(".")).items()
    }


@pytest.mark.slow  # by default tests/test_configs.py compares each with its tiny build
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_tiny_hardware_changes_sizes_and_nothing_else(experiment):
    real, small = (
        flat(composed(experiment, "hardware=node_8xh100")),
        flat(composed(experiment, "hardware=cpu_tiny")),
    )
    keys = {key for key in real.keys() | small.keys() if real.get(key) != small.get(key)}
    unexpected = {
        key
        for key in keys
        if not key.startswith("hardware.")
        and key not in TINY_CHANGES
        and not key.endswith(SCORER_CHANGES)
        and not key.startswith(("hydra", "parallel", "copies."))
    }
    assert unexpected == set()
    assert real["model.build"] == "real"
    assert "/" in real["model.path"]
    assert small["model.build"] == "tiny"
    assert small["data.group_size"] >= 4
    assert small["sampling.steps"] >= 6


def test_the_small_wan_runs_the_same_experiment():
    large, small = (
        flat(composed("wan21_flowgrpo", "hardware=node_8xh100")),
        flat(composed("wan21_flowgrpo", "model=wan21_1_3b", "hardware=node_8xh100")),
    )
    assert {key for key in large if large[key] != small.get(key)} == {"model.path"}
