"""`make sweep`: the two sweeps expand to what they promise, and real jobs end in one table."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from digenrl import config as configuration
from digenrl.cli import sweep_table as table
from digenrl.cli.sweeps import expand_sweep
from tests.conftest import ROOT

pytestmark = pytest.mark.processes

TINY = (
    "~callbacks.evaluation",
    "logger=none",
    "data.prompts_per_batch=2",
    "data.group_size=4",
    "sampling.task_size=2",
    "sampling.steps=3",
)
SCHEDULES = ["colocated_naive", "colocated", "sync", "gap", "gap_tsp", "gap_tsp_tag", "full"]


def sweep(tmp_path: Path, *words: str, timeout: float = 200.0) -> tuple[int, Path, str]:
    """(exit code, sweep directory, standard output) of `python -m digenrl.cli.train -m ...`."""
    command = [
        sys.executable,
        "-m",
        "digenrl.cli.train",
        "-m",
        *words,
        *TINY,
        f"output_root={tmp_path}",
    ]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    assert done.stdout, done.stderr
    return done.returncode, Path(done.stdout.splitlines()[-1]), done.stdout


def rows(directory: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((directory / "sweep.csv").open()))


def test_the_ablation_varies_the_schedule_alone() -> None:
    _, jobs = expand_sweep(["-m", "experiment=ablation_schedule"])
    assert [job.varied["schedule"] for job in jobs] == SCHEDULES
    configs = [configuration.load(job.words).settings for job in jobs]
    for config in configs:
        assert config.data == configs[0].data
        assert config.algorithm == configs[0].algorithm
        assert config.sampling == configs[0].sampling
        assert (config.seed, config.max_rl_steps) == (configs[0].seed, configs[0].max_rl_steps)
    assert [config.schedule.async_steps for config in configs] == [0, 0, 0, 0, 0, 0, 1]
    assert [config.schedule.tag for config in configs] == [False] * 5 + [True] * 2


def test_the_allocation_sweep_varies_both_roles_and_words_replace_its_values() -> None:
    _, jobs = expand_sweep(["-m", "experiment=sweep_allocation"])
    ranks = [(job.varied["allocation.trainers"], job.varied["allocation.rollouts"]) for job in jobs]
    assert len(set(ranks)) == len(ranks) == 6
    assert {trainers for trainers, _ in ranks} == {"1", "2"}
    _, jobs = expand_sweep(
        ["-m", "experiment=sweep_allocation", "allocation.trainers=1", "allocation.rollouts=1,2"]
    )
    assert [job.varied for job in jobs] == [
        {"allocation.rollouts": "1"},
        {"allocation.rollouts": "2"},
    ]
    _, jobs = expand_sweep(["-m", "experiment=digits_flowgrpo", "schedule.tag=true,false"])
    assert [job.varied["schedule.tag"] for job in jobs] == ["true", "false"]


@pytest.mark.slow
def test_a_plain_multirun_goes_on_after_a_failed_job(tmp_path: Path) -> None:
    """The second job's scorer raises; plain values are swept afterwards."""
    words = (
        "experiment=digits_flowgrpo",
        "schedule=gap_tsp",
        "max_rl_steps=1",
        "schedule.tag=true,false",
    )
    target = "reward.rewards.judge_a.scorer._target_=reward_models.digit_judge.DigitJudge,tests.strategy.faults.Broken"
    code, directory, out = sweep(tmp_path, *words[:3], "allow_targets=[tests]", target)
    table = rows(directory)
    assert code == 1
    assert [row["status"] for row in table] == ["completed", "failed"]
    assert "the scorer has a bug" in table[1]["cause"]
    assert "the scorer has a bug" in out
    code, directory, _ = sweep(tmp_path, *words)
    table = rows(directory)
    assert code == 0
    assert [(row["schedule.tag"], row["status"]) for row in table] == [
        ("true", "completed"),
        ("false", "completed"),
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_ablation_ends_in_one_table_and_a_plot(tmp_path: Path) -> None:
    code, directory, out = sweep(
        tmp_path, "experiment=ablation_schedule", "max_rl_steps=2", timeout=500
    )
    table = rows(directory)
    assert code == 0, out
    assert [row["schedule"] for row in table] == SCHEDULES
    assert all(row["status"] == "completed" and float(row["step_s"]) > 0 for row in table)
    assert all(float(row["samples_per_s"]) > 0 for row in table)
    assert [int(row["staleness_max"]) for row in table] == [0, 0, 0, 0, 0, 0, 1]
    on_policy = {
        row["reward_first"] for row in table if row["schedule"] in ("sync", "gap", "colocated")
    }
    assert len({round(float(value), 4) for value in on_policy}) == 1, (
        "the same seeds give the same first batch"
    )
    assert all(name in out for name in ("step_s", "samples_per_s", "staleness_max"))


@pytest.mark.parametrize(
    ("steps", "load", "noisy"), [(2, 0.0, True), (20, 99.0, True), (20, 0.0, False)]
)
def test_a_table_explains_its_columns_and_says_when_times_are_noise(
    steps: int, load: float, noisy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(table, "BUSY", 3.0)
    told = {"rl_steps": steps, "samples_per_s": 4.0, "bubble": {"tail": 0.1}}
    jobs = [
        table.SweepJob(n, (), {"seed": str(n)}, tmp_path / str(n), "completed", summary=told)
        for n in range(2)
    ]
    text = table.write_tables(tmp_path, jobs)
    assert "ratio: samples_per_s over the first job's" in text
    assert ("may be noise" in text) == noisy
    header = (tmp_path / "sweep.csv").read_text().splitlines()[0].split(",")
    assert header[:2] == ["job", "seed"]
    assert header[-3:] == ["lost:tail", "cause", "run"]
