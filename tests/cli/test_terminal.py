"""The display: what it reads, how often it draws, and that it needs no terminal."""

from __future__ import annotations

import io
from pathlib import Path

from digenrl.cli.terminal import Display
from digenrl.record.run_dir import append_jsonl


class Clock:
    """Seconds that pass when the test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def step(path: Path, rl_step: int, reward: float) -> None:
    facts = {"step_s": 2.0, "samples_per_s": 34.5, "reward": reward}
    append_jsonl(path / "metrics.jsonl", {"kind": "step", "rl_step": rl_step, **facts})


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
    assert "step 4/40" in display.line()
