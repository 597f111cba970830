"""A rank that generates: claim a task, run it through the engine, ship the result to the trainers that own its cells.

The same `TaskRunner` serves rollout ranks, colocated ranks and trainers that lend a hand (TAG): a sample does not
depend on who made it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from digenrl.cluster.claims import Claims, Work, left_to_others
from digenrl.cluster.control import Control
from digenrl.data import PromptSampler
from digenrl.models.policy import Policy
from digenrl.record.span_log import SpanLog
from digenrl.rollout.engine import Generation, RolloutEngine
from digenrl.schedule import ScheduleSpec, Task
from digenrl.schedule.claims import Claim, hands_over
from digenrl.transport.cells import Placement, owned_positions, pack
from digenrl.transport.handoff import Suspended, pack_state, unpack_state
from digenrl.transport.link import Link
from digenrl.transport.weights import Arrivals, Version, adopt
from digenrl.transport.wire import Kind, Message
from digenrl.types import Trajectory

Interrupt = Callable[[Task, int], int | None]
"""Asked after every denoising step with (task, steps left): the rank that should finish the task, or None to go on."""


class TaskRunner:
    """Claims and runs generation tasks.

    Args:
        spec: the schedule.
        plan: the Strategy's `plan_tasks`: version -> its queue of tasks, in claim order.
        place: the Strategy's `place_timesteps`: (fragment, step) -> which trainer rank trains which cells.
        rank: this launch rank.
        trainers: number of trainer ranks.
        generators: ranks that generate by trade; a slow one leaves the last tasks to faster ones.
        split: divide every queue equally among the generators instead of claiming.
    """

    def __init__(
        self,
        spec: ScheduleSpec,
        plan: Callable[[int], tuple[Task, ...]],
        place: Callable[..., Placement],
        rank: int,
        trainers: int,
        engine: RolloutEngine,
        sampler: PromptSampler,
        control: Control,
        link: Link,
        spans: SpanLog,
        generators: range,
        split: bool = False,
    ) -> None:
        self._spec, self._plan, self._place = spec, plan, place
        self._rank, self._trainers, self._generators, self._split = rank, trainers, generators, split
        self._engine, self._sampler, self._control, self._link, self._spans = engine, sampler, control, link, spans
        self.claims = Claims(control, rank)
        self._held: dict[tuple[int, int], Claim] = {}
        """(step, index) -> claim of each task that this rank has begun and not shipped."""
        self.step_seconds = 0.0
        """Measured seconds of one denoising step on this rank; 0 before the first."""
        self._task_seconds = 0.0
        self._unshipped: deque[Future[None]] = deque()
        self.claims.announce(Work())

    def claim(self, version: int) -> Task | None:
        """The next task of the version's queue; None when all are claimed."""
        tasks = self._plan(version)
        claim = self.claims.take(version, tasks, self._part(tasks))
        if claim is None:
            return None
        task = tasks[claim.position]
        self._held[task.step, task.index] = claim
        return task

    def declines(self, version: int) -> bool:
        """Whether this free rank leaves what is left of the version's queue to ranks that end it earlier. Colocated
        ranks do so only where all is generated before anything is trained: else nobody knows when they are free."""
        if self._split or (self._rank < self._trainers and self._spec.gap):
            return False
        left = self.remaining(version)
        if left == 0:
            return False
        work = self.claims.working(self._generators)
        return left_to_others(self._spec, self._rank, version, self._spans.now(), work, left)

    def remaining(self, version: int) -> int:
        """Tasks of the version's queue (or of this rank's part of it) that nobody runs and nobody has finished."""
        tasks = self._plan(version)
        return self.claims.left(version, len(tasks), self._part(tasks))

    def _part(self, tasks: Sequence[Task]) -> range:
        """Positions of the queue that this rank may claim."""
        if not self._split:
            return range(len(tasks))
        part, parts = self._rank - self._generators.start, len(self._generators)
        return range(part * len(tasks) // parts, (part + 1) * len(tasks) // parts)

    def announce(self, version: int, group: int = -1, share: float = 0.0) -> None:
        """Tell the others what this rank does now: the last `share` of a task of `group`; group -1 = nothing."""
        until = self._spans.now() + share * self._task_seconds
        self.claims.announce(Work(version, self._task_seconds, self.step_seconds, group, until))

    def run(self, task: Task, stage: str = "generate", interrupt: Interrupt | None = None) -> None:
        """Generate one task and ship it, unless `interrupt` names another rank to finish it."""
        self._finish(self._engine.begin(task, self._sampler.batch(task.step)[task.group]), stage, interrupt)

    def resume(self, message: Message, interrupt: Interrupt | None = None) -> None:
        """Finish a task that another rank began, unless it has been given to somebody else since."""
        task, state, position, attempt = unpack_state(message, self._engine.policy.device)
        claim = self.claims.confirm(task.version, position, attempt)
        if claim is None:
            return
        self._held[task.step, task.index] = claim
        prompt = self._sampler.batch(task.step)[task.group]
        self._finish(Generation(task, prompt, state), "generate", interrupt)

    def pass_on(self, task: Suspended, heir: int) -> bool:
        """Hand a task that waits for this rank on to `heir`; False when the heir is lost (the task stays) or the task
        has been given to somebody else since."""
        if not self.claims.give(task.version, task.claim, heir):
            return False
        self._link.send(heir, task.message)
        return True

    def steps_left(self, task: Suspended) -> int:
        """Denoising steps that a waiting task still needs."""
        return self._spec.denoise_steps - task.next_step

    def idle_run(self, task: Task) -> None:
        """Make a task's forwards and throw the result away (sharded ranks move together)."""
        with self._spans.span("lend", step=task.step, discarded=True):
            self._denoise(self._engine.begin(task, self._sampler.batch(task.step)[task.group]), self._spans.now(), None)

    def settle(self, wait: bool = False) -> None:
        """Raise what went wrong in scoring or shipping of earlier tasks; with `wait`, also wait for those under way."""
        while self._unshipped and (wait or self._unshipped[0].done()):
            self._unshipped.popleft().result()

    def _finish(self, generation: Generation, stage: str, interrupt: Interrupt | None) -> None:
        task, spans = generation.task, self._spans
        self.settle()
        began = spans.now()
        share = self._engine.steps_left(generation) / self._spec.denoise_steps
        self.announce(task.version, task.group, share)
        with spans.span(stage, step=task.step, group=task.group, version=task.version, samples=task.samples) as facts:
            generation, heir = self._denoise(generation, began, interrupt)
            if heir is not None:
                facts["handed_to"] = heir
        claim = self._held.pop((task.step, task.index))
        if heir is None:
            with spans.span("decode", step=task.step, group=task.group):
                media = self._engine.decode(generation)
            seconds = spans.now() - began
            if share == 1.0:
                self._task_seconds = 0.5 * (seconds + (self._task_seconds or seconds))
            shipped: Future[None] = Future()
            self._unshipped.append(shipped)
            scored = self._engine.score(generation, media)
            scored.add_done_callback(lambda done: self._ship(task, claim, done, shipped, seconds))
        self.announce(task.version)
        if heir is not None:
            self._link.send(heir, pack_state(task, generation.state, claim))

    def _denoise(
        self, generation: Generation, began: float, interrupt: Interrupt | None
    ) -> tuple[Generation, int | None]:
        """The remaining steps, or those up to a hand-off and the rank that goes on."""
        first = generation.state.next_step
        while left := self._engine.steps_left(generation):
            done = generation.state.next_step - first
            if interrupt is not None and done and (heir := interrupt(generation.task, left)) is not None:
                task = generation.task
                if self.claims.give(task.version, self._held[task.step, task.index], heir):
                    return generation, heir
            generation = self._engine.advance(generation)
            self.step_seconds = (self._spans.now() - began) / (done + 1)
        return generation, None

    def _ship(
        self, task: Task, claim: Claim, scored: Future[Trajectory], shipped: Future[None], seconds: float
    ) -> None:
        """Send a scored trajectory to every trainer rank. Runs in the scorer's thread."""
        try:
            trajectory = scored.result()
            part = task.first_sample // self._spec.task_size
            place = partial(self._place, step=task.step)
            with self._spans.span("send", quiet=True, step=task.step, group=task.group):
                for rank in range(self._trainers):
                    positions = owned_positions(self._spec, place, rank, task.group, part)
                    self._link.send(rank, pack(trajectory, positions, claim, seconds))
            if (trouble := self._engine.reward_trouble()) is not None:
                self._control.request_stop(trouble)  # the step in progress is finished and saved before the run stops
            shipped.set_result(None)
        except BaseException as error:  # raised again by `settle`, in the thread that can act on it
            shipped.set_exception(error)


class RolloutWorker:
    """The life of a rollout rank: adopt a version, empty its queue, wait for the next one.

    With hand-off, a rank whose queue is empty announces itself, and a slower rank may pass it the rest of a task, a
    busy one the tasks that were handed to it and wait: trainers end their loans at one moment, see the same rollout
    rank free first, and all hand it their tasks.
    """

    def __init__(
        self,
        runner: TaskRunner,
        policy: Policy,
        control: Control,
        link: Link,
        spans: SpanLog,
        rank: int,
        peers: range,
        handoff: bool,
    ) -> None:
        self._runner, self._parameters = runner, policy.trained_parameters()
        self._control, self._link, self._spans = control, link, spans
        self._rank, self._peers = rank, peers
        self._interrupt: Interrupt | None = self._between_steps if handoff else None
        self._arrivals = Arrivals(policy.trainer_parameters())
        self._weights: deque[Version] = deque()
        self._suspended: deque[Suspended] = deque()
        self._announced = 0
        self._version = -1
        self._idle_since: float | None = None

    def run(self) -> None:
        """Work until a trainer says that the run is done."""
        while self._control.get("done") is None:
            self._control.check()
            self._receive(0.0)
            if self._recalled() or not self._work_once():
                if self._weights:
                    self._adopt()
                else:
                    self._wait()

    def _recalled(self) -> bool:
        """Whether an older version came back: a task of its queue lost its owner when nobody held it any more."""
        return bool(self._weights) and self._weights[0].number < self._version

    def _work_once(self) -> bool:
        """Run a suspended task, else the next of the queue; False when there is neither for this rank. A task of the
        next version waits until this rank has adopted that: its weights were published before it was begun."""
        if self._suspended and self._suspended[0].version <= self._version:
            self._end_wait("tail")
            self._runner.resume(self._suspended.popleft().message, self._interrupt)
            return True
        if self._version < 0 or self._runner.declines(self._version):
            return False
        task = self._runner.claim(self._version)
        if task is None:
            return False
        self._end_wait("tail")
        self._runner.run(task, interrupt=self._interrupt)
        return True

    def _adopt(self) -> None:
        """Take the next version into use."""
        self._end_wait("startup" if self._version < 0 else "weights")
        weights = self._weights.popleft()
        self._version = weights.number
        with self._spans.span("adopt", version=self._version, digest=weights.digest):
            adopt(self._parameters, weights)
        self._runner.announce(self._version)

    def _wait(self) -> None:
        """A moment without work; with hand-off, this rank says that it is idle, and how fast it is."""
        if self._idle_since is None:
            self._idle_since = self._spans.now()
            self._spans.announce("wait startup" if self._version < 0 else "wait weights")
            if self._interrupt is not None and self._runner.step_seconds:
                self._announced += 1
                text = f"{self._version}:{self._announced}:{self._runner.step_seconds:.6f}"
                self._control.set(f"idle/{self._rank}", text)
        self._runner.settle()
        self._receive(0.2)

    def _end_wait(self, cause: str) -> None:
        """Something came: book the wait, if there was one."""
        if self._idle_since is None:
            return
        self._spans.add("wait", self._idle_since, self._spans.now(), cause=cause)
        self._idle_since = None
        if self._interrupt is not None:
            self._control.set(f"idle/{self._rank}", "")

    def _receive(self, timeout: float) -> None:
        """Sort arriving messages; wait up to `timeout` seconds for the first."""
        while (message := self._link.receive(timeout)) is not None:
            timeout = 0.0
            if message.kind is Kind.WEIGHTS:
                if (version := self._arrivals.add(message)) is not None:
                    self._weights.append(version)
            elif message.kind is Kind.STATE:
                self._suspended.append(Suspended.of(message, self._rank))

    def _between_steps(self, task: Task, steps_left: int) -> int | None:
        """Who should finish `task`. Tasks that wait behind it go to idle ranks that would end them earlier."""
        self._receive(0.0)
        while self._suspended:
            waiting = self._suspended[-1]
            peer = self._faster_peer(waiting.version, self._runner.steps_left(waiting), waits=steps_left)
            if peer is None or not self._runner.pass_on(waiting, peer):
                break
            self._suspended.pop()
        return self._faster_idle_peer(task, steps_left)

    def _faster_idle_peer(self, task: Task, steps_left: int) -> int | None:
        """An idle rank that would finish the task a step earlier than this one; or None.

        Only tasks of the step in progress may travel (see `handoff`), and only when no task is left to claim.
        """
        if task.step != self._version or self._runner.remaining(self._version):
            return None
        return self._faster_peer(self._version, steps_left)

    def _faster_peer(self, version: int, steps: int, waits: int = 0) -> int | None:
        """A rank that waits with `version` and would end `steps` denoising steps before this one, which has `waits` to
        do first; reserved by an atomic add."""
        own = self._runner.step_seconds
        for peer in self._peers:
            note = self._control.get(f"idle/{peer}") if peer != self._rank else None
            if not note:
                continue
            held, number, seconds = note.split(":")
            # The move is taken to cost one of our own steps, so the heir must save more than that.
            sooner = hands_over(steps, own, [float(seconds)], move_seconds=(1 - waits) * own)
            if int(held) == version and sooner and self._control.claim(f"take/{peer}/{number}") == 0:
                return peer
        return None
