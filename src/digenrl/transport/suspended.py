"""A trajectory suspended between two denoising steps, sent to the rank that finishes it.

A rollout that leaves suspends its running task.

Only tasks of the step in progress are sent. The next version cannot be published before these tasks
are trained, so the receiver holds the version that they need. Under one-step asynchrony the
receiver may first have to adopt that version; the task waits until then.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from digenrl.diffusion.denoise import SampleKey, SampleState
from digenrl.schedule import Task
from digenrl.schedule.claims import Claim
from digenrl.transport.wire import Message, MessageKind, WireError
from digenrl.types import move_tensors

_KEPT = ("kept_latents", "kept_next_latents", "kept_log_probs", "kept_means")


def pack_state(task: Task, state: SampleState, claim: Claim) -> Message:
    """Return the message with a suspended task."""
    tensors: dict[str, Tensor] = {"latents": state.latents}
    for name in _KEPT:
        kept = getattr(state, name)
        if kept:
            tensors[name] = torch.stack(kept)  # [kept steps, b, ...]
    meta = {
        "task": asdict(task),
        "next_step": state.next_step,
        "seed": state.key.seed,
        "uid": state.key.uid,
    }
    meta |= {"position": claim.position, "attempt": claim.attempt}
    return Message(MessageKind.STATE, meta, tensors)


@dataclass(frozen=True)
class Suspended:
    """A suspended task that was given to this rank and waits here."""

    message: Message
    task: Task
    claim: Claim
    next_step: int
    """Number of denoising steps done."""

    @classmethod
    def from_message(cls, message: Message, rank: int) -> Suspended:
        """Return the suspended task that `rank` received.

        Raises:
            WireError: the message is not a suspended task.
        """
        try:
            meta = message.meta
            task = Task(**{name: int(value) for name, value in meta["task"].items()})
            # The receiver goes on under the sender's attempt.
            claim = Claim(int(meta["position"]), rank, int(meta["attempt"]))
            return cls(message, task, claim, int(meta["next_step"]))
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"a STATE message lacks or garbles {error}.") from error

    def restore_state(self, device: torch.device) -> SampleState:
        """Return the trajectory so far, on `device`.

        Raises:
            WireError: the message is not a suspended task.
        """
        try:
            meta, tensors, task = self.message.meta, self.message.tensors, self.task
            rows = tuple(range(task.first_sample, task.first_sample + task.samples))
            key = SampleKey(int(meta["seed"]), task.step, int(meta["uid"]), rows)
            kept: dict[str, Any] = {
                name: tensors[name].unbind() if name in tensors else () for name in _KEPT
            }
            return move_tensors(
                SampleState(key, tensors["latents"], self.next_step, **kept), device
            )
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"a STATE message lacks or garbles {error}.") from error
