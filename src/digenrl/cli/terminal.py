"""A line every ten seconds about a run.

A display runs in the launcher, which does no work of the run. It reads what the ranks append to the
run directory, and calls a function that tells each rank's present activity. It imports no torch.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TextIO

import yaml
from rich.console import Console
from rich.text import Text

from digenrl.record.run_dir import (
    CHECKPOINT_FAILED,
    CONFIG,
    EVALUATED,
    LOGGER,
    METRICS,
    UNWRITTEN,
    Row,
    event_files,
    printable_text,
)
from digenrl.record.stored_yaml import read_plain
from digenrl.report.read_run import JsonlTail, append_step, is_number
from digenrl.report.tables import format_duration, format_number

EVERY_S = 10.0
"""Seconds between two lines."""
_LOUD = (CHECKPOINT_FAILED, UNWRITTEN, LOGGER)
"""Kinds of events that get a line of their own: something is lost while the run goes on."""
_DRAWN = ("rl_step", "reward", "heldout", "samples_per_s", "step_s")
"""Keys of a metric line that the display needs and keeps of every step."""


class Display:
    """The run as seen from its directory and its ranks' states, as lines.

    Args:
        run_dir: the run's directory.
        total_steps: `max_rl_steps`.
        states: returns rank -> its present activity, in a few words.
        stream: where to print; None: standard error.
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
        self._stream = stream if stream is not None else sys.stderr
        self._metrics = JsonlTail(self._path / METRICS)
        self._events: dict[Path, JsonlTail] = {}
        self._steps: list[Row] = []
        self._evals: list[Row] = []
        self._evaluated: list[Row] = []
        self._every, self._hidden = _evaluation_settings(self._path)
        self._began = self._shown = clock()
        self._console = Console(file=self._stream, soft_wrap=True)

    def poll(self) -> None:
        """Read what is new, and print a line if it is time to. Callers may call several times per
        second."""
        self._read_new_rows()
        now = self._clock()
        if now - self._shown >= EVERY_S:
            self._shown = now
            print(self.status_line(), file=self._stream, flush=True)

    def close(self) -> None:
        """Print the run's final state."""
        self._read_new_rows()
        if self._steps:
            print(self.status_line(), file=self._stream, flush=True)

    def status_line(self) -> str:
        """Return the run's state in one line, with the ranks counted by activity."""
        parts = [
            f"{format_duration(self._clock() - self._began):>12}",
            f"step {self._done}/{self._total}",
        ]
        if self._steps:
            parts.append(f"reward {format_number(self._steps[-1].get('reward'))}")
        if self._evals:
            parts.append(f"held-out {format_number(self._evals[-1].get('heldout'))}")
        if self._steps:
            parts += [
                f"{format_number(self._steps[-1].get('samples_per_s'), 1)} samples/s",
                f"ETA {format_duration(self._seconds_left())}",
            ]
        counted = Counter(activity_of(state) for state in self._states().values())
        parts.append(", ".join(f"{count} {activity}" for activity, count in counted.most_common()))
        return "  ".join(part for part in parts if part)

    @property
    def _done(self) -> int:
        return int(self._steps[-1]["rl_step"]) if self._steps else 0

    def _read_new_rows(self) -> None:
        for row in self._metrics.read_new_rows():
            kept = {"step": self._steps, "eval": self._evals}.get(str(row.get("kind")))
            if kept is not None and is_number(row.get("rl_step")):
                append_step(kept, {key: row[key] for key in _DRAWN if key in row})
        for file in event_files(self._path):
            self._events.setdefault(file, JsonlTail(file))
        for event in [row for tail in self._events.values() for row in tail.read_new_rows()]:
            if event.get("kind") == EVALUATED:
                self._evaluated.append(event)
            elif event.get("kind") in _LOUD and event.get("cause") is not None:
                self._console.print(Text(format_event(event), style="yellow"))

    def _seconds_left(self) -> float | None:
        """Return the seconds of the steps that are left and of the evaluations between and after
        them. An evaluation by rollouts costs what outlasts a step; the last one costs all."""
        if not (step := _recent_median(self._steps, "step_s")):
            return None
        seconds = step * (self._total - self._done)
        if one := _recent_median(self._evaluated, "seconds"):
            due = self._evaluations_left()
            seconds += one * (due > 0) + max(0.0, one - self._hidden * step) * max(0, due - 1)
        return seconds

    def _evaluations_left(self) -> int:
        """Return the number of evaluations that are not written yet. The last step has one."""
        newest = max((int(row["rl_step"]) for row in self._evals), default=-1)
        if newest >= self._total:
            return 0
        between = (self._total - 1) // self._every - newest // self._every if self._every else 0
        return 1 + max(0, between)


def _recent_median(rows: Sequence[Row], key: str) -> float | None:
    """Return the median of a number over the last ten rows."""
    recent = [float(row[key]) for row in rows[-10:] if is_number(row.get(key))]
    return median(recent) if recent else None


def _evaluation_settings(run_dir: Path) -> tuple[int, bool]:
    """Return (RL steps between the evaluations of a run, 0 = only before and after; whether
    rollouts make them while trainers go on)."""
    try:
        config: Any = read_plain(run_dir / CONFIG)
        every = config["callbacks"]["evaluation"]["every"]
        alone = (
            config["allocation"]["evaluation"] == "trainers" or not config["allocation"]["rollouts"]
        )
        return int(every), not alone
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return 0, False


def activity_of(state: str) -> str:
    """Return a state without its numbers: "generate g3" and "generate g4" are one activity."""
    return (
        " ".join(
            word for word in state.split() if not any(character.isdigit() for character in word)
        )
        or state
    )


def format_event(event: Row) -> str:
    """Return an event in one line."""
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
    return printable_text(said if cause is None else f"{said}: {cause}")
