"""Seconds of what ranks send each other: tokens, gradients, versions and tasks, from bytes and the
speeds that links and hosts reach."""

from __future__ import annotations

import math

from digenrl.extensions.planner.gpus import efficiency_of
from digenrl.extensions.planner.memory import version_bytes
from digenrl.extensions.planner.scoring import judge_seconds, score_cpu_seconds
from digenrl.extensions.planner.workload import Workload
from digenrl.hardware import CONNECTION_GB_S, Line, Pool

COLLECTIVE_SECONDS = 40e-6
"""Latency of a collective, in seconds (an assumption)."""
ADOPT_GB_S = 3.3
"""GB/s at which one processor core copies received weights onto a GPU (an assumption)."""
CONDITION_WIDTH = 4096
"""Width of a text token's embedding (T5, UMT5, Llama; an assumption for the others)."""
CODEC_GB_S, CODED_SHARE = 0.2, 0.1
"""GB/s at which one core writes a version as a difference, and the share of the bytes that is left.
benchmarks/publish.py links=... measures a share of 1/20 if one 16-bit value in twenty moves. The
rest is an assumption."""
SWITCH_SECONDS = 0.02
"""Seconds of one switch between training and generation (an assumption). Caches are freed and
adapters stay."""


def carries_differences(work: Workload, line: Line) -> bool:
    """Return whether versions cross a line as differences (`transport/compress.py`)."""
    return work.compressed and line.gb_s < CODEC_GB_S * (1.0 - CODED_SHARE)


def exchange_seconds(
    work: Workload, pool: Pool, task_size: int, forwards: float, context: int
) -> float:
    """Return the seconds in which `context` GPUs of a node exchange tokens in `forwards`
    forwards of a task.

    Each attention exchanges its queries, keys, values and outputs, and waits for them.
    """
    if context == 1:
        return 0.0
    passes = 4 * forwards * work.sizes["attention_blocks"]
    volume = task_size * work.passes * work.block_bytes * (context - 1) / context**2
    return passes * (volume / ring_bandwidth([pool], context) + COLLECTIVE_SECONDS)


def ring_bandwidth(pools: list[Pool], ranks: int) -> float:
    """Return the bytes per second of a ring over `ranks` GPUs of one place.

    Inside a node they are those of its links, otherwise those of the slowest network link.
    """
    inside = len({pool.name for pool in pools}) == 1 and ranks <= min(
        pool.per_node for pool in pools
    )
    links = (
        (p.intra_gb_s if inside else min(p.intra_gb_s, p.inter_gb_s)) * efficiency_of(p).network
        for p in pools
    )
    return min(links) * 1e9


def _slowest_link(pools: list[Pool]) -> float:
    """Return the bytes per second of the slowest network link."""
    return min(pool.inter_gb_s * efficiency_of(pool).network for pool in pools) * 1e9


def exposed_seconds(pool: Pool, communicating: float, computing: float) -> float:
    """Return the seconds of `communicating` that remain beside `computing` seconds of work on
    `pool`: at least the share that never overlaps."""
    return communicating - min(efficiency_of(pool).hidden * communicating, computing)


def gradient_bytes(values: float, ranks: int, share: float | None = None) -> float:
    """Return the bytes that each of `ranks` sends for the average of a gradient of `values` in
    fp32.

    An all-reduce sends each value twice, but for the rank's own part. An all-gather of the largest
    values sends them to all others, each with its place of 4 bytes (`strategy/exchange.py`).

    Args:
        share: part of the values that a rank sends (`parallel.compress`); None: all.

    Example:
        >>> gradient_bytes(1000, ranks=2), gradient_bytes(1000, ranks=2, share=0.01)
        (4000.0, 80)
    """
    if share is not None:
        return 8 * math.ceil(share * values) * (ranks - 1)
    return 2 * 4 * values * (ranks - 1) / ranks


def reduce_seconds(
    work: Workload, pools: list[Pool], ranks: int, shards: int = 1,
    share: float | None = None, line: Line | None = None,
) -> float:  # fmt: skip
    """Return the seconds of the average of fp32 gradients at the end of an update.

    Args:
        ranks: copies of the weights to reduce over: trainers divided by `shards`.
        shards: ranks that share a copy. Each holds 1/`shards` of the gradients.
        share: part of the values that travel; None: all.
        line: the slowest one between trainers in different places. A ring crosses it in each of
            its rounds, and waits for its latency.
    """
    if ranks == 1:
        return 0.0
    volume = gradient_bytes(work.trained_parameters / shards, ranks, share)
    seconds = volume / ring_bandwidth(pools, ranks * shards) + 1e-3
    if line is None:
        return seconds
    rounds = (ranks - 1) * (2 if share is None else 1)
    return max(seconds, volume / (line.gb_s * 1e9) + rounds * line.latency_s)


def publish_seconds(work: Workload, pools: list[Pool], other_nodes: int) -> float:
    """Return the seconds of sending a version, in the rollouts' dtype, to all rollouts at once.

    Trainer 0's link carries a copy for each other node with rollouts. No connection is faster
    than the processors at its ends allow.
    """
    network = other_nodes * version_bytes(work) / _slowest_link(pools)
    return max(network, version_bytes(work) / (CONNECTION_GB_S * 1e9)) + 5e-3


def snapshot_seconds(work: Workload, pools: list[Pool]) -> float:
    """Return the seconds of copying a version, in the rollouts' dtype, into trainer 0's host
    memory."""
    return version_bytes(work) / (min(efficiency_of(pool).host_gb_s for pool in pools) * 1e9)


def switch_seconds(pools: list[Pool], copy: int) -> float:
    """Return the seconds of one switch between training and generation. A `copy` of so many
    bytes in host memory changes places with the weights in training."""
    return SWITCH_SECONDS + 2 * copy / (min(efficiency_of(pool).host_gb_s for pool in pools) * 1e9)


def adopt_seconds(work: Workload) -> float:
    """Return the seconds in which one thread copies a version, in the rollouts' dtype, onto a
    rollout's GPU."""
    return version_bytes(work) / (ADOPT_GB_S * 1e9)


def task_bytes(work: Workload, task_size: int) -> float:
    """Return the bytes of a finished task.

    It holds the latents before and after every trained step in storage dtype, and the prompt's
    embedding in 16 bit.
    """
    return _latent_bytes(work, task_size) + 2.0 * CONDITION_WIDTH * work.text_tokens * work.passes


def _latent_bytes(work: Workload, task_size: int) -> float:
    """Return the bytes of a task's latents before and after every trained step."""
    return 2.0 * task_size * work.trained_steps * work.latent_elements * work.storage_bytes


def send_seconds(work: Workload, line: Line, task_size: int) -> float:
    """Return the seconds of a finished task on the line between two places. On a line that carries
    differences, latents that are after one trained step and before the next travel once
    (`transport/repeated.py`). Trained steps are taken to follow each other, and every task to be
    the first of its prompt."""
    size, steps = task_bytes(work, task_size), work.trained_steps
    if carries_differences(work, line):
        size -= (steps - 1) / (2 * steps) * _latent_bytes(work, task_size)
    return line.transfer_seconds(size)


def fetch_seconds(work: Workload, line: Line, nodes: int) -> float:
    """Return the seconds of a version on the line between two places, with a copy for each of
    `nodes` nodes. Where that is sooner, the version travels as a difference
    (`network.compress`)."""
    size = nodes * version_bytes(work)
    if not carries_differences(work, line):
        return line.transfer_seconds(size)
    # Each node's copy is coded in a thread of its own.
    return size / nodes / (CODEC_GB_S * 1e9) + line.transfer_seconds(CODED_SHARE * size)


def deliver_seconds(work: Workload, pools: list[Pool], task_size: int) -> float:
    """Return the seconds of a finished task through pinned memory and the network, and of its
    scorers beside the rank's GPU."""
    return (
        task_bytes(work, task_size) / _slowest_link(pools)
        + 3e-3
        + task_size * score_cpu_seconds(work.rewards)
        + task_size * max(judge_seconds(work, pool) for pool in pools)
    )
