"""Bytes on one GPU, by role, and on its host.

Weights, gradients and optimizer are exact. Activations follow the counts in the facts of the
model's family. A plan fills at most `USABLE` of the memory; the rest is for allocations that nobody
counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from digenrl.extensions.planner.counts import beside_bytes, forward_bytes, kept_bytes
from digenrl.extensions.planner.workload import Workload
from digenrl.recompute import ALL, INPUTS, MODES, OFFLOAD, Recompute

GIB = 2**30
USABLE = 0.9
"""Share of the memory of a GPU or host that a plan may fill (an assumption)."""
RESERVED = 1.5 * GIB
"""Bytes of CUDA context, communicators and workspaces (an assumption)."""
FRAGMENTATION = 1.05
"""Factor on all memory that is allocated anew per micro-batch (an assumption)."""
SCORER_PARAMETERS = {
    "pickscore": 990_000_000,
    "hpsv2": 990_000_000,
    "clip_score": 430_000_000,
    "aesthetic": 430_000_000,
    "clap": 153_000_000,
    "image_reward": 450_000_000,
    "hpsv3": 8_290_000_000 // 2,
    "edit_reward": 8_290_000_000 // 2,
    "video_align": 2_210_000_000 // 2,
}
"""Parameters of reward models that stay on the GPU in fp32: CLIP-H (twice), CLIP-L (twice), CLAP,
BLIP-L; half of them where they stay in 16 bit: Qwen-VL. Others run on the CPU or elsewhere."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, by purpose."""

    frozen: int = 0
    """Bytes of base weights that are not trained, in bf16 or quantized."""
    trained: int = 0
    """Bytes of trained weights in fp32."""
    gradients: int = 0
    optimizer: int = 0
    """Bytes of two moments in fp32 (AdamW)."""
    copies: int = 0
    """Bytes of the exponential average, of earlier weights that the algorithm compares with, and of
    the published adapter that lending keeps."""
    reference: int = 0
    """Bytes of the frozen fp32 copy that the KL divergence needs when all weights are trained."""
    rewards: int = 0
    """Bytes of the reward models on a rank that scores."""
    gathered: int = 0
    """Bytes of the full parameters of blocks in use (sharded trainers), or of a bf16 cast."""
    activations: int = 0
    workspace: int = 0
    """Bytes beyond the activations of training, and the reserve. Generation and evaluation need
    them for a forward without gradients, encoders in use and the VAE decode."""

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    @property
    def gib(self) -> float:
        return self.total / GIB


def saved_bytes(work: Workload, rows: int, recompute: Recompute, context: int = 1) -> int:
    """Return the bytes that autograd and checkpoints keep for `rows` forwards of one sample
    (samples x steps x passes).

    The bytes are those of each of `context` ranks that share the sample's tokens.
    """
    kept = {mode: share for mode, share in recompute.shares.items() if share and mode != OFFLOAD}
    return int(
        work.sizes["blocks"]
        * sum(share * kept_bytes(work, mode, rows, context) for mode, share in kept.items())
    )


def offloaded_bytes(work: Workload, rows: int, recompute: Recompute, context: int = 1) -> int:
    """Return the bytes of `rows` forwards that wait for the backward pass in pinned host memory; as
    `saved_bytes`."""
    return int(recompute.offload * work.sizes["blocks"] * kept_bytes(work, ALL, rows, context))


def moment_bytes(work: Workload, rows: int, recompute: Recompute, context: int = 1) -> int:
    """Return the bytes beside what the blocks keep at the peak of a forward and backward pass.

    At first these are bytes of the layers before and behind the blocks, of the loss and of
    gradients on their way. Later they are bytes of a block that is computed again. Counts exist for
    two cases: everything kept, and inputs alone. Other cases lie between them, in proportion. With
    off-loading, a block computes while the activations of the next block return from the host. The
    largest block's activations exceed the mean by at most as much as its parameters do. Ranks that
    share tokens hold the activations before the first block whole, and their gradient.
    """
    sizes, least = work.sizes, [ALL, *(mode for mode in MODES if recompute.shares[mode])][-1]
    whole, some, little = (kept_bytes(work, mode, rows, context) for mode in (ALL, least, INPUTS))
    beside, again = (beside_bytes(work, mode, rows, context) for mode in (ALL, INPUTS))
    beside += (again - beside) * (whole - some) / (whole - little)
    if recompute.offload:
        inside = sizes["parameters"] - sizes["outside_parameters"]
        largest = max(1 / sizes["attention_blocks"], sizes["largest_block_parameters"] / inside)
        beside = again + sizes["blocks"] * whole * largest
    return int(beside + (context > 1) * 2 * rows * work.block_bytes)


def buffer_bytes(work: Workload) -> int:
    """Return the bytes of the tables that the network stores beside its weights, in their dtype.
    Nobody shares them."""
    return (4 if work.lora_rank is None else 2) * work.sizes.get("buffers", 0)


def sampling_bytes(work: Workload) -> int:
    """Return the bytes of the constant adapter of `sampling.lora` in 16 bit. Every rank holds all
    of it: trainers may generate too."""
    return 2 * work.sampling_parameters


def text_encoder_bytes(work: Workload) -> int:
    """Return the bytes of text encoders in bf16; 0 where prompts are stored, because encoders have
    left memory."""
    return 0 if work.stored_prompts else 2 * work.sizes["encoders"]["parameters"]


def vae_bytes(work: Workload) -> int:
    """Return the bytes of the VAE in fp32."""
    return 4 * work.sizes["decode"]["parameters"]


def decode_bytes(work: Workload) -> int:
    """Return the bytes of the VAE's weights in fp32 and of a decode, as counted for the model.

    Small samples are decoded together, as many as have the pixels of one frame of 512 x 512
    (`decode_pixels` of digenrl.models.pipeline).
    """
    counts, pixels = work.sizes["decode"]["bytes"], work.height * work.width
    together = max(1, 512 * 512 // (pixels * work.frames))
    made = (
        counts["fixed"]
        + counts["pixel"] * pixels
        + work.frames * (counts["frame"] + counts["both"] * pixels)
    )
    return vae_bytes(work) + int(together * made)


def scorer_bytes(work: Workload, heldout: bool) -> int:
    """Return the bytes of the reward models on a rank that scores, including `heldout` ones on a
    rank that evaluates."""
    return sum(
        4 * SCORER_PARAMETERS.get(name, 0)
        for name in {*work.rewards, *(work.heldout if heldout else ())}
    )


def version_bytes(work: Workload) -> int:
    """Return the bytes of one version of the trained weights on its way, in the rollouts' dtype (16
    bit).

    Norms, which forwards read in fp32, are neglected.
    """
    return 2 * work.trained_parameters


def published_bytes(work: Workload, async_steps: int) -> int:
    """Return the bytes of published versions in trainer 0's host memory.

    The newest version serves ranks that join. With asynchrony the version before stays for a
    resumed run, and one more is made meanwhile.
    """
    return (1 + 2 * async_steps) * version_bytes(work)


def lent_copy_bytes(work: Workload, shards: int) -> int:
    """Return the bytes of a trainer's own part of the published weights. A trainer keeps that part
    between updates to lend with: an adapter's on the GPU, a whole model's in host memory."""
    return 4 * -(-work.trained_parameters // shards) * (work.updates > 1)


def stored_bytes(work: Workload, rows: int) -> int:
    """Return the bytes of the latents that a rollout keeps for `rows` samples. At most these are
    the latents before and after each trained step, and the stacked latents of the previous task,
    which is being scored."""
    latents = 1 + min(2 * work.trained_steps, work.steps) + 2 * work.trained_steps
    return rows * work.latent_elements * work.storage_bytes * latents


def generating_bytes(work: Workload, rows: int, encoders: bool) -> int:
    """Return the peak bytes of encoding, of a forward of `rows` samples without gradients, and of
    decoding.

    Args:
        encoders: whether text encoders stay on the GPU, where they are counted elsewhere.
    """
    made = max(forward_bytes(work, rows * work.passes // work.launches), decode_bytes(work))
    return int(
        FRAGMENTATION
        * max(made + stored_bytes(work, rows), 0 if encoders else text_encoder_bytes(work))
    )


def rollout_memory(work: Workload, task_size: int, encoders: bool) -> Memory:
    """Return the bytes of a rollout rank: unsharded 16-bit weights (`Adapter.only_generate`),
    forward, decode, rewards.

    Args:
        encoders: whether text encoders and VAE stay on the GPU (`model.offload_encoders=false`).
    """
    evaluated = work.evaluated if work.rollouts_evaluate else 0
    moment = generating_bytes(work, max(task_size, evaluated), encoders)
    return Memory(
        frozen=buffer_bytes(work)
        + sampling_bytes(work)
        + (int(work.base_bytes * work.sizes["parameters"]) if work.lora_rank else 0),
        trained=2 * work.trained_parameters,
        rewards=scorer_bytes(work, heldout=evaluated > 0),
        workspace=int(moment + RESERVED) + (text_encoder_bytes(work) + vae_bytes(work)) * encoders,
    )


class TrainerLoad(NamedTuple):
    """What a trainer rank holds and computes at once, as far as its memory depends on it."""

    shards: int
    """Ranks that share one copy of the weights; 1 = replicas."""
    task_size: int
    tsp_batch: int
    generates: bool
    """Whether the rank also generates (colocated, or lending), so that it needs room to encode and
    decode."""
    lends: bool
    """Whether the rank lends between updates, and so keeps the published adapter."""
    encoders: bool = False
    """Whether text encoders and VAE stay on the GPUs that generate."""
    context: int = 1
    """Ranks that share the tokens of a trained forward. Each generates and evaluates alone."""
    blocks: int = 1
    """Cell blocks of a micro-batch."""
    compresses: bool = False
    """Whether the rank sends the largest values of its gradient and keeps the others."""

    @property
    def cells(self) -> int:
        """Cells of a micro-batch."""
        return self.task_size * self.tsp_batch * self.blocks


def trainer_memory(work: Workload, load: TrainerLoad, recompute: Recompute) -> Memory:
    """Return the bytes of a trainer rank whose blocks keep `recompute` for the backward pass."""
    parameters, trained = work.sizes["parameters"], work.trained_parameters
    full, shards, context = work.lora_rank is None, load.shards, load.context
    share = -(-trained // shards)
    rows = load.cells * work.trained_passes
    kept = saved_bytes(work, rows, recompute, context)
    # Samples at once, without gradients.
    makes = max(load.task_size if load.generates else 0, work.evaluated)
    # No rank generates during a micro-batch, so generation may use the room of its activations.
    aside = generating_bytes(work, makes, load.encoders) - kept if makes else 0
    # Two blocks are gathered at a time (prefetch). The layers outside the blocks are gathered
    # through both passes, and when the second begins they also lie in the buffer in which they
    # arrive. Where all weights are trained, blocks are gathered in 16 bit. What is in use counts as
    # casts, beside the activations; beside it are the next block's weights, a block's gradients in
    # 16 bit, and in fp32 those of the block before, until they are scattered.
    block, outside = work.sizes["largest_block_parameters"], work.sizes["outside_parameters"]
    gathered = ((8 if full else 4) * block + (0 if full else 4) * outside) * (shards > 1)
    # When activations are gone, the layers outside scatter their gradients: they hold weights and
    # gradients in 16 bit, and in fp32 what is sent and received. Then the optimizer's step takes
    # another copy of the trained weights, as did the flat gradient of replicas before it
    # (tests/device/inside/test_parts.py). Trainers that exchange the largest values keep the rest,
    # and that of the update before. They compare the values beside them.
    update = (
        max(4 * share * (1 + load.compresses), outside * (8 + 4 / shards) * (full and shards > 1))
        - kept
        - gathered
    )
    return Memory(
        frozen=buffer_bytes(work)
        + sampling_bytes(work)
        + (0 if full else math.ceil(work.base_bytes * parameters / shards)),
        trained=4 * share,
        gradients=4 * (share if full else trained),
        optimizer=8 * share,
        copies=4 * share * (int(work.ema) + work.weight_copies)
        + lent_copy_bytes(work, shards) * (load.lends and not full)
        + 8 * share * load.compresses,
        reference=-(-4 * parameters // shards) if full and work.reference else 0,
        rewards=scorer_bytes(work, heldout=work.evaluated > 0) if makes else 0,
        gathered=gathered,
        activations=kept,
        workspace=int(
            max(0.05 * kept + moment_bytes(work, rows, recompute, context), aside, update)
            + RESERVED
        )
        + (text_encoder_bytes(work) + vae_bytes(work)) * (load.encoders and makes > 0),
    )
