"""Parts from which `run.build` assembles a rank, and the checks of a configuration before any rank
is started."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from hydra.utils import get_object
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, ListConfig, OmegaConf

from digenrl import config as configuration
from digenrl import prompts
from digenrl.advisor import Advice, StandIn
from digenrl.algorithms.grpo import check_kernel
from digenrl.callbacks.loggers import Guarded
from digenrl.cluster.world import Session, World
from digenrl.config.stored import tie_of
from digenrl.hardware import assign, parse_hardware, trainer_speeds
from digenrl.models.pipeline import DiffusersPolicy
from digenrl.models.policy import Policy
from digenrl.record.run_dir import append_event
from digenrl.rewards.needs import unscorable
from digenrl.rollout.engine import SamplingSpec
from digenrl.schedule import ScheduleSpec
from digenrl.schedule.speeds import relative
from digenrl.settle import sharding
from digenrl.strategy.checkpoint_io import tie_again
from digenrl.strategy.context import check_model
from digenrl.strategy.disaggregated import DisaggregatedStrategy
from digenrl.transport.broadcast import broadcast_link
from digenrl.transport.link import LinkMaker, socket_link
from digenrl.types import Prompt


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


def link_maker(config: DictConfig, rollouts: int, stand_in: StandIn | None = None) -> LinkMaker:
    """Return what makes the link of each rank of a run that begins with `rollouts` rollouts."""
    lines: Mapping[str, Any] = {} if stand_in is None else {"lines": stand_in.line}
    return partial(broadcast_link if broadcasts(config, rollouts) else socket_link, **lines)


def broadcasts(config: DictConfig, rollouts: int) -> bool:
    """Return whether a settled run with `rollouts` rollouts publishes by broadcast.

    `network.publication=auto` means a broadcast between GPUs in one place, of a fixed number of
    ranks.
    """
    if config.network.publication != "auto":
        return bool(config.network.publication == "broadcast" and rollouts)
    fixed = (
        rollouts > 0
        and not isinstance(config.allocation.rollouts, Mapping)
        and config.launch != "ray"
    )
    gpus = not config.hardware.emulate and all(
        pool.gpu != "cpu" for pool in config.hardware.pools.values()
    )
    if config.hardware.get("links") or not (
        fixed and gpus and config.trainer.get("accelerator") != "cpu"
    ):
        return False
    return torch.distributed.is_nccl_available()


def schedule_spec(
    config: DictConfig, trained_steps: int, trainers: int, rollouts: int = 1
) -> ScheduleSpec:
    """The schedule that a configuration describes; measured shares begin with the profile's."""
    shares: tuple[float, ...] = ()
    if config.schedule.shares == "measured":
        profile = parse_hardware(config.hardware)
        shares = relative(trainer_speeds(profile, trainers, rollouts))
    return ScheduleSpec.from_config(config, trained_steps, shares)


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
    sampling, stored = config.sampling, getattr(torch, config.sampling.storage_dtype)
    evaluated = {f"eval_{key}": value for key, value in sampling.eval.items()}
    return SamplingSpec(sampling.steps, stored, same_noise=sampling.same_noise, **evaluated)


def model_of(config: DictConfig, world: World) -> DictConfig:
    """The `model` group as this rank builds it: what its GPU keeps for the backward pass, where
    trainers differ; not filled yet where trainers shard it, or a rollout holds all weights in less
    than they are stored in; no reference copy and nothing for a backward pass on a rollout.
    """
    own: dict[str, Any] = {}
    model = _target(config, "model")
    shards = world.is_trainer and sharding(config) != "ddp"
    casts = not world.is_trainer and config.model.get("lora") is None  # half of what is stored
    diffusers = isinstance(model, type) and issubclass(model, DiffusersPolicy)
    if (shards or casts) and diffusers:
        own["empty"] = True
    kept = config.model.get("gradient_checkpointing")
    if world.is_trainer and isinstance(kept, ListConfig):
        own["gradient_checkpointing"] = kept[world.rank]
    if not world.is_trainer:
        own |= {
            key: False
            for key in ("gradient_checkpointing", "keep_reference")
            if key in config.model
        }
    merged = OmegaConf.merge(config.model, own)
    assert isinstance(merged, DictConfig)
    return merged


def loggers(config: DictConfig, run_dir: Path) -> list[Logger]:
    """Return the run's loggers, each in a thread of its own, so that none can hold up or end the
    run."""
    makers = {key: configuration.instantiate(node) for key, node in (config.logger or {}).items()}
    made = {key: make(save_dir=str(run_dir)) for key, make in makers.items()}
    return [Guarded(logger, key, run_dir) for key, logger in made.items()]


class Resumed(pl.Callback):
    """Replaces a resumed run's config.yaml by the configuration that applies, once every trainer
    has loaded the
    checkpoint: the Strategy has then published from it, for which they meet, and no other callback
    has written."""

    def __init__(self, config: DictConfig, checkpoint: Path) -> None:
        self._config, self._checkpoint = config, checkpoint

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with suppress(OSError):  # then the next resume asks for the words of this one
            tie_again(self._checkpoint, tie_of(self._config))
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
        if config.parallel.context > 1:
            check_model(model, config.parallel.context, config.model)
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


def _prompts_of(data: DictConfig) -> Iterator[tuple[str, Prompt]]:
    """(key, file and line, prompt) of the prompts of a run and of its evaluation."""
    for key in (key for key in ("prompts", "heldout") if data[key] is not None):
        for file in (prompts.read(name) for name, _ in prompts.sources(data[key])):
            for line, prompt in zip(file.lines, file.prompts, strict=True):
                yield f"data.{key}: {file.path}:{line}", prompt


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
