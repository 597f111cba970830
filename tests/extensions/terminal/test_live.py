"""The live view of a run: what it shows, and that it gives the terminal back."""

from __future__ import annotations

import io
from pathlib import Path

from digenrl.extensions.terminal.live import LiveDisplay, sparkline
from digenrl.record.run_dir import append_event
from tests.extensions.terminal.test_lines import Clock, shown, step


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_sparkline_spans_its_range_and_averages_what_does_not_fit() -> None:
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0]) == "▄▄"
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([float(value) for value in range(1000)], width=8) == "▁▂▃▄▅▆▇█"


def test_on_a_terminal_the_view_shows_curves_ranks_and_the_last_event(tmp_path: Path) -> None:
    stream, clock = Terminal(), Clock()
    display = LiveDisplay(tmp_path, 40, lambda: {0: "train g3", 1: "generate g5"}, stream, clock)
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
    display = LiveDisplay(tmp_path, 40, lambda: states, io.StringIO())
    text = shown(display.view())
    assert "30 ranks" in text
    assert "18 ranks" in text
    assert len(text.splitlines()) < 10
