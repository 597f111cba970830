"""Between a settled configuration and its ranks, for `train`: what is said first, how ranks start, what ends a run."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console

from digenrl import devices, run
from digenrl.advisor import advisor
from digenrl.cluster.attach import Place, attach, check_allocation, scheduler_limit
from digenrl.cluster.handshake import Handshake
from digenrl.cluster.launcher import Launch, Launcher, Outcome, RankMain, launch
from digenrl.cluster.limits import Limits
from digenrl.cluster.network import Network
from digenrl.cluster.restarts import Restarts
from digenrl.cluster.signals import StopSignals
from digenrl.cluster.world import Session, World
from digenrl.config import Composed, prepare_run_dir_or_exit, redact_text
from digenrl.config.relations import most_rollouts
from digenrl.config.stored import identity
from digenrl.data import PromptData
from digenrl.display import Display, final_table
from digenrl.extension import extension
from digenrl.hardware import numbering, parse_hardware
from digenrl.record.attempt import ResumeAttempt
from digenrl.record.code_version import code_version
from digenrl.record.run_dir import LAUNCH, METRICS, POISON, RESTART, append_event
from digenrl.report.build import close, finish
from digenrl.report.read_run import JsonlTail, is_number
from digenrl.schedule import groups_of_step
from digenrl.settle import begins_with, evaluators
from digenrl.strategy.checkpoint_io import UNFINISHED, CheckpointError, newest_valid, step_of, verify

_LONGEST_STEPS, _LEAST_S, _UNKNOWN_STEP_S = 3.0, 5.0, 30.0
"""`allocation.stop_grace_s=auto`: so many times the longest of the last ten steps, and no less than so many seconds;
before the first step, seconds."""


def credentials(composed: Composed) -> dict[str, Any]:
    """What a rollout that joins must show: the same code and the same configuration; {} where none can join."""
    config = composed.config
    if not config.allocation.rollouts or config.schedule.claims == "split":
        return {}
    return {"code": code_version(), "configuration": identity(config)}


def ranks(composed: Composed) -> int:
    """The most ranks of a settled run."""
    return int(composed.config.allocation.trainers + most_rollouts(composed.config.allocation.rollouts))


def launcher_of(composed: Composed) -> Launcher:
    """Return what gives ranks their places where no scheduler did: this machine, or the extension that `launch` names.

    Raises:
        ExtensionMissing: no such extension is installed.
    """
    if (name := composed.config.launch) == "local":
        return ThisMachine(composed)
    target = f"digenrl.extensions.launchers.on_{name}.{name.capitalize()}Launcher"
    launcher: Launcher = extension(target, f"launch = {name}", "use launch=local")(composed.config)
    return launcher


class ThisMachine:
    """The `Launcher` whose ranks are forked here; rank r has GPU r."""

    host = "127.0.0.1"
    places = None

    def __init__(self, composed: Composed) -> None:
        self._composed = composed

    @property
    def ranks_here(self) -> int:
        return ranks(self._composed)

    def check(self) -> None:
        count = sum(_counts(self._composed))
        if not self._composed.config.hardware.emulate:
            devices.check(self._composed.config, {rank: rank for rank in range(count)}, count, devices.found())

    def rank_main(self, fit: RankMain) -> RankMain:
        return fit


def check_place(composed: Composed, place: Place | None) -> None:
    """Refuse a run whose ranks on this machine cannot have their GPUs, interface or ports, or whose settings need an
    extension that is not installed. `place`: the one that a scheduler gave this process.

    Raises:
        ValueError: as `Launcher.check`, `devices.check`, `devices.found`, `Network.check`, `run.link_maker`.
    """
    if place is None:
        launcher = launcher_of(composed)
        launcher.check()
        here = launcher.ranks_here
    else:
        here, (trainers, rollouts) = place.local_size, _counts(composed)
        if not composed.config.hardware.emulate:
            check_allocation(place, trainers, rollouts)
            rank = numbering(parse_hardware(composed.config.hardware), trainers, rollouts)[place.rank]
            devices.check(composed.config, {rank: place.local_rank}, place.local_size, devices.found())
    _network(composed).check(1 + here)
    run.link_maker(composed.config)


def _network(composed: Composed) -> Network:
    return Network.of(composed.config.network)


def checkpoint_of(composed: Composed) -> Path | None:
    """The checkpoint that a resumed run continues from; None for a new run.

    Raises:
        CheckpointError: the run has no whole checkpoint.
    """
    return _newest(composed.run_dir) if composed.resumed else None


def _newest(run_dir: Path) -> Path:
    return newest_valid(run_dir / "checkpoints", partial(print, file=sys.stderr))


def _announce(composed: Composed, run_dir: Path, checkpoint: Path | None) -> None:
    """Record the launch, and say what is going to run."""
    trainers, rollouts = _counts(composed)
    world = {"trainer": trainers, "rollout": rollouts}
    planned = {} if composed.planned is None else {"planned": dict(composed.planned)}
    append_event(run_dir, LAUNCH, {"world": world, "overrides": list(composed.overrides), **planned})
    lines = _described(composed.config, trainers, rollouts, run_dir, checkpoint)
    print("\n".join([*composed.notes, *lines, *advisor().memory_lines(composed, trainers, rollouts)]), file=sys.stderr)


def _described(config: DictConfig, trainers: int, rollouts: int, run_dir: Path, checkpoint: Path | None) -> list[str]:
    """The lines that precede a run: what runs where, with what schedule."""
    data, schedule = config.data, config.schedule
    prompts = groups_of_step(data)
    samples = prompts * data.group_size
    most = most_rollouts(config.allocation.rollouts)
    more = f" (up to {most}, as there are places)" if most > rollouts else ""
    ranks = f"{trainers} trainer{'s' * (trainers > 1)} + {rollouts} rollout{'s' * (rollouts != 1)}{more}"
    lines = [
        f"run       {run_dir}",
        f"ranks     {ranks if rollouts else f'{trainers} colocated'}, {config.parallel.sharding}, "
        f"{f'tokens over {config.parallel.context}, ' if config.parallel.context > 1 else ''}"
        f"{'GPU' if not config.hardware.emulate and devices.found() else 'CPU'}",
        f"step      {prompts} prompts x {data.group_size} samples = {samples} samples, "
        f"{config.sampling.steps} denoising steps, {config.algorithm.updates_per_batch} updates; "
        f"{config.max_rl_steps} RL steps",
        f"schedule  gap={schedule.gap} tsp.batch={schedule.tsp.batch} tsp.shard={schedule.tsp.shard} "
        f"tag={schedule.tag} shares={schedule.shares} async_steps={schedule.async_steps}",
    ]
    evaluating = evaluators(config, rollouts)
    lines += [f"evaluate  by {evaluating}"] if evaluating else []
    return lines + ([f"resume    {checkpoint}"] if checkpoint else [])


def fork(
    composed: Composed, checkpoint: Path | None, attempt: ResumeAttempt | None, signals: StopSignals
) -> tuple[Path, Outcome]:
    """Start every rank on this machine, and show the run until the last one is gone; returns as `join`. When ranks die
    before the last RL step is saved, begin again from the newest checkpoint, as long as `Restarts` allows it.

    Args:
        checkpoint: what a resumed run continues from.
        attempt: at resuming; None for a new run.
    """
    allocation = composed.config.allocation
    signals.count_all()  # what exists from here on is ended in order
    run_dir = prepare_run_dir_or_exit(composed)
    plan = _plan(composed, run_dir, attempt, signals)
    steps, metrics = composed.config.max_rl_steps, JsonlTail(run_dir / METRICS)
    restarts = Restarts(allocation.max_restarts, allocation.restart_pause_s, steps)
    metrics.read()
    _announce(composed, run_dir, checkpoint)
    while True:
        try:
            outcome = launch(plan(checkpoint))
        except OSError as error:  # no free port
            return run_dir, Outcome("failed", str(error), 1)
        began = 0 if checkpoint is None else step_of(checkpoint)
        finished = [int(row["rl_step"]) for row in metrics.read() if row.get("kind") == "step"][-1:] or [began]
        if not outcome.died or signals.count or _is_saved(run_dir, steps):
            return run_dir, outcome
        try:
            refusal = restarts.refuse(str(outcome.cause), began, finished[0])
            checkpoint = None if refusal else _checkpoint_after_death(run_dir)
        except CheckpointError as error:
            refusal = f"{outcome.cause}; {error}"
        if refusal is not None:
            outcome.cause = refusal
            _leave_evidence(composed, run_dir, finished[0], restarts.causes(finished[0]))
            return run_dir, outcome
        facts = {"cause": outcome.cause, "rl_step": finished[0], "checkpoint": checkpoint and checkpoint.name}
        append_event(run_dir, RESTART, facts)
        source = "its beginning" if checkpoint is None else checkpoint.name
        print(f"begins again from {source} in {restarts.pause_s:g} s: {outcome.cause}", file=sys.stderr, flush=True)
        if number := _pause(restarts.pause_s, signals):
            return run_dir, Outcome("stopped", f"signal {number.name}, before it began again", 128 + number)
        _announce(composed, run_dir, checkpoint)


def _plan(
    composed: Composed, run_dir: Path, attempt: ResumeAttempt | None, signals: StopSignals
) -> Callable[[Path | None], Launch]:
    """What an attempt starts, by the checkpoint that it begins with."""
    settings, (trainers, rollouts) = composed.config, _counts(composed)
    advice, launcher = advisor().advise(composed, trainers, rollouts), launcher_of(composed)

    def plan(checkpoint: Path | None) -> Launch:
        display: Display | None = None

        def tick(states: Callable[[], dict[int, str]]) -> None:
            nonlocal display  # made with the first tick, when all ranks are forked
            display = display or Display(run_dir, settings.max_rl_steps, states)
            display.poll()

        def end() -> None:
            if display is not None:
                display.close()

        return Launch(
            launcher.rank_main(partial(run.fit, settings, checkpoint, advice)),
            trainers,
            rollouts,
            run_dir,
            host=launcher.host,
            places=launcher.places,
            max_lost=_max_lost(settings),
            patience_s=settings.allocation.patience_s,
            fewest=1 if isinstance(span := settings.allocation.rollouts, int) else span.min,
            credentials=credentials(composed),
            handshake=Handshake(**settings.handshake),
            limits=Limits(**settings.limits),
            network=_network(composed),
            stop_grace=partial(_stop_grace, settings, run_dir),
            stop_save_s=settings.allocation.stop_save_s,
            signals=signals,
            on_tick=tick,
            on_end=end,
            on_orphaned=partial(_end_alone, attempt, run_dir),
        )

    return plan


def _max_lost(config: DictConfig) -> int | None:
    """Rollouts that may die; None: all."""
    if config.schedule.claims == "split":  # nobody may claim the part of a rank that died
        return 0
    most = config.allocation.max_lost_rollouts
    return None if most == "auto" else most


def _checkpoint_after_death(run_dir: Path) -> Path | None:
    """Return the checkpoint from which a run begins again; None: no save was ever complete.

    Raises:
        CheckpointError: a save was, and no checkpoint is whole.
    """
    found = (run_dir / "checkpoints").glob("*step-*")
    return _newest(run_dir) if any(not path.name.startswith(UNFINISHED) for path in found) else None


def _is_saved(run_dir: Path, step: int) -> bool:
    """Return whether the run has a whole checkpoint of RL step `step`."""
    try:
        verify(run_dir / "checkpoints" / f"step-{step:06d}")
    except CheckpointError:
        return False
    return True


def _leave_evidence(composed: Composed, run_dir: Path, finished: int, causes: Sequence[str]) -> None:
    """Record the prompts of the step in which a run died twice, with the causes."""
    if len(causes) > 1 and finished < composed.config.max_rl_steps:
        prompts = [
            prompt.text for prompt in PromptData(composed.config.data, composed.config.seed).sampler.batch(finished)
        ]
        append_event(run_dir, POISON, {"rl_step": finished + 1, "causes": causes, "prompts": prompts})


def _pause(seconds: float, signals: StopSignals) -> signal.Signals | None:
    """Wait; the signal that ended the wait."""
    deadline = time.monotonic() + seconds
    while not signals.count and time.monotonic() < deadline:
        time.sleep(0.05)
    return signal.Signals(signals.number) if signals.count else None


def join(
    composed: Composed, place: Place, checkpoint: Path | None, attempt: ResumeAttempt | None, signals: StopSignals
) -> tuple[Path, Outcome]:
    """Be the rank that torchrun or SLURM started; returns the run directory and how the run ended.

    Args:
        checkpoint: what a resumed run continues from.

    Raises:
        ValueError: the allocation does not fit the processes that were started, or they share no directory.
    """
    trainers, rollouts = _counts(composed)

    def prepare() -> Path:
        signals.count_all()  # what exists from here on is ended in order
        run_dir = prepare_run_dir_or_exit(composed)
        _announce(composed, run_dir, checkpoint)
        return run_dir

    def rank_main(world: World, session: Session) -> None:
        if not composed.config.hardware.emulate:
            devices.take(world.local_rank)
            devices.claim(session, world.rank)
        advice = advisor().advise(composed, trainers, rollouts)
        run.fit(composed.config, checkpoint, advice, world, session)

    check_allocation(place, trainers, rollouts)
    numbers = numbering(parse_hardware(composed.config.hardware), trainers, rollouts)
    handshake, limits = Handshake(**composed.config.handshake), Limits(**composed.config.limits)
    end, grace = partial(_end_alone, attempt), partial(_stop_grace, composed.config)
    network, shown, lost = _network(composed), credentials(composed), _max_lost(composed.config)
    return attach(
        place,
        numbers,
        trainers,
        prepare,
        rank_main,
        handshake,
        limits,
        network,
        end,
        grace,
        signals,
        shown,
        lost,
    )


def report(run_dir: Path, outcome: Outcome, attempt: ResumeAttempt | None) -> None:
    """Write summary, trace, pictures and report, and show the end of the run. A resume that ended before its ranks had
    loaded the checkpoint is undone instead, and those of the run stay."""
    cause = None if outcome.cause is None else redact_text(outcome.cause)
    if outcome.status != "completed" and attempt is not None and attempt.undone():
        return _say_end(run_dir, outcome.status, cause, undone=True)
    summary = finish(run_dir, outcome.status, cause)
    Console(stderr=True).print(final_table(summary))
    for cause in summary["restarted"]:
        print(f"began again after: {cause}", file=sys.stderr)
    for loss in summary["lost"]:
        print(f"went on without a rank: {loss}", file=sys.stderr)
    if outcome.status != "completed":
        _say_end(run_dir, outcome.status, cause)


def _end_alone(attempt: ResumeAttempt | None, run_dir: Path, cause: str) -> None:
    """Close a run whose launcher, or process 0, can no longer do so."""
    undone = attempt is not None and attempt.undone()
    if not undone:
        close(run_dir, "failed", cause)
    print(run_dir, flush=True)
    _say_end(run_dir, "failed", cause, undone)


def _counts(composed: Composed) -> tuple[int, int]:
    """(trainers, rollouts) of a settled run."""
    return begins_with(composed.config)


def _stop_grace(config: DictConfig, run_dir: Path) -> float:
    """Seconds that a stop leaves to the step in progress, said on standard error."""
    seconds = config.allocation.stop_grace_s
    if seconds == "auto":
        measured = [row["step_s"] for row in JsonlTail(run_dir / METRICS).read() if is_number(row.get("step_s"))]
        wanted = max(_LEAST_S, _LONGEST_STEPS * max(measured[-10:])) if measured else _UNKNOWN_STEP_S
        seconds = min(wanted, scheduler_limit(time.time()) / 2)  # the other half is for saving
    print(
        f"stopping after the step in progress, for which there are {seconds:.0f} s; a second signal gives it up. "
        "Finished steps are saved either way.",
        file=sys.stderr,
        flush=True,
    )
    return float(seconds)


def _say_end(run_dir: Path, status: str, cause: str | None, undone: bool = False) -> None:
    """Say why a run ended early, and the way on where there is one."""
    print(f"{status}: {cause}", file=sys.stderr, flush=True)
    if undone:
        print(
            f"the checkpoint was not loaded, and the run is as it was; see {run_dir}/logs", file=sys.stderr, flush=True
        )
    elif any((run_dir / "checkpoints").glob("step-*")):
        print(
            f"to continue: make resume RUN={run_dir} (without a checkout: digenrl resume {run_dir})",
            file=sys.stderr,
            flush=True,
        )
