"""Seconds of every kind of work on a pool, from FLOPs and bytes and the speeds that GPUs, memory
and links reach.

A forward or backward takes (products / share + attention / its share) / peak + element-wise traffic
/ bandwidth. It takes at least blocks x launches. The speeds that GPUs reach are in `gpus.py`.
The VAE is bound by memory.

Communication hides behind computing in part (FSDP prefetches the next block's weights): a
micro-batch pays the rest once, whatever its number of time steps. Measured seconds of a profile
replace computed ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from digenrl.extensions.planner.gpus import (
    BACKWARD_LAUNCHES,
    ENGINES,
    SCALED,
    efficiency_of,
    kind_of,
)
from digenrl.extensions.planner.memory import (
    offloaded_bytes,
    text_encoder_bytes,
    vae_bytes,
    version_bytes,
)
from digenrl.extensions.planner.workload import Workload
from digenrl.hardware import Hardware, Line, Pool
from digenrl.recompute import OFFLOAD, Recompute

SELECTION_SECONDS = 6e-3
"""Seconds of selective checkpointing per block: about 300 operators (forward and repetition) at 20
us in Python."""
DECODE_FLOPS_PER_BYTE = 60.0
"""FLOPs per byte of a VAE in fp32: 3 x 3 convolutions of 128 to 512 channels between norms and
activations (an assumption)."""
COLLECTIVE_SECONDS = 40e-6
"""Latency of a collective, in seconds (an assumption)."""
ADOPT_GB_S = 3.3
"""GB/s at which one processor core copies received weights onto a GPU (an assumption)."""
CONDITION_WIDTH = 4096
"""Width of a text token's embedding (T5, UMT5, Llama; an assumption for the others)."""
CONNECTION_GB_S = 1.2
"""GB/s of one TCP connection, from publishing to adopting (benchmarks/publish.py over loopback on
two processor cores)."""
CODEC_GB_S, CODED_SHARE = 0.2, 0.1
"""GB/s at which one core writes a version as a difference, and the share of the bytes that is left.
benchmarks/publish.py links=... measures a share of 1/20 if one 16-bit value in twenty moves. The
rest is an assumption."""
SWITCH_SECONDS = 0.02
"""Seconds of one switch between training and generation (an assumption). Caches are freed and
adapters stay."""
STAGES = ("encode", "generate", "decode", "score", "train", "network")
MEASURED, PUBLISHED, ASSUMED = "measured", "published", "assumed"


def carries_differences(work: Workload, line: Line) -> bool:
    """Return whether versions cross a line as differences (`transport/compress.py`)."""
    return work.compressed and line.gb_s < CODEC_GB_S * (1.0 - CODED_SHARE)


@dataclass(frozen=True)
class Costs:
    """Cost model of a workload on a hardware profile."""

    work: Workload
    hardware: Hardware

    def _measured_seconds(self, stage: str, pool: Pool) -> float | None:
        return self.hardware.seconds.get(stage, {}).get(pool.name)

    def figure_source(self, stage: str, pool: Pool) -> str:
        """Return the source of a stage's figures on `pool`: measured | published | assumed."""
        if self._measured_seconds(stage, pool) is not None or SCALED.get(stage) in dict(
            pool.efficiency
        ):
            return MEASURED
        published = stage == "generate" and not pool.efficiency and kind_of(pool.gpu).published
        return PUBLISHED if published else ASSUMED

    def _kernel_launch_seconds(self, pool: Pool, forwards: float, sampling: bool = False) -> float:
        """Return the seconds that the processor needs to launch the kernels of `forwards` forwards
        (of any batch size). sampling: with one adapter more, the constant one."""
        given, engine = efficiency_of(pool).launch_seconds, ENGINES[self.work.engine]
        own = engine.launch_seconds if self.work.lora_rank is None else engine.adapted_seconds
        launch = own if given is None else given
        launch += sampling * (engine.adapted_seconds - engine.launch_seconds)
        return forwards * launch * float(self.work.sizes["attention_blocks"])

    def _compute_seconds(self, pool: Pool, flops: float, attention: float) -> float:
        """Return the seconds of `flops`, which include the `attention` FLOPs."""
        speeds = efficiency_of(pool)
        share = speeds.fused_attention if self.work.fused_attention else speeds.attention
        return ((flops - attention) / speeds.generate + attention / share) / (pool.tflops * 1e12)

    def _traffic_seconds(self, pool: Pool, forwards: float) -> float:
        """Return the seconds of the element-wise reads and writes in `forwards` forwards of one
        sample."""
        bytes_moved = (
            ENGINES[self.work.engine].passes
            * self.work.block_bytes
            * float(self.work.sizes["attention_blocks"])
        )
        return forwards * bytes_moved / (pool.hbm_tb_s * 1e12)

    def _unpack_seconds(self, pool: Pool) -> float:
        """Return the seconds in which one forward of any batch size unpacks a quantized base. It
        reads the base, then writes and reads it in 16 bits. Computed from the memory bandwidth, not
        measured."""
        moved = (self.work.base_bytes + 4) * self.work.sizes["parameters"]
        return moved / (pool.hbm_tb_s * 1e12) if self.work.base_bytes < 2 else 0.0

    def step_seconds(self, pool: Pool, task_size: int) -> float:
        """Return the seconds of one denoising step of a task: never less than reading the weights
        from memory once."""
        work, rows = self.work, task_size * self.work.passes
        measured = self._measured_seconds("generate", pool)
        if measured is not None:
            return measured * task_size / work.steps
        weights = work.base_bytes * work.sizes["parameters"] / (pool.hbm_tb_s * 1e12)
        seconds = self._compute_seconds(
            pool, rows * work.generating_flops(), rows * work.attention_flops()
        )
        seconds += self._traffic_seconds(pool, rows) + self._unpack_seconds(pool)
        seconds *= efficiency_of(pool).generated
        return max(
            seconds,
            weights,
            self._kernel_launch_seconds(pool, work.launches, work.sampling_parameters > 0),
        )

    def encode_seconds(self, pool: Pool, cached: bool = True) -> float:
        """Return the seconds of conditioning one prompt; 0 if prompts are read from a store.

        `cached=False` adds copying the encoders from host memory and back.
        """
        if self.work.stored_prompts:
            return 0.0
        measured = self._measured_seconds("encode", pool)
        if measured is not None:
            return measured
        seconds = self.work.encode_flops() / (
            pool.tflops * 1e12 * efficiency_of(pool).generate * efficiency_of(pool).encode
        )
        copies = 2 * text_encoder_bytes(self.work) / (efficiency_of(pool).host_gb_s * 1e9)
        return seconds + (0.0 if cached else copies)

    def decode_seconds(self, pool: Pool, task_size: int, cached: bool = True) -> float:
        """Return the seconds of a task's VAE decode (fp32), bound by memory bandwidth; `cached` as
        for `encode_seconds`."""
        measured = self._measured_seconds("decode", pool)
        if measured is not None:
            return measured * task_size
        moved = self.work.decode_flops() / DECODE_FLOPS_PER_BYTE
        copies = 0.0 if cached else 2 * vae_bytes(self.work) / (efficiency_of(pool).host_gb_s * 1e9)
        return task_size * moved / (pool.hbm_tb_s * 1e12 * efficiency_of(pool).decode) + copies

    def score_seconds(self, pool: Pool, task_size: int) -> float:
        """Return the seconds of a task's GPU scorers."""
        measured = self._measured_seconds("score", pool)
        if measured is not None:
            return measured * task_size
        return (
            task_size
            * self.work.score_flops()
            / (pool.tflops * 1e12 * efficiency_of(pool).generate * efficiency_of(pool).score)
        )

    def judge_seconds(self, pool: Pool) -> float:
        """Return the seconds per sample of the rewards on GPUs of their own."""
        return self.work.judge_flops() / (
            pool.tflops * 1e12 * efficiency_of(pool).generate * efficiency_of(pool).score
        )

    def judged_seconds(self) -> float:
        """Return the seconds in which all judges, one a node, score the samples of a step."""
        speeds = [
            math.ceil(pool.count / pool.per_node) / seconds
            for pool in self.hardware.pools
            if pool.judges and (seconds := self.judge_seconds(pool))
        ]
        return self.work.samples / sum(speeds) if speeds else 0.0

    def cell_seconds(
        self, pool: Pool, task_size: int, tsp_batch: int, recompute: Recompute, context: int = 1
    ) -> float:
        """Return the seconds of one trained step of a task on `context` GPUs together, inside a
        block of K = `tsp_batch`
        steps: forward, backward, and forwards of the reference and of earlier weights.

        Activations that blocks did not keep are computed again, so they are written and read once
        more. Selective checkpointing takes the processor `SELECTION_SECONDS` per block and forward.
        The GPU works meanwhile, and so it does during copies to the host. Hence the result is the
        maximum of all these.
        """
        measured = self._measured_seconds("train", pool)
        work, rows = self.work, task_size * self.work.passes
        trained = task_size * work.trained_passes
        selected = recompute.products + recompute.attention
        # Attention exchanges tokens in the forward, in the backward, in forwards of other weights
        # and where repeated.
        exchange = 2 + work.frozen_forwards + recompute.inputs + selected
        exchanged = self._exchange_seconds(pool, task_size, exchange, context)
        if measured is not None:
            return measured * task_size / context + exchanged
        forwards, attention = 1 + work.frozen_forwards, work.attention_flops()
        shares = [
            (mode, share) for mode, share in recompute.shares.items() if share and mode != OFFLOAD
        ]
        repeated = sum(share * work.repeated_flops(mode) for mode, share in shares)
        moved = sum(share * work.repeated_bytes(mode) for mode, share in shares)
        seconds = forwards * rows * self._compute_seconds(pool, work.forward_flops(), attention)
        seconds += trained * self._compute_seconds(
            pool, work.backward_flops() + repeated, (2 + recompute.inputs) * attention
        )
        seconds += self._traffic_seconds(pool, forwards * rows + 2 * trained)
        seconds = seconds / efficiency_of(pool).train + trained * moved / (pool.hbm_tb_s * 1e12)
        seconds = seconds * efficiency_of(pool).trained / context + exchanged
        # Launches and selection take the processor as long for K steps in one forward as for one,
        # so a step pays 1/K.
        back = work.launches - work.detached
        backward = (BACKWARD_LAUNCHES + recompute.inputs) * back
        launches = self._kernel_launch_seconds(pool, forwards * work.launches + backward)
        seconds += (forwards + 1 + recompute.inputs) * self._unpack_seconds(pool) / tsp_batch
        selecting = selected * SELECTION_SECONDS * work.sizes["attention_blocks"]
        copying = (
            2
            * offloaded_bytes(work, trained, recompute, context)
            / (efficiency_of(pool).host_gb_s * 1e9)
        )
        return max(seconds, launches / tsp_batch, selecting / tsp_batch, copying)

    # ---- links

    def _exchange_seconds(self, pool: Pool, task_size: int, forwards: float, context: int) -> float:
        """Return the seconds in which `context` GPUs of a node exchange tokens in `forwards`
        forwards of a task.

        Each attention exchanges its queries, keys, values and outputs, and waits for them.
        """
        if context == 1:
            return 0.0
        work, passes = self.work, 4 * forwards * float(self.work.sizes["attention_blocks"])
        volume = task_size * work.passes * work.block_bytes * (context - 1) / context**2
        return passes * (volume / self.ring_bandwidth([pool], context) + COLLECTIVE_SECONDS)

    def ring_bandwidth(self, pools: list[Pool], ranks: int) -> float:
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

    @staticmethod
    def _slowest_link(pools: list[Pool]) -> float:
        """Return the bytes per second of the slowest network link."""
        return min(pool.inter_gb_s * efficiency_of(pool).network for pool in pools) * 1e9

    def sharding_seconds(self, pools: list[Pool], shards: int) -> float:
        """Return the seconds of all communication in one micro-batch of sharded trainers.

        Weights are gathered in 16 bit for the forward, for the backward (which serves the repeated
        forward too), and for each forward of other weights. If all weights are trained, their
        gradients are scattered in fp32 as well.
        """
        scattered = self.gather_seconds(pools, shards, 4) if self.work.lora_rank is None else 0.0
        return (2 + self.work.frozen_forwards) * self.gather_seconds(pools, shards) + scattered

    @staticmethod
    def exposed_seconds(pool: Pool, communicating: float, computing: float) -> float:
        """Return the seconds of `communicating` that remain beside `computing` seconds of work on
        `pool`: at least the share that never overlaps."""
        return communicating - min(efficiency_of(pool).hidden * communicating, computing)

    def gather_seconds(self, pools: list[Pool], shards: int, width: int = 2) -> float:
        """Return the seconds of an all-gather of the whole model over `shards` ranks, in `width`
        bytes per parameter."""
        if shards == 1:
            return 0.0
        volume = width * self.work.sizes["parameters"] * (shards - 1) / shards
        latency = COLLECTIVE_SECONDS * self.work.sizes["attention_blocks"]
        return volume / self.ring_bandwidth(pools, shards) + latency

    def reduce_seconds(self, pools: list[Pool], ranks: int, shards: int = 1) -> float:
        """Return the seconds of the all-reduce of fp32 gradients at the end of an update.

        Args:
            ranks: copies of the weights to reduce over: trainers divided by `shards`.
            shards: ranks that share a copy. Each holds 1/`shards` of the gradients.
        """
        if ranks == 1:
            return 0.0
        volume = 2 * 4 * self.work.trained_parameters / shards * (ranks - 1) / ranks
        return volume / self.ring_bandwidth(pools, ranks * shards) + 1e-3

    def optimizer_seconds(self, pool: Pool, shards: int) -> float:
        """Return the seconds of an AdamW step, which moves 28 bytes per parameter: weights,
        gradients and moments."""
        return 28 * self.work.trained_parameters / shards / (pool.hbm_tb_s * 1e12) + 1e-3

    def publish_seconds(self, pools: list[Pool], other_nodes: int) -> float:
        """Return the seconds of sending a version, in the rollouts' dtype, to all rollouts at once.

        Trainer 0's link carries a copy for each other node with rollouts. No connection is faster
        than the processors at its ends allow.
        """
        network = other_nodes * version_bytes(self.work) / self._slowest_link(pools)
        return max(network, version_bytes(self.work) / (CONNECTION_GB_S * 1e9)) + 5e-3

    def snapshot_seconds(self, pools: list[Pool]) -> float:
        """Return the seconds of copying a version, in the rollouts' dtype, into trainer 0's host
        memory."""
        return version_bytes(self.work) / (
            min(efficiency_of(pool).host_gb_s for pool in pools) * 1e9
        )

    def switch_seconds(self, pools: list[Pool], copy: int) -> float:
        """Return the seconds of one switch between training and generation. A `copy` of so many
        bytes in host memory changes places with the weights in training."""
        return SWITCH_SECONDS + 2 * copy / (
            min(efficiency_of(pool).host_gb_s for pool in pools) * 1e9
        )

    def adopt_seconds(self) -> float:
        """Return the seconds in which one thread copies a version, in the rollouts' dtype, onto a
        rollout's GPU."""
        return version_bytes(self.work) / (ADOPT_GB_S * 1e9)

    def task_bytes(self, task_size: int) -> float:
        """Return the bytes of a finished task.

        It holds the latents before and after every trained step in storage dtype, and the prompt's
        embedding in 16 bit.
        """
        latents = (
            2
            * task_size
            * self.work.trained_steps
            * self.work.latent_elements
            * self.work.storage_bytes
        )
        return latents + 2.0 * CONDITION_WIDTH * self.work.text_tokens * self.work.passes

    def send_seconds(self, line: Line, task_size: int) -> float:
        """Return the seconds of a finished task on the line between two places."""
        return line.transfer_seconds(self.task_bytes(task_size))

    def fetch_seconds(self, line: Line, nodes: int) -> float:
        """Return the seconds of a version on the line between two places, with a copy for each of
        `nodes` nodes. Where that is sooner, the version travels as a difference
        (`network.compress`)."""
        size = nodes * version_bytes(self.work)
        if not carries_differences(self.work, line):
            return line.transfer_seconds(size)
        # Each node's copy is coded in a thread of its own.
        return size / nodes / (CODEC_GB_S * 1e9) + line.transfer_seconds(CODED_SHARE * size)

    def deliver_seconds(self, pools: list[Pool], task_size: int) -> float:
        """Return the seconds of a finished task through pinned memory and the network, and of its
        scorers beside the rank's GPU."""
        return (
            self.task_bytes(task_size) / self._slowest_link(pools)
            + 3e-3
            + task_size * self.work.score_cpu_seconds()
            + task_size * max(self.judge_seconds(pool) for pool in pools)
        )
