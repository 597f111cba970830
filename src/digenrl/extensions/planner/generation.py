"""Generation in a virtual run: which rank runs which task, and how long it takes.

The policy (`digenrl.schedule.policy`) makes every choice. Claims are those of
`digenrl.schedule.claims`, kept in memory.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from digenrl.extensions.planner.virtual_cluster import Cluster, VirtualRank
from digenrl.schedule import ScheduleSpec, Task
from digenrl.schedule.claims import Claim, Claims, MemoryClaims, queue_part
from digenrl.schedule.policy import SchedulePolicy
from digenrl.schedule.ranks import Work


@dataclass(frozen=True)
class VirtualSuspended:
    """A partly denoised task that a trainer gave to another rank when its loan ended."""

    task: Task
    claim: Claim
    remaining: int
    """Denoising steps still to do."""
    seconds: float
    """Seconds that the task takes to reach its new rank."""


@dataclass(eq=False)
class Worker:
    """State of one rank that generates samples."""

    rank: VirtualRank
    claims: Claims
    held: int = 0
    """Version of the weights that the rank holds."""
    claim: Claim | None = None
    task: Task | None = None
    remaining: int = 0
    """Denoising steps still to do."""
    began: float = 0.0
    free_at: float = 0.0
    """Virtual second at which the present task will be finished, if nothing interrupts it."""
    step_time: float = 0.0
    finish_time: float = 0.0
    token: int = 0
    """Number of the present task's run. Events that carry an older token are ignored."""
    wanted: int = -1
    """Token of the loan whose end a ready fragment waits for."""
    waiting: deque[VirtualSuspended] = field(default_factory=deque)
    """Suspended tasks that other ranks gave to this rank while it was busy."""
    idle_since: float | None = None
    idle_cause: str = "startup"
    dead: bool = False
    encoded: set[tuple[int, int]] = field(default_factory=set)

    @property
    def busy(self) -> bool:
        return self.claim is not None


class VirtualGeneration:
    """Workers of a virtual run, and their claims.

    Args:
        spec: the schedule.
        cluster: durations of each rank.
        policy: decides which rank takes, lends or leaves a task.
        plan: version -> queue of its tasks.
        factor: rank -> factor on its next duration (jitter, stragglers).
        post: (time, kind, payload) -> None, the run's event queue.
        span: (rank, stage, start, end, step, args) -> None.
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
    ) -> None:
        self.spec, self.cluster, self.policy, self._plan = spec, cluster, policy, plan
        self._factor, self._post, self._span = factor, post, span
        self.store = MemoryClaims()
        self.workers = [Worker(rank, Claims(self.store, rank.rank)) for rank in cluster.ranks]
        self.colocated = not cluster.rollouts
        self.idle_workers: dict[int, Worker] = {}
        """Rank -> worker, for the workers that have nothing to do."""
        members = [w for w in self.workers if math.isfinite(w.rank.step_seconds)]
        self.generators = [w for w in members if self.colocated or w.rank.role == "rollout"]
        self.made: list[tuple[int, int, int, int]] = []
        """(step, task, rank, version) of every finished task."""
        for worker in members:
            rank = worker.rank
            alone = (
                0.0 if worker in self.generators else rank.encode_seconds
            )  # a loan encodes its prompt again
            policy.expected("generate", rank.rank, rank.task_seconds(spec.denoise_steps) + alone)
            if worker in self.generators:
                self._announce(worker)

    # ---- what the policy sees

    def _announce(self, worker: Worker) -> None:
        """Tell the policy what `worker` is doing now."""
        rank, task = worker.rank, worker.task
        seconds = rank.task_seconds(self.spec.denoise_steps)
        waiting = sum(suspended.remaining for suspended in worker.waiting) * rank.step_seconds
        if task is None:
            work = Work(worker.held, seconds, waiting=waiting)
        else:
            work = Work(worker.held, seconds, task.step, task.group, worker.free_at, waiting)
        self.policy.saw_rank(rank.rank, work)

    def part(self, worker: Worker, tasks: int) -> range:
        """Return the positions of a queue of `tasks` that `worker` may claim."""
        if not self.cluster.static_claims:
            return range(tasks)
        return queue_part(tasks, self.generators.index(worker), len(self.generators))

    def left(self, version: int, worker: Worker) -> int:
        """Return how many tasks of the version are unclaimed: in the rank's own part, where the
        queue is divided."""
        tasks = len(self._plan(version))
        return worker.claims.left(version, tasks, self.part(worker, tasks))

    # ---- claims

    def offer(self, worker: Worker, versions: Sequence[int], now: float) -> str | None:
        """Let a free worker take a task that was given to it, or claim one from the first of
        `versions` that has work.

        Returns:
            None if the worker has begun a task, else the cause of its wait.
        """
        if worker.waiting:
            given = worker.waiting.popleft()
            claim = worker.claims.confirm(
                given.task.version, given.claim.position, given.claim.attempt
            )
            if claim is not None:
                self._start(worker, given.task, claim, given.remaining, now, given.seconds)
                return None
        cause = "weights"
        for version in versions:
            left = self.left(version, worker)
            if not left:
                continue
            if worker in self.generators and not self.policy.takes(
                worker.rank.rank, version, left, now
            ):
                cause = "tail"
                continue
            tasks = self._plan(version)
            claim = worker.claims.take(version, tasks, self.part(worker, len(tasks)))
            if claim is not None:
                self._start(worker, tasks[claim.position], claim, self.spec.denoise_steps, now)
                return None
        return cause

    def _start(
        self,
        worker: Worker,
        task: Task,
        claim: Claim,
        remaining: int,
        now: float,
        moved: float = 0.0,
    ) -> None:
        """Begin a task: adopt weights, move its state and encode its prompt where needed, then post
        its end."""
        self.end_idle(worker, now)
        rank, factor = worker.rank, self._factor(worker.rank.rank)
        begin = now
        if worker.held != task.version:
            begin += rank.adopt_seconds
            self._span(rank.rank, "adopt", now, begin, task.step, {"version": task.version})
            worker.held = task.version
        if remaining < self.spec.denoise_steps:
            self._span(rank.rank, "send", begin, begin + moved, task.step, {"task": task.index})
            begin += moved
        if (task.step, task.group) not in worker.encoded:
            worker.encoded.add((task.step, task.group))
            self._span(
                rank.rank, "encode", begin, begin + rank.encode_seconds * factor, task.step, {}
            )
            begin += rank.encode_seconds * factor
        worker.claim, worker.task, worker.remaining, worker.began = claim, task, remaining, begin
        worker.step_time = rank.step_seconds * factor
        worker.finish_time = (rank.decode_seconds + rank.score_seconds) * factor
        worker.free_at = begin + remaining * worker.step_time + worker.finish_time
        worker.token += 1
        self._announce(worker)
        self._post(worker.free_at, "finish", (rank.rank, worker.token))

    # ---- the end of a loan

    def want(self, worker: Worker, now: float) -> None:
        """Have the policy asked after the present denoising step, because a fragment is ready for
        this lending trainer."""
        # In lock-step no trainer can leave a loan before the others.
        if self.cluster.lockstep or not worker.busy or worker.wanted == worker.token:
            return
        worker.wanted = worker.token
        # A ready fragment at the very end of a step must not wait for one more step through a
        # rounding error.
        steps = max(1, math.ceil((now - worker.began) / worker.step_time - 1e-9))
        self._boundary(worker, steps)

    def _boundary(self, worker: Worker, steps: int) -> None:
        """Post a question to the policy after `steps` denoising steps of the task, unless the task
        ends there."""
        if steps < worker.remaining:
            self._post(
                worker.began + steps * worker.step_time,
                "boundary",
                (worker.rank.rank, worker.token, steps),
            )

    def suspend(self, worker: Worker, steps: int, step: int, now: float) -> Worker | None:
        """Stop the loan of `worker` after `steps` denoising steps, and return the worker that
        continues the task.

        The policy names the receiver. If there is none, the loan goes on until the next step and
        the result is None.

        Args:
            step: RL step of the trainers.
        """
        task, claim, rank = worker.task, worker.claim, worker.rank.rank
        assert task is not None
        assert claim is not None
        receiver = self.policy.loan_receiver(rank, task.step, step, True, now)
        if receiver is None or not worker.claims.give(task.version, claim, receiver):
            self._boundary(worker, steps + 1)
            return None
        worker.remaining -= steps
        other = self.workers[receiver]
        given = Claim(claim.position, receiver, claim.attempt)
        other.waiting.append(
            VirtualSuspended(task, given, worker.remaining, self._way(worker, other))
        )
        self.record(worker, now)
        self._release(worker)
        return other

    def _way(self, giver: Worker, receiver: Worker) -> float:
        """Return the seconds that a suspended task takes to reach `receiver`.

        A line between two places takes as long for it as for a finished task.
        """
        one, other = giver.rank, receiver.rank
        return self.cluster.move_seconds + (one.pool != other.pool) * max(
            one.send_seconds, other.send_seconds
        )

    def finish(self, worker: Worker, now: float) -> Task:
        """End the task of `worker`, mark it as received and return it."""
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
        """Stop `worker`. Its tasks stay claimed until `notice`, as in a run that must first detect
        the death."""
        if worker.claim is not None:
            self.record(worker, now)
        worker.dead = True
        worker.token += 1
        self._ends_idle(worker)

    def notice(self, worker: Worker) -> None:
        """Return the tasks of a dead worker to the queue, and tell the policy that the rank is
        gone."""
        rank = worker.rank.rank
        self.store.lost.add(rank)
        worker.claims.lose(rank, "died", trainers=1)
        worker.claim = worker.task = None
        worker.waiting.clear()
        self.policy.saw_rank(rank, None)

    # ---- records

    def record(self, worker: Worker, now: float) -> None:
        """Write spans for the part of its task that `worker` has done up to `now`."""
        task = worker.task
        assert task is not None
        stage = "lend" if worker.rank.role == "trainer" and not self.colocated else "generate"
        args = {"group": task.group, "task": task.index, "version": task.version}
        generated = max(
            worker.began, min(now, now if worker.remaining else now - worker.finish_time)
        )
        self._span(worker.rank.rank, stage, min(worker.began, now), generated, task.step, args)
        if generated < now:
            share = worker.rank.decode_seconds + worker.rank.score_seconds
            middle = generated + (now - generated) * (
                worker.rank.decode_seconds / share if share else 0.0
            )
            self._span(worker.rank.rank, "decode", generated, middle, task.step, args)
            self._span(worker.rank.rank, "score", middle, now, task.step, args)

    def _release(self, worker: Worker) -> None:
        worker.claim = worker.task = None
        worker.token += 1
        self._announce(worker)

    def idle(self, worker: Worker, now: float, cause: str) -> None:
        """Note that `worker` has nothing to do, and why. A new cause ends the span of the old
        one."""
        if worker.idle_since is None:
            worker.idle_since, worker.idle_cause = now, cause
            self.idle_workers[worker.rank.rank] = worker
        elif worker.idle_cause != cause:
            self._waited(worker, now)
            worker.idle_since, worker.idle_cause = now, cause

    def end_idle(self, worker: Worker, now: float) -> None:
        """End the wait of `worker`, if it waits, with a span."""
        self._waited(worker, now)
        self._ends_idle(worker)

    def _waited(self, worker: Worker, now: float) -> None:
        if worker.idle_since is not None and now > worker.idle_since:
            self._span(
                worker.rank.rank, "wait", worker.idle_since, now, -1, {"cause": worker.idle_cause}
            )

    def _ends_idle(self, worker: Worker) -> None:
        worker.idle_since = None
        self.idle_workers.pop(worker.rank.rank, None)
