"""Assembly of one rank from a configuration: policy, rewards, engine, LightningModule, Strategy,
Trainer.

Every rank of every role runs `build_rank` and then `trainer.fit`; the Strategy makes the difference
between roles. Parts that a reader can skip are in `parts.py`.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import lightning.pytorch as pl
import torch

from digenrl import accelerator, devices, parts, prompt_encoding
from digenrl import config as configuration
from digenrl.advisor import Advice
from digenrl.callbacks.evaluation import Evaluation
from digenrl.cluster.world import Session, World
from digenrl.config.settings import Settings
from digenrl.config.stored import tie_of
from digenrl.config.traps import known_traps
from digenrl.data import PromptData
from digenrl.models.policy import Policy
from digenrl.parts import BuildContext
from digenrl.record.run_dir import append_event, limit_events, write_events_of
from digenrl.rewards.suite import RewardSuite
from digenrl.rollout.engine import RolloutEngine
from digenrl.rollout.files import FileEngine
from digenrl.rollout.scouts import ScoutingEngine
from digenrl.settle import gradient_share, shard_group, sharding_mode, trainers_must_evaluate
from digenrl.strategy.checkpoint_io import DirectoryCheckpointIO
from digenrl.strategy.disaggregated import DisaggregatedStrategy
from digenrl.strategy.setup import RankSetup
from digenrl.types import StepGivenUp

if TYPE_CHECKING:
    from digenrl.algorithms.base import PolicyModule


@dataclass(frozen=True)
class Rank:
    """One rank, ready for `fit_rank`."""

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


def fit_rank(
    settings: Settings,
    checkpoint: Path | None,
    advice: Advice,
    world: World,
    session: Session,
) -> None:
    """Be one rank from its assembly to the end of the run."""
    if world.rank == 0:
        logging.getLogger("digenrl").addHandler(parts.WarningEvents(session.run_dir))
    rank = build_rank(settings, world, session, advice=advice)
    if world.rank == 0 and checkpoint is not None:
        rank.trainer.callbacks.insert(0, parts.Resumed(settings, checkpoint))  # type: ignore[attr-defined]
    rank.fit(checkpoint)


def build_rank(
    settings: Settings,
    world: World,
    session: Session,
    callbacks: Sequence[pl.Callback] = (),
    advice: Advice | None = None,
) -> Rank:
    """Instantiate everything that rank `world.rank` needs.

    Args:
        settings: a composed, validated configuration.
        world: this process's place.
        session: how to reach the run.
        callbacks: further Lightning callbacks (tests record gradients with them).
        advice: what the ranks are told (`Advisor.advise_ranks`); None: nothing.
    """
    if session.host != session.store_host:  # another machine than that of the store
        write_events_of(session.host)
    context = BuildContext(settings, world, session, advice or Advice())
    # First: reward models, streams and contexts are made on the current device.
    device = _prepare_process(context)
    policy, rewards = _build_policy(context), _build_rewards(context)
    if world.rank in (0, world.trainers) and (
        used := policy.attention_used(accelerator.current_device())
    ):
        append_event(session.run_dir, "attention", {"rank": world.rank, **used})
    for told in known_traps(settings) if world.rank == 0 else ():
        append_event(session.run_dir, "warning", {"message": told})
    module: PolicyModule = settings.build("algorithm", policy=policy)
    engine, data = engine_of(settings, module, rewards), PromptData(settings.data, settings.seed)
    named: list[pl.Callback] = [
        settings.build(f"callbacks.{name}") for name in settings.callbacks or {}
    ]
    setup = _build_setup(context, module, engine, data, named)
    _check_rewards(context, setup, rewards, data, named)
    checkpoint_io = DirectoryCheckpointIO(tie=tie_of(settings.tree))
    strategy: DisaggregatedStrategy = settings.build("strategy")(setup, checkpoint_io)
    trainer = _build_trainer(context, setup, strategy, [*named, *callbacks], device)
    prompt_encoding.encode_run_prompts(context, policy, data, named)
    return Rank(trainer, module, data, strategy)


def _prepare_process(context: BuildContext) -> int | None:
    """Seed this process, bound its threads, and take its GPU; return the number, None without one
    or when emulated."""
    threads = os.environ.get("OMP_NUM_THREADS")
    torch.set_num_threads(int(threads) if threads else 1)
    torch.manual_seed(context.settings.seed)
    # Modules reduce their own metrics; Lightning reads its checkpoints through our CheckpointIO,
    # weights only.
    warnings.filterwarnings("ignore", message=".*sync_dist=True.*")
    device = devices.take_gpu(context.world.local_rank) if context.stand_in is None else None
    if device is not None:
        context.session.progress.gauge = partial(devices.peak_bytes, device)
    return device


def _build_policy(context: BuildContext) -> Policy:
    """Return the network of this rank; a rank that only generates keeps nothing for training."""
    stand_in = context.stand_in
    policy: Policy = (
        configuration.instantiate(parts.model_of(context.settings, context.world))
        if stand_in is None
        else stand_in.build_policy()
    )
    if not context.world.is_trainer:
        policy.adapter.only_generate()
        policy.fill(torch.device("cpu"))
    return policy


def _build_rewards(context: BuildContext) -> RewardSuite:
    """Return the rewards, which record what they could not score and tell their stages."""
    stand_in = context.stand_in
    rewards: RewardSuite = (
        context.settings.build("reward") if stand_in is None else stand_in.build_rewards()
    )

    def record_missing(reward: str, samples: int, cause: str) -> None:
        told = {"rank": context.world.rank, "reward": reward, "samples": samples, "cause": cause}
        append_event(context.session.run_dir, "missing", told)

    rewards.on_missing, rewards.stage = record_missing, context.session.progress.stage
    rewards.run_dir, rewards.tick = context.session.run_dir, context.session.progress.mark_progress
    return rewards


def _build_setup(
    context: BuildContext,
    module: PolicyModule,
    engine: RolloutEngine,
    data: PromptData,
    callbacks: Sequence[pl.Callback],
) -> RankSetup:
    """Return what the Strategy is built from: the schedule, the roles, and what this rank sends,
    records and evaluates."""
    settings, world, session = context.settings, context.world, context.session
    trained = module.train_steps.count_trained(settings.sampling.steps)
    drawn = [callback.drawn for callback in callbacks if isinstance(callback, Evaluation)]
    keep = settings.record.keep_mib * 2**20
    limit_events(keep / 4)
    return RankSetup(
        world,
        session,
        parts.schedule_spec(settings, trained, world.trainers, world.rollouts),
        engine,
        data.sampler,
        last_step=settings.max_rl_steps - 1,
        sharding=sharding_mode(settings),
        shard_group=shard_group(settings, world.trainers),
        gradient_share=gradient_share(settings),
        unequal_gpus=len(parts.kinds_of_trainers(settings, world)) > 1,
        split_claims=settings.schedule.claims == "split",
        expected=context.advice.expected,
        record_bytes=keep / world.size,
        evaluated=drawn[0]
        if drawn and trainers_must_evaluate(settings, world.rollouts) is None
        else None,
        link=parts.link_maker(settings, world.rollouts, context.stand_in),
    )


def _check_rewards(
    context: BuildContext,
    setup: RankSetup,
    rewards: RewardSuite,
    data: PromptData,
    callbacks: Sequence[pl.Callback],
) -> None:
    """Refuse prompts that a scorer could never score, on the ranks that score; record the scorers
    once."""
    world, evaluate = context.world, any(isinstance(callback, Evaluation) for callback in callbacks)
    # Where no rollout is left trainers may have to generate all the same.
    generate = setup.spec.tag or not world.rollouts
    trainers_score = generate or (evaluate and setup.evaluated is None)
    if trainers_score or not world.is_trainer:  # nobody else builds reward models
        rewards.check_prompts(data.prompts)
    if world.rank == (0 if trainers_score else world.trainers):
        identities = {
            name: asdict(identity) for name, identity in rewards.scorer_identities().items()
        }
        append_event(context.session.run_dir, "rewards", {"identities": identities})


def _build_trainer(
    context: BuildContext,
    setup: RankSetup,
    strategy: DisaggregatedStrategy,
    callbacks: Sequence[pl.Callback],
    device: int | None,
) -> pl.Trainer:
    """Return Lightning's trainer: one epoch is one RL step, and one optimizer step takes all
    micro-batches of an update."""
    settings, run_dir = context.settings, context.session.run_dir
    trainer: pl.Trainer = settings.build(
        "trainer",
        accelerator=devices.lightning_accelerator(settings.trainer["accelerator"]),
        devices=1 if device is None else [device],
        strategy=strategy,
        max_epochs=settings.max_rl_steps,
        accumulate_grad_batches=setup.micro_batches_per_update,
        callbacks=list(callbacks),
        logger=parts.guarded_loggers(settings, run_dir)
        if context.world.rank == 0
        else parts.silent_loggers(settings),
        default_root_dir=str(run_dir),
    )
    return trainer


def engine_of(settings: Settings, module: PolicyModule, rewards: RewardSuite) -> RolloutEngine:
    """Return what generates for an algorithm's `module`, with its policy, kernel and steps. The
    module learns which rewards move which modality."""
    module.route_rewards(rewards.routes)
    scouts, make = settings.sampling.scouts, cast(Callable[..., RolloutEngine], RolloutEngine)
    if settings.data.samples == "files":
        make = FileEngine
    elif scouts.candidates > 1:
        make = partial(ScoutingEngine, candidates=scouts.candidates, scout_steps=scouts.steps)
    return make(
        module.policy,
        rewards,
        module.sde,
        module.train_steps,
        parts.sampling_spec(settings),
        settings.seed,
        keep_means=module.needs_means,
        keep_final=module.needs_final,
    )
