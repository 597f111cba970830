"""Against what the peers do: their per-timestep training loop, and a whole step of theirs on the
tiny SD3.

    python -m benchmarks.peers [samples=8] [repeats=7] [rl_steps=8] [peer=DIR] [sittings=3]

Loops: one forward and backward per (sample batch, trained step), as in Flow-GRPO's and DanceGRPO's
scripts, but written out here. They run against this system's training step on one block of all
trained steps, with the same model, trajectories and advantages. The gradients must agree (exit code
1 if not).

Workload: real runs of this system (`digenrl.cli.train`). peer=DIR names a checkout of
yifan123/flow_grpo at ac4c86e that this Python can run (it needs ml_collections and wandb beside our
requirements). Its own training script then does the same work in turns with ours: same weights,
prompts, text tokens, sizes, steps and processes, one thread each.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch import Tensor

from benchmarks._shared import Report, options
from digenrl import config as configuration
from digenrl.advisor import PlainAdvisor
from digenrl.data import load_prompts
from digenrl.diffusion.denoise import SampleKey, replay
from digenrl.models import tiny as tiny_builds
from digenrl.settle import with_allocation
from digenrl.types import CellBlock, Prompt, TrainBatch
from tests.sampling import sample

LOOPS = ("sd35_flowgrpo", "flux1_flowgrpo", "wan21_flowgrpo")
DEFAULTS = {"samples": "8", "repeats": "7", "rl_steps": "8", "peer": "", "sittings": "3"}
STEPS = 10
"""Denoising steps, all but one trained."""
TOLERANCE = 1e-5
"""Largest relative difference of the two loops' gradients in norm (fp32)."""
WORKLOAD = (
    "experiment=sd35_flowgrpo",
    "hardware=cpu_tiny",
    "reward=jpeg",
    "algorithm/advantage=group",
    "algorithm.kl_weight=0",
    "algorithm.updates_per_batch=1",
    "data.prompts_per_batch=4",
    "data.group_size=8",
    f"sampling.steps={STEPS}",
    "sampling.guidance_scale=1",
    "sampling.task_size=8",
    "callbacks=default",
    "~callbacks.evaluation",
    "logger=none",
)
CASES = {
    "1, colocated": (1, ("schedule=colocated", "allocation.trainers=1")),
    "2, colocated": (2, ("schedule=colocated", "allocation.trainers=2")),
    "2, one rollout and one trainer": (
        2,
        ("schedule=full", "allocation.trainers=1", "allocation.rollouts=1"),
    ),
}
"""Name -> processes, and what makes them."""
SAMPLES = 32
PEER = (
    "--config.resolution=64",
    f"--config.sample.num_steps={STEPS}",
    "--config.sample.eval_num_steps=1",
    "--config.sample.guidance_scale=1.0",
    "--config.sample.train_batch_size=8",
    "--config.sample.num_image_per_prompt=8",
    "--config.sample.global_std=False",
    "--config.train.batch_size=8",
    "--config.train.cfg=False",
    "--config.train.timestep_fraction=0.99",
)
"""flow_grpo's words for `WORKLOAD`; one process takes four batches, two take two each."""
ALONE = {"WANDB_MODE": "disabled", "ACCELERATE_USE_CPU": "true", "PYTHONUNBUFFERED": "1"}
"""Environment of flow_grpo's scripts."""
PEER_STEP = "advantages: "
"""What its main process prints once in every iteration."""


class Loop:
    """One tiny model with the trajectories of one task, trained in both ways."""

    def __init__(self, experiment: str, rows: int) -> None:
        words = [
            f"experiment={experiment}",
            "hardware=cpu_tiny",
            "algorithm.kl_weight=0",
            "algorithm/advantage=group",
        ]
        composed = configuration.load(
            [*words, f"sampling.steps={STEPS}", "sampling.guidance_scale=1"]
        )
        settings = with_allocation(composed, 1, 0, PlainAdvisor()).settings
        self.policy = settings.build("model")
        self.module = settings.build("algorithm", policy=self.policy)
        self.clip_range = float(settings.node_at("algorithm.clip_range"))
        prompt, plan = (
            Prompt("a red circle on a white background"),
            self.module.train_steps.plan_steps(0, 0, STEPS),
        )
        condition, grid = self.policy.codec.encode([prompt]), self.policy.sigma_grid(STEPS)
        made = sample(
            self.policy,
            condition,
            SampleKey(0, 0, prompt.uid, tuple(range(rows))),
            grid,
            self.module.sde,
            plan,
        )
        self.block = CellBlock(
            step=0,
            group=0,
            uid=prompt.uid,
            first_sample=0,
            version=0,
            steps=made.steps,
            sigmas=grid,
            latents=made.latents,
            next_latents=made.next_latents,
            log_probs=made.log_probs,
            condition=condition,
        )
        self.rewards = torch.linspace(0.0, 1.0, rows)[None]
        self.batch = TrainBatch(
            (self.block,),
            {"reward": self.rewards},
            {"reward": 1.0},
            float(made.log_probs.numel()),
            0,
            0,
        )

    def per_timestep(self) -> None:
        """Advantages of the group; then step by step: forward, ratio, clipped loss, mean,
        backward."""
        rewards, block = self.rewards[0], self.block
        advantages = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-4)
        trained = len(block.steps)
        for k in range(trained):
            one = {
                name: getattr(block, name)[:, k : k + 1]
                for name in ("latents", "next_latents", "log_probs")
            }
            cell = CellBlock(**(vars(block) | one | {"steps": block.steps[k : k + 1]}))
            ratio = torch.exp(
                replay(self.policy, cell, self.module.sde).log_prob[:, 0] - cell.log_probs[:, 0]
            )
            clipped = ratio.clamp(1 - self.clip_range, 1 + self.clip_range)
            loss = torch.maximum(-advantages * ratio, -advantages * clipped).mean() / trained
            loss.backward()

    def batched(self) -> None:
        """Train a micro-batch as this system does: all trained steps in one forward and
        backward."""
        self.module.training_step(self.batch, 0).backward()

    def seconds_and_gradient(self, train: Any) -> tuple[float, Tensor]:
        self.policy.zero_grad()
        began = time.perf_counter()
        train()
        seconds = time.perf_counter() - began
        grads = [
            p.grad.flatten()
            for p in self.policy.adapter.trained_parameters().values()
            if p.grad is not None
        ]
        return seconds, torch.cat(grads)


def compare_loops(experiment: str, rows: int, repeats: int) -> tuple[float, float, float]:
    """Median seconds of the per-timestep loop, of the batched one, and their gradients' relative
    difference."""
    loop = Loop(experiment, rows)
    times: dict[str, list[float]] = {"per_timestep": [], "batched": []}
    difference = 0.0
    for number in range(repeats + 1):
        gradients = {}
        for name, kept in times.items():
            seconds, gradients[name] = loop.seconds_and_gradient(getattr(loop, name))
            if number:  # the first pass warms up
                kept.append(seconds)
        gap = gradients["batched"] - gradients["per_timestep"]
        difference = max(difference, float(gap.norm() / gradients["per_timestep"].norm()))
    return statistics.median(times["per_timestep"]), statistics.median(times["batched"]), difference


def own_step_s(words: tuple[str, ...], rl_steps: int) -> float:
    """Median seconds of an RL step of this system."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "digenrl.cli.train", *WORKLOAD, *words]
        command += [f"max_rl_steps={rl_steps}", f"output_root={folder}"]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{run.stderr[-2000:]}")
        summary = json.loads((Path(run.stdout.splitlines()[-1]) / "summary.json").read_text())
    return float(summary["step_s"])


def peer_command(
    sources: Path, folder: Path, script: str, family: str, processes: int, *words: str
) -> list[str]:
    """Return the command of a training script of flow_grpo's own, on the tiny build of `family`.

    Args:
        folder: takes its prompts, which are written here, and its output.
        words: go to `benchmarks._flow_grpo` before the script's own.
    """
    texts = [prompt.text for prompt in load_prompts("signs.jsonl")]
    Path(folder, "train.txt").write_text("\n".join(texts))
    Path(folder, "test.txt").write_text(texts[0])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", "-m", "benchmarks._flow_grpo", str(sources)]
    command += [script, *words, f"--config={sources / 'config' / 'grpo.py'}:compressibility"]
    command += ["--config.mixed_precision=no", "--config.prompt_fn=general_ocr"]
    command += [f"--config.pretrained.model={tiny_builds.ensure(family)}"]
    named = ("dataset", "logdir", "save_dir")
    return command + [f"--config.{name}={folder}" for name in named]


def peer_step_s(sources: Path, processes: int, rl_steps: int) -> float:
    """Median seconds of an iteration of flow_grpo's own script, from one line of its output to the
    next.

    Raises:
        SystemExit: it ended by itself; with its last lines.
    """
    with tempfile.TemporaryDirectory() as folder:
        batches = SAMPLES // 8 // processes
        command = peer_command(sources, Path(folder), "train_sd3", "sd3", processes)
        command += [*PEER, f"--config.sample.num_batches_per_epoch={batches}"]
        command += [f"--config.train.gradient_accumulation_steps={batches}"]
        with (
            Path(folder, "stderr").open("w+") as errors,
            subprocess.Popen(
                command, env=os.environ | ALONE, stdout=subprocess.PIPE, stderr=errors, text=True
            ) as run,
        ):
            assert run.stdout is not None
            times = (time.perf_counter() for line in run.stdout if line.startswith(PEER_STEP))
            ended = list(itertools.islice(times, rl_steps + 1))
            run.terminate()
            run.wait()
            if len(ended) <= rl_steps:
                errors.seek(0)
                raise SystemExit(
                    f"{' '.join(command)} ended after {len(ended)} "
                    f"iterations:\n{errors.read()[-2000:]}"
                )
    return statistics.median(after - before for before, after in itertools.pairwise(ended))


def main(words: list[str]) -> int:
    given = options(words, DEFAULTS, quick={"repeats": "2", "rl_steps": "3", "sittings": "1"})
    torch.set_num_threads(1)
    report = Report(
        "Against the peers",
        f"Loops: tiny builds, {given['samples']} samples x {STEPS - 1} trained steps, 1 thread, "
        "medians of "
        f"{given['repeats']}.\nRatio: per-timestep / batched; above 1 the batched loop is faster.",
        ("loop, model   ", "per timestep ms", "batched ms", "ratio", "gradient difference"),
    )
    worst = 0.0
    for experiment in LOOPS:
        loop, batched, difference = compare_loops(
            experiment, int(given["samples"]), int(given["repeats"])
        )
        worst = max(worst, difference)
        report.row(
            experiment,
            f"{1e3 * loop:.1f}",
            f"{1e3 * batched:.1f}",
            f"{loop / batched:.2f}",
            f"{difference:.1e}",
        )
    report.verdict(
        worst <= TOLERANCE,
        f"gradients differ by {worst:.1e} in norm, at most {TOLERANCE:.0e} wanted",
    )
    peer, rl_steps = (
        Path(given["peer"]).resolve() if given["peer"] else None,
        int(given["rl_steps"]),
    )
    report.table(
        (
            "processes, schedule              ",
            "step s",
            "samples/s",
            *(["flow_grpo", "ratio", "range"] if peer else []),
        )
    )
    own: dict[str, list[float]] = {name: [] for name in CASES}
    theirs: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(int(given["sittings"])):
        for name, (_, words_) in CASES.items():
            own[name].append(own_step_s(words_, rl_steps))
        for processes, seconds in theirs.items():
            if peer is None:
                break
            seconds.append(peer_step_s(peer, processes, rl_steps))
    for name, (processes, _) in CASES.items():
        step_s = statistics.median(own[name])
        cells = [name, f"{step_s:.2f}", f"{SAMPLES / step_s:.1f}"]
        if peer:
            peer_s = statistics.median(theirs[processes])
            ratios = [a / b for a, b in zip(theirs[processes], own[name], strict=True)]
            cells += [f"{SAMPLES / peer_s:.1f}", f"{peer_s / step_s:.2f}"]
            cells += [f"{min(ratios):.2f} to {max(ratios):.2f}"]
        report.row(*cells)
    report.say(
        f"Medians of {given['sittings']} sittings in turns, {rl_steps} RL steps each, and the "
        "range of their ratios. Both: 4 "
        "prompts x 8 samples, "
        f"64 px, {STEPS} steps of which {STEPS - 1} trained, LoRA of rank 32, fp32, a JPEG reward, "
        "141 text tokens, "
        "one thread a process. This system encodes each prompt once; flow_grpo once per sample and "
        "iteration."
    )
    return report.close(given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
