"""Claims on the control store, and what the ranks announce about themselves. Every fact has a key
of its own:

    claim/v{version}             counter: one atomic add takes the next position of the version's queue
    head/v{version}, ahead/v{version}  tasks at the queue's head, and how many of them are claimed
    owner/v{version}/{position}  owner and attempt of a task; changed by compare-and-set alone
    got/v{version}/{position}    number of trainers that hold the result
    returned/v{version}          positions that came back because their owner was lost
    the same for version -1 - V      pieces of the evaluation of version V
    version                      newest published version
    work/{rank}                  what a generating rank does now, and how fast it is

`digenrl.schedule.claims` has the rules. A claim lasts as long as its owner lives. The launcher sees
that a rank died or hangs, kills it first, and only then gives its tasks back. Every result carries
the attempt that made it, and trainers refuse results of any other attempt.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterable, Sequence

from digenrl.cluster.control import Control
from digenrl.schedule.claims import Owner
from digenrl.schedule.ranks import Work


class StoredClaims:
    """A `digenrl.schedule.claims.ClaimStore` on the control store of a run."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def add_to_counter(self, name: str, amount: int = 0) -> int:
        return self._control.add(name, amount)

    def task_owner(self, version: int, position: int) -> Owner | None:
        text = self._control.get(_owner_key(version, position))
        return Owner(*(int(word) for word in text.split(":"))) if text else None

    def replace_owner(self, version: int, position: int, old: Owner | None, new: Owner) -> bool:
        return self._control.compare_set(
            # The store takes "" for a key that nobody has set.
            _owner_key(version, position),
            "" if old is None else _join_fields(old),
            _join_fields(new),
        )

    def forget_task(self, version: int, position: int) -> None:
        self._control.delete(_owner_key(version, position))
        self._control.delete(f"got/v{version}/{position}")

    def forget_queue(self, version: int) -> None:
        for name in ("claim", "head", "ahead", "returned"):
            self._control.delete(f"{name}/v{version}")

    def returned_positions(self, version: int) -> Sequence[int]:
        return sorted(
            {int(word) for word in (self._control.get(f"returned/v{version}") or "").split()}
        )

    def add_returned(self, version: int, positions: Sequence[int]) -> None:
        together = [*self.returned_positions(version), *positions]
        self._control.set(f"returned/v{version}", " ".join(str(position) for position in together))

    def newest_version(self) -> int:
        return int(self._control.get("version") or 0)

    def lost_ranks(self) -> frozenset[int]:
        return self._control.lost_ranks()


def note_version(control: Control, version: int) -> None:
    """Publish the number of the newest version. Call this before the version's weights are sent."""
    control.set("version", str(version))


def announce_work(control: Control, rank: int, work: Work | None) -> None:
    """Publish what `rank` does now. None means that the rank takes no more tasks."""
    control.set(f"work/{rank}", "" if work is None else _join_fields(work))


def work_of(control: Control, ranks: Iterable[int]) -> dict[int, Work | None]:
    """Return what each of `ranks`, and each rank that joined, does now. None: the rank is lost,
    leaves, or has not begun."""
    ranks = list(ranks)
    joined, *texts = control.get_all(["joined", *(f"work/{rank}" for rank in ranks)])
    # A second round trip only in a run that ranks have joined.
    if joined:
        later = [int(rank) for rank in joined.split()]
        ranks, texts = ranks + later, texts + control.get_all([f"work/{rank}" for rank in later])
    return {
        rank: _parse_work(text) if text else None for rank, text in zip(ranks, texts, strict=True)
    }


def _parse_work(text: str) -> Work:
    version, seconds, step, group, until = text.split(":")
    return Work(int(version), float(seconds), int(step), int(group), float(until))


def _owner_key(version: int, position: int) -> str:
    return f"owner/v{version}/{position}"


def _join_fields(values: Owner | Work) -> str:
    # repr() keeps every digit of a float.
    return ":".join(repr(value) for value in values)
