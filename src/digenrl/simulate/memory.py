"""Bytes on one GPU, by role. Weights, gradients and optimizer are exact; activations follow counts of facts.json."""

from __future__ import annotations

from dataclasses import dataclass

from digenrl.simulate.workload import ENCODERS, Workload, facts

GIB = 2**30
RESERVED = 1.5 * GIB
"""CUDA context, communicators and workspaces; an assumption."""
FRAGMENTATION = 1.05
"""On everything that is allocated anew per micro-batch; an assumption."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, by what holds them."""

    frozen: int
    """Base weights that are not trained, in bf16."""
    trained: int
    """Trained weights in fp32."""
    gradients: int
    optimizer: int
    """Two moments in fp32 (AdamW)."""
    copies: int
    """Exponential average, and the published weights that lending keeps."""
    gathered: int
    """Full parameters of the blocks in use (sharded trainers), or a bf16 cast."""
    activations: int
    workspace: int
    """Forward without gradients, VAE decode, reserve."""

    @property
    def total(self) -> int:
        return (
            self.frozen
            + self.trained
            + self.gradients
            + self.optimizer
            + self.copies
            + self.gathered
            + self.activations
            + self.workspace
        )

    @property
    def gib(self) -> float:
        return self.total / GIB


def saved_bytes(work: Workload, rows: int, checkpointing: bool) -> int:
    """Bytes that autograd keeps for `rows` forwards of one sample (samples x steps x passes).

    With checkpointing: the input of every block, and one block's own while it is recomputed.
    """
    sizes = work.sizes
    kept = sizes["saved_bytes_per_block"]["full" if work.lora_rank is None else "lora"]
    text = sizes["text_tokens"]
    block = kept["token"] * work.tokens + kept["text"] * text + kept["fixed"]
    if not checkpointing:
        return int(rows * sizes["blocks"] * block)
    joint = text if sizes["joint_attention"] else 0
    inputs = 2 * sizes["hidden"] * (work.tokens + joint) * sizes["attention_blocks"]
    return int(rows * (inputs + block))


def forward_bytes(work: Workload, rows: int) -> int:
    """Peak of a forward without gradients: about one block's live tensors, a third of what autograd would keep."""
    kept = work.sizes["saved_bytes_per_block"]["lora"]
    return int(rows * (kept["token"] * work.tokens + kept["text"] * work.sizes["text_tokens"]) / 3)


def decode_bytes(work: Workload) -> int:
    """VAE weights in fp32 and a tiled decode of one sample: three buffers of 256 channels x 512 x 512 x 4 frames."""
    tile = min(512, work.height) * min(512, work.width) * min(4, work.frames)
    return int(facts()["vae"][ENCODERS[work.model][2]]["parameters"]) * 4 + 3 * 256 * 4 * tile


def rollout_memory(work: Workload, task_size: int) -> Memory:
    """A rollout rank: unsharded weights (fp32 when all are trained, computing under autocast), forward, decode."""
    parameters = int(work.sizes["parameters"])
    full = work.lora_rank is None
    trained = 4 * work.trained_parameters
    peak = max(forward_bytes(work, task_size * work.passes), decode_bytes(work))
    return Memory(
        frozen=0 if full else 2 * parameters,
        trained=trained,
        gradients=0,
        optimizer=0,
        copies=0,
        gathered=2 * int(work.sizes["largest_block_parameters"]) if full else 0,
        activations=0,
        workspace=int(peak * FRAGMENTATION + RESERVED),
    )


def trainer_memory(
    work: Workload, shards: int, task_size: int, tsp_batch: int, checkpointing: bool, generates: bool, keeps_copy: bool
) -> Memory:
    """A trainer rank that shares its weights with `shards` - 1 others (1 = replicated).

    Args:
        generates: it also generates (colocated, or lending), so it needs room to decode.
        keeps_copy: it keeps the published trained weights between updates, for lending.
    """
    parameters, trained = int(work.sizes["parameters"]), work.trained_parameters
    full = work.lora_rank is None
    share = -(-trained // shards)
    block = int(work.sizes["largest_block_parameters"])
    rows = task_size * tsp_batch * work.passes
    kept = saved_bytes(work, rows, checkpointing)
    side = max(forward_bytes(work, task_size * work.passes), decode_bytes(work)) if generates else 0
    return Memory(
        frozen=0 if full else -(-2 * parameters // shards),
        trained=4 * share,
        gradients=4 * (trained if full and shards == 1 else share),
        optimizer=8 * share,
        copies=4 * share * (int(work.ema) + int(keeps_copy)),
        gathered=2 * 2 * block if shards > 1 or full else 0,
        activations=kept,
        workspace=int(max(0.05 * kept, side * FRAGMENTATION) + RESERVED),
    )
