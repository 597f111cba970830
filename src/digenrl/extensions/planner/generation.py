"""Generation in a virtual run: which rank runs which task, and how long it takes.

The scheduler (`digenrl.schedule.scheduler`) makes every choice. Claims are those of
`digenrl.schedule.claims`, kept in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from digenrl.extensions.planner.records import EventQueue, SpanFacts, SpanTable
from digenrl.extensions.planner.virtual_cluster import Cluster, VirtualRank
from digenrl.schedule import ScheduleSpec, Task
from digenrl.schedule.claims import Claim, Claims, MemoryClaims, queue_part
from digenrl.schedule.ranks import Work
from digenrl.schedule.scheduler import Scheduler


@dataclass(eq=False, slots=True)
class Worker:
    """State of one rank that generates samples."""

    rank: VirtualRank
    claims: Claims
    seconds: float
    """Seconds of one task."""
    held: int = 0
    """Version of the weights that the rank holds."""
    claim: Claim | None = None
    task: Task | None = None
    began: float = 0.0
    free_at: float = 0.0
    """Virtual second at which the present task will be finished."""
    finish_time: float = 0.0
    token: int = 0
    """Number of the present task's run. The end of an earlier run is ignored."""
    idle_since: float | None = None
    idle_cause: str = "startup"
    dead: bool = False
    generates: bool = False
    """Whether it claims tasks by trade, and not as a loan."""
    encoded: set[tuple[int, int]] = field(default_factory=set)

    @property
    def busy(self) -> bool:
        return self.claim is not None


class VirtualGeneration:
    """Workers of a virtual run, and their claims.

    Args:
        spec: the schedule.
        cluster: durations of each rank.
        scheduler: decides which rank takes, lends or leaves a task.
        plan: version -> queue of its tasks.
        factor: rank -> factor on its next duration (jitter, stragglers).
        events: the run's events; ends of tasks are posted there.
        spans: the run's spans.
        finish: called at the end of a task, with its worker and the number of the task's run.
    """

    def __init__(
        self,
        spec: ScheduleSpec,
        cluster: Cluster,
        scheduler: Scheduler,
        plan: Callable[[int], Sequence[Task]],
        factor: Callable[[int], float],
        events: EventQueue,
        spans: SpanTable,
        finish: Callable[[Worker, int], None],
    ) -> None:
        self.spec, self.cluster, self.scheduler, self._plan = spec, cluster, scheduler, plan
        self._factor, self._events, self._spans, self._finish = factor, events, spans, finish
        self.store = MemoryClaims()
        self.workers = [
            Worker(rank, Claims(self.store, rank.rank), rank.task_seconds(spec.denoise_steps))
            for rank in cluster.ranks
        ]
        self.colocated = not cluster.rollouts
        self.idle_workers: dict[int, Worker] = {}
        """Rank -> worker, for the workers that have nothing to do."""
        members = [w for w in self.workers if math.isfinite(w.rank.step_seconds)]
        self.generators = [w for w in members if self.colocated or w.rank.role == "rollout"]
        self._left: dict[tuple[int, int], int] = {}
        """Answers of `unclaimed_tasks`, one less for each claim since."""
        self.visible = dict.fromkeys([rank.fetch_seconds for rank in cluster.ranks], 0)
        """Transfer seconds to a place -> newest version that rollouts at this place can adopt."""
        self.made: list[tuple[int, int, int, int]] = []
        """(step, task, rank, version) of every finished task."""
        for worker in self.generators:
            worker.generates = True
            self.announce_work(worker)
        for worker in members:
            rank = worker.rank
            alone = 0.0 if worker.generates else rank.encode_seconds  # a loan encodes it again
            scheduler.expected("generate", rank.rank, worker.seconds + alone)

    # ---- what the scheduler sees

    def announce_work(self, worker: Worker) -> None:
        """Tell the scheduler what `worker` is doing now."""
        running = (task.step, task.group, worker.free_at) if (task := worker.task) else ()
        self.scheduler.saw_rank(worker.rank.rank, Work(worker.held, worker.seconds, *running))

    def claimable_positions(self, worker: Worker, tasks: int) -> range:
        """Return the positions of a queue of `tasks` that `worker` may claim."""
        if not self.cluster.static_claims:
            return range(tasks)
        return queue_part(tasks, self.generators.index(worker), len(self.generators))

    def unclaimed_tasks(self, version: int, worker: Worker) -> int:
        """Return how many tasks of the version are unclaimed: in the rank's own part, where the
        queue is divided."""
        key = version, worker.rank.rank if self.cluster.static_claims else -1
        left = self._left.get(key)
        if left is None:
            tasks = len(self._plan(version))
            left = self._left[key] = worker.claims.unclaimed_tasks(
                version, tasks, self.claimable_positions(worker, tasks)
            )
        return left

    def tasks_left(self, version: int, rank: int) -> int:
        """Return how many unclaimed tasks of the version are left for a unit of trainers with
        `rank`, and for the units that repeat its moves."""
        if not (self.cluster.static_claims and self.cluster.lockstep):
            return self.unclaimed_tasks(version, self.workers[rank])
        own = (self.workers[trainer.rank] for trainer in self.cluster.trainers)
        return sum(self.unclaimed_tasks(version, worker) for worker in own)

    def tasks_left_by_version(self, rank: int) -> tuple[int, int]:
        """Return `tasks_left` of the version before, and of the present one."""
        version = self.store.version
        older = self.tasks_left(version - 1, rank) if version else 0
        return older, self.tasks_left(version, rank)

    def set_queue_head(self, version: int, head: int) -> None:
        """Make the first `head` tasks of the version's queue its head."""
        self.workers[0].claims.begin_behind(version, head)
        self._left.clear()

    # ---- claims

    def _usable_versions(self, worker: Worker) -> Sequence[int]:
        """Return the versions that a rank may generate with, the oldest first.

        With asynchrony, a task that was lost with its rank may still need the version before the
        newest.
        """
        if worker.rank.role == "trainer":
            return (self.store.version,)
        visible = self.visible[worker.rank.fetch_seconds]
        return range(max(0, visible - self.spec.async_steps), visible + 1)

    def offer_task(self, worker: Worker) -> str | None:
        """Let a free worker claim a task of the oldest version that has work.

        Returns:
            None if the worker has begun a task, else the cause of its wait.
        """
        cause, now = "weights", self._events.now
        for version in self._usable_versions(worker):
            left, rank = self.unclaimed_tasks(version, worker), worker.rank.rank
            if not left:
                continue
            head = worker.claims.head_left(version) if self.spec.tag else 0
            if worker.generates and not self.scheduler.takes(rank, version, left, now, head):
                cause = "tail"
                continue
            tasks = self._plan(version)
            ahead = worker.rank.role == "trainer"
            claim = worker.claims.take_next_task(
                version, tasks, self.claimable_positions(worker, len(tasks)), ahead
            )
            if claim is not None:
                self._left[version, rank if self.cluster.static_claims else -1] -= 1
                self._start_task(worker, tasks[claim.position], claim)
                return None
        return cause

    def next_task(self, worker: Worker) -> None:
        """Give a free rollout rank its next task, or record why it waits."""
        if worker.dead or worker.busy:
            return
        cause = self.offer_task(worker)
        if cause is not None:
            self._mark_idle(worker, cause)

    def show_version(self, version: int, seconds: float) -> None:
        """Let rollouts to which a transfer takes `seconds` adopt `version`."""
        self.visible[seconds] = max(self.visible[seconds], version)
        for worker in self.generators:
            if worker.rank.role == "rollout" and worker.rank.fetch_seconds == seconds:
                self.next_task(worker)

    def _start_task(self, worker: Worker, task: Task, claim: Claim) -> None:
        """Begin a task: adopt weights and encode its prompt where needed, then post its end."""
        self.end_idle(worker)
        rank, factor, now = worker.rank, self._factor(worker.rank.rank), self._events.now
        begin = now
        if worker.held != task.version:
            begin += rank.adopt_seconds
            self._spans.add_span(
                rank.rank, "adopt", now, begin, task.step, {"version": task.version}
            )
            worker.held = task.version
        if (task.step, task.group) not in worker.encoded:
            worker.encoded.add((task.step, task.group))
            self._spans.add_span(
                rank.rank, "encode", begin, begin + rank.encode_seconds * factor, task.step, {}
            )
            begin += rank.encode_seconds * factor
        worker.claim, worker.task, worker.began = claim, task, begin
        worker.finish_time = (rank.decode_seconds + rank.score_seconds) * factor
        generated = self.spec.denoise_steps * (rank.step_seconds * factor)
        worker.free_at = begin + generated + worker.finish_time
        worker.token += 1
        self.announce_work(worker)
        self._events.post_event(worker.free_at, partial(self._finish, worker, worker.token))

    def finish_task(self, worker: Worker) -> Task:
        """End and return the task of `worker`. The caller says what comes next: `next_task` or
        `announce_work`."""
        assert worker.task is not None
        task = worker.task
        self.record_spans(worker)
        self.made.append((task.step, task.index, worker.rank.rank, task.version))
        worker.claim = worker.task = None
        worker.token += 1
        return task

    # ---- deaths

    def stop_worker(self, worker: Worker) -> None:
        """Stop `worker`. Its tasks stay claimed until `notice_death`, as in a run that must first
        detect the death."""
        if worker.claim is not None:
            self.record_spans(worker)
        worker.dead = True
        worker.token += 1
        worker.idle_since = None
        self.idle_workers.pop(worker.rank.rank, None)

    def notice_death(self, worker: Worker) -> None:
        """Return the tasks of a dead worker to the queue, and tell the scheduler that the rank is
        gone."""
        rank = worker.rank.rank
        self.store.lost.add(rank)
        for step, number, by, version in self.made:
            if by == rank:
                queued = [(task.step, task.index) for task in self._plan(version)]
                worker.claims.mark_received(version, queued.index((step, number)))
        worker.claims.return_lost_tasks(rank, "died", trainers=1)
        self._left.clear()
        worker.claim = worker.task = None
        self.scheduler.saw_rank(rank, None)

    # ---- records

    def record_spans(self, worker: Worker) -> None:
        """Write spans for the part of its task that `worker` has done up to now."""
        task, now = worker.task, self._events.now
        assert task is not None
        stage = "lend" if worker.rank.role == "trainer" and not self.colocated else "generate"
        facts: SpanFacts = {"group": task.group, "task": task.index, "version": task.version}
        generated = max(worker.began, min(now, worker.free_at - worker.finish_time))
        self._spans.add_span(
            worker.rank.rank, stage, min(worker.began, now), generated, task.step, facts
        )
        if generated < now:
            share = worker.rank.decode_seconds + worker.rank.score_seconds
            middle = generated + (now - generated) * (
                worker.rank.decode_seconds / share if share else 0.0
            )
            self._spans.add_span(worker.rank.rank, "decode", generated, middle, task.step, facts)
            self._spans.add_span(worker.rank.rank, "score", middle, now, task.step, facts)

    def _mark_idle(self, worker: Worker, cause: str) -> None:
        """Note that `worker` has nothing to do, and why. A new cause ends the span of the old
        one."""
        if worker.idle_since is None:
            worker.idle_since, worker.idle_cause = self._events.now, cause
            self.idle_workers[worker.rank.rank] = worker
            self.announce_work(worker)
        elif worker.idle_cause != cause:
            self._record_wait(worker)
            worker.idle_since, worker.idle_cause = self._events.now, cause

    def end_idle(self, worker: Worker) -> None:
        """End the wait of `worker`, if it waits, with a span."""
        if worker.idle_since is not None:
            self._record_wait(worker)
            worker.idle_since = None
            del self.idle_workers[worker.rank.rank]

    def _record_wait(self, worker: Worker) -> None:
        now = self._events.now
        if worker.idle_since is not None and now > worker.idle_since:
            self._spans.add_span(
                worker.rank.rank, "wait", worker.idle_since, now, -1, {"cause": worker.idle_cause}
            )
