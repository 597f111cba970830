"""Time-step parallelism: K trained steps of a sample in one forward and backward, against a
per-step loop.

    python -m benchmarks.tsp [experiment=flux1_flowgrpo] [samples=8] [repeats=7] [quick=true]

Same model, same trajectories, same gradients (checked); the two are measured alternately and their
medians compared. On a CPU batching saves call overhead; with sharded weights it saves K-1 of K
all-gathers, which this does not show.
"""

from __future__ import annotations

import os
import sys
import time
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks._shared import Report, options
from digenrl import config as configuration
from digenrl.diffusion.denoise import SampleKey, replay
from digenrl.types import CellBlock, Prompt
from tests.sampling import sample

TOLERANCE = 1e-4
"""Largest relative difference of gradients in norm (fp32)."""


def main(words: list[str]) -> int:
    """Print one row per K; returns the exit code."""
    given = options(
        words, {"experiment": "flux1_flowgrpo", "samples": "8", "repeats": "7"}, {"repeats": "2"}
    )
    rows, repeats = int(given["samples"]), int(given["repeats"])
    settings = configuration.load([f"experiment={given['experiment']}", "hardware=cpu_tiny"]).config
    torch.set_num_threads(1)
    policy = configuration.instantiate(settings.model)
    module = configuration.instantiate(settings.algorithm, policy=policy)
    steps = settings.sampling.steps
    prompt, plan = (
        Prompt("a red circle on a white background"),
        module.train_steps.plan(0, 0, steps),
    )
    condition, grid = policy.encode([prompt]), policy.sigma_grid(steps)
    made = sample(
        policy, condition, SampleKey(0, 0, prompt.uid, tuple(range(rows))), grid, module.sde, plan
    )
    trained = len(plan.trained)

    def block(positions: slice) -> CellBlock:
        return CellBlock(
            step=0,
            group=0,
            uid=prompt.uid,
            first_sample=0,
            version=0,
            steps=made.steps[positions],
            sigmas=grid,
            latents=made.latents[:, positions],
            next_latents=made.next_latents[:, positions],
            log_probs=made.log_probs[:, positions],
            condition=condition,
        )

    def gradient(batch: int) -> tuple[float, torch.Tensor]:
        """Seconds and gradient of one pass over all cells, `batch` steps at a time."""
        policy.zero_grad()
        began = time.perf_counter()
        for first in range(0, trained, batch):
            replay(policy, block(slice(first, first + batch)), module.sde).log_prob.sum().backward()
        seconds = time.perf_counter() - began
        grads = [
            p.grad.flatten() for p in policy.trained_parameters().values() if p.grad is not None
        ]
        return seconds, torch.cat(grads)

    _, reference = gradient(1)
    batches = sorted({1, 2, (trained + 1) // 2, trained})
    seconds: dict[int, list[float]] = {batch: [] for batch in batches}
    worst = dict.fromkeys(batches, 0.0)
    for _ in range(repeats):
        for batch in batches:
            spent, grads = gradient(batch)
            seconds[batch].append(spent)
            worst[batch] = max(worst[batch], float((grads - reference).norm() / reference.norm()))
    notes = (
        f"{given['experiment']}, tiny build, {rows} samples x {trained} trained steps, 1 thread, "
        f"{repeats} repeats."
    )
    report = Report(
        "Time-step parallelism",
        notes,
        ("  K", "      ms", "speed-up over K=1", "gradient difference"),
    )
    for batch in batches:
        ratio = median(seconds[1]) / median(seconds[batch])
        report.row(
            batch, f"{1e3 * median(seconds[batch]):.1f}", f"{ratio:.2f}", f"{worst[batch]:.1e}"
        )
    report.verdict(
        max(worst.values()) < TOLERANCE, f"gradients differ by at most {TOLERANCE:g} in norm"
    )
    return report.close(given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
