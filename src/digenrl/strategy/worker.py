"""A rank that generates: claim a task, run it through the engine, ship the result to the trainers
that own its cells.

    control store --claims, notes of the others--> SchedulePolicy --take, lend, who goes on--> TaskRunner
    TaskRunner: denoise -> decode -> score (in the scorer's thread) --cells, rewards--> trainers
    trainers --weights--> RolloutWorker: adopted between two tasks      (it waits for them when its queue is empty)
    a rollout that leaves --suspended task--> RolloutWorker                           (before its own next claim)

The same `TaskRunner` serves rollout ranks, colocated ranks and trainers that lend a hand (TAG): a
sample does not depend on who made it.
"""  # noqa: E501

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack

from digenrl.cluster.claims import StoredClaims, announce, digest_of, work_of
from digenrl.cluster.control import Control
from digenrl.cluster.world import World
from digenrl.data import PromptSampler
from digenrl.models.policy import Policy
from digenrl.record.span_log import SpanLog
from digenrl.rollout.engine import Generation, RolloutEngine
from digenrl.schedule import ScheduleSpec, Task
from digenrl.schedule.claims import NOBODY, Claim, Claims, queue_part
from digenrl.schedule.policy import SchedulePolicy
from digenrl.schedule.ranks import Work
from digenrl.strategy.evaluating import EvaluationWorker
from digenrl.strategy.hooks import Fragment
from digenrl.transport.cells import Placement, owned_positions, pack
from digenrl.transport.link import Link
from digenrl.transport.suspended import Suspended, pack_state
from digenrl.transport.weights import Arrivals, Version, WeightsError, adopt, publish
from digenrl.transport.wire import Message, MessageKind
from digenrl.types import Prompt, Trajectory

Interrupt = Callable[[Task], int | None]
"""Asked after every denoising step of a task: the rank that should finish the task, NOBODY to give
it up, or None to go on."""


_NOTICED_S = 0.001
"""Seconds below which a wait for the scorer is not recorded."""


class TaskRunner:
    """Claims and runs generation tasks.

    Args:
        spec: the schedule.
        world: this rank's place.
        policy: decides which tasks this rank takes.
        plan: the Strategy's `plan_tasks`: version -> its queue of tasks, in claim order.
        place: the Strategy's `place_timesteps`: (fragment, step) -> which trainer rank trains which
            cells.
        task_seconds: that a task is expected to take, where the others do not know it; 0 = nobody
            knows.
    """

    def __init__(
        self,
        spec: ScheduleSpec,
        world: World,
        policy: SchedulePolicy,
        plan: Callable[[int], tuple[Task, ...]],
        place: Callable[[Fragment, int], Placement],
        engine: RolloutEngine,
        sampler: PromptSampler,
        control: Control,
        link: Link,
        spans: SpanLog,
        task_seconds: float = 0.0,
    ) -> None:
        self._spec, self._world, self.policy, self._plan, self._place = (
            spec,
            world,
            policy,
            plan,
            place,
        )
        self._engine, self._sampler, self._control, self._link, self._spans = (
            engine,
            sampler,
            control,
            link,
            spans,
        )
        self.claims = Claims(StoredClaims(control), world.rank)
        self._held: dict[
            tuple[int, int], Claim
        ] = {}  # touched by this thread alone, so it needs no lock
        """(step, index) -> claim of each task that this rank has begun and not shipped."""
        self._task_seconds = task_seconds
        self._unshipped: deque[Future[None]] = deque()
        self._withdrawn = False
        self._tell(Work())

    # ---- claims

    def see(self) -> None:
        """Show the policy what every other rank does now. While some are still starting, nothing is
        known of any."""
        for rank, work in work_of(self._control, range(self._world.size)).items():
            if rank != self._world.rank:
                self.policy.saw_rank(rank, work)

    def withdraw(self) -> None:
        """Stop counting as a rank that takes tasks, because this rank leaves."""
        self._withdrawn = True
        announce(self._control, self._world.rank, None)

    def successor(self, task: Task, version: int) -> int | None:
        """Return the rollout that goes on with a task of this rank, which leaves; None: the task
        begins anew."""
        self.see()
        return self.policy.successor(self._world.rank, version, task.step, self._spans.now())

    def left(self, version: int) -> int:
        """Tasks of the version's queue (or of this rank's part of it) that nobody runs and nobody
        has finished. Sharded trainers generate together until all their parts are empty."""
        tasks, roles = len(self._plan(version)), self.policy.roles
        if not (roles.split and roles.lockstep):
            return self.claims.left(version, tasks, self._part(tasks))
        parts = (
            queue_part(tasks, number, len(roles.generators))
            for number in range(len(roles.generators))
        )
        return sum(self.claims.left(version, tasks, part) for part in parts)

    def takes(self, version: int) -> bool:
        """Whether this free rank takes a task of the version's queue now."""
        left = self.left(version)
        if left and not self.policy.many_left(self._world.rank, left):
            self.see()
        return self.policy.takes(self._world.rank, version, left, self._spans.now())

    def claim(self, version: int) -> Task | None:
        """Claim the next task of the version's queue; None when all are claimed."""
        tasks = self._plan(version)
        claim = self.claims.take(version, tasks, self._part(len(tasks)))
        if claim is None:
            return None
        task = tasks[claim.position]
        self._held[task.step, task.index] = claim
        return task

    def _part(self, tasks: int) -> range:
        """Positions of the queue that this rank may claim."""
        roles = self.policy.roles
        if not roles.split:
            return range(tasks)
        return queue_part(tasks, self._world.rank - roles.generators.start, len(roles.generators))

    def announce(self, version: int, task: Task | None = None, share: float = 0.0) -> None:
        """Tell the others what this rank does now: the last `share` of `task`, or nothing."""
        step, group = (task.step, task.group) if task is not None else (-1, -1)
        until = self._spans.now() + share * self._task_seconds
        self._tell(Work(version, self._task_seconds, step, group, until))

    def _tell(self, work: Work) -> None:
        if not self._withdrawn:
            announce(self._control, self._world.rank, work)
        self.policy.saw_rank(self._world.rank, work)

    # ---- tasks

    def run(self, task: Task, stage: str = "generate", interrupt: Interrupt | None = None) -> None:
        """Generate one task and ship it, unless `interrupt` names another rank to finish it."""
        self._finish(self._engine.begin(task, self._prompt(task)), stage, interrupt)

    def resume(self, suspended: Suspended, interrupt: Interrupt | None = None) -> None:
        """Finish a task that another rank began, unless it has been given to somebody else
        since."""
        task, claim = suspended.task, suspended.claim
        confirmed = self.claims.confirm(task.version, claim.position, claim.attempt)
        if confirmed is not None:
            self._held[task.step, task.index] = confirmed
            state = suspended.state(self._engine.policy.device)
            self._finish(Generation(task, self._prompt(task), state), "generate", interrupt)

    def forward(self, suspended: Suspended) -> None:
        """Give a task that waits for this rank, which leaves, to its successor. Without one, and
        where the successor is lost, the task goes back when this rank has left."""
        version = suspended.task.version
        receiver = self.successor(suspended.task, version)
        if receiver is not None and self.claims.give(version, suspended.claim, receiver):
            self._link.send(receiver, suspended.message)

    def run_discarded(self, task: Task, interrupt: Interrupt) -> None:
        """Make a task's forwards and throw the result away: sharded ranks move together."""
        with self._spans.span("lend", step=task.step, discarded=True):
            self._denoise(
                self._engine.begin(task, self._prompt(task)), self._spans.now(), interrupt
            )

    def settle(self, wait: bool = False) -> None:
        """Raise what went wrong in scoring or shipping of earlier tasks; with `wait`, also wait for
        those under way."""
        while self._unshipped and (wait or self._unshipped[0].done()):
            self._unshipped.popleft().result()

    def _prompt(self, task: Task) -> Prompt:
        return self._sampler.batch(task.step)[task.group]

    def _finish(self, generation: Generation, stage: str, interrupt: Interrupt | None) -> None:
        task, spans = generation.task, self._spans
        self.settle()
        began = spans.now()
        share = self._engine.steps_left(generation) / self._spec.denoise_steps
        self.announce(task.version, task, share)
        with spans.span(
            stage, step=task.step, group=task.group, version=task.version, samples=task.samples
        ) as facts:
            generation, receiver = self._denoise(generation, began, interrupt)
            if receiver is not None and receiver != NOBODY:
                facts["handed_to"] = receiver
        claim = self._held.pop((task.step, task.index))
        if receiver == NOBODY:
            return self.claims.release(task.version, claim)
        if receiver is not None:
            self.announce(task.version)
            self._link.send(receiver, pack_state(task, generation.state, claim))
            return None
        with spans.span("decode", step=task.step, group=task.group):
            media = self._engine.decode(generation)
        seconds = spans.now() - began
        if share == 1.0:
            self._task_seconds = 0.5 * (seconds + (self._task_seconds or seconds))
        shipped: Future[None] = Future()
        self._unshipped.append(shipped)
        handed = spans.now()
        with spans.progress.stage("wait reward"):  # inline, the suite's own mark lies inside
            scored = self._engine.score(generation, media)
        if self._engine.scores_inline:
            spans.add("score", handed, spans.now(), step=task.step, group=task.group)
        elif (
            waited := spans.now()
        ) - handed > _NOTICED_S:  # as many tasks wait for scores as `reward.pending` allows
            spans.add("wait", handed, waited, cause="reward", step=task.step)
        scored.add_done_callback(lambda done: self._ship(task, claim, done, shipped, seconds))
        self.announce(task.version)
        return None

    def _denoise(
        self, generation: Generation, began: float, interrupt: Interrupt | None
    ) -> tuple[Generation, int | None]:
        """Make the remaining steps, or those until the task is suspended; return also the rank that
        goes on then."""
        task, first = generation.task, generation.state.next_step
        while self._engine.steps_left(generation):
            done = generation.state.next_step - first
            # The first step is never given up: a task that moved on without progress could move for
            # ever.
            receiver = interrupt(task) if interrupt is not None and done else None
            if receiver == NOBODY or (receiver is not None and self._give(task, receiver)):
                return generation, receiver
            generation = self._engine.advance(generation)
            self._spans.progress.tick()
        return generation, None

    def _give(self, task: Task, receiver: int) -> bool:
        return self.claims.give(task.version, self._held[task.step, task.index], receiver)

    def _ship(
        self,
        task: Task,
        claim: Claim,
        scored: Future[Trajectory],
        shipped: Future[None],
        seconds: float,
    ) -> None:
        """Send a scored trajectory to every trainer rank. Runs in the scorer's thread."""
        try:
            trajectory = scored.result()
            part = task.first_sample // self._spec.task_size

            def place(fragment: Fragment) -> Placement:
                return self._place(fragment, task.step)

            lockstep = self.policy.roles.lockstep
            with self._spans.span("send", quiet=True, step=task.step, group=task.group):
                for rank in range(self._world.trainers):
                    positions = owned_positions(self._spec, place, rank, task.group, part, lockstep)
                    self._link.send(rank, pack(trajectory, positions, claim, seconds))
            if (trouble := self._engine.reward_trouble()) is not None:
                self._control.request_stop(
                    trouble
                )  # the step in progress is finished and saved before the run stops
            shipped.set_result(None)
        except BaseException as error:  # raised again by `settle`, in the thread that can act on it
            shipped.set_exception(error)


class _Leaving(Exception):
    """Raised when this rank leaves in the middle of a piece, which another rank then makes."""


class RolloutWorker:
    """The life of a rollout rank: adopt a version, empty its queue, take part in its evaluation,
    wait for the next one.

    Suspended tasks come from rollouts that leave. A rank that shall leave gives all of its tasks
    away, at the next denoising step.

    Args:
        leave: set when this rank shall leave.
    """

    def __init__(
        self,
        world: World,
        runner: TaskRunner,
        model: Policy,
        control: Control,
        link: Link,
        spans: SpanLog,
        leave: threading.Event,
        evaluation_worker: EvaluationWorker,
    ) -> None:
        self._evaluation_worker = evaluation_worker
        self._runner, self._world, self._leave = runner, world, leave
        self._rank = world.rank
        self._parameters = model.trained_parameters()
        self._control, self._link, self._spans = control, link, spans
        self._arrivals = Arrivals(self._parameters)
        self._weights: deque[Version] = deque()
        self._suspended: deque[Suspended] = deque()
        self._asked: list[tuple[int, int]] = []
        """(rank that joined, the least version that it wants)."""
        self._source: int | None = None
        """Rank that was asked for weights after this rank joined, or None."""
        self._version = -1
        self._idle_since: float | None = None
        self._idle = ExitStack()
        """Stage of the wait in progress, for heartbeats."""

    def run(self) -> None:
        """Work until a trainer says that the run is done, or until this rank shall leave."""
        with self._idle:
            while self._control.get("done") is None:
                if self._leave.is_set():
                    return self._hand_in()
                self._control.check()
                self._receive(0.0)
                if self._recalled() or not self._work_once():
                    if self._weights:
                        self._adopt()
                    elif not self._evaluate_once():
                        self._wait()
        return None

    def _hand_in(self) -> None:
        """Leave: send what is finished, and give away the suspended tasks that wait here."""
        self._runner.withdraw()
        self._receive(0.0)
        for suspended in self._suspended:
            self._runner.forward(suspended)
        self._runner.settle(wait=True)

    def _recalled(self) -> bool:
        """Whether an older version came back: a task of its queue lost its owner when nobody held
        it any more."""
        return bool(self._weights) and self._weights[0].number < self._version

    def _work_once(self) -> bool:
        """Run a suspended task, else the next of the queue; False when there is neither for this
        rank. A task of the next version waits until this rank has adopted that: its weights were
        published before it was begun."""
        if self._suspended and self._suspended[0].task.version <= self._version:
            self._end_wait("tail")
            self._runner.resume(self._suspended.popleft(), self._between_steps)
            return True
        if self._version < 0 or not self._runner.takes(self._version):
            return False
        task = self._runner.claim(self._version)
        if task is None:
            return False
        self._end_wait("tail")
        self._runner.run(task, interrupt=self._between_steps)
        return True

    def _evaluate_once(self) -> bool:
        """Make a piece of the evaluation of the version in use; False when there is none for this
        rank."""
        claim = self._evaluation_worker.claim(self._version)
        if claim is None:
            return False
        self._end_wait("tail")
        with self._spans.stage("wait reward"):  # a scorer may not be asked by two threads at once
            self._runner.settle(wait=True)
        try:
            with self._spans.span("eval", step=self._version, piece=claim.position):
                piece = self._evaluation_worker.make(
                    self._version, claim.position, self._between_steps_of_evaluation
                )
                self._link.send(0, piece)
        except _Leaving:
            self._evaluation_worker.release(self._version, claim)
        return True

    def _between_steps_of_evaluation(self) -> None:
        self._spans.progress.tick()
        self._control.check()
        self._receive(0.0)
        if self._leave.is_set():
            raise _Leaving

    def _adopt(self) -> None:
        """Take the next version into use."""
        self._end_wait("startup" if self._version < 0 else "weights")
        weights = self._weights.popleft()
        self._version = weights.number
        # Only here, between two tasks: a trajectory under way keeps its version (I7).
        with self._spans.span("adopt", version=self._version, digest=weights.digest):
            adopt(self._parameters, weights)
        self._evaluation_worker.adopted(self._version)
        self._runner.announce(self._version)
        self._serve()

    def _wait(self) -> None:
        """Spend a moment without work."""
        if self._idle_since is None:
            self._idle_since = self._spans.now()
            self._idle.enter_context(
                self._spans.stage("wait startup" if self._version < 0 else "wait weights")
            )
        if self._version < 0 and self._world.joined:
            self._ask()
        self._runner.settle()
        self._receive(0.2)

    def _end_wait(self, cause: str) -> None:
        """End the wait in progress, if there is one, and record its cause."""
        if self._idle_since is not None:
            self._idle.close()
            self._spans.add("wait", self._idle_since, self._spans.now(), cause=cause)
            self._idle_since = None

    def _receive(self, timeout: float) -> None:
        """Sort arriving messages; wait up to `timeout` seconds for the first."""
        while (message := self._link.receive(timeout)) is not None:
            timeout = 0.0
            if message.kind is MessageKind.WEIGHTS:
                version = self._arrivals.add(message)
                if version is not None and version.number < 0:
                    self._evaluation_worker.hold(version)
                elif version is not None and (message.meta["sender"] == 0 or self._wanted(version)):
                    self._weights.append(version)
            elif message.kind is MessageKind.STATE:
                self._suspended.append(Suspended.of(message, self._rank))
            elif message.kind is MessageKind.ASK:
                self._asked.append((int(message.meta["rank"]), int(message.meta["version"])))
        if self._asked:
            self._serve()

    # ---- who joins has asked who is there

    def _ask(self) -> None:
        """Ask the nearest rank that holds weights for them: a rollout of this machine, else any,
        else trainer 0. Once; again where who was asked is lost. Versions that are published from
        now on come by themselves."""
        newest = self._control.get("version")
        if newest is None or (
            self._source is not None and self._source not in self._control.lost_ranks()
        ):
            return
        works = work_of(self._control, self._world.rollout_ranks)
        holders = [rank for rank, work in works.items() if work is not None and work.version >= 0]
        own, *hosts = (
            (address or "").rpartition(":")[0]
            for address in self._control.get_all(
                [f"address/{rank}" for rank in (self._rank, *holders)]
            )
        )
        near = [rank for rank, host in zip(holders, hosts, strict=True) if host == own]
        self._source = next(iter((*near, *holders)), 0)
        self._link.send(
            self._source, Message(MessageKind.ASK, {"rank": self._rank, "version": int(newest)}, {})
        )

    def _serve(self) -> None:
        """Send the version in use to those that wait for it; not while a piece of an evaluation has
        others in use."""
        if self._evaluation_worker.away:
            return
        served = [(rank, version) for rank, version in self._asked if version <= self._version]
        for rank, _ in served:
            with self._spans.span("send", quiet=True, version=self._version):
                publish(
                    self._version,
                    self._parameters,
                    self._link,
                    {rank: ()},
                    lambda digest: None,
                    sender=self._rank,
                )
        self._asked = [asked for asked in self._asked if asked not in served]

    def _wanted(self, version: Version) -> bool:
        """Whether weights that another rollout has sent are new here.

        Raises:
            WeightsError: the digest is not that of the version that the trainers published.
        """
        if (published := digest_of(self._control, version.number)) not in (None, version.digest):
            raise WeightsError(
                f"weights of version {version.number} came with digest {version.digest} from a "
                f"rollout; the trainers published {published}."
            )
        return version.number > max([self._version, *(weights.number for weights in self._weights)])

    def _between_steps(self, task: Task) -> int | None:
        """Return the rank that finishes `task` if this rank leaves, or None to go on."""
        if self._leave.is_set():
            self._runner.withdraw()
            receiver = self._runner.successor(task, self._version)
            return NOBODY if receiver is None else receiver
        self._receive(0.0)
        return None
