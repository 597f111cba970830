"""A recipe is a contract: docs/recipes.csv says what each experiment sets, what its source set, and
why they differ.

python -m tests.test_recipe_contract     writes docs/recipes.md from it
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from tests.conftest import ROOT
from tests.test_configs import published

pytestmark = pytest.mark.heavy

Cells = tuple[str, ...]
"""Of one row of the page."""

TABLE, PAGE = ROOT / "docs" / "recipes.csv", ROOT / "docs" / "recipes.md"
LEVELS = (
    "formula checked",
    "tiny run",
    "learns on the embedded tasks",
    "real-size random weights on a GPU",
    "real weights",
)
EVIDENCE = "(evidence)"
"""Key of the row with an experiment's evidence: `ours` holds the levels that it has reached,
`reason` the place to look."""
NO_RECIPE = ("ablation_schedule", "sweep_allocation")
"""Experiments that train nothing of their own."""
PUBLISHED = sorted(
    {row["experiment"] for row in csv.DictReader(TABLE.open(encoding="utf-8")) if row["repository"]}
)
DECIDES = (
    "sampling.steps",
    "sampling.guidance_scale",
    "sampling.height",
    "sampling.width",
    "data.prompts",
    "data.prompts_per_batch",
    "data.group_size",
    "algorithm.updates_per_batch",
    "algorithm.kl_weight",
    "algorithm.max_grad_norm",
    "algorithm.optimizer.lr",
    "algorithm.optimizer.weight_decay",
    "algorithm.advantage.std",
    "algorithm.advantage.eps",
    "algorithm.advantage.unbiased",
    "reward.rewards",
)
"""Keys that no published recipe may leave out."""
HEAD = """# Recipes

What each experiment in `configs/experiment/` takes over from its source, where it differs and why, and how far it has
been tried. Written from [recipes.csv](recipes.csv) by `python -m tests.test_recipe_contract`; that test fails where a
YAML, the table and this page disagree. The table names repository, commit, file and line of every value (the function
or key, where the line is not known); a key in parentheses is no key of ours. `python -m scripts.recipe_facts` reads the
literals of these lines from checkouts, and `tests/test_recipe_facts.py` compares recipes with them: values, advantages of
drawn rewards, windows, updates, moving averages, coefficients of the SDE.
"""
CURVES = """
## Published curves

What others measured on real weights (`published` of the experiment). A run's end table says it beside the run's own, and its
report draws it. For the other experiments none is known, which is no judgement of them.
"""
DIFFERENCES = """
## What differs from the source

*Taken* counts the values that are the source's, of those that were compared. A difference that several experiments share has a
number and is told once, below; an experiment's own follow after it. No published set of prompts is shipped: `data.prompts`
differs everywhere.
"""


@cache
def rows() -> list[dict[str, str]]:
    with TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def value(text: str) -> Any:
    """A cell as YAML reads it; what is no YAML value is text."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def same(row: dict[str, str]) -> bool:
    return bool(value(row["ours"]) == value(row["published"]))


def at(experiment: str, key: str) -> Any:
    """The experiment's value; of a mixture of rewards the weights."""
    found = OmegaConf.select(published(experiment), key, throw_on_missing=True)
    plain = OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
    return (
        {name: entry["weight"] for name, entry in plain.items()}
        if key == "reward.rewards"
        else plain
    )


def curve(experiment: str) -> str:
    """The published curves of an experiment, or nothing."""
    told = []
    for entry in OmegaConf.to_container(published(experiment).published) or ():
        after = f" in {entry['steps']} RL steps" if entry["steps"] else ""
        after += f" in {entry['gpu_hours']} GPU-hours" if entry["gpu_hours"] else ""
        told.append(
            f"{entry['reward']} {entry['first']} -> {entry['last']}{after}: {entry['source']} "
            f"({entry['measured']})"
        )
    return "; ".join(told)


def named(experiments: Iterable[str]) -> str:
    """Names of experiments, as code."""
    return ", ".join(f"`{name}`" for name in experiments)


def gathered(pairs: Iterable[tuple[Cells, str]]) -> dict[Cells, list[str]]:
    """What is the same for several experiments -> their names."""
    found: dict[Cells, list[str]] = {}
    for told, name in pairs:
        found.setdefault(told, []).append(name)
    return found


def page() -> str:
    """docs/recipes.md."""
    text = [HEAD, "## How far each has been tried\n", f"Levels: {'; '.join(LEVELS)}.\n"]
    text += ["| experiments | reached | see |", "|---|---|---|"]
    evidence = gathered(
        ((row["ours"], row["reason"]), row["experiment"])
        for row in rows()
        if row["key"] == EVIDENCE
    )
    text += [f"| {named(names)} | {' | '.join(told)} |" for told, names in evidence.items()]
    text.append(CURVES)
    curves = {name: curve(name) for names in evidence.values() for name in names}
    text += [f"- `{name}`: {told}" for name, told in curves.items() if told]
    return "\n".join([*text, DIFFERENCES, *differences()])


def differences() -> Iterator[str]:
    """The lines of three tables: the sources, the differences that experiments share, and those of
    one experiment."""
    sourced = [row for row in rows() if row["repository"]]
    differing = gathered(
        (tuple(row[column] for column in ("key", "ours", "published", "reason")), row["experiment"])
        for row in sourced
        if not same(row)
    )
    shared = [told for told, names in differing.items() if len(names) > 1]
    yield "| experiment | source | taken | shared differences |"
    yield "|---|---|---|---|"
    for experiment, group in groupby(sourced, lambda row: row["experiment"]):
        listed = list(group)
        commits = gathered(
            ((row["repository"],), row["commit"])
            for row in sorted(listed, key=lambda row: (row["repository"], row["commit"]))
        )
        sources = [
            f"{repository} at {', '.join(dict.fromkeys(found))}"
            for (repository,), found in commits.items()
        ]
        taken = f"{sum(map(same, listed))} of {len(listed)}"
        numbers = [str(shared.index(told) + 1) for told in shared if experiment in differing[told]]
        yield f"| `{experiment}` | {', '.join(sources)} | {taken} | {', '.join(numbers)} |"
    yield "\n| number | key | ours | published | why |"
    yield "|---|---|---|---|---|"
    for number, told in enumerate(shared, 1):
        yield f"| {number} | {' | '.join(told)} |"
    for experiment in dict.fromkeys(row["experiment"] for row in sourced):
        own = [told for told, names in differing.items() if names == [experiment]]
        if own:
            yield f"\n`{experiment}`:\n"
        for key, ours, theirs, reason in own:
            name = key if key.startswith("(") else f"`{key}`"
            yield f"- {name}: {ours}, published {theirs}. Why: {reason}"


@pytest.mark.heavy
@pytest.mark.parametrize("experiment", PUBLISHED)
def test_an_experiment_is_what_the_table_says(experiment: str) -> None:
    drifted = [
        f"{row['key']}: {at(experiment, row['key'])!r}, the table says {row['ours']}"
        for row in rows()
        if row["experiment"] == experiment and not row["key"].startswith("(")
        if at(experiment, row["key"]) != value(row["ours"])
    ]
    assert not drifted


def test_every_difference_has_a_reason_and_every_value_a_source() -> None:
    for row in rows():
        if row["key"] == EVIDENCE:
            assert set(row["ours"].split("; ")) <= set(LEVELS), row
            continue
        assert bool(row["reason"]) != same(row), (
            f"a reason where, and only where, the source differs: {row}"
        )
        assert all(
            row[column] for column in ("published", "repository", "commit", "file", "line")
        ), row
    named = [(row["experiment"], row["key"]) for row in rows()]
    assert len(named) == len(set(named))


@pytest.mark.parametrize("experiment", PUBLISHED)
def test_nothing_that_decides_is_left_out(experiment: str) -> None:
    listed = {row["key"] for row in rows() if row["experiment"] == experiment}
    assert not [key for key in DECIDES if key not in listed]


def test_every_experiment_says_how_far_it_has_been_tried() -> None:
    stems = {path.stem for path in (ROOT / "configs" / "experiment").glob("[a-z]*.yaml")}
    evident = {row["experiment"] for row in rows() if row["key"] == EVIDENCE}
    assert stems - evident == set(NO_RECIPE)
    assert not evident - stems


def test_published_curves_belong_to_their_experiment_alone_and_the_page_shows_them() -> None:
    """An experiment that is a change of another does not inherit its curve; a curve is of a reward
    that the experiment has. (One test: each part composes all experiments.)"""
    owners: dict[str, str] = {}
    for experiment in sorted(PUBLISHED):
        for entry in OmegaConf.to_container(published(experiment).published):
            assert entry["reward"] in at(experiment, "reward.rewards"), experiment
            assert entry["first"] != entry["last"]
            key = f"{entry['source']} {entry['reward']} {entry['first']} {entry['last']}"
            assert owners.setdefault(key, experiment) == experiment
    assert len(owners) >= 5
    assert PAGE.read_text(encoding="utf-8") == page() + "\n", (
        "run `python -m tests.test_recipe_contract`"
    )


if __name__ == "__main__":
    Path(PAGE).write_text(page() + "\n", encoding="utf-8")
