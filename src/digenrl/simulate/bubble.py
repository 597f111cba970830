"""What the bubble-triggered search sees at an idle point of the virtual run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from digenrl.schedule.order import group_version
from digenrl.schedule.search import LendingState, after_older
from digenrl.simulate.generation import Generation, Worker


def lending_state(
    generation: Generation,
    step: int,
    now: float,
    lender: Worker,
    lenders: int,
    fragments: Sequence[tuple[tuple[int, ...], float]],
    complete: Set[int],
    done_tasks: Mapping[tuple[int, int], int],
) -> LendingState:
    """The search's state.

    Args:
        step: RL step in progress.
        now: virtual time.
        lender: one of the idle trainers, for its speed.
        lenders: idle trainers.
        fragments: (groups, seconds of training) of the fragments that the idle trainers have still to train.
        complete: complete groups of the step.
        done_tasks: (step, group) -> finished tasks.
    """
    spec, cluster = generation.spec, generation.cluster
    busy_lenders = [w for w in generation.members if w.rank.role == "trainer" and w.busy]
    makers = [w for w in generation.generators if not w.dead] + busy_lenders
    in_flight: dict[int, float] = {}
    started: dict[int, int] = {}
    for worker in generation.workers:
        if worker.task is not None and worker.task.step == step and not worker.dead:
            group = worker.task.group
            in_flight[group] = max(in_flight.get(group, 0.0), worker.free_at - now)
            started[group] = started.get(group, 0) + 1
    tasks, older, ready = [], [], []
    for groups, _ in fragments:
        left = [group for group in groups if group not in complete]
        waiting = {g: spec.tasks_per_group - done_tasks.get((step, g), 0) - started.get(g, 0) for g in left}
        own = {group for group in left if group_version(spec, step, group) == step}
        tasks.append(sum(max(0, count) for group, count in waiting.items() if group in own))
        older.append(sum(max(0, count) for group, count in waiting.items() if group not in own))
        ready.append(max((in_flight.get(group, 0.0) for group in left), default=0.0))
    steps = spec.denoise_steps
    free = [max(0.0, w.free_at - now) if w.busy else 0.0 for w in makers]
    seconds = [w.rank.task_seconds(steps) for w in makers]
    rollouts = len(makers) - len(busy_lenders)
    behind, fragment_ready = after_older(free[:rollouts], seconds[:rollouts], ready, older)
    return LendingState(
        rollout_free=(*behind, *free[rollouts:]),
        rollout_seconds=tuple(seconds),
        tasks_left=sum(tasks),
        fragment_tasks=tuple(tasks),
        fragment_ready=fragment_ready,
        train_seconds=tuple(seconds for _, seconds in fragments),
        lend_seconds=lender.rank.task_seconds(steps) + lender.rank.encode_seconds,
        lenders=lenders,
        lenders_later=len(cluster.trainers),
        switch_seconds=cluster.switch_seconds,
        step_seconds=lender.rank.step_seconds if spec.handoff and not cluster.lockstep else None,
        tasks_later=max(0, generation.left(step, lender) - sum(tasks)),
    )
