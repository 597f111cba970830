"""Messages and records before a run starts."""

from __future__ import annotations

import sys
from pathlib import Path

from digenrl import devices
from digenrl.config.commands import shell_command
from digenrl.config.relations import votes_of_step
from digenrl.launchers.job import Job
from digenrl.record.run_dir import LAUNCH, append_event
from digenrl.settle import evaluating_ranks


def announce_launch(job: Job, run_dir: Path, checkpoint: Path | None) -> None:
    """Record the launch, and print what is going to run from `checkpoint` (None: from the
    beginning)."""
    composed, (trainers, rollouts) = job.composed, job.ranks
    world = {"trainer": trainers, "rollout": rollouts}
    planned = {} if composed.planned is None else {"planned": dict(composed.planned)}
    if job.advice.planned:
        planned["expected"] = dict(job.advice.planned)
    append_event(
        run_dir, LAUNCH, {"world": world, "overrides": list(composed.overrides), **planned}
    )
    print(
        "\n".join([*composed.notes, *describe_launch(job, run_dir, checkpoint), *job.memory]),
        file=sys.stderr,
    )


def describe_launch(job: Job, run_dir: Path, checkpoint: Path | None) -> list[str]:
    """Return the lines that precede a run: what runs where, with what schedule."""
    settings, (trainers, rollouts) = job.composed.settings, job.ranks
    data, schedule = settings.data, settings.schedule
    prompts = data.groups_per_step
    samples = prompts * data.group_size
    _, most = settings.allocation.split
    more = f" (up to {most}, as there are places)" if most > rollouts else ""
    ranks = (
        f"{trainers} trainer{'s' * (trainers > 1)} + {rollouts} "
        f"rollout{'s' * (rollouts != 1)}{more}"
    )
    lines = [
        f"run       {run_dir}",
        f"ranks     {ranks if rollouts else f'{trainers} colocated'}, "
        f"{settings.parallel.sharding}, "
        f"{f'tokens over {settings.parallel.context}, ' if settings.parallel.context > 1 else ''}"
        f"{'GPU' if devices.uses_gpus(settings) else 'CPU'}",
        f"step      {prompts} prompts x {data.group_size} samples = {samples} samples, "
        f"{settings.sampling.steps} denoising steps, "
        f"{settings.algorithm.updates_per_batch} updates; "
        f"{settings.max_rl_steps} RL steps",
        f"schedule  gap={schedule.gap} tsp.batch={schedule.tsp.batch} "
        f"tsp.shard={schedule.tsp.shard} "
        f"tag={schedule.tag} shares={schedule.shares} async_steps={schedule.async_steps}",
    ]
    asked = votes_of_step(settings.tree)
    lines += [
        f"people    reward {name} asks for {votes} votes a step, on the page that "
        f"{shell_command('vote', [], run_dir)} opens; an evaluation asks for none"
        for name, votes in asked.items()
        if not settings.hardware.emulate
    ]
    evaluating = evaluating_ranks(settings, rollouts)
    lines += [f"evaluate  by {evaluating}"] if evaluating else []
    return lines + ([f"resume    {checkpoint}"] if checkpoint else [])
