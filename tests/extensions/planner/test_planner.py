"""Plans: the bound can be recomputed, the choice is near an exhaustive sweep's, roles and memory
are obeyed."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from digenrl import config as configuration
from digenrl.cli import sweeps
from digenrl.cli.main import main
from digenrl.config.command_settings import schema_of
from digenrl.config.validation import keys_of
from digenrl.extensions.planner import enumeration, planner
from digenrl.extensions.planner.advice import PlannerAdvisor, planned_split
from digenrl.extensions.planner.bound import seconds_per_unit, solve_bound, step_bound
from digenrl.extensions.planner.cli import plan as plan_command
from digenrl.extensions.planner.cli.plan import as_configured
from digenrl.extensions.planner.costing import Costing
from digenrl.extensions.planner.enumeration import context_sizes, fit_candidate, task_sizes
from digenrl.extensions.planner.evaluation import evaluation_seconds
from digenrl.extensions.planner.gpus import efficiency_of
from digenrl.extensions.planner.outcome import CandidateOutcome, simulate_candidate
from digenrl.extensions.planner.plan_text import (
    EXPLAINED,
    Booking,
    as_json,
    booking_lines,
    candidate_table,
    eligible_outcomes,
    explain_winner,
    train_words,
)
from digenrl.extensions.planner.planner import PlanError, make_plan
from digenrl.extensions.planner.reading import candidate_of, costing_of
from digenrl.extensions.planner.workload import Drawn, Workload
from digenrl.hardware import Hardware, Line, Pool, assign_ranks
from digenrl.recompute import Recompute
from digenrl.settle import settle_run

CONFIGS = Path(__file__).resolve().parents[3] / "configs"

FAST = Pool("fast", "H100", 4, "auto", 80, 989, 3.35, 450, 25, 8)
SLOW = Pool("slow", "RTX", 4, "auto", 48, 165, 1.0, 32, 25, 8)
FLUX = Workload("flux1_dev", 512, 512, 1, 6, 5, 8, 8, 2, False, 64, rewards=("pickscore",))
HUNYUAN = Workload("hunyuan_video", 480, 480, 53, 16, 9, 32, 24, 1, False, None)


@pytest.fixture(scope="module")
def costing() -> Costing:
    return Costing(FLUX, Hardware((FAST, SLOW)))


@pytest.mark.heavy
def test_pools_in_two_places_are_planned_with_trainers_in_one() -> None:
    line = Line(0.0125, 0.02)
    work = replace(FLUX, updates=1)
    plan = make_plan(
        Costing(work, Hardware((FAST, SLOW), lines={frozenset(("fast", "slow")): line})),
        asynchronous=False,
    )
    for outcome in plan.outcomes:
        trainers = {
            pool
            for pool, role in plan.costing.place_ranks(outcome.candidate).ranks
            if role == "trainer"
        }
        assert len(trainers) == 1
        assert outcome.candidate.rollouts


SMALL = ("experiment=qwen_image_flowgrpo", "hardware=node_8xh100", "data.prompts_per_batch=8")


@pytest.mark.heavy
def test_a_run_without_a_schedule_gets_the_planners_and_keeps_it_when_resumed(
    tmp_path: Path,
) -> None:
    plain = configuration.load([*SMALL, f"output_root={tmp_path}"])
    best = eligible_outcomes(make_plan(costing_of(plain)), asynchronous=False)[0]
    composed = settle_run(plain, PlannerAdvisor())
    config = composed.settings
    found = candidate_of(
        config, config.allocation.trainers, config.allocation.rollouts, costing_of(plain).work.steps
    )
    assert (found.trainers, found.rollouts, found.sharding) == (
        best.candidate.trainers, best.candidate.rollouts, best.candidate.sharding,
    )  # fmt: skip
    assert replace(found.spec, trained_steps=0) == replace(best.candidate.spec, trained_steps=0)
    (said,) = (note for note in composed.notes if note.startswith("schedule=auto: "))
    assert f"{best.step_s:.2f} s per step" in said
    assert composed.planned is not None
    assert composed.planned["sync_step_s"] > composed.planned["step_s"] == best.step_s

    run = configuration.prepare_run_dir(composed)
    again = settle_run(configuration.load([f"resume={run}"]), PlannerAdvisor())
    assert again.settings.schedule == config.schedule
    assert again.settings.allocation == config.allocation
    assert again.planned is None


@pytest.mark.heavy
def test_what_is_given_is_not_the_planners() -> None:
    given = {
        "allocation.trainers": 5,
        "sampling.task_size": 4,
        "schedule.tag": False,
        "schedule.tsp.batch": 1,
    }
    config = settle_run(
        configuration.load([*SMALL, *(f"{key}={value}" for key, value in given.items())]),
        PlannerAdvisor(),
    ).settings
    assert {key: OmegaConf.select(config.tree, key) for key in given} == given
    assert config.allocation.rollouts == 3


@pytest.mark.heavy
@pytest.mark.parametrize(("experiment", "gap"), [("qwen_image_nft", 0), ("wan21_flowgrpo", 1)])
def test_where_nothing_can_be_planned_groups_train_as_they_complete_if_they_may(
    experiment: str, gap: int
) -> None:
    schedule = settle_run(
        configuration.load([f"experiment={experiment}", "hardware=cpu_tiny"]), PlannerAdvisor()
    ).settings.schedule
    assert (schedule.auto, schedule.gap) == (False, gap)


@pytest.mark.heavy
@pytest.mark.parametrize("processes", [None, 6])
def test_a_role_of_auto_asks_the_planner_for_the_split(processes: int | None) -> None:
    """All splits that fit, simulated, against the one that a run without allocation.* starts
    with."""
    words = [
        "experiment=flux1_flowgrpo",
        "hardware=node_8xh100",
        "schedule=sync",
        "schedule.tag=true",
    ]
    composed = configuration.load(words)
    chosen = planned_split(composed, processes)
    costing, ranks = costing_of(composed), processes or 8
    assert chosen is not None
    assert chosen.candidate.trainers + chosen.candidate.rollouts == ranks
    steps = costing.work.trained_steps
    splits = [
        candidate_of(composed.settings, trainers, ranks - trainers, steps)
        for trainers in range(1, ranks)
    ]
    every = [
        simulate_candidate(costing, split, step_bound(costing)).step_s
        for split in splits
        if not costing.find_misfits(split)
    ]
    assert len(every) > 2
    assert chosen.step_s == min(every) < max(every)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "words",
    [
        ["hardware=node_8xh100", "allocation.trainers=2"],
        ["hardware=node_8xh100", "hardware.pools.h100.role=trainer"],
        ["hardware=cpu_tiny"],
        ["hardware=single_gpu"],
    ],
    ids=["number", "role", "tiny build", "one rank"],
)
def test_what_is_settled_is_not_planned(words: list[str]) -> None:
    assert planned_split(configuration.load(["experiment=flux1_flowgrpo", *words])) is None


def test_a_key_is_known_by_the_name_that_a_user_writes() -> None:
    assert "plan.async" in keys_of(schema_of("plan"))


@pytest.mark.heavy
def test_plan_json_carries_what_the_bound_needs(costing: Costing) -> None:
    plan = make_plan(costing)
    text = json.loads(json.dumps(as_json(plan, None, "", True, Booking(10))))
    bound = solve_bound(text["pools"], text["work"], text["seconds_per_unit"])
    assert bound == pytest.approx(text["bound_step_s"])
    steps = [
        row["robust_step_s"]
        for row in text["candidates"]
        if row["settled"] and not row["async_steps"]
    ]
    quickest = min(
        row["step_s"] for row in text["candidates"] if row["settled"] and not row["async_steps"]
    )
    assert text["best"]["on_policy"]["step_s"] <= 1.05 * quickest
    assert text["best"]["on_policy"]["robust_step_s"] == steps[0]
    for row in text["candidates"]:
        assert row["efficiency"] == pytest.approx(bound / row["step_s"])
        assert row["efficiency"] <= 1.0
        explained = row["step_s"] <= EXPLAINED * text["candidates"][0]["step_s"]
        assert bool(row["limits"]) == explained
        assert not explained or sum(limit["seconds"] for limit in row["limits"]) == pytest.approx(
            row["step_s"] - bound, abs=1e-6
        )
        assert set(row["memory_gib"]) == (
            {"trainer", "rollout"} if row["rollouts"] else {"trainer"}
        )
    assert text["best"]["on_policy"]["async_steps"] == 0
    assert text["best"]["async"]["async_steps"] == 1
    assert text["best"]["colocated"]["rollouts"] == 0
    lines = explain_winner(plan, False)
    assert len(lines) == 2
    winner = next(o for o in plan.outcomes if o.candidate.spec.async_steps == 0)
    assert ("Colocated wins" in lines[1]) == (winner.candidate.rollouts == 0)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "pools", [(FAST,), pytest.param((FAST, SLOW), marks=pytest.mark.slow)], ids=["equal", "unequal"]
)
def test_the_choice_is_within_5_percent_of_an_exhaustive_sweep(pools: tuple[Pool, ...]) -> None:
    costing = Costing(FLUX, Hardware(pools))
    best = make_plan(costing).best_of_kind("on_policy")
    assert best is not None
    gpus, unequal, bound_s = costing.hardware.gpus, len(pools) > 1, step_bound(costing)
    firsts = [pool.name for pool in pools] if unequal else [None]
    sweep = []
    for first, trainers, size, gap, tag in itertools.product(
        firsts, range(1, gpus + 1), task_sizes(costing), (0, 1, 2), (False, True)
    ):
        if trainers == gpus and (tag or first != firsts[0]):
            continue
        base = costing.make_candidate(
            trainers, gpus - trainers, first=first, task_size=size, gap=gap, tag=tag, shares=unequal
        )
        if (candidate := fit_candidate(costing, base)) is not None:
            sweep.append(simulate_candidate(costing, candidate, bound_s))
    assert len(sweep) > 80
    fastest = sorted(sweep, key=lambda outcome: outcome.step_s)[:5]
    robust = [
        simulate_candidate(costing, outcome.candidate, bound_s, exact=True).robust_s
        for outcome in fastest
    ]
    assert best.robust_s <= 1.05 * min(robust), "what the plan ranks by"
    assert best.step_s <= 1.05 * fastest[0].step_s


def test_a_sharding_is_simulated_where_its_like_leaves_it_a_chance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two GPUs: the floor of sharded trainers is a little above the time of the best replicas.
    They are simulated all the same, and no run whose own kind has beaten its floor is. A
    simulation is cut off where it is clearly slower than the second best."""
    simulated: list[tuple[str, float, float]] = []

    def watched(costing: Costing, candidate: Any, *words: Any, **more: Any) -> CandidateOutcome:
        outcome = simulate_candidate(costing, candidate, *words, **more)
        if not more.get("exact"):
            second = [math.inf, math.inf, *sorted((s for *_, s in simulated), reverse=True)][-2]
            assert more["cutoff_s"] == planner.CUTOFF * second
            simulated.append(
                (candidate.sharding, costing.step_floor(candidate), outcome.expected_s)
            )
        return outcome

    monkeypatch.setattr(planner, "simulate_candidate", watched)
    qwen = replace(FLUX, model="qwen_image")
    make_plan(Costing(qwen, Hardware((replace(FAST, count=2),))), fixed={"rollouts": 0})
    best: dict[str, float] = {}
    for sharding, floor, seconds in simulated:
        assert floor < best.get(sharding, math.inf)
        best[sharding] = min(seconds, best.get(sharding, math.inf))
    sharding, floor, _ = simulated[-1]
    assert sharding == "hsdp"
    assert best["ddp"] < floor < planner.RIVAL * best["ddp"]


def test_other_hardware_is_asked_anew() -> None:
    few = Costing(FLUX, Hardware((FAST,)))
    candidate = few.make_candidate(4, 0, sharding="fsdp", recompute=None)
    assert few.build_cluster(candidate).ranks
    slow = replace(few, hardware=Hardware((SLOW,)))
    assert {pool for pool, _ in slow.place_ranks(candidate).ranks} == {"slow"}
    assert slow.cell_seconds(candidate) > few.cell_seconds(candidate)


@pytest.mark.heavy
def test_roles_of_a_profile_are_obeyed() -> None:
    hardware = Hardware((replace(FAST, role="rollout"), SLOW))
    plan = make_plan(Costing(FLUX, hardware))
    assert plan.best_of_kind("colocated") is None
    for outcome in plan.outcomes:
        assert all(
            role == "rollout"
            for pool, role in outcome.costing.place_ranks(outcome.candidate).ranks
            if pool == "fast"
        )
    with pytest.raises(
        ValueError, match=r"allocation.trainers = 5: the hardware profile has 4 GPUs left"
    ):
        assign_ranks(hardware, 5, 1)


def test_overrides_name_the_pools_that_the_placement_needs(costing: Costing) -> None:
    for first, trainers, words in [
        ("slow", 2, ["hardware.pools.fast.role=rollout"]),
        ("fast", 6, ["hardware.pools.fast.role=trainer"]),
    ]:
        outcome = simulate_candidate(
            costing,
            costing.make_candidate(trainers, 8 - trainers, first=first),
            step_bound(costing),
        )
        named = [word for word in train_words(outcome) if word.startswith("hardware")]
        assert named == words
        pools = {p.name: p for p in costing.hardware.pools}
        for word in named:
            name = word.split(".")[2]
            pools[name] = replace(pools[name], role=word.partition("=")[2])
        hardware = Hardware(tuple(pools.values()))
        assert sorted(assign_ranks(hardware, trainers, 8 - trainers)) == sorted(
            costing.place_ranks(outcome.candidate).ranks
        )


def test_what_does_not_fit_says_why() -> None:
    small = Hardware((replace(SLOW, memory_gib=12),))
    with pytest.raises(
        PlanError,
        match=r"nothing fits: .*trainer on slow \(RTX\) needs .* GiB of 10\.8 GiB \(90% of 12\)",
    ):
        make_plan(Costing(HUNYUAN, small))
    mostly = replace(SLOW, name="most", memory_gib=12, count=3, role="rollout")
    unequal = Hardware((replace(SLOW, memory_gib=12, count=1), mostly))
    with pytest.raises(
        PlanError, match=r"nothing fits: 1 trainers: rollout on most .*, trainer on slow"
    ):
        make_plan(Costing(HUNYUAN, unequal))


@pytest.mark.parametrize(
    ("apart", "share", "said"),
    [
        (False, 0.6, r"= 0\.6: as many bytes .* 4 trainers .*: set .*compress=off\.$"),
        (True, "off", r"= off: .* line between 8 trainers: set .*=auto\.$"),
        (True, 0.6, r"= 0\.6: as many bytes .* 8 trainers .*: set .*=auto\.$"),
    ],
    ids=["share", "line", "share over a line"],
)
def test_a_refused_exchange_of_gradients_is_no_matter_of_roles(
    apart: bool, share: Any, said: str
) -> None:
    hardware = Hardware((replace(SLOW, count=8),))
    if apart:
        here, far = (replace(SLOW, name=name, role="trainer") for name in ("here", "far"))
        lines = {frozenset(("here", "far")): Line(0.2)}
        hardware = Hardware((here, far, replace(SLOW, role="rollout")), lines=lines)
    with pytest.raises(PlanError, match=said) as caught:
        make_plan(Costing(replace(FLUX, gradient_share=share), hardware))
    assert "roles" not in str(caught.value)
    change = str(caught.value).rpartition("=")[2].rstrip(".")
    assert make_plan(Costing(replace(FLUX, gradient_share=change), hardware), steps=3).outcomes


def test_too_many_values_for_a_line_leave_an_adapter() -> None:
    """Whole gradients may not cross the line either."""
    pools = [replace(FAST, name=n, role="trainer", memory_gib=999) for n in ("here", "far")]
    lines = {frozenset(("here", "far")): Line(0.2)}
    hardware = Hardware((*pools, replace(FAST, role="rollout")), lines=lines)
    work = replace(FLUX, lora_rank=None, gradient_share="auto")
    with pytest.raises(
        PlanError, match=r"values are trained, .*: train an adapter \(model\.lora\)"
    ):
        make_plan(Costing(work, hardware))


def test_a_plan_says_that_replicas_do_not_fit_and_shards_would() -> None:
    hardware = Hardware((replace(FAST, count=8, memory_gib=30),))
    with pytest.raises(PlanError, match=r"trainer on fast .* needs .* or set .*compress=off"):
        make_plan(Costing(replace(HUNYUAN, lora_rank=64, gradient_share=0.01), hardware))


def test_no_split_to_compress_in_is_not_said_to_lack_memory() -> None:
    """Two GPUs of one place: a single trainer has nobody to exchange gradients with."""
    hardware = Hardware((replace(FAST, count=2),))
    for share, said in (("auto", "is accepted (parallel.compress = auto: a single"), ("off", "")):
        plan = make_plan(Costing(replace(FLUX, gradient_share=share), hardware), asynchronous=False)
        assert said in explain_winner(plan, False)[1]
        assert "fits" not in explain_winner(plan, False)[1]


@pytest.mark.heavy
def test_trainers_share_the_tokens_of_what_fits_in_no_other_way() -> None:
    """All weights of Wan 14B at 480 x 832 x 81."""
    node, work = (
        Hardware((replace(FAST, count=8),)),
        Workload("wan21_14b", 480, 832, 81, 20, 10, 8, 8, 1, True, None),
    )
    alone = replace(work, model="flux1_dev")
    best = make_plan(Costing(work, node), steps=4).outcomes[0]
    assert best.candidate.spec.context > 1
    assert f"parallel.context={best.candidate.spec.context}" in train_words(best)
    assert not Costing(work, node).find_misfits(best.candidate)
    assert Costing(work, node).find_misfits(best.candidate.with_changes(context=1))
    assert context_sizes(Costing(alone, node), best.candidate) == []


class EveryThird:
    """A user's own `algorithm.train_steps`."""

    def count_trained(self, steps: int) -> int:
        return steps // 3


def test_a_users_own_step_selection_is_planned() -> None:
    own = f"algorithm.train_steps={{_target_:{__name__}.EveryThird}}"
    words = [
        "experiment=flux1_flowgrpo",
        "hardware=node_8xh100",
        "allow_targets=[tests]",
        "~algorithm.train_steps",
    ]
    composed = configuration.load([*words, f"+{own}", "sampling.steps=9"])
    assert costing_of(composed).work.trained_steps == 3


def test_a_model_without_sizes_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"model=scenes has no counted sizes .*known: .*count_facts"
    ):
        costing_of(configuration.load([]))


def test_measured_seconds_replace_computed_ones() -> None:
    measured = Hardware((FAST,), seconds={"generate": {"fast": 6.0}, "train": {"fast": 2.0}})
    table = seconds_per_unit(Costing(FLUX, measured))
    assert table["generate"]["fast"] == pytest.approx(6.0)
    assert table["train"]["fast"] == pytest.approx(2.0)


@pytest.mark.heavy
@pytest.mark.slow
def test_a_plan_says_that_it_simulates_the_stock_hooks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["experiment=qwen_image_flowgrpo", "hardware=node_8xh100", "data.prompts_per_batch=8"]
    words = [*small, f"output_root={tmp_path}", "plan.plot=false"]
    said = (
        "The plan simulates the stock hooks: what patient.Patient overrides is not in these "
        "figures."
    )
    assert plan_command.main(words) == 0
    assert said not in capsys.readouterr().out
    assert (
        plan_command.main([*words, "strategy._target_=patient.Patient", "allow_targets=[patient]"])
        == 0
    )
    assert said in capsys.readouterr().out


@pytest.mark.heavy
def test_the_command_that_a_plan_ends_with_keeps_every_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned again, the printed line takes the seconds that it promised."""
    monkeypatch.delenv("DIGENRL_CALLER", raising=False)
    mine = tmp_path / "mine ä"
    mine.mkdir()
    own = ["data.prompts_per_batch=8", "data.group_size=8", "max_rl_steps=77"]
    own += ["--config-dir", str(mine), f"output_root={tmp_path / 'ä b'}"]

    def plan(*words: str) -> tuple[list[str], dict[str, Any]]:
        assert plan_command.main([*words, "plan.plot=false"]) == 0
        *_, line, path = capsys.readouterr().out.splitlines()
        assert Path(path).is_relative_to(tmp_path / "ä b")
        return shlex.split(line), json.loads(Path(path).read_text())

    words, first = plan("experiment=qwen_image_flowgrpo", "hardware=testbed_c", *own)
    assert words[:2] == ["digenrl", "train"]
    assert set(own) <= set(words)
    again, second = plan(*words[2:])
    assert second["configured"]["step_s"] == pytest.approx(first["candidates"][0]["step_s"])
    assert set(own) <= set(again)


@pytest.mark.heavy
@pytest.mark.processes
def test_the_command_plans_without_torch(tmp_path: Path) -> None:
    small = ["experiment=qwen_image_flowgrpo", "hardware=h20x16", "data.prompts_per_batch=8"]
    words = [*small, f"output_root={tmp_path}"]
    code = (
        "import sys; from digenrl.extensions.planner.cli.plan import main; code = "
        "main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules, 'torch was imported'; raise SystemExit(code)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    path = Path(run.stdout.strip().splitlines()[-1])
    planned = json.loads(path.read_text())
    best = planned["candidates"][0]
    assert best["async_steps"] == 0  # the experiment's own
    assert (
        planned["configured"]["trainers"] + planned["configured"]["rollouts"] == 16
    )  # what train would start
    assert (path.parent / "plots/gantt.png").stat().st_size > 0
    assert json.loads((path.parent / "trace.json").read_text())["traceEvents"]

    composed = configuration.load(
        [*words, *best["overrides"]]
    )  # train accepts what the plan proposes
    assert composed.settings.allocation.trainers == best["trainers"]
    again = as_configured(composed)
    assert again.step_s == pytest.approx(best["step_s"], rel=0.02)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "recompute", [None, Recompute(inputs=1.0), Recompute(products=0.5, inputs=0.25)]
)
def test_overrides_carry_what_is_recomputed(recompute: Recompute | None) -> None:
    words = ["experiment=qwen_image_flowgrpo", "hardware=h20x16"]
    costing = costing_of(configuration.load(words))
    outcome = simulate_candidate(
        costing, costing.make_candidate(16, 0, recompute=recompute), step_bound(costing)
    )
    composed = configuration.load([*words, *train_words(outcome)])
    assert candidate_of(composed.settings, 16, 0, costing.work.trained_steps).recompute == recompute


@pytest.mark.heavy
def test_a_plan_says_what_to_book_and_for_machines_only_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["experiment=qwen_image_flowgrpo", "hardware=node_8xh100", "data.prompts_per_batch=8"]
    words = [*small, f"output_root={tmp_path}", "plan.plot=false"]
    assert plan_command.main([*words, "plan.price_per_gpu_hour=2"]) == 0
    out = capsys.readouterr().out.splitlines()
    planned = json.loads(Path(out[-1]).read_text())
    assert (
        planned["price"]
        == pytest.approx(2 * planned["gpu_hours"])
        == pytest.approx(16 * planned["hours"])
    )
    assert out[0].startswith("Book 8 x H100-SXM for ")
    assert f"{planned['price']:,.0f} at 2 a GPU-hour" in " ".join(map(str.strip, out))
    assert max(map(len, out[:-1])) <= 100, "one screen"
    (compiled,) = (line.split()[-2] for line in out if line.startswith("With model.compile=true"))
    assert 0.5 < float(compiled) / planned["candidates"][0]["step_s"] < 1
    row, sentence = (line for line in out if line.startswith("as configured"))
    assert row.split()[2:4] == ["8+0", "ddp"]
    assert sentence.startswith("as configured, colocated 8+0 of 8 GPUs: ")
    assert planned["sources"]["train"] == {"h100": "assumed"}
    assert planned["sources"]["generate"] == {"h100": "published"}
    assert plan_command.main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["candidates"]


def command_of(lines: list[str]) -> list[str]:
    """Return the words of the command to train, which may go over several lines."""
    first = next(n for n, line in enumerate(lines) if line.startswith("digenrl train"))
    return shlex.split(" ".join(line.removesuffix("\\") for line in lines[first:-1]))


@pytest.mark.heavy
@pytest.mark.parametrize("prompts", [8, pytest.param(32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("hardware", ["h20x16", "a100x32", "testbed_ac"])
def test_a_plan_of_many_gpus_is_one_screen_of_100_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], hardware: str, prompts: int
) -> None:
    """Seconds follow the prompts of a batch, the text follows the GPUs."""
    words = ["experiment=wan21_flowgrpo", f"hardware={hardware}", "output_root=plans"]
    words += [f"data.prompts_per_batch={prompts}"]
    with contextlib.chdir(tmp_path):
        assert plan_command.main([*words, "plan.plot=false", "plan.simulated_steps=4"]) == 0
    *shown, _ = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= 100
    assert len(shown) <= 50
    assert not re.search(r"\[[^\]]*(,[^\]]*){8}\]", "\n".join(shown)), "no list of many numbers"
    text = " ".join(map(str.strip, shown))
    if "Colocated wins" in text:
        assert "With one-step asynchrony: " in text
        assert "What changes the answer: " in text
        assert ("answer: unequal GPUs" in text) is (hardware != "testbed_ac"), (
            "its GPUs are unequal"
        )
    given = command_of([*shown, ""])
    run = settle_run(configuration.load(given[given.index("train") + 1 :]), PlannerAdvisor())
    assert sum(run.settings.allocation.split) == sum(
        pool.count for pool in run.settings.hardware.pools.values()
    )


@pytest.mark.heavy
def test_where_nothing_fits_the_frozen_base_is_quantized(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["hardware=single_24gb", "data.prompts_per_batch=8", "data.group_size=8"]
    own = [f"output_root={tmp_path}", "plan.plot=false"]
    words = ["experiment=flux1_flowgrpo", *small, *own]
    assert plan_command.main(words) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1].startswith("Run colocated 1+0 with model.quantize=nf4: ")
    said = " ".join(map(str.strip, out))
    refused = said[said.index("as configured: ") :]
    assert " of 21.2 GiB " in refused
    assert ": set model.quantize=nf4 parallel.sharding=ddp." in refused
    command = command_of(out)
    assert "model.quantize=nf4" in command
    run = settle_run(configuration.load(command[command.index("train") + 1 :]), PlannerAdvisor())
    assert run.settings.tree.model.quantize == "nf4"
    assert plan_command.main(["experiment=qwen_image_flowgrpo", *small, *own]) == 3
    needed = re.search(r"needs ([\d.]+) GiB of 21\.2 GiB", capsys.readouterr().err)
    assert needed is not None
    assert float(needed[1]) > 38, "of the model as it is configured"


def test_quantized_weights_are_not_divided() -> None:
    words = ["experiment=flux1_flowgrpo", "hardware=node_8xh100"]
    costing = costing_of(configuration.load(words)).quantized
    assert not costing.find_misfits(costing.make_candidate(8, 0))
    (reason,) = costing.find_misfits(costing.make_candidate(8, 0, sharding="fsdp"))
    assert reason == "quantized weights are not divided among trainers"


def test_a_command_to_train_says_no_word_twice_and_none_of_the_plans_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("DIGENRL_CALLER", raising=False)
    own = ["experiment=a", "data.group_size=8", "+allocation.trainers=3", "plan.plot=false"]
    composed: Any = SimpleNamespace(
        choices={"experiment": "a", "hardware": "b"}, overrides=[*own, "hydra.run.dir=here"]
    )
    words = shlex.split(plan_command.to_train(composed, ["allocation.trainers=4"]))
    assert words == [
        "digenrl", "train", "experiment=a", "hardware=b", "data.group_size=8",
        "allocation.trainers=4",
    ]  # fmt: skip


def test_the_configured_run_is_simulated_rank_by_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    composed = configuration.load(["experiment=flux1_flowgrpo", "hardware=node_8xh100"])
    monkeypatch.setattr(plan_command, "simulate_candidate", lambda *given, **how: how)
    assert as_configured(composed) == {"exact": True}


def test_a_sweep_ends_as_its_combinations_do(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(sweeps, "run_sweep", lambda *given: asked.append(given) or 3)
    assert main(["plan", "-m", "data.group_size=8,16"]) == 3
    assert asked == [(["-m", "data.group_size=8,16"], "plan")]


@pytest.mark.heavy
def test_nothing_fits_is_an_exit_code_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "experiment=hunyuanvideo_dancegrpo",
        "hardware=node_8xh100",
        "hardware.pools.h100.memory_gib=12",
    ]
    assert plan_command.main([*words, f"output_root={tmp_path}"]) == 3
    assert "Use more or larger GPUs, LoRA" in capsys.readouterr().err


EXPERIMENTS = sorted(path.stem for path in CONFIGS.glob("experiment/[!_]*.yaml"))
CASES = list(
    itertools.product(
        [
            name
            for name in EXPERIMENTS
            if not name.startswith(("digits", "mixture", "scenes", "ablation", "sweep", "ocr_tiny"))
        ],
        [
            path.stem
            for path in sorted(CONFIGS.glob("hardware/*.yaml"))
            if path.stem not in ("cpu", "cpu_tiny")
        ],
        (False, True),
        (False, True),
    )
)


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.parametrize("count", [40])
def test_every_experiment_has_a_plan_or_a_reason_on_every_profile(count: int) -> None:
    cases = random.Random(count).sample(CASES, min(count, len(CASES)))
    for experiment, hardware, full, trace in cases:
        composed = configuration.load([f"experiment={experiment}", f"hardware={hardware}"], "plan")
        costing = costing_of(composed)
        if full:
            costing = Costing(replace(costing.work, lora_rank=None), costing.hardware)
        try:
            plan = make_plan(costing)
        except PlanError:
            continue
        winner = eligible_outcomes(plan, asynchronous=True)[0]
        assert winner.settled
        assert winner.efficiency <= 1.0 + 1e-9
        again = simulate_candidate(costing, winner.candidate, plan.bound_s, exact=True, trace=trace)
        assert again.step_s == pytest.approx(winner.step_s, rel=1e-12)
        assert booking_lines(plan, True, Booking(10)) + candidate_table(plan, True, Booking(10), 5)
        assert json.dumps(as_json(plan, None, "", True, Booking(10)))


@pytest.mark.heavy
@pytest.mark.slow
def test_a_batch_wide_advantage_is_planned_as_one_fragment() -> None:
    """`train` refuses gap with it."""
    plan = make_plan(
        costing_of(configuration.load(["experiment=sd35_flowgrpo", "hardware=node_8xh100"], "plan"))
    )
    assert {outcome.candidate.spec.gap for outcome in plan.outcomes} == {0}


def test_an_evaluation_by_rollouts_costs_what_their_waiting_does_not_hide() -> None:
    """Each of four rollouts takes the next prompt when it is free. What outlasts their usual wait
    for weights adds to the step; of the run's last evaluation all does."""
    hardware = Hardware((FAST, SLOW))
    by = {
        on: Costing(replace(FLUX, evaluated=4, rollouts_evaluate=on), hardware)
        for on in (True, False)
    }
    candidate = by[True].make_candidate(4, 4, first="fast")
    assert {name for name, role in by[True].place_ranks(candidate).ranks if role == "rollout"} == {
        "slow"
    }
    first, second = Drawn(1, 4, FLUX.steps), Drawn(5, 4, FLUX.steps)
    one, five = (evaluation_seconds(by[True], drawn, candidate) for drawn in (first, second))
    assert five == pytest.approx(2 * one)
    forwards = one - evaluation_seconds(by[True], replace(first, steps=0), candidate)
    assert evaluation_seconds(by[True], replace(first, steps=28), candidate) == pytest.approx(
        one + (28 / FLUX.steps - 1) * forwards
    )
    assert evaluation_seconds(by[True], replace(first, compared=4), candidate) == pytest.approx(
        one + 2 * forwards
    )
    assert evaluation_seconds(by[False], second, candidate) == pytest.approx(2 * one), (
        "trainers wait for the slowest GPU"
    )
    assert evaluation_seconds(by[True], second, by[True].make_candidate(8, 0)) == pytest.approx(
        one
    ), "nobody else is there"
    outcome, theirs = (
        simulate_candidate(costing, candidate, step_bound(costing))
        for costing in (by[True], by[False])
    )
    assert theirs.evaluation_s(second) == evaluation_seconds(theirs.costing, second, candidate)
    assert 0.0 <= outcome.evaluation_s(first) <= one
    many = replace(first, prompts=400)
    long = outcome.evaluation_s(many)
    assert evaluation_seconds(by[True], many, candidate) - outcome.step_s < long
    assert outcome.evaluation_s(replace(first, prompts=800)) - long == pytest.approx(100 * one)
    short = Booking(10, None, 2, second).run_hours(outcome) * 3600
    assert short == pytest.approx(10 * outcome.step_s + outcome.evaluation_s(second) + five)


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.parametrize(
    ("hardware", "experiment", "share"),
    [
        ("h20x16", "wan21_flowgrpo", 0.97),
        ("h20x16", "flux1_flowgrpo", 0.97),
        ("l40x32", "hunyuanvideo_dancegrpo", 0.80),  # sharded over PCIe: gathering takes 11 %
    ],
)
def test_a_wider_search_finds_no_faster_asynchronous_run(
    monkeypatch: pytest.MonkeyPatch, hardware: str, experiment: str, share: float
) -> None:
    costing = costing_of(
        configuration.load([f"experiment={experiment}", f"hardware={hardware}"], "plan")
    )

    def fastest() -> float:
        outcomes = make_plan(costing).outcomes
        return max(o.efficiency for o in outcomes if o.settled and o.candidate.spec.async_steps)

    found = fastest()
    monkeypatch.setattr(enumeration, "PROMISING", (2, 4))
    monkeypatch.setattr(planner, "NEAR", 8)
    assert found > share
    assert found > 0.99 * fastest()


def test_what_a_node_gathers_over_slow_links_costs_that_node_and_its_share() -> None:
    hardware = Hardware((replace(FAST, per_node=2), replace(SLOW, per_node=2, intra_gb_s=4.0)))
    costing = Costing(FLUX, hardware)
    held = costing.make_candidate(6, 2, first="fast", sharding="hsdp", shares=True, gap=0)
    cluster = costing.build_cluster(held)
    assert (cluster.lockstep, cluster.together) == (True, 2)
    exposed = {rank.pool: rank.exposed_seconds for rank in cluster.trainers}
    gathering = costing.costs.sharding_seconds([hardware.find_pool("fast")], 2)
    assert exposed["fast"] == pytest.approx(
        (1 - efficiency_of(hardware.find_pool("fast")).hidden) * gathering
    )
    assert exposed["fast"] < 0.1 * exposed["slow"]
    paid = {rank.pool: rank.cell_seconds + rank.exposed_seconds for rank in cluster.trainers}
    shares = costing.schedule_spec(held).shares
    assert shares[0] / shares[-1] == pytest.approx(paid["slow"] / paid["fast"])
    floor = costing.step_floor(held)
    assert (
        floor
        <= simulate_candidate(costing, held, step_bound(costing), exact=True).step_s
        < 1.2 * floor
    )


def test_what_is_much_slower_undisturbed_does_not_win_by_bearing_disturbances(
    costing: Costing,
) -> None:
    first = simulate_candidate(
        costing, costing.make_candidate(8, 0, shares=True), step_bound(costing)
    )
    outcomes = []
    for seconds, robust in ((10.0, 13.0), (10.4, 12.0), (11.1, 11.5)):
        result = replace(first.result, step_ends=(0.0, seconds), first=0)
        outcomes.append(replace(first, result=result, quick_s=seconds))
        vars(outcomes[-1])["robust_s"] = robust
    assert [outcome.step_s for outcome in planner._rank_outcomes(outcomes)] == [10.4, 10.0, 11.1]


@pytest.mark.heavy
@pytest.mark.slow
def test_more_gpus_than_tasks_share_the_tokens_of_one_in_training() -> None:
    words = ["experiment=wan21_flowgrpo", "hardware=h20x16", "hardware.pools.c.count=256"]
    best = make_plan(costing_of(configuration.load(words, "plan"))).outcomes[0]
    assert best.candidate.spec.context == 2
    assert best.efficiency > 0.92


def test_a_plan_keeps_the_groups_together_that_an_algorithm_compares() -> None:
    """What it proposes is accepted by a run."""
    from digenrl import config as configuration
    from digenrl.extensions.planner.enumeration import task_sizes
    from digenrl.extensions.planner.reading import costing_of

    words = ["hardware=node_8xh100"]
    assert task_sizes(costing_of(configuration.load(["experiment=sd35_dgpo", *words]))) == [16]
    assert task_sizes(costing_of(configuration.load(["experiment=sd35_nft", *words]))) == [
        1,
        4,
        6,
        8,
    ]


@pytest.mark.heavy
def test_ranks_that_share_their_time_are_never_asynchronous() -> None:
    """Advantages over the batch are planned colocated. What asynchrony would give is asked with
    `async_steps` fixed, and a colocated run of that kind would wait for ever."""
    words = ["experiment=sd35_nft", "hardware=node_8xh100", "data.prompts_per_batch=8"]
    costing = costing_of(configuration.load(words, "plan"))
    plan = make_plan(costing, fixed={"async_steps": 1})
    assert plan.outcomes
    assert all(outcome.candidate.rollouts for outcome in plan.outcomes)
