"""The live view of a run on a terminal: progress, curves, ranks, last event."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from digenrl.extensions.terminal.lines import Display, activity, told
from digenrl.record.run_dir import Row
from digenrl.report.read_run import is_number
from digenrl.report.tables import DASH, duration, number

SHOWN_RANKS = 8
"""Largest number of ranks that are listed separately. More ranks are counted by activity."""
_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """Return the course of `values` in at most `width` characters, each the mean of an equal share;
    "" for none."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [index * len(values) // width for index in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    if high == low:
        return _BARS[3] * width
    return "".join(_BARS[round((mean - low) / (high - low) * (len(_BARS) - 1))] for mean in means)


class LiveDisplay(Display):
    """The run as a view that is drawn again in place. Arguments as of `Display`."""

    every_s = 0.2

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._console = Console(file=self._stream)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def draw(self) -> None:
        """Draw the view again."""
        self._live.update(self.view(), refresh=True)

    def close(self) -> None:
        """Give the terminal back."""
        self._read()
        self._live.stop()

    def view(self) -> RenderableType:
        """Return the live view: progress, curves, throughput, ranks, last event."""
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(f"step {self._done}/{self._total}", style="bold"),
            ProgressBar(total=max(1, self._total), completed=self._done, width=30),
            Text(f"{duration(self._clock() - self._began)} so far, ETA {duration(self._eta())}"),
        )
        body = Table.grid(padding=(0, 2))
        body.add_row("reward", *self._curve(self._steps, "reward", "blue"))
        body.add_row("held-out", *self._curve(self._evals, "heldout", "dark_orange"))
        last = self._steps[-1] if self._steps else {}
        pace = (
            f"{duration(last['step_s'])} per step" if is_number(last.get("step_s")) else "starting"
        )
        body.add_row("samples/s", number(last.get("samples_per_s"), 1), Text(pace, style="dim"))
        ranks = Table.grid(padding=(0, 2))
        for name, state in self._rank_rows():
            ranks.add_row(
                Text(name, style="dim"),
                Text(state, style="yellow" if state.startswith("wait") else "green"),
            )
        parts: list[RenderableType] = [head, body, ranks]
        if self._last_event is not None:
            parts.append(
                Text(told(self._last_event), style="dim", no_wrap=True, overflow="ellipsis")
            )
        return Group(*parts)

    def _curve(self, rows: Sequence[Row], key: str, colour: str) -> tuple[str, Text]:
        values = [float(row[key]) for row in rows if is_number(row.get(key))]
        if not values:
            return DASH, Text("")
        return number(values[-1]), Text(
            f"{sparkline(values)}  from {number(values[0])}", style=colour
        )

    def _rank_rows(self) -> list[tuple[str, str]]:
        states = self._states()
        if len(states) <= SHOWN_RANKS:
            return [(f"rank {rank}", state) for rank, state in sorted(states.items())]
        by_activity: dict[str, list[int]] = {}
        for rank, state in sorted(states.items()):
            by_activity.setdefault(activity(state), []).append(rank)
        return [(f"{len(ranks)} ranks", activity) for activity, ranks in by_activity.items()]


def display(run_dir: Path, steps: int, states: Callable[[], Mapping[int, str]]) -> Display:
    """Return the display of a run on standard error; arguments as of `Display`."""
    return (LiveDisplay if sys.stderr.isatty() else Display)(run_dir, steps, states)
