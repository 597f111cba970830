"""Gradients of which only the largest values travel, between real processes over gloo: what is sent
and what waits, equal weights, resumed runs, and a run by the launcher."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from digenrl import config
from digenrl.advisor import PlainAdvisor
from digenrl.callbacks.checkpoint import Checkpoint
from digenrl.config.stored import read_stored
from digenrl.extensions.planner.links import gradient_bytes
from digenrl.settle import gradient_share, with_allocation
from digenrl.strategy import exchange
from digenrl.strategy.checkpoint_io import DirectoryCheckpointIO, read_checkpoint
from digenrl.strategy.checkpoint_storage import POLICY
from digenrl.strategy.exchange import UNSENT, GradientExchange, empty_rows
from digenrl.strategy.gradients import average_grads, scale_grads
from tests.strategy.processes import FULL, completed, configured, relative, run_cluster
from tests.strategy.test_gradients import group
from tests.strategy.test_sharded_checkpoints import as_ranks

__all__ = ["group"]
SHAPES = {"a": (7, 3), "b": (5,), "expert": (2, 2)}
VALUES = 30
"""Of all parameters."""


def drawn(step: int, rank: int) -> dict[str, Tensor]:
    """Gradients of a trainer in an update. Nobody has one of the expert in every second update, and
    trainer 0 lacks one of `b` in the first."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    found = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    missing = {"expert"} if step % 2 else {"b"} if (step, rank) == (0, 0) else set()
    return {name: value for name, value in found.items() if name not in missing}


def with_gradients(found: dict[str, Tensor]) -> dict[str, Tensor]:
    made = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for name, value in found.items():
        made[name].grad = value.clone()
    return made


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors.get(name, torch.zeros(s)).flatten() for name, s in SHAPES.items()])


def gathered(own: Tensor, ranks: int) -> list[Tensor]:
    everyone = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(everyone, own)
    return everyone


@pytest.mark.processes
def test_what_was_sent_and_what_waits_are_all_gradients(tmp_path: Path) -> None:
    """Update after update, and every trainer has the same average."""
    ranks, share, scale = 3, 0.1, 0.5

    def train(rank: int) -> None:
        made, given, arrived = GradientExchange(share, ranks), torch.zeros(VALUES), 0.0
        for step in range(6):
            found = drawn(step, rank)
            parameters = with_gradients(found)
            made.average(parameters, scale)
            assert (parameters["expert"].grad is None) is bool(step % 2), "nobody has one"
            average = flat({n: p.grad for n, p in parameters.items() if p.grad is not None})
            assert all(torch.equal(average, other) for other in gathered(average, ranks))
            assert 0 < int(average.count_nonzero()) <= ranks * math.ceil(share * VALUES)
            given, arrived = given + scale * flat(found), arrived + ranks * average
            waiting = flat(made._unsent)
            total = sum(gathered(given, ranks))
            torch.testing.assert_close(arrived + sum(gathered(waiting, ranks)), total)
            assert waiting.abs().max() > 0
            # 3 of 30 values with their places, and whether each of 3 gradients is there.
            assert made.facts == {"gradient_share": 0.1, "gradient_bytes": 2 * (3 * 8 + 3)}

    as_ranks(ranks, train, tmp_path)


@pytest.mark.processes
def test_the_largest_values_travel_and_all_of_them_are_the_dense_average(tmp_path: Path) -> None:
    def train(rank: int) -> None:
        for step in range(2):
            own, dense = with_gradients(drawn(step, rank)), with_gradients(drawn(step, rank))
            GradientExchange(1.0, 2).average(own, 0.5)
            average_grads(dense.values(), 2)
            scale_grads(dense.values(), 0.5)
            off = with_gradients(drawn(step, rank))
            GradientExchange(None, 2).average(off, 0.5)
            for name, parameter in dense.items():
                if parameter.grad is None:
                    assert own[name].grad is None is off[name].grad
                else:
                    assert torch.equal(own[name].grad, parameter.grad)
                    assert torch.equal(off[name].grad, parameter.grad)
        big = {"a": torch.zeros(4)}
        big["a"].grad = torch.tensor([0.1, -9.0, 1.0, 0.2]) if rank == 0 else torch.zeros(4)
        GradientExchange(0.25, 2).average(big, 1.0)
        assert big["a"].grad.tolist() == [0.0, -4.5, 0.0, 0.0]

    as_ranks(2, train, tmp_path)


@pytest.mark.processes
def test_a_value_that_is_not_finite_reaches_all_and_does_not_stay(tmp_path: Path) -> None:
    """The existing check then skips the update on every trainer; the next one is whole again."""

    def train(rank: int) -> None:
        made = GradientExchange(0.1, 2)
        made.average(with_gradients(drawn(0, rank)), 1.0)
        before = flat(made._unsent)
        broken = drawn(1, rank)
        if rank == 1:
            broken["a"][2, 1], broken["a"][0, 0] = math.nan, math.inf
            broken["b"].fill_(math.nan)
        parameters = with_gradients(broken)
        made.average(parameters, 1.0)
        assert not all(parameters[name].grad.isfinite().all() for name in ("a", "b"))
        assert torch.equal(flat(made._unsent), before)
        parameters = with_gradients(drawn(2, rank))
        made.average(parameters, 1.0)
        assert all(p.grad.isfinite().all() for p in parameters.values())

    as_ranks(2, train, tmp_path)


@pytest.mark.processes
def test_what_waits_is_written_by_each_and_read_by_as_many_or_others(tmp_path: Path) -> None:
    """Another number of trainers keeps the average of what waits."""
    path, waiting = tmp_path / "checkpoints" / "step-000001", torch.zeros(2, VALUES)
    for rank in range(2):
        waiting[rank] = flat(drawn(0, rank))

    def write(rank: int) -> None:
        made = GradientExchange(0.1, 2)
        assert made.checkpoint_entry() == {}, "nothing waits"
        made._unsent = drawn(0, rank) | ({"b": torch.zeros(5)} if rank == 0 else {})
        group = dist.new_group(backend="gloo")
        entry = made.checkpoint_entry() | {"state_dict": {"policy.transformer.a": torch.ones(2)}}
        DirectoryCheckpointIO().begin_writing(entry, path, group).wait_until_complete()

    def read(ranks: int, rank: int) -> None:
        found = read_checkpoint(
            path,
            group=dist.group.WORLD,
            room=lambda place, size, dtype: (
                empty_rows(size, torch.device("cpu"))
                if place.startswith(UNSENT)
                else torch.empty(size, dtype=dtype)
            ),
        )
        made = GradientExchange(0.1, ranks)
        made.load_checkpoint(found)
        if ranks == 2:
            assert torch.equal(flat(made._unsent), waiting[rank])
        average = sum(gathered(flat(made._unsent), ranks)) / ranks
        torch.testing.assert_close(average, waiting.mean(dim=0))

    as_ranks(2, write, tmp_path)
    for ranks in (2, 3):
        (tmp_path / f"store-{ranks}").unlink(missing_ok=True)
        as_ranks(ranks, lambda rank, ranks=ranks: read(ranks, rank), tmp_path)  # type: ignore[misc]


@pytest.mark.processes
def test_without_a_share_what_waited_is_added_whole(tmp_path: Path) -> None:
    """A run that compressed goes on with every value, also with one trainer. What has a gradient on
    any trainer counts on all, beside NaN nothing is lost, and the rest waits for its gradient."""

    def train(ranks: int, rank: int) -> None:
        made, waiting = GradientExchange(None, ranks), with_gradients(drawn(4, rank))
        made._unsent = {name: p.grad for name, p in waiting.items() if p.grad is not None}
        given = sum(gathered(flat(made._unsent), ranks)) / ranks
        expert = flat({"expert": torch.ones(2, 2)}) == 1
        for step in (2, 1, 0, 6):  # nobody has the expert's in 1; trainer 0 lacks one of `b` in 0
            own, dense = with_gradients(drawn(step, rank)), with_gradients(drawn(step, rank))
            average_grads(dense.values(), ranks)
            scale_grads(dense.values(), 0.5)
            if step == 2:
                own["a"].grad[0, 0] = math.nan
            made.average(own, 0.5)
            assert made.facts == {}
            if step == 2:
                assert len(made._unsent) == 3
                continue
            assert list(made._unsent) == (["expert"] if step == 1 else [])
            found, expected = (
                flat({name: p.grad for name, p in each.items() if p.grad is not None})
                for each in (own, dense)
            )
            travels = {1: ~expert, 0: expert, 6: torch.zeros_like(expert)}[step]
            torch.testing.assert_close(found, expected + given * travels)
        assert made.checkpoint_entry() == made.checkpoint_entry(before=True) == {}

    for ranks in (1, 2):
        (tmp_path / f"store-{ranks}").unlink(missing_ok=True)
        as_ranks(ranks, lambda rank, ranks=ranks: train(ranks, rank), tmp_path)  # type: ignore[misc]


def test_more_values_than_places_reach_are_refused(
    group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "MOST_VALUES", 29)
    with pytest.raises(ValueError, match=r"compress = 0\.1: 30 values .* at most 29 .*model\.lora"):
        GradientExchange(0.1, 1).average(with_gradients(drawn(0, 0)), 1.0)


def test_a_step_that_is_given_up_keeps_what_waited_before_it(
    group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step has several updates, and the first is done: its checkpoint is of the step before."""
    monkeypatch.setattr("digenrl.callbacks.checkpoint._dump_checkpoint", lambda _: KEPT)
    made = GradientExchange(0.1, 1)
    for step in range(2):
        made.average(with_gradients(drawn(step, 0)), 1.0)
        entries = [made.checkpoint_entry(before)[UNSENT] for before in (False, True) if step]
    callback, lora = Checkpoint(), SimpleNamespace(adapter=SimpleNamespace(lora=object()))
    callback._finished = 1
    strategy: Any = SimpleNamespace(
        state=SimpleNamespace(updates_done=0), spec=SimpleNamespace(updates_per_batch=2),
        engine=SimpleNamespace(policy=lora),
        parts=SimpleNamespace(step=SimpleNamespace(exchange=made)),
    )  # fmt: skip
    trainer: Any = SimpleNamespace(strategy=strategy)
    callback.on_before_optimizer_step(trainer, None, None)  # type: ignore[arg-type]
    kept = callback._weights[UNSENT]
    now, before = entries
    for name in SHAPES:
        assert torch.equal(kept[name].to_local(), before[name].to_local())
    assert not torch.equal(now["a"].to_local(), before["a"].to_local())


KEPT: dict[str, Any] = {"state_dict": {}, "optimizer_states": [], "algorithm": {}}


SHARED = (
    "parallel.compress=0.05",
    "data.prompts_per_batch=2",
    "sampling.steps=3",
    "callbacks.checkpoint.every=2",
)


@pytest.mark.processes
@pytest.mark.parametrize(
    "words",
    [(), pytest.param(("algorithm.updates_per_batch=2", *FULL), marks=pytest.mark.slow)],
    ids=["adapter", "all-weights-two-updates"],
)
def test_two_trainers_stay_equal_and_a_resumed_run_is_the_same(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    """`assert_equal_digests` compares the trainers' weights at every version. The optimizer sees
    other gradients than without compression."""
    whole = configured(*SHARED, *words, "max_rl_steps=4")
    uninterrupted = completed(run_cluster(tmp_path / "whole", 2, 1, whole))

    def stop_after_two(rank: Any, world: object) -> None:
        rank.trainer.fit_loop.max_epochs = 2

    first = run_cluster(tmp_path / "halves", 2, 1, whole, after_build=stop_after_two)
    updates = len(completed(first).gradients)
    second = completed(run_cluster(tmp_path / "halves", 2, 1, whole, resume=True))
    for name, tensor in uninterrupted.weights.items():
        assert torch.equal(second.weights[name], tensor), name
    for mine, other in zip(second.gradients, uninterrupted.gradients[updates:], strict=True):
        assert all(torch.equal(mine[name], tensor) for name, tensor in other.items())
    if not words:
        exact = configured(*SHARED, "parallel.compress=off", "max_rl_steps=1")
        dense = completed(run_cluster(tmp_path / "dense", 2, 1, exact))
        assert relative(uninterrupted.gradients[0], dense.gradients[0]) > 0.1


APART = (
    "hardware.pools.local.count=1",
    "hardware.pools.local.role=rollout",
    *(
        f"+hardware.pools.{name}={{gpu:cpu,count:1,role:trainer,memory_gib:8,tflops:1,hbm_tb_s:1,"
        "intra_gb_s:4,inter_gb_s:4}"
        for name in ("here", "far")
    ),
    "+hardware.links={wan:{between:[here,far],gb_s:0.2}}",
    "allocation.trainers=2",
    "allocation.rollouts=1",
)
"""A trainer in each of two places, joined by a line of 1/20 of their networks' speed."""


@pytest.mark.parametrize(
    ("words", "settled", "said"),
    [
        ([*APART, "parallel.compress=auto"], 0.025, "=0.025: updates are approximate"),
        ([*APART, "parallel.compress=0.1"], 0.1, "=0.1: updates are approximate"),
        (["allocation.trainers=2", "parallel.compress=auto"], "off", "auto compresses nothing"),
        (["allocation.trainers=2"], "off", None),
        (
            [*(w.replace("gb_s:0.2}", "gb_s:9}") for w in APART), "parallel.compress=auto"],
            0.25,
            "=0.25",
        ),
    ],
    ids=["auto", "number", "auto in one place", "off", "a fast line"],
)
def test_auto_is_settled_by_the_line_and_approximation_is_told(
    words: list[str], settled: float | str, said: str | None
) -> None:
    composed = config.load(words)
    made = with_allocation(composed, 2, 1, PlainAdvisor())
    assert made.settings.parallel.compress == settled
    assert gradient_share(made.settings) == (None if settled == "off" else settled)
    told = [note for note in made.notes if "parallel.compress" in note]
    assert len(told) == (said is not None)
    assert all(str(said) in note for note in told)
    # A stored configuration is settled again, to the same.
    assert with_allocation(made, 2, 1, PlainAdvisor()).settings.parallel.compress == settled


FOUR = tuple(word.replace("count:1", "count:4") for word in APART)


@pytest.mark.parametrize(
    ("words", "trainers", "said"),
    [
        (APART, 2, r"\(here: 1, far: 1\); lower it to 1, .* set parallel\.compress=auto, "),
        (FOUR, 6, r"\(here: 4, far: 4\); lower it to 4, .* set parallel\.compress=auto, "),
        (
            [*FOUR, "parallel.sharding=fsdp"],
            6,
            r"lower it to 4, .* set parallel\.compress=auto parallel\.sharding=ddp, ",
        ),
        (
            [*FOUR, "parallel.sharding=fsdp", "parallel.compress=auto"],
            6,
            r"compress = auto .* lower it to 4, .* set parallel\.sharding=ddp, ",
        ),
        (
            [*APART, "parallel.sharding=fsdp", "parallel.compress=auto"],
            2,
            r"far: 1\); change a pool's role, or set parallel\.sharding=ddp, ",
        ),
    ],
    ids=["one each", "four each", "shards", "auto and shards", "auto and shards, one each"],
)
def test_trainers_in_several_places_are_refused_with_what_is_accepted(
    words: list[str], trainers: int, said: str
) -> None:
    """The pool of rollouts, in the place of `here`, has no room for a trainer."""
    with pytest.raises(ValueError, match=rf"trainers = {trainers} with .*{said}") as caught:
        with_allocation(config.load([*words]), trainers, 1, PlainAdvisor())
    message = str(caught.value)
    changes = re.findall(r"or set (.*), which makes updates approximate", message)
    fewer = re.findall(r"lower it to (\d+)", message)
    for change in (*map(str.split, changes), *([f"allocation.trainers={n}"] for n in fewer)):
        composed = config.load([*words, f"allocation.trainers={trainers}", *change])
        number = int(composed.settings.allocation.trainers)
        settled = with_allocation(composed, number, 1, PlainAdvisor())
        assert settled.settings.parallel.sharding != "auto"


def test_shards_in_one_place_are_whole_where_auto_says_so() -> None:
    words = ("parallel.compress=auto", "parallel.sharding=fsdp", "allocation.trainers=2")
    near = with_allocation(config.load([*words]), 2, 1, PlainAdvisor()).settings
    assert (near.parallel.compress, near.parallel.sharding) == ("off", "fsdp")


@pytest.mark.processes
@pytest.mark.heavy
def test_a_launched_run_says_that_its_gradients_are_approximate(running: Any) -> None:
    """Two trainers in different places, of which `auto` knows the line."""
    words = (
        "experiment=mixture_flowgrpo", "logger=none", "max_rl_steps=3", *APART,
        "parallel.compress=auto",
    )  # fmt: skip
    train = running(*words, tiny=())
    assert train.finish() == 0, train.stderr
    assert "parallel.compress=0.025: updates are approximate." in train.stderr
    assert train.summary["gradient_share"] == pytest.approx(0.025, rel=0.1)
    assert "gradients, approximate" in (train.run_dir / "report.html").read_text()
    settings, weights = read_stored(train.run_dir, "run")[0], train.run_dir / "checkpoints/last"
    assert settings.parallel.compress == 0.025
    trained = sum(len(each.flatten()) for each in load_file(weights / POLICY).values())
    for row in train.rows("metrics.jsonl"):
        if row["kind"] == "step":
            # A byte for each parameter says whether its gradient is there.
            assert 0 < row["gradient_bytes"] - gradient_bytes(trained, 2, share=0.025) < 100
            assert row["gradient_bytes"] < 0.06 * gradient_bytes(trained, 2)
