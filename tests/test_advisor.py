"""I18 for the planner: without its folder a run is settled with plain values, and what needs costs
is refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from digenrl import config as configuration
from digenrl.advisor import Advice, Holding, PlainAdvisor, StandIn

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


def answer(bare: dict[str, str], code: str) -> str:
    given = (
        "from digenrl import config as configuration\n"
        "from digenrl.advisor import advisor\n"
        "from digenrl.extension import ExtensionMissing\n"
        "from digenrl.settle import allocated\n"
        f"composed = configuration.load({list(WORDS)})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", given + code], capture_output=True, text=True, timeout=120, env=bare
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_auto_has_plain_values_and_nothing_is_predicted(bare: dict[str, str]) -> None:
    code = (
        "settled = allocated(composed)\n"
        "config = settled.config\n"
        "print(config.parallel.sharding, config.schedule.auto, config.schedule.gap, "
        "config.sampling.task_size,\n"
        "      config.model.gradient_checkpointing, settled.planned, type(advisor()).__name__)\n"
        "print(advisor().advise(settled, 1, 1), advisor().memory_lines(settled, 1, 1))"
    )
    values, told = answer(bare, code).splitlines()
    assert values.split() == ["ddp", "False", "1", "2", "True", "None", "PlainAdvisor"]
    assert told == f"{Advice()} []"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "advisor().advise(configuration.load(['hardware.emulate=true']), 1, 1)",
            "hardware.emulate = true: needs",
        ),
        ("import digenrl; digenrl.plan()", "digenrl.plan: needs digenrl.extensions.planner"),
    ],
    ids=["emulation", "plans"],
)
def test_what_needs_costs_is_refused(bare: dict[str, str], code: str, message: str) -> None:
    tried = f"try:\n    {code}\nexcept ExtensionMissing as error:\n    print(error)"
    assert message in answer(bare, tried)


def test_the_largest_small_task_is_taken() -> None:
    composed = configuration.load(["experiment=digits_flowgrpo"])
    assert PlainAdvisor().task_size(composed, [1, 2, 4, 8, 16]) == 8
    assert PlainAdvisor().task_size(composed, [1, 3]) == 3
    usual = Holding("ddp", 2, False)
    assert PlainAdvisor().hold(composed, 1, 1, usual) == usual


def test_a_rank_that_joined_stands_in_as_the_last_one() -> None:
    ranks = tuple(StandIn({"rank": rank}, {}, {}) for rank in range(3))
    assert [Advice(stand_ins=ranks).stand_in(rank) for rank in (0, 2, 5)] == [
        ranks[0],
        ranks[2],
        ranks[2],
    ]
    assert Advice().stand_in(0) is None
