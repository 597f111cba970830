"""Compare a run with its plan, stage by stage: seconds per unit of work, and GiB per rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from digenrl.record.run_dir import LAUNCH
from digenrl.report.read_run import Run
from digenrl.report.summary_record import RoleMemory, StageSeconds

UNITS = {
    "encode": "prompt",
    "generate": "sample",
    "decode": "sample",
    "score": "sample",
    "train": "cell",
}
"""Stage -> unit of work in `digenrl.hardware.Hardware.seconds`."""


def expected_figures(run: Run) -> Mapping[str, Mapping[str, float]]:
    """Return what the planner expected of the run: "gib" (role -> GiB of a rank) and "seconds"
    (stage -> seconds per unit); {} where nothing was planned."""
    told = (event["expected"] for event in reversed(run.events_of(LAUNCH)) if "expected" in event)
    return next(told, {})


def unit_seconds(run: Run) -> dict[str, float]:
    """Return stage -> seconds per unit that the ranks of a run recorded after its first RL step.

    Raises:
        ValueError: the run has no second RL step.
    """
    seconds, units = dict.fromkeys(UNITS, 0.0), defaultdict[str, float](float)
    for span in run.spans:
        if span.step > 0 and span.stage in UNITS:
            seconds[span.stage] += span.seconds
            if span.stage != "train" and "handed_to" not in span.args:
                units[span.stage] += run.config["sampling"]["task_size"]
    # The record of a long run lacks steps. Cells count where their seconds do.
    trained = zip(*run.column("cells_trained"), strict=True)
    units["train"] = sum(cells for step, cells in trained if step > 1 and step - 1 in run.step_ends)
    if not units["train"]:
        raise ValueError(f"run={run.path}: has no second RL step to take seconds from; train on.")
    return {stage: seconds[stage] / units[stage] for stage in UNITS if seconds[stage]}


def compare_stages(run: Run) -> dict[str, StageSeconds]:
    """Return stage -> `planned_s` and `measured_s` per unit, for the stages that were planned."""
    planned = expected_figures(run).get("seconds", {})
    try:
        measured = unit_seconds(run) if planned else {}
    except (ValueError, KeyError, TypeError, ZeroDivisionError):  # one step, or a damaged record
        measured = {}
    return {
        stage: {"planned_s": planned[stage], "measured_s": measured.get(stage)}
        for stage in UNITS
        if stage in planned
    }


def compare_memory(run: Run) -> dict[str, RoleMemory]:
    """Return role -> GiB that were planned and measured."""
    peaks = defaultdict[str, dict[str, float]](dict)
    for row in run.steps:  # a run that was resumed began to count again
        for rank, held in (row.get("peak_gib") or {}).items():
            for stage, gib in held.items():
                peaks[rank][stage] = max(gib, peaks[rank].get(stage, 0.0))
    planned, roles = (
        expected_figures(run).get("gib", {}),
        {rank: role for role, rank in run.seconds},
    )
    by_role = defaultdict[str, dict[str, dict[str, float]]](dict)
    for rank, held in peaks.items():
        by_role[roles.get(int(rank), "rank")][rank] = held
    return {
        role: {
            "planned_gib": planned.get(role),
            "peak_gib": max(
                (gib for held in ranks.values() for gib in held.values()), default=None
            ),
            "ranks": ranks,
        }
        for role in sorted({*planned, *by_role}, reverse=True)
        for ranks in [by_role[role]]
    }
