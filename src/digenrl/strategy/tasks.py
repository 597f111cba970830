"""The tasks of a rank: claiming, generating and shipping them, and lending (TAG).

    control store --claims, notes of the others--> SchedulePolicy --take, lend, who goes on--> TaskRunner
    TaskRunner: denoise -> decode -> score (in the scorer's thread) --cells, rewards--> trainers
    Lending, on a trainer that waits for a fragment: train it, wait, or run a task with the published weights

The same `TaskRunner` serves rollout ranks, colocated ranks and trainers that lend: a sample does
not depend on the rank that made it. Every move of a waiting trainer is the policy's; `Lending`
shows the policy what there is to see, and carries the moves out.
"""  # noqa: E501

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

from torch import Tensor

from digenrl.cluster.claims import StoredClaims, announce, work_of
from digenrl.cluster.control import Control
from digenrl.cluster.world import World
from digenrl.data import PromptSampler
from digenrl.models.policy import Policy
from digenrl.record.span_log import SpanLog
from digenrl.rollout.engine import Generation, RolloutEngine
from digenrl.schedule import ScheduleSpec, Task, fragments
from digenrl.schedule.claims import NOBODY, Claim, Claims, queue_part
from digenrl.schedule.order import later_fragments
from digenrl.schedule.policy import ASK, LEND, TRAIN, SchedulePolicy
from digenrl.schedule.ranks import Work
from digenrl.strategy.setup import Ties
from digenrl.strategy.shared import Fragment, Learner
from digenrl.strategy.stop_vote import Agreement, StopVote
from digenrl.strategy.stream import Inbox
from digenrl.transport.cells import Placement, StepBoard, owned_positions, pack
from digenrl.transport.link import Link
from digenrl.transport.suspended import Suspended, pack_state
from digenrl.transport.weights import exchanged, publish
from digenrl.types import Prompt, Trajectory

Interrupt = Callable[[Task], int | None]
"""Asked after every denoising step of a task: the rank that should finish the task, NOBODY to give
it up, or None to go on."""


_POLL_S = 0.2
"""Longest wait for a message before the trainer looks at everything again."""
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
        self._spec, self._world, self.policy = spec, world, policy
        self._plan, self._place, self._engine, self._sampler = plan, place, engine, sampler
        self._control, self._link, self._spans = control, link, spans
        self.claims = Claims(StoredClaims(control), world.rank)
        self._held: dict[tuple[int, int], Claim] = {}
        """(step, index) -> claim of each task that this rank has begun and not shipped. A single
        thread touches these claims."""
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
        left, head = self.left(version), self.claims.head_left(version)
        if left and (left == head or not self.policy.many_left(self._world.rank, left)):
            self.see()
        return self.policy.takes(self._world.rank, version, left, self._spans.now(), head)

    def claim(self, version: int) -> Task | None:
        """Claim the next task of the version's queue; None when all are claimed."""
        tasks = self._plan(version)
        claim = self.claims.take(version, tasks, self._part(len(tasks)), self._world.is_trainer)
        if claim is None:
            return None
        task = tasks[claim.position]
        self._held[task.step, task.index] = claim
        return task

    def open(self, version: int) -> None:
        """Decide how many tasks of a new version's queue trainers claim before anybody (TAG)."""
        if self._spec.tag:
            facts = self.seen(version, later_fragments(self._spec, -1))
            self.claims.begin_behind(version, self.policy.opens(*facts))

    def seen(
        self, step: int, pending: Sequence[Fragment]
    ) -> tuple[int, int, Sequence[Fragment], tuple[int, int], float]:
        """Show the policy the other ranks. Return the arguments of its search."""
        self.see()
        left = (self.left(step - 1), self.left(step))
        return self._world.rank, step, pending, left, self._spans.now()

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
            self._denoise(self._engine.begin(task, self._prompt(task)), interrupt)

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
        took: list[float] = []
        share = self._engine.steps_left(generation) / self._spec.denoise_steps
        self.announce(task.version, task, share)
        where: dict[str, Any] = {"took": took.append, "step": task.step, "group": task.group}
        with spans.span(stage, version=task.version, samples=task.samples, **where) as facts:
            generation, receiver = self._denoise(generation, interrupt)
            if receiver is not None and receiver != NOBODY:
                facts["handed_to"] = receiver
        claim = self._held.pop((task.step, task.index))
        if receiver == NOBODY:
            return self.claims.release(task.version, claim)
        if receiver is not None:
            self.announce(task.version)
            self._link.send(receiver, pack_state(task, generation.state, claim))
            return None
        with spans.span("decode", **where):
            media = self._engine.decode(generation)
        shipped: Future[None] = Future()
        self._unshipped.append(shipped)
        handed = spans.now()
        with spans.progress.stage("wait reward"):  # inline, the suite's own mark lies inside
            scored = self._engine.score(generation, media)
        spans.read()  # scoring begins with a copy of the media, before which all was done
        seconds = sum(took)
        if share == 1.0:
            self._task_seconds = 0.5 * (seconds + (self._task_seconds or seconds))
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
        self, generation: Generation, interrupt: Interrupt | None
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


class PublishedCopy:
    """Copy of the published adapter beside the one in training, for trainers that lend between
    updates (I6).

    Only replicas with an adapter keep one: a copy of a whole model would not fit, and a sharded one
    would have to be gathered. The others lend before the first update alone.
    """

    def __init__(self, policy: Policy, learner: Learner, spec: ScheduleSpec, sharding: str) -> None:
        self._learner = learner
        self._parameters = policy.adapter.trained_parameters()
        whole = sum(parameter.numel() for parameter in policy.transformer.parameters())
        adapter = sum(parameter.numel() for parameter in self._parameters.values()) < whole
        self.kept = spec.tag and spec.updates_per_batch > 1 and sharding == "ddp" and adapter
        self._tensors: dict[str, Tensor] = {}

    def keep(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy `tensors`, which are the published version from now on."""
        if self.kept:
            self._tensors = {
                name: tensors[name].detach().to(parameter, copy=True)
                for name, parameter in self._parameters.items()
            }

    def in_use(self, updates_done: int) -> AbstractContextManager[None]:
        """Return a context in which the policy holds the published version; afterwards it holds its
        own weights, bit by bit (I6)."""
        if updates_done == 0:
            return self._learner.rollout_weights()
        return exchanged(self._parameters, self._tensors)


class Lending:
    """Waits for fragments, and lends in between.

    Args:
        runner: generates tasks.
        inbox: takes messages while this trainer waits.
        published: the published weights, which every lent task uses.
        agreement: trainer 0's choices, where trainers move together.
    """

    def __init__(
        self,
        ties: Ties,
        runner: TaskRunner,
        inbox: Inbox,
        published: PublishedCopy,
        agreement: Agreement,
        stop_vote: StopVote,
    ) -> None:
        spec, world = ties.setup.spec, ties.setup.world
        self._spec, self._world, self._runner, self._policy = spec, world, runner, runner.policy
        self._inbox, self._published, self._agreement = inbox, published, agreement
        self._state, self._hooks, self._stop_vote = ties.state, ties.hooks, stop_vote
        self._control, self._link, self._spans = ties.control, ties.link, ties.spans
        self._stage = "lend" if world.rollouts else "generate"
        chooses = spec.tag or not world.rollouts
        self._together = runner.policy.roles.lockstep and chooses
        """Forwards are collectives, and trainers may generate, or choose a fragment: all of them
        must do so at once."""
        self._recalled = 0
        self._lost: frozenset[int] = frozenset()

    def next_fragment(self, board: StepBoard, update: int, pending: Sequence[Fragment]) -> Fragment:
        """Wait for a fragment of `pending` that can be trained now, and return it.

        Sharded trainers that may generate move together, since their every forward is a collective:
        rank 0 decides (train this fragment, or lend one round), and the others follow.
        """
        if not self._together:
            while (fragment := self._wait(board, update, pending)) is None:
                self._lend(board.step, update)
            return fragment
        while True:
            first = self._wait(board, update, pending) if self._world.rank == 0 else None
            self._stop_vote.begin(self._inbox.receive)
            choice = self._agreement.choose(-1 if first is None else pending.index(first))
            if choice >= 0:
                self._wait_for_cells(board, pending[choice])
                return pending[choice]
            self._lend(board.step, update)

    # ---- waiting

    def _wait(self, board: StepBoard, update: int, pending: Sequence[Fragment]) -> Fragment | None:
        """Wait. Return the fragment to train, or None as soon as this trainer should generate a
        task."""
        first = update == 0 and len(pending) == len(fragments(self._spec, update))
        wait = self._spans.span(
            "wait", cause="first_fragment" if first else "tail", step=board.step
        )
        waited = False
        with ExitStack() as span:
            while True:
                while self._inbox.receive(0.0):
                    pass
                self._spans.read()  # the search below asks what training took
                self._see_losses()
                fragment = self._cut(board, pending)
                move = self._move(board, update, pending, fragment)
                if move in (TRAIN, LEND):
                    return fragment if move == TRAIN else None
                if not waited:
                    waited = True
                    span.enter_context(wait)
                self._recall(board.step)
                self._inbox.receive(_POLL_S)
                self._runner.settle()
                self._stop_vote.check()

    def _cut(self, board: StepBoard, pending: Sequence[Fragment]) -> Fragment | None:
        """Return the fragment that could be trained now. Trainers that move together need one that
        all of them hold: a rollout may have died when it had sent its results to some of them."""
        fragment = self._hooks.cut_fragment(pending, board)
        if fragment is None or not (self._together and self._world.rollouts):
            return fragment
        held = partial(self._runner.claims.held_by, trainers=self._world.trainers)
        return (
            fragment
            if all(held(version, claim.position) for version, claim in board.made_under(fragment))
            else None
        )

    def _move(
        self, board: StepBoard, update: int, pending: Sequence[Fragment], fragment: Fragment | None
    ) -> str:
        """Return the policy's move. Ask the search first if the policy wants that."""
        facts = (
            self._world.rank,
            update,
            pending,
            fragment,
            len(board.completed),
            self._runner.left(board.step),
        )
        move = self._policy.next_move(*facts)
        if move != ASK:
            return move
        rounds = self._hooks.on_bubble(board, [*pending, *later_fragments(self._spec, update)])
        return self._policy.next_move(*facts, rounds)

    def _see_losses(self) -> None:
        """Show the policy that a rank is gone, which may leave its tasks to the trainers."""
        if self._world.rollouts and (lost := self._control.lost_ranks()) != self._lost:
            self._lost = lost
            self._runner.see()

    def _wait_for_cells(self, board: StepBoard, fragment: Fragment) -> None:
        """Wait until this rank holds every cell that rank 0 held when it chose `fragment`."""
        needed = tuple(range(self._spec.prompts)) if self._spec.gap == 0 else fragment
        with self._spans.span("wait", cause="straggler", step=board.step):
            while not board.is_complete(needed):
                self._inbox.receive(_POLL_S)
                self._stop_vote.check()

    # ---- generating

    def _lend(self, step: int, update: int) -> None:
        """Generate one task with the published weights. A loan that has begun runs to its end.
        Taking the weights up and putting them away is measured."""
        between = self._stop_vote.begin if self._together else self._stop_vote.between_steps
        task, now = self._runner.claim(step), self._spans.now
        if task is None:
            if self._together:  # a task that is thrown away keeps the collectives in step
                self._runner.run_discarded(self._hooks.plan_tasks(step)[-1], lambda _: between())
            return
        began = now()
        with self._published.in_use(update):
            loaned = now()
            self._runner.run(task, self._stage, lambda _: between())
            done = now()
        if self._world.rollouts:
            switch = ((loaned - began) + (now() - done)) / 2
            self._policy.measured("switch", self._world.rank, switch)

    def predicted_end(self, step: int) -> float | None:
        """Return the second of the run's clock at which RL step `step` should end. None before
        costs are known."""
        return self._policy.predicted_end(*self._runner.seen(step, later_fragments(self._spec, -1)))

    def rounds(self, board: StepBoard, pending: Sequence[Fragment]) -> int:
        """Return how many tasks this idle trainer should generate now: the policy's search, with
        what is seen at present."""
        facts, head = self._runner.seen(board.step, pending), self._runner.claims.head_left
        return self._policy.lend(*facts, head(board.step))

    # ---- deaths

    def _recall(self, version: int) -> None:
        """Publish the version before again if a task of it came back (one-step asynchrony). Perhaps
        no rank holds those weights any more. A rollout gets that version first, and then the
        present version."""
        before, present = self._state.previous, self._state.current
        if self._world.rank != 0 or before is None:
            return
        waiting = self._runner.claims.returned(
            version - 1, len(self._hooks.plan_tasks(version - 1))
        )
        if waiting > self._recalled:
            self._runner.see()
            receiver = self._policy.first_free(self._spans.now())
            rollouts = self._control.survivors(self._world.rollout_ranks)
            if (
                not rollouts
            ):  # a rank that joins later asks for the present version, and this is called again
                return
            if receiver is None:
                receiver = rollouts[0]
            for number, tensors in ((version - 1, before), (version, present)):
                publish(number, tensors, self._link, {receiver: ()}, agree=lambda digest: None)
        self._recalled = waiting
