"""Less work for the same gradient: FLOPs of an RL step before and after what is never computed
twice, or never at all.

    python -m benchmarks.useful [testbeds=l40x32,...] [quick=true]

FLOPs are the planner's counts, for every experiment whose model has counted sizes. `encode` is
shown without and with the prompt store, which encodes a text once and not in every step that draws
it. `train` is shown without and with `schedule.skip_zero`. Generation, decoding and scoring are
what they were. Recomputation is in neither: it depends on the memory of a GPU. Then the step of the
experiment that trains a part of its samples on published testbeds, simulated, before and after.
Nothing is run.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

from benchmarks._shared import Report, options
from digenrl import config as configuration
from digenrl.config import Composed, config_directory
from digenrl.data import load_prompts
from digenrl.extensions.planner.bound import step_bound
from digenrl.extensions.planner.costing import Costing
from digenrl.extensions.planner.counts import (
    backward_flops,
    decode_flops,
    encode_flops,
    forward_flops,
)
from digenrl.extensions.planner.enumeration import fit_candidate
from digenrl.extensions.planner.planner import find_fastest
from digenrl.extensions.planner.reading import workload_of
from digenrl.extensions.planner.scoring import score_flops
from digenrl.extensions.planner.workload import Workload, counted_models
from digenrl.hardware import parse_hardware

SELECTING = "hunyuanvideo_dancegrpo"
"""Trains the 4 best and the 4 worst of 24."""
TRAINED, FASTER = 8 / 24, 1.55
"""What it may train at most, and how many times as fast its step must be."""
PETA = 1e15


@dataclass(frozen=True)
class Flops:
    """FLOPs of one RL step by stage; encoding averaged over the run."""

    encode: float
    generate: float
    decode: float
    score: float
    train: float

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def flops_of(work: Workload, texts: float) -> Flops:
    """What an RL step of `work` computes when `texts` prompts are encoded in it, on average."""
    backward = (1 + work.reference) * forward_flops(work) + backward_flops(work)
    return Flops(
        encode=texts * encode_flops(work),
        generate=work.samples * work.steps * work.passes * forward_flops(work),
        decode=work.samples * decode_flops(work),
        score=work.samples * score_flops(work.rewards),
        train=work.cells * work.passes * backward,
    )


def before(work: Workload) -> Workload:
    """The same experiment with every cell trained and every rank encoding for itself."""
    return replace(work, trained_samples=None, stored_prompts=False)


def texts_per_step(composed: Composed, work: Workload) -> float:
    """Prompts that a run encodes, over its RL steps, where each is encoded once."""
    config: Any = composed.settings
    drawn = min(len(load_prompts(config.data.prompts)), config.max_rl_steps * work.prompts)
    return drawn / float(config.max_rl_steps)


def experiments_counted() -> dict[str, Composed]:
    """Experiments whose model has counted sizes, by name."""
    found = {}
    for path in sorted((config_directory() / "experiment").glob("[a-z]*.yaml")):
        composed = configuration.load([f"experiment={path.stem}"], "plan")
        if composed.choices["model"] in counted_models():
            found[path.stem] = composed
    return found


def planned(costing: Costing) -> float:
    """Seconds of an RL step of the fastest colocated run of all GPUs."""
    gpus, unequal = costing.hardware.gpus, len({pool.tflops for pool in costing.hardware.pools}) > 1
    bases = (
        costing.make_candidate(gpus, 0, sharding=how, gap=0, shares=unequal)
        for how in ("ddp", "hsdp", "fsdp")
    )
    ways = [way for base in bases if (way := fit_candidate(costing, base)) is not None]
    best = find_fastest(costing, ways, step_bound(costing))
    return float("nan") if best is None else best.step_s


def main(words: list[str]) -> int:
    given = options(
        words, {"testbeds": "l40x32,a100x32,l40x32_h20x16"}, quick={"testbeds": "a100x32"}
    )
    report = Report(
        "FLOPs of an RL step",
        "PFLOP by the planner's counts, without -> with skip_zero and the prompt store (encoding: "
        "mean over the run).\n"
        "ratio: FLOPs without over FLOPs with.\n"
        "Experiments whose model has no counted sizes are not listed.",
        (
            "            experiment",
            "trained",
            "       encode",
            "generate",
            "         train",
            "    whole step",
            "ratio",
        ),
    )
    experiments = experiments_counted()
    for name, composed in experiments.items():
        work = workload_of(composed)
        whole, less = (
            flops_of(before(work), work.prompts),
            flops_of(work, texts_per_step(composed, work)),
        )
        report.row(
            name,
            f"{round(work.useful * work.group_size)} of {work.group_size}",
            f"{whole.encode / PETA:.3f} -> {less.encode / PETA:.3f}",
            f"{less.generate / PETA:.1f}",
            f"{whole.train / PETA:.1f} -> {less.train / PETA:.1f}",
            f"{whole.total / PETA:.1f} -> {less.total / PETA:.1f}",
            f"{whole.total / less.total:.2f}",
        )
    report.say(
        f"{SELECTING}, simulated seconds of an RL step; colocated: the fastest run of all GPUs in "
        "both roles."
    )
    report.table(
        ("   testbed", "bound without", "with", "ratio", "colocated without", "with", "ratio")
    )
    slowest = float("inf")
    for testbed in given["testbeds"].split(","):
        composed = configuration.load([f"experiment={SELECTING}", f"hardware={testbed}"], "plan")
        work, hardware = workload_of(composed), parse_hardware(composed.settings.hardware)
        costings = [Costing(each, hardware) for each in (before(work), work)]
        bounds, steps = (
            [step_bound(each) for each in costings],
            [planned(each) for each in costings],
        )
        cells = []
        for without, having in (bounds, steps):
            cells += [f"{without:.1f}", f"{having:.1f}", f"{without / having:.2f}"]
            slowest = min(slowest, without / having)
        report.row(testbed, *cells)
    share = workload_of(experiments[SELECTING]).useful
    report.verdict(
        share <= TRAINED and slowest >= FASTER,
        f"{SELECTING} trains {share:.3f} of its samples, at most {TRAINED:.3f} wanted; its step is "
        f"{slowest:.2f} times "
        f"as fast or more, {FASTER} wanted",
    )
    return report.close(given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
