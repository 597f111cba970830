"""Plan: what a run will cost on a hardware profile, before anything is reserved. No GPU, no torch.

    digenrl plan experiment=wan21_flowgrpo hardware=testbed_ac [plan.async=true] [key=value ...]

    -m                sweep: key=a,b plans every combination
    --config-dir DIR  further options of groups, in DIR/experiment/, DIR/hardware/ and so on
    --cfg             print the composed configuration and stop
    --json            print plan.json and nothing else, for machines

What to book and what it costs, why, and the table; the last line on standard output is the path of
plan.json. Where nothing fits, the plan quantizes the frozen base (model.quantize=nf4) and says so.
Exit codes: 2 for a wrong configuration, 3 when nothing fits even then.
"""

from __future__ import annotations

import json
import math
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from digenrl import config as configuration
from digenrl.advisor import with_words
from digenrl.config import Composed
from digenrl.config.command_settings import PlanSettings
from digenrl.config.commands import shell_command
from digenrl.config.compose import own_directories
from digenrl.extensions.planner.advice import PlannerAdvisor
from digenrl.extensions.planner.bound import step_bound
from digenrl.extensions.planner.costing import Costing
from digenrl.extensions.planner.fewer_pools import FewerPools, faster_without
from digenrl.extensions.planner.outcome import CandidateOutcome, simulate_candidate
from digenrl.extensions.planner.plan_text import (
    COLUMNS,
    Booking,
    PlanRecord,
    as_json,
    asynchronous_line,
    booking_lines,
    candidate_table,
    changes_line,
    eligible_outcomes,
    evaluation_words,
    explain_winner,
    run_label,
    train_words,
    wrap_text,
)
from digenrl.extensions.planner.planner import Plan, PlanError, make_plan
from digenrl.extensions.planner.reading import candidate_of, costing_of, drawn_of, fixed_choices
from digenrl.record.run_dir import TRACE, write_trace
from digenrl.record.spans import perfetto_events
from digenrl.settle import allocated_ranks, settle_run, with_task_size

NOTHING_FITS = 3
"""Exit code of a plan in which no candidate fits."""
STOCK_STRATEGY = "digenrl.strategy.disaggregated.DisaggregatedStrategy"


def main(words: list[str]) -> int:
    """Plan once, and return the exit code."""
    composed = configuration.load_or_exit(
        [word for word in words if word != "--json"], "plan", __doc__
    )
    settings = composed.settings
    assert isinstance(settings, PlanSettings)
    try:
        made = plan_experiment(composed)
    except ValueError as error:
        print(f"cannot plan: {error}", file=sys.stderr)
        return NOTHING_FITS if isinstance(error, PlanError) else 2
    run_dir = configuration.prepare_run_dir_or_exit(composed)
    plan, asked, asynchronous, booking = made.plan, made.asked, made.asynchronous, made.booking
    path = write_plan(made, settings.plan.plot, run_dir)
    if "--json" in words:
        print(path.read_text(encoding="utf-8"), end="")
        return 0
    said = [*booking_lines(plan, asynchronous, booking), ""]
    said += [*explain_winner(plan, asynchronous), *splitting_advice(composed, made)]
    said += [*idle_pool_advice(made.fewer, made.winner), ""]
    lines = [line for text in said for line in wrap_text(text) or [""]]
    lines += candidate_table(plan, asynchronous, booking, settings.plan.show, asked)
    if asked is not None:
        lines += wrap_text(
            f"as configured, {run_label(asked)} of {plan.costing.hardware.gpus} GPUs: "
            f"{asked.step_s:.2f} s per step, {asked.step_s / made.winner.step_s:.2f} x the best"
        )
    if made.refused:
        lines += wrap_text(f"as configured: does not run: {made.refused}")
    if (target := composed.settings.strategy["_target_"]) != STOCK_STRATEGY:
        lines += wrap_text(
            f"The plan simulates the stock hooks: what {target} overrides is not in these figures."
        )
    print("\n".join(lines))
    words = [*train_words(made.winner), *evaluation_words(made.winner, booking.drawn)]
    print(f"\n{fold_command(to_train(composed, changing_words(composed, words)))}")
    print(path)
    return 0


def plan_of(words: Sequence[str]) -> PlanRecord:
    """Return the content of plan.json for the words of a command line; nothing is written.

    Raises:
        ConfigError: words that do not fit.
        PlanError: nothing fits.
        ValueError: the allocation cannot be placed on the hardware.
    """
    return plan_experiment(configuration.load(words, "plan")).plan_json()


def splitting_advice(composed: Composed, made: Made) -> list[str]:
    """Return advice for a plan without rollout ranks: what one-step asynchrony would give, and what
    would change the answer. [] if the plan has rollouts."""
    if made.winner.candidate.rollouts:
        return []
    other = made.plan.best_of_kind("async")
    if not made.asynchronous:
        with suppress(PlanError):
            steps = composed.settings.plan.simulated_steps  # type: ignore[attr-defined]
            other = make_plan(made.plan.costing, steps, {"async_steps": 1}).best_of_kind("async")
    return [
        asynchronous_line(made.plan, other, made.asynchronous),
        changes_line(made.plan.costing.hardware),
    ]


def idle_pool_advice(fewer: FewerPools | None, winner: CandidateOutcome) -> list[str]:
    """Return a line where the run would be faster without one of the pools; [] elsewhere."""
    if fewer is None:
        return []
    return [
        f"Leave the pool {fewer.pool} out: {run_label(fewer.best)}, {fewer.best.step_s:.2f} s per "
        f"step, {winner.step_s / fewer.best.step_s:.2f} times as fast with {fewer.count} GPUs "
        f"fewer. Plan it with {fewer.word}."
    ]


def changing_words(composed: Composed, words: Sequence[str]) -> list[str]:
    """Return the words that change something in `composed`."""
    tree, after = composed.settings.tree, with_words(composed, words).settings.tree

    def changes_value(word: str) -> bool:
        key = word.partition("=")[0].lstrip("+")
        return bool(OmegaConf.select(tree, key) != OmegaConf.select(after, key))

    return [word for word in words if changes_value(word)]


def fold_command(command: str) -> str:
    """Return a command in lines of at most `COLUMNS` columns for a shell. Words with quotes, such
    as make's ARGS, stay whole."""
    if len(command) <= COLUMNS or "'" in command:
        return command
    return " \\\n".join(
        textwrap.wrap(
            command,
            COLUMNS - 2,
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    )


def to_train(composed: Composed, planned: Sequence[str]) -> str:
    """Return the command that trains with the words `planned` of a plan, and every word of the
    user's but `plan.*` and those that the plan says again."""
    chosen = [f"{group}={composed.choices[group]}" for group in ("experiment", "hardware")]
    again = {word.partition("=")[0] for word in [*chosen, *planned]} | {"hydra.searchpath"}
    own = [
        word
        for word in composed.overrides
        if not word.startswith(("plan.", "hydra.run."))
        and word.partition("=")[0].lstrip("+~") not in again
    ]
    directories = own_directories(composed.overrides)
    flags = [word for path in directories for word in ("--config-dir", str(path))]
    return shell_command("train", [*chosen, *flags, *own, *planned])


@dataclass(frozen=True)
class Made:
    """A plan, and its answers to the configuration."""

    plan: Plan
    winner: CandidateOutcome
    asked: CandidateOutcome | None
    """Outcome of `as_configured`; None where `train` would refuse the configuration."""
    refused: str
    """Reason why `train` would refuse the configuration, with what would run; "" where it runs."""
    asynchronous: bool
    """Whether the winner may use weights one version old."""
    booking: Booking
    fewer: FewerPools | None
    """A faster run that leaves a pool out, or None."""

    def plan_json(self) -> PlanRecord:
        """Return the contents of plan.json."""
        content = as_json(self.plan, self.asked, self.refused, self.asynchronous, self.booking)
        fewer = None if self.fewer is None else {self.fewer.pool: self.fewer.best.step_s}
        content["step_s_without_pool"] = fewer
        return content


def plan_experiment(composed: Composed) -> Made:
    """Make the plan of a configuration (configs/plan.yaml).

    Raises:
        PlanError: nothing fits.
        ValueError: the configuration cannot be placed on its hardware.
    """
    composed = with_task_size(composed, PlannerAdvisor())
    settings = composed.settings
    assert isinstance(settings, PlanSettings)
    asynchronous = bool(settings.plan.asynchronous or settings.schedule.async_steps)
    costing = costing_of(composed)
    plan = _make_fitting_plan(costing, settings.plan.simulated_steps, asynchronous)
    free = settings.schedule.auto and fixed_choices(composed, costing).keys() == {"skip_zero"}
    found = eligible_outcomes(plan, bool(settings.schedule.async_steps)) if free else []
    asked, refused = found[0] if found else None, ""
    if not found:
        try:
            asked = as_configured(composed)
        except ValueError as refusal:
            refused = str(refusal)
    winner = eligible_outcomes(plan, asynchronous)[0]
    steps = settings.plan.simulated_steps
    fewer = faster_without(plan.costing, winner.step_s, steps, asynchronous)
    return Made(plan, winner, asked, refused, asynchronous, booking_of(settings), fewer)


def _make_fitting_plan(costing: Costing, steps: int | None, asynchronous: bool) -> Plan:
    """Make the plan; where nothing fits, with the frozen base in 4 bits.

    Raises:
        PlanError: nothing fits even then. The message says so where fewer GPUs would fit.
    """
    try:
        return make_plan(costing, steps, asynchronous=asynchronous)
    except PlanError as error:
        with suppress(PlanError):
            return make_plan(costing.quantized, steps, asynchronous=asynchronous)
        fewer = faster_without(costing, math.inf, steps, asynchronous)
        if fewer is None:
            raise
        raise PlanError(
            f"{error} It fits without the pool {fewer.pool}: add {fewer.word} "
            f"({run_label(fewer.best)}, {fewer.best.step_s:.2f} s per step)."
        ) from error


def as_configured(composed: Composed) -> CandidateOutcome:
    """Simulate the run that `train` would start from this configuration.

    Raises:
        ValueError: `train` would refuse the configuration; the message is the one of `train`.
    """
    run = settle_run(composed, PlannerAdvisor())
    costing = costing_of(run)
    candidate = candidate_of(
        run.settings, *allocated_ranks(run.settings), costing.work.trained_steps
    )
    return simulate_candidate(costing, candidate, step_bound(costing), exact=True)


def booking_of(settings: PlanSettings) -> Booking:
    """Return the run's length and its evaluations; `callbacks.evaluation` may be missing."""
    steps = settings.max_rl_steps
    if (settings.callbacks or {}).get("evaluation") is None:
        return Booking(steps, settings.plan.price_per_gpu_hour)
    every = settings.node_at("callbacks.evaluation").every
    times = 2 if not every else 1 + -(-steps // every)
    drawn = drawn_of(settings)
    return Booking(steps, settings.plan.price_per_gpu_hour, times, drawn)


def write_plan(made: Made, plot: bool, run_dir: Path) -> Path:
    """Write plan.json, trace.json and, if `plot`, a Gantt chart of the winner; return the path of
    plan.json."""
    traced = simulate_candidate(
        made.plan.costing, made.winner.candidate, made.plan.bound_s, exact=True, trace=True
    )
    write_trace(run_dir / TRACE, perfetto_events(traced.result.spans))
    if plot:
        from digenrl.report.page.timeline import save_gantt  # matplotlib

        save_gantt(traced.result.spans, traced.result.step_ends, run_dir / "plots" / "gantt.png")
    path = run_dir / "plan.json"
    path.write_text(json.dumps(made.plan_json(), indent=1) + "\n", encoding="utf-8")
    return path.absolute()
