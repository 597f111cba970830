"""The five families at their real widths and depths on this machine's GPU: random weights made
there, no download.

    python -m benchmarks.real_size [models=flux1_dev,wan21_14b,...] [budget_s=540] [size=real|tiny]
        [samples=1,2,4,8] [images=64] [engines=eager,compiled] [out=DIR] [fresh=true]

Measured are:

- seconds per denoising step and per trained micro-batch: eager and compiled, every checkpointing
  grade, 1 to 8 samples, and 1, 2 and 4 steps in a forward
- the share of the machine's own matrix product, and peak memory beside the planner's model
- the first ratio's deviation, encoding, decoding and publishing
- an RL step in images per GPU-second, if a published speed is known

A unit that fails or does not fit is recorded as such.

After `budget_s` seconds no unit begins. The same command goes on where it stopped. Results are kept
one by one in real_size-GPU.json. At the end a dated table is written, and GPU.yaml with the rows for
the planner. They go under `out`, else $OUT, else benchmarks/results and configs/hardware/measured.
Without a GPU all runs at tiny size, into outputs/real_size.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks import _device
from benchmarks._policy_bench import (
    COMPILED,
    EAGER,
    ENGINES,
    Build,
    Row,
    Unit,
    attempt,
    build,
    composed,
    conditioning,
)
from benchmarks._random_builds import FAMILY, REAL, TINY
from benchmarks._shared import RESULTS, Report, options, require_known
from digenrl.extensions.planner.costs import Costs
from digenrl.extensions.planner.gpus import find_gpu
from digenrl.extensions.planner.measured import computed_seconds
from digenrl.extensions.planner.reading import workload_of
from digenrl.facts import facts_by_family
from digenrl.hardware import parse_hardware

ROOT = Path(__file__).parents[1]
DEFAULTS = {
    "models": ",".join(FAMILY), "budget_s": "540", "size": "auto", "samples": "1,2,4,8", "images": "64",
    "engines": ",".join(ENGINES), "out": "", "fresh": "false",
}  # fmt: skip
QUICK = {"models": "sd35_medium", "samples": "1,2", "images": "4", "engines": "eager"}
STEPS = (1, 2, 4)
"""Denoising steps of a sample in one forward (K)."""
RATIO_SAMPLES = 2
MARGIN_S = 75.0
"""Seconds of the budget that the last measurement may take, including a compilation."""
RECOMPILATIONS = 64
"""Torch's own limit of 8 graphs per block is less than the shapes that are measured here."""
PUBLISHED = {
    model: facts_by_family()[family].measured
    for model, family in FAMILY.items()
    if "images_per_s" in facts_by_family()[family].measured
}
"""Model -> published images per GPU-second of an RL step, and their source."""
COLUMNS = ("        model", "   stage", "         engine", "       keeps", "samples", "steps", " seconds", "planned",
           "TFLOP/s", "share", "  GiB", "planned GiB")  # fmt: skip


def plan(model: str, given: Mapping[str, str]) -> Iterator[tuple[Build, list[Unit]]]:
    """Every measurement of a model by the build that it needs, the most wanted first."""
    many = [int(samples) for samples in given["samples"].split(",")]
    few = [samples for samples in many if samples in (1, 4)] or many[:1]
    one, pair = (1,), (RATIO_SAMPLES,)
    images = [int(given["images"])] if model in PUBLISHED else []

    def units(
        how: Build, *wanted: tuple[str, str, Sequence[int], Sequence[int]]
    ) -> tuple[Build, list[Unit]]:
        chosen = [entry for entry in wanted if entry[1] in given["engines"].split(",")]
        return how, [
            Unit(model, how, stage, engine, samples, steps)
            for stage, engine, counts, ks in chosen
            for steps in ks
            for samples in counts
        ]

    yield units(
        Build(),
        ("generate", EAGER, many, one),
        ("train", EAGER, many, one),
        ("train", EAGER, one, STEPS[1:]),
        ("ratio", EAGER, pair, STEPS),
        ("publish", EAGER, one, one),
        ("mask", EAGER, one, one),
    )
    yield units(
        Build(compiled=True),
        ("generate", COMPILED, few, one),
        ("train", COMPILED, few, one),
        ("ratio", COMPILED, pair, STEPS[:2]),
        ("step", COMPILED, images, one),
    )
    yield units(Build(tiling=False), ("encode", EAGER, one, one), ("decode", EAGER, one, one))
    yield units(Build(kept="products"), ("train", EAGER, many, one), ("step", EAGER, images, one))
    yield units(Build(kept="all"), ("train", EAGER, many, one), ("train", EAGER, one, STEPS[1:]))
    yield units(Build(kept="attention"), ("train", EAGER, many, one))
    yield units(Build(compiled=True, kept="all"), ("train", COMPILED, few, one))
    yield units(Build(tiling=True), ("decode", EAGER, one, one))
    yield units(
        Build(full=True),
        ("ratio", EAGER, pair, STEPS),
        ("train", EAGER, one, one),
        ("publish", EAGER, one, one),
    )


@dataclass
class Results:
    """What was measured so far, on disk after every measurement."""

    path: Path
    machine: dict[str, Any]
    rows: dict[str, Row]

    def keep(self, unit: Unit, row: Row) -> None:
        """Add a result; the file is replaced in one move."""
        self.rows[unit.key] = row
        fresh = self.path.with_suffix(".tmp")
        fresh.write_text(
            json.dumps({"machine": self.machine, "rows": self.rows}, indent=1) + "\n",
            encoding="utf-8",
        )
        os.replace(fresh, self.path)
        print(f"{unit.key}: {words(row)}", file=sys.stderr, flush=True)

    def missing(self, units: Iterable[Unit]) -> list[Unit]:
        """Return the units that were never measured, or failed."""
        return [
            unit for unit in units if "failed" in self.rows.get(unit.key, {"failed": "never tried"})
        ]

    def too_many(self, unit: Unit) -> str | None:
        """Return why a unit needs no trial: fewer samples did not fit."""
        fewer = (replace(unit, samples=samples).key for samples in range(1, unit.samples))
        return (
            "fewer samples did not fit"
            if any("full" in self.rows.get(key, {}) for key in fewer)
            else None
        )


def machine_facts(device: torch.device, size: str) -> dict[str, Any]:
    """The device, and what it reaches on its own."""
    tiny = size == TINY
    return {
        "gpu": _device.name(device),
        "date": datetime.date.today().isoformat(),
        "torch": str(torch.__version__),
        "size": size,
        "memory_gib": _device.capacity_gib(device),
        "matmul_tflops": _device.matmul_tflops(device, 256 if tiny else 8192),
        "copy_tb_s": _device.copy_tb_s(device, 1 << (20 if tiny else 32)),
        "host_gb_s": _device.host_gb_s(device, 1 << (20 if tiny else 30)),
    }


def measure(results: Results, given: Mapping[str, str], size: str, device: torch.device) -> int:
    """Measure what is missing until the budget ends; the number of measurements left."""
    deadline = time.monotonic() + float(given["budget_s"]) - (MARGIN_S if size == REAL else 0.0)
    for model in given["models"].split(","):
        for how, units in plan(model, given):
            if not results.missing(units) or time.monotonic() > deadline:
                continue
            print(f"{model}: {how}", file=sys.stderr, flush=True)
            try:
                bench = build(model, size, device, how)
            except torch.OutOfMemoryError:
                for unit in results.missing(units):
                    results.keep(unit, {"full": "the policy alone does not fit"})
            else:
                for unit in results.missing(units):
                    if time.monotonic() < deadline:
                        reason = results.too_many(unit)
                        results.keep(unit, {"full": reason} if reason else attempt(bench, unit))
                del bench
            torch._dynamo.reset()
            _device.release(device)
        conditioning.cache_clear()
        _device.release(device)
    return sum(
        len(results.missing(units))
        for model in given["models"].split(",")
        for _, units in plan(model, given)
    )


# ---- what is written


def words(row: Row) -> str:
    """A result in a line."""
    parts = row.get("parts", {})
    shown = {
        key: value
        for key, value in row.items()
        if value is not None and key not in ("flops", "parts")
    }
    shown |= {f"{name} seconds": seconds for name, seconds in parts.items()}
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in shown.items()
    )


def planned_seconds(unit: Unit, gpu: str) -> float:
    """What the planner computes for a denoising step or a micro-batch on a GPU of its table."""
    sheet, settings = find_gpu(gpu), composed(unit.model, REAL, *unit.build.words)
    if sheet is None:
        return nan
    profile = parse_hardware(settings.settings.hardware)
    pool = replace(profile.pools[0], gpu=gpu, tflops=sheet.tflops, hbm_tb_s=sheet.hbm_tb_s)
    costs = Costs(workload_of(settings), replace(profile, pools=(pool,)))
    return computed_seconds(costs, pool, unit.stage, unit.samples, unit.steps, unit.build.kept)


def figures(row: Row, peak: float | None, planned: float) -> list[str]:
    """Seconds, the planner's, TFLOP/s, share of the matrix product, GiB, the planner's GiB; without
    `peak` (tiny) no speeds."""
    if "seconds" not in row:
        return [
            next(key for key in ("full", "failed", "skipped") if key in row),
            *"-----",
        ]
    speeds = ["-", "-", "-"]
    if peak is not None:
        speed = row["flops"] / row["seconds"] / 1e12
        speeds = [f"{planned:.4f}", f"{speed:.0f}", f"{speed / peak:.2f}"]
    found = [row["gib"], row["model_gib"] if peak is not None else None]
    return [
        f"{row['seconds']:.4f}",
        *speeds,
        *("-" if gib is None else f"{gib:.1f}" for gib in found),
    ]


def tables(results: Results, units: Sequence[Unit]) -> Report:
    """The report of everything that was measured."""
    machine = results.machine
    peak = None if machine["size"] == TINY else float(machine["matmul_tflops"])
    memory = "" if machine["memory_gib"] is None else f"{machine['memory_gib']:.1f} GiB, "
    notes = (
        f"{machine['gpu']}: {memory}bf16 matrix product {machine['matmul_tflops']:.3g} TFLOP/s, "
        "copy inside its memory "
        f"{machine['copy_tb_s']:.3g} TB/s, from the host {machine['host_gb_s']:.3g} GB/s; torch "
        f"{machine['torch']}.\n"
        "Random weights; LoRA r64 on attention and feed-forward, or all weights (full). FLOPs are "
        "the model's, "
        "repetition not counted; shares are of the matrix product; GiB are the allocator's peak. "
        "Planned are the planner's, computed without these rows."
    )
    if peak is None:
        notes += "\nTINY builds: this shows that everything runs, and nothing about speed."
    report = Report("The families at real size", notes, COLUMNS)
    for unit in (unit for unit in units if unit.stage in ("generate", "train")):
        kept = "-" if unit.stage == "generate" else unit.build.kept + " full" * unit.build.full
        row = figures(results.rows[unit.key], peak, planned_seconds(unit, machine["gpu"]))
        report.row(unit.model, unit.stage, unit.engine, kept, unit.samples, unit.steps, *row)
    report.table(("        model", "trained", "         engine", "steps", "largest ratio - 1"))
    for unit in (unit for unit in units if unit.stage == "ratio"):
        result = results.rows[unit.key]
        found = f"{result['deviation']:.3g}" if "deviation" in result else words(result)[:40]
        report.row(unit.model, "all" if unit.build.full else "LoRA", unit.engine, unit.steps, found)
    report.table(("        model", "  stage", "what was found"))
    for unit in (unit for unit in units if unit.stage not in ("generate", "train", "ratio")):
        result = results.rows[unit.key]
        tiles = "in tiles: " if unit.stage == "decode" and unit.build.tiling else ""
        report.row(unit.model, unit.stage, f"{tiles}{words(result)}")
    for unit in units:
        result = results.rows[unit.key]
        if "failed" in result:
            report.verdict(False, f"{unit.key}: {result['failed']}")
        elif "images_per_s" in result and peak is not None:
            report.say(
                f"An RL step of {unit.model} ({unit.engine}): {result['images_per_s']:.3f} images per "
                "GPU-second; "
                f"published: {PUBLISHED[unit.model]['images_per_s']} "
                f"({PUBLISHED[unit.model]['source']})."
            )
    return report


def planner_rows(results: Results, units: Sequence[Unit]) -> str:
    """YAML for the planner (`extensions.planner.measured`): the machine, and model -> stage ->
    measured rows."""

    def rounded(row: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: float(f"{value:.4g}") if isinstance(value, float) else value
            for key, value in row.items()
        }

    models: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for unit in units:
        row = results.rows[unit.key]
        if unit.stage not in ("generate", "train", "encode", "decode") or "seconds" not in row:
            continue
        entry: dict[str, Any] = {"engine": unit.engine, "samples": unit.samples}
        if unit.stage == "train":
            entry |= {
                "steps": unit.steps,
                "keeps": unit.build.kept,
                "trained": "all" if unit.build.full else "lora",
            }
        entry |= {
            key: row[key] for key in ("tokens", "passes", "reference", "tiling") if key in row
        }
        if "flops" in row:
            entry |= {
                "share": row["flops"] / row["seconds"] / 1e12 / results.machine["matmul_tflops"]
            }
        entry |= {"seconds": row["seconds"], "gib": row["gib"]}
        models.setdefault(unit.model, {}).setdefault(unit.stage, []).append(rounded(entry))
    head = (
        "# Measured by `python -m benchmarks.real_size`, whose table has the rest. Seconds of: "
        "generate: a denoising\n"
        "# step of `samples` samples; train: a micro-batch of `samples` x `steps` cells; encode: a "
        "prompt; decode: a\n"
        "# sample. tokens: latent tokens of a sample. passes: forwards per velocity. reference: "
        "with the base model's\n"
        "# forward (KL). share: of matmul_tflops, FLOPs that are repeated not counted.\n"
    )
    body = {"machine": rounded(results.machine), "models": models}
    return head + yaml.safe_dump(body, sort_keys=False, default_flow_style=None, width=160)


def places(given: Mapping[str, str], size: str) -> tuple[Path, Path]:
    """Directories of the results and of the planner's rows."""
    out = given["out"] or os.environ.get("OUT") or ("outputs/real_size" if size == TINY else None)
    return (Path(out), Path(out)) if out else (RESULTS, ROOT / "configs" / "hardware" / "measured")


def kept_rows(path: Path, given: Mapping[str, str]) -> dict[str, Row]:
    """Return results of earlier slices, from the repository and from `path`."""
    known = (
        []
        if given["fresh"] == "true"
        else [file for file in (RESULTS / path.name, path) if file.exists()]
    )
    return {
        key: row
        for file in known
        for key, row in json.loads(file.read_text(encoding="utf-8"))["rows"].items()
    }


def main(arguments: list[str]) -> int:
    """Measure, write, say what is left; 1 when a measurement failed for another reason than
    memory."""
    given = options(arguments, DEFAULTS, QUICK)
    device = _device.find()
    size = given["size"] if given["size"] != "auto" else REAL if device.type == "cuda" else TINY
    require_known(given, "models", FAMILY)
    require_known(given, "engines", ENGINES)
    if size not in (REAL, TINY) or (size == REAL and device.type != "cuda"):
        raise SystemExit(
            f"size={size}: real needs a GPU and torch {torch.__version__} sees none; tiny runs "
            "anywhere."
        )
    if device.type == "cpu":
        torch.set_num_threads(1)  # as the ranks of a run
    folder, profiles = places(given, size)
    folder.mkdir(parents=True, exist_ok=True)
    profiles.mkdir(parents=True, exist_ok=True)
    name = f"{_device.short_name(device)}{'-tiny' if size == TINY else ''}"
    path = folder / f"real_size-{name}.json"
    results = Results(path, machine_facts(device, size), kept_rows(path, given))
    with torch._dynamo.config.patch(recompile_limit=RECOMPILATIONS, automatic_dynamic_shapes=False):
        left = measure(results, given, size, device)
    every = {key: DEFAULTS[key] for key in ("engines", "samples", "images")}
    units = [unit for model in FAMILY for _, planned in plan(model, given | every)
             for unit in planned if unit.key in results.rows]  # fmt: skip
    report = tables(results, units)
    profile = profiles / f"{name}.yaml"
    profile.write_text(planner_rows(results, units), encoding="utf-8")
    if left:
        report.say(f"{left} measurements are left: the same command goes on with them.")
    print(profile)
    report.write(folder / f"real_size-{name}-{results.machine['date']}.md")
    return 0 if report.met else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
