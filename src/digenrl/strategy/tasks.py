"""The tasks of a rank: claiming them, generating, scoring and sending.

    control store --claims, work of others--> Scheduler --take or leave, successor--> TaskRunner
    TaskRunner: denoise -> decode -> score (in the scorer's thread) --cells, rewards--> trainers

The same `TaskRunner` serves rollout ranks, colocated ranks and trainers that lend: a sample does
not depend on the rank that made it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from digenrl.cluster.claims import StoredClaims, announce_work, work_of
from digenrl.cluster.control import Control
from digenrl.cluster.world import World
from digenrl.data import PromptSampler
from digenrl.record.span_log import SpanLog
from digenrl.rollout.engine import Generation, RolloutEngine
from digenrl.schedule import ScheduleSpec, Task
from digenrl.schedule.claims import NOBODY, Claim, Claims, queue_part
from digenrl.schedule.order import later_fragments
from digenrl.schedule.ranks import Work
from digenrl.schedule.scheduler import Scheduler
from digenrl.strategy.shared import Fragment
from digenrl.transport.cells import Placement, owned_positions, pack_cells
from digenrl.transport.link import Link
from digenrl.transport.suspended import Suspended, pack_state
from digenrl.types import Prompt, Trajectory

Interrupt = Callable[[Task], int | None]
"""Function that is called after every denoising step of a task. Returns the rank that should finish
the task, NOBODY to give the task up, or None to go on."""


_NOTICED_S = 0.001
"""Seconds below which a wait for the scorer is not recorded."""


@dataclass(frozen=True)
class Made:
    """What a task has become, before it is scored. `TaskRunner.generate` fills it."""

    generation: Generation
    media: Tensor
    """[b, C, H, W] or [b, F, C, H, W], in 0..1."""
    claim: Claim
    """Claim under which the results are sent."""
    seconds: float
    """Seconds that this rank took to generate and decode the task."""
    whole: bool
    """Whether this rank made all denoising steps of the task."""


class TaskRunner:
    """Claims and runs generation tasks.

    Args:
        spec: the schedule.
        world: this rank's place.
        scheduler: decides which tasks this rank takes.
        plan: the Strategy's `plan_tasks`: version -> its queue of tasks, in claim order.
        place: the Strategy's `place_timesteps`: (fragment, step) -> which trainer rank trains which
            cells.
        task_seconds: seconds that a task is expected to take, until this rank has measured one; 0 =
            unknown.
    """

    def __init__(
        self,
        spec: ScheduleSpec,
        world: World,
        scheduler: Scheduler,
        plan: Callable[[int], tuple[Task, ...]],
        place: Callable[[Fragment, int], Placement],
        engine: RolloutEngine,
        sampler: PromptSampler,
        control: Control,
        link: Link,
        spans: SpanLog,
        task_seconds: float = 0.0,
    ) -> None:
        self._spec, self._world, self.scheduler = spec, world, scheduler
        self._plan, self._place, self._engine, self._sampler = plan, place, engine, sampler
        self._control, self._link, self._spans = control, link, spans
        self.claims = Claims(StoredClaims(control), world.rank)
        self._held: dict[tuple[int, int], Claim] = {}
        """(step, index) -> claim of each task that this rank has begun and not yet made. A single
        thread touches these claims."""
        self._task_seconds = task_seconds
        self._unsent: deque[Future[None]] = deque()
        self._withdrawn = False
        """Whether this rank leaves, and counts no longer as one that takes tasks."""
        self._report_work(Work())

    # ---- claims

    def report_other_ranks(self) -> None:
        """Show the scheduler what every other rank does now. While some are still starting,
        nothing is known of any."""
        for rank, work in work_of(self._control, range(self._world.size)).items():
            if rank != self._world.rank:
                self.scheduler.saw_rank(rank, work)

    def stop_taking_tasks(self) -> None:
        """Stop counting as a rank that takes tasks, because this rank leaves."""
        self._withdrawn = True
        announce_work(self._control, self._world.rank, None)

    def find_successor(self, task: Task, version: int) -> int | None:
        """Return the rollout that goes on with a task of this rank, which leaves; None: the task
        begins anew."""
        self.report_other_ranks()
        return self.scheduler.successor(self._world.rank, version, task.step, self._spans.now())

    def unclaimed_tasks(self, version: int) -> int:
        """Tasks of the version's queue (or of this rank's part of it) that nobody runs and nobody
        has finished. Sharded trainers generate together until all their parts are empty."""
        tasks, roles = len(self._plan(version)), self.scheduler.roles
        if not (roles.split and roles.lockstep):
            return self.claims.unclaimed_tasks(version, tasks, self._claimable_positions(tasks))
        parts = (
            queue_part(tasks, number, len(roles.generators))
            for number in range(len(roles.generators))
        )
        return sum(self.claims.unclaimed_tasks(version, tasks, part) for part in parts)

    def takes_next_task(self, version: int) -> bool:
        """Return whether this free rank takes a task of the version's queue now."""
        # `head` of the `left` tasks are reserved for trainers.
        left, head = self.unclaimed_tasks(version), self.claims.head_left(version)
        # What the others do is a request to the store: asked only where it can change the answer.
        if left and (left == head or not self.scheduler.many_left(self._world.rank, left)):
            self.report_other_ranks()
        return self.scheduler.takes(self._world.rank, version, left, self._spans.now(), head)

    def claim_task(self, version: int) -> Task | None:
        """Claim the next task of the version's queue; None when all are claimed."""
        tasks = self._plan(version)
        claim = self.claims.take_next_task(
            version, tasks, self._claimable_positions(len(tasks)), self._world.is_trainer
        )
        if claim is None:
            return None
        task = tasks[claim.position]
        self._held[task.step, task.index] = claim
        return task

    def open_queue(self, version: int) -> None:
        """Reserve tasks at the head of a new version's queue for the trainers (TAG)."""
        if self._spec.tag:
            facts = self.prepare_search(version, later_fragments(self._spec, -1))
            self.claims.begin_behind(version, self.scheduler.opens(*facts))

    def prepare_search(
        self, step: int, pending: Sequence[Fragment]
    ) -> tuple[int, int, Sequence[Fragment], tuple[int, int], float]:
        """Show the scheduler the other ranks. Return the arguments of its search."""
        self.report_other_ranks()
        left = (self.unclaimed_tasks(step - 1), self.unclaimed_tasks(step))
        return self._world.rank, step, pending, left, self._spans.now()

    def _claimable_positions(self, tasks: int) -> range:
        """Positions of the queue that this rank may claim."""
        roles = self.scheduler.roles
        if not roles.split:
            return range(tasks)
        return queue_part(tasks, self._world.rank - roles.generators.start, len(roles.generators))

    def announce_work(self, version: int, task: Task | None = None, share: float = 0.0) -> None:
        """Tell the others what this rank does now: the last `share` of `task`, or nothing."""
        step, group = (task.step, task.group) if task is not None else (-1, -1)
        # An estimate, by which other ranks decide whether to leave a task to this one.
        until = self._spans.now() + share * self._task_seconds
        self._report_work(Work(version, self._task_seconds, step, group, until))

    def _report_work(self, work: Work) -> None:
        if not self._withdrawn:
            announce_work(self._control, self._world.rank, work)
        self.scheduler.saw_rank(self._world.rank, work)

    # ---- tasks

    def begin_task(self, task: Task) -> Generation:
        """Return a task before its first denoising step."""
        return self._engine.begin_task(task, self._prompt_of(task))

    def take_over(self, suspended: Suspended) -> Generation | None:
        """Return a task that another rank began and suspended, at the step where it stopped. None:
        the task has gone to a third rank since."""
        task, claim = suspended.task, suspended.claim
        confirmed = self.claims.confirm_claim(task.version, claim.position, claim.attempt)
        if confirmed is None:
            return None
        self._held[task.step, task.index] = confirmed
        return Generation(
            task, self._prompt_of(task), suspended.restore_state(self._engine.policy.device)
        )

    def hand_over_task(self, suspended: Suspended) -> None:
        """Give a task that waits for this rank, which leaves, to its successor. Without one, and
        where the successor is lost, the task goes back when this rank has left."""
        version = suspended.task.version
        receiver = self.find_successor(suspended.task, version)
        if receiver is not None and self.claims.give_task(version, suspended.claim, receiver):
            self._link.send(receiver, suspended.message)

    def run_discarded(self, task: Task, interrupt: Interrupt) -> None:
        """Make a task's forwards and throw the result away: sharded ranks move together."""
        with self._spans.span("lend", step=task.step, discarded=True):
            self._denoise(self.begin_task(task), interrupt)

    def settle_sends(self, wait: bool = False) -> None:
        """Raise what went wrong in scoring or sending of earlier tasks; with `wait`, also wait for
        those under way."""
        # In the order of sending: an error waits until the tasks before it are done.
        while self._unsent and (wait or self._unsent[0].done()):
            self._unsent.popleft().result()

    def _prompt_of(self, task: Task) -> Prompt:
        return self._sampler.prompts_at(task.step)[task.group]

    def generate(
        self, generation: Generation, stage: str = "generate", interrupt: Interrupt | None = None
    ) -> Made | None:
        """Make the denoising steps that are left, and decode; None if `interrupt` names another
        rank to go on, which has the task then.

        Args:
            stage: name of the span: "lend" on a trainer that rollouts wait for.

        Raises:
            Exception: what went wrong in scoring or sending an earlier task.
        """
        task, spans = generation.task, self._spans
        self.settle_sends()
        took: list[float] = []
        share = self._engine.steps_left(generation) / self._spec.denoise_steps
        self.announce_work(task.version, task, share)
        labels: dict[str, Any] = {"took": took.append, "step": task.step, "group": task.group}
        with spans.span(stage, version=task.version, samples=task.samples, **labels) as facts:
            generation, receiver = self._denoise(generation, interrupt)
            if receiver is not None and receiver != NOBODY:
                facts["handed_to"] = receiver
        # From here on the task is finished, given up or given away: none of these needs the entry.
        claim = self._held.pop((task.step, task.index))
        if receiver == NOBODY:
            self.claims.release_claim(task.version, claim)
            return None
        if receiver is not None:
            self.announce_work(task.version)
            self._link.send(receiver, pack_state(task, generation.state, claim))
            return None
        with spans.span("decode", **labels):
            media = self._engine.decode(generation)
        return Made(generation, media, claim, sum(took), whole=share == 1.0)

    def score(self, made: Made) -> Future[Trajectory]:
        """Hand what was made to the scorer; wait while too many tasks wait for theirs
        (`reward.pending`)."""
        task, spans, handed = made.generation.task, self._spans, self._spans.now()
        with spans.stage("wait reward"):  # inline, the suite's own mark lies inside
            scored = self._engine.score(made.generation, made.media)
        # Scoring begins with a copy of the media, which waits for the device's work on this task.
        spans.record_finished()
        waited = spans.now()
        if self._engine.scores_inline:
            spans.add_span("score", handed, waited, step=task.step, group=task.group)
        elif waited - handed > _NOTICED_S:
            spans.add_span("wait", handed, waited, cause="reward", step=task.step)
        return scored

    def send_results(self, made: Made, scored: Future[Trajectory]) -> None:
        """Send cells and rewards to every trainer as soon as they are scored. `settle_sends` tells
        what went wrong."""
        if made.whole:
            # Only whole tasks: a part of one would look like a fast rank. The newest weighs half.
            self._task_seconds = 0.5 * (made.seconds + (self._task_seconds or made.seconds))
        sent: Future[None] = Future()
        self._unsent.append(sent)
        # without `made`, whose tensors would stay on the GPU until the task is scored
        task, under = made.generation.task, (made.claim, made.seconds)
        scored.add_done_callback(lambda done: self._send_scored(task, under, done, sent))
        self.announce_work(task.version)

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
            if receiver == NOBODY or (receiver is not None and self._give_task(task, receiver)):
                return generation, receiver
            generation = self._engine.take_step(generation)
            self._spans.progress.mark_progress()
        return generation, None

    def _give_task(self, task: Task, receiver: int) -> bool:
        return self.claims.give_task(task.version, self._held[task.step, task.index], receiver)

    def _send_scored(
        self,
        task: Task,
        under: tuple[Claim, float],
        scored: Future[Trajectory],
        sent: Future[None],
    ) -> None:
        """Send a scored trajectory to every trainer rank, under its claim and with the seconds that
        it took. Runs in the scorer's thread."""
        try:
            trajectory = scored.result()
            part = task.first_sample // self._spec.task_size

            def place_in_step(fragment: Fragment) -> Placement:
                return self._place(fragment, task.step)

            lockstep = self.scheduler.roles.lockstep
            with self._spans.span("send", quiet=True, step=task.step, group=task.group):
                for rank in range(self._world.trainers):
                    positions = owned_positions(
                        self._spec, place_in_step, rank, task.group, part, lockstep
                    )
                    self._link.send(rank, pack_cells(trajectory, positions, *under))
            if (trouble := self._engine.reward_trouble()) is not None:
                # the step in progress is finished and saved before the run stops
                self._control.request_stop(trouble)
            sent.set_result(None)
        except (
            BaseException
        ) as error:  # raised again by `settle_sends`, in the thread that can act on it
            sent.set_exception(error)
