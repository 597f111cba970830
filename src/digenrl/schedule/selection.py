"""Which of the generated groups are trained (`data.oversample`, `data.zero_variance_groups`).

Samples that all score alike teach nothing. An update has places for `spec.places` groups. In canonical order each group
that teaches something takes one. What follows the last place is surplus: the step is as if nobody had generated it.
With neither option every group is trained. Updates that share the samples of every group train the same groups.

With `zero_variance_groups=refill` a step begins with `spec.places` groups, and each that teaches nothing opens the next
one. The number of open groups only grows, and its last value depends on the rewards alone: as many as it takes to fill
the places, at most all. So nothing is surplus, and the same groups are generated in whatever order they complete.
Pure: standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping

from digenrl.schedule.order import update_of
from digenrl.schedule.spec import ScheduleSpec

MISSING_REWARD, ZERO_VARIANCE, SURPLUS, UNOPENED = "missing_reward", "zero_variance", "surplus", "unopened"
"""Why a group is not trained; UNOPENED: it was not generated either."""


def update_groups(spec: ScheduleSpec, update: int) -> range:
    """The groups that are generated for an optimizer update."""
    first = update * spec.groups_per_update % spec.prompts
    return range(first, first + spec.groups_per_update)


def opened(spec: ScheduleSpec, faults: Mapping[int, str | None]) -> int:
    """How many leading groups of a step are generated, as far as `faults` (as of `left_out`) tell."""
    count = spec.places if spec.refills else spec.prompts
    while count < spec.prompts and (
        spec.places + sum(group < count and fault is not None for group, fault in faults.items()) > count
    ):
        count += 1
    return count


def decided(spec: ScheduleSpec, complete: Mapping[int, str | None]) -> list[int]:
    """The groups of which it is known whether they are trained: those of `complete` (faults as of `left_out`) that
    cannot lack a place, and those before which all groups of the update are complete; all, where nothing more is
    opened."""
    if spec.refills:
        count = opened(spec, complete)
        everything = all(group in complete for group in range(count))
        return list(range(spec.prompts)) if everything else [group for group in complete if group < count]
    known = []
    for group in complete:
        groups = update_groups(spec, update_of(spec, group))
        if group - groups.start < spec.places or all(earlier in complete for earlier in range(groups.start, group)):
            known.append(group)
    return known


def left_out(spec: ScheduleSpec, faults: Mapping[int, str | None], group: int) -> str | None:
    """Why a decided `group` is not trained; None: it is.

    Args:
        faults: complete group -> MISSING_REWARD, ZERO_VARIANCE (asked only if `spec.selects`), or None.
    """
    first = update_groups(spec, update_of(spec, group)).start
    taken = sum(earlier in faults and faults[earlier] is None for earlier in range(first, group))
    if spec.oversample and taken >= spec.places:
        return SURPLUS if group in faults else UNOPENED
    return faults[group]
