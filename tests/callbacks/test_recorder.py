"""The recorder on a real Trainer: one line per RL step, events, resumed and broken runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from digenrl.callbacks.recorder import Recorder
from digenrl.report.read_run import read_run
from digenrl.report.summary import run_outcome


class Module(pl.LightningModule):
    """One weight; logs like an algorithm does."""

    def __init__(self, on_batch: Callable[[Module], None] | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.first_ratio_max_dev: float | None = 0.0
        self.on_batch = on_batch

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layer(batch).square().mean()
        self.log("reward", float(self.current_epoch + batch_idx), on_step=False, on_epoch=True)
        self.log("kl", 0.25, on_step=True, on_epoch=True)
        if self.on_batch is not None:
            self.on_batch(self)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.125)


class FactualStrategy(SingleDeviceStrategy):
    """A strategy that offers facts about the step."""

    def step_facts(self) -> dict[str, float]:
        return {"samples": 96.0, "step_s": 2.5, "staleness_max": 1.0}


def fit(path: Path, epochs: int, module: Module | None = None, **settings: Any) -> pl.Trainer:
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        default_root_dir=path,
        callbacks=[Recorder()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        strategy=FactualStrategy(torch.device("cpu")),
    )
    trainer.fit(module or Module(), DataLoader(torch.ones(3, 1), batch_size=1), **settings)
    return trainer


def test_one_line_per_rl_step_with_what_module_and_strategy_know(tmp_path: Path) -> None:
    fit(tmp_path, 3)
    run = read_run(tmp_path)
    assert run.column("rl_step")[0] == [1, 2, 3]
    assert run.column("reward")[1] == [1.0, 2.0, 3.0]  # means over the epoch's three batches
    assert run.column("lr")[1] == [0.125] * 3
    assert run.column("samples")[1] == [96.0] * 3
    assert (
        run.column("step_s")[1] == [2.5] * 3
    )  # the strategy's figure, not the callback's stopwatch
    assert run.column("first_ratio_max_dev") == ([1], [0.0])
    assert "kl" in run.steps[0]
    assert not {"kl_step", "kl_epoch"} & set(run.steps[0])
    assert [event["kind"] for event in run.events] == ["start", "stop"]
    assert run_outcome(run) == ("completed", None)


def test_an_algorithm_without_ratios_records_none(tmp_path: Path) -> None:
    module = Module()
    module.first_ratio_max_dev = None
    fit(tmp_path, 1, module)
    assert "first_ratio_max_dev" not in read_run(tmp_path).steps[0]


def test_clipped_cells_of_a_first_update_are_told_once_while_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def clip(module: Module) -> None:
        share = (0.0, 0.25, 0.5)[module.current_epoch]
        module.log("clip_fraction/first", share, on_step=False, on_epoch=True)

    fit(tmp_path, 1, Module(clip))
    assert "first update" not in caplog.text
    fit(tmp_path / "clipped", 3, Module(clip))
    (told,) = [text for text in caplog.messages if "first update" in text]
    assert told.startswith("Up to 25.0% of a first update's cells were clipped")


def test_a_resumed_fit_is_told_apart_and_continues_the_count(tmp_path: Path) -> None:
    fit(tmp_path, 2).save_checkpoint(tmp_path / "two.ckpt")
    fit(tmp_path, 4, ckpt_path=str(tmp_path / "two.ckpt"))
    run = read_run(tmp_path)
    assert [(event["kind"], event["rl_step"]) for event in run.events] == [
        ("start", 0), ("stop", 2), ("resume", 2), ("stop", 4),
    ]  # fmt: skip
    assert run.column("rl_step")[0] == [1, 2, 3, 4]


def test_an_exception_becomes_a_failure_with_its_cause(tmp_path: Path) -> None:
    def fail(module: Module) -> None:
        if module.current_epoch == 1:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fit(tmp_path, 3, Module(fail))
    run = read_run(tmp_path)
    assert run_outcome(run) == ("failed", "OSError: disk full")
    assert [row["rl_step"] for row in run.steps] == [1]


def test_a_requested_stop_is_no_completion(tmp_path: Path) -> None:
    def stop(module: Module) -> None:
        module.trainer.should_stop = True

    fit(tmp_path, 3, Module(stop))
    run = read_run(tmp_path)
    assert run_outcome(run)[0] == "stopped"
    assert [row["rl_step"] for row in run.steps] == [1]
