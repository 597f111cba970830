"""Does it learn, at what price, how surely? Whole training runs on the digits task (`fewstep`: the
drawn scenes), a table and a plot per study.

    python -m benchmarks.learning [study=algorithms] [seeds=0,1,2] [steps=40]
    [runs=outputs/learning] [key=value ...]

Studies:
    algorithms  every algorithm at the same sample budget (experiment=digits_*);
    forward     the methods of the forward process beside Flow-GRPO, at the same sample budget;
    fewstep     methods on the two-step student of the drawn scenes (experiment=scenes_fewstep, use steps=24);
    kl          the KL weight of digits_flowgrpo: held-out judge against diversity;
    async       one-step asynchrony (every group one version old) with each off-policy correction and with none,
                against on-policy at equal RL steps, paired by seed, 2000 evaluation samples.

Every run is `python -m digenrl.cli.train ...`; further key=value words go to all of them. Finished
runs are kept in RUNS/<study>.jsonl and not repeated, so that a stopped study continues. Writes
benchmarks/results/learning_<study>.md and .png. A run takes a minute or two on two idle cores.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks._shared import RESULTS, spread_of
from digenrl.rollout.engine import picture_detail

ROOT = Path(__file__).resolve().parents[1]
ALGORITHMS = ("flowgrpo", "dancegrpo", "cps", "mixgrpo", "guard", "dppo", "nft", "dpo")
FORWARD = ("flowgrpo", "nft", "awm", "dgpo", "rvm")
FEWSTEP = {
    "nft": (),
    "awm": ("algorithm=awm", "~algorithm.beta", "algorithm.kl_weight=1e-2"),
    "flowgrpo": (
        "algorithm=flow_grpo",
        "~algorithm.beta",
        "~algorithm.max_advantage",
        "algorithm.clip_range=2e-4",
        "algorithm.kl_weight=0",
    ),
    "rvm grid": (
        "algorithm=rvm",
        "~algorithm.beta",
        "algorithm.levels=grid",
        "algorithm.scale=0.3",
        "algorithm.kl_weight=1e-2",
    ),
}
"""Methods on the two-step student, with the words of benchmarks/results/fewstep-2026-11-29.md."""
WANTED_GAIN = 0.2
"""What an algorithm should add to held-out judge B on every seed, at the sample budget that all
share."""
WANTED_LOSS = 0.04
"""What one-step asynchrony may cost in held-out judge B: upper end of the 95 % interval of the best
correction."""
KL_WEIGHTS = ("0", "0.1", "0.25", "0.5", "1.0")
CORRECTIONS = ("uncorrected", "clipped", "decoupled", "truncated_is", "cispo", "topr")
FACTS = (
    "reward_first",
    "reward_last",
    "heldout_first",
    "heldout_last",
    "diversity_ratio",
    "nn_distance_first",
    "nn_distance_last",
    "first_ratio_max_dev",
    "staleness_max",
    "wall_s",
)
"""What is kept of a run's summary.json."""
HELD_OUT = ("perfect", "judge", "diversity_ratio", "place_ratio", "sharpness", "kl")
"""Numbers kept of a student's last evaluation, in which half of the prompts are of unseen kinds.
The first two are shares of samples for which all assertions hold, by the reward's judge and by
another judge. Then come spreads and detail, relative to drawn scenes and to the student's start,
and nats to the base model."""


@dataclass(frozen=True)
class Variant:
    """One row of a study's table."""

    name: str
    words: tuple[str, ...]
    """What it adds to the command line."""


def variants(study: str) -> list[Variant]:
    """The rows of `study`; raises ValueError for an unknown one."""
    if study == "algorithms":
        return [Variant(name, (f"experiment=digits_{name}",)) for name in ALGORITHMS]
    if study == "forward":
        return [Variant(name, (f"experiment=digits_{name}",)) for name in FORWARD]
    if study == "fewstep":
        return [
            Variant(name, ("experiment=scenes_fewstep", *words)) for name, words in FEWSTEP.items()
        ]
    if study == "kl":
        return [
            Variant(f"KL {kl}", ("experiment=digits_flowgrpo", f"algorithm.kl_weight={kl}"))
            for kl in KL_WEIGHTS
        ]
    if study == "async":
        common = (
            "experiment=digits_flowgrpo",
            "callbacks.evaluation.samples_per_prompt=200",
            "callbacks.evaluation.every=0",
        )
        stale = ("schedule.async_steps=1", "schedule.stale_fraction=1")
        rows = [Variant("on-policy", common)]
        return rows + [
            Variant(name, (*common, *stale, f"algorithm/surrogate={name}")) for name in CORRECTIONS
        ]
    raise ValueError(f"study={study}: use algorithms, forward, fewstep, kl or async")


def run(
    variant: Variant, seed: int, steps: int, extra: Sequence[str], runs: Path
) -> dict[str, Any]:
    """Train once and return FACTS; raises RuntimeError with the end of the log when the run did not
    complete."""
    words = [*variant.words, f"seed={seed}", f"max_rl_steps={steps}", f"output_root={runs}", *extra]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
    }
    command = [sys.executable, "-m", "digenrl.cli.train", *words]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}"
        )
    run_dir = Path(done.stdout.strip().splitlines()[-1])
    summary = json.loads((run_dir / "summary.json").read_text())
    facts = {key: summary.get(key) for key in FACTS}
    if "experiment=scenes_fewstep" in variant.words:
        facts |= {"alarms": summary["alarms"], "start": held_out(run_dir, 0)}
        facts["end"] = held_out(run_dir, steps)
    return facts


def held_out(run_dir: Path, rl_step: int) -> dict[str, float]:
    """The numbers `HELD_OUT` of the evaluation after `rl_step`."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = next(row for row in lines if row["kind"] == "eval" and row["rl_step"] == rl_step)
    details = [median_detail(run_dir / "samples" / f"eval-{step}.npz") for step in (0, rl_step)]
    found["sharpness"] = details[1] / details[0]
    return {name: found[name] for name in HELD_OUT}


def median_detail(pictures: Path) -> float:
    """The detail of a file's pictures, their median."""
    media = torch.from_numpy(np.load(pictures)["media"])
    return float(picture_detail(media.float() / 255).median())


def study_rows(
    study: str, seeds: Sequence[int], steps: int, extra: Sequence[str], runs: Path
) -> list[dict[str, Any]]:
    """Facts of every (variant, seed) of the study, run now or found in RUNS/<study>.jsonl."""
    runs.mkdir(parents=True, exist_ok=True)
    log = runs / f"{study}.jsonl"
    known = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    rows: list[dict[str, Any]] = []
    for seed in seeds:
        for variant in variants(study):
            identity = {
                "variant": variant.name,
                "seed": seed,
                "steps": steps,
                "words": [*variant.words, *extra],
            }
            row = next((old for old in known if identity.items() <= old.items()), None)
            if row is None:
                row = identity | run(variant, seed, steps, extra, runs)
                with log.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            print(
                f"{variant.name:<14} seed {seed}  held-out {row['heldout_first']:.3f} -> "
                f"{row['heldout_last']:.3f}  "
                f"diversity {row['diversity_ratio']:.2f}",
                flush=True,
            )
            rows.append(row)
    return rows


def mean_and_half_width(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half of its 95 % interval by Student's t; the half is NaN for a single value."""
    from scipy.stats import t

    if len(values) < 2:
        return values[0], math.nan
    half = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), half


def table(study: str, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield Markdown lines with a row per variant: the least, the median and the largest value over
    seeds. The last column is the rise of judge B, or its paired losses for `async`. `fewstep` has
    held-out numbers instead, by method and by run."""
    if study == "fewstep":
        yield from held_out_table(rows)
        return
    order = [variant.name for variant in variants(study)]
    last = losses(rows) if study == "async" else rises(order, rows)
    measures = {"reward": 3, "heldout": 3, "nn_distance": 2}
    yield (
        "| variant | seeds | reward A | held-out judge B | distance to real | diversity ratio | "
        f"ratio dev. | {'judge B lost, mean, 95 %' if study == 'async' else 'rise of B, mean'} |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    starts = [
        spread_of((row[f"{name}_first"] for row in rows), digits)
        for name, digits in measures.items()
    ]
    yield f"| start | | {' | '.join(starts)} | | | |"
    for name in order:
        own = [row for row in rows if row["variant"] == name]
        if own:
            ends = [
                spread_of((row[f"{measure}_last"] for row in own), digits)
                for measure, digits in measures.items()
            ]
            diversity = spread_of([row["diversity_ratio"] for row in own], digits=2)
            ratios = {row["first_ratio_max_dev"] for row in own}
            ratio = "none" if ratios == {None} else f"{max(ratios):g}"
            cells = " | ".join([*ends, diversity, ratio, last.get(name, "-")])
            yield f"| {name} | {len(own)} | {cells} |"


def every_run(study: str, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Markdown lines: a row per run."""
    yield (
        "| variant | seed | reward A | held-out judge B | diversity ratio | distance to real | "
        "ratio dev. | wall s |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    order = [variant.name for variant in variants(study)]
    for row in sorted(rows, key=lambda row: (order.index(row["variant"]), row["seed"])):
        ratio = "none" if row["first_ratio_max_dev"] is None else f"{row['first_ratio_max_dev']:g}"
        yield (
            f"| {row['variant']} | {row['seed']} | {row['reward_first']:.3f} -> "
            f"{row['reward_last']:.3f} "
            f"| {row['heldout_first']:.3f} -> {row['heldout_last']:.3f} | "
            f"{row['diversity_ratio']:.2f} "
            f"| {row['nn_distance_first']:.2f} -> {row['nn_distance_last']:.2f} | {ratio} | "
            f"{row['wall_s']:.0f} |"
        )


def losses(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Correction -> mean loss of judge B against on-policy, with its 95 % interval."""
    found = {name: mean_and_half_width(each) for name, each in paired_losses(rows).items()}
    return {
        name: f"{mean:+.4f}, {mean - half:+.4f} .. {mean + half:+.4f}"
        for name, (mean, half) in found.items()
    }


def held_out_table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Markdown lines: means of `HELD_OUT` with 95 % intervals for the start and each method, then
    every run."""
    yield "| method | " + " | ".join(HELD_OUT) + " | seeds | alarms |"
    yield "|---|" + "---|" * (len(HELD_OUT) + 2)
    order = list(dict.fromkeys(row["variant"] for row in rows))
    groups = [("start", "start", rows[:1])]
    groups += [(name, "end", [row for row in rows if row["variant"] == name]) for name in order]
    for name, moment, members in groups:
        cells = [
            with_interval(*mean_and_half_width([row[moment][key] for row in members]))
            for key in HELD_OUT
        ]
        told = [str(alarm) for row in members for alarm in row["alarms"]] if name != "start" else []
        yield f"| {name} | {' | '.join(cells)} | {len(members)} | {', '.join(told) or 'none'} |"
    yield ""
    yield "| method | seed | reward | " + " | ".join(HELD_OUT) + " |"
    yield "|---|---|---|" + "---|" * len(HELD_OUT)
    for row in sorted(rows, key=lambda row: (order.index(row["variant"]), row["seed"])):
        cells = [f"{row['start'][key]:.3f} -> {row['end'][key]:.3f}" for key in HELD_OUT]
        reward = f"{row['reward_first']:.3f} -> {row['reward_last']:.3f}"
        yield f"| {row['variant']} | {row['seed']} | {reward} | {' | '.join(cells)} |"


def with_interval(mean: float, half: float) -> str:
    """A mean and half of its interval, where there is one."""
    return f"{mean:.3f}" if math.isnan(half) else f"{mean:.3f} +- {half:.3f}"


def paired_losses(rows: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Correction -> what held-out judge B loses against the on-policy run of the same seed, a value
    per seed."""
    last = {(row["variant"], row["seed"]): row["heldout_last"] for row in rows}
    return {
        name: [
            last["on-policy", seed] - value
            for (variant, seed), value in last.items()
            if variant == name
        ]
        for name in CORRECTIONS
    }


def rises(order: Sequence[str], rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Variant -> mean rise of judge B; the worst seed's too, where it is below `WANTED_GAIN`."""
    found = {}
    for name in order:
        gains = [
            row["heldout_last"] - row["heldout_first"] for row in rows if row["variant"] == name
        ]
        if gains:
            low = (
                f", worst {min(gains):+.3f} below {WANTED_GAIN}" if min(gains) < WANTED_GAIN else ""
            )
            found[name] = f"{statistics.fmean(gains):+.3f}{low}"
    return found


def plot(study: str, rows: Sequence[dict[str, Any]], path: Path) -> None:
    """The study's picture as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0, 4.0), layout="constrained")
    axes = figure.subplots()
    if study == "async":
        draw_losses(axes, paired_losses(rows))
    else:
        draw_scores(axes, study, rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def draw_losses(axes: Any, losses: dict[str, list[float]]) -> None:
    """A line per correction: its seeds as dots, the mean and its 95 % interval."""
    for line, (name, values) in enumerate(losses.items()):
        mean, half = mean_and_half_width(values)
        axes.plot(values, [line] * len(values), "o", color="0.7", markersize=4)
        axes.errorbar(mean, line, xerr=half, fmt="D", color=f"C{line}", capsize=4, label=name)
    axes.axvline(0.0, color="0.6", linewidth=1)
    axes.axvline(WANTED_LOSS, color="C3", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(losses)), list(losses))
    axes.invert_yaxis()
    axes.set_xlabel("judge B lost against on-policy, 95 % interval (dashed: wanted)")


def draw_scores(axes: Any, study: str, rows: Sequence[dict[str, Any]]) -> None:
    """Held-out judge against diversity, a colour per variant, a dot per seed."""
    for index, variant in enumerate(variants(study)):
        dots = [
            (row["diversity_ratio"], row["heldout_last"])
            for row in rows
            if row["variant"] == variant.name
        ]
        if dots:
            diversity, heldout = zip(*dots, strict=True)
            axes.scatter(diversity, heldout, label=variant.name, color=f"C{index}")
    axes.axvspan(0.70, 1.15, color="0.93", zorder=0)
    axes.axhline(statistics.fmean(row["heldout_first"] for row in rows), color="0.6", linewidth=1)
    axes.set_xlabel("diversity / real pictures (grey: wanted)")
    axes.set_ylabel("held-out judge B (line: base model)")
    axes.legend(fontsize="small")


def main(words: Sequence[str]) -> int:
    """Run a study and write its table; 2 for words that do not fit."""
    own = {
        "study": "algorithms",
        "seeds": "0,1,2",
        "steps": "40",
        "runs": str(ROOT / "outputs" / "learning"),
    }
    extra: list[str] = []
    for word in words:
        key, separator, value = word.partition("=")
        if not separator:
            print(f"{word}: settings are key=value\n{__doc__}", file=sys.stderr)
            return 2
        if key in own:
            own[key] = value
        else:
            extra.append(word)
    try:
        seeds, steps = [int(seed) for seed in own["seeds"].split(",")], int(own["steps"])
        variants(own["study"])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    rows = study_rows(own["study"], seeds, steps, extra, Path(own["runs"]).absolute())
    shown = [word for word in words if not word.startswith("runs=")]
    command = f"python -m benchmarks.learning {' '.join(shown)}".strip()
    lines = [
        f"# Learning on {'scenes' if own['study'] == 'fewstep' else 'digits'}: {own['study']}",
        "",
        f"`{command}`, {datetime.date.today()}, {os.cpu_count()} cores. It prints every run. Cells: "
        "least, median, largest value of the seeds.",
        "",
    ]
    lines += [*table(own["study"], rows), ""]
    lines += [f"![The study's picture](learning_{own['study']}.png)", ""]
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"learning_{own['study']}.md").write_text("\n".join(lines))
    plot(own["study"], rows, RESULTS / f"learning_{own['study']}.png")
    print("\n".join(lines))
    if own["study"] != "fewstep":
        print("\n".join(every_run(own["study"], rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
