"""Bytes on one GPU, by role, and on its host. Weights, gradients and optimizer are exact; activations follow counts of
the facts of the family.

What is to fit takes at most `USABLE` of the memory there is: the rest is for what nobody counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from digenrl.extensions.planner.workload import Workload
from digenrl.recompute import ALL, MODES, OFFLOAD, Recompute

GIB = 2**30
USABLE = 0.9
"""Share of the memory of a GPU, or of a host, that a plan may fill; an assumption."""
RESERVED = 1.5 * GIB
"""CUDA context, communicators and workspaces; an assumption."""
FRAGMENTATION = 1.05
"""On everything that is allocated anew per micro-batch; an assumption."""
SCORER_PARAMETERS = {
    "pickscore": 990_000_000,
    "hpsv2": 990_000_000,
    "clip_score": 430_000_000,
    "aesthetic": 430_000_000,
    "image_reward": 450_000_000,
}
"""Of reward models that stand on the GPU in fp32: CLIP-H (twice), CLIP-L (twice), BLIP-L. Others run elsewhere."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, by what holds them."""

    frozen: int = 0
    """Base weights that are not trained, in bf16."""
    trained: int = 0
    """Trained weights in fp32."""
    gradients: int = 0
    optimizer: int = 0
    """Two moments in fp32 (AdamW)."""
    copies: int = 0
    """Exponential average, and the published weights that lending keeps."""
    reference: int = 0
    """The frozen copy that the KL divergence of all-weights training needs, in fp32."""
    rewards: int = 0
    """Reward models of a rank that scores."""
    gathered: int = 0
    """Full parameters of the blocks in use (sharded trainers), or a bf16 cast."""
    activations: int = 0
    workspace: int = 0
    """What generating or evaluating needs beyond the activations of training (a forward without gradients, encoders in
    use, VAE decode), and the reserve."""

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    @property
    def gib(self) -> float:
        return self.total / GIB


def saved_bytes(work: Workload, rows: int, recompute: Recompute, context: int = 1) -> int:
    """Bytes that autograd and checkpoints keep for `rows` forwards of one sample (samples x steps x passes), on each of
    `context` ranks that share its tokens."""
    kept = {mode: share for mode, share in recompute.shares.items() if share and mode != OFFLOAD}
    return int(work.sizes["blocks"] * sum(share * work.kept_bytes(mode, rows, context) for mode, share in kept.items()))


def offloaded_bytes(work: Workload, rows: int, recompute: Recompute, context: int = 1) -> int:
    """Bytes of `rows` forwards that wait for the backward pass in pinned memory of the host; as `saved_bytes`."""
    return int(recompute.offload * work.sizes["blocks"] * work.kept_bytes(ALL, rows, context))


def repeated_bytes(work: Workload, rows: int, recompute: Recompute, context: int = 1) -> int:
    """Bytes that one block keeps for a moment, while what it threw away is computed again; or two, while one computes
    and the next comes back from the host."""
    blocks_per_unit = work.sizes["attention_blocks"] / work.sizes["blocks"]
    whole = work.kept_bytes(ALL, rows, context)
    if recompute.offload:
        return int(2 * whole / blocks_per_unit)
    least = max((mode for mode, share in recompute.shares.items() if share), key=MODES.index)
    return int((whole - work.kept_bytes(least, rows, context)) / blocks_per_unit)


def whole_bytes(work: Workload, rows: int, context: int) -> int:
    """Bytes of the tokens before the first block, which every rank makes whole, and of their gradient."""
    return int(2 * rows * work.block_bytes) if context > 1 else 0


def text_encoder_bytes(work: Workload) -> int:
    """Text encoders in bf16; none where prompts are stored, for they have left memory."""
    return 0 if work.stored_prompts else 2 * int(work.sizes["encoders"]["parameters"])


def vae_bytes(work: Workload) -> int:
    """The VAE in fp32."""
    return 4 * int(work.sizes["decode"]["parameters"])


def encoder_bytes(work: Workload) -> int:
    """What `model.offload_encoders=false` leaves on the GPU."""
    return text_encoder_bytes(work) + vae_bytes(work)


def decode_bytes(work: Workload) -> int:
    """VAE weights in fp32 and a tiled decode: three buffers of 256 channels x 512 x 512 x 4 frames, of one sample or of
    as many small ones as have the pixels of one such frame (`decode_pixels` of digenrl.models.pipeline)."""
    together = max(1, 512 * 512 // (work.height * work.width * work.frames))
    tile = min(512, work.height) * min(512, work.width) * min(4, work.frames)
    return vae_bytes(work) + 3 * 256 * 4 * together * tile


def scorer_bytes(work: Workload, heldout: bool) -> int:
    """Reward models of a rank that scores; with the held-out ones where it evaluates."""
    names = {*work.rewards, *(work.heldout if heldout else ())}
    return sum(4 * SCORER_PARAMETERS.get(name, 0) for name in names)


def version_bytes(work: Workload) -> int:
    """One version of the trained weights as it travels: in the dtype that rollouts hold, 16 bit. (Norms, which forwards
    read in fp32, are neglected.)"""
    return 2 * work.trained_parameters


def published_bytes(work: Workload, async_steps: int, told: bool = False) -> int:
    """Bytes of published versions in trainer 0's host memory: the newest, for who joins. With asynchrony also the one
    before, for who resumes, and one more while the next is made; so where changes are `told`."""
    return (1 + max(2 * async_steps, told)) * version_bytes(work)


def sent_bytes(work: Workload, other_nodes: int) -> int:
    """Bytes of a version over the network link of trainer 0's node: a copy for each other node with rollouts, which
    passes it on inside."""
    return other_nodes * version_bytes(work)


def generating_bytes(work: Workload, rows: int, encoders: bool) -> int:
    """The most that encoding, a forward of `rows` samples without gradients, or decoding takes for a moment.

    Args:
        encoders: text encoders stay on the GPU, and are counted elsewhere.
    """
    encoding = 0 if encoders else text_encoder_bytes(work)
    return int(FRAGMENTATION * max(int(work.forward_bytes(rows * work.passes)), decode_bytes(work), encoding))


def rollout_memory(work: Workload, task_size: int, encoders: bool = False) -> Memory:
    """A rollout rank: unsharded weights in 16 bit (`Policy.only_generate`), forward, decode, reward models.

    Args:
        encoders: text encoders and VAE stay on the GPU (`model.offload_encoders=false`).
    """
    parameters = int(work.sizes["parameters"])
    full = work.lora_rank is None
    evaluated = work.evaluated if work.rollouts_evaluate else 0
    moment = generating_bytes(work, max(task_size, evaluated), encoders)
    return Memory(
        frozen=0 if full else 2 * parameters,
        trained=2 * work.trained_parameters,
        rewards=scorer_bytes(work, heldout=evaluated > 0),
        workspace=int(moment + RESERVED) + encoder_bytes(work) * encoders,
    )


def trainer_memory(
    work: Workload,
    shards: int,
    task_size: int,
    tsp_batch: int,
    recompute: Recompute,
    generates: bool,
    keeps_copy: bool,
    encoders: bool = False,
    context: int = 1,
) -> Memory:
    """A trainer rank that shares its weights with `shards` - 1 others (1 = replicated).

    Args:
        recompute: what the blocks keep for the backward pass.
        generates: it also generates (colocated, or lending), so it needs room to encode and decode.
        keeps_copy: it keeps the published trained weights between updates, for lending.
        encoders: text encoders and VAE stay on the GPU of whoever generates.
        context: ranks that share the tokens of a trained forward. Each generates and evaluates alone.
    """
    parameters, trained = int(work.sizes["parameters"]), work.trained_parameters
    full = work.lora_rank is None
    share = -(-trained // shards)
    block = int(work.sizes["largest_block_parameters"])
    rows = task_size * tsp_batch * work.passes
    kept = saved_bytes(work, rows, recompute, context)
    moment = repeated_bytes(work, rows, recompute, context) + whole_bytes(work, rows, context)
    makes = max(task_size if generates else 0, work.evaluated)  # samples at once, without gradients
    stays = encoders and makes > 0
    # Nobody generates during a micro-batch: its activations have made room by then.
    aside = generating_bytes(work, makes, encoders) - kept if makes else 0
    # Two blocks are gathered at a time (prefetch): weights, and their gradients before they are scattered.
    gathered = 2 * (4 + 4 if full else 2) * block if shards > 1 else 0
    return Memory(
        frozen=0 if full else -(-2 * parameters // shards),
        trained=4 * share,
        gradients=4 * (share if full else trained),
        optimizer=8 * share,
        copies=4 * share * (int(work.ema) + int(keeps_copy)),
        reference=-(-4 * parameters // shards) if full and work.reference else 0,
        rewards=scorer_bytes(work, heldout=work.evaluated > 0) if makes else 0,
        gathered=gathered,
        activations=kept,
        workspace=int(max(0.05 * kept + moment, aside) + RESERVED) + encoder_bytes(work) * stays,
    )
