"""A faithful run directory without a run: the contract's files, with figures like those of the
digits experiment.

The clock is invented, the rest follows the system. 2 rollout ranks generate groups in order, and 2
trainers train each while the next are generated. Weights are published after each RL step.
Evaluations come at first and every eight steps.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
EPOCH = 1_760_000_000.0
GROUPS = 6


def write_run(
    path: Path, steps: int = 24, ended: bool = True, samples: bool = True, seed: int = 0
) -> Path:
    """Write a run of `steps` RL steps into `path`; `ended=False` leaves what a `kill -9` of the
    launcher leaves."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(
        f"experiment_name: digits_flowgrpo\nseed: {seed}\nmax_rl_steps: 24\nschedule: {{gap: 1, "
        f"tag: false}}\n"
        "data: {prompts_per_batch: 6, group_size: 16}\nsampling: {steps: 6, task_size: 8}\n"
    )
    world = {"trainer": 2, "rollout": 2}
    events: list[dict[str, Any]] = [
        {"time": EPOCH, "kind": "launch", "world": world},
        {"time": EPOCH + 4.0, "kind": "start", "rl_step": 0, "trainers": 2},
    ]
    spans, ends = simulate(steps, random.Random(seed))
    (path / "spans").mkdir()
    for rank, rows in spans.items():
        write_lines(path / "spans" / f"rank-{rank:03d}.jsonl", rows)
    metrics = [evaluation(0, EPOCH + 5.0)]
    for step in range(1, steps + 1):
        metrics.append(step_line(step, ends, random.Random(seed * 1000 + step)))
        events.append({"time": EPOCH + ends[step - 1], "kind": "publish", "version": step})
        if step % 8 == 0:
            metrics.append(evaluation(step, EPOCH + ends[step - 1] + 0.2))
            events.append(
                {"time": EPOCH + ends[step - 1] + 0.1, "kind": "checkpoint", "rl_step": step}
            )
    last = EPOCH + ends[steps - 1] + 1.0
    if ended:
        events.append({"time": last, "kind": "stop", "rl_step": steps, "cause": None})
        events.append(
            {"time": last + 1, "kind": "end", "status": "completed", "cause": None, "world": world}
        )
    write_lines(path / "metrics.jsonl", metrics)
    write_lines(path / "events.jsonl", events)
    if samples:
        for step in range(0, steps + 1, 8):
            write_samples(path, step)
    return path


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def learned(step: int) -> float:
    """Share of the way from the base model to the end."""
    return 1.0 - math.exp(-step / 9.0)


def step_line(step: int, ends: list[float], rng: random.Random) -> dict[str, Any]:
    began = ends[step - 2] if step > 1 else 4.0
    reward = 0.55 + 0.39 * learned(step - 1) + rng.gauss(0, 0.02)
    line: dict[str, Any] = {
        "kind": "step", "rl_step": step, "time": EPOCH + ends[step - 1], "reward": reward, "reward/judge_a": reward,
        "loss": rng.gauss(0, 1e-3), "kl": 0.03 * learned(step),
        "clip_fraction": 0.12 * learned(step) + rng.random() * 0.02,
        "ratio_max_dev": 0.0 if step == 1 else 10 ** rng.uniform(-2.6, -1.6), "grad_norm": 1.5 + rng.random(),
        "lr": 2e-3, "samples": GROUPS * 16, "step_s": ends[step - 1] - began, "staleness_max": 0,
        "samples_per_s": GROUPS * 16 / (ends[step - 1] - began), "predicted_step_s": 2.6,
    }  # fmt: skip
    if step == 1:
        line["first_ratio_max_dev"] = 0.0
    return line


def evaluation(step: int, time: float) -> dict[str, Any]:
    heldout = 0.56 + 0.34 * learned(step)
    return {
        "kind": "eval", "rl_step": step, "time": time, "reward": 0.55 + 0.38 * learned(step), "heldout": heldout,
        "heldout/judge_b": heldout, "diversity_ratio": 1.06 - 0.2 * learned(step),
        "nn_distance": 3.12 - 0.35 * learned(step),
    }  # fmt: skip


def simulate(steps: int, rng: random.Random) -> tuple[dict[int, list[dict[str, Any]]], list[float]]:
    """(rank -> span rows, end of each RL step): list scheduling of two tasks per group on unequal
    rollouts."""
    spans: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(4)}

    def add(rank: int, stage: str, start: float, end: float, step: int, **args: Any) -> None:
        role = "trainer" if rank < 2 else "rollout"
        spans[rank].append(
            {
                "rank": rank,
                "role": role,
                "stage": stage,
                "start": start,
                "end": end,
                "step": step,
                **args,
            }
        )

    now, ends = 4.0, []
    for rank in range(4):
        add(rank, "wait", 0.0, now, -1, cause="startup")
    for step in range(steps):
        free = {2: now + 0.05, 3: now + 0.05}
        for rank in free:
            add(rank, "adopt", now, now + 0.05, step, version=step)
        done: dict[int, float] = {}
        for task in range(2 * GROUPS):
            rank = min(free, key=lambda r: free[r])
            start, seconds = free[rank], (0.30 if rank == 2 else 0.42) * rng.uniform(0.92, 1.1)
            add(rank, "generate", start, start + seconds, step, group=task // 2)
            add(rank, "decode", start + seconds, start + seconds + 0.02, step, group=task // 2)
            add(
                rank, "score", start + seconds + 0.02, start + seconds + 0.12, step, group=task // 2
            )
            free[rank] = start + seconds + 0.02
            done[task // 2] = max(done.get(task // 2, 0.0), start + seconds + 0.13)
        finished = []
        for rank in (0, 1):
            clock = now
            for group in range(GROUPS):
                if done[group] > clock:
                    cause = (
                        "first_fragment"
                        if group == 0
                        else "tail"
                        if group == GROUPS - 1
                        else "reward"
                    )
                    add(rank, "wait", clock, done[group], step, cause=cause)
                    clock = done[group]
                seconds = 0.26 * rng.uniform(0.95, 1.05)
                add(rank, "train", clock, clock + seconds, step, group=group)
                clock += seconds
            finished.append(clock)
        end = max(finished)
        for rank, clock in zip((0, 1), finished, strict=True):
            if end > clock:
                add(rank, "wait", clock, end, step, cause="straggler")
            add(rank, "optimizer", end, end + 0.03, step)
        add(0, "publish", end + 0.03, end + 0.08, step, version=step + 1)
        for rank in free:
            add(rank, "wait", free[rank], end + 0.08, step, cause="weights")
        now = end + 0.08
        ends.append(now)
    return spans, ends


def write_samples(path: Path, step: int, per_prompt: int = 5) -> None:
    """Real digits, some of the wrong class and noisy before learning: what evaluation keeps, with
    its scores."""
    data = load_digits()
    rng = np.random.default_rng(step)
    media, prompts, scores = [], [], []
    for label, word in enumerate(WORDS):
        for sample in range(per_prompt):
            right = sample >= 2 or learned(step) > 0.5
            pool = data.images[data.target == (label if right else (label + 3) % 10)]
            noisy = pool[sample] / 16 + rng.normal(0, 0.22 * (1.1 - learned(step)), (8, 8))
            media.append((np.clip(noisy, 0, 1) * 255).astype(np.uint8)[None])
            prompts.append(f"number {word}")
            scores.append(0.9 * right + 0.1 * rng.random())
    (path / "samples").mkdir(exist_ok=True)
    arrays = {
        "media": np.stack(media),
        "prompts": np.array(prompts),
        "heldout": np.array(scores, np.float32),
    }
    np.savez(path / "samples" / f"eval-{step}.npz", **arrays)
