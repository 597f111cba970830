"""`hardware.emulate=true`: sixteen real processes whose networks sleep, held against the
simulator's prediction."""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path
from statistics import median

import psutil
import pytest
import torch

from digenrl import config as configuration
from digenrl import run
from digenrl.cluster.launcher import Launch, launch_ranks
from digenrl.extensions.planner.advice import PlannerAdvisor
from digenrl.extensions.planner.costing import Costing
from digenrl.extensions.planner.durations import rank_durations
from digenrl.extensions.planner.reading import candidate_of, costing_of, workload_of
from digenrl.extensions.planner.virtual_run import simulate_run
from digenrl.hardware import parse_hardware
from tests.schedule.replaying import replay
from tests.strategy.processes import logs

pytestmark = [pytest.mark.processes, pytest.mark.alone]

TRAINERS, ROLLOUTS = 4, 12
SCALE = 0.07
WORDS = (
    "experiment=wan21_flowgrpo",
    "model=wan21_1_3b",
    "hardware=h20x16",
    "hardware.emulate=true",
    f"hardware.time_scale={SCALE}",
    "schedule=gap_tsp",
    "data.prompts_per_batch=4",
    "data.group_size=4",
    "sampling.steps=10",
    f"allocation.trainers={TRAINERS}",
    f"allocation.rollouts={ROLLOUTS}",
    "max_rl_steps=2",
    "logger=none",
    "~callbacks.evaluation",
)
NOISE = 4.0
"""Sixteen processes on two busy cores: `benchmarks/` measures the difference, this shows that no
stage is missing."""


@pytest.mark.slow
def test_sixteen_emulated_ranks_run_as_predicted_and_leave(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    composed = configuration.load(WORDS)
    config = composed.settings
    sleeps = rank_durations(composed, TRAINERS, ROLLOUTS)
    assert len(sleeps) == TRAINERS + ROLLOUTS
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    began = time.monotonic()
    advice = PlannerAdvisor().advise_ranks(composed, TRAINERS, ROLLOUTS)
    outcome = launch_ranks(
        Launch(TRAINERS, ROLLOUTS, partial(run.fit_rank, config, None, advice), tmp_path)
    )
    wall = time.monotonic() - began
    assert outcome.status == "completed", f"{outcome.cause}\n{logs(tmp_path)}"
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before
    assert len(list((tmp_path / "spans").glob("rank-*.jsonl"))) == TRAINERS + ROLLOUTS

    decisions = [
        json.loads(line)
        for line in (tmp_path / "decisions" / "rank-000.jsonl").read_text().splitlines()
    ]
    told = {row["args"][0] for row in decisions if row.get("event") == "expected"}
    assert told == {"generate", "train", "switch"}, "the profile's costs reach the policy"
    assert replay(decisions) == []

    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    assert [row["rl_step"] for row in steps] == [1, 2]
    measured = median(row["step_s"] for row in steps)
    costing = Costing(workload_of(composed), parse_hardware(config.hardware))
    candidate = candidate_of(config, TRAINERS, ROLLOUTS, costing.work.trained_steps).with_changes(
        gap=1
    )
    predicted = (
        SCALE
        * simulate_run(costing.schedule_spec(candidate), costing.build_cluster(candidate)).step_s
    )
    print(
        f"16 emulated ranks on {os.cpu_count()} cores: step {measured:.2f} s, predicted "
        f"{predicted:.2f} s, "
        f"{wall:.1f} s in all"
    )
    assert predicted / 1.1 < measured < NOISE * predicted


@pytest.mark.slow
def test_emulated_lines_between_places_take_what_the_planner_charges(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    line = "+hardware.links={wan:{between:[a,c],gb_s:0.01}}"
    roles = ("hardware.pools.c.role=trainer", "hardware.pools.a.role=rollout")
    words = [word for word in WORDS if not word.startswith(("hardware=", "allocation."))]
    composed = configuration.load(
        (
            *words,
            "hardware=l40x32_h20x16",
            line,
            *roles,
            "allocation.trainers=1",
            "allocation.rollouts=2",
        )
    )
    config = composed.settings
    costing = costing_of(composed)
    candidate = candidate_of(config, 1, 2, costing.work.trained_steps)
    cluster = costing.build_cluster(candidate)
    sleeps = rank_durations(composed, 1, 2)
    assert sleeps[0].send == sleeps[0].fetch == 0.0
    assert sleeps[1].send == pytest.approx(SCALE * 2 * cluster.rollouts[0].send_seconds)
    assert sleeps[2].fetch == pytest.approx(SCALE * cluster.rollouts[1].fetch_seconds)
    launched = Launch(
        1,
        2,
        partial(run.fit_rank, config, None, PlannerAdvisor().advise_ranks(composed, 1, 2)),
        tmp_path,
    )
    outcome = launch_ranks(launched)
    assert outcome.status == "completed", f"{outcome.cause}\n{logs(tmp_path)}"
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    measured = median(row["step_s"] for row in rows if row["kind"] == "step")
    predicted = SCALE * simulate_run(costing.schedule_spec(candidate), cluster).step_s
    print(f"3 emulated ranks, 2 behind a line: step {measured:.2f} s, predicted {predicted:.2f} s")
    assert predicted / 1.1 < measured < NOISE * predicted
