"""Context parallelism: neighbouring trainers share the tokens of a trained forward. The model knows
nothing of it.

Each rank of a group computes its part of the tokens, and the attention of its part of the heads
(Ulysses, arXiv:2309.14509), by diffusers' hooks and the family's `context_plan`. Noise, latents and
log-probs stay whole on every rank, and all of them compute the same loss. The gradient of a rank is
what its tokens give, and the sum over the group is the gradient of one rank alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from diffusers.hooks.context_parallel import apply_context_parallel, remove_context_parallel
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from torch.distributed.device_mesh import init_device_mesh

from digenrl.models.policy import Policy
from digenrl.strategy.shard import bounded


class Context:
    """The context group of this trainer. Making it is a collective of all trainers.

    Args:
        ranks: of a group.
        device_type: of their devices.
        timeout: of one collective.
    """

    def __init__(self, policy: Policy, ranks: int, device_type: str, timeout: timedelta) -> None:
        self._policy = policy
        shape = (dist.get_world_size() // ranks, 1, ranks)
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=("seat", "ring", "ulysses"))[
            "ring", "ulysses"
        ]
        self._config = ParallelConfig(ContextParallelConfig(ulysses_degree=ranks))
        self._config.setup(mesh.get_local_rank("ulysses"), ranks, policy.device, mesh=mesh)
        for made in (mesh, self._config.context_parallel_config._flattened_mesh):
            bounded(made, timeout)
        blocks = [module for unit in policy.wrap_units() for module in unit.modules()]
        processors: list[Any] = [getattr(module, "processor", None) for module in blocks]
        self._processors = [
            processor for processor in processors if hasattr(processor, "_parallel_config")
        ]

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Inside, the ranks of a group compute forwards together, and repeat parts of them in the
        backward pass."""
        context, plan = self._config.context_parallel_config, self._policy.context_plan
        for network in self._policy.networks():
            apply_context_parallel(network, context, plan)
        for processor in self._processors:
            processor._parallel_config = self._config
        try:
            yield
        finally:
            for processor in self._processors:
                processor._parallel_config = None
            for network in self._policy.networks():
                remove_context_parallel(network, plan)
