"""summary.json: every promised key, and what is inferred when nobody wrote the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from digenrl.record.run_dir import append_event, append_jsonl
from digenrl.report import tables
from digenrl.report.alarms import find_alarms
from digenrl.report.read_run import read_run
from digenrl.report.summary import build_summary
from tests.report.synthetic import EPOCH, GROUPS, write_lines, write_run

PROMISED = {
    "status", "cause", "rl_steps", "wall_s", "step_s", "samples_per_s", "reward_first", "reward_last", "heldout_first",
    "heldout_last", "diversity_ratio", "nn_distance_first", "nn_distance_last", "first_ratio_max_dev", "staleness_max",
    "bubble", "predicted_step_s", "dropped", "restarts", "world",
}  # fmt: skip
"""Design section 5."""


def test_summary_of_a_finished_run(finished: Path) -> None:
    run = read_run(finished)
    summary = build_summary(run)
    assert set(summary) >= PROMISED
    assert (summary["status"], summary["cause"], summary["rl_steps"], summary["restarts"]) == (
        "completed",
        None,
        24,
        0,
    )
    assert summary["experiment"] == "digits_flowgrpo"
    assert summary["first_ratio_max_dev"] == 0.0
    assert summary["world"] == {"trainer": 2, "rollout": 2}
    assert summary["heldout_first"] == 0.56
    assert summary["reward_last"] == run.steps[-1]["reward"]
    assert summary["wall_s"] == pytest.approx(run.events[-1]["time"] - EPOCH)
    seconds = sum(row["step_s"] for row in run.steps)
    assert summary["samples_per_s"] == pytest.approx(24 * GROUPS * 16 / seconds)
    waits = [span for span in run.spans if span.stage == "wait" and span.role == "trainer"]
    assert sum(summary["bubble"]["trainer"].values()) == pytest.approx(
        sum(span.seconds for span in waits)
    )


def test_a_run_that_nobody_ended_is_unfinished(crashed: Path) -> None:
    summary = build_summary(read_run(crashed))
    assert summary["status"] == "unfinished"
    assert "its launcher was killed" in summary["cause"]
    assert summary["rl_steps"] == 9
    assert len(summary["warnings"]) == 3


@pytest.mark.parametrize(
    ("events", "status", "cause"),
    [
        ([("stop", {"rl_step": 24, "cause": None})], "completed", None),
        ([("stop", {"rl_step": 3, "cause": "interrupted"})], "stopped", "interrupted"),
        (
            [("failure", {"cause": "OSError: disk full"}), ("stop", {"cause": "interrupted"})],
            "failed",
            "OSError: disk full",
        ),
        (
            [("failure", {"cause": "x"}), ("end", {"status": "failed", "cause": "rank 1 died"})],
            "failed",
            "rank 1 died",
        ),
        (
            [
                ("end", {"status": "failed", "cause": "x"}),
                ("launch", {}),
                ("stop", {"cause": None}),
            ],
            "completed",
            None,
        ),
    ],
)
def test_outcome_is_that_of_the_last_attempt(
    tmp_path: Path, events: list[tuple[str, dict[str, object]]], status: str, cause: str | None
) -> None:
    append_event(tmp_path, "launch", {})
    for kind, facts in events:
        append_event(tmp_path, kind, facts)
    summary = build_summary(read_run(tmp_path))
    assert (summary["status"], summary["cause"]) == (status, cause)


def test_wall_time_leaves_out_the_pause_before_a_resume(tmp_path: Path) -> None:
    rows = [(0, "launch"), (50, "failure"), (1000, "launch"), (1030, "stop")]
    write_lines(
        tmp_path / "events.jsonl",
        [{"time": EPOCH + seconds, "kind": kind} for seconds, kind in rows],
    )
    summary = build_summary(read_run(tmp_path))
    assert summary["wall_s"] == pytest.approx(80)
    assert (summary["attempts"], summary["restarts"]) == (2, 1)


def test_ranks_that_were_lost_while_the_run_went_on_are_told(tmp_path: Path) -> None:
    for kind, facts in [
        ("launch", {}),
        ("lost", {"rank": 2, "cause": "rank 2 died"}),
        ("end", {"status": "completed"}),
    ]:
        append_event(tmp_path, kind, facts)
    summary = build_summary(read_run(tmp_path))
    assert (summary["attempts"], summary["restarts"], summary["lost"]) == (1, 1, ["rank 2 died"])
    assert "The run went on without a rank: rank 2 died." in find_alarms(summary)


def test_a_run_that_died_at_once_has_a_summary_of_nulls(tmp_path: Path) -> None:
    append_event(tmp_path, "launch", {})
    summary = build_summary(read_run(tmp_path))
    assert set(summary) >= PROMISED
    assert summary["reward_first"] is None
    assert summary["step_s"] is None
    assert summary["rl_steps"] == 0


def test_graphs_that_were_compiled_after_the_first_step_are_told(tmp_path: Path) -> None:
    """A resumed run compiles its own at once."""
    run = write_run(tmp_path / "run", steps=5, samples=False)
    assert build_summary(read_run(run))["recompiled"] is None
    assert "graphs compiled after step 1" not in dict(
        tables.key_figures(build_summary(read_run(run)))
    )
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    for graphs, told in (((4, 4, 4, 4, 4), "0"), ((4, 4, 6, 3, 4), "3")):
        made = zip(steps, graphs, strict=True)
        write_lines(run / "metrics.jsonl", [row | {"graphs": count} for row, count in made])
        assert (
            dict(tables.key_figures(build_summary(read_run(run))))["graphs compiled after step 1"]
            == told
        )


def test_dropped_samples_are_counted_by_reason(tmp_path: Path) -> None:
    for reason, samples in [("missing_reward", 16), ("missing_reward", 16), ("task_lost", 4)]:
        append_event(tmp_path, "dropped", {"reason": reason, "samples": samples})
    assert build_summary(read_run(tmp_path))["dropped"] == {"missing_reward": 32, "task_lost": 4}


def test_alarms_are_silent_for_a_good_run_and_name_reward_hacking(
    tmp_path: Path, finished: Path
) -> None:
    assert find_alarms(build_summary(read_run(finished))) == []
    path = write_run(tmp_path / "run", steps=8)
    append_jsonl(
        path / "metrics.jsonl",
        {"kind": "eval", "rl_step": 8, "heldout": 0.4, "diversity_ratio": 0.5},
    )
    append_jsonl(path / "metrics.jsonl", {"kind": "step", "rl_step": 9, "staleness_max": 1})
    told = " ".join(find_alarms(build_summary(read_run(path))))
    assert "1 versions old were trained on; schedule.async_steps allows 0" in told
    assert "gamed" in told
    assert "mode collapse" in told


def test_clipped_cells_of_a_first_update_are_an_alarm(finished: Path) -> None:
    """The weights were those of the rollout, so that only rounding can have moved a ratio."""
    run = read_run(finished)
    run.steps[3]["clip_fraction/first"] = 0.0
    assert find_alarms(build_summary(run)) == []
    run.steps[5]["clip_fraction/first"] = 0.031
    (told,) = find_alarms(build_summary(run))
    assert told.startswith("Up to 3.1% of a first update's cells were clipped")
    assert "schedule.tsp.batch=1" in told


def test_changes_within_their_noise_are_no_alarm(tmp_path: Path) -> None:
    """A few samples vary by more than two RL steps move them."""
    for error, moved, told in ((0.02, 1.2, ()), (0.001, 1.02, ("gamed",)), (0.02, 1.4, ("moved",))):
        path = write_run(tmp_path / f"{error}-{moved}", steps=8)
        run = read_run(path)
        first, last = run.evals[0], run.evals[-1]
        first.update({"heldout_error": error, "nn_distance": 1.2})
        last.update({"heldout": first["heldout"] - 0.02, "heldout_error": error})
        last["nn_distance"] = moved
        said = " ".join(find_alarms(build_summary(run)))
        assert [word for word in ("gamed", "moved") if word in said] == list(told)
