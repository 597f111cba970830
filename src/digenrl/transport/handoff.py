"""Hand-off: a trajectory suspended between two denoising steps, sent to the rank that finishes it.

Only tasks of the step in progress travel. The next version cannot be published before they are trained, so the receiver
holds the version that they need. Under one-step asynchrony it may first have to adopt it; the task waits until then.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from digenrl.diffusion.denoise import SampleKey, SampleState
from digenrl.schedule import Task
from digenrl.schedule.claims import Claim
from digenrl.transport.wire import Kind, Message, WireError
from digenrl.types import move

_KEPT = ("kept_latents", "kept_next_latents", "kept_log_probs", "kept_means")


def pack_state(task: Task, state: SampleState, claim: Claim) -> Message:
    """A suspended task as a message."""
    tensors: dict[str, Tensor] = {"latents": state.latents}
    for name in _KEPT:
        kept = getattr(state, name)
        if kept:
            tensors[name] = torch.stack(kept)
    meta = {"task": asdict(task), "next_step": state.next_step, "seed": state.key.seed, "uid": state.key.uid}
    meta |= {"position": claim.position, "attempt": claim.attempt}
    return Message(Kind.STATE, meta, tensors)


@dataclass(frozen=True)
class Suspended:
    """A task that was handed to this rank and waits for it."""

    message: Message
    version: int
    """Weights that began it."""
    claim: Claim
    next_step: int
    """Denoising steps done."""

    @classmethod
    def of(cls, message: Message, rank: int) -> Suspended:
        """What `rank` received; raises WireError when the message is not a suspended task."""
        try:
            meta = message.meta
            claim = Claim(int(meta["position"]), rank, int(meta["attempt"]))
            return cls(message, int(meta["task"]["version"]), claim, int(meta["next_step"]))
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"a STATE message lacks or garbles {error}.") from error


def unpack_state(message: Message, device: torch.device) -> tuple[Task, SampleState, int, int]:
    """The inverse of `pack_state`, on `device`: task, state, position in the queue, attempt.

    Raises:
        WireError: the message is not a suspended task.
    """
    try:
        task = Task(**{name: int(value) for name, value in message.meta["task"].items()})
        rows = tuple(range(task.first_sample, task.first_sample + task.samples))
        key = SampleKey(int(message.meta["seed"]), task.step, int(message.meta["uid"]), rows)
        kept = {name: message.tensors[name].unbind() if name in message.tensors else () for name in _KEPT}
        state = SampleState(key, message.tensors["latents"], int(message.meta["next_step"]), **kept)
        position, attempt = int(message.meta["position"]), int(message.meta["attempt"])
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"a STATE message lacks or garbles {error}.") from error
    return task, move(state, device), position, attempt
