"""Every refused configuration says what is wrong, with which value, what is allowed, and the
nearest valid name."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from digenrl import config
from digenrl.advisor import PlainAdvisor
from digenrl.record.redact import MASK
from digenrl.settle import allocated_ranks, with_allocation
from tests.deleting import installed

Case = tuple[Sequence[str], Sequence[str]]

NAMES: dict[str, Case] = {
    "unknown experiment": (
        ["experiment=digits_flowgrp"],
        [
            "experiment = digits_flowgrp",
            "no such experiment",
            "nearest: digits_flowgrpo",
            "Available: ablation_",
        ],
    ),
    "experiment far from any": (["experiment=zzz"], ["experiment = zzz", "Available: ablation_"]),
    "experiment as a path": (
        ["experiment=../train"],
        ["experiment = ../train", "no such experiment"],
    ),
    "unknown model": (["model=digts"], ["model = digts", "nearest: digits"]),
    "unknown hardware": (["hardware=cpus"], ["hardware = cpus", "nearest: cpu"]),
    "unknown schedule": (
        ["schedule=gap_tps"],
        ["schedule = gap_tps", "nearest: gap_tsp", "colocated_naive"],
    ),
    "unknown algorithm": (["algorithm=flow_grp"], ["algorithm = flow_grp", "nearest: flow_grpo"]),
    "unknown reward": (["reward=digit"], ["reward = digit", "nearest: digits"]),
    "unknown sampling": (["sampling=digist"], ["sampling = digist", "nearest: digits"]),
    "unknown data": (["data=sign"], ["data = sign", "nearest: signs"]),
    "unknown trainer": (
        ["trainer=determinist"],
        ["trainer = determinist", "nearest: deterministic"],
    ),
    "unknown logger": (["logger=tensorbord"], ["logger = tensorbord", "nearest: tensorboard"]),
    "unknown callbacks": (["callbacks=defaults"], ["callbacks = defaults", "nearest: default"]),
    "group set to null": (
        ["algorithm=null"],
        ["algorithm = null", "no such algorithm", "flow_grpo"],
    ),
}

KEYS: dict[str, Case] = {
    "misspelt leaf": (
        ["data.group_siz=8"],
        ["data.group_siz = 8", "no such key", "nearest: data.group_size", "whole number >= 2"],
    ),
    "misspelt algorithm key": (
        ["algorithm.clip_rnge=0.1"],
        ["algorithm.clip_rnge = 0.1", "nearest: algorithm.clip_range", "number > 0 and < 1"],
    ),
    "misspelt root key": (
        ["max_rl_step=3"],
        ["max_rl_step = 3", "nearest: max_rl_steps", "whole number >= 1"],
    ),
    "misspelt nested key": (
        ["schedule.tsp.bacth=2"],
        ["nearest: schedule.tsp.batch", "or auto or all"],
    ),
    "misspelt LoRA key": (["model.lora.rnk=3"], ["nearest: model.lora.rank"]),
    "misspelt trainer argument": (
        ["trainer.precison=64"],
        ["trainer.precison = 64", "nearest: trainer.precision"],
    ),
    "right key, wrong parent": (["algorithm.group_size=8"], ["nearest: data.group_size"]),
    "nothing near": (
        ["schedule.banana=1"],
        ["schedule.banana = 1", "schedule has", "stale_fraction", "tag"],
    ),
    "leaf alone, nearest the root": (
        ["steps=8"],
        ["steps = 8", "nearest: sampling.steps, allowed: whole number"],
    ),
    "rewards that are no group": (
        ["reward.rewards=5"],
        ["reward.rewards = 5: is a whole number; allowed: a group of keys"],
    ),
    "a callback that is no group": (
        ["callbacks.recorder=null"],
        ["callbacks.recorder = null: is null; allowed: a group of keys."],
    ),
    "a component without its class": (
        ["~strategy._target_"],
        ["has no _target_; allowed: a group of keys with _target_ and _partial_=true"],
    ),
    "no callbacks": (["~callbacks"], ["callbacks: missing"]),
    "no SDE": (["~algorithm.sde"], ["algorithm.sde: missing"]),
    "no choice of steps": (["~algorithm.train_steps"], ["algorithm.train_steps: missing"]),
    "no advantages": (["~algorithm.advantage"], ["algorithm.advantage: missing"]),
    "removed key": (
        ["schedule.order=arrival"],
        ["schedule.order = arrival: was removed; fragments are"],
    ),
    "removed mechanism": (
        ["schedule.handoff=true"],
        ["schedule.handoff = True: was removed; rollouts that leave"],
    ),
    "removed value": (
        ["data.zero_variance_groups=refill"],
        ["data.zero_variance_groups = refill: was removed; no"],
    ),
    "removed key of another room": (
        ["parallel.rollout_context=2"],
        ["was removed; each rollout generates alone"],
    ),
    "removed command": (["replay=outputs"], ["replay = outputs: was removed; samples of old"]),
    "removed key of thin lines": (
        ["network.delta=true"],
        ["was removed; network.compress=auto finds"],
    ),
    "added removed key": (
        ["+schedule.order=arrival"],
        ["schedule.order = arrival: was removed; fragments"],
    ),
    "added root key": (["+banana=1"], ["banana = 1", "no such key", "max_rl_steps"]),
    "force-added root key": (["++sed=1"], ["sed = 1", "nearest: seed"]),
    "added key in a closed group": (
        ["+schedule.gaps=1"],
        ["schedule.gaps = 1", "nearest: schedule.gap"],
    ),
    "checkpoints of Lightning": (
        ["trainer.enable_checkpointing=true"],
        ["trainer.enable_checkpointing = true", "set callbacks.checkpoint.every"],
    ),
    "a callback that writes Lightning's checkpoints": (
        ["+callbacks.best={_target_:lightning.pytorch.callbacks.ModelCheckpoint}"],
        [
            "callbacks.best._target_ = lightning.pytorch.callbacks.ModelCheckpoint",
            "set callbacks.checkpoint.every",
            "remove callbacks.best",
        ],
    ),
    "a precision in which gradients are zero": (
        ["model.dtype=float16"],
        ["model.dtype = float16", "become 0", "set model.dtype=bfloat16"],
    ),
    "a precision of trainers alone": (
        ["trainer.precision=bf16"],
        ["trainer.precision = bf16", "set model.dtype"],
    ),
    "derived length": (
        ["trainer.max_steps=9"],
        ["trainer.max_steps = 9", "derived", "max_rl_steps"],
    ),
    "a part of an RL step": (
        ["+trainer.limit_train_batches=2"],
        ["trainer.limit_train_batches = 2", "set data.prompts_per_batch"],
    ),
    "a dry run of Lightning's": (
        ["+trainer.fast_dev_run=true"],
        ["trainer.fast_dev_run = true", "max_rl_steps=1"],
    ),
    "a limit of time": (["+trainer.max_time=00:01:00"], ["trainer.max_time", "send SIGTERM"]),
    "no strategy": (
        ["strategy=null"],
        ["strategy = null", "is null", "_target_ and _partial_=true"],
    ),
    "removed strategy": (["~strategy"], ["strategy: missing", "_target_ and _partial_=true"]),
    "strategy without arguments of its rank": (
        ["strategy._partial_=false"],
        ["strategy", "lacks _partial_=true"],
    ),
    "derived strategy": (
        ["+trainer.strategy=ddp"],
        ["trainer.strategy = ddp", "derived", "parallel.sharding"],
    ),
    "removed required key": (["~seed"], ["seed: missing", "whole number >= 0"]),
    "a key that the run's directory needs": (
        ["~experiment_name"],
        ["hydra.run.dir: ", "experiment_name", "; do not remove what it names."],
    ),
    "removed unknown key": (["~sede"], ["sede", "nearest: seed"]),
    "group of keys replaced": (
        ["schedule.tsp=3"],
        ["schedule.tsp = 3", "must hold the keys batch, shard"],
    ),
    "no equals sign": (["seed"], ["seed", "cannot be read as key=value", "it has no ="]),
    "spaces around the equals sign": (["seed", "=", "3"], ["=: has no key", "leave no spaces"]),
    "name of other trainers": (["epochs=3"], ["epochs = 3", "no such key; set max_rl_steps."]),
    "misspelt name of other trainers": (
        ["algorithm.learing_rate=1"],
        ["algorithm.learing_rate = 1", "no such key; set algorithm.optimizer.lr."],
    ),
    "name of diffusers": (["sampling.num_inference_steps=4"], ["no such key; set sampling.steps."]),
    "key of another logger": (
        ["logger.wandb.project=x"],
        ["logger.wandb.project = x", "it comes with logger=wandb."],
    ),
    "unbalanced list": (["schedule.shares=[1,2"], ["schedule.shares=[1,2", "cannot be read"]),
    "unknown flag": (["--seed=3"], ["--seed=3", "unknown option", "without dashes", "--help"]),
    "sweep without -m": (["seed=1,2"], ["seed=1,2", "several values need a sweep", "-m"]),
    "broken interpolation": (
        ["sampling.height=${nope}"],
        ["sampling.height: cannot be resolved", "nope"],
    ),
}

VALUES: dict[str, Case] = {
    "text for a number": (
        ["max_rl_steps=abc"],
        ["max_rl_steps = abc", "is text", "whole number >= 1"],
    ),
    "number with a unit": (["max_rl_steps=3s"], ["max_rl_steps = 3s", "is text"]),
    "fraction for a whole number": (
        ["data.group_size=4.5"],
        ["data.group_size = 4.5", "not a whole number"],
    ),
    "flag for a number": (["seed=true"], ["seed = true", "is true/false"]),
    "number for a flag": (
        ["schedule.tag=1"],
        ["schedule.tag = 1", "is a whole number", "true or false"],
    ),
    "null for a number": (["seed=null"], ["seed = null", "is null"]),
    "list for a number": (["seed=[1]"], ["seed = [1]", "is a list"]),
    "dict for a number": (["max_rl_steps={a:1}"], ["max_rl_steps", "is a group of keys"]),
    "nan": (["algorithm.clip_range=nan"], ["algorithm.clip_range = nan", "is not finite"]),
    "infinity": (
        ["algorithm.kl_weight=inf"],
        ["algorithm.kl_weight = inf", "is not finite", "number >= 0"],
    ),
    "nan below a constructor": (
        ["+trainer.overfit_batches=nan"],
        ["trainer.overfit_batches = nan", "is not finite"],
    ),
    "negative seed": (["seed=-1"], ["seed = -1", "is too small"]),
    "no steps": (["max_rl_steps=0"], ["max_rl_steps = 0", "is too small", ">= 1"]),
    "group of one": (["data.group_size=1"], ["data.group_size = 1", "whole number >= 2"]),
    "negative learning rate": (
        ["algorithm.optimizer.lr=-1e-3"],
        ["algorithm.optimizer.lr", "number > 0"],
    ),
    "clip range of one": (
        ["algorithm.clip_range=1.0"],
        ["algorithm.clip_range = 1.0", "is too large"],
    ),
    "stale fraction above one": (
        ["schedule.stale_fraction=1.5"],
        ["schedule.stale_fraction = 1.5", "<= 1"],
    ),
    "two steps of asynchrony": (["schedule.async_steps=2"], ["schedule.async_steps = 2", "<= 1"]),
    "unknown sharding": (
        ["parallel.sharding=zero3"],
        ["parallel.sharding = zero3", "ddp | hsdp | fsdp"],
    ),
    "unknown std": (
        ["algorithm.advantage.std=mad"],
        ["algorithm.advantage.std = mad", "group | batch | none"],
    ),
    "unknown dtype": (
        ["sampling.storage_dtype=fp16"],
        ["sampling.storage_dtype = fp16", "bfloat16"],
    ),
    "no trainers": (["allocation.trainers=0"], ["allocation.trainers = 0", ">= 1 or auto"]),
    "unknown word for a number": (
        ["schedule.tsp.batch=most"],
        ["schedule.tsp.batch = most", "auto"],
    ),
    "share that is no number": (
        ["schedule.shares=[nan,1]"],
        ["schedule.shares", "holds nan", "not finite"],
    ),
    "no share": (
        ["schedule.shares=[]"],
        ["schedule.shares = []", "0 items", "equal or measured or list"],
    ),
    "shares in a word": (
        ["schedule.shares=fast"],
        ["schedule.shares = fast", "is text", "equal or measured or list"],
    ),
    "negative fragment": (["schedule.gap=-1"], ["schedule.gap = -1", "is too small"]),
    "flag for a fragment": (["schedule.gap=true"], ["schedule.gap = true", "is true/false"]),
    "half a step in a forward": (
        ["schedule.tsp.batch=1.5"],
        ["schedule.tsp.batch = 1.5", "not a whole number"],
    ),
    "no step in a forward": (
        ["schedule.tsp.batch=0"],
        ["schedule.tsp.batch = 0", "is too small", "auto or all"],
    ),
    "word for a flag": (["schedule.tag=yes"], ["schedule.tag = yes", "is text", "true or false"]),
    "number for lending": (["schedule.tag=1"], ["schedule.tag = 1", "true or false"]),
    "unknown claims": (["schedule.claims=static"], ["schedule.claims = static", "shared | split"]),
    "stale fraction that is no number": (
        ["schedule.stale_fraction=nan"],
        ["schedule.stale_fraction", "not finite"],
    ),
    "rollouts below none": (
        ["allocation.rollouts=-1"],
        ["allocation.rollouts = -1", ">= 0 or auto"],
    ),
    "fewer rollouts at most than at least": (
        ["allocation.rollouts={min:4,max:2}"],
        ["allocation.rollouts = {", "has min 4 above max 2: lower min, or raise max"],
    ),
    "rollouts at least, and no most": (
        ["allocation.rollouts={min:2}"],
        ["names not both, expected {min: m, max: n}"],
    ),
    "lost rollouts below none": (
        ["allocation.max_lost_rollouts=-1"],
        ["allocation.max_lost_rollouts = -1", ">= 0"],
    ),
    "restarts below none": (
        ["allocation.max_restarts=-1"],
        ["allocation.max_restarts = -1", "whole number >= 0"],
    ),
    "removed value": (
        ["data.zero_variance_groups=refill"],
        ["data.zero_variance_groups = refill: was removed", "no experiment used it"],
    ),
    "unknown launcher": (["launch=slurm"], ["launch = slurm", "local | ray"]),
    "a line to one pool": (
        ["+hardware.links={wan:{between:[local],gb_s:1.0}}"],
        ["hardware.links.wan.between = ['local']", "[pool, pool]"],
    ),
    "a line without a speed": (
        ["+hardware.links={wan:{between:[local,far]}}"],
        ["hardware.links.wan.gb_s: missing", "number > 0"],
    ),
    "no time scale": (["hardware.time_scale=0"], ["hardware.time_scale = 0", "number > 0"]),
    "negative share": (["schedule.shares=[1,-1]"], ["schedule.shares", "holds -1", "too small"]),
    "name that leads elsewhere": (
        ["experiment_name=../../x"],
        ["experiment_name = ../../x", "not of that form"],
    ),
    "name of two directories": (
        ["experiment_name=a/b"],
        ["experiment_name = a/b", "name of a directory"],
    ),
    "hidden name": (["experiment_name=.x"], ["experiment_name = .x", "a letter or digit first"]),
    "empty path": (["data.prompts=''"], ["data.prompts", "is empty"]),
}

RELATIONS: dict[str, Case] = {
    "task size does not divide": (
        ["sampling.task_size=5"],
        ["sampling.task_size = 5", "must divide data.group_size = 16", "1, 2, 4, 8, 16"],
    ),
    "updates do not divide": (
        ["experiment=digits_flowgrpo", "algorithm.updates_per_batch=3"],
        [
            "algorithm.updates_per_batch = 3",
            "must divide data.prompts_per_batch = 10",
            "1, 2, 5, 10",
        ],
    ),
    "updates that do not share a group": (
        ["data.updates_split=samples", "algorithm.updates_per_batch=3"],
        ["algorithm.updates_per_batch = 3", "must divide data.group_size = 16", "1, 2, 4, 8, 16"],
    ),
    "a task of two updates": (
        ["data.updates_split=samples", "algorithm.updates_per_batch=4", "sampling.task_size=8"],
        [
            "sampling.task_size = 8",
            "no task may have samples of two updates",
            "allowed: auto, 1, 2, 4",
        ],
    ),
    "batch-wide statistics with GAP": (
        ["schedule=gap", "algorithm.advantage.std=batch"],
        [
            "algorithm.advantage.std = batch",
            "schedule.gap = 1",
            "set schedule.gap=0 or algorithm.advantage.std=group",
        ],
    ),
    "whole-batch renormalisation with gap": (
        ["schedule=gap", "algorithm/advantage=gdpo"],
        [
            "algorithm.advantage.renormalise = true",
            "schedule.gap = 1",
            "algorithm.advantage.renormalise=false",
        ],
    ),
    "one noise and no other": (
        ["algorithm.sde.noise_level=0", "sampling.same_noise=true"],
        [
            "sampling.same_noise = true",
            "algorithm.sde.noise_level = 0",
            "set sampling.same_noise=false",
        ],
    ),
    "asynchrony without rollout ranks": (
        ["schedule=colocated", "schedule.async_steps=1"],
        ["schedule.async_steps = 1", "allocation.rollouts = 0", "set allocation.rollouts"],
    ),
    "shares of another length": (
        ["schedule.shares=[3,1,1]", "allocation.trainers=2"],
        ["schedule.shares = [3, 1, 1]", "3 entries", "allocation.trainers = 2"],
    ),
    "shares without any": (["schedule.shares=[0,0]"], ["schedule.shares = [0, 0]", "at least one"]),
    "sharding with one trainer": (
        ["parallel.sharding=fsdp", "allocation.trainers=1"],
        ["parallel.sharding = fsdp", "allocation.trainers = 1", "ddp"],
    ),
    "compressed gradients of shards": (
        ["parallel.compress=0.01", "parallel.sharding=fsdp", "allocation.trainers=2"],
        [
            "parallel.compress = 0.01 with parallel.sharding = fsdp",
            "only replicas",
            "set parallel.sharding=ddp, or parallel.compress=off",
        ],
    ),
    "compressed gradients of one trainer": (
        ["parallel.compress=auto", "allocation.trainers=1"],
        ["parallel.compress = auto with allocation.trainers = 1", "nobody to exchange", "=off or"],
    ),
    "compressed gradients that are more bytes": (
        ["parallel.compress=0.25", "allocation.trainers=4"],
        ["parallel.compress = 0.25 with allocation.trainers = 4", "below 0.25, or to off"],
    ),
    "a share of all values": (
        ["parallel.compress=1", "allocation.trainers=2"],
        ["parallel.compress = 1", "off or auto or number > 0 and < 1"],
    ),
    "more ranks than devices": (
        ["allocation.trainers=4000", "allocation.rollouts=1"],
        ["allocation.trainers = 4000", "4001 ranks", "hardware profile has"],
    ),
    "at most more rollouts than devices": (
        ["allocation.rollouts={min:1,max:4000}"],
        ["allocation.rollouts = 4000", "hardware profile has"],
    ),
    "a span of rollouts whose parts are fixed": (
        ["allocation.rollouts={min:1,max:2}", "schedule.claims=split", "schedule.tag=false"],
        ["none can join or leave; set schedule.claims=shared, or allocation.rollouts to a number"],
    ),
    "more prompts than the file has": (
        ["experiment=digits_flowgrpo", "data.prompts_per_batch=20"],
        ["data.prompts_per_batch = 20", "holds 10 different prompts", "1 .. 10"],
    ),
    "more groups than the file has prompts": (
        ["experiment=digits_flowgrpo", "data.oversample=1"],
        [
            "data.prompts_per_batch = 10 with data.oversample = 1",
            "holds 10 different prompts",
            "1 .. 10 in all",
        ],
    ),
    "oversampling that updates do not share": (
        ["data.prompts_per_batch=4", "algorithm.updates_per_batch=2", "data.oversample=3"],
        ["data.oversample = 3", "algorithm.updates_per_batch = 2", "0, 2, 4"],
    ),
    "ports that end before they begin": (
        ["network.ports=[29700,29600]"],
        ["network.ports", "[29700, 29600] begins after its end, expected [first, last]"],
    ),
    "equal parts and lending": (
        ["schedule.claims=split", "schedule.tag=true"],
        [
            "schedule.claims = split",
            "schedule.tag = true",
            "set schedule.claims=shared or schedule.tag=false",
        ],
    ),
    "equal parts and lost ranks": (
        ["schedule.claims=split", "allocation.max_lost_rollouts=1"],
        [
            "allocation.max_lost_rollouts = 1",
            "schedule.claims = split",
            "set schedule.claims=shared",
        ],
    ),
    "checkpointing of another number of trainers": (
        ["+model.gradient_checkpointing=[true,false,true]", "allocation.trainers=2"],
        [
            "model.gradient_checkpointing = [True, False, True]",
            "3 entries",
            "allocation.trainers = 2",
        ],
    ),
    "shard group that does not divide": (
        ["parallel.sharding=hsdp", "parallel.shard_group=2", "allocation.trainers=3"],
        ["parallel.shard_group = 2", "must divide allocation.trainers = 3", "1, 3, or auto"],
    ),
    "shard group without hsdp": (
        ["parallel.shard_group=2", "parallel.sharding=ddp"],
        ["parallel.shard_group = 2", "parallel.sharding = ddp", "set parallel.sharding=hsdp"],
    ),
}

TARGETS: dict[str, Case] = {
    "os": (
        ["model._target_=os.system"],
        ["model._target_ = os.system", "refused", "allow_targets=[os]"],
    ),
    "torch.load": (
        ["model._target_=torch.load"],
        ["model._target_ = torch.load", "refused", "allow_targets=[torch]"],
    ),
    "prefix that only looks allowed": (
        ["model._target_=digenrl_evil.Model"],
        ["digenrl_evil.Model", "refused"],
    ),
    "nested": (
        ["+reward.rewards.judge_a.scorer.inner={_target_:subprocess.run}"],
        ["reward.rewards.judge_a.scorer.inner._target_ = subprocess.run", "refused"],
    ),
    "inside a list": (
        ["callbacks.evaluation.statistics=[{_target_:builtins.eval}]"],
        ["callbacks.evaluation.statistics[0]._target_ = builtins.eval", "refused"],
    ),
    "alias through an own module": (
        ["model._target_=digenrl.config.targets.ast.parse"],
        ["digenrl.config.targets.ast.parse: refused", "no file of the shipped configs/ names it"],
    ),
    "private helper": (
        ["model._target_=lightning.fabric.utilities.cloud_io._load"],
        ["_load", "refused"],
    ),
    "misspelt class": (
        ["model._target_=digenrl.extensions.tasks.digits.DigitPolicy"],
        ["DigitPolicy: refused", "nearest: digenrl.extensions.tasks.digits.DigitsPolicy"],
    ),
    "misspelt module": (
        ["model._target_=digenrl.extensions.tasks.digts.DigitsPolicy"],
        ["digts.DigitsPolicy: refused", "nearest: digenrl.extensions.tasks.digits.DigitsPolicy"],
    ),
    "no text": (["model._target_=3"], ["model._target_ = 3", "dotted name"]),
}

PROFILES: dict[str, Case] = {
    "unknown role": (
        ["hardware.pools.local.role=both"],
        ["hardware.pools.local.role = both", "auto | trainer | rollout"],
    ),
    "count in words": (
        ["hardware.pools.local.count=two"],
        ["hardware.pools.local.count = two", "is text", "whole number >= 1"],
    ),
    "no GPUs": (
        ["hardware.pools.local.count=0"],
        ["hardware.pools.local.count = 0", "is too small", ">= 1"],
    ),
    "unnamed GPU": (
        ["hardware.pools.local.gpu=null"],
        ["hardware.pools.local.gpu = null", "name of the GPU, or cpu"],
    ),
    "no node": (["hardware.pools.local.per_node=0"], ["hardware.pools.local.per_node = 0", ">= 1"]),
    "empty pool": (
        ["hardware.pools.local=null"],
        ["hardware.pools.local = null", "must hold the keys count, efficiency, gpu", "tflops"],
    ),
    "no pools": (
        ["~hardware.pools.local"],
        ["hardware.pools = {}", "must hold groups by name"],
    ),
    "pools in words": (
        ["hardware.pools=none"],
        ["hardware.pools = none", "must hold groups by name"],
    ),
    "missing figure": (
        ["~hardware.pools.local.tflops"],
        ["hardware.pools.local.tflops: missing", "number > 0", "data sheet"],
    ),
    "figure in words": (
        ["hardware.pools.local.tflops=many"],
        ["hardware.pools.local.tflops = many", "number > 0"],
    ),
    "misspelt figure": (
        ["+hardware.pools.local.tflop=1"],
        ["hardware.pools.local.tflop = 1", "nearest: hardware.pools.local.tflops"],
    ),
    "unknown factor": (
        ["+hardware.efficiency.generat=1.0"],
        ["hardware.efficiency.generat = 1.0", "nearest: hardware.efficiency.generate"],
    ),
    "a key that nothing sets": (
        ["hardware.efficiency.train=0.4"],
        ["hardware.efficiency.train = 0.4", "+hardware."],
    ),
    "unknown grade of the blocks": (
        ["model.gradient_checkpointing={outputs:1}"],
        ["model.gradient_checkpointing", "names outputs", "products|attention|inputs"],
    ),
    "shares of the blocks beyond all": (
        ["model.gradient_checkpointing={products:0.7,inputs:0.7}"],
        ["model.gradient_checkpointing", "sums to more than 1"],
    ),
}

TABLE = {**NAMES, **KEYS, **VALUES, **RELATIONS, **PROFILES, **TARGETS}


def problems_of(*words: str) -> tuple[str, ...]:
    with pytest.raises(config.ConfigError) as caught:
        config.load(words)
    return caught.value.problems


def test_the_default_is_accepted() -> None:
    assert config.load([]).settings.experiment_name == "scenes_flowgrpo"


def test_the_group_of_a_key_is_not_what_was_meant() -> None:
    (problem,) = problems_of("sampling.samplings=3")
    assert not problem.endswith("nearest: sampling.")


@pytest.mark.parametrize("case", TABLE.values(), ids=TABLE.keys())
def test_message(case: Case) -> None:
    words, expected = case
    problems = problems_of(*words)
    matching = [text for text in problems if all(part in text for part in expected)]
    assert matching, f"no message with {expected} in {problems}"


SETTLED: dict[str, Case] = {
    "shares with as many trainers as the profile gives": (
        ["schedule.shares=[3,1]"],
        ["schedule.shares = [3, 1]", "2 entries for allocation.trainers = 1"],
    ),
    "sharding with as many trainers as the profile gives": (
        ["parallel.sharding=fsdp"],
        ["parallel.sharding = fsdp", "allocation.trainers = 1", "allocation.trainers to 2 or more"],
    ),
    "pools without a rollout": (
        ["hardware.pools.local.role=trainer"],
        ["allocation.rollouts = 1", "0 devices that may be rollouts"],
    ),
    "trained steps beyond the trajectory": (
        ["algorithm/train_steps=random_subset", "algorithm.train_steps.size=9"],
        [
            "algorithm.train_steps = {",
            "train_steps.size=9 does not fit the pool of 5 steps",
            "of sampling.steps=6",
        ],
    ),
}


@pytest.mark.parametrize("case", SETTLED.values(), ids=SETTLED.keys())
def test_message_before_ranks_start(case: Case) -> None:
    """What only shows when `auto` has become numbers, and what the hardware profile lacks."""
    check_settled(*case)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("+reward.rewards.judge_z={weight: 1.0}", "`judge_z` has no `scorer`"),
        (
            "+reward.rewards.judge_a.wieght=2",
            "unknown key `wieght`; known: scorer, weight, placement",
        ),
    ],
)
def test_entries_of_a_reward(word: str, said: str) -> None:
    assert said in " ".join(problems_of("experiment=digits_flowgrpo", word))


@pytest.mark.skipif(not installed("methods"), reason="needs the extension")
def test_a_window_beyond_the_trajectory_is_refused() -> None:
    words = ("algorithm/train_steps=random_window", "algorithm.train_steps.stop=6")
    outside = "[0, 6) lies outside the usable steps [0, 5) of sampling.steps=6"
    check_settled(words, (outside, "lower train_steps.stop"))


def check_settled(words: Sequence[str], expected: Sequence[str]) -> None:
    def prepare() -> None:
        composed = config.load(words)
        with_allocation(composed, *allocated_ranks(composed.settings), PlainAdvisor())

    with pytest.raises(ValueError, match=r"^[a-z]") as caught:
        prepare()
    assert all(part in str(caught.value) for part in expected), caught.value


def test_a_profile_is_explained_all_at_once() -> None:
    words = [
        "hardware.pools.a={gpu:X9,count:0,role:boss,memory_gib:1}",
        "+hardware.pools.b={gpu:Y}",
    ]
    text = " ".join(problems_of("hardware=l40x32", *words, "+hardware.efficiency.speed=1.0"))
    for part in (
        "pools.a.count = 0",
        "pools.a.role = boss",
        "pools.b.tflops: missing",
        "efficiency.speed",
    ):
        assert part in text


def test_all_errors_at_once() -> None:
    words = [
        f"{word}"
        for case in (NAMES["unknown data"], KEYS["misspelt leaf"], VALUES["nan"])
        for word in case[0]
    ]
    text = " ".join(
        problems_of(
            *words, "model._target_=os.system", "data.prompts=/no/such.txt", "sampling.task_size=5"
        )
    )
    for part in (
        "data = sign",
        "data.group_siz",
        "is not finite",
        "os.system",
        "/no/such.txt",
        "must divide",
    ):
        assert part in text


def test_each_problem_is_said_once() -> None:
    problems = problems_of("seed=-1", "sampling.height=${nope}")
    assert (
        len(problems) == len(set(problems)) == 3
    )  # seed, sampling.height, and model.height that refers to it


PROMPT_FILES: dict[str, tuple[str, bytes, Sequence[str]]] = {
    "empty": ("p.txt", b"", ["p.txt", "holds no prompt"]),
    "blank lines only": ("p.txt", b"\n \r\n\t\n", ["p.txt", "holds no prompt"]),
    "malformed JSON": (
        "p.jsonl",
        b'{"prompt": "a"}\n{"prompt": \n',
        ["p.jsonl:2", "not valid JSON at column"],
    ),
    "no object": ("p.jsonl", b'["a"]\n', ["p.jsonl:1", "must be an object", "list"]),
    "no prompt field": (
        "p.jsonl",
        b'{"text": "a"}\n',
        ["p.jsonl:1", '"prompt" is missing', "text"],
    ),
    "prompt is no text": ("p.jsonl", b'{"prompt": 3}\n', ["p.jsonl:1", "prompt = 3 must be text"]),
    "empty prompt": ("p.jsonl", b'{"prompt": " "}\n', ["p.jsonl:1", "prompt is empty"]),
    "target is no text": (
        "p.jsonl",
        b'{"prompt": "a", "target": 1}\n',
        ["p.jsonl:1", "target = 1 must be text"],
    ),
    "NaN": ("p.jsonl", b'{"prompt": "a", "w": NaN}\n', ["p.jsonl:1", "NaN is no JSON number"]),
    "number out of range": ("p.jsonl", b'{"prompt": "a", "w": 1e999}\n', ["p.jsonl:1", "1e999"]),
    "NUL": ("p.txt", b"fine\nbro\0ken\n", ["p.txt:2", "NUL"]),
    "not UTF-8": ("p.txt", b"fine\n\xff\xfe\n", ["p.txt:2", "not UTF-8", "byte 1"]),
    "half a surrogate": ("p.jsonl", b'{"prompt": "\\ud800"}\n', ["p.jsonl:1", "surrogate"]),
    "very long line": ("p.txt", b"x" * 20_000, ["p.txt:1", "20000 characters", "at most 10000"]),
    "huge line": ("p.txt", b"x" * (2 << 20), ["p.txt:1", "bytes", "at most"]),
    "unknown kind": ("p.csv", b"a\n", ["p.csv", "unknown kind '.csv'", ".jsonl"]),
}


@pytest.mark.parametrize("case", PROMPT_FILES.values(), ids=PROMPT_FILES.keys())
def test_prompt_file(case: tuple[str, bytes, Sequence[str]], tmp_path: Path) -> None:
    """Once as training and once as held-out file: both are named, with the same cause."""
    name, content, expected = case
    (tmp_path / name).write_bytes(content)
    problems = problems_of(f"data.prompts={tmp_path / name}", f"data.heldout={tmp_path / name}")
    for key in ("data.prompts", "data.heldout"):
        assert any(
            text.startswith(key) and all(part in text for part in expected) for text in problems
        ), problems


def test_missing_prompt_file_names_where_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (text,) = problems_of("data.prompts=sign.jsonl")
    assert str(tmp_path) in text
    assert "signs.jsonl" in text


def test_several_prompt_files() -> None:
    entry = "{file: signs.jsonl, weight: 1}"
    for files, expected in {
        "[]": "has 0 items",
        "[{file: signs.jsonl}]": "expected {file: path, weight: number}",
        "[{file: signs.jsonl, weight: 0}]": (
            "gives signs.jsonl the weight 0, expected a number above 0"
        ),
        f"[{entry}, {{file: scenes.txt, weight: -1}}]": (
            "gives scenes.txt the weight -1, expected a number above 0"
        ),
        f"[{entry}, {{file: sign.jsonl, weight: 1}}]": (
            "data.prompts: sign.jsonl: no such prompt file"
        ),
        f"[{entry}, {entry}]": "names a file twice",
        "[{file: digits.jsonl, weight: 9}, {file: scenes.txt, weight: 1}]": "digits.jsonl holds 10 different prompts "
        "and a batch needs distinct ones, 18 of them by its weight 9 of 10; allowed: 1 .. 11.",
    }.items():
        problems = problems_of(
            "data.heldout=signs.jsonl", "data.prompts_per_batch=20", f"data.prompts={files}"
        )
        assert any(text.startswith("data.prompts") and expected in text for text in problems), (
            files,
            problems,
        )


def test_directory_as_prompt_file(tmp_path: Path) -> None:
    assert any("not a regular file" in text for text in problems_of(f"data.prompts={tmp_path}"))


def test_unwritable_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    (text,) = problems_of(f"output_root={tmp_path / 'file'}")
    assert str(tmp_path / "file") in text
    assert "is no directory; set output_root=" in text
    # whoever runs the tests as root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK | os.X_OK)
    (text,) = problems_of(f"output_root={tmp_path}")
    assert f"because {tmp_path} is no writable directory; set output_root=" in text


def test_secrets_are_refused_and_never_shown(capsys: pytest.CaptureFixture[str]) -> None:
    canary = "canary-0123456789abcdef"
    words = [
        "logger=wandb",
        f"+logger.wandb.api_key={canary}",
        f"+reward.token={canary}",
        f"wandb_password={canary}",
    ]
    with pytest.raises(SystemExit) as caught:
        config.load_or_exit([*words, f"resum_token={canary}", f"+data.password=[{canary}"])
    printed = capsys.readouterr()
    assert caught.value.code == 2
    assert canary not in printed.err + printed.out
    assert f"logger.wandb.api_key = {MASK}" in printed.err
    assert "WANDB_API_KEY" in printed.err


def test_exit_code_two_without_traceback_and_nothing_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        config.load_or_exit(["seed=-1", "data.group_siz=3"])
    printed = capsys.readouterr()
    assert caught.value.code == 2
    assert printed.err.startswith(
        "2 errors in the configuration; nothing was started or written:\n  - "
    )
    assert "Traceback" not in printed.err
    assert printed.out == ""
    assert list(tmp_path.iterdir()) == []


def test_an_experiment_name_that_holds_a_secret_is_refused_unshown() -> None:
    with pytest.raises(
        config.ConfigError, match=r"experiment_name = .*names directories and reports"
    ) as caught:
        config.load(["experiment_name=run_hf_canaryABCDEFGHIJKLMNOP"])
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("experiment_name=20261128", "\"experiment_name='20261128'\""),
        ("experiment_name=2026.5", "\"experiment_name='2026.5'\""),
        ("experiment_name=true", "\"experiment_name='true'\""),
        ("model.path=17", "\"model.path='17'\""),
        ("output_root=3", "\"output_root='3'\""),
    ],
)
def test_a_number_in_the_place_of_a_text_is_told_how_to_be_one(word: str, remedy: str) -> None:
    with pytest.raises(config.ConfigError) as caught:
        config.load([word])
    assert f"Write {remedy} if you mean the text" in str(caught.value)
    (given,) = shlex.split(remedy)
    config.load([given])


@pytest.mark.parametrize("key", ["callbacks.evaluation", "callbacks.checkpoint"])
def test_a_callback_that_is_null_is_told_how_to_be_left_out(key: str) -> None:
    with pytest.raises(config.ConfigError, match=rf"Write ~{re.escape(key)} to leave it out"):
        config.load([f"{key}=null"])
    config.load([f"~{key}"])
