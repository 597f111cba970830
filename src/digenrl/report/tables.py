"""Format figures for people: the end table of a run, on the terminal and in the report."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from digenrl.record.run_dir import printable_text
from digenrl.report.alarms import find_alarms
from digenrl.report.published import NONE_KNOWN, curve_sentence
from digenrl.report.read_run import is_number
from digenrl.report.summary_record import Planned, StageSeconds, Summary

DASH = "-"


def format_number(value: object, digits: int = 3) -> str:
    """Return a figure with a sensible number of digits; a dash for None."""
    if not is_number(value):
        return DASH
    if isinstance(value, int) or value == 0:
        return str(int(value))
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) < 10**-digits:
        return f"{value:.1e}"
    return f"{value:.{digits}f}" if abs(value) < 100 else f"{value:.1f}"


def format_duration(seconds: object) -> str:
    """Return a duration in words, such as 8.4 s, 2 min 05 s, 3 h 07 min."""
    if not is_number(seconds):
        return DASH
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_change(summary: Mapping[str, object], key: str) -> str:
    """Return "first -> last" of a figure."""
    return f"{format_number(summary[f'{key}_first'])} → {format_number(summary[f'{key}_last'])}"


def stage_ratios(stages: Mapping[str, StageSeconds]) -> list[tuple[float, str, float]]:
    """Return (distance from 1, stage, measured / planned seconds) of each stage with both."""
    found = [
        (stage, entry["measured_s"] / entry["planned_s"])
        for stage, entry in stages.items()
        if entry["measured_s"] and entry["planned_s"]
    ]
    return [(max(ratio, 1 / ratio), stage, ratio) for stage, ratio in found]


def key_figures(summary: Summary) -> list[tuple[str, str]]:
    """Return (name, figure) for the first page. Figures that the run did not record are left
    out."""
    waits = sorted(
        ((seconds, f"{role}: {cause.replace('_', ' ')}") for role, causes in summary["bubble"].items()  # noqa: E501
         for cause, seconds in causes.items() if cause != "startup"), reverse=True,
    )  # fmt: skip
    largest = f"{waits[0][1]}, {format_duration(waits[0][0])}" if waits else DASH
    planned: Planned = summary["planned"] or {}
    sync = planned.get("sync_step_s")
    gain = f"{sync / planned['step_s']:.2f} x {format_duration(sync)}, predicted" if sync else DASH
    world = " + ".join(f"{count} {role}" for role, count in summary["world"].items())
    gib = [
        (role, *(format_number(held[key], 1) for key in ("planned_gib", "peak_gib")))
        for role, held in summary["memory"].items()
    ]
    curves, share = summary["published"], summary["gradient_share"]
    apart = max(stage_ratios(summary["stages"]), default=None)
    rows = [
        ("RL steps", str(summary["rl_steps"])),
        ("reward", format_change(summary, "reward")),
        *(("published", curve_sentence(entry)) for entry in curves or ()),
        *((("published", NONE_KNOWN),) if curves == [] else ()),
        ("held-out score", format_change(summary, "heldout")),
        ("diversity / real data", format_number(summary["diversity_ratio"])),
        ("nearest real sample", format_change(summary, "nn_distance")),
        ("wall time", format_duration(summary["wall_s"])),
        ("RL step, median", format_duration(summary["step_s"])),
        ("predicted", format_duration(summary["predicted_step_s"])),
        ("faster than schedule=sync", gain),
        *((f"memory, {role}", f"planned {p} GiB, peak {q}") for role, p, q in gib if q != DASH),
        ("furthest from plan", f"{apart[1]}, {apart[2]:.2f} x" if apart else DASH),
        ("samples / s", format_number(summary["samples_per_s"], 1)),
        ("ranks", world or DASH),
        ("largest bubble", largest),
        ("first |ratio - 1|", format_number(summary["first_ratio_max_dev"])),
        ("staleness, at most", format_number(summary["staleness_max"])),
        ("gradients, approximate", f"{share:.2g} of the values travel at once" if share else DASH),
        ("graphs compiled after step 1", format_number(summary["recompiled"])),
    ]
    return [(name, text) for name, text in rows if text not in (DASH, f"{DASH} → {DASH}")]


def final_table(summary: Summary) -> RenderableType:
    """Return the end of a run as a table with its alarms below, to print with a rich Console."""
    colour = {"completed": "green", "stopped": "yellow"}.get(str(summary["status"]), "red")
    table = Table(
        title=Text(
            printable_text(f"{summary['experiment']}: {summary['status']}"), style=f"bold {colour}"
        ),
        show_header=False,
    )
    for name, text in key_figures(summary):
        table.add_row(Text(printable_text(name), style="dim"), Text(printable_text(text)))
    told = [*find_alarms(summary), *summary["warnings"]]
    if summary["status"] == "stopped" and summary["cause"]:
        told.insert(0, f"Stopped: {summary['cause']}.")
    return Group(table, *(Text(f"! {printable_text(line)}", style="yellow") for line in told))
