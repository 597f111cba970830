"""The generating side of a virtual run: who runs which task, and how long it takes.

Every choice is the policy's (`digenrl.schedule.policy`); claims are those of `digenrl.schedule.claims`, kept in memory.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from digenrl.extensions.planner.virtual_cluster import Cluster, Rank
from digenrl.schedule import ScheduleSpec, Task
from digenrl.schedule.claims import Claim, Claims, MemoryClaims, queue_part
from digenrl.schedule.policy import SchedulePolicy
from digenrl.schedule.ranks import Work


@dataclass(frozen=True)
class Handed:
    """A task that was handed to a rank."""

    task: Task
    claim: Claim
    remaining: int
    """Denoising steps still to do."""
    seconds: float
    """On its way."""


@dataclass(eq=False)
class Worker:
    """A rank as a generator of samples."""

    rank: Rank
    claims: Claims
    held: int = 0
    """Version of the weights."""
    claim: Claim | None = None
    task: Task | None = None
    remaining: int = 0
    """Denoising steps still to do."""
    began: float = 0.0
    free_at: float = 0.0
    """When the present task will be finished, undisturbed."""
    step_time: float = 0.0
    finish_time: float = 0.0
    token: int = 0
    """Events of an older token are void."""
    waiting: deque[Handed] = field(default_factory=deque)
    """Tasks that were handed to this rank while it was busy."""
    idle_since: float | None = None
    idle_cause: str = "startup"
    waits: int = 0
    """How often it has begun to wait for a task."""
    dead: bool = False
    encoded: set[tuple[int, int]] = field(default_factory=set)

    @property
    def busy(self) -> bool:
        return self.claim is not None


class Generation:
    """The workers and their claims.

    Args:
        spec: the schedule.
        cluster: durations.
        policy: decides.
        plan: version -> its queue of tasks.
        factor: rank -> factor on its next duration (jitter, stragglers).
        post: (time, kind, payload) -> None, the run's event queue.
        span: (rank, stage, start, end, step, args) -> None.
        wanted: whether a fragment is ready for the trainer that generates.
    """

    def __init__(
        self,
        spec: ScheduleSpec,
        cluster: Cluster,
        policy: SchedulePolicy,
        plan: Callable[[int], Sequence[Task]],
        factor: Callable[[int], float],
        post: Callable[..., None],
        span: Callable[..., None],
        wanted: Callable[[Worker], bool],
    ) -> None:
        self.spec, self.cluster, self.policy, self._plan = spec, cluster, policy, plan
        self._factor, self._post, self._span, self._wanted = factor, post, span, wanted
        self.store = MemoryClaims()
        self.workers = [Worker(rank, Claims(self.store, rank.rank)) for rank in cluster.ranks]
        self.colocated = not cluster.rollouts
        self.idlers: dict[int, Worker] = {}
        """Those that have nothing to do."""
        members = [w for w in self.workers if math.isfinite(w.rank.step_seconds)]
        self.generators = [w for w in members if self.colocated or w.rank.role == "rollout"]
        self.made: list[tuple[int, int, int, int]] = []
        """(step, task, rank, version) of every finished task."""
        self.moves = 0
        for worker in members:
            rank = worker.rank
            alone = 0.0 if worker in self.generators else rank.encode_seconds  # a loan encodes its prompt again
            policy.expected("generate", rank.rank, rank.task_seconds(spec.denoise_steps) + alone)
            if worker in self.generators:
                self._announce(worker)

    # ---- what the policy sees

    def _announce(self, worker: Worker) -> None:
        """Tell the policy what `worker` does now."""
        rank, task = worker.rank, worker.task
        idle = worker.waits if self.spec.handoff and worker.idle_since is not None else 0
        seconds = rank.task_seconds(self.spec.denoise_steps), rank.step_seconds
        waiting = sum(handed.remaining for handed in worker.waiting) * rank.step_seconds
        if task is None:
            work = Work(worker.held, *seconds, idle=idle, waiting=waiting)
        else:
            work = Work(worker.held, *seconds, task.step, task.group, worker.free_at, idle, waiting)
        self.policy.saw_rank(rank.rank, work)

    def part(self, worker: Worker, tasks: int) -> range:
        """Positions of a queue that `worker` may claim."""
        if not self.cluster.static_claims:
            return range(tasks)
        return queue_part(tasks, self.generators.index(worker), len(self.generators))

    def left(self, version: int, worker: Worker) -> int:
        """Tasks of the version (of the rank's own part, where the queue is divided) that nobody runs."""
        tasks = len(self._plan(version))
        return worker.claims.left(version, tasks, self.part(worker, tasks))

    # ---- claims

    def offer(self, worker: Worker, versions: Sequence[int], now: float) -> str | None:
        """Let a free worker take a task that was handed to it, or claim from the first of `versions` that has work.
        None when it did, else why not."""
        if worker.waiting:
            handed = worker.waiting.popleft()
            claim = worker.claims.confirm(handed.task.version, handed.claim.position, handed.claim.attempt)
            if claim is not None:
                self._start(worker, handed.task, claim, handed.remaining, now, handed.seconds)
                return None
        cause = "weights"
        for version in versions:
            left = self.left(version, worker)
            if not left:
                continue
            if worker in self.generators and not self.policy.takes(worker.rank.rank, version, left, now):
                cause = "tail"
                continue
            tasks = self._plan(version)
            claim = worker.claims.take(version, tasks, self.part(worker, len(tasks)))
            if claim is not None:
                self._start(worker, tasks[claim.position], claim, self.spec.denoise_steps, now)
                return None
        return cause

    def _start(self, worker: Worker, task: Task, claim: Claim, remaining: int, now: float, moved: float = 0.0) -> None:
        self.end_idle(worker, now)
        rank, factor = worker.rank, self._factor(worker.rank.rank)
        begin = now
        if worker.held != task.version:
            begin += rank.adopt_seconds
            self._span(rank.rank, "adopt", now, begin, task.step, {"version": task.version})
            worker.held = task.version
        if remaining < self.spec.denoise_steps:
            self.moves += 1
            self._span(rank.rank, "send", begin, begin + moved, task.step, {"task": task.index})
            begin += moved
        if (task.step, task.group) not in worker.encoded:
            worker.encoded.add((task.step, task.group))
            self._span(rank.rank, "encode", begin, begin + rank.encode_seconds * factor, task.step, {})
            begin += rank.encode_seconds * factor
        worker.claim, worker.task, worker.remaining, worker.began = claim, task, remaining, begin
        worker.step_time = rank.step_seconds * factor
        worker.finish_time = (rank.decode_seconds + rank.score_seconds) * factor
        worker.free_at = begin + remaining * worker.step_time + worker.finish_time
        worker.token += 1
        self._announce(worker)
        together = self.cluster.lockstep and rank.role == "trainer"  # one of them cannot leave the others' forwards
        if self.spec.handoff and remaining > 1 and not together:
            self._post(begin + worker.step_time, "boundary", (rank.rank, worker.token))
        else:
            self._post(worker.free_at, "finish", (rank.rank, worker.token))

    # ---- between two denoising steps

    def boundary(self, worker: Worker, step: int, now: float) -> Worker | None:
        """A denoising step of `worker` ended. Who finishes its task, if it is handed over.

        Args:
            step: RL step that the trainers are in.
        """
        assert worker.task is not None
        worker.remaining -= 1
        rank, task = worker.rank.rank, worker.task
        receiver: int | None = None
        if worker.rank.role == "trainer":
            receiver = self.policy.loan_receiver(rank, task.step, step, self._wanted(worker), now)
        else:
            self._pass_on(worker, now)
            left = self.left(worker.held, worker)
            receiver = self.policy.hand_over(rank, task.step, worker.remaining, left, ())
        if receiver is None or not self._give(worker, receiver):
            kind = "boundary" if worker.remaining > 1 else "finish"
            time = now + worker.step_time if worker.remaining > 1 else worker.free_at
            self._post(time, kind, (rank, worker.token))
            return None
        return self.workers[receiver]

    def _pass_on(self, worker: Worker, now: float) -> None:
        """Hand the tasks that wait for busy `worker` on to idle ranks that would end them earlier."""
        while worker.waiting:
            last = worker.waiting[-1]
            version, waits = last.task.version, worker.remaining
            receiver = self.policy.pass_on(worker.rank.rank, version, last.remaining, waits, ())
            if receiver is None:
                return
            worker.waiting.pop()
            if worker.claims.give(version, last.claim, receiver):
                other = self.workers[receiver]
                seconds = self._way(worker, other)
                other.waiting.append(Handed(last.task, self._moved(last.claim, receiver), last.remaining, seconds))
                self.offer(other, (), now)

    def _give(self, worker: Worker, receiver: int) -> bool:
        """Make `receiver` the owner of what `worker` runs."""
        assert worker.task is not None
        assert worker.claim is not None
        if not worker.claims.give(worker.task.version, worker.claim, receiver):
            return False
        other = self.workers[receiver]
        claim, seconds = self._moved(worker.claim, receiver), self._way(worker, other)
        other.waiting.append(Handed(worker.task, claim, worker.remaining, seconds))
        return True

    def _way(self, giver: Worker, receiver: Worker) -> float:
        """Seconds of a suspended task on its way; over a line between places as long as a finished one."""
        one, other = giver.rank, receiver.rank
        return self.cluster.move_seconds + (one.pool != other.pool) * max(one.send_seconds, other.send_seconds)

    @staticmethod
    def _moved(claim: Claim, receiver: int) -> Claim:
        return Claim(claim.position, receiver, claim.attempt)

    def suspend(self, worker: Worker, now: float) -> None:
        """`worker` stops, its task having been given to another rank."""
        self.record(worker, now)
        self._release(worker)

    def finish(self, worker: Worker, now: float) -> Task:
        """The task of `worker` is done; its samples are on their way."""
        assert worker.claim is not None
        assert worker.task is not None
        task, worker.remaining = worker.task, 0
        self.record(worker, now)
        worker.claims.received(task.version, worker.claim.position)
        self.made.append((task.step, task.index, worker.rank.rank, task.version))
        self._release(worker)
        return task

    # ---- deaths

    def die(self, worker: Worker, now: float) -> None:
        """`worker` stops; its tasks stay claimed until the death is noticed."""
        if worker.claim is not None:
            self.record(worker, now)
        worker.dead = True
        worker.token += 1
        self._ends_idle(worker)

    def notice(self, worker: Worker) -> None:
        """The death of `worker` is known: its tasks go back."""
        rank = worker.rank.rank
        self.store.lost.add(rank)
        worker.claims.lose(rank, "died", trainers=1)
        worker.claim = worker.task = None
        worker.waiting.clear()
        self.policy.saw_rank(rank, None)

    # ---- records

    def record(self, worker: Worker, now: float) -> None:
        """Spans of what `worker` has done of its task up to `now`."""
        task = worker.task
        assert task is not None
        stage = "lend" if worker.rank.role == "trainer" and not self.colocated else "generate"
        args = {"group": task.group, "task": task.index, "version": task.version}
        generated = max(worker.began, min(now, now if worker.remaining else now - worker.finish_time))
        self._span(worker.rank.rank, stage, min(worker.began, now), generated, task.step, args)
        if generated < now:
            share = worker.rank.decode_seconds + worker.rank.score_seconds
            middle = generated + (now - generated) * (worker.rank.decode_seconds / share if share else 0.0)
            self._span(worker.rank.rank, "decode", generated, middle, task.step, args)
            self._span(worker.rank.rank, "score", middle, now, task.step, args)

    def _release(self, worker: Worker) -> None:
        worker.claim = worker.task = None
        worker.token += 1
        self._announce(worker)

    def idle(self, worker: Worker, now: float, cause: str) -> None:
        """`worker` has nothing to do, for `cause`."""
        if worker.idle_since is None:
            worker.idle_since, worker.idle_cause = now, cause
            worker.waits += 1
            self.idlers[worker.rank.rank] = worker
            self._announce(worker)
        elif worker.idle_cause != cause:
            self._waited(worker, now)
            worker.idle_since, worker.idle_cause = now, cause

    def end_idle(self, worker: Worker, now: float) -> None:
        """Close the wait of `worker`, if it waits."""
        self._waited(worker, now)
        self._ends_idle(worker)

    def _waited(self, worker: Worker, now: float) -> None:
        if worker.idle_since is not None and now > worker.idle_since:
            self._span(worker.rank.rank, "wait", worker.idle_since, now, -1, {"cause": worker.idle_cause})

    def _ends_idle(self, worker: Worker) -> None:
        worker.idle_since = None
        self.idlers.pop(worker.rank.rank, None)
