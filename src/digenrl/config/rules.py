"""What each key may hold, as a table: to add a key, add a line to `KEYS`.

A rule says in one phrase what is allowed (`describe`) and what is wrong with a value (`problem`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol


class Rule(Protocol):
    """What one key may hold."""

    def describe(self) -> str:
        """The allowed values in a phrase, e.g. "whole number >= 1"."""

    def problem(self, value: Any) -> str | None:
        """What is wrong with `value`, or None."""


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true/false"
    if isinstance(value, str):
        return "text"
    if isinstance(value, dict):
        return "a group of keys"
    if isinstance(value, list):
        return "a list"
    return "a whole number" if isinstance(value, int) else "a number"


@dataclass(frozen=True)
class Number:
    """A finite number (or a whole one), within limits; `words` are accepted besides."""

    low: float | None = None
    high: float | None = None
    whole: bool = False
    above: bool = False
    """low itself is excluded."""
    below: bool = False
    """high itself is excluded."""
    words: tuple[str, ...] = ()
    null: bool = False

    def describe(self) -> str:
        phrase = "whole number" if self.whole else "number"
        if self.low is not None:
            phrase += f" {'>' if self.above else '>='} {self.low}"
        if self.high is not None:
            phrase += f"{' and' if self.low is not None else ''} {'<' if self.below else '<='} {self.high}"
        return " or ".join([phrase, *self.words, *(["null"] if self.null else [])])

    def problem(self, value: Any) -> str | None:
        if (value is None and self.null) or (isinstance(value, str) and value in self.words):
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return f"is {_kind(value)}"
        if not math.isfinite(value):
            return "is not finite"
        if self.whole and not isinstance(value, int):
            return "is not a whole number"
        if self.low is not None and (value < self.low or (self.above and value == self.low)):
            return "is too small"
        if self.high is not None and (value > self.high or (self.below and value == self.high)):
            return "is too large"
        return None


@dataclass(frozen=True)
class Flag:
    """true or false."""

    null: bool = False

    def describe(self) -> str:
        return "true or false" + (" or null" if self.null else "")

    def problem(self, value: Any) -> str | None:
        return None if isinstance(value, bool) or (value is None and self.null) else f"is {_kind(value)}"


@dataclass(frozen=True)
class Choice:
    """One of a few words."""

    words: tuple[str, ...]
    null: bool = False

    def describe(self) -> str:
        return " | ".join([*self.words, *(["null"] if self.null else [])])

    def problem(self, value: Any) -> str | None:
        if value is None and self.null:
            return None
        if not isinstance(value, str):
            return f"is {_kind(value)}"
        return None if value in self.words else "is none of the choices"


@dataclass(frozen=True)
class Text:
    """Non-empty text, such as a path."""

    what: str = "text"
    null: bool = False

    def describe(self) -> str:
        return self.what + (" or null" if self.null else "")

    def problem(self, value: Any) -> str | None:
        if value is None and self.null:
            return None
        if not isinstance(value, str):
            return f"is {_kind(value)}"
        return None if value.strip() else "is empty"


@dataclass(frozen=True)
class ListOf:
    """A list whose items obey one rule; `words` are accepted in its place."""

    item: Rule
    words: tuple[str, ...] = ()
    least: int = 0

    def describe(self) -> str:
        return " or ".join([*self.words, f"list of ({self.item.describe()})"])

    def problem(self, value: Any) -> str | None:
        if isinstance(value, str) and value in self.words:
            return None
        if not isinstance(value, list):
            return f"is {_kind(value)}"
        if len(value) < self.least:
            return f"has {len(value)} items"
        for item in value:
            if (wrong := self.item.problem(item)) is not None:
                return f"holds {item!r}, which {wrong}"
        return None


@dataclass(frozen=True)
class AnyOf:
    """Whatever one of several rules accepts; the first rule's complaint is reported."""

    rules: tuple[Rule, ...]

    def describe(self) -> str:
        return " or ".join(rule.describe() for rule in self.rules)

    def problem(self, value: Any) -> str | None:
        complaints = [rule.problem(value) for rule in self.rules]
        return None if None in complaints else complaints[0]


@dataclass(frozen=True)
class Shares:
    """A mapping of what blocks keep for the backward pass to the share of blocks that do (`digenrl.recompute`)."""

    names: tuple[str, ...] = ("products", "attention", "inputs")

    def describe(self) -> str:
        return f"{{{'|'.join(self.names)}: share of the blocks}}"

    def problem(self, value: Any) -> str | None:
        if not isinstance(value, dict):
            return f"is {_kind(value)}"
        if unknown := sorted(set(value) - set(self.names)):
            return f"names {', '.join(unknown)}"
        for share in value.values():
            if (wrong := Number(0, 1).problem(share)) is not None:
                return f"holds {share!r}, which {wrong}"
        return None if sum(value.values()) <= 1.0 + 1e-9 else "sums to more than 1"


@dataclass(frozen=True)
class Component:
    """A node with `_target_` that each rank completes by arguments of its own."""

    def describe(self) -> str:
        return "a group of keys with _target_ and _partial_=true"

    def problem(self, value: Any) -> str | None:
        if not isinstance(value, dict):
            return f"is {_kind(value)}"
        if "_target_" not in value:
            return "has no _target_"
        return None if value.get("_partial_") is True else "lacks _partial_=true"


def _whole(low: int, high: int | None = None, *words: str, null: bool = False) -> Number:
    return Number(low, high, whole=True, words=words, null=null)


_NOT_NEGATIVE = Number(0)
_POSITIVE = Number(0, above=True)
_KEPT: tuple[Rule, ...] = (Flag(), Number(0, 1, words=("auto", "products", "attention")), Shares())
KEYS: dict[str, Rule] = {
    "experiment_name": Text("name of the run's directory"),
    "seed": _whole(0, 2**63 - 1),
    "max_rl_steps": _whole(1),
    "resume": Text("path of a run directory", null=True),
    "output_root": Text("path of a directory"),
    "allow_targets": ListOf(Text("package name")),
    "allocation.trainers": _whole(1, None, "auto"),
    "allocation.rollouts": _whole(0, None, "auto"),
    "allocation.max_lost_rollouts": _whole(0, None, "auto"),
    "parallel.sharding": Choice(("ddp", "hsdp", "fsdp")),
    "parallel.shard_group": _whole(1, None, "auto"),
    "strategy": Component(),
    "data.prompts": Text("path of a .txt or .jsonl prompt file"),
    "data.heldout": Text("path of a .txt or .jsonl prompt file", null=True),
    "data.prompts_per_batch": _whole(1, 65536),
    "data.group_size": _whole(2, 4096),
    "schedule.gap": _whole(0),
    "schedule.claims": Choice(("shared", "split")),
    "schedule.order": Choice(("canonical", "arrival")),
    "schedule.tsp.batch": _whole(1, None, "auto", "all"),
    "schedule.tsp.shard": Flag(),
    "schedule.tag": Flag(),
    "schedule.handoff": Flag(),
    "schedule.shares": ListOf(_NOT_NEGATIVE, words=("equal", "measured"), least=1),
    "schedule.async_steps": _whole(0, 1),
    "schedule.stale_fraction": Number(0, 1),
    "sampling.steps": _whole(1, 1000),
    "sampling.guidance_scale": Number(0, 100, null=True),
    "sampling.height": _whole(1, 8192),
    "sampling.width": _whole(1, 8192),
    "sampling.frames": _whole(1, 1024),
    "sampling.storage_dtype": Choice(("float32", "bfloat16", "float16", "float64")),
    "sampling.task_size": _whole(1, 4096),
    "sampling.same_noise": Flag(),
    "sampling.eval.steps": _whole(1, 1000, null=True),
    "algorithm.clip_range": AnyOf((Number(0, 1, above=True, below=True), ListOf(_NOT_NEGATIVE, least=2))),
    "algorithm.kl_weight": _NOT_NEGATIVE,
    "algorithm.updates_per_batch": _whole(1),
    "algorithm.max_grad_norm": Number(0, above=True, null=True),
    "algorithm.optimizer.lr": _POSITIVE,
    "algorithm.optimizer.weight_decay": _NOT_NEGATIVE,
    "algorithm.sde.noise_level": _NOT_NEGATIVE,
    "algorithm.sde.eta": _NOT_NEGATIVE,
    "algorithm.advantage.std": Choice(("group", "batch", "none", "max_group")),
    "reward.placement": Choice(("inline", "thread", "process", "http")),
    "reward.max_missing_share": Number(0, 1),
    "reward.min_missing_samples": _whole(1),
    "reward.pending": _whole(1),
    "reward.max_batch": _whole(0),
    "reward.cache_size": _whole(0),
    "model.gradient_checkpointing": AnyOf((*_KEPT, ListOf(AnyOf(_KEPT), least=1))),
    "model.lora.rank": _whole(1, 4096),
    "model.lora.alpha": _POSITIVE,
    "hardware.build": Choice(("tiny", "real")),
    "hardware.emulate": Flag(),
    "hardware.time_scale": _POSITIVE,
}
"""Dotted key -> rule. A key below a node with `_target_` (model, algorithm, reward) is checked where it is present."""

REQUIRED: tuple[str, ...] = tuple(
    key
    for key in KEYS
    if key.partition(".")[0] not in ("model", "algorithm", "reward") and key != "sampling.eval.steps"
)
"""Keys that every training configuration holds."""

CLOSED: tuple[str, ...] = ("allocation", "parallel", "data", "schedule", "schedule.tsp", "sampling", "sampling.eval")
"""Nodes that hold the keys of the table and no others."""

DERIVED_TRAINER_KEYS: dict[str, str] = {
    "max_epochs": "set max_rl_steps (one Lightning epoch is one RL step)",
    "max_steps": "set max_rl_steps",
    "accumulate_grad_batches": "it follows from schedule.* and algorithm.updates_per_batch",
    "devices": "set allocation.trainers and allocation.rollouts",
    "num_nodes": "set the hardware profile",
    "strategy": "set parallel.sharding",
    "logger": "set the group logger",
    "callbacks": "set the group callbacks",
    "gradient_clip_val": "set algorithm.max_grad_norm",
    "default_root_dir": "set output_root",
    "fast_dev_run": "set max_rl_steps=1",
    "limit_train_batches": "an RL step is one Lightning epoch, and all of it is trained; set data.prompts_per_batch",
    "overfit_batches": "an RL step is one Lightning epoch, and all of it is trained; set data.prompts_per_batch",
    "max_time": "ranks would stop one by one; set max_rl_steps, or send SIGTERM, and resume",
    "reload_dataloaders_every_n_epochs": "the trajectories of the next RL step may already be here; prompts are data.*",
    "barebones": "reports are made from what it turns off; set logger=none",
}
"""Trainer arguments that the rest of the configuration decides, or that would break an RL step -> what to set in their
place."""
