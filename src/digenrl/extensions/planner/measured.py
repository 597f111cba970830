"""Hold a hardware profile against what `make gpu` has measured on its GPUs
(configs/hardware/measured/NAME.yaml).

A file has rows of {seconds, samples, engine, tokens, passes, ...} by model (an option of
configs/model) and stage. Rows fit a workload if their model, tokens, guidance and training are the
same. Encoding and decoding take the seconds of their fastest row. A denoising step and a trained
cell stay computed, because they depend on batch, K and recomputation. They are scaled by what the
largest row took over what is computed for it. The `hardware.seconds` of a profile override all
this.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NotRequired, TypedDict

import yaml

from digenrl.extensions.planner.costs import Costs
from digenrl.extensions.planner.gpus import SCALED
from digenrl.extensions.planner.workload import Workload
from digenrl.hardware import Hardware, Pool
from digenrl.recompute import parse_recompute


class MeasuredRow(TypedDict):
    """One row of a file. A key that it lacks fits every workload."""

    seconds: float
    samples: int
    steps: NotRequired[int]
    """Denoising steps of the timed work; absent: 1."""
    keeps: NotRequired[str]
    """What the blocks kept for the backward pass (`digenrl.recompute`)."""
    engine: NotRequired[str]
    tokens: NotRequired[int]
    passes: NotRequired[int]
    trained: NotRequired[str]
    """all | lora."""
    reference: NotRequired[bool]


class _MeasuredFile(TypedDict):
    """Rows by model and stage."""

    models: Mapping[str, Mapping[str, list[MeasuredRow]]]


def with_measured(hardware: Hardware, work: Workload, folder: Path) -> Hardware:
    """Return `hardware` with what was measured of this workload on its pools' GPUs, read from
    `folder`."""
    seconds = {stage: dict(table) for stage, table in hardware.seconds.items()}
    costs, pools = Costs(work, replace(hardware, seconds={})), []
    for pool in hardware.pools:
        found = {
            stage: rows
            for path in sorted(folder.glob("*.yaml"))
            if same_gpu(pool.gpu, path.stem)
            for stage, rows in _fitting_rows(
                _read_measured(path)["models"].get(work.model, {}), work
            )
        }
        scales = tuple(
            (figure, _measured_ratio(costs, pool, stage, found[stage]))
            for stage, figure in SCALED.items()
            if stage in found
        )
        pools.append(replace(pool, efficiency=pool.efficiency + scales))
        for stage in found.keys() - SCALED.keys():
            fastest = min(row["seconds"] / row["samples"] for row in found[stage])
            seconds.setdefault(stage, {}).setdefault(pool.name, fastest)
    return replace(hardware, pools=tuple(pools), seconds=seconds)


def same_gpu(profile: str, measured: str) -> bool:
    """Return whether a profile's GPU (H100-SXM) is the measured one, whose name is the driver's
    (h100_80gb_hbm3).

    The first word with a digit names the chip.
    """
    ours, theirs = (re.split(r"[^a-z0-9]+", name.lower()) for name in (profile, measured))
    chip = next((word for word in ours if re.search(r"\d", word)), None)
    return chip in theirs and ("pcie" in ours) == ("pcie" in theirs)


def _fitting_rows(
    stages: Mapping[str, list[MeasuredRow]], work: Workload
) -> Iterator[tuple[str, list[MeasuredRow]]]:
    """Yield (stage, its rows that fit `work`) for the stages that have any."""
    wanted = {
        "engine": work.engine,
        "tokens": work.tokens,
        "passes": work.passes,
        "trained": "all" if work.lora_rank is None else "lora",
        "reference": work.reference,
    }
    for stage, rows in stages.items():
        if fitting := [
            row
            for row in rows
            if all(row.get(key, value) == value for key, value in wanted.items())
        ]:
            yield stage, fitting


def _measured_ratio(costs: Costs, pool: Pool, stage: str, rows: list[MeasuredRow]) -> float:
    """Return measured over computed seconds of the row with the most samples and steps. In small
    ones the processor's launches decide, which differ from machine to machine."""
    row = max(rows, key=lambda row: row["samples"] * row.get("steps", 1))
    # What was measured takes no forwards of earlier weights and no constant adapter.
    costs = replace(costs, work=replace(costs.work, old_forwards=0.0, sampling_parameters=0))
    computed = computed_seconds(
        costs, pool, stage, row["samples"], row.get("steps", 1), row.get("keeps")
    )
    return row["seconds"] / computed


def computed_seconds(
    costs: Costs, pool: Pool, stage: str, samples: int, steps: int, keeps: str | None
) -> float:
    """Return what the cost model says of a row: the seconds of a denoising step, or of a trained
    micro-batch whose blocks keep `keeps` (`digenrl.recompute`)."""
    if stage == "generate":
        return costs.step_seconds(pool, samples)
    return steps * costs.cell_seconds(pool, samples, steps, parse_recompute(keeps))


@lru_cache
def _read_measured(path: Path) -> _MeasuredFile:
    loaded: _MeasuredFile = yaml.safe_load(path.read_text(encoding="utf-8"))
    return loaded
