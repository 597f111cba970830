"""Read the seconds that `make gpu` has measured on GPUs (configs/hardware/measured/NAME.yaml) into
a hardware profile.

A file has rows of {seconds, samples, engine, tokens, passes, ...} by model (an option of
configs/model) and stage. Rows fit a workload if their model, tokens, guidance and training are the
same. Of these rows the fastest per unit counts. Stages without such a row stay computed. The
`hardware.seconds` of a profile override all measured rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from digenrl.extensions.planner.workload import Workload
from digenrl.hardware import Hardware


def with_measured(hardware: Hardware, work: Workload, folder: Path) -> Hardware:
    """Return `hardware` with the measured seconds per unit of this workload on its pools' GPUs,
    read from `folder`."""
    seconds = {stage: dict(table) for stage, table in hardware.seconds.items()}
    for pool in hardware.pools:
        for path in sorted(folder.glob("*.yaml")):
            if same_gpu(pool.gpu, path.stem):
                for stage, value in units(_read(path)["models"].get(work.model, {}), work).items():
                    seconds.setdefault(stage, {}).setdefault(pool.name, value)
    return replace(hardware, seconds=seconds)


def same_gpu(profile: str, measured: str) -> bool:
    """Return whether a profile's GPU (H100-SXM) is the measured one, whose name is the driver's
    (h100_80gb_hbm3).

    The first word with a digit names the chip.
    """
    ours, theirs = (re.split(r"[^a-z0-9]+", name.lower()) for name in (profile, measured))
    chip = next((word for word in ours if re.search(r"\d", word)), None)
    return chip in theirs and ("pcie" in ours) == ("pcie" in theirs)


def units(stages: Mapping[str, list[dict[str, Any]]], work: Workload) -> dict[str, float]:
    """Return stage -> seconds per unit of the fastest rows that fit `work`.

    Units are a prompt (encode), a sample (generate, decode) and a cell (train).
    """
    wanted = {
        "engine": work.engine,
        "tokens": work.tokens,
        "passes": work.passes,
        "trained": "all" if work.lora_rank is None else "lora",
        "reference": work.reference,
    }
    found: dict[str, float] = {}
    for stage, rows in stages.items():
        fitting = [
            row
            for row in rows
            if all(row.get(key, value) == value for key, value in wanted.items())
        ]
        per_unit = [row["seconds"] / row["samples"] / row.get("steps", 1) for row in fitting]
        if per_unit:
            found[stage] = min(per_unit) * (work.steps if stage == "generate" else 1)
    return found


@lru_cache
def _read(path: Path) -> Mapping[str, Any]:
    loaded: Mapping[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return loaded
