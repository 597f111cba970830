"""Every key of a configuration: its type, its range and its docstring, which `--help` and
docs/configuration.md print. To add a key, add a field.

A node with `_target_` (model, algorithm, reward, ...) is open: its constructor defines the other
keys (`targets`). Defaults are in configs/*.yaml and nowhere else. A field without a default must be
in every configuration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, WithJsonSchema

from digenrl.extension import offered


class Closed(BaseModel):
    """A group of keys that accepts no other keys."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Open(Closed):
    """A group of keys that accepts other keys, unchecked here."""

    model_config = ConfigDict(extra="allow")


def _component(node: Mapping[str, Any]) -> Mapping[str, Any]:
    if "_target_" not in node:
        raise ValueError("has no _target_")
    if node.get("_partial_") is not True:
        raise ValueError("lacks _partial_=true")
    return node


def _at_most_all(shares: dict[str, float]) -> dict[str, float]:
    if sum(shares.values()) > 1.0 + 1e-9:
        raise ValueError("sums to more than 1")
    return shares


def _ordered(ports: list[int]) -> list[int]:
    if ports[0] > ports[-1]:
        raise ValueError(f"{ports} begins after its end, expected [first, last]")
    return ports


def _weighted(files: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for entry in files:
        file, weight = entry.get("file"), entry.get("weight")
        if entry.keys() != {"file", "weight"} or not isinstance(file, str) or not file.strip():
            raise ValueError(f"holds {entry}, expected {{file: path, weight: number}}")
        if (
            not isinstance(weight, (int, float))
            or isinstance(weight, bool)
            or not 0 < weight < math.inf
        ):
            raise ValueError(f"gives {file} the weight {weight}, expected a number above 0")
    if len({entry["file"] for entry in files}) < len(files):
        raise ValueError("names a file twice")
    return files


def _span(rollouts: dict[str, int]) -> dict[str, int]:
    if rollouts.keys() != {"min", "max"}:
        raise ValueError("names not both, expected {min: m, max: n}")
    if rollouts["min"] > rollouts["max"]:
        raise ValueError(
            f"has min {rollouts['min']} above max {rollouts['max']}: lower min, or raise max"
        )
    return rollouts


AtLeast0 = Annotated[int, Field(ge=0)]
AtLeast1 = Annotated[int, Field(ge=1)]
Amount = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Steps = Annotated[int, Field(ge=1, le=1000)]
Port = Annotated[int, Field(ge=1, le=65535)]
Ports = Annotated[
    list[Port],
    Field(min_length=2, max_length=2),
    AfterValidator(_ordered),
    WithJsonSchema({"phrase": "[first, last], each from 1 to 65535"}),
]
Auto = Literal["auto"]
ABSENT: Any = None
"""Default of a key that a configuration need not have. The default is never read."""
_Text = StringConstraints(pattern=r"\S")
Text = Annotated[str, _Text, WithJsonSchema({"phrase": "text"})]
Name = Annotated[
    str,
    StringConstraints(pattern=r"^\w[\w.+= -]*$"),
    WithJsonSchema(
        {
            "phrase": (
                "name of a directory: letters, digits, spaces, _ . + = -; a letter or digit first"
            )
        }
    ),
]
Directory = Annotated[str, _Text, WithJsonSchema({"phrase": "path of a directory"})]
File = Annotated[str, _Text, WithJsonSchema({"phrase": "path of a file"})]
PromptFile = Annotated[
    str, _Text, WithJsonSchema({"phrase": "path of a .txt or .jsonl prompt file"})
]
PromptFiles = Annotated[
    list[dict[str, Any]],
    Field(min_length=1),
    AfterValidator(_weighted),
    WithJsonSchema({"phrase": "[{file: path, weight: number > 0}, ...]"}),
]
Package = Annotated[str, _Text, WithJsonSchema({"phrase": "package name"})]
Component = Annotated[
    dict[str, Any],
    AfterValidator(_component),
    WithJsonSchema({"phrase": "a group of keys with _target_ and _partial_=true"}),
]
Kept = Annotated[
    dict[Literal["products", "attention", "inputs", "offload"], Share],
    AfterValidator(_at_most_all),
    WithJsonSchema({"phrase": "{products|attention|inputs|offload: share of the blocks}"}),
]
Recomputation = bool | Share | Literal["auto", "products", "attention", "offload"] | Kept
Span = Annotated[
    dict[Literal["min", "max"], AtLeast1],
    AfterValidator(_span),
    WithJsonSchema({"phrase": "{min: m, max: n}, whole numbers >= 1"}),
]
ByTrainer = Annotated[
    list[Recomputation],
    Field(min_length=1),
    WithJsonSchema({"phrase": "a list of these, one for each trainer"}),
]
Urls = Annotated[dict[str, list[Text]], WithJsonSchema({"phrase": "{reward: [URL, ...]}"})]
Seconds = Annotated[
    dict[str, dict[str, Positive]],
    WithJsonSchema({"phrase": "{stage: {pool: seconds}}, as `make profile` writes it"}),
]


class AllocationKeys(Closed):
    """allocation.*"""

    trainers: AtLeast1 | Auto
    """ranks that train; auto: what the hardware profile's pools say"""
    rollouts: AtLeast0 | Auto | Span
    """ranks that only generate; 0: every rank generates and trains; {min, max}: launch=local starts
    max, launch=ray min, and more as there are places; with fewer than min a run waits for
    patience_s"""
    evaluation: Literal["auto", "trainers", "rollouts"]
    """ranks that draw and score the evaluation's samples, which are the same; rollouts: while
    trainers go on, with a moving average too; auto: rollouts where they have the memory, else
    trainers"""
    max_lost_rollouts: AtLeast0 | Auto
    """rollout ranks that may die while the run goes on; auto: all; 0: none, and none may leave"""
    patience_s: Amount
    """seconds that a run with fewer rollouts than rollouts.min (of a number: 1) waits for others to
    join, while those that are left generate; then it is saved and ends"""
    stop_grace_s: Amount | Auto
    """seconds for the step in progress after a stop signal; auto: 3 x the longest recent step, at
    least 5, at most half of what SLURM or torchrun leave"""
    stop_save_s: Positive
    """seconds for saving when that step is given up; ranks that are still there are killed"""
    max_restarts: AtLeast0
    """times that a run whose ranks died begins again from its newest checkpoint by itself; not
    after a stop, before its first step, or where it died at one step twice; 0: any such death ends
    it"""
    restart_pause_s: Amount
    """seconds before the first restart; twice as many before each next one"""


class RayKeys(Closed):
    """ray.*"""

    address: Text | None
    """HOST:PORT of a cluster's head, or auto; null: that of RAY_ADDRESS, else this machine alone"""
    resources: dict[str, dict[str, Positive]]
    """pool of the profile -> what a rank there wants (CPU, GPU, accelerator_type:H20: 0.001, or any
    name); a pool that is not here: 1 GPU, or 1 CPU where it has no GPUs"""
    wait_s: Positive
    """until all ranks must have a place, nodes that still start included"""
    respawn_s: Amount
    """seconds before another rollout is started for one that died; twice as many for each next
    one"""


class NetworkKeys(Closed):
    """network.*"""

    interface: Text | None
    """whose address ranks listen on, for gloo and NCCL too (eth0, ib0); null: loopback on one
    machine, else that of the route to MASTER_ADDR"""
    ports: Ports | None
    """of the control store and of every rank's link, on each machine: ranks + 1; null: any free
    ones"""
    publication: Literal["auto", "stream", "broadcast"]
    """how weights travel to rollouts; broadcast: torch.distributed's (NCCL, gloo on processors), to
    the rollouts that the run begins with, until one is lost; others get streams; auto: broadcast
    where every rank has a GPU and their number is fixed"""
    delta: bool | Auto
    """rollouts get what has changed since the version that they hold (exclusive or,
    digest-checked); auto: over thin lines"""
    whole_every: AtLeast1
    """every so-many-th version travels whole all the same; 1: each does"""
    compress: bool | Auto
    """trajectories, weights and suspended tasks are packed without loss (zlib); auto: over thin
    lines"""
    thin_mb_s: Positive
    """MB/s; a line that carries less is thin: as hardware.links says, or as it was seen to carry"""


class ParallelKeys(Closed):
    """parallel.*"""

    sharding: Literal["ddp", "hsdp", "fsdp", "auto"]
    """ddp: replicas; hsdp: weights sharded inside a node; fsdp: over all trainers; auto: the first
    that fits"""
    shard_group: AtLeast1 | Auto
    """hsdp: trainers that hold one copy of the weights; auto: those of a node"""
    context: AtLeast1
    """neighbouring trainers that share the tokens of each trained forward (Ulysses), where a sample
    is too long for one GPU; divides the trainers of a node and the attention heads; Wan and
    HunyuanVideo (also 1.5); 1: none"""


class PatienceKeys(Closed):
    """limits.*: how long ranks are waited for, in seconds unless said otherwise."""

    stage_factor: Annotated[float, Field(ge=1)] | None
    """a rank hangs after this many times its stage's longest stretch without progress; null:
    never"""
    stage_floor_s: Positive
    """... and not before so many seconds; also where all ranks wait"""
    start_s: Positive
    """in place of both: a rank's start, and its first stretch of each stage"""
    collective_s: Positive
    """one collective of the trainers, the wait for the slowest included"""
    join_s: Positive
    """first sign of life of a process that torchrun or SLURM started, once process 0 is there"""
    silent_s: Positive
    """a rank without heartbeat and processor time counts as dead"""
    absent_s: Positive
    """without a sign of life from the process that watches a joined rollout; its machine counts as
    gone"""
    suspended_s: Positive
    """so does a suspended one (SIGSTOP), and a suspended launcher"""
    leave_s: Positive
    """at the end of a run, for what is still on its way to other ranks"""
    verdict_s: Positive
    """until the launcher says that a run goes on without a rank that is gone"""
    abort_s: Positive
    """after a failure, in which ranks leave by themselves; then they are killed"""


class RecordKeys(Closed):
    """record.*"""

    keep_mib: Positive
    """MiB of all ranks' spans, and of their decisions; events get a quarter; then steps are left
    out"""
    trajectories: bool
    """keep what trainers consume (latents, rewards, ...), for `replay`"""
    trajectories_mib: Positive
    """MiB of that, of all trainers; the record ends with the last RL step that fits, the run goes
    on"""


class DataKeys(Closed):
    """data.*"""

    prompts: PromptFile | PromptFiles
    """training prompts; a path, or the name of a file of digenrl/prompts; of several files, each
    batch has each one's part by weight"""
    heldout: PromptFile | None
    """prompts of the evaluation; null: the training prompts"""
    prompts_per_batch: int = Field(ge=1, le=65536)
    """groups of an RL step, each of one prompt"""
    group_size: int = Field(ge=2, le=4096)
    """samples of a group"""
    samples: Literal["generated", "files"]
    """where a group's samples come from: the model, or the files that the prompt's line names"""
    oversample: AtLeast0
    """groups generated beyond prompts_per_batch; the first that teach something are trained"""
    zero_variance_groups: Literal["keep", "drop"]
    """groups whose samples all score alike: they stay in the loss's denominator, or leave it and
    the KL"""
    updates_split: Literal["groups", "samples"]
    """what several updates of a batch share out; groups: each trains some of the groups; samples:
    each trains some samples of every group, by their numbers. Advantages are the whole group's
    either way"""
    prompt_store: Auto | Directory | None
    """where encoded prompts are kept for all ranks and later runs; auto: the user's cache; null:
    nowhere"""
    image_max_mib: Positive
    """MiB of an image that a prompt names; a larger one is refused"""
    image_max_pixels: AtLeast1
    """width x height of such an image, read from its head; a larger one is refused before it is
    decoded"""


class TspKeys(Closed):
    """schedule.tsp.*"""

    batch: AtLeast1 | Literal["auto", "all"]
    """trained steps of a sample in one forward; auto: what memory allows"""
    shard: bool
    """spread the trained steps of a sample over the trainers"""


class ScheduleKeys(Closed):
    """schedule.*"""

    auto: bool
    """what is not given of the schedule, the split, sharding and task size is what the planner
    finds fastest on policy when the run starts; config.yaml says what"""
    gap: AtLeast0
    """groups of a fragment, trained as soon as they are complete; 0: the whole batch"""
    claims: Literal["shared", "split"]
    """shared: faster ranks take more tasks; split: equal parts, fixed beforehand"""
    tsp: TspKeys
    tag: bool
    """waiting trainers may generate, where that is predicted to shorten the step"""
    shares: Literal["equal", "measured"] | Annotated[list[Amount], Field(min_length=1)]
    """each trainer's part of the training: its relative speed"""
    skip_zero: bool
    """cells whose gradient is known to be zero (advantage 0, no KL) are not trained"""
    async_steps: int = Field(ge=0, le=1)
    """1: some groups of a batch use weights one version old"""
    stale_fraction: Share
    """share of a batch's groups that do so; read with async_steps=1"""


class EvaluatedKeys(Closed):
    """sampling.eval.*"""

    steps: Steps | None = ABSENT
    """denoising steps of an evaluation; null: sampling.steps"""
    guidance_scale: Annotated[float, Field(ge=0, le=100)] | None
    """of an evaluation; null: sampling.guidance_scale"""
    solver: Literal["euler", "dpm2"]
    """of an evaluation's ODE; dpm2: DPM-Solver++ of second order"""
    batch: AtLeast1 | None
    """samples of an evaluation at once; null: all of a prompt"""


class ScoutsKeys(Closed):
    """sampling.scouts.*"""

    candidates: AtLeast1
    """initial noises tried for each sample; a task keeps its best and worst halves; 1: no scouts"""
    steps: Steps
    """ODE steps of a try; the chosen ones are generated anew with sampling.steps"""


class SamplingKeys(Closed):
    """sampling.*"""

    steps: Steps
    """denoising steps of a sample"""
    guidance_scale: Annotated[float, Field(ge=0, le=100)] | None
    """of classifier-free or embedded guidance; null: none"""
    height: int = Field(ge=1, le=8192)
    """pixels"""
    width: int = Field(ge=1, le=8192)
    """pixels"""
    frames: int = Field(ge=1, le=1024)
    """of a video; 1: images"""
    storage_dtype: Literal["float32", "bfloat16", "float16", "float64"]
    """of latents on their way to the trainers"""
    task_size: Annotated[int, Field(ge=1, le=4096)] | Auto
    """samples that a rank generates at once; divides data.group_size; auto: the fewest that keep
    every GPU of the profile busy, whatever the schedule"""
    same_noise: bool
    """the samples of a group share their initial noise"""
    scouts: ScoutsKeys
    eval: EvaluatedKeys


class OptimizerKeys(Open):
    """algorithm.optimizer.*"""

    lr: Positive = ABSENT
    """learning rate"""
    weight_decay: Amount = ABSENT
    """weight decay"""


class SdeKeys(Open):
    """algorithm.sde.*"""

    noise_level: Amount = ABSENT
    """strength of the noise of Flow-SDE and CPS"""
    eta: Amount = ABSENT
    """strength of the noise of DanceGRPO's SDE"""


class AdvantageKeys(Open):
    """algorithm.advantage.*"""

    std: Literal["group", "batch", "none", "max_group"] = ABSENT
    """whose standard deviation divides the advantages"""


class AlgorithmKeys(Open):
    """algorithm.*"""

    clip_range: (
        Annotated[float, Field(gt=0, lt=1)] | Annotated[list[Amount], Field(min_length=2)]
    ) = ABSENT
    """how far a ratio may leave 1; a list: below, above"""
    kl_weight: Amount = ABSENT
    """weight of the KL divergence from the reference model; 0: none"""
    step_weight: Literal["none", "std", "longcat", "rectified"] = ABSENT
    """of the policy loss, step by step; std: the step's std/sqrt(h); longcat: LongCat's, KL too;
    rectified: Flash-GRPO's, which makes the gradients of all steps alike"""
    detach_uncond: bool = ABSENT
    """guidance trains its conditional branch alone"""
    updates_per_batch: AtLeast1 = ABSENT
    """optimizer updates of an RL step"""
    max_grad_norm: Positive | None = ABSENT
    """gradients are clipped to this norm; null: never"""
    optimizer: OptimizerKeys = Field(ABSENT)
    sde: SdeKeys = Field(ABSENT)
    advantage: AdvantageKeys = Field(ABSENT)


class RewardKeys(Open):
    """reward.*"""

    placement: Literal["inline", "thread", "process", "http"] = ABSENT
    """where scorers run"""
    urls: Urls = ABSENT
    """reward services of the scorers placed http"""
    max_missing_share: Share = ABSENT
    """of a reward's samples; beyond it the run saves and stops"""
    min_missing_samples: AtLeast1 = ABSENT
    """samples of a rank before that share counts"""
    pending: AtLeast1 = ABSENT
    """tasks that may wait for scores before generation waits too"""
    start_s: Positive = ABSENT
    """placement process: seconds until a scorer must be built"""
    call_s: Positive = ABSENT
    """placement process or http: seconds that a batch may take"""


class LoraKeys(Open):
    """model.lora.*"""

    rank: int = Field(ABSENT, ge=1, le=4096)
    """rank of the adapters"""
    alpha: Positive = ABSENT
    """scale of the adapters: alpha / rank"""


class ModelKeys(Open):
    """model.*"""

    path: Text | None = ABSENT
    """the base model: a directory, a file or a hub id"""
    gradient_checkpointing: Recomputation | ByTrainer = ABSENT
    """which blocks are computed again in the backward pass, or wait on the host for it; auto: what
    the GPU's memory asks for, without the host"""
    compile: bool = ABSENT
    """compile the repeated blocks"""
    lora: LoraKeys | None = Field(ABSENT)


class EfficiencyKeys(Closed):
    """hardware.efficiency.* for all pools, hardware.pools.NAME.efficiency.* for one; the defaults
    are those of the kind of GPU (digenrl.extensions.planner.gpus)."""

    generate: Positive = ABSENT
    """share of the peak that a forward's products reach"""
    attention: Positive = ABSENT
    """share of the peak that PyTorch's attention reaches"""
    fused_attention: Positive = ABSENT
    """... that attention_backend's attention reaches"""
    train: Positive = ABSENT
    """speed of forward and backward, as a part of the forward's"""
    decode: Positive = ABSENT
    """share of the memory bandwidth that the VAE reaches"""
    score: Positive = ABSENT
    """speed of the scorers, as a part of the forward's products"""
    encode: Positive = ABSENT
    """speed of the text encoders, likewise"""
    network: Positive = ABSENT
    """share of the links' nominal bandwidth"""
    launch_seconds: Amount = ABSENT
    """least seconds of a block's forward; else the engine's"""
    host_gb_s: Positive = ABSENT
    """GB/s between processor and GPU"""


class PoolKeys(Closed):
    """hardware.pools.NAME.*"""

    gpu: Annotated[str, _Text, WithJsonSchema({"phrase": "name of the GPU, or cpu"})]
    """e.g. H200"""
    count: AtLeast1 = 1
    """GPUs of the pool"""
    role: Literal["auto", "trainer", "rollout"] = "auto"
    """what they do; auto: the planner decides"""
    memory_gib: Positive
    """GiB of one GPU, as torch reports them; nine tenths are planned with"""
    tflops: Positive
    """peak dense bf16 TFLOP/s of one GPU, as its data sheet says"""
    hbm_tb_s: Positive
    """TB/s of its memory, as its data sheet says"""
    intra_gb_s: Positive
    """GB/s between two GPUs of a node, per direction"""
    inter_gb_s: Positive
    """GB/s of a node's network link, per direction, shared by its GPUs"""
    per_node: AtLeast1 | None = ABSENT
    """GPUs of a node; null: 8, or all of a smaller pool"""
    host_gib: Positive | None = ABSENT
    """GiB of memory of a node's host; nine tenths are planned with; null: as much as is asked
    for"""
    efficiency: EfficiencyKeys | None = ABSENT
    """what its GPUs reach, if not what their kind does"""


class LineKeys(Closed):
    """hardware.links.NAME.*"""

    between: Annotated[
        list[Text], Field(min_length=2, max_length=2), WithJsonSchema({"phrase": "[pool, pool]"})
    ]
    """two pools by name"""
    gb_s: Positive
    """GB/s from one to the other, per direction, shared by all their GPUs"""
    latency_s: Amount = 0.0
    """seconds that a message takes to the other end beside that"""


class HardwareKeys(Closed):
    """hardware.*"""

    build: Literal["tiny", "real"]
    """tiny: small random builds of the same model classes"""
    emulate: bool
    """sleep as long as the cost model says, in place of the networks"""
    emulate_misfits: bool = ABSENT
    """emulate ranks that their GPUs could not hold, too"""
    time_scale: Positive
    """of emulated durations"""
    pools: dict[str, PoolKeys] = Field(min_length=1)
    """pools of equal GPUs by name"""
    links: dict[str, LineKeys] = ABSENT
    """lines between pools in different places, by names of yours; trainers stand in one place;
    pools without an entry: the slower one's inter_gb_s"""
    efficiency: EfficiencyKeys | None = ABSENT
    """of every pool"""
    seconds: Seconds | None = ABSENT
    """measured seconds per unit; they replace computed ones"""
    exceptions: dict[str, Any] | None = ABSENT
    """sizes of tiny batches, by updates"""


class TrainKeys(Closed):
    """A run: configs/train.yaml and its groups."""

    experiment_name: Name
    """name of the run's directory and of its reports"""
    seed: int = Field(ge=0, le=2**63 - 1)
    """of every random choice"""
    max_rl_steps: AtLeast1
    """RL steps of the run"""
    resume: Directory | None
    """directory of the run to continue"""
    replay: Directory | None
    """directory of a run with trajectories, to train from those without generating anything"""
    output_root: Directory
    """where run directories are made"""
    allow_targets: list[Package]
    """further packages that `_target_` may name; counts on the command line only"""
    confirm_hosts: list[Text]
    """hosts that the config.yaml of an earlier run may name; counts on the command line only"""
    allocation: AllocationKeys
    launch: Literal["local", "ray"]
    """who starts ranks that no torchrun or SLURM has started"""
    ray: RayKeys
    network: NetworkKeys
    parallel: ParallelKeys
    limits: PatienceKeys
    record: RecordKeys
    strategy: Component
    """DisaggregatedStrategy, or a subclass with other hooks"""
    data: DataKeys
    schedule: ScheduleKeys
    sampling: SamplingKeys
    algorithm: AlgorithmKeys
    reward: RewardKeys
    model: ModelKeys
    hardware: HardwareKeys
    trainer: dict[str, Any]
    """arguments of Lightning's Trainer"""
    logger: dict[str, Any] | None = ABSENT
    """Lightning loggers by name; null: none"""
    callbacks: dict[str, Any] | None = ABSENT
    """Lightning callbacks by name"""


class BuildKeys(Closed):
    """hardware.*"""

    build: Literal["tiny", "real"]
    """tiny: small random weights of the scorers' classes"""


class ScorerKeys(Closed):
    """A command around one option of the group `reward`."""

    hardware: BuildKeys
    allow_targets: list[Package]
    """further packages that `_target_` may name; counts on the command line only"""
    reward: dict[str, Any]
    """the scorers: an option of the group"""


_RESUMABLE = """
max_rl_steps allocation launch ray network limits parallel.shard_group record
schedule.gap schedule.claims schedule.tsp schedule.tag schedule.shares schedule.skip_zero
sampling.task_size data.prompts data.heldout data.prompt_store model.path
model.gradient_checkpointing reward.call_s reward.placement reward.start_s reward.urls
reward.max_missing_share reward.min_missing_samples reward.pending hardware.time_scale
hardware.pools hardware.efficiency hardware.seconds logger callbacks allow_targets confirm_hosts
"""
RESUMABLE: tuple[str, ...] = tuple(_RESUMABLE.split())
"""Keys and groups that may change when a run is resumed. They decide about time, memory and places,
about what watches the run, and where it ends. Every other key is part of what the checkpoint was
trained with, and keeps its value."""


@cache
def schema_of(config_name: str) -> type[Closed]:
    """Return the schema of configs/<config_name>.yaml: that of a run, or one of the `SCHEMAS` of an
    extension whose command composes the file."""
    found: dict[str, type[Closed]] = {"train": TrainKeys}
    for more in offered("SCHEMAS"):
        found |= more
    return found[config_name]


_DERIVED = Path(__file__).with_name("derived_trainer_keys.yaml")
DERIVED_TRAINER_KEYS: dict[str, str] = yaml.safe_load(_DERIVED.read_text(encoding="utf-8"))
"""Trainer arguments that the rest of the configuration decides, or that would break an RL step ->
the key to set instead."""


def may_change(key: str, keys: Sequence[str] = RESUMABLE) -> bool:
    """Return whether a resumed run may change the dotted `key`: it is one of `keys`, or in one of
    those groups."""
    return any(fnmatchcase(key, name) or fnmatchcase(key, f"{name}.*") for name in keys)
