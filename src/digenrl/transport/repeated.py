"""Parts of trajectories that their receiver has already need not travel.

- Tasks of a prompt carry the same encoded prompt. Each part of the prompt is sent once.
- The latents after a trained step equal the latents before the next step, if that is trained too.

What travels keeps its own precision.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import TypedDict

import torch
import xxhash
from torch import Tensor

from digenrl.transport.wire import tensor_bytes

_REMEMBERED = 32
"""Parts of encoded prompts that both ends of a connection remember."""


class Dropped(TypedDict):
    """What completes a message again, as JSON values."""

    names: list[str]
    """Names of all its tensors, in order."""
    known: dict[str, str]
    """Name of a part that did not travel -> its digest."""
    chained: bool
    """Whether latents after a step are those before the next one, and travel once."""


class Repeated:
    """What both ends of one direction of a connection remember. Both see the same messages in the
    same order, so they forget alike.

    Example:
        >>> latents = torch.arange(4.0).reshape(1, 4)
        >>> steps = {"latents": latents[:, :3], "next_latents": latents[:, 1:]}
        >>> left, facts = Repeated().drop_repeated(steps)
        >>> left["latents"].tolist(), left["next_latents"].tolist()  # 0..2 and 1..3 share 1 and 2
        ([[0.0, 1.0, 2.0]], [[3.0]])
    """

    def __init__(self) -> None:
        self._known: OrderedDict[str, Tensor] = OrderedDict()

    def drop_repeated(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Dropped]:
        """Return the tensors that must travel, and what `restore_repeated` must know."""
        left, known = dict(tensors), dict[str, str]()
        for name in _condition_names(tensors):
            digest = _tensor_digest(tensors[name])
            if digest in self._known:
                known[name] = digest
                del left[name]
            # In the receiver's order, so that both ends forget the same entry.
            self._remember_tensor(digest, tensors[name])
        before, after = tensors.get("latents"), tensors.get("next_latents")
        chained = before is not None and after is not None and _is_chained(before, after)
        if chained and after is not None:
            left["next_latents"] = after[:, -1:]  # [b, 1, *L]
        return left, {"names": list(tensors), "known": known, "chained": chained}

    def restore_repeated(self, left: Mapping[str, Tensor], facts: Dropped) -> dict[str, Tensor]:
        """Invert `drop_repeated`.

        Raises:
            KeyError: `left` lacks what this end does not know.
        """
        tensors = dict(left)
        for name in _condition_names(facts["names"]):
            if name in facts["known"]:
                tensors[name] = self._known[facts["known"][name]]
            self._remember_tensor(
                facts["known"].get(name) or _tensor_digest(tensors[name]), tensors[name]
            )
        if facts["chained"]:
            # [b, K, *L]: the latents after step k are those before step k + 1.
            latents = tensors["latents"]
            tensors["next_latents"] = torch.cat([latents[:, 1:], tensors["next_latents"]], dim=1)
        return {name: tensors[name] for name in facts["names"]}

    def _remember_tensor(self, digest: str, tensor: Tensor) -> None:
        self._known.setdefault(digest, tensor)
        self._known.move_to_end(digest)
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)


def _condition_names(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith("condition/")]


def _is_chained(before: Tensor, after: Tensor) -> bool:
    """Return whether `after` [b, K, ...] equals `before` of the following step, at every step but
    the last. Bytes are compared, because NaN differs from itself."""
    if before.shape != after.shape or before.dtype != after.dtype or before.shape[1] < 2:
        return False
    ours, theirs = before[:, 1:].contiguous(), after[:, :-1].contiguous()
    return tensor_bytes(ours) == tensor_bytes(theirs)


def _tensor_digest(tensor: Tensor) -> str:
    digest = xxhash.xxh3_128_hexdigest(tensor_bytes(tensor.contiguous()))
    return f"{tensor.dtype} {tuple(tensor.shape)} {digest}"
