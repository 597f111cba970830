"""Answers of the pure schedule to many drawn inputs, against those that were there before (`figures.txt`).

Half of the inputs are on a coarse grid, so that ties and limits are met often. A difference is no
fault by itself. Whoever changes a rule reads in it what has moved, and writes the new answers:

    python -m tests.schedule.test_figures
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from digenrl.schedule import (
    ScheduleSpec,
    group_version,
    micro_batches_per_update,
    next_fragment,
    place_fragment,
    resumed_queue,
    update_fragments,
    version_queue,
)
from digenrl.schedule.claims import (
    Claim,
    ClaimError,
    Claims,
    ClaimStore,
    MemoryClaims,
    evaluation_pieces,
    evaluation_queue,
    queue_part,
)
from digenrl.schedule.order import later_fragments
from digenrl.schedule.ranks import Roles, Work, declines_task, finished_before
from digenrl.schedule.scheduler import ASK, Scheduler
from digenrl.schedule.search import (
    LendingMonitor,
    LendingState,
    _Point,
    _Search,
    accepted_claims,
    after_older,
    search_loans,
)
from digenrl.schedule.selection import decided_groups, left_out
from digenrl.schedule.timesteps import apportion_units, cells_by_rank, without_useless_tasks

STORED = Path(__file__).with_name("figures.txt")


class Drawing:
    """Draws inputs from `random()` alone, whose numbers are the same in every Python."""

    def __init__(self, seed: int) -> None:
        self._random, self._coarse = Random(seed).random, seed % 2 == 0

    def number(self, least: int, most: int) -> int:
        return least + int(self._random() * (most - least + 1))

    def seconds(self, most: float, least: float = 0.0) -> float:
        """Return multiples of a half on the coarse grid."""
        drawn = least + self._random() * (most - least)
        return max(least, round(2 * drawn) / 2) if self._coarse else drawn

    def true(self, part: float = 0.5) -> bool:
        return self._random() < part

    def of(self, some: Iterable[Any]) -> Any:
        listed = list(some)
        return listed[self.number(0, len(listed) - 1)]

    def times(self, count: int, most: float, least: float = 0.0) -> tuple[float, ...]:
        return tuple(self.seconds(most, least) for _ in range(count))

    def spec(self) -> ScheduleSpec:
        updates, size = self.number(1, 3), self.number(1, 3)
        split = self.of(["groups", "samples"])
        slices = updates if split == "samples" else 1
        whole = 1 if split == "samples" else updates
        spare = whole * self.number(0, 1)
        denoised = self.number(2, 9)
        return ScheduleSpec(
            whole * self.number(1, 4) + spare, size * slices * self.number(2, 3), size, denoised,
            self.number(1, denoised), updates, split, self.number(0, 4), self.number(1, 5),
            self.true(), self.true(), oversample=spare, async_steps=self.number(0, 1),
            stale_fraction=self.of([0.25, 0.3, 0.5, 1.0]),
        )  # fmt: skip

    def state(self) -> LendingState:
        ranks, count = self.number(0, 5), self.number(1, 5)
        tasks = tuple(self.number(0, 4) for _ in range(count))
        if self.true(0.2):
            tasks = (0,) * count
        return LendingState(
            self.times(ranks, 4.0), self.times(ranks, 6.0, 0.5), sum(tasks), tasks,
            self.times(count, 3.0) if self.true() else (0.0,) * count, self.times(count, 3.0),
            self.seconds(4.0, 0.5), self.number(1, 3), self.number(0, 3),
            self.of([0.0, 0.0, 0.25, 1.0]), self.number(0, 9), self.number(0, 3), self.true(),
            self.true(0.9),
        )  # fmt: skip


def shown(value: Any) -> str:
    """Return a value as words: six digits of a number."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return " ".join(f"{key}={shown(of)}" for key, of in value.items())
    if isinstance(value, (list, tuple, map)):
        return f"({', '.join(map(shown, value))})"
    return str(value)


def hashed(value: Any) -> str:
    return hashlib.sha1(shown(value).encode()).hexdigest()[:10]


def of_search(draw: Drawing) -> Iterator[Any]:
    for _ in range(12):
        state = draw.state()
        rounds = draw.number(1, 4)
        found = search_loans(state), search_loans(state, rounds)
        yield [(each.lend, each.predicted_step_s, each.predicted_without) for each in found]
        starts, ends = accepted_claims(state.rollout_free, state.rollout_seconds, state.tasks_left)
        yield starts, ends
        older = [draw.number(0, 3) for _ in state.fragment_tasks]
        yield after_older(state.rollout_free, state.rollout_seconds, state.fragment_ready, older)
        tree = _Search(state, rounds)
        yield tree.spare_tasks(draw.seconds(9.0)), [tree.loan_fits(number) for number in range(4)]
        point = _Point(0, draw.of([0.0, draw.seconds(3.0)]), 0, 0, ())
        for lend in (draw.number(0, 2), 1):
            yield (
                tree.ready_at(point),
                tree._lower_bound(point),
                [tree.lend_rounds(point, n) for n in range(4)],
            )
            yield [tree.follow_policy(point, cover) for cover in (None, False, True)]
            yield tree.explore_point(point, draw.seconds(20.0, 5.0))
            lent = tree.lend_rounds(point, lend) or point
            point = tree.train_fragment(lent) or lent
            if point.fragment == len(state.fragment_tasks):
                break


def of_ranks(draw: Drawing) -> Iterator[Any]:
    for _ in range(40):
        ranks = draw.number(1, 4)
        costs = dict(enumerate(draw.times(ranks, 4.0, 0.5)))
        if draw.true(0.2):
            costs[ranks - 1] = draw.of([0.0, math.inf])
        free = {rank: draw.seconds(5.0) for rank in range(ranks) if draw.true()}
        now, left = draw.seconds(2.0), draw.number(0, 4)
        yield [
            declines_task(rank, now, costs, free, left)
            for rank in costs
            if 0.0 < costs[rank] < math.inf
        ]
        yield [
            finished_before(free.get(rank, 0.0), costs[rank], rank, draw.seconds(6.0), 1)
            for rank in costs
        ]
        work = Work(0, 1.0, 0, draw.number(-1, 1), draw.seconds(4.0))
        yield work.free_in(now), work.busy


def of_cells(draw: Drawing) -> Iterator[Any]:
    spec = draw.spec()
    yield [getattr(spec, name) for name in dir(ScheduleSpec) if type_of(name) is property]
    yield sorted(spec.override_words())
    yield [group_version(spec, step, group) for step in (0, 1) for group in range(spec.prompts)]
    yield [hashed(map(astuple, version_queue(spec, version, 2))) for version in range(4)]
    yield hashed([*map(astuple, resumed_queue(spec, 1))])
    yield [update_fragments(spec, update) for update in range(spec.updates_per_batch)]
    yield [later_fragments(spec, update) for update in range(-1, spec.updates_per_batch)]
    done = {group for group in range(spec.prompts) if draw.true(0.8)}
    yield next_fragment(spec, update_fragments(spec, 0), done)
    faults = {group: draw.of([None, None, "zero", "missing"]) for group in done}
    known = decided_groups(spec, faults)
    yield known, [left_out(spec, faults, group) for group in known]
    trainers = draw.number(1, 4)
    shares = tuple(draw.number(0, 3) + 0.5 for _ in range(trainers))
    yield apportion_units(draw.number(0, 30), shares)
    for own in (
        spec,
        replace(spec, shares=shares),
        replace(spec, shares=shares, measured_shares=True),
    ):
        yield micro_batches_per_update(own, trainers)
        for fragment in later_fragments(own, -1)[-2:]:
            placement = place_fragment(own, trainers, fragment)
            yield [[sum(len(b.steps) for b in micro) for micro in rank] for rank in placement]
            yield hashed(placement)
            tasks = sorted(
                {(b.group, b.part) for rank in placement for micro in rank for b in micro}
            )
            useless = frozenset(task for task in tasks if draw.true(0.4))
            yield hashed(without_useless_tasks(placement, useless))
            yield [cells_by_rank(own, trainers, lockstep, fragment) for lockstep in (False, True)]


def type_of(name: str) -> type:
    return type(vars(ScheduleSpec).get(name))


def of_scheduler(draw: Drawing) -> Iterator[Any]:
    """Events and questions in the order of a small run's life, with what is recorded of them."""
    spec = draw.spec()
    trainers, rollouts = draw.number(1, 3), draw.of([0, 1, 2, 3])
    roles = Roles(trainers, rollouts, draw.true(0.3), draw.true(0.1))
    rows: list[Any] = []
    scheduler = Scheduler(spec, roles, lambda version: version_queue(spec, version, 3), rows.append)
    ranks, now, step = range(trainers + rollouts + 1), 0.0, draw.number(0, 2)
    for rank in ranks:
        if draw.true(0.8):
            told = scheduler.expected if draw.true() else scheduler.measured
            told("generate", rank, draw.seconds(4.0, 0.5))
    for rank in range(trainers):
        scheduler.measured("train", rank, draw.seconds(1.0))
        if draw.true(0.3):
            scheduler.measured("switch", rank, draw.seconds(1.0))
    for _ in range(30):
        if draw.true(0.7):
            now += draw.seconds(1.0)
        rank, trainer = draw.of(ranks), draw.number(0, trainers - 1)
        updates = draw.number(0, spec.updates_per_batch - 1)
        pending = later_fragments(spec, -1)[-draw.number(1, 3) :]
        most = [len(version_queue(spec, version, 3)) for version in (step - 1, step)]
        left = [draw.number(0, n) for n in most]
        match draw.number(0, 10):
            case 0 | 1 | 2:
                busy = draw.true()
                work = Work(
                    step - draw.number(0, 1), draw.of([0.0, draw.seconds(4.0, 0.5)]),
                    step + draw.number(0, 1) if busy else -1,
                    draw.number(0, spec.prompts - 1) if busy else -1, now + draw.seconds(3.0),
                )  # fmt: skip
                scheduler.saw_rank(rank, work if draw.true(0.9) else None)
            case 3:
                some = draw.of([1, 2, left[1]])
                yield (
                    scheduler.takes(rank, step, some, now),
                    scheduler.takes(rank, step, some, now, some),
                )
                yield scheduler.many_left(rank, left[1])
            case 4:
                yield scheduler.first_free(now), scheduler.successor(rank, step, step, now)
            case 5 | 6:
                ready = draw.of([None, None, pending[0]])
                asked = trainer, updates, pending, ready, draw.number(0, 2), draw.number(0, 2)
                move = scheduler.next_move(*asked)
                if move == ASK:
                    move = ASK, scheduler.next_move(*asked, draw.number(0, 2))
                yield move
            case 7:
                yield scheduler.opens(trainer, step, pending, left, now)
            case 8:
                yield scheduler.lend(trainer, step, pending, left, now, draw.of([0, 0, 0, 1]))
                yield scheduler.loan_facts(trainer, now + 1.0)
            case 9:
                yield scheduler.predicted_end(trainer, step, pending, left, now)
            case 10:
                yield scheduler.step_ended(trainer, now)
                scheduler.step_begun(trainer)
    yield sorted(scheduler._generators), hashed(list(scheduler._costs.items())), hashed(rows)


def of_takes(draw: Drawing) -> Iterator[Any]:
    """A few tasks are left, and other ranks are nearly done with theirs."""
    spec = ScheduleSpec(4, 4, 2, 4, 3, draw.number(1, 2), gap=draw.number(0, 2), tag=True)
    for _ in range(12):
        trainers, rollouts = draw.number(1, 2), draw.number(1, 3)
        roles = Roles(trainers, rollouts)
        scheduler = Scheduler(spec, roles, lambda version: version_queue(spec, version, 3))
        now, least = draw.seconds(2.0), draw.of([0.5, 1.0, 2.0])
        for rank in range(trainers + rollouts):
            group, until = draw.number(-1, 3), now + draw.seconds(3.0) - 0.5
            scheduler.expected("generate", rank, seconds := least + draw.seconds(2.0))
            scheduler.expected("train", rank, draw.seconds(1.0))
            known = seconds if draw.true(0.9) else 0.0
            scheduler.saw_rank(
                rank, Work(draw.number(0, 2), known, draw.number(0, 2), group, until)
            )
        left = draw.number(1, 4)
        for rank in range(trainers + rollouts):
            yield [scheduler.takes(rank, 1, left, now, head) for head in (0, left - 1, left)]
            yield (
                scheduler.many_left(rank, 2 * left),
                scheduler.successor(rank, 1, draw.number(0, 1), now),
            )
        pending = later_fragments(spec, -1)
        sides = draw.number(0, 3), draw.number(0, 8)
        working = scheduler._known_speed(scheduler._generators)
        if working:
            yield astuple(scheduler._lending_state(0, working, {}, 1, pending, sides, now, 2))
        yield (
            scheduler.must_generate(0, 1, left - 1),
            scheduler.predicted_end(0, 1, pending, sides, now),
        )
        for _ in range(4):
            yield scheduler.lend(0, 1, pending, sides, now), scheduler.loan_facts(0, now)
            now += draw.seconds(4.0)
            yield scheduler.step_ended(0, now), scheduler._trainers[0].monitor.loans
            scheduler.step_begun(0)
            yield scheduler.opens(0, 1, pending, sides, now)


def life_of_claims(
    draw: Drawing, store: ClaimStore, lose: Callable[[int], object]
) -> Iterator[Any]:
    """Ranks that claim, hand over, finish, leave and die, in two queues and an evaluation's, on a
    store whose newest version is 1. `lose` marks a rank as lost there."""
    spec = replace(draw.spec(), async_steps=1)
    host, ranks = Claims(store, -1), [Claims(store, rank) for rank in range(4)]
    queues = {
        0: version_queue(spec, 0, 2),
        1: version_queue(spec, 1, 2),
        evaluation_queue(1): evaluation_pieces(1, 3),
    }
    if draw.true():
        ranks[0].begin_behind(1, draw.number(0, len(queues[1])))
    held: list[tuple[int, Claim]] = []
    divided = draw.true(0.3)
    for _ in range(60):
        rank, version = draw.number(0, 3), draw.of(queues)
        tasks = queues[version]
        part = queue_part(len(tasks), rank, 4) if divided and version == 0 else range(len(tasks))
        mine = [index for index, (_, claim) in enumerate(held) if claim.rank == rank]
        match draw.number(0, 9):
            case 0 | 1 | 2 | 3:
                claim = ranks[rank].take_next_task(version, tasks, part, ahead=rank == 0)
                if claim is not None:
                    held.append((version, claim))
                yield claim and tuple(claim)
            case 4 | 5 if mine:
                own, claim = held.pop(draw.of(mine))
                trainers = draw.number(1, 2)
                ranks[rank].mark_received(own, claim.position, trainers)
                yield ranks[0].accepts_result(own, claim), host.held_by(own, claim.position, 2)
            case 6 if mine:
                own, claim = held.pop(draw.of(mine))
                receiver = draw.number(0, 3)
                given = ranks[rank].give_task(own, claim, receiver)
                got = (
                    ranks[receiver].confirm_claim(own, claim.position, claim.attempt)
                    if draw.true()
                    else None
                )
                if got is not None:
                    held.append((own, got))
                yield given, got and tuple(got)
            case 7 if mine:
                own, claim = held.pop(draw.of(mine))
                ranks[rank].release_claim(own, claim)
                yield ranks[0].accepts_result(own, claim)
            case 8 if len(store.lost_ranks()) < 3:
                lose(rank)
                try:
                    yield (
                        host.return_lost_tasks(rank, "died", 2)
                        if draw.true()
                        else host.offer_released_tasks(rank)
                    )
                except ClaimError as error:
                    yield str(error)
            case 9:
                yield [host.unclaimed_tasks(v, len(t), range(len(t))) for v, t in queues.items()]
                yield [
                    (host.count_returned(v, len(t)), host.head_left(v)) for v, t in queues.items()
                ]
    for version in (2, 3):
        host.forget_old_queues(version)
        yield [[store.task_owner(v, p) for p in range(len(tasks))] for v, tasks in queues.items()]


def of_claims(draw: Drawing) -> Iterator[Any]:
    store = MemoryClaims(version=1)
    yield from life_of_claims(draw, store, store.lost.add)
    host = Claims(store, -1)
    yield sorted(store._counts.items()), sorted((v, sorted(p)) for v, p in store._returned.items())
    for version in (1001, 1002):
        host.forget_old_queues(version)
        yield len(store._owners), len(store._counts), len(store._returned)


def of_monitor(draw: Drawing) -> Iterator[Any]:
    for _ in range(6):
        monitor = LendingMonitor(draw.number(1, 4))
        for _ in range(8):
            decision = search_loans(draw.state())
            ended = decision.predicted_step_s + draw.seconds(2.0) - 1.0
            yield monitor.record_loan(decision, ended), monitor.loans, monitor.gain, monitor.error


KINDS: dict[str, tuple[Callable[[Drawing], Iterator[Any]], int]] = {
    "search": (of_search, 24),
    "ranks": (of_ranks, 6),
    "cells": (of_cells, 40),
    "policy": (of_scheduler, 160),
    "takes": (of_takes, 30),
    "claims": (of_claims, 60),
    "monitor": (of_monitor, 4),
}


def answers(kind: str) -> Iterator[str]:
    """Yield a line of answers for every number that inputs are drawn from."""
    make, count = KINDS[kind]
    for seed in range(count):
        found = [*make(Drawing(seed))]
        yield f"{seed} {hashed(found)} {shown(found)[:200]}"


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_before(kind: str) -> None:
    stored = STORED.read_text(encoding="utf-8").split("\n\n")
    known = {title: lines for title, *lines in (part.strip().split("\n") for part in stored)}
    for line, before in zip(answers(kind), known[kind], strict=True):
        assert line == before


if __name__ == "__main__":
    STORED.write_text("\n\n".join("\n".join([kind, *answers(kind)]) for kind in KINDS) + "\n")
