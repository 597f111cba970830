"""Write report.html: one self-contained file with inline pictures and without scripts, for browsers
and for print."""

from __future__ import annotations

import base64
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from digenrl.record.run_dir import CONFIG
from digenrl.record.small_file import read_text
from digenrl.report.alarms import find_alarms
from digenrl.report.attempt import make_or_warn
from digenrl.report.page.plots import PICTURES
from digenrl.report.page.showing import Showing, samples_to_show
from digenrl.report.read_run import Run, is_number
from digenrl.report.stages import UNITS
from digenrl.report.summary_record import Summary
from digenrl.report.tables import DASH, format_duration, format_number, key_figures, stage_ratios

_MAX_EVENTS = 60


def render_page(run: Run, summary: Summary, pictures: Mapping[str, bytes]) -> str:
    """Return the whole page. Every text from the run is escaped, so a prompt or a cause cannot
    become markup.

    Args:
        pictures: name (as in `PICTURES`) -> PNG.
    """
    pages = Environment(
        loader=PackageLoader("digenrl.report.page", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    times = [event["time"] for event in run.events if is_number(event.get("time"))]
    shown: list[Showing | None] = []
    make_or_warn("the gallery", lambda: shown.append(samples_to_show(run)), summary["warnings"])
    return pages.get_template("report.html.j2").render(
        title=summary["experiment"],
        status=summary["status"],
        path=run.path,
        began=f"{datetime.fromtimestamp(times[0], UTC):%Y-%m-%d %H:%M:%S}" if times else None,
        alarms=[*find_alarms(summary), *(f"Warning: {warning}" for warning in summary["warnings"])],
        facts=key_figures(summary),
        pictures=[
            (heading, base64.b64encode(pictures[name]).decode())
            for name, (heading, _) in PICTURES.items()
            if name in pictures
        ],
        shown=shown[0] if shown else None,
        rewards=list(_reward_rows(run, summary)),
        bubbles=list(_bubble_rows(summary)),
        stages=list(_stage_rows(summary)),
        memory=list(_memory_rows(summary)),
        evaluations=list(_evaluation_rows(run)),
        events=list(_event_rows(run, times[0] if times else 0.0)),
        max_events=_MAX_EVENTS,
        config=_read_or_none(run.path / CONFIG),
    )


def _read_or_none(path: Path) -> str | None:
    try:
        return read_text(path)
    except (OSError, ValueError):
        return None


def _bubble_rows(summary: Summary) -> Iterable[list[str]]:
    """Yield the head and a row for each role; nothing if no rank waited."""
    bubble = summary["bubble"]
    causes = sorted({cause for by_cause in bubble.values() for cause in by_cause})
    if not causes:
        return
    yield ["role", *(cause.replace("_", " ") for cause in causes), "all", "of its time"]
    for role, by_cause in bubble.items():
        ranks, total = summary["world"].get(role), sum(by_cause.values())
        share = f"{total / (ranks * summary['wall_s']):.0%}" if ranks and summary["wall_s"] else ""
        cells = [f"{by_cause[cause]:.1f}" if cause in by_cause else "" for cause in causes]
        yield [role, *cells, f"{total:.1f}", share]


def _stage_rows(summary: Summary) -> Iterable[list[str]]:
    """Yield a row for each stage that the plan has seconds of."""
    apart = {stage: f"{ratio:.2f} x" for _, stage, ratio in stage_ratios(summary["stages"])}
    for stage, entry in summary["stages"].items():
        figures = (format_number(entry[key], 4) for key in ("planned_s", "measured_s"))
        yield [stage, UNITS[stage], *figures, apart.get(stage, DASH)]


def _memory_rows(summary: Summary) -> Iterable[list[str]]:
    """Yield the head and a row for each rank whose GPU was measured."""
    ranks = [(role, entry, *own) for role, entry in summary["memory"].items()
             for own in entry["ranks"].items()]  # fmt: skip
    stages = sorted({stage for *_, held in ranks for stage in held})
    if ranks:
        yield ["rank", "planned", "peak", *stages]
    for role, entry, rank, held in ranks:
        figures = (entry["planned_gib"], max(held.values()), *map(held.get, stages))
        yield [f"{rank}, {role}", *(format_number(gib, 1) for gib in figures)]


def _evaluation_rows(run: Run) -> Iterable[list[str]]:
    """Yield the head and a row for each evaluation."""
    if not run.evals:
        return
    known = {key for row in run.evals for key in row if is_number(row[key])} - {"rl_step", "time"}
    told = (
        "reward",
        "heldout",
        "diversity_ratio",
        "nn_distance",
        "clip_diversity",
        "clip_kid",
        "kl",
    )
    first = [key for key in told if key in known]
    keys = [*first, *sorted(known - set(first))]
    yield ["RL step", *keys]
    for row in run.evals:
        yield [str(row["rl_step"]), *(format_number(row.get(key)) for key in keys)]


def _reward_rows(run: Run, summary: Summary) -> Iterable[list[str]]:
    """Yield a row for each reward: its weight, first and last score, missing scores, and model."""
    group = _as_mapping(run.config.get("reward"))
    identities = next(
        (event.get("identities") or {} for event in reversed(run.events_of("rewards"))), {}
    )
    causes: dict[str, Counter[str]] = defaultdict(Counter)
    for event in run.events_of("missing"):
        causes[str(event.get("reward"))][str(event.get("cause"))] += event.get("samples", 0)
    for role in ("rewards", "heldout"):
        for name, entry in _as_mapping(group.get(role)).items():
            given = _as_mapping(entry).get("weight", 1.0)
            weight = "held out" if role == "heldout" else f"{given:g}" if is_number(given) else DASH
            prefix = "heldout" if weight in ("held out", "0") else "reward"
            values = run.column(f"{prefix}/{name}", "eval")[1] or run.column(f"reward/{name}")[1]
            model = identities.get(name) or {}
            lost = summary["missing"].get(name, 0)
            why = (
                f"{lost}: {', '.join(cause for cause, _ in causes[str(name)].most_common(1))}"
                if lost
                else "0"
            )
            yield [str(name), weight, format_number(values[0] if values else None), format_number(values[-1] if values else None),  # noqa: E501
                   why, f"{model.get('model_id', DASH)} {str(model.get('weights_digest', ''))[:8]}"]  # fmt: skip  # noqa: E501


def _as_mapping(value: object) -> Mapping[str, object]:
    """Return a part of a configuration that should be a mapping; an empty mapping in place of
    anything else."""
    return value if isinstance(value, Mapping) else {}


def _event_rows(run: Run, began: float) -> Iterable[list[str]]:
    """Yield (seconds since the start, kind, other fields) of each event except publications."""
    for event in run.events:
        if event.get("kind") != "publish":
            told = {k: v for k, v in event.items() if k not in ("time", "kind") and v is not None}
            when = (
                format_duration(float(event["time"]) - began)
                if is_number(event.get("time"))
                else ""
            )
            yield [
                when,
                str(event.get("kind")),
                ", ".join(f"{key} {_readable_value(value)}" for key, value in told.items()),
            ]


def _readable_value(value: object) -> str:
    """Return a value of an event for people to read."""
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {_readable_value(item)}" for key, item in value.items())
    return (
        " ".join(_readable_value(item) for item in value) if isinstance(value, list) else str(value)
    )
