"""Sweeps: Hydra's syntax, a fresh process a job, and a table that also shows what failed."""

from __future__ import annotations

import csv
import json
import signal
import time
from pathlib import Path

import pytest
import yaml

from digenrl.cli.sweep_table import job_rows, result_of
from digenrl.cli.sweeps import SweepJob, expand_sweep, run_sweep
from digenrl.config.loading import is_multirun

pytestmark = pytest.mark.processes

JOB = """
import json, os, pathlib, signal, sys, time
words = dict(word.split("=", 1) for word in sys.argv[2:])
run = pathlib.Path(words["hydra.run.dir"])
run.mkdir()
if words["seed"] == "2":
    sys.exit("lost the device")
if words["seed"] == "4":
    os.kill(os.getppid(), signal.SIGTERM)  # somebody stops the sweep while this job runs
    time.sleep(30)
summary = {"status": "completed", "cause": None, "step_s": 1.5, "pid": os.getpid()}
summary["reward_last"] = int(words["seed"]) / 2
(run / "summary.json").write_text(json.dumps(summary))
print(run)
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A stand-in for the train command: what is under test is the sweep around it."""
    (tmp_path / "sweep_job_h5.py").write_text(JOB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "sweep_job_h5"


def test_expands_choices_ranges_and_globs() -> None:
    directory, jobs = expand_sweep(
        ["-m", "seed=0,1", "schedule=glob(colocated*)", "max_rl_steps=3"]
    )
    assert [job.varied for job in jobs] == [
        {"seed": seed, "schedule": name}
        for seed in "01"
        for name in ("colocated", "colocated_naive")
    ]
    assert all("max_rl_steps=3" in job.words for job in jobs)
    assert directory.name.endswith("-sweep")
    assert len(expand_sweep(["-m", "seed=range(0,5)"])[1]) == 5


def test_flags() -> None:
    assert is_multirun(["seed=1", "--multirun"])
    assert not is_multirun(["seed=1", "-c"])


def test_jobs_run_apart_and_a_failure_leaves_a_row(
    job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run_sweep(["-m", "seed=1,2,3", f"hydra.sweep.dir={tmp_path}/out"], module=job)
    lines = capsys.readouterr().out.splitlines()
    assert code == 1
    assert lines[-1] == f"{tmp_path}/out"
    rows = list(csv.DictReader((tmp_path / "out" / "sweep.csv").open()))
    assert [(row["seed"], row["status"]) for row in rows] == [
        ("1", "completed"),
        ("2", "failed"),
        ("3", "completed"),
    ]
    assert rows[1]["cause"] == "exit code 1: lost the device"
    assert [row["reward_last"] for row in rows] == ["0.5", "", "1.5"]
    summaries = [
        json.loads(file.read_text())
        for file in sorted((tmp_path / "out").glob("job-*/summary.json"))
    ]
    assert len({summary["pid"] for summary in summaries}) == 2
    assert "lost the device" in "\n".join(lines)


def test_a_stopped_sweep_stops_its_job_and_keeps_its_table(
    job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    code = run_sweep(["-m", "seed=1,4,3", f"hydra.sweep.dir={tmp_path}/out"], module=job)
    assert code == 128 + signal.SIGTERM
    assert time.monotonic() - began < 20, "the job was not told to stop"
    rows = list(csv.DictReader((tmp_path / "out" / "sweep.csv").open()))
    assert [row["status"] for row in rows] == ["completed", "failed", "waiting"]
    assert capsys.readouterr().out.splitlines()[-1] == f"{tmp_path}/out"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_sweep_of_plans_starts_real_plans(tmp_path: Path) -> None:
    """Two digits models, which have no counted sizes: each job is `digenrl plan`, and says so."""
    words = ["-m", "experiment=digits_flowgrpo", "seed=1,2", f"hydra.sweep.dir={tmp_path}/out"]
    assert run_sweep(words, "plan") == 1
    causes = [row["cause"] for row in json.loads((tmp_path / "out" / "sweep.json").read_text())]
    assert len(causes) == 2
    assert all("cannot plan: model=digits has no counted sizes" in cause for cause in causes)


@pytest.mark.parametrize("flag", [["--cfg", "job"], ["--cfg"], ["-c", "job"]])
def test_cfg_prints_every_job_and_runs_none(
    flag: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run_sweep(
            ["-m", "seed=1,7", f"hydra.sweep.dir={tmp_path}/out", *flag], module="no_such_module"
        )
        == 0
    )
    parts = capsys.readouterr().out.split("# job ")[1:]
    assert [yaml.safe_load(part.split("\n", 1)[1])["seed"] for part in parts] == [1, 7]
    assert not (tmp_path / "out").exists()


def test_rows_compare_with_the_first_job_and_share_out_the_lost_time(tmp_path: Path) -> None:
    world, bubble = (
        {"trainer": 1, "rollout": 3},
        {"trainer": {"tail": 2.0}, "rollout": {"tail": 2.0, "weights": 8.0}},
    )
    jobs = []
    for number, speed in enumerate((2.0, 5.0)):
        directory = tmp_path / f"job-{number}"
        directory.mkdir()
        found = {
            "status": "completed",
            "world": world,
            "wall_s": 10.0,
            "samples_per_s": speed,
            "bubble": bubble,
        }
        (directory / "summary.json").write_text(json.dumps(found))
        summary = result_of(directory)
        jobs.append(
            SweepJob(number, (), {"seed": str(number)}, directory, "completed", summary=summary)
        )
    table = job_rows(jobs)
    assert [row["ratio"] for row in table] == [1.0, 2.5]
    assert [(row["lost:tail"], row["lost:weights"], row["ranks"]) for row in table] == [
        (0.1, 0.2, "1+3")
    ] * 2


def test_a_refused_job_is_not_started(job: str, tmp_path: Path) -> None:
    code = run_sweep(["-m", "seed=1,-1", f"hydra.sweep.dir={tmp_path}/out"], module=job)
    rows = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert code == 1
    assert [row["status"] for row in rows] == ["completed", "refused"]
    assert "seed = -1: is too small" in rows[1]["cause"]
    assert not (tmp_path / "out" / "job-1").exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["seed=-1,-2"], "seed = -1: is too small"),
        (["seed=1,2", "banana=3"], "banana = 3: no such key"),
        (["seed=1,2", "experiment=zzz"], "no such experiment"),
    ],
)
def test_nothing_is_written_when_no_job_can_run(
    words: list[str], part: str, job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_sweep(["-m", *words, f"hydra.sweep.dir={tmp_path}/out"], module=job) == 2
    assert part in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
