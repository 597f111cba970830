"""What rewards compute: FLOPs on GPUs, and seconds on processors."""

from __future__ import annotations

from collections.abc import Iterable

from digenrl.extensions.planner.gpus import efficiency_of
from digenrl.extensions.planner.workload import Workload
from digenrl.hardware import Pool

REWARD_FLOPS = {
    "pickscore": 0.38e12,
    "clip_score": 0.33e12,
    "image_similarity": 0.33e12,
    "aesthetic": 0.17e12,
    "clap": 0.02e12,
    "dino_similarity": 0.04e12,
    "hpsv3": 10.5e12,
    "edit_reward": 38e12,
    "video_align": 7.4e12,
}
"""FLOPs per sample of scorers on the GPU: 2 x parameters x tokens, for the ViT and for the language
model of a Qwen-VL (counted for CLAP). A Qwen-VL reads 600 tokens, twice 1060, or 1500 for four
frames. Other scorers run on the CPU."""

JUDGE_FLOPS = {
    "vlm_judge": 15e12,
    "edit_judge": 18e12,
    "unified_reward": 30e12,
    "pair_judge": 54e12,
}
"""FLOPs per sample of a 7B judge that the run serves itself, for 430 and 560 tokens. Generating the
answer is memory-bound. We assume that it costs as much as reading the prompt. UnifiedReward's
answer is some hundred tokens longer. A pair judge asks three times per sample when four meet."""

REWARD_CPU_SECONDS = {
    "ocr": 0.3,
    "video_quality": 0.1,
    "clap": 0.1,
    "jpeg": 0.01,
    "digits": 0.001,
    "scenes": 0.002,
    "edit": 0.003,
    "edit_done": 0.01,
}
"""Seconds per sample of scorers in a CPU thread beside the GPU. They delay a group, but occupy no
GPU."""


def score_flops(rewards: Iterable[str]) -> float:
    """Return the FLOPs of the GPU scorers per sample."""
    return sum(REWARD_FLOPS.get(name, 0.0) for name in rewards)


def judge_flops(judged: Iterable[str]) -> float:
    """Return the FLOPs per sample of the slowest reward on a GPU of its own."""
    return max(({**REWARD_FLOPS, **JUDGE_FLOPS}.get(name, 0.0) for name in judged), default=0.0)


def score_cpu_seconds(rewards: Iterable[str]) -> float:
    """Return the seconds of the CPU scorers per sample."""
    return sum(REWARD_CPU_SECONDS.get(name, 0.0) for name in rewards)


def judge_seconds(work: Workload, pool: Pool) -> float:
    """Return the seconds per sample of the rewards on GPUs of their own."""
    speeds = efficiency_of(pool)
    return judge_flops(work.judged) / (pool.tflops * 1e12 * speeds.generate * speeds.score)
