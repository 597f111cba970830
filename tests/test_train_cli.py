"""`python -m digenrl.cli.train` as a user meets it: what a run leaves behind, how it stops, and how
it fails."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import pytest

from digenrl.cluster.launcher import EXIT_STOPPED
from tests.conftest import ROOT
from tests.training import SMALL, assert_failed, fault

pytestmark = pytest.mark.processes


def test_a_run_leaves_its_files_and_ends_with_its_directory(running: Any, tmp_path: Path) -> None:
    # As installed beside a GPU, where importing it initialises the driver, which no fork may do.
    (tmp_path / "site" / "bitsandbytes").mkdir(parents=True)
    (tmp_path / "site/bitsandbytes/__init__.py").write_text("raise SystemExit('imported')")
    beside = ("env", f"PYTHONPATH={tmp_path / 'site'}:{ROOT / 'src'}:{ROOT}")
    train = running(*SMALL, "logger=csv", "schedule=full", "schedule.tsp.batch=1", wrapper=beside)
    assert train.finish() == 0, train.stderr
    assert train.stdout == f"{train.run_dir}\n"
    assert "step 2/2" in train.stderr  # progress is not for a script that reads the directory
    run_dir = train.run_dir
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "events.jsonl",
        "trace.json",
        "report.html",
        "summary.json",
    ):
        assert (run_dir / name).stat().st_size > 0, name
    assert (run_dir / "checkpoints/last/policy.safetensors").is_file()
    summary = train.summary
    assert (summary["status"], summary["cause"], summary["rl_steps"]) == ("completed", None, 2)
    assert summary["first_ratio_max_dev"] == 0.0
    assert summary["world"] == {"trainer": 1, "rollout": 1}
    assert sum(summary["dropped"].values()) == 0
    assert not summary["warnings"]  # a good run is quiet
    published = [row for row in train.rows("events.jsonl") if row["kind"] == "publish"]
    adopted = [row for row in train.rows("spans/rank-001.jsonl") if row["stage"] == "adopt"]
    assert [row["version"] for row in published][:2] == [0, 1]
    digests = {row["version"]: row["digest"] for row in published}
    assert {row["version"]: row["digest"] for row in adopted}.items() <= digests.items()
    assert len(adopted) >= 2


@pytest.mark.slow
def test_what_a_run_noticed_of_itself_stands_in_its_summary_and_report(running: Any) -> None:
    """Adam's eps, and an old policy that is the new one: each once, with its remedy."""
    words = ("algorithm.optimizer.eps=1.0", "algorithm.old_policy.delay=75", "max_rl_steps=4")
    train = running("experiment=digits_nft", *SMALL, *words, "algorithm.updates_per_batch=1")
    assert train.finish() == 0, train.stderr
    told = train.summary["warnings"]
    assert sum("set algorithm.optimizer.eps to" in line for line in told) == 1
    assert sum("equalled its old copy" in line for line in told) == 1
    page = (train.run_dir / "report.html").read_text()
    assert "equalled its old copy" in page


@pytest.mark.slow
def test_a_killed_rollout_is_named_and_the_run_can_be_resumed(running: Any) -> None:
    train = running(*SMALL, "max_rl_steps=3", *fault("denoise", 1, "kill", call=15))
    assert_failed(train, "rank 1 (rollout) was killed by signal 9")
    assert (train.run_dir / "checkpoints/last").exists()
    again = running(f"resume={train.run_dir}", "~callbacks.fault", tiny=())
    assert again.finish() == 0, again.stderr
    assert again.stdout == f"{train.run_dir}\n"
    assert train.summary["status"] == "completed"
    assert train.summary["rl_steps"] == 3
    assert train.summary["restarts"] == 2, "the lost rollout, and the attempt that went on"


@pytest.mark.parametrize(
    ("scorer", "cause"),
    [
        (
            "Broken",
            "rank 1 (rollout) raised RewardError: Reward `judge_a` raised "
            "tests.strategy.faults.InjectedError: the scorer has a bug",
        ),
        pytest.param(
            "Exiting",
            "rank 1 (rollout) raised RewardError: Scorer `judge_a` raised SystemExit: 3",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_scorer_that_raises_fails_the_run_with_its_message(
    running: Any, scorer: str, cause: str
) -> None:
    words = [
        "allow_targets=[tests]",
        f"reward.rewards.judge_a.scorer._target_=tests.strategy.faults.{scorer}",
    ]
    train = running(*SMALL, *words, fork=True)
    assert_failed(train, cause)
    assert train.summary["cause"].endswith("; see logs/rank-001.log")
    assert "the last rollout" not in train.stderr
    made = [row for row in train.rows("spans/rank-001.jsonl") if row["stage"] == "generate"]
    assert len(made) < 4, "raised when all tasks were made, and not before the next one"


def test_a_short_run_without_any_score_has_failed(running: Any) -> None:
    """Too short for `reward.min_missing_samples` to stop it."""
    scorer = "reward.rewards.judge_a.scorer._target_=tests.strategy.faults.Absent"
    train = running(*SMALL, "allow_targets=[tests]", scorer, fork=True)
    assert train.finish() == 1, train.stderr
    assert train.summary["status"] == "failed"
    cause = "no sample of the run has a reward, so nothing was learned; reward `judge_a`: "
    assert train.summary["cause"] == f"{cause}the judge's service is down"
    assert cause in train.stderr


def test_too_many_missing_rewards_stop_the_run_with_a_checkpoint(running: Any) -> None:
    """No sample counts as zero: the groups are dropped, the step is finished and saved, the cause
    is named."""
    scorer = [
        "allow_targets=[tests]",
        "reward.rewards.judge_a.scorer._target_=tests.strategy.faults.Absent",
    ]
    train = running(
        *SMALL, *scorer, "reward.min_missing_samples=8", "max_rl_steps=1000", "callbacks.checkpoint.every=999",
        fork=True,
    )  # fmt: skip
    assert train.finish() == EXIT_STOPPED, train.stderr
    summary = train.summary
    assert (summary["status"], summary["rl_steps"]) == ("stopped", 1)
    for said in (
        "Reward `judge_a` is missing for 8 of 8 samples",
        "allows 25%",
        "the judge's service is down",
    ):
        assert said in summary["cause"]
        assert said in train.stderr
    assert summary["missing"]["judge_a"] >= 8  # the rollout may be in the next step already
    assert summary["dropped"] == {"missing_reward": 8}
    (step,) = [row for row in train.rows("metrics.jsonl") if row["kind"] == "step"]
    assert step["missing/judge_a"] == 8
    assert step.get("reward") is None
    assert (train.run_dir / "checkpoints/last").resolve().name == "step-000001"
    (hint,) = (line for line in train.stderr.splitlines() if line.startswith("to continue: "))
    assert hint == f"to continue: digenrl resume {train.run_dir} 'allow_targets=[tests]'"
    assert "the judge's service is down" in html.unescape(
        (train.run_dir / "report.html").read_text()
    )
