"""`digenrl profile`: what it measures, and that the planner reads what it writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from digenrl import config as configuration
from digenrl.extensions.planner.advice import PlannerAdvisor
from digenrl.extensions.planner.bound import seconds_per_unit
from digenrl.extensions.planner.cli import profile
from digenrl.extensions.planner.costing import Costing
from digenrl.extensions.planner.reading import workload_of
from digenrl.extensions.tasks.digits import DigitsCodec, DigitsPolicy
from digenrl.hardware import parse_hardware
from digenrl.rewards.suite import RewardSuite
from digenrl.settle import settle_run
from tests.training import commands

pytestmark = pytest.mark.heavy

TINY = (
    "sampling.task_size=2",
    "sampling.steps=4",
    "data.prompts_per_batch=2",
    "data.group_size=4",
    "schedule.tsp.batch=all",
)


def measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, *words: str
) -> tuple[dict[str, Any], list[str]]:
    """profile.yaml's table and the lines on standard output."""
    assert profile.main([*TINY, f"output_root={tmp_path}", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    path = Path(lines[-1])
    assert path.name == "profile.yaml"
    table: dict[str, Any] = yaml.safe_load(path.read_text())["seconds"]
    return table, lines


def test_digits_are_measured_per_unit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock goes on by what each call is said to take; the first of six timed calls counts for
    nothing."""
    now, batches = [0.0], list[Any]()
    decoding = iter([7.0, 9.0, 0.2, 0.6, 0.4, 0.8, 1.0])

    def taking(kind: type, name: str, seconds: Callable[[], float]) -> None:
        does = getattr(kind, name)

        def timed(*args: Any, **more: Any) -> Any:
            now[0] += seconds()
            return does(*args, **more)

        monkeypatch.setattr(kind, name, timed)

    taking(DigitsCodec, "encode_prompts", lambda: 0.125)
    taking(DigitsPolicy, "velocity", lambda: 0.5)
    taking(DigitsCodec, "decode", lambda: next(decoding))
    taking(RewardSuite, "score", lambda: 0.3)
    made = profile.training_batch
    monkeypatch.setattr(profile, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(
        profile, "training_batch", lambda *args: batches.append(made(*args)) or batches[0]
    )
    table, lines = measured(capsys, tmp_path, "experiment=digits_flowgrpo")
    rows = [line.split() for line in lines[1:-1]]
    wanted = [
        ("encode", "prompt", 1, 0.125, 0.125, 0.125),
        ("generate", "sample", 2, 1.0, 1.0, 1.0),
        ("decode", "sample", 2, 0.3, 0.1, 0.5),
        ("score", "sample", 2, 0.15, 0.15, 0.15),
        ("train", "cell", 6, 1 / 6, 1 / 6, 1 / 6),
    ]
    assert [(row[0], row[1], int(row[2]), *map(float, row[3:])) for row in rows] == [
        (*row[:3], *(pytest.approx(value, abs=1e-6) for value in row[3:])) for row in wanted
    ]
    assert table == {row[0]: {"local": pytest.approx(row[3], rel=1e-5)} for row in wanted}
    (batch,) = batches
    (block,) = batch.blocks
    assert (block.samples, block.steps.tolist(), block.step, block.group) == (2, [0, 1, 2], 0, 0)
    assert (block.first_sample, block.version, batch.update, batch.version) == (0, 0, 0, 0)
    assert batch.denominator == 2 * 4 * 3 / 2, "of one of two updates"
    (scores,) = batch.rewards.values()
    assert scores.tolist() == [pytest.approx([0.0, 1 / 3, 2 / 3, 1.0])] * 2


def test_algorithms_without_log_probs_are_measured_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    table, _ = measured(capsys, tmp_path, "experiment=digits_nft")
    assert table["train"]["local"] > 0


def test_a_published_experiment_is_measured_on_its_tiny_build_and_the_planner_reads_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["experiment=flux1_flowgrpo", "hardware=cpu_tiny"]
    assert profile.main([*words, f"output_root={tmp_path}"]) == 0
    text = Path(capsys.readouterr().out.splitlines()[-1]).read_text()
    given = yaml.safe_load(text)["seconds"]
    composed = configuration.load(
        [
            *words,
            f"hardware.seconds={yaml.safe_dump(given, default_flow_style=True, width=1000).strip()}",
        ]
    )
    costing = Costing(workload_of(composed), parse_hardware(composed.settings.hardware))
    seconds = seconds_per_unit(costing)
    for stage in ("generate", "decode", "train"):
        assert seconds[stage]["local"] == pytest.approx(given[stage]["local"])
    rank = costing.build_cluster(costing.make_candidate(1, 1, task_size=2)).ranks[1]
    assert rank.step_seconds == pytest.approx(given["generate"]["local"] * 2 / 6)


def test_a_run_calibrates_the_next_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [*TINY, "experiment=digits_flowgrpo", "algorithm.updates_per_batch=1"]
    for start in commands(tmp_path):
        train = start(*words, "max_rl_steps=3", "callbacks=default", tiny=(), fork=True)
        assert train.finish() == 0, train.stderr
    run = train.run_dir
    assert profile.main([f"run={run}"]) == 0
    path = Path(capsys.readouterr().out.splitlines()[-1])
    table = yaml.safe_load(path.read_text())["seconds"]
    spans = [json.loads(line) for file in run.glob("spans/*") for line in file.open()]
    for stage, units in {"generate": 2 * 8, "decode": 2 * 8, "train": 2 * 8 * 3}.items():
        later = [s["end"] - s["start"] for s in spans if s["stage"] == stage and s["step"] > 0]
        assert table[stage]["local"] == pytest.approx(sum(later) / units, rel=1e-3)
    given = yaml.safe_dump({"seconds": table}, default_flow_style=True, width=1000)
    given = given.strip().removeprefix("{seconds: ").removesuffix("}")
    composed = configuration.load([*words, f"hardware.seconds={given}"])
    hardware = parse_hardware(composed.settings.hardware)
    assert hardware.seconds["train"]["local"] == pytest.approx(table["train"]["local"])


def test_a_run_of_one_step_cannot_calibrate(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    composed = configuration.load(["experiment=digits_flowgrpo"])
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(composed.settings.tree))
    assert profile.main([f"run={tmp_path}"]) == 2
    assert "has no second RL step" in capsys.readouterr().err
    assert not (tmp_path / "profile.yaml").exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["hardware=l40x32_h20x16"], "say which of them this machine is"),
        (["hardware=h20x16", "pool=z"], "pool = z: the profile has no such pool; use c"),
        (["hardware.emulate=true"], "sleeps cannot be measured"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert profile.main(["experiment=wan21_flowgrpo", f"output_root={tmp_path}", *words]) == 2
    assert part in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_plan_of_a_profiled_machine_is_its_profile() -> None:
    """The report compares a run with what the profile says: the same units, and the same seconds."""
    told = {"generate": 3.0, "train": 0.7, "decode": 0.2, "score": 0.1}
    words = [f"+hardware.seconds.{stage}.h100={value}" for stage, value in told.items()]
    split = ("allocation.trainers=4", "allocation.rollouts=4", "hardware=node_8xh100")
    composed = settle_run(
        configuration.load(["experiment=flux1_flowgrpo", *split, *words]), PlannerAdvisor()
    )
    advice = PlannerAdvisor().advise_ranks(composed, 4, 4)
    assert advice.planned["seconds"] == {"encode": 0.0} | {
        stage: pytest.approx(value) for stage, value in told.items()
    }
    lines = " ".join(PlannerAdvisor().memory_lines(composed, 4, 4))
    for role, gib in advice.planned["gib"].items():
        assert f"{role}: {gib:.1f} GiB" in lines
