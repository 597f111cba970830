"""The emulated policy: what is trained, and for how long it sleeps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from digenrl.extensions.planner import emulated
from digenrl.extensions.planner.durations import Durations
from digenrl.extensions.planner.emulated import LATENT, EmulatedPolicy
from digenrl.transport.wire import Message, MessageKind

DURATIONS = Durations(
    task_size=2, encode=0.01, step=0.2, decode=0.01, cell=0.3, fetch=0.0, send=0.0
)


@pytest.mark.parametrize("adapter", [False, True])
def test_an_adapter_trains_a_part_of_the_weights(adapter: bool) -> None:
    """The Strategy keeps a copy of a published adapter, never of a whole model: the emulation must
    tell them apart."""
    policy = EmulatedPolicy(DURATIONS, adapter)
    trained = sum(parameter.numel() for parameter in policy.adapter.trained_parameters().values())
    whole = sum(parameter.numel() for parameter in policy.transformer.parameters())
    assert (trained < whole) == adapter


def test_each_kind_of_work_sleeps_in_proportion_to_its_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []

    def took() -> Any:
        found = slept[:]
        slept.clear()
        return pytest.approx(found)

    monkeypatch.setattr(emulated, "time", SimpleNamespace(sleep=slept.append))
    policy = EmulatedPolicy(DURATIONS, adapter=True)
    latents = torch.zeros(3, *LATENT)
    with torch.no_grad():
        velocity = policy.predict(latents[:1], torch.zeros(1), {})
        assert velocity.shape == latents[:1].shape
        assert took() == [0.1]
        with policy.adapter.reference():
            policy.predict(latents, torch.zeros(3), {})
        assert took() == [], "it belongs to a trained cell"
    velocity = policy.predict(latents, torch.zeros(3), {})
    assert took() == [0.15]
    velocity.sum().backward()
    assert took() == [0.3]
    assert policy.transformer.weight.grad is not None
    assert len(policy.codec.encode_prompts([cast(Any, None)] * 3)["text"]) == 3
    assert took() == [0.03]
    assert policy.codec.decode(latents).shape == (3, 3, 8, 8)
    assert took() == [0.015]
    assert policy.sigma_grid(4).tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]

    line = emulated.EmulatedLine(fetch=5.0, send=7.0)
    bucket = {"data": torch.zeros(1)}
    for kind, tensors, there, back in (
        (MessageKind.CELLS, bucket, 7.0, 0.0),
        (MessageKind.STATE, {}, 7.0, 0.0),
        (MessageKind.ASK, {}, 0.0, 0.0),
        (MessageKind.WEIGHTS, bucket, 0.0, 0.0),
        (MessageKind.WEIGHTS, {}, 0.0, 5.0),
    ):
        message = Message(kind, {}, tensors)
        line.prepare_outgoing(message)
        line.accept_incoming(message, cast(Any, None))
        assert took() == [there, back]


def test_emulated_networks_begin_alike_and_draw_no_number_of_the_run() -> None:
    torch.manual_seed(3)
    before = torch.rand(1)
    torch.manual_seed(3)
    one = EmulatedPolicy(DURATIONS, adapter=True)
    assert torch.equal(torch.rand(1), before)
    other = EmulatedPolicy(DURATIONS, adapter=True)
    assert torch.equal(one.transformer.weight, other.transformer.weight)
