"""What a rank of a large world holds: sharded by the project's own classes over a process group that does not exist."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from digenrl.strategy.shard import mesh_of, shard
from digenrl.types import Prompt
from tests.models.tiny_policies import make

pytestmark = pytest.mark.heavy

TRAINERS = 16


@pytest.fixture
def world() -> Iterator[None]:
    """Rank 0 of 16, whose collectives return at once."""
    dist.init_process_group("fake", rank=0, world_size=TRAINERS, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_the_reference_is_sharded_again_after_its_forward(world: None) -> None:
    policy = make("wan", "full", keep_reference=True)
    shard(policy, mesh_of("fsdp", TRAINERS, 1, "cpu"))
    condition = policy.encode([Prompt("x")])
    with torch.no_grad(), policy.reference():
        policy.velocity(torch.zeros(1, *policy.latent_shape), torch.ones(1), condition)
    for network in policy.networks():
        whole = [name for name, parameter in network.named_parameters() if not isinstance(parameter, DTensor)]
        assert not whole, "these stay gathered between forwards"
