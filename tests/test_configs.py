"""The configuration zoo: everything in configs/ composes and passes every check, on a laptop and as
published."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import zip_longest
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from digenrl import config
from digenrl.config.settings import Settings
from digenrl.config.validation import ANY_NAME, keys_of

pytestmark = pytest.mark.heavy

OPTIONS = config.group_options(config.config_directory())
EXPERIMENTS = OPTIONS["experiment"]
WHOLE = [group for group in OPTIONS if "/" not in group and group not in ("experiment", "hardware")]
PARTS = [
    group for group in OPTIONS if "/" in group and not group.startswith(("experiment", "hardware"))
]

MAY_SHRINK = (
    "hardware.",
    "allocation.",
    "data.prompts_per_batch",
    "data.group_size",
    "sampling.height",
    "sampling.width",
    "sampling.frames",
    "sampling.steps",
    "sampling.eval.steps",
    "callbacks.evaluation.",
    "sampling.task_size",
    "sampling.eval.steps",
    "callbacks.evaluation.steps",
    "model.height",
    "model.width",
    "model.frames",
)
"""What hardware=cpu_tiny may change, besides every `build`. Algorithm, SDE, window, guidance, LoRA
targets and loss are the experiment's own."""


@cache
def published(experiment: str) -> DictConfig:
    return config.load([f"experiment={experiment}"]).settings.tree


@cache
def largest_on(hardware: str) -> config.Composed:
    """The largest experiment with a hardware profile."""
    return config.load(["experiment=wan21_flowgrpo", f"hardware={hardware}"])


def flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping) and tree:
        for key, item in tree.items():
            yield from flat(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, tree


def _names_a_model_of_its_own(experiment: str) -> bool:
    """Whether it is its model's first: hardware=cpu_tiny asks the model how to shrink."""
    folder = config.config_directory() / "experiment"
    models = {
        name: re.findall(r"override /model: (\w+)", (folder / f"{name}.yaml").read_text())
        for name in EXPERIMENTS
    }
    return models[experiment] not in ([], *(models[name] for name in models if name < experiment))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiment_composes(experiment: str) -> None:
    assert published(experiment).experiment_name == experiment


@pytest.mark.parametrize(
    "experiment",
    [
        pytest.param(name, marks=() if _names_a_model_of_its_own(name) else pytest.mark.slow)
        for name in EXPERIMENTS
    ],
)
def test_experiment_on_a_laptop_and_as_published(experiment: str) -> None:
    full = published(experiment)
    tiny = config.load([f"experiment={experiment}", "hardware=cpu_tiny"]).settings.tree
    assert full.experiment_name == tiny.experiment_name == experiment
    assert tiny.hardware.build == "tiny"
    assert tiny.data.group_size >= 4
    assert tiny.sampling.steps >= 6
    before, after = (
        dict(flat(OmegaConf.to_container(full))),
        dict(flat(OmegaConf.to_container(tiny))),
    )
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    foreign = sorted(
        key
        for key in changed
        if not key.removeprefix("copies.").startswith(MAY_SHRINK) and not key.endswith(".build")
    )
    assert not foreign, f"hardware=cpu_tiny changes {foreign} of {experiment}"


@pytest.mark.parametrize("hardware", OPTIONS["hardware"])
def test_hardware_composes_with_the_largest_experiment(hardware: str) -> None:
    composed = largest_on(hardware)
    assert composed.choices["hardware"] == hardware
    assert composed.settings.hardware.pools


@pytest.mark.parametrize("hardware", ["cpu", "cpu_tiny", "a100x32"])
def test_a_hardware_profile_leaves_a_colocated_schedule_colocated(hardware: str) -> None:
    """Profiles describe devices; who generates is the schedule's (allocation.rollouts=auto asks the
    pools)."""
    composed = config.load(
        ["experiment=wan21_flowgrpo", f"hardware={hardware}", "schedule=colocated"]
    )
    assert composed.settings.allocation.rollouts == 0


@pytest.mark.parametrize(
    ("groups", "options"),
    [
        (groups, options)
        for groups in (WHOLE, PARTS)
        for options in zip_longest(*(OPTIONS[group] for group in groups))
    ],
)
def test_every_option_composes(groups: list[str], options: tuple[str | None, ...]) -> None:
    """The n-th option of every group together, without an experiment's diffs: types, targets,
    constructor arguments and prompt files; how groups fit together is the experiments' part."""
    pairs = {group: name for group, name in zip(groups, options, strict=True) if name is not None}
    default = config.load([]).choices
    words = [f"{'' if group in default else '+'}{group}={name}" for group, name in pairs.items()]
    try:
        choices = config.load(["~experiment", "experiment_name=zoo", *words]).choices
    except config.ConfigError as error:
        related = (
            "sampling.task_size",
            "sampling.same_noise",
            "data.prompts_per_batch",
            "algorithm.",
        )
        unrelated = [problem for problem in error.problems if not problem.startswith(related)]
    else:
        unrelated = [group for group, name in pairs.items() if choices[group] != name]
    assert not unrelated


def test_the_schema_names_keys_that_exist() -> None:
    """A key that no configuration has would be a stale field. (Pools are named by their users.)"""
    stale = {
        key  # of GPUs' kinds, too
        for key in keys_of(Settings)
        if ANY_NAME not in key and not key.startswith("hardware.efficiency")
    }
    # The first has nearly all, and each composition takes half a second.
    for tree in itertools.chain(
        [largest_on("cpu_tiny").settings.tree],
        map(published, EXPERIMENTS),
        (largest_on(name).settings.tree for name in OPTIONS["hardware"]),
    ):
        present = {key for key, _ in flat(OmegaConf.to_container(tree))}
        stale = {
            key for key in stale if not any(p == key or p.startswith(f"{key}.") for p in present)
        }
        if not stale:
            break
    assert not stale, f"fields for keys that no experiment has: {stale}"
