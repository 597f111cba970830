"""report.html: one self-contained file, pictures inline, no script, readable in any browser and in print."""

from __future__ import annotations

import base64
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from digenrl.report.learning_alarms import alarms
from digenrl.report.plots import PICTURES
from digenrl.report.read_run import Run, is_number
from digenrl.report.tables import DASH, duration, facts, number

_STYLE = """
:root { --ink: #20242b; --soft: #667080; --line: #e3e6eb; --wash: #f6f7f9; --accent: #0072b2; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1060px; padding: 2.5rem 1.5rem 5rem; color: var(--ink); background: #fff;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.12rem; margin: 2.8rem 0 .8rem; padding-bottom: .35rem; border-bottom: 1px solid var(--line); }
p.where { margin: 0; color: var(--soft); font-size: .9rem; overflow-wrap: anywhere; }
.status { display: inline-block; padding: .1rem .65rem; border-radius: 1rem; font-size: .82rem; font-weight: 600;
  vertical-align: middle; margin-left: .6rem; color: #fff; background: #009e73; }
.status.stopped { background: #b97800; } .status.failed { background: #c0392b; }
dl.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(190px, 1fr)); gap: .7rem;
  margin: 1.6rem 0 0; }
dl.facts div { background: var(--wash); border-radius: .5rem; padding: .65rem .85rem; }
dl.facts dt { color: var(--soft); font-size: .8rem; }
dl.facts dd { margin: 0; font-size: 1.12rem; font-weight: 600; font-variant-numeric: tabular-nums; }
ul.alarms { margin: 1.6rem 0 0; padding: .8rem 1rem .8rem 2rem; background: #fff6e6; border-left: 4px solid #e69f00;
  border-radius: .3rem; }
p.calm { margin: 1.6rem 0 0; padding: .6rem 1rem; background: #eef8f4; border-left: 4px solid #009e73;
  border-radius: .3rem; font-size: .9rem; }
figure { margin: 0 0 1.2rem; } img { max-width: 100%; height: auto; display: block; }
.tables { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .32rem .9rem .32rem 0; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; } th:first-child, td:first-child { text-align: left; }
th.text { text-align: left; }
td.text { text-align: left; overflow-wrap: anywhere; } td:first-child { white-space: nowrap; }
pre { background: var(--wash); padding: 1rem; border-radius: .5rem; overflow-x: auto; font-size: .8rem;
  line-height: 1.45; }
summary { cursor: pointer; color: var(--accent); }
footer { margin-top: 3rem; color: var(--soft); font-size: .82rem; }
@media print { body { max-width: none; padding: 0; } h2 { break-after: avoid; } figure, table { break-inside: avoid; } }
"""

_MAX_EVENTS = 60
_CHECKED = (
    "No alarm. Looked for: a held-out score or variety that falls while the reward rises, blur and grids in the "
    "samples, rewards that became constant or whose model changed, missing scores, dropped samples, stale weights, and "
    "replay that differs from the rollout."
)


def render(run: Run, summary: Mapping[str, Any]) -> str:
    """The whole page. Every text from the run is escaped: a prompt or a cause cannot become markup."""
    status = escape(str(summary["status"]))
    title = escape(str(summary["experiment"]))
    body = [
        f'<h1>{title} <span class="status {status}">{status}</span></h1>',
        f'<p class="where">{escape(str(run.path))}{_began(run)}</p>',
        _alarm_list(run, summary),
        _facts(summary),
        *(_picture(run, name, heading) for name, (heading, _) in PICTURES.items()),
        _section("Rewards", _rewards(run, summary)),
        _section("Bubbles: seconds waited, summed over ranks", _bubbles(summary)),
        _section("Evaluations", _evaluations(run)),
        _section("Events", _events(run)),
        _section("Configuration", _config(run)),
        "<footer>Made from the files of the run directory; rebuild it with "
        f"<code>make report RUN={escape(str(run.path))}</code>. trace.json opens in ui.perfetto.dev.</footer>",
    ]
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{_STYLE}</style>\n</head>\n'
        f"<body>\n{chr(10).join(part for part in body if part)}\n</body>\n</html>\n"
    )


def _began(run: Run) -> str:
    times = [event["time"] for event in run.events if is_number(event.get("time"))]
    return f" &middot; {datetime.fromtimestamp(times[0], UTC):%Y-%m-%d %H:%M:%S} UTC" if times else ""


def _section(heading: str, content: str) -> str:
    return f"<h2>{escape(heading)}</h2>\n{content}" if content else ""


def _alarm_list(run: Run, summary: Mapping[str, Any]) -> str:
    lines = [*alarms(summary), *(f"Warning: {warning}" for warning in summary["warnings"])]
    if lines:
        return f'<ul class="alarms">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul>'
    return f'<p class="calm">{_CHECKED}</p>' if len(run.evals) > 1 else ""


def _facts(summary: Mapping[str, Any]) -> str:
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in facts(summary))
    return f'<dl class="facts">{cells}</dl>'


def _picture(run: Run, name: str, heading: str) -> str:
    path = run.path / name
    if not path.exists():
        return ""
    data = base64.b64encode(path.read_bytes()).decode()
    return _section(heading, f'<figure><img alt="{escape(heading)}" src="data:image/png;base64,{data}"></figure>')


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], text_last: bool = False) -> str:
    """Cells must be escaped already."""
    lines = []
    for row in rows:
        cells = [f"<td>{cell}</td>" for cell in row]
        if text_last:
            cells[-1] = f'<td class="text">{row[-1]}</td>'
        lines.append(f"<tr>{''.join(cells)}</tr>")
    header = "".join(f"<th>{cell}</th>" for cell in head[:-1])
    header += f'<th class="text">{head[-1]}</th>' if text_last else f"<th>{head[-1]}</th>"
    return f'<div class="tables"><table><thead><tr>{header}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _bubbles(summary: Mapping[str, Any]) -> str:
    bubble = summary["bubble"]
    causes = sorted({cause for by_cause in bubble.values() for cause in by_cause})
    if not causes:
        return ""
    rows = []
    for role, by_cause in bubble.items():
        ranks, total = summary["world"].get(role), sum(by_cause.values())
        share = total / (ranks * summary["wall_s"]) if ranks and summary["wall_s"] else None
        cells = [f"{by_cause[cause]:.1f}" if cause in by_cause else "" for cause in causes]
        rows.append([escape(role), *cells, f"{total:.1f}", f"{share:.0%}" if share is not None else ""])
    return _table(["role", *(escape(cause.replace("_", " ")) for cause in causes), "all", "of its time"], rows)


def _evaluations(run: Run) -> str:
    if not run.evals:
        return ""
    known = {key for row in run.evals for key in row if is_number(row[key])} - {"rl_step", "time"}
    first = [key for key in ("reward", "heldout", "diversity_ratio", "nn_distance") if key in known]
    keys = [*first, *sorted(known - set(first))]
    rows = [[str(row["rl_step"]), *(number(row.get(key)) for key in keys)] for row in run.evals]
    return _table(["RL step", *(escape(key) for key in keys)], rows)


def _rewards(run: Run, summary: Mapping[str, Any]) -> str:
    """What was scored, by which model, to what end, and how often it could not be."""
    group = run.config.get("reward") or {}
    identities = next((event.get("identities") or {} for event in reversed(run.events_of("rewards"))), {})
    causes: dict[str, Counter[str]] = defaultdict(Counter)
    for event in run.events_of("missing"):
        causes[str(event.get("reward"))][str(event.get("cause"))] += int(event.get("samples") or 0)
    rows = []
    for role in ("rewards", "heldout"):
        for name, entry in (group.get(role) or {}).items():
            weight = "held out" if role == "heldout" else f"{float(entry.get('weight', 1.0)):g}"
            prefix = "heldout" if weight in ("held out", "0") else "reward"
            values = run.column(f"{prefix}/{name}", "eval")[1] or run.column(f"reward/{name}")[1]
            model = identities.get(name) or {}
            lost = summary["missing"].get(name, 0)
            why = f"{lost}: {causes[name].most_common(1)[0][0]}" if lost else "0"
            cells = [name, weight, number(values[0] if values else None), number(values[-1] if values else None),
                     why, f"{model.get('model_id', DASH)} {str(model.get('weights_digest', ''))[:8]}"]  # fmt: skip
            rows.append([escape(cell) for cell in cells])
    return (
        _table(["reward", "weight", "at first", "at last", "missing", "model and digest"], rows, True) if rows else ""
    )


def _events(run: Run) -> str:
    told = [event for event in run.events if event.get("kind") != "publish"]
    if not told:
        return ""
    began = next((float(event["time"]) for event in run.events if is_number(event.get("time"))), 0.0)
    rows = []
    for event in told[-_MAX_EVENTS:]:
        facts_told = {k: v for k, v in event.items() if k not in ("time", "kind") and v is not None}
        rest = ", ".join(f"{key} {_plain(value)}" for key, value in facts_told.items())
        when = duration(float(event["time"]) - began) if is_number(event.get("time")) else ""
        rows.append([escape(when), escape(str(event.get("kind"))), escape(rest)])
    note = f"<p>The last {_MAX_EVENTS} of {len(told)}.</p>" if len(told) > _MAX_EVENTS else ""
    return note + _table(["after", "event", ""], rows, text_last=True)


def _plain(value: Any) -> str:
    """A value of an event as people read it."""
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {_plain(item)}" for key, item in value.items())
    return " ".join(_plain(item) for item in value) if isinstance(value, list) else str(value)


def _config(run: Run) -> str:
    path = run.path / "config.yaml"
    if not path.exists():
        return ""
    text = escape(path.read_text(encoding="utf-8", errors="replace"))
    return f"<details><summary>config.yaml</summary><pre>{text}</pre></details>"
