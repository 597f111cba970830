"""Keys and values that configurations once had, each with the reason for its removal."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

_THIN_LINES = ("network.delta", "network.compress", "network.whole_every", "network.thin_mb_s")
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
        _THIN_LINES, "all bytes travel; behind a slow line, run rollouts beside the trainers"
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
    "schedule.gradients": "trainers compute every trained step again, as replay did",
    "schedule.gradients=generation": "trainers compute every trained step again",
    "schedule.handoff": "rollouts that leave give tasks away; else moving them gained nothing",
    "schedule.order": "fragments are trained in the order of their groups",
}
"""Dotted key (also a group of keys; `*` is any name), or `key=value`, -> its replacement, or the
reason for its removal.

A stored run goes on without these keys, whatever they hold. A value that decided about more than
time and records is therefore listed as `key=value` with a reason of its own, and refused.
"""

_METHODS, _FORWARD = "digenrl.extensions.methods", "digenrl.extensions.forward"
_ZOO = "digenrl.extensions.zoo"
MOVED = {
    "digenrl.algorithms.surrogates.FlowDPPO": f"{_METHODS}.surrogates.FlowDPPO",
    "digenrl.algorithms.surrogates.Guard": f"{_METHODS}.surrogates.Guard",
    "digenrl.diffusion.sde.DanceSDE": f"{_METHODS}.sde.DanceSDE",
    "digenrl.diffusion.sde.FlowCPS": f"{_METHODS}.sde.FlowCPS",
    "digenrl.diffusion.sde.LinearSDE": f"{_METHODS}.sde.LinearSDE",
    "digenrl.diffusion.steps.FirstFraction": f"{_METHODS}.steps.FirstFraction",
    "digenrl.diffusion.steps.NoiseLevels": f"{_FORWARD}.steps.NoiseLevels",
    "digenrl.diffusion.steps.Window": f"{_METHODS}.steps.Window",
    "digenrl.models.flux.FluxPolicy": f"{_ZOO}.flux.FluxPolicy",
    "digenrl.models.sd3.SD3Policy": f"{_ZOO}.sd3.SD3Policy",
    "digenrl.models.wan.WanPolicy": f"{_ZOO}.wan.WanPolicy",
}
"""`_target_` of a stored run -> where the class is now."""


def reason(key: str, value: Any = None) -> str | None:
    """Return why `key`, a group around it, or this value of it was removed; None: it was not."""
    parts = key.split(".")
    names = (f"{key}={value}", *(".".join(parts[:count]) for count in range(len(parts), 0, -1)))
    return next(
        (its for name in names for old, its in REMOVED.items() if fnmatchcase(name, old)), None
    )
