"""The live display: what it reads, how often it draws, and that it needs no terminal."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from digenrl.display import Display, final_table, sparkline
from digenrl.record.run_dir import append_event, append_jsonl
from digenrl.report.read_run import read_run
from digenrl.report.summary import build_summary
from tests.report.synthetic import write_run


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Clock:
    """Seconds that pass when the test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def step(path: Path, rl_step: int, reward: float) -> None:
    facts = {"step_s": 2.0, "samples_per_s": 34.5, "reward": reward}
    append_jsonl(path / "metrics.jsonl", {"kind": "step", "rl_step": rl_step, **facts})


def shown(renderable: object, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_sparkline_spans_its_range_and_averages_what_does_not_fit() -> None:
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0]) == "▄▄"
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([float(value) for value in range(1000)], width=8) == "▁▂▃▄▅▆▇█"


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


def test_on_a_terminal_the_view_shows_curves_ranks_and_the_last_event(tmp_path: Path) -> None:
    stream, clock = Terminal(), Clock()
    display = Display(tmp_path, 40, lambda: {0: "train g3", 1: "generate g5"}, stream, clock)
    try:
        for rl_step in range(1, 9):
            step(tmp_path, rl_step, rl_step / 10)
        append_event(tmp_path, "checkpoint", {"rl_step": 5})
        append_event(tmp_path, "publish", {"version": 8})
        clock.now += 5
        display.poll()
        text = shown(display.view())
    finally:
        display.close()
    for expected in ("step 8/40", "0.800", "▁▂▃▄▅▆▇█", "from 0.100", "2.0 s per step", "rank 0", "generate g5",
                     "checkpoint rl_step 5"):  # fmt: skip
        assert expected in text
    assert "publish" not in text
    assert "step 8/40" in stream.getvalue()
    assert (
        stream.getvalue().endswith("\x1b[?25h") or "\x1b[?25h" in stream.getvalue()
    )  # the cursor is back


def test_many_ranks_are_counted_by_what_they_do(tmp_path: Path) -> None:
    states = {rank: f"generate g{rank}" if rank < 30 else "wait weights" for rank in range(48)}
    display = Display(tmp_path, 40, lambda: states, io.StringIO())
    text = shown(display.view())
    assert "30 ranks" in text
    assert "18 ranks" in text
    assert len(text.splitlines()) < 10


def test_a_resumed_run_counts_from_its_checkpoint(tmp_path: Path) -> None:
    display = Display(tmp_path, 40, dict, io.StringIO())
    for rl_step in (1, 2, 3, 4, 5, 4):
        step(tmp_path, rl_step, 0.5)
    display.poll()
    assert "step 4/40" in display.line()


@pytest.mark.parametrize("width", [40, 80, 200])
def test_end_table_fits_and_names_status_and_alarms(tmp_path: Path, width: int) -> None:
    summary = build_summary(
        read_run(write_run(tmp_path / "digits_flowgrpo" / "run", steps=8, samples=False))
    )
    text = shown(final_table({**summary, "diversity_ratio": 0.4}), width)
    assert "completed" in text
    assert "mode collapse" in text.replace("\n", " ")
    assert max(len(line) for line in text.splitlines()) <= width


def test_the_launcher_side_imports_no_torch() -> None:
    code = (
        "import sys, digenrl.display, digenrl.report.build; assert not {'torch', 'lightning'} & "
        "set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={"PYTHONPATH": "src", "PATH": "/usr/bin:/bin"}
    )
