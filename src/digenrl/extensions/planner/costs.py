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

from digenrl.extensions.planner.counts import (
    attention_flops,
    backward_flops,
    decode_flops,
    encode_flops,
    forward_flops,
    generating_flops,
    repeated_bytes,
    repeated_flops,
)
from digenrl.extensions.planner.gpus import (
    BACKWARD_LAUNCHES,
    ENGINES,
    SCALED,
    efficiency_of,
    kind_of,
)
from digenrl.extensions.planner.links import COLLECTIVE_SECONDS, exchange_seconds, ring_bandwidth
from digenrl.extensions.planner.memory import offloaded_bytes, text_encoder_bytes, vae_bytes
from digenrl.extensions.planner.scoring import judge_seconds, score_flops
from digenrl.extensions.planner.workload import Workload
from digenrl.hardware import Hardware, Pool
from digenrl.recompute import OFFLOAD, Recompute

SELECTION_SECONDS = 6e-3
"""Seconds of selective checkpointing per block: about 300 operators (forward and repetition) at 20
us in Python."""
DECODE_FLOPS_PER_BYTE = 60.0
"""FLOPs per byte of a VAE in fp32: 3 x 3 convolutions of 128 to 512 channels between norms and
activations (an assumption)."""
STAGES = ("encode", "generate", "decode", "score", "train", "network")
MEASURED, PUBLISHED, ASSUMED = "measured", "published", "assumed"


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

    def figure_sources(self) -> dict[str, dict[str, str]]:
        """Return stage -> pool -> source of its figures: measured | published | assumed."""
        return {
            stage: {pool.name: self.figure_source(stage, pool) for pool in self.hardware.pools}
            for stage in STAGES
        }

    def _kernel_launch_seconds(self, pool: Pool, forwards: float, sampling: bool = False) -> float:
        """Return the seconds that the processor needs to launch the kernels of `forwards` forwards
        (of any batch size). sampling: with one adapter more, the constant one."""
        given, engine = efficiency_of(pool).launch_seconds, ENGINES[self.work.engine]
        own = engine.launch_seconds if self.work.lora_rank is None else engine.adapted_seconds
        launch = own if given is None else given
        launch += sampling * (engine.adapted_seconds - engine.launch_seconds)
        return forwards * launch * self.work.sizes["attention_blocks"]

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
            * self.work.sizes["attention_blocks"]
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
            pool, rows * generating_flops(work), rows * attention_flops(work)
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
        seconds = encode_flops(self.work) / (
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
        moved = decode_flops(self.work) / DECODE_FLOPS_PER_BYTE
        copies = 0.0 if cached else 2 * vae_bytes(self.work) / (efficiency_of(pool).host_gb_s * 1e9)
        return task_size * moved / (pool.hbm_tb_s * 1e12 * efficiency_of(pool).decode) + copies

    def score_seconds(self, pool: Pool, task_size: int) -> float:
        """Return the seconds of a task's GPU scorers."""
        measured = self._measured_seconds("score", pool)
        if measured is not None:
            return measured * task_size
        return (
            task_size
            * score_flops(self.work.rewards)
            / (pool.tflops * 1e12 * efficiency_of(pool).generate * efficiency_of(pool).score)
        )

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
        exchanged = exchange_seconds(work, pool, task_size, exchange, context)
        if measured is not None:
            return measured * task_size / context + exchanged
        forwards, attention = 1 + work.frozen_forwards, attention_flops(work)
        shares = [
            (mode, share) for mode, share in recompute.shares.items() if share and mode != OFFLOAD
        ]
        repeated = sum(share * repeated_flops(work, mode) for mode, share in shares)
        moved = sum(share * repeated_bytes(work, mode) for mode, share in shares)
        seconds = forwards * rows * self._compute_seconds(pool, forward_flops(work), attention)
        seconds += trained * self._compute_seconds(
            pool, backward_flops(work) + repeated, (2 + recompute.inputs) * attention
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

    def optimizer_seconds(self, pool: Pool, shards: int) -> float:
        """Return the seconds of an AdamW step, which moves 28 bytes per parameter: weights,
        gradients and moments."""
        return 28 * self.work.trained_parameters / shards / (pool.hbm_tb_s * 1e12) + 1e-3

    def judged_seconds(self) -> float:
        """Return the seconds in which all judges, one a node, score the samples of a step."""
        speeds = [
            math.ceil(pool.count / pool.per_node) / seconds
            for pool in self.hardware.pools
            if pool.judges and (seconds := judge_seconds(self.work, pool))
        ]
        return self.work.samples / sum(speeds) if speeds else 0.0

    def sharding_seconds(self, pools: list[Pool], shards: int) -> float:
        """Return the seconds of all communication in one micro-batch of sharded trainers.

        Weights are gathered in 16 bit for the forward, for the backward (which serves the repeated
        forward too), and for each forward of other weights. If all weights are trained, their
        gradients are scattered in fp32 as well.
        """
        scattered = self.gather_seconds(pools, shards, 4) if self.work.lora_rank is None else 0.0
        return (2 + self.work.frozen_forwards) * self.gather_seconds(pools, shards) + scattered

    def gather_seconds(self, pools: list[Pool], shards: int, width: int = 2) -> float:
        """Return the seconds of an all-gather of the whole model over `shards` ranks, in `width`
        bytes per parameter."""
        if shards == 1:
            return 0.0
        volume = width * self.work.sizes["parameters"] * (shards - 1) / shards
        latency = COLLECTIVE_SECONDS * self.work.sizes["attention_blocks"]
        return volume / ring_bandwidth(pools, shards) + latency
