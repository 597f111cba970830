"""Emulated clusters against the simulator: real processes, store, transfers and optimizer steps,
sleeping networks.

`python -m benchmarks.emulated [--testbeds h20x16,...] [--models ...] [--schedules ...]
[--seconds 45] [--again] [--overheads]`

Every GPU of the testbed is a process of `digenrl.cli.train` with `hardware.emulate=true`;
`time_scale` makes a step last about `--seconds`, and three steps are measured after one that warms
up. The prediction is the simulator's, with the same sleeps and with this machine's own overheads in
place of the profile's links and optimizer. The overheads come from two short separate runs with as
many ranks (`overheads`), never from the runs compared. One has rollouts, in the other every rank
generates and trains.

Limits: trainers each hold the whole model (ddp), because sharded ones would gather tiny tensors
where real ones gather gigabytes. Advantages are of each group by itself. The allocation of each
schedule is the simulator's best. `of bound` is the bound of the testbed, in which communication,
recomputation and fill are free, over the measured step.

A case takes minutes, so its result is kept as a line of benchmarks/results/emulated.jsonl. The
command runs the missing cases (`--again` runs all) and writes a dated table of every case. A
machine that is busy with other work adds to the measured steps; `cores busy` is what the run itself
asked for.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.schedule import MECHANISMS, bench_of, disaggregated, naive_colocated
from digenrl import config as configuration
from digenrl import parts
from digenrl.extensions.planner.bound import step_bound
from digenrl.extensions.planner.candidate import Candidate
from digenrl.extensions.planner.costing import Costing
from digenrl.extensions.planner.durations import rank_durations
from digenrl.extensions.planner.outcome import CandidateOutcome, simulate_candidate
from digenrl.extensions.planner.plan_text import train_words
from digenrl.extensions.planner.virtual_cluster import Cluster
from digenrl.extensions.planner.virtual_run import simulate_run
from digenrl.schedule import place_fragment
from digenrl.settle import trained_steps

MODELS = ("qwen_image_flowgrpo", "flux1_flowgrpo")
TESTBEDS = ("h20x16", "l40x32_h20x16")
SCHEDULES = {
    "colocated_naive": None,
    "colocated": None,
    "sync": "naive",
    "gap": "+gap",
    "gap_tsp": "+tsp",
    "gap_tsp_tag": "+tag",
    "full": "+async",
}
"""Schedule of configs/schedule -> mechanisms of benchmarks/schedule.py (None: no rollout ranks)."""
WARM_UP, STEPS = 1, 3
PER_GROUP = "algorithm.advantage.std=group"
"""Deviations over the whole batch, which some recipes take, would leave nothing for GAP to do."""
STEP_SLEEP = 0.06 / 16
"""Seconds of a denoising step per rank of the run, in the run that measures overheads. With more
ranks each step is longer. So the machine has the same number of events per second, of the order of
the compared runs', and its cores do not fill up."""
RESULTS = Path(__file__).parent / "results"
KEPT = RESULTS / "emulated.jsonl"


@dataclass(frozen=True)
class Overheads:
    """Real seconds that a machine adds to an emulated rank's sleeps (`overheads` measures them)."""

    task: float = 0.0
    """Seconds of a task beside its denoising steps: claim, conditioning, decode, scoring."""
    step: float = 0.0
    """Seconds added to a denoising step."""
    micro_batch: float = 0.0
    """Seconds of a micro-batch: Lightning's loop, loss, backward."""
    update: float = 0.0
    """Gradient reduction and optimizer step."""
    publish: float = 0.0
    """Copy and digest of the published weights, before the trainers go on."""
    weights: float = 0.0
    """Seconds from the end of `publish` until a rollout rank has adopted the weights. Negative if
    rollouts are ready first: buckets leave while trainer 0 still copies, and its span ends after
    theirs."""
    deliver: float = 0.0
    """A finished task on its way to the trainers."""
    turn: float = 0.0
    """Between publication and the next RL step, for each trainer: the loop of Lightning and its
    callbacks. All have it at the same moment and share the cores."""


def emulated_cluster(
    costing: Costing, candidate: Candidate, time_scale: float, overheads: Overheads
) -> Cluster:
    """What the simulator must be given to predict an emulated run: scaled sleeps, and this
    machine's own seconds in place of the profile's links and optimizer."""
    cluster, turn = costing.build_cluster(candidate), overheads.turn * candidate.trainers
    ranks = tuple(
        replace(
            rank,
            step_seconds=rank.step_seconds * time_scale + overheads.step,
            encode_seconds=rank.encode_seconds * time_scale,
            decode_seconds=rank.decode_seconds * time_scale,
            score_seconds=rank.score_seconds * time_scale + overheads.task,
            cell_seconds=rank.cell_seconds * time_scale,
            exposed_seconds=overheads.micro_batch if rank.role == "trainer" else 0.0,
            adopt_seconds=0.0,
        )
        for rank in cluster.ranks
    )
    return replace(
        cluster,
        ranks=ranks,
        reduce_seconds=overheads.update,
        optimizer_seconds=0.0,
        snapshot_seconds=overheads.publish + turn,
        publish_seconds=overheads.weights - turn,
        deliver_seconds=overheads.deliver,
        switch_seconds=0.0,
    )


@dataclass(frozen=True)
class Case:
    """One emulated run."""

    testbed: str
    model: str
    schedule: str
    seconds: float
    """Wished length of a step."""

    @property
    def name(self) -> str:
        return f"{self.testbed}-{self.model}-{self.schedule}"


def chosen(
    costing: Costing, task_size: int, schedule: str, like: dict[str, Any] | None = None
) -> CandidateOutcome | None:
    """The simulator's best candidate with replicated trainers for a schedule, of those `like` a
    kept result; None when none fits."""
    mechanism = SCHEDULES[schedule]
    if mechanism is not None:
        trials = [c for c in disaggregated(costing, MECHANISMS[mechanism]) if c.sharding == "ddp"]
    else:
        trials = [c for c in naive_colocated(costing, task_size) if c.sharding == "ddp"]
        if schedule == "colocated":
            sizes = sorted({1, task_size})
            shared = [
                c.with_changes(static_claims=False, task_size=b, recompute=None)
                for c in trials
                for b in sizes
            ]
            trials = [
                c.with_changes(gap=gap)
                for c in shared
                if not costing.find_misfits(c)
                for gap in (0, 1)
            ]
    if like is not None:
        trials = [c for c in trials if _shape(c) == {name: like[name] for name in _shape(c)}]
    bound_s = step_bound(costing)
    best = min(
        (simulate_candidate(costing, c, bound_s) for c in trials),
        key=lambda outcome: outcome.step_s,
        default=None,
    )
    return best and simulate_candidate(costing, best.candidate, bound_s, exact=True)


def _shape(candidate: Candidate) -> dict[str, Any]:
    spec, ranks = candidate.spec, f"{candidate.trainers}+{candidate.rollouts}"
    return {"ranks": ranks, "task_size": spec.task_size, "tsp_batch": spec.tsp_batch}


def run_case(case: Case, own: Overheads, output: Path) -> dict[str, Any] | None:
    """Predict and run one case; None when nothing of the kind fits into memory."""
    costing, task_size = bench_of(case.model, case.testbed, PER_GROUP)
    outcome = chosen(costing, task_size, case.schedule)
    if outcome is None:
        return None
    candidate, scale = outcome.candidate, case.seconds / outcome.step_s
    words = [
        f"experiment={case.model}",
        f"hardware={case.testbed}",
        f"schedule={case.schedule}",
        PER_GROUP,
    ]
    words += train_words(outcome)
    cores_busy = train(output / case.name, scale, WARM_UP + STEPS, words)
    ends = published(output / case.name)
    return {
        **asdict(case),
        **_shape(candidate),
        "time_scale": scale,
        "measured_s": (ends[WARM_UP + STEPS - 1] - ends[WARM_UP - 1]) / STEPS,
        "predicted_s": predict(costing, candidate, scale, own),
        "bound_s": outcome.bound_s * scale,
        "cores_busy": cores_busy,
        "overheads": asdict(own),
        "date": datetime.date.today().isoformat(),
    }


def predicted_again(row: dict[str, Any], own: Overheads) -> dict[str, Any]:
    """A kept result with the prediction that other overheads give."""
    costing, task_size = bench_of(row["model"], row["testbed"], PER_GROUP)
    outcome = chosen(costing, task_size, row["schedule"], row)
    assert outcome is not None, (
        f"{row['testbed']}, {row['schedule']}: nobody plans such a run; run it again (--again)"
    )
    predicted = predict(costing, outcome.candidate, row["time_scale"], own)
    return row | {"predicted_s": predicted, "overheads": asdict(own)}


def predict(costing: Costing, candidate: Candidate, scale: float, own: Overheads) -> float:
    """Simulated seconds per emulated step."""
    cluster = emulated_cluster(costing, candidate, scale, own)
    return simulate_run(costing.schedule_spec(candidate), cluster, WARM_UP + STEPS).step_s


def train(run_dir: Path, time_scale: float, steps: int, words: Sequence[str]) -> float:
    """An emulated run in `run_dir`; returns the cores that it kept busy.

    Raises:
        RuntimeError: it failed; names its log.
    """
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    emulation = [
        "hardware.emulate=true",
        f"hardware.time_scale={time_scale}",
        f"max_rl_steps={steps}",
        "logger=none",
    ]
    command = [sys.executable, "-m", "digenrl.cli.train", *words, *emulation]
    command += ["~callbacks.evaluation", "~callbacks.checkpoint", f"hydra.run.dir={run_dir}"]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    log = run_dir.with_suffix(".log")
    with log.open("w") as out:
        code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        raise RuntimeError(f"{run_dir.name} ended with code {code}: see {log}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / (
        time.monotonic() - began
    )


def spans_of(run_dir: Path) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """(role, stage) -> spans, by start."""
    table: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for file in sorted((run_dir / "spans").glob("rank-*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            span = json.loads(line)
            table[span["role"], span["stage"]].append(span)
    for spans in table.values():
        spans.sort(key=lambda span: float(span["start"]))
    return table


def published(run_dir: Path) -> list[float]:
    """Run clock at which trainer 0 had published each step's weights."""
    spans = [
        span
        for span in spans_of(run_dir)["trainer", "publish"]
        if span["rank"] == 0 and span["version"] > 0
    ]
    return [float(span["end"]) for span in spans]


def overheads(testbed: str, colocated: bool, output: Path) -> Overheads:
    """Measure what this machine adds to sleeps when it runs as many ranks as `testbed` has GPUs.
    Half of the ranks are trainers. With `colocated` all are, and begin their rounds of generation
    together.

    A run of its own: another group size and other lengths than any of the runs compared. Each
    figure is the mean of (span - sleep): ranks that wake up together queue for the cores, and the
    mean counts that.
    """
    gpus = bench_of(MODELS[0], testbed)[0].hardware.gpus
    trainers, maker = (gpus, "trainer") if colocated else (gpus // 2, "rollout")
    run_dir = output / f"{testbed}-overheads{'-colocated' if colocated else ''}"
    words = [
        f"experiment={MODELS[0]}",
        f"hardware={testbed}",
        "schedule=gap_tsp",
        "schedule.tsp.batch=1",
        "parallel.sharding=ddp",
        f"allocation.trainers={trainers}",
        f"allocation.rollouts={gpus - trainers}",
        f"data.group_size={2 * gpus}",
        "data.prompts_per_batch=4",
        "sampling.steps=5",
        "sampling.task_size=1",
        "algorithm.train_steps.stop=4",
        PER_GROUP,
    ]
    composed = configuration.load([*words, "hardware.emulate=true"])
    unscaled = rank_durations(composed, trainers, gpus - trainers)
    # Where nobody waits for samples, every rank has an event as often as its sleeps are short.
    slowest, shortest = (
        max(rank.step for rank in unscaled),
        min(min(rank.step, rank.cell) for rank in unscaled),
    )
    scale = STEP_SLEEP * gpus / (shortest if colocated else slowest)
    sleeps = [rank.scaled_by(scale) for rank in unscaled]
    train(run_dir, scale, 3, words)
    count = trained_steps(composed.settings)
    spec = parts.schedule_spec(composed.settings, count, trainers)
    spans = spans_of(run_dir)
    steps, tasks = [], []
    others: dict[int, list[float]] = defaultdict(list)  # rank -> when it began to train or to wait
    for span in (*spans[maker, "train"], *spans[maker, "wait"]):
        others[span["rank"]].append(span["start"])
    for earlier, later in _pairs(spans[maker, "generate"]):
        sleep = sleeps[earlier["rank"]]
        steps.append(_seconds(earlier) / spec.denoise_steps - sleep.step)
        encoded = sleep.encode if later["group"] != earlier["group"] else 0.0
        at_once = not any(
            earlier["start"] < begun < later["start"] for begun in others[earlier["rank"]]
        )
        if later["version"] == earlier["version"] and at_once:
            tasks.append(later["start"] - earlier["end"] - sleep.decode - encoded)
    micro = []
    for span in spans["trainer", "train"]:
        own = place_fragment(spec, trainers, (span["group"],))[span["rank"]]
        slept = sleeps[span["rank"]].cell * sum(
            len(block.steps) for blocks in own for block in blocks
        )
        micro.append((_seconds(span) - slept) / len(own))
    published = {span["version"]: span for span in spans["trainer", "publish"] if span["rank"] == 0}
    ended: dict[int, float] = defaultdict(float)
    for span in spans["trainer", "train"]:
        ended[span["step"]] = max(ended[span["step"]], span["end"])
    adopted = [span for span in spans["rollout", "adopt"] if span["version"] in range(1, 3)]
    return Overheads(
        task=mean(tasks),
        step=mean(steps),
        micro_batch=mean(micro),
        update=mean(max(0.0, published[step + 1]["start"] - end) for step, end in ended.items()),
        publish=mean(_seconds(span) for span in published.values()),
        weights=mean(span["end"] - published[span["version"]]["end"] for span in adopted)
        if adopted
        else 0.0,
        deliver=mean(_until_sent(span, spans[maker, "send"]) for span in spans[maker, "decode"]),
        turn=mean(_turns(spans)) / trainers,
    )


def _seconds(span: dict[str, Any]) -> float:
    return float(span["end"]) - float(span["start"])


def _pairs(spans: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Consecutive spans of each rank."""
    for rank in {span["rank"] for span in spans}:
        yield from pairwise([span for span in spans if span["rank"] == rank])


def _turns(spans: dict[tuple[str, str], list[dict[str, Any]]]) -> Iterator[float]:
    """Yield, for each trainer and RL step, the seconds from its publication to its next span."""
    for rank in {span["rank"] for span in spans["trainer", "train"]}:
        own = sorted(
            (float(span["start"]), float(span["end"]), stage)
            for (role, stage), found in spans.items()
            for span in found
            if (role, span["rank"]) == ("trainer", rank)
        )
        yield from (
            later[0] - earlier[1]
            for earlier, later in pairwise(own)
            if earlier[2] == "publish" and later[2] != "publish"
        )


def _until_sent(decode: dict[str, Any], sends: Sequence[dict[str, Any]]) -> float:
    """Return the seconds from the end of a decode until its rank has sent the next result."""
    own = [
        span for span in sends if span["rank"] == decode["rank"] and span["start"] >= decode["end"]
    ]
    return float(own[0]["end"] - decode["end"]) if own else 0.0


def lines_of(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Markdown: a table per testbed and model, and whether the simulator ranks the schedules as the
    runs do."""
    for testbed, model in dict.fromkeys((row["testbed"], row["model"]) for row in rows):
        own = [row for row in rows if (row["testbed"], row["model"]) == (testbed, model)]
        speeds = {row["schedule"]: row["measured_s"] / row["time_scale"] for row in own}
        yield f"\n### {testbed}, {model}\n"
        kinds = {"with rollouts" if SCHEDULES[row["schedule"]] else "colocated": row for row in own}
        for name, first in kinds.items():
            apart = ", ".join(
                f"{what} {1e3 * seconds:.1f}" for what, seconds in first["overheads"].items()
            )
            yield f"Overheads of this machine, measured apart, {name} (ms): {apart}.\n"
        yield (
            "| schedule | ranks | b | K | time scale | measured | predicted | error | of bound | x "
            "naive | cores |"
        )
        yield "|---|---|---|---|---|---|---|---|---|---|---|"
        for row in own:
            ratio = (
                f"{speeds['colocated_naive'] / speeds[row['schedule']]:.2f}"
                if "colocated_naive" in speeds
                else "-"
            )
            error = 100 * (row["predicted_s"] / row["measured_s"] - 1)
            yield (
                f"| {row['schedule']} | {row['ranks']} | {row['task_size']} | {row['tsp_batch']} | "
                f"{row['time_scale']:.4f} | {row['measured_s']:.2f} | {row['predicted_s']:.2f} | "
                f"{error:+.1f}% | "
                f"{row['bound_s'] / row['measured_s']:.3f} | {ratio} | {row['cores_busy']:.2f} |"
            )
        orders = [
            [row["schedule"] for row in sorted(own, key=lambda row: row[key] / row["time_scale"])]
            for key in ("measured_s", "predicted_s")
        ]
        if orders[0] == orders[1]:
            yield f"\nThe predicted order of the {len(own)} is the measured one."
        else:
            yield f"\nFastest first, measured: {', '.join(orders[0])}."
            yield f"Fastest first, predicted: {', '.join(orders[1])}."


def keep(rows: Sequence[dict[str, Any]]) -> None:
    """Write all results, a line each."""
    KEPT.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write(rows: Sequence[dict[str, Any]]) -> Path:
    """The dated table of all results."""
    date = datetime.date.today().isoformat()
    path = RESULTS / f"emulated-{date}.md"
    text = [
        f"# Emulated clusters against the simulator ({date})",
        "",
        f"Command: `python -m benchmarks.emulated`, {os.cpu_count()} cores. Three steps after one "
        "that warms up; real",
        "processes, sleeping networks, trainers replicated. Seconds are of the emulated run; "
        "divide by the time scale",
        "for the testbed's. `x naive` compares with the measured colocated_naive of the same "
        "table; `cores` is what",
        "the run kept busy.",
    ]
    path.write_text("\n".join([*text, *lines_of(rows)]) + "\n", encoding="utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--testbeds", default=",".join(TESTBEDS))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--output", type=Path, default=Path("outputs/emulated"))
    parser.add_argument("--again", action="store_true")
    parser.add_argument(
        "--overheads",
        action="store_true",
        help="measure them again, and predict what is kept with them",
    )
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []
    wanted = [
        Case(testbed, model, schedule, arguments.seconds)
        for testbed in arguments.testbeds.split(",")
        for model in arguments.models.split(",")
        for schedule in arguments.schedules.split(",")
    ]

    @cache
    def measured(testbed: str, colocated: bool) -> Overheads:
        return overheads(testbed, colocated, arguments.output)

    def own(testbed: str, schedule: str) -> Overheads:
        return measured(testbed, SCHEDULES[schedule] is None)

    if arguments.overheads:
        again = {(case.testbed, case.model, case.schedule) for case in wanted}
        rows = [
            predicted_again(row, own(row["testbed"], row["schedule"]))
            if (row["testbed"], row["model"], row["schedule"]) in again
            else row
            for row in rows
        ]
        keep(rows)
    for case in wanted:
        known = [
            row
            for row in rows
            if (row["testbed"], row["model"], row["schedule"])
            == (case.testbed, case.model, case.schedule)
        ]
        if known and not arguments.again:
            continue
        row = run_case(case, own(case.testbed, case.schedule), arguments.output)
        if row is None:
            print(f"{case.name}: no replicated trainer fits into memory", flush=True)
            continue
        rows = [row for row in rows if row not in known] + [row]
        order = list(SCHEDULES)
        rows.sort(key=lambda row: (row["testbed"], row["model"], order.index(row["schedule"])))
        keep(rows)
        print(
            f"{case.name}: measured {row['measured_s']:.2f} s, predicted {row['predicted_s']:.2f} "
            "s",
            flush=True,
        )
    if rows:
        print("\n".join(lines_of(rows)))
        print(write(rows))


if __name__ == "__main__":
    main()
