"""The configuration of a run that replays: the stored one of the run with the record, and the keys
in which the two may differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from digenrl.config.compose import compose_words, merge_words, quoted
from digenrl.config.schema import RESUMABLE
from digenrl.config.stored import changes

REPLAYABLE: tuple[str, ...] = (
    *(key for key in RESUMABLE if key not in ("sampling.task_size", "reward.placement")),
    "experiment_name",
    "output_root",
    "resume",
    "replay",
    "strategy",
    "trainer",
    "parallel",
    "data.zero_variance_groups",
    "data.updates_split",
    "sampling.eval",
    "model.keep_reference",
    "reward.heldout",
    "reward.placement",
    "reward.rewards.*.weight",
    "algorithm._target_",
    "algorithm.surrogate",
    "algorithm.clip_range",
    "algorithm.kl_weight",
    "algorithm.kl_kind",
    "algorithm.step_weight",
    "algorithm.detach_uncond",
    "algorithm.ratio_bound",
    "algorithm.advantage",
    "algorithm.optimizer",
    "algorithm.updates_per_batch",
    "algorithm.max_grad_norm",
    "algorithm.ema",
)
"""Keys and groups in which a replay may differ from the run that it replays. These keys decide what
happens to a finished sample. Every other key decided about the samples themselves (`*` stands for
any name)."""


def turn_into_replay(
    tree: DictConfig, replayed: Path, words: Sequence[str], config_name: str
) -> list[str]:
    """Change the stored configuration of `replayed` into that of a run that replays it. Return
    what is wrong with the words."""
    own = {"allocation.rollouts": 0, "record.trajectories": False, "replay": str(replayed)}
    for key, value in own.items():
        OmegaConf.update(tree, key, value)
    of_hydra = [word for word in words if word.startswith("hydra.")]
    others = [word for word in words if not word.startswith("hydra.")]
    found = merge_words(tree, others, config_name, groups=True)
    named = [f"{key}={quoted(str(tree[key]))}" for key in ("experiment_name", "output_root")]
    return [*found, *compose_words([*named, *of_hydra], config_name)[1]]


def changes_of_replay(stored: Mapping[str, Any], tree: Mapping[str, Any]) -> list[str]:
    """Return a message about the keys that a replay has changed and may not, or nothing."""
    because = "the record holds what was sampled with the stored value"
    return changes(stored, tree, REPLAYABLE, because)


def replay_problems(get: Callable[[str], Any]) -> Iterator[str]:
    """Yield what contradicts `replay` among the other keys."""
    if get("replay") is None:
        return
    if rollouts := get("allocation.rollouts"):
        yield (
            f"allocation.rollouts = {rollouts} with replay: nothing is generated; set "
            "allocation.rollouts=0."
        )
    if get("record.trajectories"):
        yield (
            "record.trajectories = true with replay: what it trains is recorded already; leave it "
            "false."
        )
