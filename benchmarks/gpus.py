"""What several GPUs of one machine do, step by step; ends with a page to paste into an issue. After
ten minutes no step begins.

    python -m benchmarks.gpus [gpus=0] [steps=all] [minutes=10]        (make gpus)

    gpus=0      all that this machine has; steps that need more are left out and named
    gpus=4 device=cpu   the same steps with gloo on the CPU, which says nothing about NCCL
    steps=ddp,fsdp      only these

Every step is a run of a tiny build through the command line, by the local launcher or by torchrun.
It must end as the table says: completed with a finite first ratio, or failed within the limit with
the cause that was planted and no process left.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil

from benchmarks._shared import Report, options, require_known
from digenrl import accelerator

ROOT = Path(__file__).parents[1]
TINY = (
    "hardware=cpu_tiny", "reward=jpeg", "max_rl_steps=2",
    "logger=none", "~callbacks.evaluation", "callbacks.checkpoint.every=1", "schedule=gap_tsp",
    "schedule.gap=0", "allocation.max_restarts=0", "allocation.patience_s=0",
)  # fmt: skip
HERE = "allow_targets=[benchmarks]"
STEP_S = 150
"""Most seconds of one step."""


class PlantedFault(pl.Callback):
    """Lets one trainer fail in its second RL step: it raises, or is killed inside a forward.

    Args:
        rank: trainer that fails.
        kind: `raise` or `kill`.
    """

    def __init__(self, rank: int, kind: str) -> None:
        self.rank, self.kind = rank, kind

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Plant the fault before the first micro-batch of the second RL step."""
        if trainer.current_epoch != 1 or trainer.strategy.world.rank != self.rank:  # type: ignore[attr-defined]
            return
        if self.kind == "raise":
            raise RuntimeError("planted by benchmarks.gpus")
        policy: Any = pl_module.policy
        policy.transformer.register_forward_pre_hook(
            lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        )


@dataclass(frozen=True)
class Step:
    """A run with its expected end."""

    name: str
    trainers: int
    rollouts: int
    words: tuple[str, ...] = ()
    torchrun: bool = False
    resumed: bool = False
    """Whether the run is resumed afterwards for one more RL step."""
    experiment: str = "flux1_flowgrpo"
    fails: str = ""
    """Pattern of the cause that must be named; "": the run completes."""

    @property
    def gpus(self) -> int:
        """Number of GPUs that the step needs."""
        return self.trainers + self.rollouts


def planted(rank: int, kind: str) -> tuple[str, ...]:
    """Return the words that plant a fault."""
    return (
        HERE,
        f"+callbacks.fault={{_target_:benchmarks.gpus.PlantedFault,rank:{rank},kind:{kind}}}",
    )


KILLED = r"rank 1 \(trainer\) .*was killed"
FSDP = ("parallel.sharding=fsdp",)
ALL_WEIGHTS = ("model.lora=null",)
STEPS = (
    Step("ddp", 2, 0, resumed=True),
    Step("ddp-torchrun", 2, 0, torchrun=True, resumed=True),
    Step("split", 1, 1),
    Step("broadcast", 1, 1, ("network.publication=broadcast",)),
    Step("all-weights", 1, 1, ALL_WEIGHTS, resumed=True),
    Step("all-weights-broadcast", 1, 1, (*ALL_WEIGHTS, "network.publication=broadcast")),
    Step("fsdp", 2, 0, FSDP, resumed=True),
    Step("fsdp-all-weights-torchrun", 2, 0, (*FSDP, *ALL_WEIGHTS), torchrun=True),
    Step("context", 2, 0, ("parallel.context=2",), experiment="wan21_flowgrpo"),
    Step("fsdp-split", 2, 2, FSDP),
    Step("hsdp", 4, 0, ("parallel.sharding=hsdp", "parallel.shard_group=2"), resumed=True),
    Step("raises", 2, 0, (*FSDP, *planted(1, "raise")), fails="planted by benchmarks.gpus"),
    Step("raises-torchrun", 2, 0, (*FSDP, *planted(1, "raise")), True, fails="planted by"),
    Step("killed-torchrun", 2, 0, (*FSDP, *planted(1, "kill")), True, fails=KILLED),
    Step("hsdp-split", 4, 4, ("parallel.sharding=hsdp", "parallel.shard_group=2")),
    Step("lending", 4, 4, ("schedule=gap_tsp_tag",)),
)


def command(step: Step, words: Sequence[str]) -> list[str]:
    """Return the command line that starts a step."""
    if step.torchrun:
        return ["bash", "scripts/torchrun.sh", *words]
    return [sys.executable, "-m", "digenrl.cli.train", *words]


def run(step: Step, words: Sequence[str], seconds: float) -> tuple[int, str]:
    """Start a step; return its exit code, and what it told the user. Nothing of it is left
    afterwards.

    Raises:
        TimeoutError: it had not ended after `seconds`.
    """
    environment = os.environ | {"RANKS": str(step.gpus), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command(step, words),
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, told = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        children = psutil.Process(process.pid).children(recursive=True)
        for each in (*children, process):
            each.kill()
        process.communicate()
        raise TimeoutError(f"had not ended after {seconds:.0f} s") from None
    return process.returncode, told


def judge(step: Step, words: Sequence[str], folder: Path, seconds: float) -> dict[str, Any]:
    """Run a step and return what the page says of it.

    Raises:
        AssertionError, TimeoutError: the run did not end as expected.
    """
    began = time.monotonic()
    chosen = f"experiment={step.experiment}"
    split = (f"allocation.trainers={step.trainers}", f"allocation.rollouts={step.rollouts}")
    code, told = run(
        step, [chosen, *TINY, *words, *split, *step.words, f"hydra.run.dir={folder}"], seconds
    )
    summary = json.loads((folder / "summary.json").read_text()) if folder.is_dir() else {}
    took = {"seconds": time.monotonic() - began}
    if step.fails:
        assert code != 0, "the run did not fail"
        assert re.search(step.fails, str(summary.get("cause"))), f"cause: {summary.get('cause')}"
        return took | {"ends": f"failed: {str(summary['cause'])[:60]}"}
    assert code == 0, told[-1500:]
    assert summary["status"] == "completed", summary["cause"]
    if step.resumed:
        code, told = run(step, [f"resume={folder}", "max_rl_steps=3"], seconds)
        assert code == 0, told[-1500:]
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["rl_steps"] == 3, summary
    return took | {
        "ends": "completed" + (", resumed" if step.resumed else ""),
        "step_s": summary["step_s"],
        "ratio": summary["first_ratio_max_dev"],
        "publish_s": _seconds_of(folder, "publish"),
    }


def _seconds_of(folder: Path, stage: str) -> float | None:
    """Return the shortest span of a stage in a run directory, of versions after the first."""
    found = [
        row["end"] - row["start"]
        for file in folder.glob("spans/*.jsonl")
        for row in map(json.loads, file.read_text().splitlines())
        if row.get("stage") == stage and row.get("version", 0) > 0
    ]
    return min(found, default=None)


def machine(device: str) -> str:
    """Return what the page says of the machine: GPUs, driver and how they are connected."""
    if device == "cpu":
        return "CPU with gloo: nothing here says anything about NCCL."
    asked = (
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
        ["nvidia-smi", "topo", "-m"],
    )
    said = []
    for words in asked:
        try:
            said.append(subprocess.run(words, capture_output=True, text=True).stdout.strip())
        except OSError as error:
            said.append(str(error))
    return "\n".join(["", "```", *said, "```"])


def main(given: Mapping[str, str]) -> int:
    """Run the steps that fit, print the page and keep it; return the exit code."""
    device = given["device"]
    gpus = int(given["gpus"]) or accelerator.device_count()
    words = (
        ["trainer.accelerator=cpu", "model.dtype=float32"]
        if device == "cpu"
        else ["trainer.accelerator=gpu", "model.dtype=bfloat16"]
    )
    names = [step.name for step in STEPS]
    if given["steps"] != "all":
        require_known(given, "steps", names)
        names = given["steps"].split(",")
    report = Report(
        f"{gpus} GPUs of one machine, step by step",
        machine(device),
        ("step", "ranks", "launcher", "ends", "s", "s/step", "first ratio - 1", "publish s"),
    )
    until, longest = time.monotonic() + 60 * float(given["minutes"]), 20.0
    with tempfile.TemporaryDirectory() as folder:
        for step in STEPS:
            if step.name not in names:
                continue
            ranks = f"{step.trainers}+{step.rollouts}"
            launcher = "torchrun" if step.torchrun else "local"
            left = until - time.monotonic()
            if step.gpus > gpus or left < longest:
                why = f"needs {step.gpus} GPUs" if step.gpus > gpus else "no time left"
                report.row(step.name, ranks, launcher, f"left out: {why}", *[""] * 4)
                continue
            began = time.monotonic()
            try:
                found = judge(step, words, Path(folder) / step.name, STEP_S)
            except (AssertionError, TimeoutError, OSError) as error:
                report.row(step.name, ranks, launcher, "NOT AS IT MUST", *[""] * 4)
                report.verdict(False, f"{step.name}: {error}")
                continue
            longest = max(longest, time.monotonic() - began)
            figures = map(found.get, ("seconds", "step_s", "ratio", "publish_s"))
            told = ("" if figure is None else f"{figure:.3g}" for figure in figures)
            report.row(step.name, ranks, launcher, found["ends"], *told)
    return report.close(given)


if __name__ == "__main__":
    DEFAULTS = {"gpus": "0", "device": "gpu", "steps": "all", "minutes": "10"}
    sys.exit(main(options(sys.argv[1:], DEFAULTS, {"steps": "ddp,fsdp,raises"})))
