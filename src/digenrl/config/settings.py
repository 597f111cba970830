"""Every key of a configuration: its type, its range and its docstring, which `--help` and
docs/configuration.md print. To add a key, add a field.

A node with `_target_` (model, algorithm, reward, ...) is open: its constructor defines the other
keys (`targets`). Defaults are in configs/*.yaml and nowhere else. A field without a default must be
in every configuration.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field

from digenrl.config.checked_tree import Closed, Open, Whole
from digenrl.config.relations.view import most_rollouts
from digenrl.config.value_types import (
    ABSENT,
    Amount,
    AtLeast0,
    AtLeast1,
    Auto,
    ByTrainer,
    Component,
    Directory,
    GpuName,
    Name,
    Package,
    Part,
    PoolPair,
    Ports,
    Positive,
    PromptFile,
    PromptFiles,
    Recomputation,
    Seconds,
    Share,
    Span,
    Steps,
    Text,
    Urls,
)


class AllocationSettings(Closed):
    """allocation.*"""

    trainers: AtLeast1 | Auto
    """Number of ranks that train. auto: taken from the pools of the hardware profile."""
    rollouts: AtLeast0 | Auto | Span
    """Number of ranks that only generate. 0: every rank both generates and trains. {min, max}: an
    elastic run. The local launcher starts max ranks. Ray starts min and adds more as places become
    free. A run with fewer than min waits for patience_s."""
    evaluation: Literal["auto", "trainers", "rollouts"]
    """Ranks that draw and score the evaluation samples. The samples are the same either way.
    rollouts: trainers go on meanwhile. auto: rollouts if they have the memory, otherwise
    trainers."""
    max_lost_rollouts: AtLeast0 | Auto
    """Number of rollout ranks that may die or leave while the run goes on. auto: all. 0: none."""
    patience_s: Amount
    """Seconds to wait for new rollouts when fewer than rollouts.min remain (1 if rollouts is a
    number). The remaining ranks generate meanwhile. After that the run is saved and ends."""
    stop_grace_s: Amount | Auto
    """Seconds that the current step gets after a stop signal. auto: 3 x the longest recent step, at
    least 5, and at most half of the time that SLURM or torchrun allows."""
    stop_save_s: Positive
    """Seconds for saving when the current step is given up. Ranks that have not finished by then
    are killed."""
    max_restarts: AtLeast0
    """Number of times that a run whose ranks died restarts from its newest checkpoint. A run does
    not restart after a stop, before its first step, or after dying twice at the same step. 0: the
    run ends."""
    restart_pause_s: Amount
    """Seconds before the first restart. The pause doubles before each further restart."""

    @property
    def split(self) -> tuple[int, int]:
        """(trainers, most rollouts) of a settled run.

        Raises:
            ValueError: a number is still `auto`.
        """
        rollouts = most_rollouts(self.rollouts)
        if isinstance(self.trainers, str) or isinstance(rollouts, str):
            raise ValueError("allocation: is not settled yet; call `digenrl.settle.settle` first.")
        return self.trainers, int(rollouts)


class RaySettings(Closed):
    """ray.*"""

    address: Text | None
    """HOST:PORT of the cluster's head, or auto. null: the value of RAY_ADDRESS, otherwise a cluster
    on this machine."""
    resources: dict[str, dict[str, Positive]]
    """Pool name -> resources of one rank (CPU, GPU, accelerator_type:H20: 0.001, or a custom name).
    A pool without an entry asks for 1 GPU, or for 1 CPU if the pool has no GPUs."""
    wait_s: Positive
    """Seconds until every rank must have a place. The time that new nodes need to start counts."""
    respawn_s: Amount
    """Seconds before a dead rollout is replaced. The pause doubles before each further
    replacement."""


class NetworkSettings(Closed):
    """network.*"""

    interface: Text | None
    """Network interface whose address all ranks listen on, gloo and NCCL included (eth0, ib0).
    null: loopback on one machine, otherwise the interface of the route to MASTER_ADDR."""
    ports: Ports | None
    """Ports of the control store and of every rank's link on each machine. The range must hold
    ranks + 1 ports. null: any free ports."""
    publication: Literal["auto", "stream", "broadcast"]
    """How weights travel to rollouts. stream: over sockets. broadcast: by torch.distributed (NCCL,
    or gloo on CPUs) to the rollouts that started with the run. Rollouts that join later get
    streams, and so does every rollout once a member of the broadcast is lost. auto: broadcast if
    every rank has a GPU and their number is fixed."""
    compress: Literal["auto", "off"]
    """Lossless compression on slow connections between ranks. auto: compress where the measured
    speed of a connection says that it saves time. Weights then travel as the difference to the
    version before, trajectories without parts that the receiver has. off: send everything
    uncompressed."""


class ParallelSettings(Closed):
    """parallel.*"""

    sharding: Literal["ddp", "hsdp", "fsdp", "auto"]
    """How trainers hold the weights. ddp: a replica on each. hsdp: sharded inside a node. fsdp:
    sharded over all trainers. auto: the first of these that fits into memory."""
    shard_group: AtLeast1 | Auto
    """Number of trainers that together hold one copy of the weights under hsdp. auto: the trainers
    of a node."""
    context: AtLeast1
    """Number of neighbouring trainers that share the tokens of each trained forward (Ulysses), for
    samples that are too long for one GPU. Must divide the trainers of a node and the attention
    heads. Wan and HunyuanVideo (also 1.5) support it. 1: no sharing."""
    compress: Literal["off", "auto"] | Part
    """Share of the gradient's values that trainers (ddp) exchange in an update, the largest ones.
    The others are added to the next gradient. Every update is approximate. auto: by the slowest
    line between trainers (hardware.links), off without a line. off: every value."""


class LimitsSettings(Closed):
    """limits.*: how long ranks are waited for, in seconds unless said otherwise."""

    # Below 1, a rank would count as hanging in a pause as long as one before.
    stage_factor: Annotated[float, Field(ge=1)] | None
    """A rank counts as hanging after this many times the longest earlier pause in the same stage.
    null: never."""
    stage_floor_s: Positive
    """Least seconds without progress before a rank counts as hanging. Also applies when all ranks
    wait."""
    start_s: Positive
    """Seconds that replace stage_factor and stage_floor_s while a rank starts and in its first pass
    through each stage. Also for a first report of every process."""
    collective_s: Positive
    """Seconds that one collective of the trainers may take. The wait for the slowest trainer
    counts."""
    join_s: Positive
    """Seconds in which ranks must form the group of their broadcasts. Then weights travel as
    streams."""
    silent_s: Positive
    """Seconds without heartbeat and CPU time after which a rank counts as dead."""
    absent_s: Positive
    """Seconds without a report from the process that watches a joined rollout, after which its
    machine counts as gone."""
    suspended_s: Positive
    """Seconds after which a suspended rank (SIGSTOP) or a suspended launcher counts as gone."""
    leave_s: Positive
    """Seconds that ranks wait at the end of a run for messages that are still being sent."""
    verdict_s: Positive
    """Seconds in which the launcher must decide whether the run goes on without a lost rank."""
    abort_s: Positive
    """Seconds that ranks have to exit by themselves after a failure. After that they are killed."""


class RecordSettings(Closed):
    """record.*"""

    keep_mib: Positive
    """MiB that the spans of all ranks may take, and again for their decisions. Events get a quarter
    of it. Beyond the limit, steps are left out."""


class DataSettings(Closed):
    """data.*"""

    prompts: PromptFile | PromptFiles
    """Training prompts: a path, or the name of a file in digenrl/prompts. With several files, each
    batch takes its share of every file by weight."""
    heldout: PromptFile | None
    """Prompts of the evaluation. null: the training prompts."""
    # Far above any use, so that a slip of a few zeros is an error and no full memory.
    prompts_per_batch: int = Field(ge=1, le=65536)
    """Number of groups in an RL step. Each group has one prompt."""
    # Advantages compare samples, so a group has at least two.
    group_size: int = Field(ge=2, le=4096)
    """Number of samples in a group."""
    samples: Literal["generated", "files"]
    """Source of the samples of a group. generated: the model. files: the media files that the
    prompt's line names."""
    # No share of the batch, because each update takes a whole number of spare groups.
    oversample: AtLeast0
    """Number of groups generated beyond prompts_per_batch. The first groups whose rewards differ
    are trained."""
    zero_variance_groups: Literal["keep", "drop"]
    """What happens to groups whose samples all have the same reward. keep: they count in the
    denominator of the loss. drop: they leave the denominator and the KL."""
    updates_split: Literal["groups", "samples"]
    """How several updates share a batch. groups: each update trains some of the groups. samples:
    each update trains some samples of every group, chosen by their numbers. Advantages always use
    the whole group."""
    prompt_store: Auto | Directory | None
    """Directory in which encoded prompts are kept for all ranks and later runs. auto: the user's
    cache. null: prompts are not kept."""
    image_max_mib: Positive
    """Largest size in MiB of an image that a prompt names. A larger file is refused."""
    image_max_pixels: AtLeast1
    """Largest width x height of an image that a prompt names, read from the file's header. A larger
    image is refused before it is decoded."""

    @property
    def groups_per_step(self) -> int:
        """Groups that an RL step generates, spare ones included."""
        return self.prompts_per_batch + self.oversample


class TspSettings(Closed):
    """schedule.tsp.*"""

    batch: AtLeast1 | Literal["auto", "all"]
    """Number of trained steps of a sample in one forward. auto: as many as the memory allows."""
    shard: bool
    """Distribute the trained steps of a sample over the trainers."""


class ScheduleSettings(Closed):
    """schedule.*"""

    auto: bool
    """Let the planner choose the keys of the schedule, the allocation, the sharding and the task
    size that you do not give. It takes the fastest on-policy plan when the run starts, and
    config.yaml shows the choice."""
    gap: AtLeast0
    """Number of groups in a fragment. Training of a fragment starts as soon as it is complete. 0:
    the whole batch is one fragment."""
    claims: Literal["shared", "split"]
    """How tasks are distributed. shared: faster ranks take more tasks. split: every rank gets an
    equal part in advance."""
    tsp: TspSettings
    tag: bool
    """Let waiting trainers generate when this is predicted to shorten the step."""
    # A single share may be 0: that trainer only lends itself. `ranks` refuses all of them.
    shares: Literal["equal", "measured"] | Annotated[list[Amount], Field(min_length=1)]
    """Part of the training that each trainer takes. measured: in proportion to its measured speed.
    A list: relative speeds."""
    skip_zero: bool
    """Do not train cells whose gradient is known to be zero (advantage 0 and no KL)."""
    # Staleness is bounded by one version (I3), so there is no 2.
    async_steps: int = Field(ge=0, le=1)
    """1: some groups of a batch are generated with weights that are one version old. 0: none."""
    stale_fraction: Share
    """Share of a batch's groups that use older weights. Only read with async_steps=1."""


class EvaluatedSettings(Closed):
    """sampling.eval.*"""

    steps: Steps | None = ABSENT
    """Denoising steps of an evaluation. null: sampling.steps."""
    guidance_scale: Annotated[float, Field(ge=0, le=100)] | None
    """Guidance scale of an evaluation. null: sampling.guidance_scale."""
    solver: Literal["euler", "dpm2"]
    """ODE solver of an evaluation. dpm2: DPM-Solver++ of second order."""
    batch: AtLeast1 | None
    """Number of evaluation samples generated at once, of one or more prompts. null: all samples of
    a prompt."""


class ScoutsSettings(Closed):
    """sampling.scouts.*"""

    candidates: AtLeast1
    """Number of initial noises tried for each sample. Of all its tries a task keeps the best and
    the worst, half each. 1: no scouts."""
    steps: Steps
    """ODE steps of each try. The chosen noises are then sampled with sampling.steps."""


class SamplingSettings(Closed):
    """sampling.*"""

    steps: Steps
    """Denoising steps of a sample."""
    guidance_scale: Annotated[float, Field(ge=0, le=100)] | None
    """Scale of classifier-free or embedded guidance. null: no guidance."""
    # What strides a family needs is checked by its codec, which is not imported here.
    height: int = Field(ge=1, le=8192)
    """Height of a sample in pixels."""
    width: int = Field(ge=1, le=8192)
    """Width of a sample in pixels."""
    frames: int = Field(ge=1, le=1024)
    """Number of frames of a video. 1: images."""
    storage_dtype: Literal["float32", "bfloat16", "float16", "float64"]
    """Dtype of the latents that are sent to the trainers."""
    task_size: Annotated[int, Field(ge=1, le=4096)] | Auto
    """Number of samples that a rank generates at once. Must divide data.group_size. auto: the
    smallest that keeps every GPU of the profile busy under any schedule."""
    same_noise: bool
    """Give all samples of a group the same initial noise."""
    lora: Text | None
    """Adapter that only rollouts and evaluations sample with, such as a published few-step adapter.
    Training leaves it out. A file or directory, as in model.lora.path. null: none."""
    scouts: ScoutsSettings
    eval: EvaluatedSettings


class OptimizerSettings(Open):
    """algorithm.optimizer.*"""

    lr: Positive = ABSENT
    """Learning rate."""
    weight_decay: Amount = ABSENT
    """Weight decay."""


class SdeSettings(Open):
    """algorithm.sde.*"""

    noise_level: Amount = ABSENT
    """Noise strength of Flow-SDE and CPS."""
    eta: Amount = ABSENT
    """Noise strength of DanceGRPO's SDE."""


class AdvantageSettings(Open):
    """algorithm.advantage.*"""

    std: Literal["group", "batch", "none", "max_group"] = ABSENT
    """Standard deviation by which advantages are divided."""


class AlgorithmSettings(Open):
    """algorithm.*"""

    clip_range: (
        # Ratios are above 0, so a distance of 1 would not clip from below.
        Annotated[float, Field(gt=0, lt=1)] | Annotated[list[Amount], Field(min_length=2)]
    ) = ABSENT
    """Distance from 1 at which ratios are clipped. A list gives the distances below and above 1."""
    kl_weight: Amount = ABSENT
    """Weight of the KL divergence from the reference model. 0: no KL."""
    reference: Literal["base", "start"] = ABSENT
    """What KL is against: the base model alone, or with the adapter of model.lora.path."""
    step_weight: Literal["none", "std", "longcat", "rectified"] = ABSENT
    """Weight of each denoising step in the policy loss. std: the step's std/sqrt(h). longcat:
    LongCat's weights, for the KL as well. rectified: Flash-GRPO's weights, which equalise the
    gradients of all steps."""
    detach_uncond: bool = ABSENT
    """Let gradients of guided forwards pass only through the conditional branch."""
    updates_per_batch: AtLeast1 = ABSENT
    """Number of optimizer updates in an RL step."""
    max_grad_norm: Positive | None = ABSENT
    """Norm to which gradients are clipped. null: no clipping."""
    optimizer: OptimizerSettings = Field(ABSENT)
    sde: SdeSettings
    advantage: AdvantageSettings
    # Open: each class has arguments of its own, which `arguments` reads from its source.
    train_steps: dict[str, Any]
    """Class that chooses the denoising steps to train."""


class RewardSettings(Open):
    """reward.*"""

    placement: Literal["inline", "thread", "process", "managed", "http"] = ABSENT
    """Place where scorers run. managed: in one process for all ranks of a machine, on GPUs that no
    rank has (hardware.pools.NAME.judges)."""
    urls: Urls = ABSENT
    """URLs of the reward services of scorers with placement http."""
    max_missing_share: Share = ABSENT
    """Largest share of missing scores of a reward. Beyond it the run is saved and stops."""
    min_missing_samples: AtLeast1 = ABSENT
    """Number of samples of a rank from which max_missing_share applies."""
    pending: AtLeast1 = ABSENT
    """Number of tasks that may wait for scores before generation waits as well."""
    start_s: Positive = ABSENT
    """Seconds in which a scorer with placement process or managed must be built."""
    rewards: dict[str, dict[str, Any]] = ABSENT
    """Rewards by name."""
    call_s: Positive = ABSENT
    """Seconds that scoring a batch may take with placement process, managed or http."""


class LoraSettings(Open):
    """model.lora.*"""

    rank: int = Field(ABSENT, ge=1, le=4096)
    """Rank of the adapters."""
    alpha: Positive = ABSENT
    """Scale of the adapters: outputs are multiplied by alpha / rank."""
    path: Text | None = ABSENT
    """Adapter to go on from: a .safetensors file of diffusers, PEFT, kohya's tools or ComfyUI, or a
    directory with one, or of a run. null: a new adapter."""
    targets: Text | list[Text] = ABSENT
    """Layers with an adapter: the ends of their names, as regular expressions, or a preset."""


class ModelSettings(Open):
    """model.*"""

    path: Text | None = ABSENT
    """Base model: a directory, a file or a hub id."""
    gradient_checkpointing: Recomputation | ByTrainer = ABSENT
    """Blocks that are recomputed in the backward pass, or whose activations wait on the host. auto:
    as little as the GPU's memory requires, without the host."""
    quantize: Literal["nf4", "int8"] | None = ABSENT
    """Format of the frozen weights of the blocks, with an adapter on them. nf4 needs bitsandbytes.
    null: 16 bits."""
    compile: bool = ABSENT
    """Compile the repeated blocks with torch.compile."""
    lora: LoraSettings | None = Field(ABSENT)


class EfficiencySettings(Closed):
    """hardware.efficiency.* for all pools, hardware.pools.NAME.efficiency.* for one; the defaults
    are those of the kind of GPU (digenrl.extensions.planner.gpus)."""

    generate: Positive = ABSENT
    """Share of the peak that matrix products reach in a forward."""
    attention: Positive = ABSENT
    """Share of the peak that PyTorch's attention reaches."""
    fused_attention: Positive = ABSENT
    """Share of the peak that the kernel of attention_backend reaches."""
    train: Positive = ABSENT
    """Speed of forward and backward, relative to the forward alone."""
    decode: Positive = ABSENT
    """Share of the memory bandwidth that the VAE reaches."""
    score: Positive = ABSENT
    """Speed of the scorers, relative to the forward's matrix products."""
    encode: Positive = ABSENT
    """Speed of the text encoders, relative to the forward's matrix products."""
    network: Positive = ABSENT
    """Share of the nominal bandwidth that links reach."""
    launch_seconds: Amount = ABSENT
    """Least seconds of a block's forward. Without it, the value of the engine holds."""
    host_gb_s: Positive = ABSENT
    """GB/s between CPU and GPU."""


class PoolSettings(Closed):
    """hardware.pools.NAME.*"""

    gpu: GpuName
    """Name of the GPU, for example H200."""
    count: AtLeast1 = ABSENT
    """Number of GPUs in the pool."""
    role: Literal["auto", "trainer", "rollout"] = ABSENT
    """What the pool's GPUs do. auto: the planner decides."""
    judges: AtLeast0 = ABSENT
    """Number of GPUs of each node, the last ones, that hold rewards with placement managed and no
    rank."""
    memory_gib: Positive
    """Memory of one GPU in GiB, as reported by torch. Plans use nine tenths of it."""
    tflops: Positive
    """Peak dense bf16 TFLOP/s of one GPU, from its data sheet."""
    hbm_tb_s: Positive
    """Memory bandwidth of one GPU in TB/s, from its data sheet."""
    intra_gb_s: Positive
    """GB/s between two GPUs of a node, per direction."""
    inter_gb_s: Positive
    """GB/s of a node's network link, per direction. The GPUs of the node share it."""
    per_node: AtLeast1 | None = ABSENT
    """Number of GPUs in a node. null: 8, or all GPUs of a smaller pool."""
    host_gib: Positive | None = ABSENT
    """GiB of a node's host memory. Plans use nine tenths of it. null: unlimited."""
    efficiency: EfficiencySettings | None = ABSENT
    """Efficiencies of this pool, in place of those of its kind of GPU."""


class LineSettings(Closed):
    """hardware.links.NAME.*"""

    between: PoolPair
    """Names of the two pools that the link connects."""
    gb_s: Positive
    """GB/s in one direction. All GPUs of the two pools share it."""
    latency_s: Amount = ABSENT
    """Seconds that a message takes in addition to its transfer."""


class HardwareSettings(Closed):
    """hardware.*"""

    build: Literal["tiny", "real"]
    """tiny: small random builds of the same model classes. real: the published weights."""
    emulate: bool
    """Sleep for the durations of the cost model instead of running the networks."""
    time_scale: Positive
    """Factor for emulated durations."""
    pools: dict[str, PoolSettings] = Field(min_length=1)
    """Pools of equal GPUs, by name."""
    links: dict[str, LineSettings] = ABSENT
    """Links between pools in different places, by names of your choice. All trainers must be in one
    place. Pools without an entry are connected by the slower inter_gb_s of the two."""
    efficiency: EfficiencySettings | None = ABSENT
    """Efficiencies of every pool."""
    seconds: Seconds | None = ABSENT
    """Measured seconds per unit, which replace the computed seconds."""
    exceptions: dict[str, Any] | None = ABSENT
    """Sizes of tiny batches, by data.updates_split and number of updates."""


class PublishedCurve(Closed):
    """published.*: a curve that others measured with this recipe."""

    reward: Name
    """Name in reward.rewards of what was measured."""
    first: float
    """Value before training."""
    last: float
    """Value at the end."""
    steps: AtLeast1 | None
    """RL steps between them. null: not told."""
    gpu_hours: Positive | None
    """GPU-hours between them. null: not told."""
    measured: Text
    """How the values were measured there, and what differs from this recipe."""
    source: Text
    """Paper, or repository and issue."""


class Settings(Whole):
    """A run: configs/train.yaml and its groups."""

    experiment_name: Name
    """Name of the run's directory and reports."""
    # The largest that a signed 64-bit number holds.
    seed: int = Field(ge=0, le=2**63 - 1)
    """Seed of every random choice."""
    max_rl_steps: AtLeast1
    """Number of RL steps of the run."""
    resume: Directory | None
    """Directory of the run to continue."""
    output_root: Directory
    """Directory in which run directories are made."""
    allow_targets: list[Package]
    """Further packages that `_target_` may name. Only accepted on the command line."""
    confirm_hosts: list[Text]
    """Hosts that the config.yaml of an earlier run may name. Only accepted on the command line."""
    # Absent in YAML files: `loading` fills it from their interpolations.
    copies: dict[str, str] = ABSENT
    """Keys that repeat another key, and that key: an override of a stored run reaches both. Written
    by the run, from the interpolations of YAML files."""
    allocation: AllocationSettings
    launch: Literal["local", "ray"]
    """Launcher of the ranks if neither torchrun nor SLURM has started them."""
    ray: RaySettings
    network: NetworkSettings
    parallel: ParallelSettings
    limits: LimitsSettings
    record: RecordSettings
    strategy: Component
    """DisaggregatedStrategy, or a subclass with other hooks."""
    data: DataSettings
    schedule: ScheduleSettings
    sampling: SamplingSettings
    algorithm: AlgorithmSettings
    reward: RewardSettings
    model: ModelSettings
    hardware: HardwareSettings
    # Open: Lightning refuses what it does not know, and `checks` what is derived.
    trainer: dict[str, Any]
    """Arguments of Lightning's Trainer."""
    logger: dict[str, Any] | None = ABSENT
    """Lightning loggers by name. null: none."""
    callbacks: dict[str, dict[str, Any]] | None
    """Lightning callbacks by name."""
    published: list[PublishedCurve] = ABSENT
    """What others measured with this recipe. The report draws it beside the run."""


class BuildSettings(Closed):
    """hardware.*"""

    build: Literal["tiny", "real"]
    """tiny: small random builds of the scorers' classes. real: the published weights."""


class ScorerSettings(Whole):
    """A command around one option of the group `reward`."""

    hardware: BuildSettings
    allow_targets: list[Package]
    """Further packages that `_target_` may name. Only accepted on the command line."""
    reward: dict[str, Any]
    """The scorers: an option of the group `reward`."""


_RESUMABLE = """
max_rl_steps algorithm.optimizer.lr allocation launch ray network limits record
parallel.shard_group parallel.compress
schedule.gap schedule.claims schedule.tsp schedule.tag schedule.shares schedule.skip_zero
sampling.task_size data.prompts data.heldout data.prompt_store model.path
model.gradient_checkpointing reward.call_s reward.placement reward.start_s reward.urls
reward.max_missing_share reward.min_missing_samples reward.pending hardware.time_scale
hardware.pools hardware.efficiency hardware.seconds logger callbacks allow_targets confirm_hosts
"""
RESUMABLE: tuple[str, ...] = tuple(_RESUMABLE.split())
"""Keys and groups that may change when a run is resumed. They decide about time, memory and places,
about what watches the run, and where it ends. The learning rate may change too, and how much of the
gradients travels. Every other key is part of what the checkpoint was trained with, and keeps its
value."""


_DERIVED = Path(__file__).with_name("derived_trainer_keys.yaml")
DERIVED_TRAINER_KEYS: dict[str, str] = yaml.safe_load(_DERIVED.read_text(encoding="utf-8"))
"""Trainer arguments that the rest of the configuration decides, or that would break an RL step ->
the key to set instead."""
_ELSEWHERE = Path(__file__).with_name("names_elsewhere.yaml")
NAMES_ELSEWHERE: dict[str, str] = yaml.safe_load(_ELSEWHERE.read_text(encoding="utf-8"))
"""Last part of a key that other trainers have -> the key to set here."""


def may_change(key: str) -> bool:
    """Return whether a resumed run may change the dotted `key`: it is one of `RESUMABLE`, or in one
    of those groups."""
    return any(key == name or key.startswith(f"{name}.") for name in RESUMABLE)
