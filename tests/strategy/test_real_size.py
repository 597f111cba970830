"""What a rank of a large world holds: sharded by the project's own classes over a process group
that does not exist."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks._random_builds import FAMILY
from digenrl.models import tiny as tiny_builds
from digenrl.strategy.context import Context
from digenrl.strategy.shard import mesh_of, shard_policy, with_timeout
from digenrl.types import Prompt
from tests.models.real_policies import real
from tests.models.tiny_policies import make

pytestmark = pytest.mark.heavy

TRAINERS = 16
REST = tuple(FAMILY.values())


def as_one_of_many(body: Callable[[], None], number: int = 0) -> None:
    """Run `body` as a rank of 16, whose collectives return at once. In a fork, because a process
    that has sharded can fork no ranks that train."""

    def rank() -> None:
        dist.init_process_group("fake", rank=number, world_size=TRAINERS, store=FakeStore())
        body()

    process = multiprocessing.get_context("fork").Process(target=rank)
    process.start()
    process.join()
    assert process.exitcode == 0, "see its traceback above"


def test_the_reference_is_sharded_again_after_its_forward() -> None:
    def body() -> None:
        policy = make("wan", "full", keep_reference=True)
        shard_policy(policy, mesh_of("fsdp", TRAINERS, 1, "cpu"))
        condition = policy.codec.encode([Prompt("x")])
        with torch.no_grad(), policy.adapter.reference():
            policy.velocity(torch.zeros(1, *policy.latent_shape), torch.ones(1), condition)
        for network in policy.all_networks():
            whole = [
                name
                for name, parameter in network.named_parameters()
                if not isinstance(parameter, DTensor)
            ]
            assert not whole, "these stay gathered between forwards"

    as_one_of_many(body)


USUAL = {("wan", False), ("flux", True)}
SHARDED = list(itertools.product(REST, (False, True)))


@pytest.mark.parametrize(
    ("family", "lora"),
    [pytest.param(*case, marks=() if case in USUAL else pytest.mark.slow) for case in SHARDED],
)
def test_a_shard_holds_a_sixteenth(family: str, lora: bool) -> None:
    """Within a tenth of the parameters' bytes over 16; what lies outside the blocks is sharded as
    well."""

    def body() -> None:
        policy = real(family, lora)
        whole = sum(p.numel() * p.element_size() for p in policy.transformer.parameters())
        shard_policy(policy, mesh_of("fsdp", TRAINERS, 1, "cpu"))
        local = 0
        for parameter in policy.transformer.parameters():
            assert isinstance(parameter, DTensor)
            own = parameter.to_local()
            local += own.numel() * own.element_size()
        assert local <= 1.1 * whole / TRAINERS
        wanted = torch.float32 if not lora else torch.bfloat16
        assert next(policy.transformer.parameters()).dtype == wanted

    as_one_of_many(body)


@pytest.mark.parametrize("tune", ["lora", "full"])
@pytest.mark.parametrize(
    "family", ["sd3", *(pytest.param(name, marks=pytest.mark.slow) for name in REST)]
)
def test_every_rank_reads_its_own_rows_of_the_same_weights(family: str, tune: str) -> None:
    """Built without memory, sharded, then filled: values, dtypes and buffers are those of the whole
    build, bit by bit; so are the adapter and the reference."""

    def body() -> None:
        arguments = {
            "lora": "full" if tune == "full" else None,
            "dtype": "bfloat16",
            "keep_reference": tune == "full",
        }
        whole, part = make(family, **arguments), make(family, **arguments, empty=True)
        assert all(parameter.is_meta for parameter in part.transformer.parameters())
        mesh = mesh_of("fsdp", TRAINERS, 1, "cpu")
        shard_policy(part, mesh)
        part.fill(torch.device("cpu"))
        for mine, theirs in zip(part.all_networks(), whole.all_networks(), strict=True):
            wanted = dict([*theirs.named_parameters(), *theirs.named_buffers()])
            found = dict([*mine.named_parameters(), *mine.named_buffers()])
            assert list(found) == list(wanted)
            for name, value in found.items():
                expected = wanted[name]
                assert (value.shape, value.dtype) == (expected.shape, expected.dtype), name
                if isinstance(value, DTensor):
                    assert value.requires_grad == expected.requires_grad
                    rows = expected.detach().chunk(TRAINERS)
                    own = value.to_local()
                    number = dist.get_rank()
                    value, expected = own, rows[number] if number < len(rows) else expected[:0]
                assert torch.equal(value, expected), name

    tiny_builds.ensure(family)  # in a process group rank 0 alone would write it
    as_one_of_many(body, 1)


def test_a_collective_of_some_trainers_ends_by_the_limit_of_all(tmp_path: Path) -> None:
    """In the groups of hsdp's mesh, and of context groups: rank 0 waits for a partner that never
    comes."""

    def rank(number: int) -> None:
        store = dist.FileStore(str(tmp_path / "store"), 4)
        dist.init_process_group("gloo", store=store, rank=number, world_size=4)
        limit = timedelta(seconds=0.2)
        mesh = with_timeout(mesh_of("hsdp", 4, 2, "cpu"), limit)
        context = Context(make("wan"), 2, "cpu", limit)._config.context_parallel_config
        for group in (
            *mesh.get_all_groups(),
            context._mesh["ulysses"].get_group(),
            context._flattened_mesh.get_group(),
        ):
            if number == 0:
                began = time.monotonic()
                with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
                    dist.all_reduce(torch.ones(1), group=group)
                assert time.monotonic() - began < 20.0
        dist.PrefixStore("end", store).set(str(number), "")
        store.wait(["end/0"], timedelta(seconds=60))

    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=rank, args=(number,)) for number in range(4)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0] * 4, "see their tracebacks above"
