"""Assembly of one rank from a configuration: policy, rewards, engine, LightningModule, Strategy,
Trainer.

Every rank of every role runs `build` and then `trainer.fit`; the Strategy makes the difference
between roles.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from hydra.utils import get_object
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, ListConfig, OmegaConf

from digenrl import accelerator, devices, prompts
from digenrl import config as configuration
from digenrl.advisor import Advice, StandIn
from digenrl.algorithms.dump import dump_to
from digenrl.algorithms.grpo import check_kernel
from digenrl.callbacks.evaluation import Evaluation
from digenrl.callbacks.guarded import Guarded
from digenrl.cluster.world import Session, World
from digenrl.data import PromptData, prompt_of
from digenrl.extension import extension, installed
from digenrl.hardware import assign, parse_hardware
from digenrl.models.pipeline import DiffusersPolicy
from digenrl.models.policy import Policy
from digenrl.models.pretrained import cache_root
from digenrl.record.run_dir import PROMPT_STORE, append_event, free_space, limit_events
from digenrl.rewards.needs import unscorable
from digenrl.rewards.suite import RewardSuite
from digenrl.rollout.engine import RolloutEngine, SamplingSpec
from digenrl.rollout.evaluation import FixedSamples
from digenrl.schedule import ScheduleSpec, micro_batches_per_update
from digenrl.schedule.shares import relative
from digenrl.settle import shard_group, sharding, trainer_speeds, trainers_must_evaluate
from digenrl.strategy.checkpoint_io import DirectoryCheckpointIO
from digenrl.strategy.disaggregated import DisaggregatedStrategy
from digenrl.strategy.setup import RankSetup
from digenrl.transport.link import LinkMaker, PeerLine, socket_link
from digenrl.types import Prompt, StepGivenUp


@dataclass(frozen=True)
class Rank:
    """One rank, ready to `fit`."""

    trainer: pl.Trainer
    module: pl.LightningModule
    data: PromptData
    strategy: DisaggregatedStrategy

    def fit(self, checkpoint: Path | None = None) -> None:
        """Run this rank to the end of the run; `checkpoint` is a directory to resume from. Rollouts
        read none: they adopt what the trainers publish."""
        own = checkpoint if self.strategy.world.is_trainer else None
        with suppress(StepGivenUp):  # the version before it is saved
            self.trainer.fit(self.module, datamodule=self.data, ckpt_path=own)


def fit(
    config: DictConfig,
    checkpoint: Path | None,
    advice: Advice,
    world: World,
    session: Session,
) -> None:
    """Be one rank from its assembly to the end of the run."""
    if world.rank == 0:
        logging.getLogger("digenrl").addHandler(WarningEvents(session.run_dir))
    rank = build(config, world, session, advice=advice)
    if world.rank == 0 and checkpoint is not None:
        rank.trainer.callbacks.insert(0, Resumed(config))  # type: ignore[attr-defined]
    rank.fit(checkpoint)


def build(
    config: DictConfig,
    world: World,
    session: Session,
    callbacks: Sequence[pl.Callback] = (),
    advice: Advice | None = None,
) -> Rank:
    """Instantiate everything that rank `world.rank` needs.

    Args:
        config: a composed, validated configuration.
        world: this process's place.
        session: how to reach the run.
        callbacks: further Lightning callbacks (tests record gradients with them).
        advice: what the ranks are told (`Advisor.advise`); None: nothing.
    """
    given = Given(config, world, session, advice or Advice())
    device = _prepare_process(
        given
    )  # first: reward models, streams and contexts are made on the current device
    policy = _policy(given)
    rewards = _rewards(given)
    module = configuration.instantiate(config.algorithm, policy=policy)
    module.dump_batch = dump_to(session.run_dir / "skipped", world.rank)
    engine = engine_of(config, module, rewards)
    spec = schedule_spec(
        config, module.train_steps.count(config.sampling.steps), world.trainers, world.rollouts
    )
    data = PromptData(config.data, config.seed)
    named = [configuration.instantiate(callback) for callback in (config.callbacks or {}).values()]
    _check_rewards(given, rewards, spec, data, named)
    strategy = _strategy(given, spec, engine, data, named)
    trainer = _trainer(given, spec, strategy, [*named, *callbacks], device)
    _encode(config, policy, data, named, world.rank, session)
    _announce_record(
        config, world, engine, spec, data, session.run_dir, base=module.needs_base_means
    )
    return Rank(trainer, module, data, strategy)


@dataclass(frozen=True)
class Given:
    """What every step of `build` reads."""

    config: DictConfig
    world: World
    session: Session
    advice: Advice

    @property
    def stand_in(self) -> StandIn | None:
        """What an emulated rank builds in place of networks; None: the rank is real."""
        return self.advice.stand_in(self.world.rank)


def _prepare_process(given: Given) -> int | None:
    """Seed this process, bound its threads, and take its GPU; return the number, None without one
    or when emulated."""
    threads = os.environ.get("OMP_NUM_THREADS")
    torch.set_num_threads(int(threads) if threads else 1)
    torch.manual_seed(given.config.seed)
    # Modules reduce their own metrics; Lightning reads its checkpoints through our CheckpointIO,
    # weights only.
    warnings.filterwarnings("ignore", message=".*sync_dist=True.*")
    return devices.take(given.world.local_rank) if given.stand_in is None else None


def _policy(given: Given) -> Policy:
    """Return the network of this rank; a rank that only generates keeps nothing for training."""
    stand_in = given.stand_in
    policy: Policy = configuration.instantiate(
        model_of(given.config, given.world) if stand_in is None else stand_in.model
    )
    if not given.world.is_trainer:
        policy.only_generate()
    return policy


def _rewards(given: Given) -> RewardSuite:
    """Return the rewards, which record what they could not score and tell their stages."""
    stand_in = given.stand_in
    rewards: RewardSuite = configuration.instantiate(
        given.config.reward if stand_in is None else stand_in.reward
    )
    rewards.on_missing = partial(_write_missing, given.session.run_dir, given.world.rank)
    rewards.stage = given.session.progress.stage
    return rewards


def _check_rewards(
    given: Given,
    rewards: RewardSuite,
    spec: ScheduleSpec,
    data: PromptData,
    callbacks: Sequence[pl.Callback],
) -> None:
    """Refuse prompts that a scorer could never score, on the ranks that score; record the scorers
    once."""
    world, trainers_score = given.world, _trainers_score(given.config, spec, callbacks, given.world)
    if trainers_score or not world.is_trainer:  # nobody else builds reward models
        rewards.check_prompts(data.prompts)
    if world.rank == (0 if trainers_score else world.trainers):
        identities = {name: asdict(identity) for name, identity in rewards.identities().items()}
        append_event(given.session.run_dir, "rewards", {"identities": identities})


def _strategy(
    given: Given,
    spec: ScheduleSpec,
    engine: RolloutEngine,
    data: PromptData,
    callbacks: Sequence[pl.Callback],
) -> DisaggregatedStrategy:
    """Return what makes the difference between roles: who generates, trains, sends and
    publishes."""
    config, world, session = given.config, given.world, given.session
    keep = config.record.keep_mib * 2**20
    limit_events(keep / 4)
    setup = RankSetup(
        world,
        session,
        spec,
        engine,
        data.sampler,
        last_step=config.max_rl_steps - 1,
        sharding=sharding(config),
        shard_group=shard_group(config, world.trainers),
        unequal_gpus=len(kinds_of_trainers(config, world)) > 1,
        split_claims=config.schedule.claims == "split",
        expected=given.advice.expected,
        record_bytes=keep / world.size,
        recording=_records(config, "recording")(config, world, session)
        if config.record.trajectories
        else None,
        source=None if config.replay is None else _records(config, "source")(config.replay),
        evaluated=_drawn_by_rollouts(config, callbacks, world),
        link=link_maker(config, given.stand_in),
    )
    strategy: DisaggregatedStrategy = configuration.instantiate(config.strategy)(
        setup, DirectoryCheckpointIO()
    )
    return strategy


def _trainer(
    given: Given,
    spec: ScheduleSpec,
    strategy: DisaggregatedStrategy,
    callbacks: Sequence[pl.Callback],
    device: int | None,
) -> pl.Trainer:
    """Return Lightning's trainer: one epoch is one RL step, and one optimizer step takes all
    micro-batches of an update."""
    config, run_dir = given.config, given.session.run_dir
    trainer: pl.Trainer = configuration.instantiate(
        config.trainer,
        accelerator=devices.lightning(config.trainer.accelerator),
        devices=1 if device is None else [device],
        strategy=strategy,
        max_epochs=config.max_rl_steps,
        accumulate_grad_batches=micro_batches_per_update(spec, given.world.trainers),
        callbacks=list(callbacks),
        logger=_loggers(config, run_dir) if given.world.rank == 0 else [],
        default_root_dir=str(run_dir),
    )
    return trainer


def engine_of(config: DictConfig, module: Any, rewards: RewardSuite) -> RolloutEngine:
    """Return what generates for an algorithm's `module`, with its policy, kernel and steps."""
    scouts, make = config.sampling.scouts, cast(Callable[..., RolloutEngine], RolloutEngine)
    if scouts.candidates > 1:
        scouting = extension(
            "digenrl.extensions.scouts.engine.ScoutingEngine",
            f"sampling.scouts.candidates = {scouts.candidates}",
            "use sampling.scouts.candidates=1",
        )
        make = partial(scouting, candidates=scouts.candidates, scout_steps=scouts.steps)
    return make(
        module.policy,
        rewards,
        module.sde,
        module.train_steps,
        sampling_spec(config),
        config.seed,
        keep_means=module.needs_means,
        keep_final=module.needs_final,
    )


def link_maker(config: DictConfig, stand_in: StandIn | None = None) -> LinkMaker:
    """Return what makes each rank's link: sockets, or more where the extension `links` is
    installed.

    Raises:
        ExtensionMissing: the configuration asks for more, and the extension is not installed.
    """
    network, plain = config.network, {"publication": "stream", "delta": "auto", "compress": "auto"}
    asked = [key for key in plain if network[key] not in (plain[key], "auto", False)]
    lines = None if stand_in is None else partial(_emulated_line, stand_in)
    if not asked and not installed("links"):
        return socket_link if lines is None else partial(socket_link, lines=lines)
    wanted = ", ".join(f"network.{key} = {str(network[key]).lower()}" for key in asked)
    instead = "use " + " ".join(f"network.{key}={plain[key]}" for key in asked)
    make: LinkMaker = extension("digenrl.extensions.links.make.link_maker", wanted, instead)(
        config, lines
    )
    return make


def _emulated_line(stand_in: StandIn, peer: int) -> PeerLine:
    """Return the line of an emulated rank to or from `peer`."""
    line: PeerLine = configuration.instantiate(stand_in.line)
    return line


def _drawn_by_rollouts(
    config: DictConfig, callbacks: Sequence[pl.Callback], world: World
) -> FixedSamples | None:
    """What rollouts draw for evaluations; None: nothing."""
    found = [callback.drawn for callback in callbacks if isinstance(callback, Evaluation)]
    return found[0] if found and trainers_must_evaluate(config, world.rollouts) is None else None


def _trainers_score(
    config: DictConfig, spec: ScheduleSpec, callbacks: Sequence[pl.Callback], world: World
) -> bool:
    """Whether trainers are to generate or to evaluate; where no rollout is left they may have to
    all the same."""
    generate = config.replay is None and (spec.tag or not world.rollouts)
    evaluate = any(isinstance(callback, Evaluation) for callback in callbacks)
    return generate or (evaluate and _drawn_by_rollouts(config, callbacks, world) is None)


def _records(config: DictConfig, function: str) -> Any:
    """Return a function of the extension `records`, for a run that records or replays
    trajectories."""
    wanted = (
        "record.trajectories = true" if config.record.trajectories else f"replay = {config.replay}"
    )
    instead = "use record.trajectories=false and replay=null"
    return extension(f"digenrl.extensions.records.assembly.{function}", wanted, instead)


def _announce_record(
    config: DictConfig,
    world: World,
    engine: RolloutEngine,
    spec: ScheduleSpec,
    data: PromptData,
    run_dir: Path,
    base: bool,
) -> None:
    """Say how large the record of trajectories will be, where there is one; `base` as in the
    extension's `announce`."""
    if config.record.trajectories and world.rank == 0:
        lockstep = (sharding(config) != "ddp" and world.trainers > 1) or spec.context > 1
        _records(config, "announce")(config, world, engine, spec, data, run_dir, lockstep, base)


def _encode(
    config: DictConfig,
    policy: Policy,
    data: PromptData,
    callbacks: Sequence[pl.Callback],
    rank: int,
    session: Session,
) -> None:
    """Fill the prompt store while the network is not on the device yet; the run goes on over one
    that fails."""
    with session.progress.stage("encode"):
        try:
            filled = fill_prompt_store(config, policy, data, callbacks, session.progress.tick)
        except OSError as error:
            logging.getLogger(__name__).warning(
                f"{error} What it lacks is encoded by every rank that needs it."
            )
            return
    if filled is not None and (filled.encoded or rank == 0):
        append_event(session.run_dir, PROMPT_STORE, {"rank": rank, **asdict(filled)})


@dataclass(frozen=True)
class Filled:
    """A prompt store that has what a run needs."""

    root: str
    texts: int
    """Number of prompts and negative prompts of the steps and of the evaluation."""
    encoded: int
    """Number of texts that this process encoded."""


def fill_prompt_store(
    config: DictConfig,
    policy: Policy,
    data: PromptData,
    callbacks: Sequence[pl.Callback] = (),
    progress: Callable[[], None] = lambda: None,
) -> Filled | None:
    """Have every prompt of the run, and of the evaluation among `callbacks`, in the store of
    `data.prompt_store`, from which `policy` then reads. None: there is no store, or no encoder
    worth one.

    Args:
        progress: as in `PromptStore.fill`.

    Raises:
        OSError: the store cannot be written; the policy reads what it has.
    """
    setting = config.data.prompt_store
    if setting is None:
        return None
    root = cache_root("prompts") if setting == "auto" else Path(setting).expanduser()
    steps = range(0 if config.replay else config.max_rl_steps)
    all_of_them = len(steps) * config.data.prompts_per_batch >= len(data.prompts)
    wanted = (
        list(data.prompts)
        if all_of_them
        else [prompt for step in steps for prompt in data.sampler.batch(step)]
    )
    wanted += [
        prompt
        for callback in callbacks
        if isinstance(callback, Evaluation)
        for prompt in callback.prompts
    ]
    try:
        with policy.guided(max(policy.guidance_scale, config.sampling.eval.guidance_scale or 0.0)):
            found = policy.fill_store(root, wanted, accelerator.current(), progress)
    except OSError as error:
        raise OSError(
            f"data.prompt_store = {root}: cannot be used ({error.strerror or error}, "
            f"{free_space(root)}): make "
            "room, name another directory, or set data.prompt_store=null."
        ) from error
    return None if found is None else Filled(str(root), *found)


def schedule_spec(
    config: DictConfig, trained_steps: int, trainers: int, rollouts: int = 1
) -> ScheduleSpec:
    """The schedule that a configuration describes; measured shares begin with the profile's."""
    measured = config.schedule.shares == "measured"
    speeds = relative(trainer_speeds(config, trainers, rollouts)) if measured else ()
    return ScheduleSpec.from_config(config, trained_steps, speeds)


def kinds_of_trainers(config: DictConfig, world: World) -> set[str]:
    """GPUs that the profile gives to trainers, by name."""
    if config.hardware.emulate or all(pool.gpu == "cpu" for pool in config.hardware.pools.values()):
        return set()
    hardware = parse_hardware(config.hardware)
    return {
        hardware.pool(name).gpu
        for name, _ in assign(hardware, world.trainers, world.rollouts)[: world.trainers]
    }


def sampling_spec(config: DictConfig) -> SamplingSpec:
    """The `sampling` group as the engine reads it."""
    sampling = config.sampling
    return SamplingSpec(
        steps=sampling.steps,
        storage_dtype=getattr(torch, sampling.storage_dtype),
        same_noise=sampling.same_noise,
        eval_steps=sampling.eval.steps,
        eval_guidance_scale=sampling.eval.guidance_scale,
        eval_solver=sampling.eval.solver,
        eval_batch=sampling.eval.batch,
    )


def model_of(config: DictConfig, world: World) -> DictConfig:
    """The `model` group as this rank builds it: what its GPU keeps for the backward pass, where
    trainers differ; not filled yet where trainers shard it; no reference copy and nothing for a
    backward pass on a rank that only generates.
    """
    own: dict[str, Any] = {}
    model, shards = _target(config, "model"), world.is_trainer and sharding(config) != "ddp"
    if shards and isinstance(model, type) and issubclass(model, DiffusersPolicy):
        own["empty"] = True
    kept = config.model.get("gradient_checkpointing")
    if world.is_trainer and isinstance(kept, ListConfig):
        own["gradient_checkpointing"] = kept[world.rank]
    if not world.is_trainer:
        own = {
            key: False
            for key in ("gradient_checkpointing", "keep_reference")
            if key in config.model
        }
    merged = OmegaConf.merge(config.model, own)
    assert isinstance(merged, DictConfig)
    return merged


def _loggers(config: DictConfig, run_dir: Path) -> list[Logger]:
    """The configured loggers, each where it can neither stop nor slow the run."""
    record = config.record
    return [
        Guarded(
            configuration.instantiate(logger)(save_dir=str(run_dir)),
            name,
            run_dir,
            record.logger_pending,
            record.logger_finish_s,
        )
        for name, logger in (config.logger or {}).items()
    ]


def _write_missing(run_dir: Path, rank: int, reward: str, samples: int, cause: str) -> None:
    append_event(
        run_dir, "missing", {"rank": rank, "reward": reward, "samples": samples, "cause": cause}
    )


class Resumed(pl.Callback):
    """Replaces a resumed run's config.yaml by the configuration that applies, once every trainer
    has loaded the
    checkpoint: the Strategy has then published from it, for which they meet, and no other callback
    has written."""

    def __init__(self, config: DictConfig) -> None:
        self._config = config

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        configuration.store_config(self._config, Path(trainer.default_root_dir))


class WarningEvents(logging.Handler):
    """Warnings become events of kind "warning": the display shows them, the summary keeps them."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(logging.WARNING)
        self._run_dir = run_dir

    def emit(self, record: logging.LogRecord) -> None:
        """Append one line to events.jsonl."""
        append_event(self._run_dir, "warning", {"message": record.getMessage()})


def check(config: DictConfig) -> None:
    """Raise ValueError for a model or an algorithm that cannot be built, or a prompt that a reward
    could never score, before anything is written or started."""
    model, strategy = _target(config, "model"), _target(config, "strategy")
    if not config.hardware.emulate and isinstance(model, type) and issubclass(model, Policy):
        model.check(config.model)
        model.check_context(config.model, config.parallel.context)
    if not (isinstance(strategy, type) and issubclass(strategy, DisaggregatedStrategy)):
        raise ValueError(
            f"strategy._target_ = {config.strategy['_target_']}: is no subclass of "
            "digenrl.strategy.disaggregated.DisaggregatedStrategy; derive it from that class and "
            "override its hooks."
        )
    algorithm = config.algorithm
    configuration.instantiate(algorithm.advantage)
    if not config.hardware.emulate:
        for where, prompt in _prompts_of(config.data) if issubclass(model, Policy) else ():
            try:
                model.check_prompt(prompt)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
        if problems := unscorable(config.reward, _prompts_of(config.data)):
            raise ValueError("\n".join(problems))
    surrogate = configuration.instantiate(algorithm.surrogate) if "surrogate" in algorithm else None
    if surrogate is not None:
        check_kernel(configuration.instantiate(algorithm.sde), surrogate)
    if config.replay is not None:
        means, final = (
            surrogate is not None and surrogate.needs_means,
            _target(config, "algorithm").needs_final,
        )
        _records(config, "check")(config, means, final)


def _prompts_of(data: DictConfig) -> Iterator[tuple[str, Prompt]]:
    """(key, file and line, prompt) of the prompts of a run and of its evaluation."""
    for key in (key for key in ("prompts", "heldout") if data[key] is not None):
        for file in (prompts.read(name) for name, _ in prompts.sources(data[key])):
            for record in file.records:
                yield f"data.{key}: {file.path}:{record.line}", prompt_of(record)


def _target(config: DictConfig, group: str) -> Any:
    """What `_target_` of a group names."""
    name = config[group]["_target_"]
    try:
        return get_object(name)
    except Exception as error:  # whatever the user's module raises while it is imported
        raise ValueError(
            f"{group}._target_ = {name}: cannot be imported ({' '.join(str(error).split())}); "
            "correct the name, or add the directory of its module to PYTHONPATH."
        ) from error
