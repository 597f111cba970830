"""The choice of the generated groups that are trained (`data.oversample`,
`data.zero_variance_groups`).

Samples that all score alike teach nothing. An update has places for `spec.places` groups. In
canonical order each group that teaches something takes one place. Groups after the last place are
surplus: the step is as if they had never been generated. With neither option every group is
trained. Updates that share the samples of every group train the same groups. Pure: standard library
only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from digenrl.schedule.order import update_of
from digenrl.schedule.spec import ScheduleSpec

MISSING_REWARD, ZERO_VARIANCE, SURPLUS = "missing_reward", "zero_variance", "surplus"
"""Reasons why a group is not trained."""


def update_groups(spec: ScheduleSpec, update: int) -> range:
    """Return the groups that are generated for an optimizer update."""
    first = update * spec.groups_per_update % spec.prompts
    return range(first, first + spec.groups_per_update)


def decided_groups(spec: ScheduleSpec, complete: Collection[int]) -> list[int]:
    """Return the groups of `complete` that are known to be trained, or known to be left out.

    A group is decided in two cases: it has a place whatever the others score, or all groups of the
    update before it are complete.
    """
    known = []
    for group in complete:
        groups = update_groups(spec, update_of(spec, group))
        if group - groups.start < spec.places or all(
            earlier in complete for earlier in range(groups.start, group)
        ):
            known.append(group)
    return known


def left_out(spec: ScheduleSpec, faults: Mapping[int, str | None], group: int) -> str | None:
    """Return why a decided `group` is not trained; None: it is.

    Args:
        faults: complete group -> MISSING_REWARD, ZERO_VARIANCE (only if `spec.selects`), or None.

    Example:
        >>> spec = ScheduleSpec(3, 2, 2, 4, 3, oversample=1)  # two places for three groups
        >>> [left_out(spec, {0: None, 1: None, 2: None}, group) for group in range(3)]
        [None, None, 'surplus']
        >>> [left_out(spec, {0: ZERO_VARIANCE, 1: None, 2: None}, group) for group in range(3)]
        ['zero_variance', None, None]
    """
    first = update_groups(spec, update_of(spec, group)).start
    # Only earlier groups count, so the answer does not depend on the order of arrival.
    taken = sum(earlier in faults and faults[earlier] is None for earlier in range(first, group))
    if spec.oversample and taken >= spec.places:
        return SURPLUS
    return faults[group]
