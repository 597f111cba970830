"""The user's view of a running run: a live view on a terminal, a line every ten seconds anywhere
else.

The display runs in the launcher, which does no work of the run. It reads what the ranks append to
the run directory, and calls a function that tells each rank's present activity. It imports no
torch.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from digenrl.record.run_dir import (
    CHECKPOINT_FAILED,
    EVENTS,
    LOGGER,
    METRICS,
    TRAJECTORIES,
    UNWRITTEN,
    Row,
)
from digenrl.report.learning_alarms import alarms
from digenrl.report.read_run import JsonlTail, append_step, is_number
from digenrl.report.tables import DASH, duration, facts, number

LINE_EVERY_S = 10.0
REFRESH_EVERY_S = 0.2
SHOWN_RANKS = 8
"""Largest number of ranks that are listed separately. More ranks are counted by activity."""
_BARS = "▁▂▃▄▅▆▇█"
_QUIET = ("publish",)
_LOUD = (CHECKPOINT_FAILED, UNWRITTEN, LOGGER, TRAJECTORIES)
"""Kinds of events that get a line of their own: something is lost while the run goes on, or fills
the disk."""
_DRAWN = ("rl_step", "reward", "heldout", "samples_per_s", "step_s")
"""Keys of a metric line that the display needs and keeps of every step."""


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


class Display:
    """The run as seen from its directory and its ranks' states.

    Args:
        run_dir: the run's directory.
        total_steps: `max_rl_steps`.
        states: returns rank -> its present activity, in a few words.
        stream: where to draw; a live view if it is a terminal.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        total_steps: int,
        states: Callable[[], Mapping[int, str]],
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._total, self._states, self._clock = (
            Path(run_dir),
            total_steps,
            states,
            clock,
        )
        self._stream = stream if stream is not None else sys.stdout
        self._metrics = JsonlTail(self._path / METRICS)
        self._events = JsonlTail(self._path / EVENTS)
        self._steps: list[Row] = []
        self._evals: list[Row] = []
        self._last_event: Row | None = None
        self._began = self._shown = clock()
        self._live: Live | None = None
        if self._stream.isatty():
            console = Console(file=self._stream)
            self._live = Live(console=console, auto_refresh=False, transient=True)
            self._live.start()

    def poll(self) -> None:
        """Read what is new, and draw if it is time to. Callers may call several times per
        second."""
        self._read()
        now = self._clock()
        if now - self._shown < (LINE_EVERY_S if self._live is None else REFRESH_EVERY_S):
            return
        self._shown = now
        if self._live is None:
            print(self.line(), file=self._stream, flush=True)
        else:
            self._live.update(self.view(), refresh=True)

    def close(self) -> None:
        """Give the terminal back. Without a terminal, print the run's final state in one line."""
        self._read()
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._steps:
            print(self.line(), file=self._stream, flush=True)

    def line(self) -> str:
        """Return the run's state in one line, with the ranks counted by activity."""
        parts = [f"{duration(self._clock() - self._began):>12}", f"step {self._done}/{self._total}"]
        if self._steps:
            parts.append(f"reward {number(self._steps[-1].get('reward'))}")
        if self._evals:
            parts.append(f"held-out {number(self._evals[-1].get('heldout'))}")
        if self._steps:
            parts += [
                f"{number(self._steps[-1].get('samples_per_s'), 1)} samples/s",
                f"ETA {duration(self._eta())}",
            ]
        counted = Counter(_activity(state) for state in self._states().values())
        parts.append(", ".join(f"{count} {activity}" for activity, count in counted.most_common()))
        return "  ".join(part for part in parts if part)

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
                Text(_told(self._last_event), style="dim", no_wrap=True, overflow="ellipsis")
            )
        return Group(*parts)

    @property
    def _done(self) -> int:
        return int(self._steps[-1]["rl_step"]) if self._steps else 0

    def _read(self) -> None:
        for row in self._metrics.read():
            kept = {"step": self._steps, "eval": self._evals}.get(str(row.get("kind")))
            if kept is not None and is_number(row.get("rl_step")):
                append_step(kept, {key: row[key] for key in _DRAWN if key in row})
        for event in self._events.read():
            if event.get("kind") not in _QUIET:
                self._last_event = event
            if event.get("kind") in _LOUD and event.get("cause") is not None:
                console = (
                    self._live.console
                    if self._live is not None
                    else Console(file=self._stream, soft_wrap=True)
                )
                console.print(Text(_told(event), style="yellow"))

    def _eta(self) -> float | None:
        recent = [float(row["step_s"]) for row in self._steps[-10:] if is_number(row.get("step_s"))]
        return median(recent) * (self._total - self._done) if recent else None

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
            by_activity.setdefault(_activity(state), []).append(rank)
        return [(f"{len(ranks)} ranks", activity) for activity, ranks in by_activity.items()]


def final_table(summary: Mapping[str, Any]) -> RenderableType:
    """Return the end of a run as a table with its alarms below, to print with a rich Console."""
    colour = {"completed": "green", "stopped": "yellow"}.get(str(summary["status"]), "red")
    table = Table(
        title=Text(f"{summary['experiment']}: {summary['status']}", style=f"bold {colour}"),
        show_header=False,
    )
    for name, text in facts(summary):
        table.add_row(Text(name, style="dim"), Text(text))
    told = [*alarms(summary), *summary["warnings"]]
    if summary["status"] == "stopped" and summary["cause"]:
        told.insert(0, f"Stopped: {summary['cause']}.")
    return Group(table, *(Text(f"! {line}", style="yellow") for line in told))


def _activity(state: str) -> str:
    """Return a state without its numbers: "generate g3" and "generate g4" are one activity."""
    return (
        " ".join(
            word for word in state.split() if not any(character.isdigit() for character in word)
        )
        or state
    )


def _told(event: Row) -> str:
    when = (
        f"{time.strftime('%H:%M:%S', time.localtime(event['time']))} "
        if is_number(event.get("time"))
        else ""
    )
    rest = ", ".join(
        f"{key} {value}"
        for key, value in event.items()
        if key not in ("time", "kind", "cause") and value is not None
    )
    cause = event.get("cause")
    said = f"{when}{str(event.get('kind')).replace('_', ' ')} {rest}".rstrip()
    return said if cause is None else f"{said}: {cause}"
