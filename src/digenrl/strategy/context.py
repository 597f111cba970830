"""Context parallelism: neighbouring trainers share the tokens of a trained forward. The model knows
nothing of it.

Each rank of a group computes its part of the tokens, and the attention of its part of the heads
(Ulysses, arXiv:2309.14509). diffusers' hooks do this, as the family's `context_plan` says. Noise,
latents and log-probs stay whole on every rank, and all of them compute the same loss. The gradient
of a rank is what its tokens give, and the sum over the group is the gradient of one rank alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from diffusers.hooks.context_parallel import apply_context_parallel, remove_context_parallel
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from torch.distributed.device_mesh import init_device_mesh

from digenrl.facts import facts_by_family
from digenrl.models.policy import ModelKeys, Policy
from digenrl.strategy.shard import with_timeout


def check_model(policy: type[Policy], ranks: int, settings: ModelKeys) -> None:
    """Refuse a model whose forwards `parallel.context` trainers cannot compute together.

    Args:
        policy: class of the model.
        ranks: `parallel.context`, more than 1.
        settings: group `model` of a checked configuration.

    Raises:
        ValueError: the family's tokens are not divided, the ranks do not divide its attention heads
            and the tokens of a sample, or its blocks are compiled.
    """
    if not policy.context_plan:
        able = ", ".join(family for family, facts in facts_by_family().items() if facts.context)
        raise ValueError(
            f"parallel.context = {ranks}: the tokens of {policy.family} are not divided among "
            f"trainers, those of {able} can be; set parallel.context=1 (parallel.sharding=fsdp "
            "saves memory too)."
        )
    family: Any = policy  # with a `context_plan`, it is a `DiffusersPolicy`
    heads = family.network_config(settings)["num_attention_heads"]
    codec, size = family.codec_class, (settings["height"], settings["width"])
    shape = codec.latent_shape_of(*size, settings.get("frames", 1))
    tokens = math.prod(shape[1:]) * codec.vae_stride**2 // codec.spatial_stride**2
    common = [n for n in range(1, heads + 1) if heads % n == 0 and tokens % n == 0]
    if ranks not in common:
        raise ValueError(
            f"parallel.context = {ranks}: must divide the {heads} attention heads of "
            f"{policy.family} and the {tokens} tokens of a sample of this size; allowed: "
            f"{', '.join(map(str, common))}."
        )
    if settings.get("compile"):
        raise ValueError(
            f"parallel.context = {ranks} with model.compile = true: compiled blocks cannot be "
            "divided; set one of them back."
        )


class Context:
    """The context group of this trainer. Making it is a collective of all trainers.

    Args:
        ranks: of a group.
        device_type: of their devices.
        timeout: of one collective.
    """

    def __init__(self, policy: Policy, ranks: int, device_type: str, timeout: timedelta) -> None:
        self._policy = policy
        # seat: which group. ulysses: place within it. ring: of size 1, but diffusers asks for both.
        shape = (dist.get_world_size() // ranks, 1, ranks)
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=("seat", "ring", "ulysses"))[
            "ring", "ulysses"
        ]
        self._config = ParallelConfig(ContextParallelConfig(ulysses_degree=ranks))
        self._config.setup(mesh.get_local_rank("ulysses"), ranks, policy.device, mesh=mesh)
        # diffusers makes a group of its own over both dimensions; it gets the run's limit too.
        for made in (mesh, self._config.context_parallel_config._flattened_mesh):
            with_timeout(made, timeout)
        blocks = [module for unit in policy.wrap_units() for module in unit.modules()]
        processors: list[Any] = [getattr(module, "processor", None) for module in blocks]
        self._processors = [
            processor for processor in processors if hasattr(processor, "_parallel_config")
        ]

    @contextmanager
    def share_tokens(self) -> Iterator[None]:
        """Let the ranks of a group compute forwards together during the body, and repeat parts of
        them in the backward pass."""
        context, plan = self._config.context_parallel_config, self._policy.context_plan
        for network in self._policy.all_networks():
            apply_context_parallel(network, context, plan)
        for processor in self._processors:
            processor._parallel_config = self._config
        try:
            yield
        finally:
            for processor in self._processors:
                processor._parallel_config = None
            for network in self._policy.all_networks():
                remove_context_parallel(network, plan)
