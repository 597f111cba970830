"""Judge a rank by its progress: it hangs when a thread shows none for much longer than that stage
has ever taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from digenrl.cluster.limits import Limits
from digenrl.cluster.timers import BEAT_EVERY_S, ConditionTimer, suggest_raising
from digenrl.record.progress import OUTSIDE, Stretch

_FIRST = 2.0
"""`Limits.stage_factor` for a rank's first time in a stage, which starts processes, compiles and
loads."""


class HangDetector:
    """Finds the ranks that hang, from what their threads say that they do."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._last: dict[tuple[int, str], Stretch] = {}
        """(rank, thread) -> its present stretch."""
        self._lasted: dict[tuple[int, str], ConditionTimer] = {}
        self._grown: dict[str, float] = {}
        """Stage -> seconds that the longest stretch so far, on any rank, allows all ranks."""
        self._all_wait = ConditionTimer(2.0 * BEAT_EVERY_S)

    def find_hanging_ranks(self, doing: Mapping[int, Sequence[Stretch]]) -> dict[int, str]:
        """Return the ranks that hang, each with the cause. Call this every second with what the
        threads of every rank do."""
        if self._limits.stage_factor is None:
            return {}
        # `last`: what every thread did one observation ago.
        last, self._last = (
            self._last,
            {(r, stretch.thread): stretch for r, all_ in doing.items() for stretch in all_},
        )
        for place, stretch in last.items():
            # A stretch that changed has ended. Its length sets the limit of its stage, for all
            # ranks.
            if self._last.get(place) != stretch:
                factor = (
                    self._limits.stage_factor
                    if stretch.known
                    else min(_FIRST, self._limits.stage_factor)
                )
                lasted = self._lasted.pop(place).seconds
                if place[0] in doing:  # a rank that is gone has not finished its stretch
                    grown = self._grown.get(stretch.stage, 0.0)
                    self._grown[stretch.stage] = max(grown, factor * lasted)
        found: dict[int, str] = {}
        for (rank, thread), stretch in self._last.items():
            timer = self._lasted.setdefault((rank, thread), ConditionTimer(2.0 * BEAT_EVERY_S))
            seconds = timer.observe(last.get((rank, thread)) == stretch)
            limit, key = self._stretch_limit(stretch)
            # A thread that waits for others is excused here. Below, all of them together are not.
            if seconds > limit and not stretch.waits:
                found.setdefault(
                    rank,
                    f"hangs in {_describe_stretch(stretch)}: no progress for {seconds:.0f} s; "
                    f"{suggest_raising(key)}",
                )
        # In a collective, who is late cannot be told from those that wait for it.
        also = {rank: [f"rank {other}" for other in found if other != rank] for rank in found}
        found = {rank: f"{cause}{_mention_others(also[rank])}" for rank, cause in found.items()}
        # A rank that has reported no thread may be at work.
        waiting = all(doing.values()) and all(stretch.waits for stretch in self._last.values())
        if self._all_wait.observe(waiting and self._last == last) > self._limits.stage_floor_s:
            waits = ", ".join(
                f"rank {rank}: {stretch.stage}" for (rank, _), stretch in self._last.items()
            )
            found.setdefault(
                min(doing),  # no rank is guiltier than the others
                f"hangs, as all ranks wait for each other ({waits}): nobody has been at work "
                f"for {self._all_wait.seconds:.0f} s; {suggest_raising('limits.stage_floor_s')}",
            )
        return found

    def _stretch_limit(self, stretch: Stretch) -> tuple[float, str]:
        """Return the seconds that a stretch may take, and the key that sets them."""
        limits = self._limits
        if not stretch.known or stretch.stage == OUTSIDE:
            return limits.start_s, "limits.start_s"
        grown = self._grown.get(stretch.stage, 0.0)
        return max((limits.stage_floor_s, "limits.stage_floor_s"), (grown, "limits.stage_factor"))


def _describe_stretch(stretch: Stretch) -> str:
    """Return a stretch in words: its stage, and its thread if that is not the main one."""
    stage = (
        f"stage {stretch.stage}"
        if stretch.stage != OUTSIDE
        else "no stage (its start, a callback, a logger)"
    )
    return stage if stretch.thread == "main" else f"{stage} (thread {stretch.thread})"


def _mention_others(others: Sequence[str]) -> str:
    return f"; {', '.join(others)} too" if others else ""
