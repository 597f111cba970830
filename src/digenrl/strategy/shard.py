"""Sharded trainers: FSDP2 over the policy's blocks. The model knows nothing of it.

ddp   replicas; gradients are averaged once per update (`gradients.average_grads`)
fsdp  every trainer holds 1/N of each block (ZeRO-3); one all-gather per block and forward
hsdp  sharded inside a node, replicated between nodes
"""

from __future__ import annotations

import logging
import math
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from digenrl.models.adapter import cast_parameters
from digenrl.models.lora import wide_dtype
from digenrl.models.policy import Policy

_log = logging.getLogger(__name__)
REPLICATE = "replicate"
"""Dimension of hsdp's mesh along which ranks hold the same part of the weights."""
_PER_PARAMETER = "param_dtype_override_fn" in MixedPrecisionPolicy.__dataclass_fields__


def mesh_of(sharding: str, trainers: int, group: int, device_type: str) -> DeviceMesh:
    """Return the mesh of a sharding mode over the trainers' world. Under hsdp `group` neighbours
    share one copy.

    Raises:
        ValueError: hsdp with a number of trainers that is no multiple of the group.
    """
    if sharding == "fsdp":
        return init_device_mesh(device_type, (trainers,), mesh_dim_names=("shard",))
    if trainers % group:
        raise ValueError(
            f"parallel.shard_group = {group} must divide allocation.trainers = {trainers}; "
            f"set it to {math.gcd(group, trainers)}, or parallel.sharding=fsdp."
        )
    return init_device_mesh(
        device_type, (trainers // group, group), mesh_dim_names=(REPLICATE, "shard")
    )


def with_timeout(mesh: DeviceMesh, timeout: timedelta) -> DeviceMesh:
    """Return `mesh` after giving its collectives `timeout`. Its groups would have a limit of
    torch's own."""
    for group in mesh.get_all_groups():
        backend: Any = group._get_backend(torch.device(mesh.device_type))
        # NCCL's class of torch 2.15 has only the new name, and older ones only the old name.
        (getattr(backend, "set_timeout", None) or backend._set_default_timeout)(timeout)
    return mesh


def shard_policy(policy: Policy, mesh: DeviceMesh) -> None:
    """Shard the transformer and its frozen copy in place, block by block, then the rest of each.

    The rest is resharded after each forward as well. Otherwise it would stay whole after a forward
    under `Adapter.reference` or `no_grad`, and until the next forward `trained_parameters()` would
    return other tensors. A copy whose blocks had no common root would stay whole altogether.
    """
    precision = mixed_precision(policy)
    # Blocks before networks: a network then holds only what no block has taken.
    for unit in policy.wrap_units():
        fully_shard(unit, mesh=mesh, mp_policy=precision)
    for network in policy.all_networks():
        fully_shard(network, mesh=mesh, reshard_after_forward=True, mp_policy=precision)


def mixed_precision(policy: Policy) -> MixedPrecisionPolicy:
    """Return the dtypes in which parameters are gathered and gradients reduced.

    If all weights are trained with a 16-bit forward, the fp32 masters of matrix products and
    convolutions are gathered in 16 bits. Autocast would cast them to this dtype anyway, so
    activations stay those of the rollouts and the gather is halved. Norms and the like stay fp32,
    as autocast computes them. This needs PyTorch 2.15, whose policies can tell parameters apart.
    With an older PyTorch, or if nothing would be cast, everything keeps its own dtype.
    """
    nothing_is_cast = policy.adapter.lora is not None or policy.dtype == wide_dtype(policy.dtype)
    if nothing_is_cast:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    if not _PER_PARAMETER:
        _log.warning(
            "torch %s gathers all weights of sharded trainers in fp32: twice the bytes and a block "
            "or two more memory than plans say; install torch 2.15 or newer",
            torch.__version__,
        )
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    # By identity: FSDP asks about parameters, and knows no names.
    cast = {id(parameter) for module in policy.modules() for parameter in cast_parameters(module)}
    return MixedPrecisionPolicy(
        param_dtype=policy.dtype,
        reduce_dtype=wide_dtype(policy.dtype),
        cast_forward_inputs=False,
        param_dtype_override_fn=lambda parameter: (
            None if id(parameter) in cast else parameter.dtype
        ),
    )


def synchronise_gradients(policy: Policy, on: bool) -> None:
    """Switch the reduction of gradients in the next backward pass. Only an update's last
    micro-batch reduces.

    The gradients of all weights are too large to wait unsharded: they are scattered after every
    micro-batch, and only their sum over the nodes waits.
    """
    transformer = policy.transformer
    if isinstance(transformer, FSDPModule):
        if policy.adapter.lora is None:
            transformer.set_requires_all_reduce(on)
        else:
            transformer.set_requires_gradient_sync(on)
