"""Claims and the ranks' notes about themselves, kept on the control store: one key each.

    claim/v{version}             the counter: one atomic add takes the next position of the version's queue
    owner/v{version}/{position}  who runs the task, in which attempt; changed by compare-and-set alone
    got/v{version}/{position}    trainers that hold the result
    returned/v{version}          positions that came back because their owner was lost
    version, digest/v{version}   the newest published version; what its bytes must give
    work/{rank}                  what a generating rank does now, and how fast it is

The rules are those of `digenrl.schedule.claims`. A claim lasts as long as its owner's life: the launcher, which sees a
rank die or stand still, kills it first and then gives its tasks back. Every result carries the attempt that made it,
and trainers refuse any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple

from digenrl.cluster.control import Control
from digenrl.schedule.claims import Owner
from digenrl.schedule.ranks import Work


class StoredClaims:
    """A `digenrl.schedule.claims.ClaimStore` on the control store."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def count(self, name: str, amount: int = 0) -> int:
        return self._control.add(name, amount)

    def owner(self, version: int, position: int) -> Owner | None:
        text = self._control.get(_owner_key(version, position))
        return Owner(*(int(word) for word in text.split(":"))) if text else None

    def change(self, version: int, position: int, old: Owner | None, new: Owner) -> bool:
        return self._control.compare_set(_owner_key(version, position), "" if old is None else _text(old), _text(new))

    def forget(self, version: int, position: int) -> None:
        self._control.delete(_owner_key(version, position))
        self._control.delete(f"got/v{version}/{position}")

    def forget_queue(self, version: int) -> None:
        for name in ("claim", "returned"):
            self._control.delete(f"{name}/v{version}")

    def returned(self, version: int) -> Sequence[int]:
        return sorted({int(word) for word in (self._control.get(f"returned/v{version}") or "").split()})

    def add_returned(self, version: int, positions: Sequence[int]) -> None:
        together = [*self.returned(version), *positions]
        self._control.set(f"returned/v{version}", " ".join(str(position) for position in together))

    def newest_version(self) -> int:
        return int(self._control.get("version") or 0)

    def lost_ranks(self) -> frozenset[int]:
        return self._control.lost_ranks()


def note_version(control: Control, version: int) -> None:
    """Note the newest version, before its weights leave."""
    control.set("version", str(version))


def note_digest(control: Control, version: int, digest: str) -> None:
    """Note what a version's bytes give, before anybody can hold it; those of old versions go."""
    control.set(f"digest/v{version}", digest)
    control.delete(f"digest/v{version - 3}")


def digest_of(control: Control, version: int) -> str | None:
    """What the bytes of a version must give; None where that was noted long ago, or never."""
    return control.get(f"digest/v{version}")


def announce(control: Control, rank: int, work: Work | None) -> None:
    """Tell the others what `rank` does; None: it takes no more tasks."""
    control.set(f"work/{rank}", "" if work is None else _text(work))


def work_of(control: Control, ranks: Iterable[int]) -> dict[int, Work | None]:
    """What each of `ranks`, and of those that joined, does; None for one that is lost, leaves, or has not begun."""
    ranks = list(ranks)
    joined, *texts = control.get_all(["joined", *(f"work/{rank}" for rank in ranks)])
    if joined:
        later = [int(rank) for rank in joined.split()]
        ranks, texts = ranks + later, texts + control.get_all([f"work/{rank}" for rank in later])
    return {rank: _work(text) if text else None for rank, text in zip(ranks, texts, strict=True)}


def _work(text: str) -> Work:
    version, seconds, step, group, until, waiting = text.split(":")
    return Work(int(version), float(seconds), int(step), int(group), float(until), float(waiting))


def _owner_key(version: int, position: int) -> str:
    return f"owner/v{version}/{position}"


def _text(values: Owner | Work) -> str:
    return ":".join(repr(value) for value in astuple(values))
