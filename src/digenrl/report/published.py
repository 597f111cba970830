"""Published curves of a run's recipe (`published_curves` of its config.yaml), beside what the run
reached.

A run's directory may be foreign: entries of another form are left out.
"""

from __future__ import annotations

from digenrl.record.run_dir import printable_text
from digenrl.report.read_run import Run, is_number
from digenrl.report.summary_record import PublishedCurve

NONE_KNOWN = "no curve is known for this recipe"
_LONGEST = 200
"""Most letters of a text."""


def published_curves(run: Run) -> list[PublishedCurve] | None:
    """Return the published curves of rewards that the run has, each beside the run's own; None for
    an embedded task, which nobody else can have measured."""
    model = run.config.get("model")
    if isinstance(model, dict) and "build" not in model:  # every published model can be built tiny
        return None
    entries = run.config.get("published")
    found: list[PublishedCurve] = []
    for entry in entries if isinstance(entries, list) else []:
        if not isinstance(entry, dict):
            continue
        if not all(is_number(entry.get(key)) for key in ("first", "last")):
            continue
        name = entry.get("reward")
        if not isinstance(name, str) or name not in _reward_names(run):
            continue
        column = run.column(f"reward/{name}")
        steps, values = column if column[1] else run.column("reward")
        found.append(
            {
                "reward": name,
                "first": float(entry["first"]),
                "last": float(entry["last"]),
                "steps": _number_or_none(entry.get("steps")),
                "gpu_hours": _number_or_none(entry.get("gpu_hours")),
                "measured": printable_text(str(entry.get("measured")))[:_LONGEST],
                "source": printable_text(str(entry.get("source")))[:_LONGEST],
                "own_first": values[0] if values else None,
                "own_last": values[-1] if values else None,
                "own_steps": steps[-1] if steps else 0,
                "tiny": _is_tiny(run),
            }
        )
    return found


def curve_sentence(entry: PublishedCurve) -> str:
    """Return one published curve beside the run, as the end table says it.

    Example:
        >>> curve_sentence({"reward": "ocr", "first": 0.34, "last": 0.8, "steps": 600,
        ...                 "gpu_hours": None, "measured": "batches", "source": "MD #239",
        ...                 "own_first": 0.34, "own_last": 0.41, "own_steps": 60, "tiny": False})
        'ocr 0.34 → 0.8 in 600 RL steps (MD #239; batches); this run: 0.34 → 0.41 after 60'
    """
    after = _training_effort(entry)
    text = f"{entry['reward']} {entry['first']:.3g} → {entry['last']:.3g}"
    text += f" in {', '.join(after)}" if after else ""
    text += f" ({entry['source']}; {entry['measured']})"
    if entry["own_first"] is None:
        return text
    text += f"; this run: {entry['own_first']:.3g} → {entry['own_last']:.3g}"
    text += f" after {entry['own_steps']}"
    return text + (", a tiny random build: no comparison" if entry["tiny"] else "")


def _number_or_none(value: object) -> float | None:
    return float(value) if is_number(value) else None


def _training_effort(entry: PublishedCurve) -> list[str]:
    took = ((entry["steps"], "RL steps"), (entry["gpu_hours"], "GPU-hours"))
    return [f"{figure:g} {unit}" for figure, unit in took if figure is not None]


def _reward_names(run: Run) -> set[str]:
    reward = run.config.get("reward")
    rewards = reward.get("rewards") if isinstance(reward, dict) else None
    return {str(name) for name in rewards} if isinstance(rewards, dict) else set()


def _is_tiny(run: Run) -> bool:
    model = run.config.get("model")
    return isinstance(model, dict) and model.get("build") == "tiny"
