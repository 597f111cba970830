"""What trainers do to their gradients and weights together, in a group of one process: sums are the
process's own, so the shares are seen."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from digenrl.cluster.world import World
from digenrl.record.progress import Progress
from digenrl.strategy import gradients
from digenrl.strategy.shard import mixed_precision
from digenrl.strategy.stop_vote import Agreement
from digenrl.transport.weights import WeightsError
from tests.cluster.test_claims import Store


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


def test_gradients_are_divided_by_the_trainers_and_keep_their_places(group: None) -> None:
    found, wanted = parameters(), parameters()
    held = [each.grad for each in found]
    gradients.average(found, 2)
    assert found[1].grad is None, "no trainer has one"
    for own, other, before in zip(found, wanted, held, strict=True):
        if other.grad is not None:
            assert own.grad is before, "in place"
            assert torch.equal(own.grad, other.grad / 2)


def test_replicas_take_the_weights_of_the_first(group: None) -> None:
    own = parameters()
    gradients.follow_first(own, 2)
    assert all(torch.equal(each, other) for each, other in zip(own, parameters(), strict=True))


@pytest.mark.parametrize(
    ("lora", "dtype"),
    [(object(), torch.float32), (object(), torch.bfloat16), (None, torch.float32)],
    ids=["adapter", "adapter in 16 bit", "all weights"],
)
def test_shards_keep_their_dtypes_where_nothing_would_be_cast(lora: Any, dtype: Any) -> None:
    policy: Any = SimpleNamespace(lora=lora, dtype=dtype)
    assert mixed_precision(policy) == MixedPrecisionPolicy(cast_forward_inputs=False)


def test_one_trainer_communicates_nothing() -> None:
    found = parameters()
    gradients.average(found, 1)
    gradients.follow_first(found, 1)
    gradients.assert_equal_digests("0" * 16, 1, 3)
    assert torch.equal(found[0].grad, parameters()[0].grad)


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_gradients_are_scaled_where_there_are_any(factor: float) -> None:
    found, wanted = parameters(), parameters()
    gradients.scale(found, factor)
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
    assert [first.choose(choice) for choice in (4, -1)] == [4, -1]
    assert [second.choose(9) for _ in range(2)] == [4, -1]
    second.forget()
    assert controls[0].get("agreed/1") == "4", "the first deletes them"
    first.forget()
    assert [controls[0].get(f"agreed/{number}") for number in (1, 2)] == [None, None]
    assert first.choose(5) == second.choose(0) == 5
    first.forget()
    assert controls[0].get("agreed/3") is None
    store.close()
