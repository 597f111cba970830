"""Parts of src on the strict device, each by itself: what they compute there is the CPU's, and lies
where it belongs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from digenrl import accelerator, devices
from digenrl.algorithms.copies import Ema
from digenrl.models import pipeline_codec
from digenrl.models.offload import Offload
from digenrl.record.span_log import SpanLog
from digenrl.rewards.protocol import resolve_device
from digenrl.rewards.scorer import AsyncScorer
from digenrl.rewards.suite import RewardSuite
from digenrl.rollout.engine import SamplingSpec, ode_samples
from digenrl.transport.weights import (
    Version,
    adopt,
    compute_digest,
    exchanged_values,
    host_copy,
    publish,
)
from digenrl.types import Prompt, move_tensors
from reward_models.jpeg_size import JpegSize
from tests.models.tiny_policies import make, prompt

DEVICE = torch.device("strict", 0)
strict = torch.get_device_module("strict")


def blocks(device: str) -> dict[str, torch.Tensor]:
    """Gradients of six blocks whose activations wait in host memory."""
    torch.manual_seed(0)
    net = nn.ModuleList(
        nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)
    )
    given, run = torch.randn(32, 64).to(device).requires_grad_(), Offload()
    net.to(device)
    hidden = given
    for block in net:
        hidden = hidden + run(block, hidden)
    hidden.square().mean().backward()
    found = {name: p.grad.cpu() for name, p in net.named_parameters() if p.grad is not None}
    assert given.grad is not None
    return found | {"given": given.grad.cpu()}


def test_off_loaded_activations_come_back() -> None:
    there, here = blocks("strict"), blocks("cpu")
    assert all(torch.equal(there[name], here[name]) for name in here)


def test_spans_last_as_long_as_the_device_works_and_nobody_waits(tmp_path: Path) -> None:
    """Ten operators keep the device busy for .3 s; the host has given them long before. A wait that
    ends meanwhile was none, and one that ends later began when the device was done."""
    there, took = torch.ones(3, device=DEVICE), []
    spans = SpanLog(tmp_path / "s.jsonl", 0, "trainer", time.time(), mark=accelerator.mark_work)
    strict.set_op_us(30_000)
    try:
        began = spans.now()
        for stage in ("generate", "decode"):
            with spans.span(stage, took=took.append):
                for _ in range(5):
                    there.add_(1.0)
        with spans.span("wait", cause="tail"):
            pass
        given_s = spans.now() - began
        with spans.span("wait", cause="straggler"):
            time.sleep(0.5)
    finally:
        strict.set_op_us(0)
    spans.close()
    assert given_s < 0.1
    assert took == pytest.approx([0.15, 0.15], abs=0.02)
    rows = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    lasted = {row.get("cause", row["stage"]): row["end"] - row["start"] for row in rows}
    assert lasted["tail"] == 0.0
    assert lasted["straggler"] == pytest.approx(0.2 + given_s, abs=0.05)
    assert lasted["decode"] == pytest.approx(0.15, abs=0.02)


def sent(
    parameters: dict[str, torch.Tensor], like: dict[str, torch.Tensor] | None = None
) -> Version:
    nobody: Any = SimpleNamespace(multicast=lambda routes, message: None)
    return publish(1, parameters, nobody, {}, lambda digest: None, like)


def numbers(device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(1)
    return {name: torch.randn(40, 50, generator=drawn).to(device) for name in "abc"}


@pytest.mark.parametrize("number", [0, 1])
def test_a_version_is_a_copy_in_pinned_memory(number: int) -> None:
    device = torch.device("strict", number)
    mine, plain = numbers(device), numbers()
    version = sent(mine)
    assert all(tensor.is_pinned() for tensor in version.tensors.values())
    assert version.digest == sent(plain).digest, "sent before it was copied"
    mine["a"].add_(1.0)
    assert all(torch.equal(version.tensors[name], plain[name]) for name in plain)
    other = {name: torch.zeros_like(value) for name, value in mine.items()}
    adopt(other, version)
    assert all(value.device == device for value in other.values())
    assert all(torch.equal(value.cpu(), plain[name]) for name, value in other.items())


def test_a_version_is_cast_where_the_weights_are() -> None:
    """A copy across that also casts goes through pageable memory and one thread of the host."""
    mine, plain = numbers(DEVICE), numbers()
    like = {name: value.to("cpu", torch.bfloat16) for name, value in plain.items()}
    casts = strict.calls().get("copy across that casts", 0)
    version = sent(mine, like)
    assert strict.calls().get("copy across that casts", 0) == casts
    assert all(tensor.is_pinned() for tensor in version.tensors.values())
    assert all(torch.equal(version.tensors[name], like[name]) for name in like)
    assert version.digest == sent(plain, like).digest == compute_digest(mine, like)
    like["a"].copy_(mine["a"])  # what is counted
    assert strict.calls()["copy across that casts"] == casts + 1


def test_weights_are_exchanged_and_come_back() -> None:
    own, lent = numbers(DEVICE), {name: value + 1 for name, value in numbers().items()}
    with exchanged_values(own, lent):
        assert all(value.device == DEVICE for value in own.values())
        assert all(torch.equal(own[n].cpu(), value + 1) for n, value in numbers().items())
    assert all(torch.equal(own[name].cpu(), value) for name, value in numbers().items())


def test_a_copy_of_all_weights_waits_pinned_on_the_host_and_changes_places() -> None:
    """What trainers of whole models lend with."""
    own, kept = numbers(DEVICE), host_copy(numbers(DEVICE))
    for name, value in numbers().items():
        kept[name].copy_(value + 1)
    assert all(value.device.type == "cpu" and value.is_pinned() for value in kept.values())
    for _ in range(2):
        with exchanged_values(own, kept):
            assert all(torch.equal(own[n].cpu(), value + 1) for n, value in numbers().items())
            assert all(torch.equal(kept[n], value) for n, value in numbers().items())
        assert all(torch.equal(own[n].cpu(), value) for n, value in numbers().items())


def test_an_average_from_a_checkpoint_follows_its_parameters() -> None:
    parameters = {name: nn.Parameter(value) for name, value in numbers(DEVICE).items()}
    ema = Ema(every=1)
    ema.copy.load_state_dict(numbers())
    ema.update_average(parameters)
    with ema.copy.swapped_into(parameters):
        pass
    assert all(torch.equal(parameters[n].cpu(), value) for n, value in numbers().items())


def test_an_update_takes_one_more_copy_of_the_weights() -> None:
    """The planner's memory model says so: `trainer_memory`."""
    weights = nn.Parameter(torch.ones(1 << 20, device=DEVICE))
    optimizer = torch.optim.AdamW([weights])
    for _ in range(2):  # the first step also makes the optimizer's state
        weights.grad = torch.ones_like(weights)
        before = strict.memory_allocated()
        strict.reset_peak_memory_stats()
        optimizer.step()
    assert strict.max_memory_allocated() - before == pytest.approx(weights.nbytes, rel=0.01)


# ---- scorers ---------------------------------------------------------------------------------


def test_a_scorer_in_a_thread_keeps_to_its_ranks_device() -> None:
    devices.take_gpu(1)
    try:
        assert resolve_device("auto") == resolve_device("strict") == torch.device("strict", 1)
        node = {"_target_": "tests.device.scorers.DeviceNumber"}
        scorer = AsyncScorer(RewardSuite({"number": {"scorer": node}}, placement="thread"))
        found = scorer.submit(torch.rand(2, 3, 4, 4), [Prompt("a")] * 2).result(30)
        scorer.close()
        assert found["number"].tolist() == [1.0, 1.0]
    finally:
        devices.take_gpu(0)


def test_media_of_the_device_are_scored_as_the_cpus() -> None:
    media, prompts = torch.rand(2, 3, 16, 16), [Prompt("a"), Prompt("b")]
    wanted = JpegSize(80)(media, prompts)
    assert torch.equal(JpegSize(80)(media.to(DEVICE), prompts), wanted)
    node = {"_target_": "reward_models.jpeg_size.JpegSize", "quality": 80}
    suite = RewardSuite({"jpeg": {"scorer": node}}, placement="thread")
    scorer = AsyncScorer(suite)
    found = scorer.submit(media.to(DEVICE), prompts).result(30)
    scorer.close()
    assert torch.equal(found["jpeg"], wanted)


# ---- a policy --------------------------------------------------------------------------------


def test_a_policy_encodes_samples_and_decodes() -> None:
    spec = SamplingSpec(steps=2)
    policy = make("flux").to(DEVICE)
    condition = policy.codec.encode([prompt("a red star")])
    assert all(value.device == DEVICE for value in condition.values())
    media = ode_samples(policy, spec, [prompt("a red star")], 2, 0)
    assert media.device.type == "cpu"
    assert media.isfinite().all()
    assert policy.codec._vae.device == DEVICE, "a small decoder stays"
    assert all(encoder.device.type == "cpu" for encoder in policy.codec._encoder_modules())


def test_a_large_decoder_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_codec, "STAYS", 0)
    policy = make("flux").to(DEVICE)
    assert ode_samples(policy, SamplingSpec(steps=1), [prompt("a red star")], 1, 0).isfinite().all()
    assert policy.codec._vae.device.type == "cpu"


def test_what_is_moved_is_moved_whole() -> None:
    x = torch.ones(2)
    moved = move_tensors({"a": x, "b": (x, [x][0])}, DEVICE)
    assert moved["a"].device == moved["b"][0].device == moved["b"][1].device == DEVICE
