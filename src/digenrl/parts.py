"""Parts from which `run.build_rank` assembles a rank, and the checks of a configuration before any
rank is started."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from hydra.utils import get_object
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf

from digenrl import config as configuration
from digenrl.advisor import Advice, StandIn
from digenrl.algorithms.base import PolicyModule
from digenrl.algorithms.grpo import check_kernel
from digenrl.algorithms.parts import check_routes
from digenrl.callbacks.loggers import Guarded, Silent, continue_record
from digenrl.cluster.control import Control
from digenrl.cluster.world import Session, World
from digenrl.config.asked_prompts import evaluation_prompts, training_prompts
from digenrl.config.settings import Settings
from digenrl.config.stored import tie_of
from digenrl.hardware import assign_ranks, parse_hardware, trainer_speeds
from digenrl.models.lora import PRESETS, LoraSpec, lora_modules
from digenrl.models.pipeline import DiffusersPolicy
from digenrl.models.policy import ModelKeys, Policy
from digenrl.record.redact import redact
from digenrl.record.run_dir import append_event
from digenrl.rewards.needs import scorers_of_sound, unscorable_prompts
from digenrl.rollout.engine import SamplingSpec
from digenrl.schedule import ScheduleSpec
from digenrl.schedule.speeds import relative_shares
from digenrl.settle import schedule_of, sharding_mode
from digenrl.strategy.checkpoint_io import tie_again
from digenrl.strategy.context import check_model
from digenrl.strategy.disaggregated import DisaggregatedStrategy
from digenrl.transport.broadcast import broadcast_link
from digenrl.transport.lines import chosen_lines
from digenrl.transport.link import Link, LinkMaker, socket_link


@dataclass(frozen=True)
class BuildContext:
    """Input of every step of `run.build_rank`, filled from its arguments before anything is
    instantiated."""

    settings: Settings
    world: World
    session: Session
    advice: Advice

    @property
    def stand_in(self) -> StandIn | None:
        """What an emulated rank builds in place of networks; None: the rank is real."""
        return self.advice.stand_in(self.world.rank)


def link_maker(settings: Settings, rollouts: int, stand_in: StandIn | None = None) -> LinkMaker:
    """Return what makes the link of each rank of a run that begins with `rollouts` rollouts."""
    make = broadcast_link if publishes_by_broadcast(settings, rollouts) else socket_link
    compress = settings.network.compress == "auto"

    def make_link(control: Control, world: World, session: Session, device: torch.device) -> Link:
        lines = (
            chosen_lines(control, world.rank, compress) if stand_in is None else stand_in.line_to
        )
        return make(control, world, session, device, lines=lines)

    return make_link


def publishes_by_broadcast(settings: Settings, rollouts: int) -> bool:
    """Return whether a settled run with `rollouts` rollouts publishes by broadcast.

    `network.publication=auto` means a broadcast between GPUs in one place, of a fixed number of
    ranks.
    """
    if settings.network.publication != "auto":
        return bool(settings.network.publication == "broadcast" and rollouts)
    fixed = (
        rollouts > 0
        and not isinstance(settings.allocation.rollouts, Mapping)
        and settings.launch != "ray"
    )
    gpus = not settings.hardware.emulate and all(
        pool.gpu != "cpu" for pool in settings.hardware.pools.values()
    )
    if settings.hardware.links or not (
        fixed and gpus and settings.trainer.get("accelerator") != "cpu"
    ):
        return False
    return torch.distributed.is_nccl_available()


def schedule_spec(
    settings: Settings, trained_steps: int, trainers: int, rollouts: int = 1
) -> ScheduleSpec:
    """Return the schedule that a configuration describes. Measured shares begin with the
    profile's."""
    shares: tuple[float, ...] = ()
    if settings.schedule.shares == "measured":
        profile = parse_hardware(settings.hardware)
        shares = relative_shares(trainer_speeds(profile, trainers, rollouts))
    return schedule_of(settings, trained_steps, shares)


def kinds_of_trainers(settings: Settings, world: World) -> set[str]:
    """Return the names of the GPUs that the profile gives to trainers."""
    pools = settings.hardware.pools.values()
    if settings.hardware.emulate or all(pool.gpu == "cpu" for pool in pools):
        return set()
    hardware = parse_hardware(settings.hardware)
    return {
        hardware.find_pool(name).gpu
        for name, _ in assign_ranks(hardware, world.trainers, world.rollouts)[: world.trainers]
    }


def sampling_spec(settings: Settings) -> SamplingSpec:
    """Return the `sampling` group as the engine reads it."""
    sampling, evaluated = settings.sampling, settings.sampling.eval
    return SamplingSpec(
        sampling.steps,
        getattr(torch, sampling.storage_dtype),
        same_noise=sampling.same_noise,
        eval_steps=evaluated.steps or sampling.steps,
        eval_guidance_scale=evaluated.guidance_scale,
        eval_solver=evaluated.solver,
        eval_batch=evaluated.batch,
        lora=None if settings.hardware.emulate else sampling.lora,
    )


def model_of(settings: Settings, world: World) -> DictConfig:
    """Return the `model` group with this rank's own changes.

    A trainer gets what its own GPU keeps for the backward pass. A rollout gets no reference copy,
    and keeps nothing for a backward pass. The network is built empty if trainers shard it, or if a
    rollout holds all weights in a smaller dtype than they are stored in.
    """
    own: dict[str, Any] = {}
    model = _import_target(settings, "model")
    shards = world.is_trainer and sharding_mode(settings) != "ddp"
    casts = not world.is_trainer and settings.model.lora is None  # half of what is stored
    diffusers = isinstance(model, type) and issubclass(model, DiffusersPolicy)
    if (shards or casts) and diffusers:
        own["empty"] = True
    kept = settings.model.gradient_checkpointing
    if world.is_trainer and isinstance(kept, list):
        own["gradient_checkpointing"] = kept[world.rank]
    if not world.is_trainer:
        own |= {
            key: False
            for key in ("gradient_checkpointing", "keep_reference")
            if settings.model.holds_key(key)
        }
    merged = OmegaConf.merge(settings.node_at("model"), own)
    assert isinstance(merged, DictConfig)
    return merged


def guarded_loggers(settings: Settings, run_dir: Path) -> list[Logger]:
    """Return the run's loggers, each in a thread of its own, so that none can hold up or end the
    run. They get the settled configuration first."""
    makers = {key: settings.build(f"logger.{key}") for key in settings.logger or {}}
    made = {key: make(save_dir=str(run_dir)) for key, make in makers.items()}
    updates, plain = settings.algorithm.updates_per_batch, redact(settings.as_plain())
    found = list[Logger]()
    for key, logger in made.items():
        continue_record(logger)
        guarded = Guarded(logger, key, run_dir, updates=updates)
        guarded.log_hyperparams(plain)
        found.append(guarded)
    return found


def silent_loggers(settings: Settings) -> list[Logger]:
    """Return what the other ranks have in place of the loggers of rank 0. Callbacks such as
    LearningRateMonitor refuse a rank that has none."""
    return [Silent()] if settings.logger else []


class Resumed(pl.Callback):
    """Replaces a resumed run's config.yaml by the configuration that applies, once every trainer
    has loaded the
    checkpoint: the Strategy has then published from it, for which they meet, and no other callback
    has written."""

    def __init__(self, settings: Settings, checkpoint: Path) -> None:
        self._settings, self._checkpoint = settings, checkpoint

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        tree = self._settings.tree
        with suppress(OSError):  # then the next resume asks for the words of this one
            tie_again(self._checkpoint, tie_of(tree))
        configuration.store_config(tree, Path(trainer.default_root_dir))


class WarningEvents(logging.Handler):
    """Warnings become events of kind "warning": the display shows them, the summary keeps them."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(logging.WARNING)
        self._run_dir = run_dir

    def emit(self, record: logging.LogRecord) -> None:
        """Append one line to events.jsonl."""
        append_event(self._run_dir, "warning", {"message": record.getMessage()})


def _check_optimizer(settings: Settings) -> None:
    """Raise ValueError for an optimizer that cannot be made of its settings."""
    given = settings.algorithm.optimizer
    try:
        settings.build("algorithm.optimizer")([torch.nn.Parameter(torch.zeros(1))])
    except Exception as error:  # whatever a library says of its arguments
        words = settings.node_at("algorithm.optimizer")
        said = ", ".join(f"{key}={value}" for key, value in words.items() if key[0] != "_")
        raise ValueError(
            f"algorithm.optimizer: {given.target} cannot be made with {said} "
            f"({type(error).__name__}: {str(error).splitlines()[0]})."
        ) from error


def _check_callbacks(settings: Settings) -> None:
    """Raise ValueError for values that a callback of the project refuses. Statistics may read
    weights, and other callbacks may do anything: they are built in the ranks alone."""
    for name, node in (settings.callbacks or {}).items():
        target = str((node or {}).get("_target_", ""))
        if target.startswith("digenrl.callbacks."):
            without = {"statistics": ()} if "statistics" in node else {}
            settings.build(f"callbacks.{name}", **without)


def check_parts(settings: Settings) -> None:
    """Raise ValueError for a model or an algorithm that cannot be built, or a prompt that a reward
    could never score, before anything is written or started."""
    named, strategy = _import_target(settings, "model"), _import_target(settings, "strategy")
    algorithm = _import_target(settings, "algorithm")
    model = named if isinstance(named, type) and issubclass(named, Policy) else None
    if not settings.hardware.emulate and model is not None:
        model.check(settings.node_at("model"))
        _check_lora(model, settings.node_at("model"))
        continued = settings.model.lora is not None and settings.model.lora.get("path") is not None
        if continued or settings.sampling.lora is not None:
            deferrable = issubclass(model, DiffusersPolicy)
            policy = settings.build("model", **({"empty": True} if deferrable else {}))
            if settings.sampling.lora is not None:
                policy.sample_with(settings.sampling.lora)
        if settings.parallel.context > 1:
            check_model(model, settings.parallel.context, settings.node_at("model"))
    _check_optimizer(settings)
    _check_callbacks(settings)
    if not (isinstance(strategy, type) and issubclass(strategy, DisaggregatedStrategy)):
        raise ValueError(
            f"strategy._target_ = {settings.strategy['_target_']}: is no subclass of "
            "digenrl.strategy.disaggregated.DisaggregatedStrategy; derive it from that class and "
            "override its hooks."
        )
    _check_base(settings, algorithm)
    settings.build("algorithm.advantage")
    if not settings.hardware.emulate:
        evaluated = list(evaluation_prompts(settings))
        asked = dict([*training_prompts(settings), *evaluated])
        if model is not None:
            for where, prompt in asked.items():
                try:
                    model.codec_class.check_prompt(prompt, model.family)
                except ValueError as error:
                    raise ValueError(f"{where}: {error}") from error
            _check_sound(settings, model)
            rewards = settings.node_at("reward").get("rewards") or {}
            routes = {name: entry.get("for") for name, entry in rewards.items()}
            if isinstance(algorithm, type) and issubclass(algorithm, PolicyModule):
                check_routes(routes, model, algorithm.__name__, algorithm.splits_parts)
        if problems := unscorable_prompts(
            settings.node_at("reward"), asked.items(), settings.callbacks, evaluated
        ):
            raise ValueError("\n".join(problems))
    if settings.algorithm.get("surrogate") is not None:
        check_kernel(settings.build("algorithm.sde"), settings.build("algorithm.surrogate"))


def _check_base(settings: Settings, algorithm: object) -> None:
    """Raise ValueError for a loss that needs the base model where all weights are trained and no
    copy is kept. Only `keep_reference=false` says so: a user's own policy may have another way."""
    weight = settings.algorithm.kl_weight
    if not (weight or getattr(algorithm, "compares_with_base", False)):
        return
    if settings.model.lora is None and settings.model.get("keep_reference") is False:
        asks = f"algorithm.kl_weight = {weight:g}" if weight else settings.algorithm.target
        raise ValueError(
            f"{asks} with model.lora = null and model.keep_reference = false: the loss compares "
            "with the base model, which is trained away; set model.keep_reference=true (a second "
            "copy of the weights in each trainer), train an adapter (model.lora), or set "
            "algorithm.kl_weight=0 where the method allows it."
        )


def _check_sound(settings: Settings, model: type[Policy]) -> None:
    """Raise ValueError for a reward of sound with a model that makes none."""
    if model.codec_class.has_sound:
        return
    if keys := scorers_of_sound(settings.node_at("reward")):
        raise ValueError(
            f"{keys[0]}: scores sound, and {model.family} makes none; take a model with sound "
            "(docs/models_and_rewards.md), or another reward."
        )


def _check_lora(model: type[Policy], node: ModelKeys) -> None:
    """Raise ValueError for LoRA targets that do not compile, or match no layer of the network."""
    if (lora := node.get("lora")) is None:
        return
    targets = [name for name in LoraSpec.from_config(lora).targets if name not in PRESETS]
    for target in targets:
        try:
            re.compile(target)
        except re.error as error:
            raise ValueError(
                f"model.lora.targets: '{target}' is no regular expression ({error}); write the end "
                f"of a layer's name, or {' or '.join(PRESETS)}."
            ) from error
    if targets and (network := model.outline(node)) is not None:
        try:
            lora_modules(network, targets)
        except ValueError as error:
            raise ValueError(f"model.lora.targets: {error}") from error


def _import_target(settings: Settings, group: str) -> object:
    """Return the object that `_target_` of a group names."""
    name = settings.node_at(group)["_target_"]
    try:
        found: object = get_object(name)
    except Exception as error:  # whatever the user's module raises while it is imported
        raise ValueError(
            f"{group}._target_ = {name}: cannot be imported ({' '.join(str(error).split())}); "
            "correct the name, or add the directory of its module to PYTHONPATH."
        ) from error
    return found
