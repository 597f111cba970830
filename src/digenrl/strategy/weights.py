"""Versioned weights: a table that both sides must agree on, a digest that must match, adoption between trajectories.

Version v = weights after v logical batches. A trainer publishes a version once, after the batch's last optimizer step;
a rollout rank uses it only after its bytes gave the announced digest. LoRA runs ship the adapter alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from digenrl.strategy.wire import Kind, Message, tensor_bytes


class WeightsError(RuntimeError):
    """Weights that did not arrive, or are not the ones that were sent."""


def table(parameters: Mapping[str, Tensor]) -> str:
    """Digest of names, shapes and dtypes: equal on two ranks exactly if weights can travel between them."""
    rows = [f"{name} {tuple(parameter.shape)} {parameter.dtype}" for name, parameter in parameters.items()]
    return xxhash.xxh3_64_hexdigest("\n".join(rows).encode())


def digest(tensors: Iterable[Tensor]) -> str:
    """xxh3 over the raw bytes of contiguous CPU tensors, in order."""
    state = xxhash.xxh3_64()
    for tensor in tensors:
        state.update(tensor_bytes(tensor))
    return state.hexdigest()


@torch.no_grad()
def snapshot(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A CPU copy of every parameter that later optimizer steps cannot change. With sharded parameters this is a
    collective: every trainer must call it, in the same order."""
    copies: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        full = parameter.detach()
        full = full.full_tensor() if isinstance(full, DTensor) else full
        copies[name] = full.to("cpu", copy=True).contiguous()
    return copies


def weights_message(version: int, tensors: Mapping[str, Tensor], sum_: str) -> Message:
    """The message that carries one version."""
    return Message(Kind.WEIGHTS, {"version": version, "digest": sum_}, tensors)


@torch.no_grad()
def adopt(parameters: Mapping[str, Tensor], message: Message) -> str:
    """Copy a received version into `parameters`; returns its digest.

    Raises:
        WeightsError: other names or shapes than this rank's, or bytes that do not give the announced digest.
    """
    version, announced = message.meta["version"], message.meta["digest"]
    if table(parameters) != table(message.tensors):
        missing = sorted(set(parameters) ^ set(message.tensors))[:5]
        raise WeightsError(
            f"weights of version {version} do not fit this rank: names or shapes differ, for example {missing}. "
            "All ranks must build the model from the same configuration."
        )
    received = message.digest or digest(message.tensors.values())
    if received != announced:
        raise WeightsError(f"weights of version {version} arrived with digest {received}, sent as {announced}.")
    for name, parameter in parameters.items():
        parameter.copy_(message.tensors[name])
    return received
