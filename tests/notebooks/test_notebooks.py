"""The notebooks run from top to bottom on a run's files, and show what they promise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.report.synthetic import write_run

pytestmark = pytest.mark.heavy

POOLS = {"fast": 2, "slow": 2}
SECONDS = {"generate": {"fast": 0.1, "slow": 0.4}, "train": {"fast": 0.2, "slow": None}}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment that points the notebooks to synthetic files."""
    root = tmp_path_factory.mktemp("notebooks")
    run = write_run(root / "digits_flowgrpo" / "run-0", steps=8)
    # The bound: slow GPUs generate x of 32 units, fast ones the rest and 16 units of training, all
    # for T seconds. 0.4 x / 2 = T and (0.1 (32 - x) + 0.2 * 16) / 2 = T, so x = 12.8 and T = 2.56.
    candidates = [
        {
            "overrides": [f"allocation.rollouts={count}"], "schedule": name, "async_steps": 0, "step_s": 2.56 + lost,
            "trainers": 4 - count, "rollouts": count,
            "samples_per_s": 32 / (2.56 + lost), "bound_step_s": 2.56, "efficiency": 2.56 / (2.56 + lost),
            "limits": [{"cause": "first_fragment", "seconds": lost * 0.7}, {"cause": "weights", "seconds": lost * 0.3}],
        }
        for count, name, lost in [(2, "gap_tsp_tag", 0.2), (2, "gap", 0.5), (3, "sync", 1.6)]
    ]  # fmt: skip
    plan = {
        "candidates": candidates,
        "best": {"colocated": None, "on_policy": candidates[0], "async": candidates[1]},
        "pools": POOLS,
        "work": {"generate": 32, "train": 16},
        "seconds_per_unit": SECONDS,
    }
    (root / "plan.json").write_text(json.dumps(plan))
    jobs = [
        {"job": 0, "schedule": "sync", "status": "completed", "rl_steps": 8, "step_s": 3.1, "predicted_step_s": 3.0,
         "heldout_last": 0.9, "wall_s": 30.0, "lost:tail": 0.125, "cause": None, "run": "a"},
        {"job": 1, "schedule": "gap", "status": "failed", "rl_steps": None, "step_s": None, "predicted_step_s": None,
         "heldout_last": None, "wall_s": 3.0, "lost:tail": None, "cause": "no free port", "run": "b"},
    ]  # fmt: skip
    (root / "sweep.json").write_text(json.dumps(jobs))
    return {"RUN": str(run), "PLAN": str(root / "plan.json"), "SWEEP": str(root / "sweep.json")}


def execute(path: Path, monkeypatch: pytest.MonkeyPatch, places: dict[str, str], folder: Path) -> tuple[int, str]:
    """(pictures shown, text printed) of a notebook, run in a kernel of its own. An error in a cell
    raises."""
    for name, value in places.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "commit notebooks without outputs"
    client = NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    client.execute()
    outputs: list[Any] = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = sum("image/png" in output.get("data", {}) for output in outputs)
    return pictures, "".join(output.get("text", "") for output in outputs)


def test_first_run(repository: Path, places: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    pictures, text = execute(repository / "notebooks/01_first_run.ipynb", monkeypatch, places, repository)
    assert pictures == 6
    assert "held-out score           0.560 → 0.760" in text


def test_plan_and_sweep(repository: Path, places: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = repository / "notebooks/03_plan_and_sweep.ipynb"
    pictures, text = execute(path, monkeypatch, places, repository)
    assert pictures == 2
    assert "stated 2.5600 s, recomputed 2.5600 s" in text
    assert "gap_tsp_tag              2+2      2.76     92.8%     11.594  first_fragment 0.14 s, weights 0.06 s" in text
    assert "12.5 %" in text
    assert "no free port" in text
