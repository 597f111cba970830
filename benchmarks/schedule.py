"""What each mechanism of the schedule buys, simulated: testbeds x models, every schedule at its best allocation.

`python benchmarks/schedule.py [--testbeds testbed_a,...] [--models ...]` prints the table and keeps it, dated, with a
plot, in benchmarks/results/. All GPUs are counted. `colocated naive` is what published loops do: an equal split, one
denoising step per forward, the published task size, the fastest of ddp, hsdp and fsdp that fits. `colocated` is the
best colocated run that the planner finds. Disaggregated rows search allocation, sharding, task size and K for
themselves, so that a mechanism is not credited with a better split.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from digenrl import config as configuration
from digenrl.preflight import workload
from digenrl.recompute import Recompute
from digenrl.simulate.candidate import Bench, Candidate
from digenrl.simulate.hardware import parse_hardware
from digenrl.simulate.outcome import Outcome, evaluate
from digenrl.simulate.planner import fitted, make_plan, step_batches, task_sizes
from digenrl.simulate.report import repeats

MODELS = ("wan21_flowgrpo", "hunyuanvideo_dancegrpo", "flux1_flowgrpo", "qwen_image_flowgrpo")
TESTBEDS = ("testbed_a", "testbed_b", "testbed_c", "testbed_ac", "unequal")
MECHANISMS: dict[str, dict[str, Any]] = {
    "naive": {"gap": 0, "tsp_shard": False},
    "+gap": {"gap": 1, "tsp_shard": False},
    "+tsp": {"gap": 1},
    "+tag": {"gap": 1, "tag": True},
    "+handoff": {"gap": 1, "tag": True, "handoff": True},
    "+async": {"gap": 1, "tag": True, "handoff": True, "async_steps": 1},
}
"""Disaggregated rows: each adds one mechanism."""


@dataclass(frozen=True)
class Row:
    """One schedule of one testbed and model."""

    name: str
    outcome: Outcome | None


def bench_of(experiment: str, hardware: str) -> tuple[Bench, int]:
    """The published workload of `experiment` on `hardware`, and its task size."""
    composed = configuration.load([f"experiment={experiment}", f"hardware={hardware}"], "plan")
    node: Any = OmegaConf.to_container(composed.config.hardware)
    return Bench(workload(composed), parse_hardware(node)), int(composed.config.sampling.task_size)


def naive_colocated(bench: Bench, task_size: int) -> Iterator[Candidate]:
    """Equal split, one step per forward, the experiment's own task size, held in every way that fits."""
    for sharding in ("ddp", "hsdp", "fsdp"):
        base = Candidate(
            bench.hardware.gpus, 0, sharding, None, task_size, gap=0, tsp_shard=False, static_claims=True, tsp_batch=1
        )
        trials = (replace(base, recompute=Recompute(inputs=float(whole))) for whole in (False, True))
        yield from [trial for trial in trials if not bench.misfits(trial)][:1]


def disaggregated(bench: Bench, mechanism: dict[str, Any]) -> Iterator[Candidate]:
    """Every eighth of the GPUs as trainers, every way to hold the model, two task sizes; K only with TSP."""
    gpus, sizes = bench.hardware.gpus, task_sizes(bench)
    tsp = mechanism.get("tsp_shard", True)
    unequal = len({pool.tflops for pool in bench.hardware.pools}) > 1
    firsts = [pool.name for pool in bench.hardware.pools] if len(bench.hardware.pools) > 1 else [None]
    for first in firsts:
        for eighth in range(1, 8):
            trainers = gpus * eighth // 8
            for size in dict.fromkeys((sizes[0], sizes[len(sizes) // 2])):
                for sharding in ("ddp", "fsdp"):
                    base = Candidate(
                        trainers, gpus - trainers, sharding, first, size, shares=unequal and tsp, **mechanism
                    )
                    candidate = fitted(bench, base)
                    if candidate is None:
                        continue
                    yield candidate if tsp else replace(candidate, tsp_batch=min(step_batches(bench, base)))


def refined(bench: Bench, best: Outcome) -> Iterator[Candidate]:
    """Allocations next to the best one."""
    gpus, width = bench.hardware.gpus, max(1, bench.hardware.gpus // 16)
    for trainers in range(best.candidate.trainers - width, best.candidate.trainers + width + 1):
        if 1 <= trainers < gpus:
            yield replace(best.candidate, trainers=trainers, rollouts=gpus - trainers)


def rows_of(bench: Bench, task_size: int) -> tuple[float, list[Row]]:
    """The bound and one row per schedule."""
    bound = bench.bound()
    naive = [evaluate(bench, candidate, bound, exact=True) for candidate in naive_colocated(bench, task_size)]
    rows = [Row("colocated naive", min(naive, key=lambda outcome: outcome.step_s, default=None))]
    claimed = [evaluate(bench, replace(outcome.candidate, static_claims=False), bound, exact=True) for outcome in naive]
    strong = [outcome for outcome in (make_plan(bench).best("colocated"), *claimed) if outcome is not None]
    rows.append(Row("colocated", min(strong, key=lambda outcome: outcome.step_s, default=None)))
    for name, mechanism in MECHANISMS.items():
        coarse = [evaluate(bench, candidate, bound) for candidate in disaggregated(bench, mechanism)]
        best = min(coarse, key=lambda outcome: outcome.step_s, default=None)
        if best is not None:
            fine = [c for c in refined(bench, best) if not bench.misfits(c)]
            near = min((evaluate(bench, c, bound) for c in fine), key=lambda outcome: outcome.step_s)
            best = evaluate(bench, min(best, near, key=lambda o: o.step_s).candidate, bound, exact=True)
        rows.append(Row(f"disaggregated {name}", best))
    return bound.seconds, rows


def lines_of(experiment: str, hardware: str, bound_s: float, rows: list[Row]) -> Iterator[str]:
    """Markdown of one testbed and model."""
    yield f"\n### {hardware}, {experiment} (bound {bound_s:.1f} s)\n"
    titles = "schedule | trainers+rollouts | hold | b | K | recompute | s/step | of bound | x naive | x colocated"
    yield f"| {titles} | largest limit |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    naive, strong = rows[0].outcome, rows[1].outcome
    for row in rows:
        outcome = row.outcome
        if outcome is None:
            yield f"| {row.name} | does not fit into memory | | | | | | | | | |"
            continue
        c, limit = outcome.candidate, outcome.limits()[0]
        against_naive = f"{naive.step_s / outcome.step_s:.2f}" if naive else "-"
        against_strong = f"{strong.step_s / outcome.step_s:.2f}" if strong else "-"
        yield (
            f"| {row.name} | {c.trainers}+{c.rollouts} | {c.sharding} | {c.task_size} | {c.tsp_batch} | "
            f"{repeats(outcome)} | {outcome.step_s:.1f} | {outcome.efficiency:.3f} | "
            f"{against_naive} | {against_strong} | {limit['cause']} {limit['seconds']:.1f} s |"
        )


def plot(results: dict[tuple[str, str], list[Row]], path: Path) -> None:
    """Share of the bound, a group of bars per testbed and model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = ["colocated naive", "colocated", *(f"disaggregated {name}" for name in MECHANISMS)]
    figure, axes = pyplot.subplots(figsize=(max(8, 0.9 * len(results)), 4))
    for i, name in enumerate(names):
        heights = [
            next((r.outcome.efficiency for r in rows if r.name == name and r.outcome), 0.0) for rows in results.values()
        ]
        axes.bar([x + 0.1 * i for x in range(len(results))], heights, 0.1, label=name)
    labels = [f"{hardware}\n{experiment.split('_')[0]}" for experiment, hardware in results]
    axes.set_xticks([x + 0.35 for x in range(len(results))], labels, fontsize=6)
    axes.set(ylabel="share of the bound", ylim=(0, 1))
    axes.legend(fontsize=6, ncol=4)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--testbeds", default=",".join(TESTBEDS))
    parser.add_argument("--models", default=",".join(MODELS))
    arguments = parser.parse_args()
    directory = Path(__file__).parent / "results"
    date = datetime.date.today().isoformat()
    text = [
        f"# Schedules, simulated ({date})",
        "",
        "Command: `python benchmarks/schedule.py`. Simulated from the cost model of configs/hardware (assumed",
        "efficiencies, no measurement); the bound is the linear programme of the design, without communication,",
        "recomputation or fill.",
        "A ratio above 1 is faster.",
    ]
    results: dict[tuple[str, str], list[Row]] = {}
    for hardware in arguments.testbeds.split(","):
        for experiment in arguments.models.split(","):
            bound_s, rows = rows_of(*bench_of(experiment, hardware))
            results[experiment, hardware] = rows
            lines = list(lines_of(experiment, hardware, bound_s, rows))
            print("\n".join(lines), flush=True)
            text += lines
    directory.mkdir(exist_ok=True)
    (directory / f"schedule-{date}.md").write_text("\n".join(text) + "\n", encoding="utf-8")
    plot(results, directory / f"schedule-{date}.png")
    print(directory / f"schedule-{date}.md")


if __name__ == "__main__":
    main()
