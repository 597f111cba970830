"""`digenrl profile`: what it measures, and that the planner reads what it writes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from digenrl import config as configuration
from digenrl.extensions.planner.cli import profile
from digenrl.extensions.planner.costing import Costing
from digenrl.extensions.planner.reading import workload
from digenrl.extensions.tasks.digits import DigitsPolicy
from digenrl.hardware import parse_hardware

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
    decode = DigitsPolicy.decode

    def slow(policy: DigitsPolicy, latents: Any) -> Any:
        time.sleep(0.2)  # a task of two samples: 0.1 s a sample
        return decode(policy, latents)

    monkeypatch.setattr(DigitsPolicy, "decode", slow)
    table, lines = measured(capsys, tmp_path, "experiment=digits_flowgrpo")
    assert list(table) == ["encode", "generate", "decode", "score", "train"]
    assert all(list(pools) == ["local"] and pools["local"] > 0 for pools in table.values())
    assert 0.1 <= table["decode"]["local"] < 0.2
    units = {line.split()[0]: int(line.split()[2]) for line in lines[1:-1]}
    assert units == {
        "encode": 1,
        "generate": 2,
        "decode": 2,
        "score": 2,
        "train": 2 * 3,
    }  # 3 of 4 steps are trained


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
    costing = Costing(workload(composed), parse_hardware(composed.config.hardware))
    seconds = costing.seconds_per_unit()
    for stage in ("generate", "decode", "train"):
        assert seconds[stage]["local"] == pytest.approx(given[stage]["local"])
    rank = costing.cluster(costing.candidate(1, 1, task_size=2)).ranks[1]
    assert rank.step_seconds == pytest.approx(given["generate"]["local"] * 2 / 6)


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
