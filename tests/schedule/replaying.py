"""Feed the recorded decisions of a run to a fresh scheduler (I13)."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from digenrl.schedule.order import version_queue
from digenrl.schedule.ranks import Roles, Work
from digenrl.schedule.scheduler import Scheduler
from digenrl.schedule.spec import ScheduleSpec


def replay(rows: Iterable[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], Any]]:
    """Feed a record to a fresh scheduler, and return the decisions that came out differently, as (row,
    answer now).

    A resumed run has several headers. Each begins a new scheduler.
    """
    different = []
    scheduler: Scheduler | None = None
    for row in rows:
        if "spec" in row:
            spec = ScheduleSpec(**{name: _hashable(value) for name, value in row["spec"].items()})
            plan = functools.partial(version_queue, spec, last_step=row["last_step"])
            scheduler = Scheduler(spec, Roles(**row["roles"]), plan)
            continue
        assert scheduler is not None, "a record begins with its header"
        name, args = (
            row.get("event") or row["decision"],
            [_hashable(value) for value in row["args"]],
        )
        if name == "saw_rank":
            scheduler.saw_rank(args[0], None if args[1] is None else Work(*args[1]))
            continue
        answer = getattr(scheduler, name)(*args)
        if "decision" in row and answer != row["answer"]:
            different.append((row, answer))
    return different


def _hashable(value: Any) -> Any:
    return tuple(_hashable(item) for item in value) if isinstance(value, list) else value
