"""Build summary.json: one run in a few dozen numbers, all from the run directory's files."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from digenrl.record.run_dir import (
    CHECKPOINT_FAILED,
    END,
    LAUNCH,
    LOGGER,
    LOST,
    METRICS,
    PROMPT_STORE,
    RESTART,
    UNWRITTEN,
)
from digenrl.report.published import published_curves
from digenrl.report.read_run import Run, is_number
from digenrl.report.stages import compare_memory, compare_stages
from digenrl.report.summary_record import Planned, Summary

GROUPS = ("trained", "zero_variance", "surplus", "missing_reward")
"""Outcomes of a group: trained, or the reason why it was not trained."""


def build_summary(run: Run, warnings: Sequence[str] = ()) -> Summary:
    """Return the content of summary.json, with `warnings` after those of the files."""
    status, cause = run_outcome(run)
    samples, seconds, graphs = (run.column(key)[1] for key in ("samples", "step_s", "graphs"))

    def edge_value(key: str, index: int, kind: str = "step") -> float | None:
        values = run.column(key, kind)[1]
        return values[index] if values else None

    return {
        "experiment": experiment_of(run),
        "status": status,
        "cause": cause,
        "rl_steps": int(run.steps[-1]["rl_step"]) if run.steps else 0,
        "attempts": max(1, len(run.attempt_events())),
        "wall_s": wall_seconds(run),
        "step_s": _median_value(run, "step_s"),
        "samples_per_s": sum(samples) / sum(seconds) if sum(samples) and sum(seconds) else None,
        "reward_first": edge_value("reward", 0),
        "reward_last": edge_value("reward", -1),
        "heldout_first": edge_value("heldout", 0, "eval"),
        "heldout_last": edge_value("heldout", -1, "eval"),
        "heldout_error": _change_error(run.column("heldout_error", "eval")[1]),
        "diversity_ratio": edge_value("diversity_ratio", -1, "eval"),
        "nn_distance_first": edge_value("nn_distance", 0, "eval"),
        "nn_distance_last": edge_value("nn_distance", -1, "eval"),
        "first_ratio_max_dev": edge_value("first_ratio_max_dev", 0),
        "recompiled": sum(int(max(0, b - a)) for a, b in pairwise(graphs)) if graphs else None,
        "clipped_first": max(run.column("clip_fraction/first")[1], default=None),
        "staleness_max": max(
            (int(value) for value in run.column("staleness_max")[1]), default=None
        ),
        "staleness_allowed": run.staleness_allowed,
        "gradient_share": edge_value("gradient_share", -1),
        "bubble": bubble_seconds(run),
        # Nobody predicts how long people take: where they vote, no step can be late.
        "predicted_step_s": None
        if votes_were_asked(run)
        else _median_value(run, "predicted_step_s"),
        "planned": planner_prediction(run),
        "stages": compare_stages(run),
        "memory": compare_memory(run),
        "cells": {
            name: int(sum(run.column(f"cells_{name}")[1])) for name in ("trained", "skipped")
        },
        "groups": {name: int(sum(run.column(f"groups_{name}")[1])) for name in GROUPS},
        "prompt_store": prompt_store(run),
        "dropped": count_amounts(run, "dropped", "reason", "samples", otherwise=1),
        "published": published_curves(run),
        "missing": count_amounts(run, "missing", "reward", "samples", otherwise=1),
        "alarms": raised_alarms(run),
        "restarts": max(0, len(run.attempt_events()) - 1) + len(run.events_of(LOST)),
        "lost": [str(event.get("cause")) for event in run.events_of(LOST)],
        "restarted": [str(event.get("cause")) for event in run.events_of(RESTART)],
        "unwritten": count_amounts(run, UNWRITTEN, "file", "lines"),
        "loggers": count_amounts(run, LOGGER, "logger", "failures"),
        "world": ranks_by_role(run),
        "warnings": [*run.warnings, *survived_troubles(run), *warnings],
    }


def _change_error(errors: Sequence[float]) -> float | None:
    """Return the standard error of a change from the first evaluation to the last."""
    return math.hypot(errors[0], errors[-1]) if len(errors) > 1 else None


def bubble_seconds(run: Run) -> dict[str, dict[str, float]]:
    """Return role -> cause -> seconds waited, summed over ranks."""
    table: dict[str, Counter[str]] = defaultdict(Counter)
    for (role, _), labels in run.seconds.items():
        for label, seconds in labels.items():
            stage, _, cause = label.partition(" ")
            if stage == "wait":
                table[role][cause] += seconds  # type: ignore[assignment]  # a Counter adds what it is given
    return {role: dict(sorted(causes.items())) for role, causes in sorted(table.items())}


def planner_prediction(run: Run) -> Planned | None:
    """Return the planner's prediction of the run that it chose: `schedule`, `step_s`, and
    `sync_step_s` of schedule=sync."""
    return next(
        (event["planned"] for event in reversed(run.events_of(LAUNCH)) if "planned" in event),
        None,
    )


def votes_were_asked(run: Run) -> bool:
    """Return whether the run waited for people's votes, which it keeps in a folder of its own."""
    return (run.path / "votes").is_dir()


def prompt_store(run: Run) -> dict[str, int] | None:
    """Return how many texts the ranks encoded and how many the store had before, summed over
    attempts; None = no store."""
    events = run.events_of(PROMPT_STORE)
    encoded = sum(event.get("encoded", 0) for event in events)
    texts = sum(event.get("texts", 0) for event in events if event.get("rank") == 0)
    return {"encoded": encoded, "reused": max(0, texts - encoded)} if events else None


def count_amounts(
    run: Run, kind: str, name: str, amount: str, otherwise: int = 0
) -> dict[str, int]:
    """Return the sums of `amount` over the events of `kind`, by their `name`. An event without an
    amount counts as `otherwise`."""
    counts: Counter[str] = Counter()
    for event in run.events_of(kind):
        counts[str(event.get(name))] += event.get(amount, otherwise)
    return dict(sorted(counts.items()))


def survived_troubles(run: Run) -> list[str]:
    """Return each trouble that the run survived once: warnings, failed checkpoints, gaps in
    records, failed loggers."""
    told = [str(event.get("message")) for event in run.events_of("warning")]
    told += [str(event.get("cause")) for event in run.events_of(CHECKPOINT_FAILED)][-1:]
    failed = reversed(run.events_of(UNWRITTEN, LOGGER))  # of each file and logger the first counts
    causes = {str(event.get("file", event.get("logger"))): event.get("cause") for event in failed}
    for file, lines in count_amounts(run, UNWRITTEN, "file", "lines").items():
        told.append(f"{file} lacks {lines} line(s) that could not be written: {causes.get(file)}")
    for name, failures in count_amounts(run, LOGGER, "logger", "failures").items():
        told.append(
            f"logger {name} failed {failures} time(s), first: {causes.get(name)}; {METRICS} "
            "has everything"
        )
    return list(dict.fromkeys(told))


def raised_alarms(run: Run) -> list[str]:
    """Return the messages of alarms that the last evaluation raised (reward hacking, collapsed
    rewards)."""
    last = run.evals[-1]["rl_step"] if run.evals else None
    return [
        str(event["message"]) for event in run.events_of("alarm") if event.get("rl_step") == last
    ]


def experiment_of(run: Run) -> str:
    """Return the name of the run's experiment: from the config, or else from the directory's
    parent."""
    name = run.config.get("experiment_name") or run.config.get("experiment")
    return name if isinstance(name, str) else run.path.resolve().parent.name


def run_outcome(run: Run) -> tuple[str, str | None]:
    """Return (status, cause) of the last attempt, from its end event or else from the trainers'
    events."""
    last = (event for attempt in run.attempt_events()[-1:] for event in attempt)
    by_kind = {event["kind"]: event for event in last if "kind" in event}
    if END in by_kind:
        return str(by_kind[END].get("status")), by_kind[END].get("cause")
    if "failure" in by_kind:
        return "failed", str(by_kind["failure"].get("cause"))
    if "stop" in by_kind:
        cause = by_kind["stop"].get("cause")
        return ("stopped", str(cause)) if cause else ("completed", None)
    seen = max(_event_times(run), default=None)
    ago = f", last sign of life {time.time() - seen:.0f} s ago" if seen is not None else ""
    return "unfinished", f"it goes on, or its launcher was killed{ago}"


def wall_seconds(run: Run) -> float | None:
    """Return the seconds from the first to the last sign of life, summed over attempts without the
    pauses between them."""
    starts = [attempt[0]["time"] for attempt in run.attempt_events()]
    times = sorted(_event_times(run))
    if not times:
        return None
    edges = [*(starts or times[:1]), float("inf")]
    total = 0.0
    for start, following in pairwise(edges):
        before = bisect_left(times, following)
        total += max(start, times[before - 1] if before else start) - start
    return total


def ranks_by_role(run: Run) -> dict[str, int]:
    """Return role -> ranks, from the launcher's event or else from the spans."""
    for event in reversed(run.events_of(LAUNCH, END)):
        if "world" in event:
            return dict(event["world"])
    return dict(sorted(Counter(role for role, _ in run.seconds).items()))


def _event_times(run: Run) -> list[float]:
    rows = (*run.steps, *run.evals, *run.events)
    return [float(row["time"]) for row in rows if is_number(row.get("time"))]


def _median_value(run: Run, key: str) -> float | None:
    values = run.column(key)[1]
    return median(values) if values else None
