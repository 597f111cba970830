"""What trainers do to their gradients and weights together, in a group of one process: sums are the
process's own, so the shares are seen."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from digenrl.cluster.world import World
from digenrl.record.progress import Progress
from digenrl.strategy import gradients, shard
from digenrl.strategy.shard import mixed_precision
from digenrl.strategy.stop_vote import Agreement
from digenrl.transport.weights import WeightsError
from tests.cluster.test_claims import Store
from tests.strategy.test_sharded_checkpoints import as_ranks


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def parameters() -> list[Tensor]:
    """Two dtypes, alternating; the second has no gradient."""
    made = [torch.zeros(2, 3), torch.zeros(2), torch.zeros(4).double(), torch.zeros(1)]
    for number, each in enumerate(made):
        if number != 1:
            each.grad = torch.arange(float(each.numel())).view_as(each).to(each.dtype) + number
    return made


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (dist.DistBackendError("NCCL error"), True),
        (dist.DistNetworkError("timeout"), True),
        (RuntimeError("[gloo/transport/tcp/pair.cc:545] Connection reset by peer"), True),
        (RuntimeError("NCCL communicator was aborted on rank 1."), True),
        (RuntimeError("max |ratio-1| before the first optimizer step is 1"), False),
        (torch.OutOfMemoryError("CUDA out of memory (NCCL holds 1 GiB)"), False),
        (ValueError("gloo"), False),
    ],
)
def test_an_error_of_a_collective_is_told_from_a_ranks_own(
    error: BaseException, expected: bool
) -> None:
    """A rank whose collective broke waits for the cause: the peer that broke it."""
    assert gradients.is_of_a_peer(error) is expected


def test_gradients_are_divided_by_the_trainers_and_keep_their_places(group: None) -> None:
    found, wanted = parameters(), parameters()
    held = [each.grad for each in found]
    gradients.average_grads(found, 2)
    assert found[1].grad is None, "no trainer has one"
    for own, other, before in zip(found, wanted, held, strict=True):
        if other.grad is not None:
            assert own.grad is before, "in place"
            assert torch.equal(own.grad, other.grad / 2)


def test_replicas_take_the_weights_of_the_first(group: None) -> None:
    own = parameters()
    gradients.follow_first(own, 2)
    assert all(torch.equal(each, other) for each, other in zip(own, parameters(), strict=True))


def test_gradients_of_two_trainers_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other trainer has a gradient of the second parameter, where this one has none."""
    found, wanted = parameters(), parameters()

    def reduced(flat: Tensor) -> None:
        flat += 1.0

    monkeypatch.setattr(dist, "all_reduce", reduced)
    gradients.average_grads(found, 2)
    for own, other in zip(found, wanted, strict=True):
        before = torch.zeros_like(other) if other.grad is None else other.grad
        assert torch.equal(own.grad, (before + 1.0) / 2)


@pytest.mark.processes
def test_replicas_take_what_differs_from_the_first(tmp_path: Path) -> None:
    """A last bit, steps of which one undoes the other, a sign of zero. What is
    equal does not travel, NaN included."""

    def level(rank: int) -> None:
        generator = torch.Generator().manual_seed(3)
        first = [torch.randn(size, generator=generator) for size in (7, 40, 3, 5, 4)]
        first = [*first, first[0].bfloat16(), torch.full((2,), math.nan), torch.randn(0)]
        own = [each.clone() for each in first]
        if rank == 2:  # of three: only one of the others differs
            own[1].view(torch.int32)[5] += 1
            own[2].view(torch.int32)[:2] += torch.tensor([1, -1], dtype=torch.int32)
            own[5].view(torch.int16)[1] += 1
            own[4][:2] = own[4][:2].flip(0)
        first[3][2], own[3][2] = 0.0, 0.0 if rank == 0 else -0.0
        travelled, broadcast = list[int](), dist.broadcast

        def counted(tensor: Tensor, **where: Any) -> None:
            travelled.append(tensor.numel())
            broadcast(tensor, **where)

        dist.broadcast = counted  # type: ignore[assignment]
        gradients.follow_first(own, 3)
        assert travelled == [len(own), 40, 3, 5, 4, 7]
        for each, expected in zip(own, first, strict=True):
            assert torch.equal(each.view(torch.uint8), expected.view(torch.uint8))

    as_ranks(3, level, tmp_path)


@pytest.mark.parametrize(("backend", "device"), [("cpu:gloo,meta:nccl", "meta"), ("gloo", "cpu")])
def test_digests_are_compared_where_the_trainers_collectives_are(
    monkeypatch: pytest.MonkeyPatch, backend: str, device: str
) -> None:
    seen: list[Tensor] = []
    monkeypatch.setattr(gradients.accelerator, "device_kind", lambda: "meta")
    monkeypatch.setattr(dist, "get_default_backend_for_device", lambda kind: "nccl")
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "all_gather", lambda everyone, mine: seen.extend([*everyone, mine]))
    monkeypatch.setattr(torch, "equal", lambda one, other: True)
    gradients.assert_equal_digests("0" * 16, 3, 7)
    assert [each.device.type for each in seen] == [device] * 4


@pytest.mark.parametrize(
    ("lora", "dtype"),
    [(object(), torch.float32), (object(), torch.bfloat16), (None, torch.float32)],
    ids=["adapter", "adapter in 16 bit", "all weights"],
)
def test_shards_keep_their_dtypes_where_nothing_would_be_cast(lora: Any, dtype: Any) -> None:
    policy: Any = SimpleNamespace(adapter=SimpleNamespace(lora=lora), dtype=dtype)
    assert mixed_precision(policy) == MixedPrecisionPolicy(cast_forward_inputs=False)


def test_an_older_torch_gathers_all_weights_in_fp32_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shard, "_PER_PARAMETER", False)
    policy: Any = SimpleNamespace(adapter=SimpleNamespace(lora=None), dtype=torch.bfloat16)
    assert mixed_precision(policy) == MixedPrecisionPolicy(cast_forward_inputs=False)
    (said,) = caplog.messages
    assert "in fp32: twice the bytes" in said
    assert "install torch 2.15" in said


def test_all_weights_in_16_bit_are_gathered_as_autocast_computes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only matrix products and convolutions, whose parameters autocast casts."""
    policy: Any = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
    policy.adapter, policy.dtype = SimpleNamespace(lora=None), torch.bfloat16
    plain, given = MixedPrecisionPolicy, list[dict[str, Any]]()
    monkeypatch.setattr(shard, "_PER_PARAMETER", True)
    monkeypatch.setattr(shard, "MixedPrecisionPolicy", lambda **facts: given.append(facts) or plain)
    assert mixed_precision(policy) is plain
    (facts,) = given
    asked = facts.pop("param_dtype_override_fn")
    assert facts == {
        "param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "cast_forward_inputs": False,
    }  # fmt: skip
    assert [asked(parameter) for parameter in policy.parameters()] == [None] * 2 + [
        torch.float32
    ] * 2


def test_a_mesh_has_a_copy_of_the_weights_for_all_trainers_or_for_each_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[Any, ...]] = []

    def mesh(*args: Any, mesh_dim_names: tuple[str, ...]) -> str:
        made.append((*args, mesh_dim_names))
        return "mesh"

    monkeypatch.setattr(shard, "init_device_mesh", mesh)
    assert shard.mesh_of("fsdp", 6, 4, "cuda") == shard.mesh_of("hsdp", 6, 2, "cpu") == "mesh"
    assert shard.mesh_of("hsdp", 2, 2, "cpu") == "mesh"
    assert made == [
        ("cuda", (6,), ("shard",)),
        ("cpu", (3, 2), ("replicate", "shard")),
        ("cpu", (1, 2), ("replicate", "shard")),
    ]
    with pytest.raises(ValueError, match=r"must divide allocation\.trainers = 6; set it to 2,"):
        shard.mesh_of("hsdp", 6, 4, "cpu")


@pytest.mark.parametrize(
    "kind",
    [
        getattr(dist, name)
        for name in ("ProcessGroupGloo", "ProcessGroupNCCL", "ProcessGroupNCCL2")
        if hasattr(dist, name)
    ],
)
def test_every_group_of_a_mesh_has_the_limit_of_all_collectives(kind: type) -> None:
    """By a method that this backend of torch has."""
    given: list[Any] = []
    names = [name for name in ("set_timeout", "_set_default_timeout") if hasattr(kind, name)]

    def backend(number: int, device: torch.device) -> SimpleNamespace:
        def note(limit: timedelta) -> None:
            given.append((number, device, limit))

        return SimpleNamespace(**dict.fromkeys(names, note))

    groups = [SimpleNamespace(_get_backend=partial(backend, number)) for number in range(2)]
    mesh: Any = SimpleNamespace(device_type="cpu", get_all_groups=lambda: groups)
    limit = timedelta(seconds=7)
    assert shard.with_timeout(mesh, limit) is mesh
    assert given == [(number, torch.device("cpu"), limit) for number in range(2)]


@pytest.mark.parametrize("lora", [None, object()])
def test_blocks_are_sharded_before_their_networks_and_gradients_wait_for_the_last_micro_batch(
    monkeypatch: pytest.MonkeyPatch, lora: Any
) -> None:
    done: list[Any] = []

    class Sharded:
        """What `fully_shard` makes of a network."""

        def set_requires_all_reduce(self, on: bool) -> None:
            done.append(("all_reduce", on))

        def set_requires_gradient_sync(self, on: bool) -> None:
            done.append(("gradient_sync", on))

    policy: Any = SimpleNamespace(
        wrap_units=lambda: ["block 0", "block 1"], all_networks=lambda: ["network", "reference"],
        adapter=SimpleNamespace(lora=lora), dtype=torch.float32, transformer=Sharded(),
    )  # fmt: skip
    monkeypatch.setattr(shard, "fully_shard", lambda unit, **facts: done.append((unit, facts)))
    shard.shard_policy(policy, "mesh")  # type: ignore[arg-type]
    facts = {"mesh": "mesh", "mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)}
    assert done == [
        ("block 0", facts),
        ("block 1", facts),
        ("network", facts | {"reshard_after_forward": True}),
        ("reference", facts | {"reshard_after_forward": True}),
    ]
    done.clear()
    shard.synchronise_gradients(policy, on=False)
    assert done == [], "replicas: nothing to switch"
    monkeypatch.setattr(shard, "FSDPModule", Sharded)
    for on in (False, True):
        shard.synchronise_gradients(policy, on=on)
    assert done == [("gradient_sync" if lora else "all_reduce", on) for on in (False, True)]


def test_one_trainer_communicates_nothing() -> None:
    found = parameters()
    gradients.average_grads(found, 1)
    gradients.follow_first(found, 1)
    gradients.assert_equal_digests("0" * 16, 1, 3)
    assert torch.equal(found[0].grad, parameters()[0].grad)


@pytest.mark.parametrize("factor", [1.0, 0.5, 2.0])
def test_gradients_are_scaled_where_there_are_any(factor: float) -> None:
    found, wanted = parameters(), parameters()
    gradients.scale_grads(found, factor)
    assert found[1].grad is None
    assert all(
        torch.equal(own.grad, factor * other.grad)
        for own, other in zip(found, wanted, strict=True)
        if other.grad is not None
    )


def test_digests_that_differ_in_any_digit_are_refused(
    group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = "0123456789abcdef"
    gradients.assert_equal_digests(own, 2 - 1, 7)
    for position in range(16):
        other = own[:position] + "f" + own[position + 1 :]

        def gathered(everyone: list[Tensor], mine: Tensor, other: str = other) -> None:
            everyone[0].copy_(mine)
            everyone[1].copy_(torch.tensor([int(other[:8], 16), int(other[8:], 16)]))

        monkeypatch.setattr(dist, "all_gather", gathered)
        if other == own:
            gradients.assert_equal_digests(own, 2, 7)
        else:
            with pytest.raises(WeightsError, match="different weights at version 7"):
                gradients.assert_equal_digests(own, 2, 7)


def test_all_trainers_follow_the_choices_of_the_first_until_they_are_forgotten() -> None:
    store = Store()
    controls = store.controls(2)[1]
    first, second = (
        Agreement(control, World(rank, 2, 0), Progress()) for rank, control in enumerate(controls)
    )
    assert [first.agree_on_choice(choice) for choice in (4, -1)] == [4, -1]
    assert [second.agree_on_choice(9) for _ in range(2)] == [4, -1]
    second.forget_choices()
    assert controls[0].get("agreed/1") == "4", "the first deletes them"
    first.forget_choices()
    assert [controls[0].get(f"agreed/{number}") for number in (1, 2)] == [None, None]
    assert first.agree_on_choice(5) == second.agree_on_choice(0) == 5
    first.forget_choices()
    assert controls[0].get("agreed/3") is None
    store.close()
