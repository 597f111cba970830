"""How the planner reads a configuration, and what it makes of `schedule.auto`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from digenrl import config as configuration
from digenrl.api.loop import rl_loop
from digenrl.config import Composed
from digenrl.extensions.planner import advice, reading
from digenrl.extensions.planner.advice import PlannerAdvisor, planned_schedule
from digenrl.extensions.planner.counts import generating_flops
from digenrl.extensions.planner.memory import rollout_memory
from digenrl.extensions.planner.plan_text import explain_winner, train_words
from digenrl.extensions.planner.planner import sync_run
from digenrl.extensions.planner.reading import (
    candidate_of,
    costing_of,
    fixed_choices,
    workload_of,
)
from digenrl.recompute import Recompute
from tests.changed import ABSENT, but

WORDS = (
    "experiment=flux1_flowgrpo", "hardware=node_8xh100", "data.prompts_per_batch=8",
    "data.group_size=8", "sampling.task_size=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def loaded() -> Composed:
    return configuration.load(WORDS, "plan")


@pytest.mark.parametrize(
    ("words", "trained"),
    [
        ({}, 6),
        ({"algorithm__advantage__best_and_worst": None}, None),
        ({"algorithm__advantage__best_and_worst": 4}, None),
        ({"data__group_size": 7}, 6),
        ({"schedule__skip_zero": False}, None),
        ({"algorithm__kl_weight": 0.1}, None),
        ({"algorithm__surrogate": ABSENT}, None),
    ],
)
def test_samples_whose_cells_are_skipped_are_not_trained(
    loaded: Composed, words: dict[str, Any], trained: int | None
) -> None:
    """The six samples with an advantage, of eight. All must be trained for another loss term, for
    an algorithm without a surrogate, and where no cell is skipped."""
    base = {"algorithm__advantage__best_and_worst": 3, "schedule__skip_zero": True}
    config = but(loaded, **base | {"algorithm__kl_weight": 0.0} | words).settings
    assert reading._trained_samples(config) == trained


@pytest.mark.parametrize(
    ("size", "pairs", "trained"), [(8, 1, 2), (4, 1, 4), (8, 3, 6), (2, 1, None), ("auto", 1, 2)]
)
def test_pairs_of_each_task_are_trained(size: int | str, pairs: int, trained: int | None) -> None:
    """Of a group of eight; one task holds a group whose tasks the planner sizes."""
    words = ("experiment=digits_dpo", "data.group_size=8", f"algorithm.pairs={pairs}")
    config = configuration.load([*words, f"sampling.task_size={size}"]).settings
    assert reading._trained_samples(config) == trained
    offline = ["experiment=digits_offline_dpo", "data.group_size=8", "sampling.task_size=8"]
    assert reading._trained_samples(configuration.load(offline).settings) is None


def test_evaluations_go_to_rollouts_where_each_has_room(
    loaded: Composed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool of a trainer is not asked, and encoders that stay on the GPU take room."""
    monkeypatch.setattr(reading, "USABLE", 1.0)
    work = replace(workload_of(loaded), rollouts_evaluate=True, evaluated=1)
    for offloaded, size, rows in ((True, 2, 2), (False, 2, 2), (None, 2, 2), (True, "auto", 1)):
        need = rollout_memory(work, rows, offloaded is False).gib
        (found,) = loaded.settings.as_plain()["hardware"]["pools"].values()
        pool = dict(found)
        for memory, fits in ((need, True), (math.nextafter(need, 0.0), False)):
            pools = {
                "small": {**pool, "memory_gib": 1, "role": "trainer"},
                "one": {**pool, "memory_gib": memory, "role": "rollout"},
                "other": {**pool, "memory_gib": 80, "role": "auto"},
            }
            config = but(
                loaded,
                sampling__task_size=size,
                model__offload_encoders=ABSENT if offloaded is None else offloaded,
                hardware__pools__h100=ABSENT,
                **{f"hardware__pools__{name}": each for name, each in pools.items()},
            ).settings
            assert reading._has_room(config, replace(work, rollouts_evaluate=False)) == fits


@pytest.mark.parametrize(
    ("words", "evaluate"),
    [
        ({}, True),
        ({"hardware__pools__h100__memory_gib": 1}, False),
        ({"hardware__pools__h100__memory_gib": 1, "allocation__evaluation": "rollouts"}, True),
        ({"allocation__evaluation": "trainers"}, False),
        ({"allocation__evaluation": "rollouts", "allocation__rollouts": 0}, False),
        ({"allocation__evaluation": "rollouts", "allocation__rollouts": "auto"}, True),
        ({"allocation__evaluation": "rollouts", "callbacks__evaluation": ABSENT}, False),
    ],
)
def test_rollouts_evaluate_what_there_is_if_they_may(
    loaded: Composed, words: dict[str, Any], evaluate: bool
) -> None:
    composed = but(loaded, **words)
    assert workload_of(composed).rollouts_evaluate == evaluate


@pytest.mark.parametrize(
    ("embedded", "guided"), [(None, True), (0.5, False), (1.0, False), (1.5, True)]
)
def test_a_forward_is_made_twice_where_the_guidance_is_not_the_networks_own(
    loaded: Composed, embedded: float | None, guided: bool
) -> None:
    scale = ABSENT if embedded is None else embedded
    composed = but(loaded, sampling__guidance_scale=3.5, model__true_cfg_scale=scale)
    assert workload_of(composed).guidance == guided


def test_encoders_that_stay_leave_smaller_tasks(
    loaded: Composed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fills the memory fits, and where nothing fits a task is one sample."""
    monkeypatch.setattr(advice, "USABLE", 1.0)
    monkeypatch.setattr(advice, "NEARLY", 0.0)  # the largest that fits
    work = replace(workload_of(loaded), rollouts_evaluate=False)
    resident, away = (rollout_memory(work, 4, stay).gib for stay in (True, False))
    assert away < rollout_memory(work, 8, False).gib < rollout_memory(work, 1, True).gib < resident
    for memory, offloaded, size in (
        (resident, False, 4),
        (math.nextafter(resident, 0.0), False, 2),
        (away, True, 4),
        (away, None, 4),
        (away, False, 1),
    ):
        words = {"hardware__pools__h100__memory_gib": memory}
        stay = ABSENT if offloaded is None else offloaded
        composed = but(loaded, **words, model__offload_encoders=stay)
        assert PlannerAdvisor().task_size(composed, (2, 4, 8)) == size


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ({}, {}),
        ({"allocation__trainers": 3}, {"trainers": 3, "rollouts": 5}),
        ({"allocation__rollouts": 3}, {"trainers": 5, "rollouts": 3}),
        ({"allocation__trainers": 9}, {"trainers": 9, "rollouts": 0}),
        ({"allocation__rollouts": {"min": 1, "max": 2}}, {"trainers": 6, "rollouts": 2}),
        ({"allocation__trainers": 1, "allocation__rollouts": 2}, {"trainers": 1, "rollouts": 2}),
        ({"schedule__skip_zero": False}, {"skip_zero": False}),
        ({"schedule__tag": True}, {"tag": True}),
        ({"schedule__gap": 2}, {"gap": 2}),
        ({"schedule__tsp__batch": 2}, {"tsp_batch": 2}),
        ({"schedule__tsp__batch": "auto"}, {}),
        ({"schedule__claims": "split"}, {"static_claims": True}),
        ({"schedule__shares": "measured"}, {"shares": True}),
        ({"model__offload_encoders": False}, {"encoders": True}),
        ({"model__offload_encoders": True}, {}),
        ({"model__gradient_checkpointing": "auto"}, {}),
        ({"model__gradient_checkpointing": True}, {"recompute": Recompute(inputs=1.0)}),
        ({"parallel__sharding": "fsdp"}, {"sharding": "fsdp"}),
        ({"parallel__sharding": "auto"}, {}),
    ],
)  # fmt: skip
def test_what_a_plan_must_keep_is_what_the_user_has_set(
    loaded: Composed, words: dict[str, Any], found: dict[str, Any]
) -> None:
    """The size of a task has no usual value, so it is kept only where the command line names it."""
    plain = {"model__gradient_checkpointing": "auto", "parallel__sharding": "auto"}
    composed = replace(but(loaded, **plain | words), overrides=())
    costing = costing_of(loaded)
    assert fixed_choices(composed, costing) == {"skip_zero": True} | found
    named = replace(composed, overrides=("sampling.task_size=2", "+schedule.gap=0"))
    kept = fixed_choices(named, costing)
    assert kept == {"skip_zero": True, "gap": 0, "task_size": 2} | found


def test_a_candidate_is_the_configurations(loaded: Composed) -> None:
    found = candidate_of(loaded.settings, 3, 5, 4)
    assert (found.trainers, found.rollouts, found.spec.trained_steps) == (3, 5, 4)
    assert (found.encoders, found.shares, found.static_claims) == (False, False, False)
    assert (found.shard_group, found.spec.shares, found.spec.measured_shares) == (None, (), False)
    other = but(
        loaded,
        parallel__shard_group=2,
        schedule__shares=[1.0, 2.0, 1.0],
        model__offload_encoders=ABSENT,
        model__gradient_checkpointing=ABSENT,
    )
    found = candidate_of(other.settings, 3, 5, 4)
    assert (found.encoders, found.shares, found.shard_group) == (False, True, 2)
    assert (found.recompute, found.spec.shares) == (Recompute(), ())
    each = but(other, model__gradient_checkpointing=["auto", {"inputs": 0.5}, "auto"])
    assert candidate_of(each.settings, 3, 5, 4).recompute is None, "settled for each"


def test_a_schedule_of_auto_is_the_plans_best_but_for_what_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run has two of the profile's eight GPUs. Only schedule.async_steps=1 lets the plan have
    asynchronous runs."""
    named = ("schedule.async_steps=1", "schedule.auto=true", "schedule.tsp.batch=2")
    composed = configuration.load([*WORDS, *named], "plan")
    plan = planned_schedule(composed, 2)
    assert plan is not None
    assert plan.costing.hardware.gpus == 2
    kinds = {(o.candidate.spec.async_steps, o.candidate.spec.tsp_batch) for o in plan.outcomes}
    assert kinds == {(0, 2), (1, 2)}
    monkeypatch.setattr(advice, "make_plan", lambda *words: plan)
    best, made = plan.outcomes[0], PlannerAdvisor().choose_schedule(composed, 2)
    _, why = explain_winner(plan, asynchronous=True)
    assert why != explain_winner(plan, asynchronous=False)[1]
    sync = sync_run(plan.costing, 2)
    assert sync is not None
    assert made.planned == {
        "schedule": best.candidate.name, "step_s": best.step_s, "sync_step_s": sync.step_s,
    }  # fmt: skip
    (said,) = made.notes[len(composed.notes) :]
    assert said.startswith(f"schedule=auto: {best.candidate.name}, 2+0, is the best of ")
    assert f" runs, {sync.step_s / best.step_s:.2f} x schedule=sync (predicted). " in said
    assert f" {why} It sets " in said
    words = said.partition(" It sets ")[2].removesuffix(".").split()
    assert {"allocation.trainers=2", "schedule.auto=false"} < set(words) < set(train_words(best))
    assert not any(word.startswith(("schedule.tsp.batch", "sampling.task_size")) for word in words)
    assert all(word.split("=")[0] not in named for word in words)
    assert made.settings.allocation.trainers == 2
    assert made.settings.schedule.auto is False
    without = replace(plan, outcomes=plan.outcomes[1:])
    monkeypatch.setattr(advice, "sync_run", lambda *_: None)
    assert " runs (predicted). " in advice._with_best_run(composed, without).notes[-1]


def test_a_schedule_of_auto_is_planned_where_the_gpus_are_those_of_the_profile(
    loaded: Composed, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[Any]()
    monkeypatch.setattr(advice, "make_plan", lambda *words: asked.append(words))
    assert planned_schedule(loaded) is planned_schedule(loaded, 8) is None
    assert [(words[0].hardware.gpus, words[1], words[3]) for words in asked] == [
        (8, None, False)
    ] * 2
    assert asked[0][2] == fixed_choices(loaded, asked[0][0])
    (pool,) = loaded.settings.as_plain()["hardware"]["pools"].values()
    pools = {"hardware__pools__one": pool, "hardware__pools__other": pool}
    two = but(loaded, hardware__pools__h100=ABSENT, **pools)
    planned_schedule(two, 16)
    assert asked.pop()[0].hardware.gpus == 16
    planned_schedule(two, 8)
    planned_schedule(but(loaded, hardware__pools__h100__gpu="cpu"))
    assert len(asked) == 2
    tight = but(loaded, hardware__pools__h100__memory_gib=9)
    monkeypatch.undo()
    assert planned_schedule(tight, 1) is None


# ---- forwards of other weights


DIGITS = (
    "callbacks=default",
    "~callbacks.evaluation",
    "logger=none",
    "data.prompts_per_batch=2",
    "data.group_size=4",
    "sampling.task_size=4",
    "sampling.steps=4",
    "model.lora.rank=4",
    "model.lora.alpha=8",
    "schedule.skip_zero=false",
)


@pytest.mark.parametrize(
    ("experiment", "words"),
    [
        ("digits_nft", ()),
        ("digits_nft", ("algorithm.kl_weight=0",)),
        ("digits_awm", ("algorithm.updates_per_batch=1",)),
        ("digits_awm", ("algorithm.updates_per_batch=2",)),
        ("digits_awm", ("algorithm.old_weight=0", "algorithm.kl_weight=0")),
        ("digits_dgpo", ("algorithm.updates_per_batch=1",)),
        ("digits_dgpo", ("algorithm.ratio_clip=null", "algorithm.kl_weight=0")),
        ("digits_rvm", ()),
        ("digits_dpo", ("algorithm.pairs=2",)),
        ("digits_flowgrpo", ("algorithm/surrogate=decoupled", "algorithm.updates_per_batch=2")),
    ],
)
@pytest.mark.heavy
def test_forwards_of_other_weights_are_those_of_a_run(
    experiment: str, words: tuple[str, ...]
) -> None:
    """Rows of the network without and with a gradient, counted in the updates of an RL step."""
    loop = rl_loop(f"experiment={experiment}", *DIGITS, *words)
    made, rows = loop.generate(), {True: 0, False: 0}
    predict = loop.policy.predict

    def counting(latents: Any, sigmas: Any, condition: Any) -> Any:
        rows[torch.is_grad_enabled()] += len(latents)
        return predict(latents, sigmas, condition)

    loop.policy.predict = counting  # type: ignore[method-assign]
    loop.train(made)
    settings = configuration.load([f"experiment={experiment}", *DIGITS, *words]).settings
    planned = reading.old_forwards(settings) + reading._compares_with_base(settings)
    assert rows[False] / rows[True] == planned


def test_an_adapter_that_generates_costs_memory_and_time(loaded: Composed, tmp_path: Any) -> None:
    """The numbers in its file decide, on ranks of both roles. Trained cells cost the same as
    before."""
    numbers = {f"{i}.lora_A.weight": torch.zeros(64, 3072) for i in range(4)}
    save_file(numbers, tmp_path / "turbo.safetensors")
    changed = {"sampling__lora": str(tmp_path / "turbo.safetensors")}
    plain, costing = costing_of(loaded), costing_of(but(loaded, **changed))
    work, pool = costing.work, costing.hardware.pools[0]
    assert work.sampling_parameters == 4 * 64 * 3072
    assert rollout_memory(work, 1, False).total - rollout_memory(plain.work, 1, False).total == (
        2 * work.sampling_parameters
    )
    flops = 2 * work.sampling_parameters * (work.tokens + work.text_tokens)
    assert generating_flops(work) - generating_flops(plain.work) == flops
    assert costing.costs.step_seconds(pool, 4) > plain.costs.step_seconds(pool, 4)
    recompute = Recompute(inputs=1.0)
    assert costing.costs.cell_seconds(pool, 4, 1, recompute) == plain.costs.cell_seconds(
        pool, 4, 1, recompute
    )
    (tmp_path / "turbo.safetensors").write_bytes(b"no adapter")
    with pytest.raises(ValueError, match=r"sampling\.lora = .*is no safetensors file"):
        workload_of(but(loaded, **changed))
