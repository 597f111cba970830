"""What one task costs beside its generation and the transfer of its bytes: claim, dispatch,
hand-over.

    python -m benchmarks.overhead [tasks=60]

A rollout rank claims tasks on a real control store and runs them with the real `TaskRunner`. An
engine that computes nothing takes the model's place. A trainer rank puts the arriving parts on its
`StepBoard` until the group of four tasks is complete. Only one task runs at a time, so nothing is
hidden. Tasks alternate with a bare send of the same tensors over the same link into as much memory,
whose time is subtracted. Wanted: at most 3 ms per task. Exit code 1 above that.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from benchmarks._shared import BenchRank, Report, on_ranks, options
from digenrl.cluster.claims import StoredClaims
from digenrl.cluster.world import World
from digenrl.data import PromptSampler
from digenrl.diffusion.denoise import SampleKey, SampleState
from digenrl.record.decisions import DecisionLog
from digenrl.record.span_log import SpanLog
from digenrl.rollout.engine import Generation, RolloutEngine
from digenrl.schedule import ScheduleSpec, Task, next_fragment, place_fragment, version_queue
from digenrl.schedule.claims import Claim, Claims
from digenrl.schedule.ranks import Roles
from digenrl.schedule.scheduler import Scheduler, record_header
from digenrl.strategy.rollout_loop import finish_task
from digenrl.strategy.tasks import TaskRunner
from digenrl.transport.cells import Part, Placement, StepBoard, pack_cells
from digenrl.transport.wire import Message, MessageKind
from digenrl.types import Prompt, Trajectory

BAR_MS = 3.0
MIB = 1 << 20
SIZES = (MIB // 16, MIB, 16 * MIB, 64 * MIB)
"""Bytes of a task's latents."""
STEPS, ROWS = 10, 4
"""Denoising steps, all but one trained; samples of a task."""
SPEC = ScheduleSpec(
    prompts=1,
    group_size=4 * ROWS,
    task_size=ROWS,
    denoise_steps=STEPS,
    trained_steps=STEPS - 1,
    tsp_batch=STEPS - 1,
)


def one_trainer(fragment: tuple[int, ...], step: int = 0) -> Placement:
    """The only trainer rank trains everything."""
    return place_fragment(SPEC, 1, fragment)


class Idle:
    """An engine that computes nothing: every task ends with the same trajectory, scored by another
    thread."""

    scores_inline = False

    def __init__(self, trajectory: Trajectory) -> None:
        self._trajectory, self._scorer = trajectory, ThreadPoolExecutor(1)

    def begin_task(self, task: Task, prompt: Prompt) -> Generation:
        rows = tuple(range(task.first_sample, task.first_sample + task.samples))
        return Generation(
            task, prompt, SampleState(SampleKey(0, task.step, prompt.uid, rows), torch.zeros(ROWS))
        )

    def steps_left(self, generation: Generation) -> int:
        return STEPS - generation.state.next_step

    def take_step(self, generation: Generation) -> Generation:
        return replace(
            generation, state=replace(generation.state, next_step=generation.state.next_step + 1)
        )

    def decode(self, generation: Generation) -> torch.Tensor:
        return generation.state.latents

    def score(self, generation: Generation, media: torch.Tensor) -> Future[Trajectory]:
        task = generation.task
        return self._scorer.submit(
            partial(
                replace,
                self._trajectory,
                index=task.index,
                group=task.group,
                first_sample=task.first_sample,
            )
        )

    def reward_trouble(self) -> str | None:
        return None


def trajectory_of(size: int) -> Trajectory:
    """A finished task of `size` bytes of latents in bf16."""
    trained = STEPS - 1
    cells = torch.zeros(ROWS, trained, size // (2 * 2 * ROWS * trained), dtype=torch.bfloat16)
    return Trajectory(
        step=0,
        index=0,
        group=0,
        uid=1,
        first_sample=0,
        version=0,
        steps=torch.arange(trained),
        sigmas=torch.linspace(1, 0, STEPS + 1),
        latents=cells,
        next_latents=cells.clone(),
        log_probs=torch.zeros(ROWS, trained),
        rewards={"reward": torch.zeros(ROWS)},
        condition={"text": torch.zeros(1, 77, 64)},
    )


def rollout(here: BenchRank, groups: int, size: int) -> list[tuple[float, ...]]:
    """Milliseconds of every task: bare transfer, the claim alone, everything from the claim to the
    trainer's answer."""
    trajectory = trajectory_of(size)
    folder = Path(tempfile.mkdtemp())

    def plan(version: int) -> tuple[Task, ...]:
        return tuple(replace(task, version=version) for task in version_queue(SPEC, 0, 1))

    roles = Roles(1, 1)
    decisions = DecisionLog(folder / "decisions.jsonl", record_header(SPEC, roles, 1))
    runner = TaskRunner(
        SPEC,
        World(here.rank, 1, 1),
        Scheduler(SPEC, roles, plan, decisions),
        plan,
        one_trainer,
        cast(RolloutEngine, Idle(trajectory)),
        PromptSampler([Prompt("a red circle")], SPEC.prompts, seed=0),
        here.control,
        here.link,
        SpanLog(folder / "rank-001.jsonl", here.rank, "rollout", time.time()),
    )
    bare = pack_cells(trajectory, range(STEPS - 1), Claim(0, here.rank, 0), 0.0)

    def answered() -> None:
        while here.link.receive(0.2) is None:
            runner.settle_sends()  # raises what kept a task from being sent

    rows = []
    for number in range((groups + 1) * SPEC.tasks):
        began = time.perf_counter()
        here.link.send(0, bare)
        answered()
        sent = time.perf_counter()
        version = size + number // SPEC.tasks  # every group has a queue of its own
        task = runner.claim_task(version) if runner.takes_next_task(version) else None
        claimed = time.perf_counter()
        if task is None:
            raise SystemExit("the queue was empty too early")
        finish_task(runner, runner.begin_task(task), "generate")
        answered()
        ended = time.perf_counter()
        runner.settle_sends(wait=True)
        rows.append(
            tuple(1e3 * seconds for seconds in (sent - began, claimed - sent, ended - sent))
        )
    return rows[SPEC.tasks :]  # the first group opens connections


def trainer(here: BenchRank, groups: int, size: int) -> float:
    """Answer every message; put the parts of every second one on the board. Milliseconds per task
    of doing that."""
    seconds, claims = [], Claims(StoredClaims(here.control), here.rank)
    for version in range(size, size + groups + 1):
        board, complete, kept = (
            StepBoard(SPEC, one_trainer, here.rank, 0, {"reward": 1.0}),
            None,
            [],
        )
        for _ in range(SPEC.tasks):
            kept.append(
                here.receive()
            )  # as the board keeps its parts: memory that is not in the cache
            here.link.send(1, Message(MessageKind.CELLS, {}))
            message = here.receive()
            began = time.perf_counter()
            part = Part(message)
            if claims.accepts_result(version, part.claim) and board.add_part(part):
                claims.mark_received(version, part.claim.position)
            complete = next_fragment(SPEC, [(0,)], board.completed)
            here.control.check_abort()
            seconds.append(1e3 * (time.perf_counter() - began))
            here.link.send(1, Message(MessageKind.CELLS, {}))
        if complete is None:
            raise SystemExit("the group never became complete")
    return statistics.median(seconds)


def main(words: list[str]) -> int:
    given = options(words, {"tasks": "60"}, quick={"tasks": "12"})
    groups = max(1, int(given["tasks"]) // SPEC.tasks)

    def body(here: BenchRank) -> int:
        if here.rank == 0:
            for size in SIZES:
                dist.send(torch.tensor(trainer(here, groups, size), dtype=torch.float64), 1)
            return 0
        columns = (
            "task MiB",
            "transfer ms",
            "all ms",
            "overhead ms",
            "of it claim ms",
            "of it board ms",
        )
        report = Report(
            "A task beside its generation and its transfer",
            f"Medians of {groups * SPEC.tasks} tasks of {STEPS} steps, one at a time, two "
            "processes, loopback.\n"
            "Overhead = all - transfer: claim, spans, notices, threads, packing, unpacking, "
            "placing, deciding.",
            columns,
        )
        worst = 0.0
        for size in SIZES:
            rows = rollout(here, groups, size)
            board: Any = torch.zeros((), dtype=torch.float64)
            dist.recv(board, 0)
            transfer, claim, everything = (
                statistics.median(column) for column in zip(*rows, strict=True)
            )
            overhead = statistics.median(row[2] - row[0] for row in rows)
            worst = max(worst, overhead)
            figures = (transfer, everything, overhead, claim, float(board))
            report.row(f"{size / MIB:.2f}", *(f"{figure:.2f}" for figure in figures))
        report.verdict(
            worst <= BAR_MS, f"overhead of a task {worst:.2f} ms, at most {BAR_MS:.0f} ms wanted"
        )
        return report.close(given)

    return on_ranks(2, body)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
