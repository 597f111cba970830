"""Versioned weights: published once per logical batch, checked by digest, adopted between
trajectories.

    trainer 0                                          rollout rank
    publish: bucket 0, 1, ..., then the digest  -->    Arrivals.add_message, until the digest matches  -->  adopt
                                                       (the link of one rank of a node passes each message on)
    other trainers: compute_digest (replicas) or take_part (shards); they keep no copy

Version v is the weights after v logical batches. LoRA runs send the adapter alone. Every run sends
the dtypes that rollouts hold: 16 bit if they compute in it. Of a run's initial weights only the
digest is sent, because rollouts have the weights already.

A version is sent in buckets of consecutive parameters, so that copying, hashing, sending and
checking overlap. The last message carries the digest; without it nothing is adopted. Both sides
first compare a digest of names, shapes and dtypes (`layout_digest`).
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from digenrl import accelerator
from digenrl.transport.link import Link, Routes
from digenrl.transport.wire import Message, MessageKind, empty_bytes, tensor_bytes

_BUCKET_BYTES = 4 << 20
_MOST_BUCKETS = 128
"""Most buckets of a version: half of what a link queues for a peer, so that a slow peer does not
hold up the trainer. Fewer and larger ones are slower: below 2 GiB a bucket is smaller than what
glibc maps anew each time (`cluster.launcher.keep_memory`)."""
_PIECE_BYTES = 16 << 20
"""Bytes of a parameter that `compute_digest` reads at once."""
_ALIGNMENT = 64
"""Alignment of a tensor within its bucket, in bytes, as torch allocates. Kernels then take the same
path on every rank."""


class WeightsError(RuntimeError):
    """Weights did not arrive, or are not the weights that were sent."""


@dataclass(frozen=True)
class Version:
    """Weights of a version in this rank's CPU memory."""

    number: int
    digest: str
    """xxh3 over the digests (xxh3) of the buckets."""
    tensors: Mapping[str, Tensor]
    """Views into the buckets. No code writes to them."""


@dataclass
class Bucket:
    """Parameters that are sent together, with the byte at which each begins. Grows while the plan
    is made."""

    starts: dict[str, int] = field(default_factory=dict)
    size: int = 0

    def tensor_views(self, data: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the bucket's tensors, shaped as `parameters`, as views of its bytes."""
        found: dict[str, Tensor] = {}
        for name, start in self.starts.items():
            like = parameters[name]
            found[name] = (
                data[start : start + like.numel() * like.element_size()]
                .view(like.dtype)
                .view(like.shape)
            )
        return found

    def gather_bytes(self, parameters: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Tensor:
        """Return the bucket's bytes with `parameters` in the dtypes of `like`, in CPU memory.

        With sharded parameters this is a collective.
        """
        pin = any(accelerator.is_own(parameters[name].device) for name in self.starts)
        # A new buffer for each version: the link may still be sending the last one.
        data = empty_bytes(self.size, pin)
        for name, view in self.tensor_views(data, like).items():
            # Cast where the weights are: a copy that also casts goes through pageable memory and
            # one thread of the host.
            view.copy_(_whole_parameter(parameters[name]).to(view.dtype))
            end = self.starts[name] + view.numel() * view.element_size()
            # The padding is part of the digest, so it must not hold random bytes.
            data[end : _padded_size(end)] = 0
        return data


def layout_digest(parameters: Mapping[str, Tensor]) -> str:
    """Return a digest of names, shapes and dtypes: equal on two ranks exactly if weights can be
    sent between them."""
    rows = [
        f"{name} {tuple(parameter.shape)} {parameter.dtype}"
        for name, parameter in parameters.items()
    ]
    return xxhash.xxh3_64_hexdigest("\n".join(rows).encode())


def plan_buckets(parameters: Mapping[str, Tensor]) -> list[Bucket]:
    """Return which parameters are sent together. The plan depends only on what `layout_digest`
    covers.

    A bucket is filled up to a power of two. torch allocates pinned memory in powers of two, so the
    next version can reuse the blocks of the previous version.
    """
    sizes = {
        name: _padded_size(parameter.numel() * parameter.element_size())
        for name, parameter in parameters.items()
    }
    # Next power of two of 2 x total / most. Twice, because two neighbours together exceed `full`,
    # and one alone may not.
    full = max(_BUCKET_BYTES, 1 << (-(-2 * sum(sizes.values()) // _MOST_BUCKETS) - 1).bit_length())
    plan = [Bucket()]
    for name, size in sizes.items():
        # A parameter larger than `full` has a bucket of its own.
        if plan[-1].size and plan[-1].size + size > full:
            plan.append(Bucket())
        plan[-1].starts[name] = plan[-1].size
        plan[-1].size += size
    return plan


def _padded_size(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _whole_parameter(parameter: Tensor) -> Tensor:
    """Return all of a parameter. With sharded parameters this is a collective."""
    parameter = parameter.detach()
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def is_bucket(message: Message) -> bool:
    """Return whether a message holds one bucket of a version's bytes."""
    known = message.kind is MessageKind.WEIGHTS and message.tensors.keys() == {"data"}
    return known and "bucket" in message.meta


def own_part(parameter: Tensor) -> Tensor:
    """Return what this rank holds of a parameter, in the parameter's own memory: its shard, or all
    of it."""
    parameter = parameter.detach()
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def host_copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return room for values of `tensors` in host memory, pinned where they are on a device."""
    pin = any(accelerator.is_own(tensor.device) for tensor in tensors.values())
    room = dict[str, Tensor]()
    for bucket in plan_buckets(tensors):
        data = torch.empty(bucket.size, dtype=torch.uint8, pin_memory=pin)
        room |= bucket.tensor_views(data, tensors)
    return room


@torch.no_grad()
def publish(
    number: int,
    parameters: Mapping[str, Tensor],
    link: Link,
    routes: Routes,
    agree: Callable[[str], None],
    like: Mapping[str, Tensor] | None = None,
    there: bool = False,
) -> Version:
    """Copy `parameters` and send them as version `number`.

    When this returns, the copy is complete. Later optimizer steps cannot change it, however slow
    the link is. With sharded parameters this is a collective: every other trainer calls
    `compute_digest`.

    Args:
        routes: rank that gets the version from here -> ranks to which it passes the version on.
        agree: called with the digest before the version becomes valid; raises if another trainer
            has another digest.
        like: tensors with the dtypes to send; None = those of `parameters`.
        there: the ranks hold these weights already, as at the start of a run. Only the digest is
            sent.
    """
    like = parameters if like is None else like
    known, plan = layout_digest(like), plan_buckets(like)
    meta = {"version": number, "table": known}
    tensors: dict[str, Tensor] = {}
    digests: list[str] = []
    for index, bucket in enumerate(plan):
        data = bucket.gather_bytes(parameters, like)
        if not there:
            link.multicast(
                routes, Message(MessageKind.WEIGHTS, meta | {"bucket": index}, {"data": data})
            )
        # Hashed while the link's threads already send.
        digests.append(xxhash.xxh3_64_hexdigest(tensor_bytes(data)))
        tensors |= bucket.tensor_views(data, like)
    digest = _combined_digest(digests)
    # Before the digest goes out, since only the digest makes a version valid.
    agree(digest)
    link.multicast(routes, Message(MessageKind.WEIGHTS, meta | {"digest": digest}))
    return Version(number, digest, tensors)


@torch.no_grad()
def compute_digest(parameters: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> str:
    """Return the digest that `publish` gives these parameters, reading piece by piece and keeping
    no copy.

    With sharded parameters this is a collective, as `publish` is.
    """
    digests = []
    for bucket in plan_buckets(like):
        state, zeros = xxhash.xxh3_64(), bytes(_ALIGNMENT)
        for name in bucket.starts:
            flat, dtype = _whole_parameter(parameters[name]).reshape(-1), like[name].dtype
            for piece in flat.split(max(1, _PIECE_BYTES // dtype.itemsize)):
                state.update(tensor_bytes(piece.to(dtype).cpu()))
            # The zeros between two tensors of a bucket count too.
            size = flat.numel() * dtype.itemsize
            state.update(zeros[: _padded_size(size) - size])
        digests.append(state.hexdigest())
    return _combined_digest(digests)


@torch.no_grad()
def take_part(parameters: Mapping[str, Tensor]) -> None:
    """Join the gathers of a `publish` on another rank, and do nothing more."""
    for bucket in plan_buckets(parameters):
        # In the order of `publish`: each gather is a collective of all trainers.
        for name in bucket.starts:
            _whole_parameter(parameters[name])


class Arrivals:
    """Collects the messages of a version until the version is complete. `parameters` are this
    rank's own.

    A link keeps the order of a sender's messages: buckets in order, the digest last. A digest
    without buckets confirms weights that this rank already has.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters, self._table, self._plan = (
            parameters,
            layout_digest(parameters),
            plan_buckets(parameters),
        )
        self._arrived: list[Message] = []
        """Messages so far of the version that arrives."""

    def add_message(self, message: Message) -> Version | None:
        """Take in one message, and return the version that it completes, or None.

        Raises:
            WeightsError: other names or shapes than this rank's, a bucket out of turn, or bytes
                with another digest than the announced one.
        """
        number, announced = message.meta["version"], message.meta.get("digest")
        if message.meta["table"] != self._table:
            raise WeightsError(
                f"weights of version {number} do not fit this rank: names, shapes or dtypes "
                "differ. All ranks must build the model from the same configuration."
            )
        place = len(self._arrived)
        if announced is None:
            data, index = message.tensors.get("data"), message.meta.get("bucket")
            if (
                index != place
                or place >= len(self._plan)
                or data is None
                or len(data) != self._plan[place].size
            ):
                raise WeightsError(
                    f"weights of version {number}: bucket {index} came where {place} was expected."
                )
            self._arrived.append(message)
            return None
        arrived, self._arrived = self._arrived, []
        if not arrived:
            if (own := compute_digest(self._parameters, self._parameters)) != announced:
                raise WeightsError(
                    f"this rank begins with other weights ({own}) than the trainers ({announced}): "
                    "give all ranks the "
                    "same model.path, configuration, seed and versions of torch and diffusers."
                )
            return Version(number, announced, {})
        digest = _combined_digest([part.digest or "" for part in arrived])
        if digest != announced or any(part.meta["version"] != number for part in arrived):
            raise WeightsError(
                f"weights of version {number} arrived with digest {digest}, sent as {announced}."
            )
        tensors: dict[str, Tensor] = {}
        for bucket, part in zip(self._plan, arrived, strict=True):
            tensors |= bucket.tensor_views(part.tensors["data"], self._parameters)
        return Version(number, digest, tensors)


@torch.no_grad()
def adopt(parameters: Mapping[str, Tensor], version: Version) -> None:
    """Set `parameters` to this version, in their own dtypes.

    In CPU memory the arrived bytes are used, not copied. A version without tensors is in place
    already.
    """
    for name, value in version.tensors.items():
        parameter = parameters[name]
        if (parameter.device, parameter.dtype) == (
            value.device,
            value.dtype,
        ) and parameter.is_contiguous():
            parameter.data = value
        else:
            parameter.copy_(
                value, non_blocking=True
            )  # from pinned memory, copies queue up behind each other


@contextmanager
def exchanged_values(
    parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]
) -> Iterator[None]:
    """Give `parameters` these `values`, of their dtypes, while the context is open.

    The memory of `values` holds the parameters' own values meanwhile, so there is no third copy. Of
    a sharded parameter `values` has this rank's shard.
    """
    held = dict(values)
    _exchange_values(parameters, held)
    try:
        yield
    finally:
        _exchange_values(parameters, held)


@torch.no_grad()
def _exchange_values(parameters: Mapping[str, Tensor], held: dict[str, Tensor]) -> None:
    for name, value in held.items():
        parameter = parameters[name]
        if parameter.device == value.device and not isinstance(parameter, DTensor):
            held[name], parameter.data = parameter.data, value
        else:  # FSDP gathers from memory of its own, so a shard's values move
            part = own_part(parameter)
            own = part.clone()
            part.copy_(value)
            value.copy_(own)


def _combined_digest(digests: Sequence[str]) -> str:
    return xxhash.xxh3_64_hexdigest("".join(digests).encode())
