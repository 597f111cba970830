"""One run has one record. A resumed run continues the rows, the W&B run and the configuration of
its loggers. Their x axis counts RL steps, as metrics.jsonl does."""

from __future__ import annotations

import csv
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
import yaml
from lightning.pytorch.loggers import CSVLogger
from wandb.proto import wandb_internal_pb2

from digenrl import config, parts
from digenrl.callbacks.loggers import Guarded, continue_record
from digenrl.callbacks.wandb_logger import WandbLogger
from tests.training import PATIENCE_S, fork_main

FAST = [
    "experiment=digits_flowgrpo",
    "callbacks.checkpoint.every=1",
    "data.group_size=4",
    "data.prompts_per_batch=2",
    "sampling.task_size=4",
    "callbacks.evaluation.samples_per_prompt=2",
    "callbacks.evaluation.max_prompts=2",
    "~callbacks.evaluation.statistics",
]


def records(folder: Path) -> Iterator[Any]:
    """Yield every record of the .wandb files below a folder, in order of time."""
    for file in sorted(folder.glob("offline-run-*/*.wandb"), key=lambda path: path.parent.name):
        for data in log_entries(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            yield record


def log_entries(content: bytes, block: int = 1 << 15) -> Iterator[bytes]:
    """Yield the entries of a LevelDB log with W&B's header of 7 bytes."""
    at, entry = 7, b""
    while at + 7 <= len(content):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        entry += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield entry
            entry = b""


def history(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of the W&B runs below a folder."""
    return [
        {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        for record in records(folder)
        if record.WhichOneof("record_type") == "history"
    ]


def run(words: list[str], folder: Path, name: str) -> Path:
    """Run `digenrl WORDS` to its end, and return the run's directory."""
    environment = os.environ | {
        "WANDB_MODE": "offline",
        **{f"WANDB_{name}_DIR": str(folder / "home") for name in ("CACHE", "CONFIG", "DATA")},
    }
    out, err = (folder / f"{name}.{stream}" for stream in ("out", "err"))
    process = fork_main(words, folder, out, err, environment)
    process.join(PATIENCE_S)
    assert process.exitcode == 0, err.read_text()
    return Path(out.read_text().splitlines()[-1])


@pytest.mark.processes
def test_a_resumed_run_goes_on_in_every_record(tmp_path: Path) -> None:
    loggers = ["+logger.csv._target_=lightning.pytorch.loggers.CSVLogger", "+logger.csv.name=csv"]
    loggers += ["+logger.csv._partial_=true", "+logger.csv.version=''", "logger.wandb.group=seeds"]
    words = ["train", *FAST, "max_rl_steps=2", "logger=wandb", *loggers, f"output_root={tmp_path}"]
    run_dir = run([*words, "logger.wandb.tags=[one,two]"], tmp_path, "first")
    rows = list(csv.DictReader((run_dir / "csv/metrics.csv").open()))
    first = len(rows)
    more = ["max_rl_steps=3", "algorithm.optimizer.lr=1e-5"]
    run(["resume", str(run_dir), *more], tmp_path, "again")
    rows = list(csv.DictReader((run_dir / "csv/metrics.csv").open()))
    assert len(rows) > first
    steps = {row["reward"]: int(row["step"]) for row in rows if row["reward"]}
    assert sorted(steps.values()) == [1, 2, 3], "RL steps, of both attempts"
    reported = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    for line in (line for line in reported if line["kind"] == "step"):
        (same,) = (row for row in rows if row["reward"] and int(row["step"]) == line["rl_step"])
        assert float(same["reward"]) == pytest.approx(line["reward"])
    for folder in ("csv", "tensorboard"):
        stored = yaml.safe_load((run_dir / folder / "hparams.yaml").read_text())
        assert stored["algorithm"]["optimizer"]["lr"] == 1e-5, folder
        assert stored["allocation"]["trainers"] == 1, "settled, not auto"
    runs = [one.run for one in records(run_dir / "wandb") if one.WhichOneof("record_type") == "run"]
    assert len({one.run_id for one in runs}) == 1
    assert {(one.display_name, one.run_group) for one in runs} == {
        (f"digits_flowgrpo {run_dir.name}", "seeds")
    }
    assert list(runs[0].tags) == ["one", "two"]
    found = history(run_dir / "wandb")
    assert {row["rl_step"] for row in found if "reward" in row} == {1, 2, 3}
    configured = [
        update.key or update.nested_key[0]
        for one in records(run_dir / "wandb")
        for update in (*one.run.config.update, *one.config.update)
    ]
    assert {"algorithm", "seed", "allocation"} <= {key.split("/")[0] for key in configured}


def test_rows_of_an_earlier_attempt_stay_with_new_columns(tmp_path: Path) -> None:
    for attempt in range(3):
        logger = CSVLogger(tmp_path, name="csv", version="", flush_logs_every_n_steps=1)
        continue_record(logger)
        logger.log_metrics({"reward": attempt, f"new_{attempt}": 1.0}, step=attempt)
        logger.save()
    rows = list(csv.DictReader((tmp_path / "csv/metrics.csv").open()))
    assert [row["reward"] for row in rows] == ["0", "1", "2"]
    assert rows[0]["new_0"] == rows[2]["new_2"] == "1.0"
    assert [path.name for path in (tmp_path / "csv").iterdir()] == ["metrics.csv"]


def test_rows_survive_a_death_while_they_are_taken_over(tmp_path: Path) -> None:
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv/metrics.kept").write_text("reward,step\n0.5,1\n")
    logger = CSVLogger(tmp_path, name="csv", version="", flush_logs_every_n_steps=1)
    continue_record(logger)
    logger.log_metrics({"reward": 0.75}, step=2)
    logger.save()
    assert len(list(csv.DictReader((tmp_path / "csv/metrics.csv").open()))) == 2


@pytest.mark.parametrize(
    ("updates", "step", "metrics", "expected"),
    [
        (2, 0, {}, 0),  # before training
        (2, 1, {}, 1),
        (2, 2, {}, 1),
        (2, 3, {}, 2),
        (2, 1, {"epoch": 0.0}, 1),  # Lightning's own, one update before the step's last
        (1, 0, {"epoch": 0.0}, 1),
        (4, 8, {}, 2),
    ],
)
def test_a_logger_counts_rl_steps(
    tmp_path: Path, updates: int, step: int, metrics: dict[str, float], expected: int
) -> None:
    logger = CSVLogger(tmp_path, name="csv", version="", flush_logs_every_n_steps=1)
    guarded = Guarded(logger, "csv", tmp_path, updates=updates)
    guarded.log_metrics(metrics | {"reward": 1.0}, step)
    shown: list[int] = []
    guarded.log_pictures(lambda _, at: shown.append(at), step)
    guarded.finalize("success")
    (row,) = csv.DictReader((tmp_path / "csv/metrics.csv").open())
    assert int(row["step"]) == expected
    assert shown == [-(-step // updates)]


@pytest.mark.heavy
def test_what_a_team_needs_of_wandb_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "home"))
    given = {"entity": "lab", "group": "g", "tags": "[a,b]", "notes": "'why, and how'", "id": "abc"}
    words = [f"logger.wandb.{key}={value}" for key, value in given.items()]
    settings = config.load(["experiment=digits_flowgrpo", "logger=wandb", *words]).settings
    logger: WandbLogger = settings.build("logger.wandb")(save_dir=str(tmp_path / "run-0"))
    logger.log_metrics({"reward": 1.0}, 3)
    wandb.finish()
    wandb.teardown()
    (made,) = (
        one.run
        for one in records(tmp_path / "run-0/wandb")
        if one.WhichOneof("record_type") == "run"
    )
    assert (made.run_id, made.entity, made.run_group) == ("abc", "lab", "g")
    assert (list(made.tags), made.notes) == (["a", "b"], "why, and how")
    assert history(tmp_path / "run-0/wandb")[0]["rl_step"] == 3


def test_a_configuration_in_a_logger_holds_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "canary-canary")
    words = ["experiment=digits_flowgrpo", "logger=csv", "experiment_name=x"]
    settings = config.load(words).settings.with_values({"output_root": "/canary-canary/x"})
    for logger in parts.guarded_loggers(settings, tmp_path):
        logger.save()
        logger.finalize("success")
    assert "canary" not in (tmp_path / "csv/hparams.yaml").read_text()
