"""Objectives beside RL: fine-tuning then RL on the digits, and two specialists merged on the tilted
mixture, each beside its parts.

    python -m benchmarks.objectives [study=digits|mixture|both] [seeds=0,1,2,3,4]
    [runs=outputs/objectives]

Every run is `python -m digenrl.cli.train ...`. Finished runs are lines of RUNS/runs.jsonl and are
not repeated, so that a stopped study goes on. All digits runs have 40 RL steps in all: fine-tuning
has 10, and RL from its merged weights 30. A mixture run has 100 RL steps of 16 samples a prompt; a
specialist has half of the prompts in each step.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks._shared import Report, options
from benchmarks.learning import ROOT, mean_and_half_width
from benchmarks.mixture import base_rewards, rolled
from digenrl.config import instantiate
from digenrl.config.stored import read_stored
from digenrl.data import load_prompts

QUIET = ("logger=none", "callbacks.evaluation.every=0")
MERGED = "export/transformer/diffusion_pytorch_model.safetensors"
HALVES = ("low", "high")
SAMPLES = 500
"""Samples of each prompt, for the gain and the KL of a mixture run."""


@dataclass(frozen=True)
class Runs:
    """The runs of a study, kept below a folder."""

    folder: Path

    def train(self, *words: str) -> Path:
        """Return the directory of the run with these words, trained now or before."""
        log = self.folder / "runs.jsonl"
        known = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        for row in known:
            if row["words"] == list(words):
                return Path(row["run"])
        told = self.command("digenrl.cli.train", *words, f"output_root={self.folder}")
        found = told.strip().splitlines()[-1]
        with log.open("a") as file:
            file.write(json.dumps({"words": words, "run": found}) + "\n")
        print(" ".join(words), found, file=sys.stderr, flush=True)
        return Path(found)

    def command(self, module: str, *words: str) -> str:
        """Run a command and return what it prints; RuntimeError with its last words otherwise."""
        path = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", module, *words],
            cwd=ROOT, env=os.environ | path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{module} {' '.join(words)}:\n{done.stderr[-2000:]}")
        return done.stdout


def digits(runs: Runs, seed: int) -> Iterator[tuple[str, Path, Path]]:
    """Yield (name, first run, last run) of each way of spending 40 RL steps, and of fine-tuning
    alone."""

    def trained(name: str, steps: int, *words: str) -> Path:
        own = (f"experiment=digits_{name}", f"max_rl_steps={steps}", f"seed={seed}")
        return runs.train(*own, *QUIET, *words)

    alone = trained("flowgrpo", 40)
    yield "RL, 40 steps", alone, alone
    for name, title in (("sft", "fine-tuning"), ("offline_dpo", "offline DPO")):
        short = trained(name, 10)
        yield f"{title}, 10 steps", short, short
        if not (short / MERGED).exists():
            runs.command("digenrl", "export", f"run={short}", "merge=true")
        yield (
            f"{title}, then RL, 10 + 30",
            short,
            trained("flowgrpo", 30, f"model.path={short / MERGED}"),
        )
    long = trained("sft", 40)
    yield "fine-tuning, 40 steps", long, long


def digits_rows(runs: Runs, seeds: Sequence[int]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the digits' table: means over the seeds."""
    found: dict[str, list[tuple[float, ...]]] = {}
    for seed in seeds:
        for name, first, last in digits(runs, seed):
            before, after = (
                json.loads((run / "summary.json").read_text()) for run in (first, last)
            )
            facts = (before["heldout_first"], after["heldout_last"], after["diversity_ratio"])
            found.setdefault(name, []).append((*facts, after["nn_distance_last"]))
    for name, rows in found.items():
        start, end, diversity, distance = zip(*rows, strict=True)
        yield (
            name,
            f"{statistics.fmean(start):.3f}",
            interval(end),
            interval(diversity),
            interval(distance),
        )


def interval(values: Sequence[float]) -> str:
    """Return the mean and half of its 95 % interval."""
    mean, half = mean_and_half_width(values)
    return f"{mean:.3f} +- {half:.3f}"


def mixture(runs: Runs, seed: int) -> Iterator[tuple[str, Path]]:
    """Yield the specialists, RL on all prompts at once, and the student of both specialists."""
    common = (f"seed={seed}", *QUIET)
    specialists = {
        half: runs.train(
            "experiment=mixture_flowgrpo", f"data.prompts=mixture_{half}.jsonl",
            "data.prompts_per_batch=8", *common,
        )
        for half in HALVES
    }  # fmt: skip
    yield from ((f"specialist, {half} axes", run) for half, run in specialists.items())
    yield "RL on all axes", runs.train("experiment=mixture_flowgrpo", *common)
    taught = [f"algorithm.teachers.{half}.run={run}" for half, run in specialists.items()]
    yield "student of both", runs.train("experiment=mixture_distill", *common, *taught)


@torch.no_grad()
def gain_and_kl(run: Path, half: str) -> tuple[float, float]:
    """Return how much a run's last checkpoint gains over the base on half of the prompts, and its
    KL to the base in nats."""
    config: Any = read_stored(run, "run")[0]
    policy = instantiate(config.model)
    kernel = instantiate(config.algorithm.sde)
    policy.adapter.load_trained_parameters(load_file(run / "checkpoints/last/policy.safetensors"))
    directions = policy.codec.encode(load_prompts(f"mixture_{half}.jsonl"))["direction"]
    rows, steps = directions.repeat_interleave(SAMPLES, 0), config.sampling.steps
    points, kl = rolled(policy, kernel, rows, steps, torch.Generator().manual_seed(0))
    base = base_rewards(policy, kernel, directions, steps, torch.Generator().manual_seed(1))
    return float((points * rows).sum(1).mean() - base.mean()), float(kl.mean())


def mixture_rows(runs: Runs, seeds: Sequence[int]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the mixture's table: means over the seeds."""
    found: dict[str, list[tuple[float, ...]]] = {}
    for seed in seeds:
        for name, run in mixture(runs, seed):
            measured = [figure for half in HALVES for figure in gain_and_kl(run, half)]
            found.setdefault(name, []).append(tuple(measured))
    for name, facts in found.items():
        yield (name, *(interval(column) for column in zip(*facts, strict=True)))


def main(words: Sequence[str]) -> int:
    """Print the tables; the exit code."""
    defaults = {"study": "both", "seeds": "0,1,2,3,4", "runs": str(ROOT / "outputs/objectives")}
    given = options(words, defaults, {"seeds": "0"})
    seeds, runs = [int(seed) for seed in given["seeds"].split(",")], Runs(Path(given["runs"]))
    runs.folder.mkdir(parents=True, exist_ok=True)
    columns = ("digits", "judge B before", "judge B after", "diversity", "distance to real")
    report = Report("Objectives beside RL", __doc__ or "", columns)
    if given["study"] in ("digits", "both"):
        for row in digits_rows(runs, seeds):
            report.row(*row)
    if given["study"] in ("mixture", "both"):
        report.table(("mixture", "gain, low", "KL, low", "gain, high", "KL, high"))
        for row in mixture_rows(runs, seeds):
            report.row(*row)
    report.say(f"Means over {len(seeds)} seeds with half of their 95 % interval (Student's t).")
    return report.close(given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
