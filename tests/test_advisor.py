"""I18 for the planner: without its folder a run is settled with plain values, and what needs costs
is refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from digenrl import config as configuration
from digenrl.advisor import Advice, ModelPlacement, PlainAdvisor

ROOT = Path(__file__).resolve().parents[1]
WORDS = ("experiment=wan21_flowgrpo", "hardware=l40x32_h20x16", "sampling.task_size=auto")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process whose digenrl lacks the planner."""
    source = tmp_path_factory.mktemp("bare")
    package, left_out = ROOT / "src" / "digenrl", shutil.ignore_patterns("planner", "__pycache__")
    shutil.copytree(package, source / "digenrl", ignore=left_out)
    shutil.copytree(ROOT / "configs", source.parent / "configs", dirs_exist_ok=True)
    return {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{ROOT}"}


CODE = f"""
from digenrl import config as configuration
from digenrl.cli.extensions import ExtensionMissing, choose_advisor
from digenrl.settle import settle_run
composed = configuration.load({list(WORDS)})
advisor = choose_advisor()
settled = settle_run(composed, advisor)
config = settled.settings
print(config.parallel.sharding, config.schedule.auto, config.schedule.gap, config.sampling.task_size)
print(config.model.gradient_checkpointing, settled.planned, type(advisor).__name__)
print(advisor.advise_ranks(settled, 1, 1), advisor.memory_lines(settled, 1, 1))
def emulates():
    advisor.advise_ranks(configuration.load(["hardware.emulate=true"]), 1, 1)
def plans():
    import digenrl
    digenrl.plan()
for asked in emulates, plans:
    try:
        asked()
    except ValueError as error:
        print(error)
"""


@pytest.mark.heavy
def test_auto_has_plain_values_and_nothing_is_predicted(bare: dict[str, str]) -> None:
    """Requests that need costs are refused."""
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, env=bare
    )
    assert done.returncode == 0, done.stderr
    schedule, rest, told, emulation, plans = done.stdout.splitlines()
    assert schedule.split() == ["ddp", "False", "1", "2"]
    assert rest.split() == ["True", "None", "PlainAdvisor"]
    assert told == f"{Advice()} []"
    assert emulation.startswith("hardware.emulate = true: needs")
    assert plans.startswith("digenrl.plan: needs digenrl.extensions.planner")


def test_the_largest_small_task_is_taken() -> None:
    composed = configuration.load(["experiment=digits_flowgrpo"])
    assert PlainAdvisor().task_size(composed, [1, 2, 4, 8, 16]) == 8
    assert PlainAdvisor().task_size(composed, [1, 3]) == 3
    usual = ModelPlacement("ddp", 2, False)
    assert PlainAdvisor().place_model(composed, 1, 1, usual) == usual


def test_a_rank_that_joined_stands_in_as_the_last_one() -> None:
    ranks: tuple[Any, ...] = ("trainer", "rollout", "last rollout")
    assert [Advice(stand_ins=ranks).stand_in(rank) for rank in (0, 2, 5)] == [
        ranks[0],
        ranks[2],
        ranks[2],
    ]
    assert Advice().stand_in(0) is None
