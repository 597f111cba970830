"""How speed grows with ranks: simulated to 256 GPUs, emulated with real processes to 48.

    python -m benchmarks.scaling [experiment=wan21_flowgrpo] [simulated=8,16,32,64,128,256]
    [emulated=4,8,16,32,48]

An empty list (emulated=) leaves that part out.

Simulated: one RL step of the published batch on ever more GPUs of h20x16; the planner finds the
best run for each number. Ratio = (samples/s per GPU) / (the same on the smallest number). The
algorithm fixes the batch, so the batch does not grow. The ratio falls where a rank's work has too
few groups or micro-batches.

Emulated: ranks and prompts grow together, with two prompts for each four ranks, of which one
trains. So a step would last equally long if the runtime cost nothing. Ratio = (the smallest
cluster's step) / step: what store, claims, transfers and collectives of real processes cost.
`cores` is what the run kept busy on this machine.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from benchmarks import emulated
from benchmarks._shared import RESULTS, Report, options
from benchmarks.schedule import bench_of
from digenrl.extensions.planner.costing import Costing
from digenrl.extensions.planner.planner import make_plan

OUTPUT = Path("outputs/scaling")
STEP_SECONDS = 8.0
"""Seconds of an emulated step."""


def grown(costing: Costing, gpus: int) -> Costing:
    """`costing` on `gpus` GPUs of its first pool."""
    pool = replace(
        costing.hardware.pools[0],
        count=gpus,
        per_node=min(gpus, costing.hardware.pools[0].per_node),
    )
    return replace(costing, hardware=replace(costing.hardware, pools=(pool,)))


def simulated(report: Report, experiment: str, sizes: list[int]) -> list[float]:
    """One row for each number of GPUs; the ratios."""
    costing, _ = bench_of(experiment, "h20x16")
    speeds = []
    for gpus in sizes:
        best = make_plan(grown(costing, gpus)).best_of_kind("on_policy")
        if best is None:
            raise SystemExit(
                f"{experiment} does not fit on {gpus} GPUs: start with more, simulated=..."
            )
        speeds.append(costing.work.samples / best.step_s / gpus)
        candidate = best.candidate
        ranks, ratio = f"{candidate.trainers}+{candidate.rollouts}", speeds[-1] / speeds[0]
        report.row(
            "simulated", gpus, ranks, candidate.name, f"{best.step_s:.1f}", f"{ratio:.3f}", "-"
        )
    return [speed / speeds[0] for speed in speeds]


def measured(report: Report, sizes: list[int]) -> list[float]:
    """One emulated run for each number of ranks; the ratios."""
    steps: list[float] = []
    scale = 1.0
    for ranks in [*sizes[:1], *sizes]:  # the first run only finds the time scale
        trainers, run_dir = max(1, ranks // 4), OUTPUT / f"{ranks}-ranks"
        words = [
            "experiment=qwen_image_flowgrpo",
            "hardware=h20x16",
            f"hardware.pools.c.count={ranks}",
        ]
        words += [
            "schedule=gap_tsp",
            "schedule.tsp.batch=1",
            "sampling.task_size=1",
            "data.group_size=8",
        ]
        words += [f"allocation.trainers={trainers}", f"allocation.rollouts={ranks - trainers}"]
        words += [f"data.prompts_per_batch={max(2, ranks // 2)}", "algorithm.updates_per_batch=1"]
        if scale == 1.0:
            emulated.train(run_dir, 0.02, 2, words)
            first, last = emulated.published(run_dir)
            scale = 0.02 * STEP_SECONDS / (last - first)
            continue
        cores = emulated.train(run_dir, scale, 3, words)
        ends = emulated.published(run_dir)
        steps.append((ends[-1] - ends[0]) / (len(ends) - 1))
        ratio = steps[0] / steps[-1]
        split = f"{trainers}+{ranks - trainers}"
        report.row(
            "emulated", ranks, split, "gap_tsp", f"{steps[-1]:.2f}", f"{ratio:.3f}", f"{cores:.2f}"
        )
    return [steps[0] / step for step in steps]


def plot(
    path: Path,
    simulated_at: list[int],
    expected: list[float],
    emulated_at: list[int],
    found: list[float],
) -> None:
    """Both ratios over the number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.4), layout="constrained")
    if simulated_at:
        axes.plot(simulated_at, expected, "o-", label="simulated: published batch on more GPUs")
    if emulated_at:
        axes.plot(emulated_at, found, "s-", label="emulated: batch grows with the ranks")
    axes.set_xscale("log", base=2)
    ticks = sorted({*simulated_at, *emulated_at})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set(xlabel="ranks", ylabel="efficiency against the smallest", ylim=(0, 1.15))
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> int:
    defaults = {
        "experiment": "wan21_flowgrpo",
        "simulated": "8,16,32,64,128,256",
        "emulated": "4,8,16,32,48",
    }
    given = options(sys.argv[1:], defaults, {"simulated": "8,16", "emulated": "4,8"})
    at = {
        kind: [int(size) for size in given[kind].split(",") if size]
        for kind in ("simulated", "emulated")
    }
    notes = (
        f"Simulated: {given['experiment']}, its published batch, best on-policy run on h20x16's "
        "GPU. "
        "Emulated: real processes, sleeping networks, batch in proportion to the ranks."
    )
    columns = ("how", "ranks", "trainers+rollouts", "schedule", "s/step", "ratio", "cores busy")
    report = Report("Scaling", notes, columns)
    expected = simulated(report, given["experiment"], at["simulated"])
    found = measured(report, at["emulated"])
    code = report.close(given)
    if given["quick"] != "true":
        date = emulated.datetime.date.today().isoformat()
        plot(RESULTS / f"scaling-{date}.png", at["simulated"], expected, at["emulated"], found)
    return code


if __name__ == "__main__":
    sys.exit(main())
