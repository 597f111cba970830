"""Seconds of every kind of work on a pool: FLOPs over what the GPU reaches, bytes over what the links reach.

Communication that overlaps with computing costs nothing until it is longer (FSDP prefetches the next block's weights);
what is left of it is paid per micro-batch. Measured seconds of a profile replace computed ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from digenrl.recompute import Recompute
from digenrl.simulate.hardware import Efficiency, Hardware, Pool
from digenrl.simulate.memory import encoder_bytes
from digenrl.simulate.workload import Workload

SELECTION_SECONDS = 6e-3
"""Of selective checkpointing: about 300 operators of a block (forward and repetition) through Python at 20 us each."""


@dataclass(frozen=True)
class Costs:
    """The cost model of one workload on one hardware profile."""

    work: Workload
    hardware: Hardware

    @property
    def _factors(self) -> Efficiency:
        return self.hardware.efficiency

    def _measured(self, stage: str, pool: Pool) -> float | None:
        return self.hardware.seconds.get(stage, {}).get(pool.name)

    def _saturation(self, pool: Pool, tokens: float) -> float:
        return tokens / (tokens + self._factors.saturation_tokens * pool.tflops)

    def _compute(self, pool: Pool, flops: float, share: float, tokens: float) -> float:
        return flops / (pool.tflops * 1e12 * share * self._saturation(pool, tokens))

    def step_seconds(self, pool: Pool, task_size: int) -> float:
        """One denoising step of a task, weights on the GPU. Never less than reading them from memory once."""
        measured = self._measured("generate", pool)
        if measured is not None:
            return measured * task_size / self.work.steps
        rows = task_size * self.work.passes
        flops = rows * self.work.forward_flops()
        weights = 2 * self.work.sizes["parameters"] / (pool.hbm_tb_s * 1e12)
        launch = self._factors.launch_seconds * self.work.sizes["attention_blocks"]
        return max(self._compute(pool, flops, self._factors.generate, rows * self.work.tokens), weights) + launch

    def encode_seconds(self, pool: Pool, cached: bool = True) -> float:
        """Conditioning of one prompt; `cached=False` adds the copies of encoders that wait on the CPU."""
        measured = self._measured("encode", pool)
        if measured is not None:
            return measured
        seconds = self.work.encode_flops() / (pool.tflops * 1e12 * self._factors.encode)
        copies = encoder_bytes(self.work) / (self._factors.host_gb_s * 1e9)
        return seconds + (0.0 if cached else copies)

    def decode_seconds(self, pool: Pool, task_size: int) -> float:
        """VAE decode of a task (fp32)."""
        measured = self._measured("decode", pool)
        if measured is not None:
            return measured * task_size
        return task_size * self.work.decode_flops() / (pool.tflops * 1e12 * self._factors.decode)

    def score_seconds(self, pool: Pool, task_size: int) -> float:
        """GPU scorers of a task."""
        measured = self._measured("score", pool)
        if measured is not None:
            return measured * task_size
        return task_size * self.work.score_flops() / (pool.tflops * 1e12 * self._factors.score)

    def cell_flops(self) -> float:
        """One trained (sample, step) cell: forward, backward, reference forward."""
        forward = self.work.forward_flops()
        return self.work.passes * (forward * (1 + int(self.work.reference)) + self.work.backward_flops())

    def cell_seconds(self, pool: Pool, task_size: int, tsp_batch: int, recompute: Recompute) -> float:
        """One trained step of a task, inside a block of K = `tsp_batch` steps.

        What blocks throw away is computed again, and written and read once more. Choosing among operators takes the
        processor `SELECTION_SECONDS` per block and forward, which the GPU works beside.
        """
        measured = self._measured("train", pool)
        if measured is not None:
            return measured * task_size
        work, rows = self.work, task_size * self.work.passes
        repeated = sum(share * work.repeated_flops(mode) for mode, share in recompute.shares.items() if share)
        moved = sum(share * work.repeated_bytes(mode) for mode, share in recompute.shares.items() if share)
        flops = task_size * self.cell_flops() + rows * repeated
        launch = 4 * self._factors.launch_seconds * work.sizes["attention_blocks"] / tsp_batch
        seconds = self._compute(pool, flops, self._factors.train, rows * tsp_batch * work.tokens)
        seconds += rows * moved / (pool.hbm_tb_s * 1e12) + launch
        selected = recompute.products + recompute.attention
        return max(seconds, selected * SELECTION_SECONDS * work.sizes["attention_blocks"] / tsp_batch)

    # ---- links

    def bandwidth(self, pools: list[Pool], ranks: int) -> float:
        """Bytes per second of a ring over `ranks` GPUs: the node's links inside one, the slowest network link else."""
        inside = len({pool.name for pool in pools}) == 1 and ranks <= min(pool.per_node for pool in pools)
        nominal = min(pool.intra_gb_s if inside else min(pool.intra_gb_s, pool.inter_gb_s) for pool in pools)
        return nominal * 1e9 * self._factors.network

    @property
    def _weight_bytes(self) -> int:
        """Of a gathered parameter: the frozen base is held in bf16, trained weights in fp32."""
        return 4 if self.work.lora_rank is None else 2

    def sharding_seconds(self, pools: list[Pool], shards: int) -> float:
        """Communication of one micro-batch of sharded trainers, all of it: a gather for the forward, one for the
        backward (which serves the repeated forward too), one for the reference; all weights: the gradients scattered.
        """
        gathers = 2 + int(self.work.reference)
        scattered = int(self.work.lora_rank is None)
        return (gathers + scattered) * self.gather_seconds(pools, shards)

    def gather_seconds(self, pools: list[Pool], shards: int) -> float:
        """All-gather of the whole model over `shards` ranks."""
        if shards == 1:
            return 0.0
        volume = self._weight_bytes * self.work.sizes["parameters"] * (shards - 1) / shards
        latency = self._factors.launch_seconds * self.work.sizes["attention_blocks"] * 2
        return volume / self.bandwidth(pools, shards) + latency

    def reduce_seconds(self, pools: list[Pool], ranks: int, shards: int = 1) -> float:
        """All-reduce of the gradients in fp32 over `ranks` at the end of an update. With sharded trainers a rank holds
        1/`shards` of them, and `ranks` counts the copies."""
        if ranks == 1:
            return 0.0
        volume = 2 * 4 * self.work.trained_parameters / shards * (ranks - 1) / ranks
        return volume / self.bandwidth(pools, ranks * shards) + 1e-3

    def optimizer_seconds(self, pool: Pool, shards: int) -> float:
        """AdamW reads and writes weights, gradients and moments: 28 bytes per parameter."""
        return 28 * self.work.trained_parameters / shards / (pool.hbm_tb_s * 1e12) + 1e-3

    def publish_seconds(self, pools: list[Pool], rollouts: int) -> float:
        """Trained weights in fp32 to every rollout rank: once over each node's network link, relayed inside."""
        if rollouts == 0:
            return 0.0
        volume = 4 * self.work.trained_parameters
        slowest = min(pool.inter_gb_s for pool in pools) * 1e9 * self._factors.network
        return volume / slowest + 5e-3

    def task_bytes(self, task_size: int) -> float:
        """A finished task: S+1 latents, of which neighbours are shared, in storage dtype."""
        return task_size * (self.work.trained_steps + 1) * self.work.latent_elements * self.work.storage_bytes

    def deliver_seconds(self, pools: list[Pool], task_size: int) -> float:
        """A finished task through pinned memory and the network, and its CPU scorers."""
        slowest = min(pool.inter_gb_s for pool in pools) * 1e9 * self._factors.network
        return self.task_bytes(task_size) / slowest + 3e-3 + task_size * self.work.score_cpu_seconds()

    def move_seconds(self, pools: list[Pool], task_size: int) -> float:
        """A suspended task: what it has kept so far, and its present latent."""
        return self.deliver_seconds(pools, task_size) - task_size * self.work.score_cpu_seconds()

    def switch_seconds(self) -> float:
        """Between training and generation: caches are freed, adapters stay; a small constant (an assumption)."""
        return 0.02
