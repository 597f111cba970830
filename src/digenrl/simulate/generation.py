"""The generating side of the virtual run: who claims which task, and when a task moves.

Every decision is taken by `digenrl.schedule`: `queue` orders, `ClaimBook` owns; `declines`, `hands_over`, `swaps` and
`yields` choose.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from digenrl.schedule import ScheduleSpec, Task, queue
from digenrl.schedule.claims import Claim, ClaimBook, declines, hands_over, swaps, yields
from digenrl.simulate.virtual_cluster import Cluster, Rank


@dataclass(eq=False)
class Worker:
    """A rank as a generator of samples."""

    rank: Rank
    held: int = 0
    """Version of the weights."""
    book: ClaimBook | None = None
    claim: Claim | None = None
    task: Task | None = None
    remaining: int = 0
    """Denoising steps still to do."""
    began: float = 0.0
    free_at: float = 0.0
    """When the present task will be finished, undisturbed."""
    step_time: float = 0.0
    finish_time: float = 0.0
    next_boundary: float = 0.0
    """When the denoising step under way ends (hand-off only)."""
    token: int = 0
    """Events of an older token are void."""
    idle_since: float | None = None
    idle_cause: str = "startup"
    available: bool = False
    """It found nothing to claim and does nothing else: a task may be handed over to it."""
    dead: bool = False
    encoded: set[tuple[int, int]] = field(default_factory=set)
    generated: int = 0

    @property
    def busy(self) -> bool:
        return self.claim is not None


class Generation:
    """Books of claims and the workers.

    Args:
        spec: the schedule.
        cluster: durations.
        factor: rank -> factor on its next duration (jitter, stragglers).
        post: (time, kind, payload) -> None, the engine's event queue.
        span: (rank, stage, start, end, step, args) -> None.
    """

    def __init__(
        self,
        spec: ScheduleSpec,
        cluster: Cluster,
        last_step: int,
        factor: Callable[[int], float],
        post: Callable[..., None],
        span: Callable[..., None],
    ) -> None:
        self.spec, self.cluster, self.last_step = spec, cluster, last_step
        self._factor, self._post, self._span = factor, post, span
        self.workers = [Worker(rank) for rank in cluster.ranks]
        self.colocated = not cluster.rollouts
        self.members = [w for w in self.workers if math.isfinite(w.rank.step_seconds)]
        self.generators = [w for w in self.members if self.colocated or w.rank.role == "rollout"]
        self._books: dict[tuple[int, int], ClaimBook] = {}
        self._progress: dict[tuple[int, int, int], tuple[int, int]] = {}
        """(step, task, 0) -> (remaining steps, last owner) of suspended tasks."""
        self.made: list[tuple[int, int, int, int]] = []
        """(step, task, rank, version) of every finished task."""
        self.issued: set[tuple[int, int]] = set()
        steps = spec.denoise_steps
        self._task_seconds = {w.rank.rank: w.rank.task_seconds(steps) for w in self.members}
        self._sure = {
            w.rank.rank: sum(
                1 + int(self._task_seconds[w.rank.rank] / self._task_seconds[o.rank.rank]) for o in self.generators
            )
            for w in self.members
        }
        self.moves = 0

    def book(self, version: int, worker: Worker) -> ClaimBook:
        """The claims of a version's queue (of the rank's own part of it, when claims are static)."""
        part = worker.rank.rank if self.cluster.static_claims else -1
        if (version, part) not in self._books:
            tasks = queue(self.spec, version, self.last_step)
            if part >= 0:
                order = [w.rank.rank for w in self.generators].index(part)
                count = len(self.generators)
                tasks = tasks[len(tasks) * order // count : len(tasks) * (order + 1) // count]
            self._books[version, part] = ClaimBook(tasks)
        return self._books[version, part]

    def left(self, version: int, worker: Worker) -> int:
        """Tasks of the version that nobody runs."""
        return self.book(version, worker).unclaimed

    def offer(self, worker: Worker, versions: tuple[int, ...], now: float) -> str | None:
        """Let a free worker claim from the first of `versions` that has work. None when it did, else why not."""
        cause = "weights"
        worker.available = True
        for version in versions:
            book = self.book(version, worker)
            if not book.unclaimed:
                continue
            if worker in self.generators and not self.cluster.static_claims and self._declined(worker, book, now):
                cause = "tail"
                continue
            position = self._longest(book) if self._levelling(book) else None
            claim = book.claim(worker.rank.rank, position)
            if claim is not None:
                self._start(worker, book, claim, version, now)
                return None
        return cause

    def _levelling(self, book: ClaimBook) -> bool:
        return self.spec.handoff and self.spec.gap == 0 and self._fresh(book) <= len(self.generators)

    @staticmethod
    def _fresh(book: ClaimBook) -> int:
        """Tasks that nobody has begun."""
        return len(book.tasks) - book.next_position

    def _waiting(self, book: ClaimBook) -> tuple[list[int], list[int]]:
        """Positions that wait (of unclaimed ones only the next: they are equal), and their remaining steps."""
        positions = [*sorted([*book.suspended, *book.lost])]
        if book.next_position < len(book.tasks):
            positions.append(book.next_position)
        return positions, [self._remaining(book.tasks[p]) for p in positions]

    def _longest(self, book: ClaimBook) -> int:
        positions, remaining = self._waiting(book)
        return positions[max(range(len(positions)), key=lambda i: (remaining[i], -i))]

    def _remaining(self, task: Task) -> int:
        return self._progress.get((task.step, task.index, 0), (self.spec.denoise_steps, -1))[0]

    def _declined(self, worker: Worker, book: ClaimBook, now: float) -> bool:
        if book.unclaimed > self._sure[worker.rank.rank]:
            return False
        alive = [w for w in self.generators if not w.dead]
        if self.spec.handoff:  # a task can be taken over at any step, so the question is about steps
            steps = len(book.tasks) - book.next_position - 1
            left = sum(self._waiting(book)[1]) + max(0, steps) * self.spec.denoise_steps
            seconds = {w.rank.rank: w.rank.step_seconds for w in alive}
            free = {w.rank.rank: w.free_at for w in alive if w.busy}
            return declines(worker.rank.rank, now, seconds, free, left)
        seconds = {w.rank.rank: self._task_seconds[w.rank.rank] for w in alive}
        free = {w.rank.rank: w.free_at for w in alive if w.busy}
        return declines(worker.rank.rank, now, seconds, free, book.unclaimed)

    def _start(self, worker: Worker, book: ClaimBook, claim: Claim, version: int, now: float) -> None:
        task = book.tasks[claim.position]
        worker.available = False
        self.end_idle(worker, now)
        self.issued.add((task.step, task.group))
        rank, factor = worker.rank, self._factor(worker.rank.rank)
        begin = now
        if worker.held != version:
            begin += rank.adopt_seconds
            self._span(rank.rank, "adopt", now, begin, task.step, {"version": version})
            worker.held = version
        remaining, owner = self._progress.pop((task.step, task.index, 0), (self.spec.denoise_steps, -1))
        if owner not in (-1, rank.rank):
            self.moves += 1
            self._span(rank.rank, "send", begin, begin + self.cluster.move_seconds, task.step, {"task": task.index})
            begin += self.cluster.move_seconds
        if (task.step, task.group) not in worker.encoded:
            worker.encoded.add((task.step, task.group))
            self._span(rank.rank, "encode", begin, begin + rank.encode_seconds * factor, task.step, {})
            begin += rank.encode_seconds * factor
        worker.book, worker.claim, worker.task, worker.remaining, worker.began = book, claim, task, remaining, begin
        worker.step_time = rank.step_seconds * factor
        worker.finish_time = (rank.decode_seconds + rank.score_seconds) * factor
        worker.free_at = begin + remaining * worker.step_time + worker.finish_time
        worker.token += 1
        together = self.cluster.lockstep and rank.role == "trainer"  # one of them cannot leave the others' forwards
        if self.spec.handoff and remaining and not together:
            worker.next_boundary = begin + worker.step_time
            self._post(worker.next_boundary, "boundary", (rank.rank, worker.token))
        else:
            self._post(worker.free_at, "finish", (rank.rank, worker.token))

    def boundary(self, worker: Worker, now: float, wanted: bool, idle: list[Worker]) -> str:
        """A denoising step of `worker` ended. Returns what follows: go, finish, give (to an idle rank), swap,
        yield (for a faster rank to exchange) or stop.

        Args:
            wanted: a lending trainer whose fragment is ready.
            idle: workers that could take the task over.
        """
        worker.remaining -= 1
        if worker.remaining == 0:
            self._post(now + worker.finish_time, "finish", (worker.rank.rank, worker.token))
            return "finish"
        if wanted:
            return "stop"
        steps = [w.rank.step_seconds for w in idle]
        if steps and hands_over(worker.remaining, worker.step_time, steps, self.cluster.move_seconds):
            return "give"
        assert worker.book is not None
        if self._levelling(worker.book) and worker in self.generators:
            remaining = self._waiting(worker.book)[1]
            if swaps(worker.remaining, remaining, len(self.generators)) is not None:
                return "swap"
            others = [w for w in self.generators if w.busy and w is not worker and w.book is worker.book]
            running = [(w.remaining, w.step_time) for w in others if w.remaining]
            if not remaining and yields(worker.remaining, worker.step_time, running):
                return "yield"
            if self._leaves_step(worker, others, sum(remaining), now):
                return "yield"
        worker.next_boundary = now + worker.step_time
        self._post(worker.next_boundary, "boundary", (worker.rank.rank, worker.token))
        return "go"

    def _leaves_step(self, worker: Worker, others: list[Worker], waiting: int, now: float) -> bool:
        """The decline rule for single steps: the others end all that is left before `worker` ended its next step."""
        if not others or worker.book is None or worker.book.next_position < len(worker.book.tasks):
            return False
        alive = [w for w in self.generators if not w.dead]
        left = waiting + worker.remaining + sum(max(0, w.remaining - 1) for w in others)
        free = {w.rank.rank: w.next_boundary for w in others}
        return declines(
            worker.rank.rank, now, {w.rank.rank: w.step_time or w.rank.step_seconds for w in alive}, free, left
        )

    def suspend(self, worker: Worker, now: float) -> None:
        """Hand the task of `worker` back at a denoising-step boundary."""
        assert worker.book is not None
        assert worker.claim is not None
        assert worker.task is not None
        self.record(worker, now)
        worker.book.suspend(worker.claim)
        self._progress[worker.task.step, worker.task.index, 0] = (worker.remaining, worker.rank.rank)
        self._release(worker)

    def finish(self, worker: Worker, now: float) -> Task:
        """The task of `worker` is done; its samples are on their way."""
        assert worker.book is not None
        assert worker.claim is not None
        assert worker.task is not None
        task, worker.remaining = worker.task, 0
        self.record(worker, now)
        worker.book.done(worker.claim.position, worker.rank.rank, worker.claim.attempt)
        worker.generated += 1
        self.made.append((task.step, task.index, worker.rank.rank, task.version))
        self._release(worker)
        return task

    def die(self, worker: Worker, now: float) -> None:
        """`worker` stops; its task stays claimed until the death is noticed."""
        if worker.claim is not None:
            self.record(worker, now)
        worker.dead = True
        worker.token += 1
        worker.idle_since = None

    def notice(self, worker: Worker) -> None:
        """The death of `worker` is known: its tasks go back."""
        for book in self._books.values():
            book.owner_died(worker.rank.rank)
        worker.claim = worker.task = worker.book = None

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
        worker.claim = worker.task = worker.book = None
        worker.token += 1

    def idle(self, worker: Worker, now: float, cause: str) -> None:
        """`worker` has nothing to do, for `cause`."""
        if worker.idle_since is None:
            worker.idle_since, worker.idle_cause = now, cause
        elif worker.idle_cause != cause:
            self.end_idle(worker, now)
            worker.idle_since, worker.idle_cause = now, cause

    def end_idle(self, worker: Worker, now: float) -> None:
        """Close the wait of `worker`, if it waits."""
        if worker.idle_since is not None and now > worker.idle_since:
            self._span(worker.rank.rank, "wait", worker.idle_since, now, -1, {"cause": worker.idle_cause})
        worker.idle_since = None
