"""The display: what it reads, how often it draws, and that it needs no terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import yaml

from digenrl.cli.terminal import Display
from digenrl.record.run_dir import EVALUATED, append_event, append_jsonl
from digenrl.report.tables import format_duration


class Clock:
    """Seconds that pass when the test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def step(path: Path, rl_step: int, reward: float) -> None:
    facts = {"step_s": 2.0, "samples_per_s": 34.5, "reward": reward}
    append_jsonl(path / "metrics.jsonl", {"kind": "step", "rl_step": rl_step, **facts})


def evaluated(path: Path, rl_step: int, seconds: float) -> None:
    append_jsonl(path / "metrics.jsonl", {"kind": "eval", "rl_step": rl_step})
    append_event(path, EVALUATED, {"rl_step": rl_step, "seconds": seconds})


def test_without_a_terminal_one_line_every_ten_seconds(tmp_path: Path) -> None:
    stream, clock = io.StringIO(), Clock()
    display = Display(
        tmp_path, 40, lambda: {0: "train g3", 1: "train g4", 2: "wait weights"}, stream, clock
    )
    for _ in range(49):
        clock.now += 0.5
        display.poll()
        if clock.now == 105.0:
            step(tmp_path, 1, 0.55)
            step(tmp_path, 2, 0.61)
            append_jsonl(
                tmp_path / "metrics.jsonl", {"kind": "eval", "rl_step": 2, "heldout": 0.575}
            )
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    for expected in ("10.0 s", "step 2/40", "reward 0.610", "held-out 0.575", "34.5 samples/s", "ETA 1 min 16 s",
                     "2 train, 1 wait weights"):  # fmt: skip
        assert expected in lines[0]
    assert "\x1b" not in stream.getvalue()
    step(tmp_path, 3, 0.7)
    display.close()
    assert "step 3/40" in stream.getvalue().splitlines()[-1]


def test_a_resumed_run_counts_from_its_checkpoint(tmp_path: Path) -> None:
    display = Display(tmp_path, 40, dict, io.StringIO())
    for rl_step in (1, 2, 3, 4, 5, 4):
        step(tmp_path, rl_step, 0.5)
    display.poll()
    assert "step 4/40" in display.status_line()


@pytest.mark.parametrize(
    ("evaluation", "rollouts", "seconds"),
    [
        ("trainers", 1, 10 * 10 + 2 * 140),
        ("auto", 0, 10 * 10 + 2 * 140),
        ("auto", 1, 10 * 10 + 140 + 130),  # of the one at step 30, a step hides ten seconds
    ],
)
def test_the_time_that_is_left_knows_the_evaluations(
    tmp_path: Path, evaluation: str, rollouts: int, seconds: float
) -> None:
    config = {
        "allocation": {"evaluation": evaluation, "rollouts": rollouts},
        "callbacks": {"evaluation": {"every": 10}},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    display = Display(tmp_path, 32, dict, io.StringIO())
    for rl_step in (0, 10, 20):
        evaluated(tmp_path, rl_step, 140.0)
    append_jsonl(tmp_path / "metrics.jsonl", {"kind": "step", "rl_step": 22, "step_s": 10.0})
    display.poll()
    assert f"ETA {format_duration(seconds)}" in display.status_line()


def test_after_the_last_step_its_evaluation_is_left(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "allocation: {evaluation: trainers, rollouts: 1}\ncallbacks: {evaluation: {every: 10}}\n"
    )
    display = Display(tmp_path, 2, dict, io.StringIO())
    evaluated(tmp_path, 0, 60.0)
    append_jsonl(tmp_path / "metrics.jsonl", {"kind": "step", "rl_step": 2, "step_s": 1.0})
    display.poll()
    assert f"ETA {format_duration(60.0)}" in display.status_line()
    evaluated(tmp_path, 2, 60.0)
    display.poll()
    assert f"ETA {format_duration(0.0)}" in display.status_line()
