"""Warnings that a reader of a run must not overlook, as sentences with figures."""

from __future__ import annotations

from collections.abc import Mapping

from digenrl.report.read_run import is_number
from digenrl.report.summary_record import Summary

DIVERSITY_RANGE = (0.70, 1.15)
"""Range of within-class diversity, relative to real data, that is neither collapsed nor noisy."""
LEAST_ERRORS = 2.0
"""Standard errors by which a held-out score falls before the fall is told."""
LEAST_MOVE = 0.05
"""Relative growth of the distance to real samples before it is told."""


def find_alarms(summary: Summary) -> list[str]:
    """Return the warnings, the most serious first; [] for a run without warnings."""
    found: list[str] = []
    said = {"failed": "The run failed", "unfinished": "The run has recorded no end"}
    if summary["status"] in said:
        found.append(f"{said[summary['status']]}: {summary['cause']}.")
    oldest, allowed = summary["staleness_max"], summary["staleness_allowed"]
    if is_number(oldest) and oldest > allowed:
        found.append(
            f"Weights {oldest} versions old were trained on; schedule.async_steps allows {allowed}."
        )
    clipped = summary["clipped_first"]
    if is_number(clipped) and clipped > 0:
        found.append(clipped_alarm(clipped))
    found += _learning_alarms(summary)
    found += summary["alarms"]
    dropped = summary["dropped"]
    if dropped:
        found.append(
            "Samples were dropped: "
            + ", ".join(f"{count} ({why})" for why, count in dropped.items())
            + "."
        )
    if missing := summary["missing"]:
        found.append(
            "Scores are missing: "
            + ", ".join(f"{count} of {name}" for name, count in missing.items())
            + "."
        )
    found += [f"The run went on without a rank: {cause}." for cause in summary["lost"]]
    measured, predicted = summary["step_s"], summary["predicted_step_s"]
    if is_number(measured) and is_number(predicted) and measured > 1.5 * predicted > 0:
        found.append(
            f"An RL step took {measured:.2f} s, {measured / predicted:.1f} times what the schedule "
            "predicted."
        )
    return found


def clipped_alarm(share: float) -> str:
    """Return the warning for a first update with `share` of its cells clipped."""
    return (
        f"Up to {share:.1%} of a first update's cells were clipped, although the weights were "
        "those that made the samples: rounding reaches algorithm.clip_range. Set "
        "schedule.tsp.batch=1 and model.compile=false, or a larger clip range."
    )


def _learning_alarms(summary: Mapping[str, object]) -> list[str]:
    """Return signs that the reward rose for the wrong reason."""
    found: list[str] = []
    reward = _metric_change(summary, "reward")
    heldout = _metric_change(summary, "heldout")
    error = summary.get("heldout_error")
    least = LEAST_ERRORS * float(error) if is_number(error) else 0.0
    if reward is not None and heldout is not None and reward > 0 and heldout < -least:
        found.append(
            f"The reward rose by {reward:.3f} while the held-out score fell by {-heldout:.3f}: "
            "the reward is being gamed."
        )
    low, high = DIVERSITY_RANGE
    ratio = summary["diversity_ratio"]
    if is_number(ratio) and not low <= ratio <= high:
        word = "mode collapse" if ratio < low else "more spread than real data, probably noise"
        found.append(
            f"Within-class diversity is {ratio:.2f} of real data's ({word}; usual: {low:.2f} to "
            f"{high:.2f})."
        )
    distance = _metric_change(summary, "nn_distance")
    first = summary["nn_distance_first"]
    if distance is not None and is_number(first) and distance > LEAST_MOVE * first:
        found.append(
            "Samples moved away from real data: distance to the nearest real sample "
            f"{summary['nn_distance_first']:.3f} at first, {summary['nn_distance_last']:.3f} at "
            "last."
        )
    return found


def _metric_change(summary: Mapping[str, object], key: str) -> float | None:
    first, last = summary[f"{key}_first"], summary[f"{key}_last"]
    return last - first if is_number(first) and is_number(last) else None
