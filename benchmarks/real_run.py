"""Runs at real size on this machine's GPU, each beside its plan. A checkpoint with random weights
is written to the disk in the hub's layout, and `digenrl train` opens it.

    python -m benchmarks.real_run [models=sd35_medium,flux1_dev] [size=real|tiny] [folder=DIR]
        [steps=3] [prompts=2] [samples=8] [also="key=value ..."]

What `benchmarks.real_size` leaves out: reading sharded files, encoders that come and go, decoding
and a scorer beside generation, an evaluation, a checkpoint. Seconds and GiB are the run's own
(summary.json), of its second RL step and later ones. First ratios must be 1 within the bound of 16
bits, and memory no more than planned. Checkpoints stay in `folder` (outputs/real_run) and are used
again: 15 GiB for sd35_medium, 33 GiB for flux1_dev. Without a GPU all runs at tiny size.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import init_empty_weights

from benchmarks import _device, _families
from benchmarks._policy_bench import EXPERIMENTS
from benchmarks._random_builds import FAMILY, REAL, TINY, encoder, fill, published
from benchmarks._shared import Report, options, require_known
from digenrl.extensions.planner.measured import same_gpu
from digenrl.facts import facts_by_family
from digenrl.models import tiny as tiny_builds
from digenrl.models.pretrained import model_index
from digenrl.rounding import HALF_BOUND

ROOT = Path(__file__).parents[1]
DEFAULTS = {
    "models": "sd35_medium", "size": "auto", "folder": "outputs/real_run", "steps": "3",
    "prompts": "2", "samples": "8", "also": "",
}  # fmt: skip
QUICK = {"steps": "2"}
SHARD = "5GB"
SCORER = ("reward=pickscore", "reward.rewards.pickscore.scorer.build=tiny")
"""A scorer on the GPU, beside generation, whose weights need no download."""


def checkpoint(model: str, folder: Path, device: torch.device) -> Path:
    """Write the model's checkpoint with random weights in bf16 under `folder`, if it is not there;
    its directory."""
    family, target = FAMILY[model], folder / model
    if target.exists():
        return target
    facts, unfinished = facts_by_family()[family], target.with_suffix(".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(tiny_builds.ensure(family), unfinished)
    for name in model_index(str(unfinished)):
        if name in ("transformer", "vae"):
            with init_empty_weights(include_buffers=False):
                made = _families.decoder(facts) if name == "vae" else _families.network(model)
        elif name.startswith("text_encoder"):
            made = encoder(family, name, REAL if published(family, name) else TINY, str(unfinished))
        else:
            continue
        shutil.rmtree(unfinished / name)
        saved: Any = fill(made, device, torch.bfloat16)
        saved.save_pretrained(unfinished / name, max_shard_size=SHARD)
        del made, saved
        _device.release(device)
    unfinished.rename(target)
    return target


def hardware(device: torch.device) -> list[str]:
    """Return the words for one GPU of a profile that names `device`; of `single_gpu`, with this
    device's memory, if none does."""
    for path in sorted((ROOT / "configs" / "hardware").glob("*.yaml")):
        node = yaml.safe_load(path.read_text(encoding="utf-8"))
        for name, pool in (node.get("hardware", node).get("pools") or {}).items():
            if same_gpu(pool["gpu"], _device.short_name(device)):
                one = f"hardware.pools.{name}"
                return [f"hardware={path.stem}", f"{one}.count=1", f"{one}.per_node=1"]
    return [
        "hardware=single_gpu",
        f"hardware.pools.h200.memory_gib={_device.capacity_gib(device):.0f}",
    ]


def train(model: str, path: Path | None, device: torch.device, given: Mapping[str, str]) -> Path:
    """Run the model's experiment; its run directory.

    Raises:
        SystemExit: the run failed; its messages were printed.
    """
    where = ["hardware=cpu_tiny"] if path is None else [*hardware(device), f"model.path={path}"]
    words = [
        f"experiment={EXPERIMENTS[model]}", *where, *SCORER, "data=scenes", "logger=none",
        "allocation.trainers=1", "allocation.rollouts=0", f"max_rl_steps={given['steps']}",
        f"data.prompts_per_batch={given['prompts']}", f"data.group_size={given['samples']}",
        "callbacks.evaluation.max_prompts=1", "callbacks.evaluation.samples_per_prompt=1",
        f"output_root={given['folder']}/runs", *given["also"].split(),
    ]  # fmt: skip
    print("digenrl train " + " ".join(words), file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "digenrl.cli.train", *words], stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(f"{model}: the run ended with exit code {done.returncode}.")
    return Path(done.stdout.splitlines()[-1])


def main(arguments: list[str]) -> int:
    """Write checkpoints, run, print; 1 when a bar was missed."""
    given = options(arguments, DEFAULTS, QUICK)
    require_known(given, "models", FAMILY)
    device = _device.find()
    size = given["size"] if given["size"] != "auto" else REAL if device.type != "cpu" else TINY
    report = Report(
        "Runs at real size beside their plans",
        f"{_device.name(device)}. Random weights. Seconds of a unit: planned, measured.",
        ("       model", "           what", "    planned", "   measured", "ratio"),
    )
    for model in given["models"].split(","):
        began, folder = time.monotonic(), Path(given["folder"])
        path = None if size == TINY else checkpoint(model, folder, device)
        written = time.monotonic() - began
        run = train(model, path, device, given)
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        report.row(model, "checkpoint s", "-", f"{written:.1f}", "-")
        report.row(model, "run s", "-", f"{summary['wall_s']:.1f}", "-")
        report.row(model, "RL step s", "-", f"{summary['step_s']:.2f}", "-")
        for stage, found in summary["stages"].items():
            if found["measured_s"] is not None:
                shown = (f"{found[key]:.4f}" for key in ("planned_s", "measured_s"))
                ratio = found["measured_s"] / found["planned_s"]
                report.row(model, f"{stage} s", *shown, f"{ratio:.2f}")
        for role, held in summary["memory"].items():
            planned, peak = held["planned_gib"], held["peak_gib"]
            if planned is not None and peak is not None:
                report.row(
                    model, f"{role} GiB", f"{planned:.1f}", f"{peak:.1f}", f"{peak / planned:.2f}"
                )
                report.verdict(peak <= planned, f"{model}: a {role} stays within its plan.")
        deviation = summary["first_ratio_max_dev"]
        report.verdict(deviation <= HALF_BOUND, f"{model}: first |ratio - 1| is {deviation:.3g}.")
    return report.close(given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
