"""Keys, values and names of classes that configurations once had."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import yaml

# Keys of one removed feature share a reason.
_THIN_LINES = ("network.delta", "network.whole_every", "network.thin_mb_s")
_RECORDS = ("record.trajectories", "record.trajectories_mib", "replay")
REMOVED: dict[str, str] = {
    "callbacks.evaluation.heldout_reward": "the first reward of `heldout` counts; name it first",
    "handshake": "its limits suit every run: 10 s to prove oneself, 60 s to be answered",
    "record.logger_finish_s": "30 s are enough for a logger that works",
    "record.logger_pending": "a logger that is 1000 calls behind does not catch up",
    "data.zero_variance_groups=refill": (
        "no experiment used it; drop with the same data.oversample has its gradient"
    ),
    "model.compile=graphs": "torch.compile has a mode for CUDA graphs; set model.compile=true",
    **dict.fromkeys(
        _THIN_LINES, "network.compress=auto finds slow lines and sends differences by itself"
    ),
    "hardware.emulate_misfits": "set the pools' memory_gib to what their ranks need",
    "parallel.rollout_context": (
        "each rollout generates alone; set sampling.task_size=1 where memory is short"
    ),
    **dict.fromkeys(
        _RECORDS,
        "samples of old weights teach the new ones little; start a new run",
    ),
    "reward.cache_size": "samples of a run differ, so that hardly a score was found again",
    "reward.max_batch": "each task is scored alone, so that no score depends on its neighbours",
    "reward.rewards.*.scorer.quarantine": "events.jsonl has the causes of missing scores",
    "sampling.lossy": "no velocity is forecast; a second-order solver saves as many forwards",
    "sampling.lossy=taylorseer": (
        "a second-order solver with fewer steps saves as much at less cost; start a new run"
    ),
    "schedule.gradients": "trainers compute every trained step again, as replay did",
    "schedule.gradients=generation": "trainers compute every trained step again",
    "schedule.handoff": "rollouts that leave give tasks away; else moving them gained nothing",
    "schedule.order": "fragments are trained in the order of their groups",
}
"""Dotted key (also a group of keys; `*` is any name), or `key=value`, -> its replacement, or the
reason for its removal.

A stored run is resumed without these keys, whatever their values. A value that changed what is
computed is therefore listed as `key=value` with a reason of its own, and refused.
"""

_MOVED: dict[str, str] = yaml.safe_load(
    Path(__file__).with_name("moved.yaml").read_text(encoding="utf-8")
)


def present_name(target: str) -> str:
    """Return where the class is now that an older configuration calls `target`.

    Example:
        >>> present_name("digenrl.extensions.rewards.remote.RemoteScorer")
        'digenrl.rewards.remote.RemoteScorer'
        >>> present_name("torch.optim.AdamW")
        'torch.optim.AdamW'
    """
    module, _, name = target.rpartition(".")
    # A class that moved by itself wins over the move of its module.
    return _MOVED.get(target) or (f"{_MOVED[module]}.{name}" if module in _MOVED else target)


def removal_reason(key: str, value: object = None) -> str | None:
    """Return why `key`, a group around it, or this value of it was removed; None: it was not."""
    parts = key.split(".")
    # The most specific name first: key=value, the key, each group around it.
    names = (f"{key}={value}", *(".".join(parts[:count]) for count in range(len(parts), 0, -1)))
    return next(
        (its for name in names for old, its in REMOVED.items() if fnmatchcase(name, old)), None
    )
