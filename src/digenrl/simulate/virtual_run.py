"""Discrete-event engine: the schedule of `digenrl.schedule`, run in virtual time.

Durations are simulated; what decides (order, claims, fragments, placement, lending, staleness) is the runtime's code.
Trainers act as *units*: one per rank when the model is replicated, one of all ranks when it is sharded.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from digenrl.record.spans import Span
from digenrl.schedule import ScheduleSpec, fragments, next_fragment
from digenrl.schedule.order import group_version, later_fragments
from digenrl.schedule.search import Decision, LendingMonitor, search
from digenrl.schedule.staleness import Ledger, check_staleness
from digenrl.simulate.bubble import lending_state
from digenrl.simulate.generation import Generation, Worker
from digenrl.simulate.records import Simulated, Unit
from digenrl.simulate.training import train_seconds
from digenrl.simulate.virtual_cluster import Cluster, Disturbance


class DeadlockError(RuntimeError):
    """No event is left and the run is not finished."""


def simulate(
    spec: ScheduleSpec,
    cluster: Cluster,
    steps: int = 3,
    disturbance: Disturbance | None = None,
    trace: bool = False,
    k_max: int = 4,
    depth: int = 1,
) -> Simulated:
    """Run `steps` RL steps in virtual time.

    Raises:
        DeadlockError: the schedule came to a halt (a defect; the property tests look for it).
    """
    return _Engine(spec, cluster, steps, disturbance or Disturbance(), trace, k_max, depth).run()


class _Engine:
    def __init__(
        self,
        spec: ScheduleSpec,
        cluster: Cluster,
        steps: int,
        disturbance: Disturbance,
        trace: bool,
        k_max: int,
        depth: int,
    ) -> None:
        spec = replace(spec, handoff=spec.handoff and bool(cluster.rollouts))  # colocated ranks keep their tasks
        self.spec, self.cluster, self.steps, self.disturbance = spec, cluster, steps, disturbance
        self.trace, self.k_max, self.depth = trace, k_max, depth
        self._random = disturbance.generator()
        self._events: list[tuple[float, int, int, str, Any]] = []
        self._sequence, self.now = 0, 0.0
        self.spans: list[Span] = []
        self.seconds: dict[tuple[str, str, str], float] = {}
        self._roles = {rank.rank: rank.role for rank in cluster.ranks}
        self.gen = Generation(spec, cluster, steps, self._factor, self._post, self._span)
        ids = [rank.rank for rank in cluster.trainers]
        self.units = [Unit(tuple(ids))] if cluster.lockstep else [Unit((rank,)) for rank in ids]
        self.unit_of = {rank: unit for unit in self.units for rank in unit.ranks}
        self.version = 0
        """Of the trainers = RL step in progress."""
        self.visible = 0
        """Newest version that rollout ranks can adopt."""
        self.updates_done, self.arrived = 0, 0
        self.done_tasks: dict[tuple[int, int], int] = {}
        self.completed: dict[int, list[int]] = {}
        self.step_ends: list[float] = []
        self.trained: list[tuple[int, int, tuple[int, ...]]] = []
        self.ledger, self.monitor, self.staleness = Ledger(), LendingMonitor(), 0
        self.decisions: list[tuple[float, Decision]] = []
        self.step_decisions: list[tuple[float, Decision]] = []
        self.messages: list[str] = []
        self._bubbles: list[Unit] = []
        self._done_at: dict[int, float] = {}
        """When ranks of a unit that generates together had nothing more to do."""
        self._fragment_seconds: dict[tuple[int, ...], tuple[float, ...]] = {}

    # ---- plumbing

    def _factor(self, rank: int) -> float:
        return self.disturbance.factor(rank, self._random)

    def _post(self, time: float, kind: str, payload: Any) -> None:
        self._sequence += 1
        late = 1 if kind == "bubble" else 0  # after everything else that happens at the same moment
        heapq.heappush(self._events, (time, late, self._sequence, kind, payload))

    def _span(self, rank: int, stage: str, start: float, end: float, step: int, args: Mapping[str, Any]) -> None:
        if end <= start:
            return
        if self.step_ends or self.steps == 1:
            key = (self.gen.workers[rank].rank.pool, stage, str(args.get("cause", "")))
            inside = max(0.0, end - max(start, self.step_ends[0] if self.step_ends else 0.0))
            self.seconds[key] = self.seconds.get(key, 0.0) + inside
        if self.trace:
            self.spans.append(Span(rank, self._roles[rank], stage, start, end, step, dict(args)))

    def run(self) -> Simulated:
        self._begin_update()
        for time, rank in self.disturbance.failures:
            self._post(time, "fail", rank)
        for worker in self.gen.generators:
            if worker.rank.role == "rollout":
                self._next_task(worker)
        while len(self.step_ends) < self.steps:
            if not self._events:
                raise DeadlockError(self._situation())
            self.now, _, _, kind, payload = heapq.heappop(self._events)
            getattr(self, f"_on_{kind}")(payload)
        for worker in self.gen.workers:  # what is under way counts up to here
            if worker.claim is not None and not worker.dead:
                self.gen.record(worker, self.now)
            self.gen.end_idle(worker, self.now)
        self.ledger.check()
        made, trained, decisions = tuple(self.gen.made), tuple(self.trained), tuple(self.decisions)
        return Simulated(
            tuple(self.step_ends), tuple(self.spans), self.seconds, made, trained, self.staleness, self.gen.moves,
            self.ledger, decisions, tuple(self.messages),
        )  # fmt: skip

    def _situation(self) -> str:
        units, groups = sorted({unit.state for unit in self.units}), len(self.completed.get(self.version, []))
        where = f"virtual run stopped at {self.now:.3f} s in step {self.version}: trainers {units}, "
        return f"{where}{groups} of {self.spec.prompts} groups complete."

    # ---- generation

    def _versions(self, worker: Worker) -> tuple[int, ...]:
        """Versions that a rank may generate with, the oldest first: a lost task may need the one before the newest."""
        if worker.rank.role == "trainer":
            return (self.version,)
        return tuple(range(max(0, self.visible - self.spec.async_steps), self.visible + 1))

    def _next_task(self, worker: Worker) -> None:
        """A rollout rank is free."""
        if worker.dead or worker.busy:
            return
        cause = self.gen.offer(worker, self._versions(worker), self.now)
        if cause is not None:
            self.gen.idle(worker, self.now, cause)

    def _wake(self) -> None:
        """Work came back: every idle rank looks again, the fastest first; colocated trainers too."""
        for worker in sorted(self.gen.generators, key=lambda w: w.rank.step_seconds):
            if worker.rank.role == "rollout" and worker.idle_since is not None:
                self._next_task(worker)
        if self.gen.colocated:
            for unit in self.units:
                if unit.state == "idle":
                    self._advance(unit)

    def _on_boundary(self, payload: tuple[int, int]) -> None:
        worker = self.gen.workers[payload[0]]
        if worker.token != payload[1]:
            return
        unit = self.unit_of.get(worker.rank.rank)
        lending = unit is not None and not self.gen.colocated
        wanted = lending and self._ready(unit) is not None
        idle = [w for w in self.gen.generators if w.available and not (w.dead or w.busy) and w.held == worker.held]
        action = self.gen.boundary(worker, self.now, wanted, idle)
        if action in ("go", "finish"):
            return
        self.gen.suspend(worker, self.now)
        if action == "yield":  # the faster rank takes the task at its next boundary, and this one gets its
            worker.available = True
            unit_state = self.unit_of.get(worker.rank.rank)
            if unit_state is not None:
                unit_state.state, unit_state.since = "idle", self.now
            else:
                self.gen.idle(worker, self.now, "tail")
        elif action == "swap":
            self._free(worker)
            self._wake()
        else:
            self._wake()
            self._free(worker)

    def _on_finish(self, payload: tuple[int, int]) -> None:
        worker = self.gen.workers[payload[0]]
        if worker.token != payload[1]:
            return
        task = self.gen.finish(worker, self.now)
        self._post(self.now + self.cluster.deliver_seconds, "deliver", (task.step, task.group))
        self._free(worker)
        if any(w.available and not w.dead for w in self.gen.generators):
            self._wake()

    def _free(self, worker: Worker) -> None:
        unit = self.unit_of.get(worker.rank.rank)
        if unit is None:
            self._next_task(worker)
            return
        self._done_at[worker.rank.rank] = self.now
        if not any(self.gen.workers[rank].busy for rank in unit.ranks):
            for rank in unit.ranks:
                self._span(
                    rank, "wait", self._done_at.pop(rank, self.now), self.now, self.version, {"cause": "lockstep"}
                )
            unit.state, unit.since = "idle", self.now
            self._advance(unit)

    def _on_deliver(self, payload: tuple[int, int]) -> None:
        self.done_tasks[payload] = self.done_tasks.get(payload, 0) + 1
        if self.done_tasks[payload] == self.spec.tasks_per_group:
            step, group = payload
            self.completed.setdefault(step, []).append(group)
            if step == self.version:
                for unit in self.units:
                    if unit.state == "idle":
                        self._advance(unit)

    def _on_fail(self, rank: int) -> None:
        worker = self.gen.workers[rank]
        if worker.rank.role != "rollout":
            raise ValueError(f"failure of rank {rank}: only rollout ranks die alone; a trainer's death ends the run.")
        self.gen.die(worker, self.now)
        self._post(self.now + self.disturbance.detect_seconds, "notice", rank)

    def _on_notice(self, rank: int) -> None:
        self.gen.notice(self.gen.workers[rank])
        self._wake()

    def _on_visible(self, version: int) -> None:
        self.visible = max(self.visible, version)
        for worker in self.gen.generators:
            if worker.rank.role == "rollout":
                self._next_task(worker)

    # ---- training

    def _begin_update(self) -> None:
        parts = list(fragments(self.spec, self.updates_done))
        self.arrived = 0
        for unit in self.units:
            unit.pending, unit.state, unit.since = list(parts), "idle", self.now
        for unit in self.units:
            self._advance(unit)

    def _ready(self, unit: Unit | None) -> tuple[int, ...] | None:
        if unit is None or not unit.pending:
            return None
        return next_fragment(self.spec, unit.pending, self.completed.get(self.version, []))

    def _advance(self, unit: Unit) -> None:
        """`unit` is free: train, meet the others, lend, or wait."""
        if not unit.pending:
            unit.state, unit.since = "barrier", self.now
            self.arrived += 1
            if self.arrived == len(self.units):
                self._end_update()
            return
        fragment = self._ready(unit)
        if fragment is not None:
            self._train(unit, fragment)
        elif self.gen.colocated:
            self._generate(unit)
        elif unit.loan > 0 and self._generate(unit):
            unit.loan -= 1
        elif self._may_lend():
            unit.loan = 0
            if not self._bubbles:
                self._post(self.now, "bubble", None)
            if unit not in self._bubbles:
                self._bubbles.append(unit)
        else:
            unit.loan = 0

    def _generate(self, unit: Unit) -> bool:
        """Every rank of the unit claims a task. False when none got one."""
        started = False
        since = unit.since
        for rank in unit.ranks:
            worker = self.gen.workers[rank]
            if not worker.dead and self.gen.offer(worker, self._versions(worker), self.now) is None:
                started = True
            else:
                self._done_at[rank] = self.now
        if started:
            self._waited(unit, since)
            unit.state, unit.lent = "lend", True
        return started

    def _waited(self, unit: Unit, since: float, cause: str | None = None) -> None:
        if cause is None:
            first = not self.trained or self.trained[-1][0] != self.version
            cause = "first_fragment" if first else "tail"
        for rank in unit.ranks:
            self._span(rank, "wait", since, self.now, self.version, {"cause": cause})

    def _train(self, unit: Unit, fragment: tuple[int, ...]) -> None:
        self._waited(unit, unit.since)
        unit.pending.remove(fragment)
        unit.state, unit.loan = "train", 0
        for rank in unit.ranks:
            self.gen.workers[rank].available = False
        begin = self.now
        if unit.lent and not self.gen.colocated:
            begin += 2 * self.cluster.switch_seconds
        unit.lent = False
        for group in fragment:
            version = group_version(self.spec, self.version, group)
            self.staleness = max(self.staleness, check_staleness(version, self.version, self.spec.async_steps))
        end = begin
        for rank, seconds in zip(unit.ranks, self.fragment_seconds(fragment, unit), strict=True):
            seconds *= self._factor(rank)
            self.trained.append((self.version, rank, fragment))
            self._span(rank, "train", begin, begin + seconds, self.version, {"groups": list(fragment)})
            end = max(end, begin + seconds)
        self._post(end, "trained", unit)

    def fragment_seconds(self, fragment: tuple[int, ...], unit: Unit) -> tuple[float, ...]:
        """Seconds of training `fragment` on each rank of `unit`."""
        if fragment not in self._fragment_seconds:
            self._fragment_seconds[fragment] = train_seconds(self.spec, self.cluster, fragment)
        everyone = self._fragment_seconds[fragment]
        return everyone if len(unit.ranks) == len(everyone) else tuple(everyone[rank] for rank in unit.ranks)

    def _on_trained(self, unit: Unit) -> None:
        unit.state, unit.since = "idle", self.now
        self._advance(unit)

    def _end_update(self) -> None:
        """Every unit has trained its part: reduce, step, and publish after the last update of the batch."""
        for unit in self.units:
            self._waited(unit, unit.since, "straggler")
        size = self.spec.groups_per_update
        for group in range(self.updates_done * size, (self.updates_done + 1) * size):
            self.ledger.issue(self.version, group, self.spec.group_size)
            self.ledger.train(self.version, group)
        end = self.now + self.cluster.reduce_seconds + self.cluster.optimizer_seconds
        last = self.updates_done + 1 == self.spec.updates_per_batch
        done = end + (self.cluster.snapshot_seconds if last else 0.0)
        for rank in self._roles:
            if self._roles[rank] == "trainer":
                self._span(rank, "optimizer", self.now, end, self.version, {})
                self._span(rank, "publish", end, done, self.version, {})
        self._post(done, "update", last)

    def _on_update(self, last: bool) -> None:
        self.updates_done += 1
        if last:
            for time, decision in self.step_decisions:
                message = self.monitor.record(decision, self.now - time)
                if message:
                    self.messages.append(message)
            self.step_decisions.clear()
            self.step_ends.append(self.now)
            self.completed.pop(self.version, None)
            self.version += 1
            self.updates_done = 0
            for rank in self.cluster.trainers:
                self.gen.workers[rank.rank].held = self.version
            self._post(self.now + self.cluster.publish_seconds, "visible", self.version)
        if len(self.step_ends) < self.steps:  # what comes after the last step's end is not the run's
            self._begin_update()

    # ---- lending

    def _may_lend(self) -> bool:
        if not self.spec.tag or self.monitor.off or self.gen.colocated:
            return False
        return self.updates_done == 0 or self.cluster.lends_between_updates

    def _on_bubble(self, _: None) -> None:
        """TAG: trainers became idle at this moment; one search decides for all of them."""
        units = [unit for unit in self._bubbles if unit.state == "idle" and self._ready(unit) is None]
        self._bubbles = []
        lender = self.gen.workers[units[0].ranks[0]] if units else None
        if lender is None or self.gen.left(self.version, lender) == 0:
            return
        open_fragments = [*units[0].pending, *later_fragments(self.spec, self.updates_done)]
        state = lending_state(
            self.gen,
            self.version,
            self.now,
            lender,
            sum(len(unit.ranks) for unit in units),
            [(f, sum(max(self.fragment_seconds(f, u)) for u in units) / len(units)) for f in open_fragments],
            set(self.completed.get(self.version, [])),
            self.done_tasks,
        )
        decision = search(state, self.k_max, self.depth)
        self.decisions.append((self.now, decision))
        # The step's first loan sees all of the gain and all of the error; one for the next step promises nothing here.
        if decision.lend and state.tasks_left and not self.step_decisions:
            self.step_decisions.append((self.now, decision))
        for unit in units:
            if decision.lend and self._generate(unit):
                unit.loan = decision.lend - 1
