"""Simulate a run in virtual time: the schedule and the scheduler of `digenrl.schedule`, with
durations in place of work.

Only durations are simulated. Every decision (order, claims, fragments, placement, lending,
staleness) is made by the code of the runtime.

Trainers act as *units*. A unit is the group of trainers whose forwards are collectives, or else a
single rank. When several units run in lock-step, the first unit decides and the others repeat its
moves.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from digenrl.extensions.planner.floor import floor_seconds
from digenrl.extensions.planner.fragments import FragmentWork
from digenrl.extensions.planner.generation import VirtualGeneration, Worker
from digenrl.extensions.planner.records import (
    MOST_STEPS,
    EventQueue,
    Led,
    Simulated,
    SpanFacts,
    SpanTable,
    Unit,
    settled_from,
)
from digenrl.extensions.planner.virtual_cluster import Cluster, Disturbance
from digenrl.schedule import ScheduleSpec, Task, next_fragment, update_fragments, version_queue
from digenrl.schedule.order import group_version, later_fragments
from digenrl.schedule.ranks import Roles
from digenrl.schedule.scheduler import ASK, LEND, TRAIN, Record, Scheduler
from digenrl.schedule.staleness import Ledger, check_staleness

UNBOUNDED_STEPS = 1 << 30
"""Used as `last_step` when a simulation has no fixed end."""


class DeadlockError(RuntimeError):
    """The event queue is empty although the run is not finished."""


def simulate_run(
    spec: ScheduleSpec,
    cluster: Cluster,
    steps: int = 3,
    disturbance: Disturbance | None = None,
    trace: bool = False,
    record: Record | None = None,
) -> Simulated:
    """Run `steps` RL steps in virtual time.

    Args:
        record: called with every event and every decision of the scheduler.

    Raises:
        DeadlockError: the schedule stopped before its last step. This is a defect, which the
            property tests look for.
    """
    run = _VirtualRun(spec, cluster, steps - 1, disturbance or Disturbance(), trace, record)
    return run.run_until(lambda ends: (0 if steps > 1 else -1) if len(ends) == steps else None)


def simulate_until_steady(
    spec: ScheduleSpec,
    cluster: Cluster,
    steps: int | None = None,
    most: int = MOST_STEPS,
    disturbance: Disturbance | None = None,
    trace: bool = False,
    cutoff_s: float = math.inf,
) -> Simulated:
    """Simulate a run without an end until its seconds per step no longer change.

    Args:
        most: largest number of RL steps to simulate. A run that needs more is returned as
            unsettled.
        steps: number of RL steps to simulate (at least 2), of which the later half is measured.
            None simulates as few as show that the run has settled. Asynchronous runs begin with a
            buffer of samples, which must first become empty or full for good.
        cutoff_s: longest second step, in seconds. A slower run is stopped at once and counts as
            unsettled. Asynchronous runs fill a buffer first, so for them the mean of the third and
            fourth step counts.
    """
    run = _VirtualRun(spec, cluster, UNBOUNDED_STEPS, disturbance or Disturbance(), trace, None)
    least = floor_seconds(*(cluster.whole or (spec, cluster)))
    fewest = 3 + 2 * spec.tag + 4 * spec.async_steps
    check_at = 2 + 2 * spec.async_steps

    def steady_from(ends: list[float]) -> int | None:
        """Return what `settled_from` finds among the steps since lending last switched itself
        off."""
        found = settled_from(ends[run.changed :], least)
        return None if found is None else run.changed + found

    def window_start(ends: list[float]) -> int | None:
        if steps is not None:
            return (steps - 1) // 2 if len(ends) == steps else None
        if len(ends) == check_at and ends[-1] - ends[-2 - spec.async_steps] > cutoff_s * (
            1 + spec.async_steps
        ):
            return 0
        watched = len(ends) - run.changed
        if len(ends) < fewest or watched < 3 or watched % 2 == 0:
            return None
        found = steady_from(ends)
        return max(run.changed, check_at - 1) if found is None and len(ends) >= most else found

    result = run.run_until(window_start)
    result = replace(
        result, settled=disturbance is not None or steady_from(list(result.step_ends)) is not None
    )
    vars(run).clear()  # break its reference cycles: the planner switches the garbage collector off
    return result


def fragment_staleness(spec: ScheduleSpec, version: int, fragment: tuple[int, ...]) -> int:
    """Return how many versions the oldest samples of `fragment` are behind trainers of
    `version`."""
    made = (group_version(spec, version, group) for group in spec.groups_of(fragment))
    return max(check_staleness(own, version, spec.async_steps) for own in made)


class _VirtualRun:
    """One simulated run: an event queue, the state of every trainer unit, and the generating side
    in `VirtualGeneration`."""

    def __init__(
        self,
        spec: ScheduleSpec,
        cluster: Cluster,
        last_step: int,
        disturbance: Disturbance,
        trace: bool,
        record: Record | None,
    ) -> None:
        self.spec, self.cluster, self.disturbance, self.trace = spec, cluster, disturbance, trace
        self.events, self.spans = EventQueue(), SpanTable(cluster)
        roles = Roles(
            len(cluster.trainers),
            len(cluster.rollouts),
            lockstep=cluster.lockstep,
            split=cluster.static_claims,
        )
        plan: Callable[[int], Sequence[Task]] = functools.cache(
            lambda version: version_queue(spec, version, last_step)
        )
        factor = disturbance.duration_factors()
        self.scheduler = Scheduler(spec, roles, plan, record)
        self.gen = VirtualGeneration(
            spec,
            cluster,
            self.scheduler,
            plan,
            factor,
            self.events,
            self.spans,
            self._finish_task,
        )
        self.units = [Unit(ranks) for ranks in cluster.units]
        self.unit_of = {rank: unit for unit in self.units for rank in unit.ranks}
        cells = self.scheduler.cells
        self.work = FragmentWork(spec, cluster, cells, factor, disturbance.jitter > 0)
        self.led: list[Led] = []
        """Moves of the first unit in the present update, for the other units in lock-step to
        repeat."""
        self._ready_ones: set[tuple[int, ...]] = set()
        """Fragments of the step in progress that are known to be ready."""
        self.later = functools.cache(partial(later_fragments, spec))
        for rank in self.unit_of:
            self.scheduler.expected("switch", rank, cluster.switch_seconds)
            groups = self.work.pending(rank, 0)[0]
            if own := cells(groups)[rank]:
                seconds = sum(self.work.seconds(self.unit_of[rank].ranks, groups))
                self.scheduler.expected("train", rank, seconds / own)
        self.version = 0
        """Version of the trainers' weights, which is also the number of the RL step in progress."""
        self._lines = dict.fromkeys([rank.pool for rank in cluster.ranks], 0.0)
        """Pool -> virtual second at which the line from this pool will have sent everything."""
        self.updates_done, self.arrived = 0, 0
        self._arriving: dict[tuple[int, int], tuple[int, float]] = {}
        """(step, group) -> its finished tasks, and when the last of them was sent."""
        self.completed: defaultdict[int, set[int]] = defaultdict(set)
        self.step_ends: list[float] = []
        self.trained: list[tuple[int, int, tuple[int, ...]]] = []
        self.ledger, self.staleness = Ledger(), 0
        self.messages: list[str] = []
        self.changed = 0
        """First RL step since lending last switched itself off; 0 when it never did."""
        self._bubbles: list[Unit] = []
        self._done_at: dict[int, float] = {}
        """Rank -> virtual second at which it finished, while other ranks of its unit still
        generate."""

    # ---- plumbing

    def run_until(self, window: Callable[[list[float]], int | None]) -> Simulated:
        """Run until `window` returns the first step of the window to measure; it is called with the
        ends of all steps."""
        self._reserve_queue_head()
        self._begin_update()
        for time, rank in self.disturbance.failures:
            self.events.post_event(time, partial(self._stop_rank, rank))
        for worker in self.gen.generators:
            if worker.rank.role == "rollout":
                self.gen.next_task(worker)
        first = None
        while first is None:
            done = len(self.step_ends)
            if not self.events.run_next():
                raise DeadlockError(self._describe_situation())
            if len(self.step_ends) > done:
                first = window(self.step_ends)
                if first is None:
                    self._begin_update()
        for worker in self.gen.workers:  # unfinished tasks and waits count up to now
            if worker.claim is not None and not worker.dead:
                self.gen.record_spans(worker)
            self.gen.end_idle(worker)
        self.ledger.check_balance()
        begin = self.step_ends[first] if first >= 0 else 0.0
        seconds = self.spans.seconds_between(begin, self.events.now)
        spans = self.spans.all_spans() if self.trace else ()
        return Simulated(
            tuple(self.step_ends), spans, first, True, seconds,
            tuple(self.gen.made), tuple(self.trained), self.staleness, self.ledger,
            tuple(self.messages),
        )  # fmt: skip

    def _describe_situation(self) -> str:
        units = sorted({unit.state for unit in self.units})
        groups = len(self.completed[self.version])
        return (
            f"virtual run stopped at {self.events.now:.3f} s in step {self.version}: trainers "
            f"{units}, {groups} of {self.spec.prompts} groups complete."
        )

    # ---- generation

    def _wake_idle_ranks(self, cause: str | None = None) -> None:
        """Let every rank that is idle (for `cause`, if given) look for work again, the fastest
        first.

        Called when a task came back, or when a rank to which others had left tasks is free.
        Colocated trainers look again too.
        """
        idle = [
            worker
            for worker in self.gen.idle_workers.values()
            if cause in (None, worker.idle_cause)
        ]
        # A task that the fastest idle rank declines is declined by slower ranks too.
        for worker in sorted(idle, key=lambda w: (w.rank.step_seconds, w.rank.rank)):
            if worker.rank.role == "rollout" and worker.idle_since is not None:
                self.gen.next_task(worker)
                if cause is not None and worker.idle_since is not None:
                    break
        if self.gen.colocated:
            units = [unit for unit in self.units if unit.state == "idle"]
            for unit in sorted(units, key=lambda u: self.gen.workers[u.ranks[0]].rank.step_seconds):
                self._advance_unit(unit)
                if cause is not None and unit.state == "idle":
                    break

    def _finish_task(self, worker: Worker, token: int) -> None:
        if worker.token != token:
            return
        task = self.gen.finish_task(worker)
        part = task.first_sample // self.spec.task_size
        self.ledger.count_issued(task.step, task.group, task.samples, part)
        # A line sends one task after the other, so a task queues behind those of all ranks of its
        # pool.
        sent = max(self.events.now, self._lines[worker.rank.pool]) + worker.rank.send_seconds
        if worker.rank.send_seconds:
            self._lines[worker.rank.pool] = sent
        group = task.step, task.group
        made, last = self._arriving.pop(group, (0, 0.0))
        if made + 1 < self.spec.tasks_per_group:
            self._arriving[group] = made + 1, max(last, sent)
        else:
            there = max(last, sent) + self.cluster.deliver_seconds
            self.events.post_event(there, partial(self._complete_group, *group))
        self._free_worker(worker)
        if self.gen.idle_workers or self.gen.colocated:
            self._wake_idle_ranks("tail")

    def _free_worker(self, worker: Worker) -> None:
        unit = self.unit_of.get(worker.rank.rank)
        if unit is None:
            self.gen.next_task(worker)
            return
        self.gen.announce_work(worker)
        self._done_at[worker.rank.rank] = self.events.now
        if not any(self.gen.workers[rank].busy for rank in unit.ranks):
            # Sharded trainers leave generation together, so all wait for the slowest.
            for rank in unit.ranks:
                done = self._done_at.pop(rank, self.events.now)
                self.spans.add_span(
                    rank, "wait", done, self.events.now, self.version, {"cause": "straggler"}
                )
            self._free_unit(unit)

    def _complete_group(self, step: int, group: int) -> None:
        self.completed[step].add(group)
        if step == self.version:
            self._advance_idle(self.units)

    def _stop_rank(self, rank: int) -> None:
        worker = self.gen.workers[rank]
        if worker.rank.role != "rollout":
            raise ValueError(
                f"failure of rank {rank}: only rollout ranks die alone; a trainer's death ends the "
                "run."
            )
        self.gen.stop_worker(worker)
        self.events.post_event(
            self.events.now + self.disturbance.detect_seconds, partial(self._notice_death, worker)
        )

    def _notice_death(self, worker: Worker) -> None:
        self.gen.notice_death(worker)
        self._wake_idle_ranks()

    # ---- training

    def _begin_update(self) -> None:
        self.arrived, self.led = 0, []
        for unit in self.units:
            unit.followed, unit.state, unit.since = 0, "idle", self.events.now
            unit.pending = list(self.work.pending(unit.ranks[0], self.updates_done))
            if self.updates_done == 0:
                self.scheduler.step_begun(unit.ranks[0])
        self._advance_idle(self.units)

    def _ready_fragment(self, unit: Unit) -> tuple[int, ...] | None:
        fragment = unit.pending[0] if unit.pending else None
        if fragment is not None and fragment not in self._ready_ones:
            if next_fragment(self.spec, unit.pending, self.completed[self.version]) is None:
                return None
            self._ready_ones.add(fragment)
            self.staleness = max(
                self.staleness, fragment_staleness(self.spec, self.version, fragment)
            )
        return fragment

    def _choose_move(
        self, unit: Unit, ready: tuple[int, ...] | None, granted: int | None = None
    ) -> str:
        done = len(self.completed[self.version])
        # In all other cases the move does not depend on the number of tasks that are left.
        asks = self.gen.colocated or (self.spec.tag and ready is None)
        left = self.gen.tasks_left(self.version, unit.ranks[0]) if asks else 0
        return self.scheduler.next_move(
            unit.ranks[0], self.updates_done, unit.pending, ready, done, left, granted
        )

    def _advance_idle(self, units: Sequence[Unit]) -> None:
        """Let every idle unit of `units` take its next move."""
        for unit in units:
            if unit.state == "idle":
                self._advance_unit(unit)

    def _advance_unit(self, unit: Unit) -> None:
        """Let a free unit train, lend, wait for a fragment, or wait for the other units at the end
        of the update."""
        if not unit.pending:
            unit.state, unit.since = "barrier", self.events.now
            self.arrived += 1
            if self.arrived == len(self.units):
                self._end_update()
            return
        if self.cluster.lockstep and unit is not self.units[0]:
            if unit.followed < len(self.led):
                self._repeat_move(unit, self.led[unit.followed])
            return
        ready = self._ready_fragment(unit)
        move = self._choose_move(unit, ready)
        if move == ASK and self.gen.colocated:
            self._generate_tasks(unit)  # each rank of the unit asks when it is offered a task
        elif move == ASK:
            if not self._bubbles:
                # A delivery or an update of the same moment may still bring work.
                self.events.post_event(self.events.now, self._fill_bubbles, late=True)
            if unit not in self._bubbles:
                self._bubbles.append(unit)
        else:
            self._start_move(unit, move, ready)

    def _reserve_queue_head(self) -> None:
        """Decide how many tasks of the present version's queue trainers claim before anybody."""
        if self.spec.tag:
            first = self.units[0].ranks[0]
            left = self.gen.tasks_left_by_version(first)
            head = self.scheduler.opens(first, self.version, self.later(-1), left, self.events.now)
            self.gen.set_queue_head(self.version, head)

    def _fill_bubbles(self) -> None:
        """Ask the scheduler whether the units that became idle at this moment lend (TAG)."""
        units, self._bubbles = self._bubbles, []
        for unit in units:
            if unit.state != "idle":
                continue
            ready = self._ready_fragment(unit)
            move = self._choose_move(unit, ready)
            if move == ASK:
                pending = (*unit.pending, *self.later(self.updates_done))
                head = self.gen.workers[unit.ranks[0]].claims.head_left(self.version)
                seen = (
                    unit.ranks[0],
                    self.version,
                    pending,
                    self.gen.tasks_left_by_version(unit.ranks[0]),
                    self.events.now,
                )
                move = self._choose_move(unit, ready, self.scheduler.lend(*seen, head))
            self._start_move(unit, move, ready)

    def _start_move(self, unit: Unit, move: str, ready: tuple[int, ...] | None) -> None:
        if move == TRAIN:
            self._train_fragments(unit, ready)
        elif move == LEND:
            self._generate_tasks(unit)

    def _repeat_move(self, unit: Unit, led: Led) -> None:
        """Repeat a move of the first unit on `unit`."""
        unit.followed += 1
        if led.fragment is None:
            self._generate_tasks(unit)
        else:
            self._train_fragments(unit, led.fragment, led)

    def _share_move(self, unit: Unit, led: Led) -> None:
        """Remember a move of the first unit, and let the idle units in lock-step repeat it."""
        if self.cluster.lockstep and unit is self.units[0]:
            self.led.append(led)
            self._advance_idle(self.units[1:])

    def _generate_tasks(self, unit: Unit) -> None:
        """Let every rank of the unit take a task, if one is left for it.

        A unit in lock-step without a task generates samples that are thrown away, which keeps the
        collectives of all trainers in step.
        """
        started, since = False, unit.since
        for rank in unit.ranks:
            worker = self.gen.workers[rank]
            if self.gen.offer_task(worker) is None:
                started = True
            else:
                self._done_at[rank] = self.events.now
        if not started and self.cluster.lockstep:
            seconds = self.spec.denoise_steps * max(
                self.gen.workers[rank].rank.step_seconds for rank in unit.ranks
            )
            for rank in unit.ranks:
                self._done_at.pop(rank)
                self.spans.add_span(
                    rank,
                    "lend",
                    self.events.now,
                    self.events.now + seconds,
                    self.version,
                    {"discarded": True},
                )
            self.events.post_event(self.events.now + seconds, partial(self._free_unit, unit))
        if started or self.cluster.lockstep:
            self._record_wait(unit, since)
            unit.state, unit.lent = "lend", True
            self._share_move(unit, Led(None, self.events.now, ()))

    def _record_wait(self, unit: Unit, since: float, cause: str | None = None) -> None:
        if cause is None:
            first = not self.trained or self.trained[-1][0] != self.version
            cause = "first_fragment" if first else "tail"
        for rank in unit.ranks:
            self.spans.add_span(
                rank, "wait", since, self.events.now, self.version, {"cause": cause}
            )

    def _train_fragments(
        self, unit: Unit, fragment: tuple[int, ...] | None, led: Led | None = None
    ) -> None:
        self._record_wait(unit, unit.since)
        unit.state = "train"
        begin, first = self.events.now, unit.ranks[0]
        if unit.lent and not self.gen.colocated:
            begin += (
                2 * self.cluster.switch_seconds
            )  # to generation and back; a loan is charged when it ends
        unit.lent = False
        alone = not self.cluster.lockstep and not self.disturbance.jitter
        while fragment is not None:
            unit.pending.remove(fragment)
            own = self.work.seconds(unit.ranks, fragment)
            start, end = begin, begin + sum(own)
            if led is not None:  # no micro-batch begins before that of the first unit
                end, its_begin = begin, led.begin
                for seconds, its in zip(own, led.micro_batches, strict=True):
                    end, its_begin = max(end, its_begin) + seconds, its_begin + its
            for rank in unit.ranks:
                self.trained.append((self.version, rank, fragment))
            if end > start:
                facts: SpanFacts = {}
                if self.trace:
                    facts["groups"] = self.spec.groups_of(fragment)
                for rank in unit.ranks:
                    self.spans.add_span(rank, "train", start, end, self.version, facts)
            if cells := self.scheduler.cells(fragment)[first]:
                self.scheduler.measured("train", first, (end - start) / cells)
            trained, begin = fragment, end
            # A unit on its own goes on with what is complete already, without an event for each.
            goes_on = alone and len(unit.pending) > self.gen.colocated
            fragment = self._ready_fragment(unit) if goes_on else None
        self.events.post_event(end, partial(self._free_unit, unit))
        self._share_move(unit, Led(trained, start, own))

    def _free_unit(self, unit: Unit) -> None:
        unit.state, unit.since = "idle", self.events.now
        self._advance_unit(unit)

    def _end_update(self) -> None:
        for unit in self.units:
            self._record_wait(unit, unit.since, "straggler")
        for fragment in update_fragments(self.spec, self.updates_done):
            for portion, group in zip(fragment, self.spec.groups_of(fragment), strict=True):
                self.ledger.count_trained(self.version, group, self.spec.parts_of(portion))
        end = self.events.now + self.cluster.reduce_seconds + self.cluster.optimizer_seconds
        last = self.updates_done + 1 == self.spec.updates_per_batch
        done = end + (self.cluster.snapshot_seconds if last else 0.0)
        for trainer in self.cluster.trainers:
            self.spans.add_span(trainer.rank, "optimizer", self.events.now, end, self.version, {})
            self.spans.add_span(trainer.rank, "publish", end, done, self.version, {})
        self.events.post_event(done, partial(self._begin_next, last))

    def _begin_next(self, last: bool) -> None:
        """Begin the next update; where the `last` one of the step ended, publish its version."""
        self.updates_done += 1
        if last:
            for unit in self.units:
                message = self.scheduler.step_ended(unit.ranks[0], self.events.now)
                if message:
                    self.messages.append(message)
                    self.changed = len(self.step_ends) + 1
            self.step_ends.append(self.events.now)
            self._ready_ones.clear()
            self.version += 1
            self.updates_done = 0
            self.gen.store.version = self.version
            self._reserve_queue_head()
            for rank in self.cluster.trainers:
                self.gen.workers[rank.rank].held = self.version
            for seconds in self.gen.visible:
                self.events.post_event(
                    self.events.now + self.cluster.publish_seconds + seconds,
                    partial(self.gen.show_version, self.version, seconds),
                )
        else:
            self._begin_update()
