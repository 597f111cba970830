"""The Strategy's four hooks: the example of docs/adding.md runs, and every hook has a say."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from digenrl import parts
from digenrl.config import instantiate
from digenrl.strategy.disaggregated import DisaggregatedStrategy
from tests.conftest import ROOT
from tests.strategy.processes import (
    Cluster,
    Job,
    assert_same_cells,
    completed,
    configured,
    relative,
    run_series,
)
from tests.strategy.test_equality import LIGHT, reference_of

HOOKS = ("plan_tasks", "cut_fragment", "place_timesteps", "on_bubble")
RECORDING = """

class RecordingStrategy(DisaggregatedStrategy):
    pass


def recording(name):
    def hook(self, *arguments):
        (self.session.run_dir / f"{name}-{self.world.rank}").touch()
        return getattr(super(RecordingStrategy, self), name)(*arguments)

    return hook


for name in HOOKS:
    setattr(RecordingStrategy, name, recording(name))
"""


def example() -> str:
    """The Python code of the section "A schedule" of docs/adding.md."""
    section = (
        (ROOT / "docs/adding.md").read_text().partition("## A schedule")[2].partition("\n## ")[0]
    )
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert all(f"`{hook}`" in section for hook in HOOKS)
    return str(code)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """`patient`, as a user would save the example; with a class that tells which hooks were
    called."""
    (tmp_path / "patient.py").write_text(f"{example()}\n\nHOOKS = {HOOKS}{RECORDING}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "patient", raising=False)
    return "patient"


@pytest.mark.processes
def test_the_documents_example_runs_and_every_hook_is_asked(tmp_path: Path, module: str) -> None:
    """Two RL steps of each class. Another order of training changes nothing that is computed."""
    common = (*LIGHT, "schedule.gap=1", f"allow_targets=[{module}]")
    recording = ("schedule.tag=true", f"strategy._target_={module}.RecordingStrategy")
    jobs = [
        Job("patient", configured(*common, f"strategy._target_={module}.PatientStrategy")),
        Job("recording", configured(*common, *recording)),
    ]
    runs = run_series(tmp_path, 1, 1, jobs)
    for (job, cluster), check in zip(
        runs, (waited_for_half_of_the_groups, asked_every_hook), strict=True
    ):
        found, wanted = completed(cluster), reference_of(job.config)
        assert_same_cells(found, wanted)
        assert all(
            relative(a, b) == 0.0 for a, b in zip(found.gradients, wanted.gradients, strict=True)
        )
        check(cluster)


def waited_for_half_of_the_groups(cluster: Cluster) -> None:
    """No group was trained before two of the four were generated."""
    for step in (0, 1):
        generated = [
            row["end"]
            for row in cluster.spans("generate")
            if row["step"] == step and row["group"] < 2
        ]
        trained = [row["start"] for row in cluster.spans("train") if row["step"] == step]
        assert len(generated) == 4
        assert min(trained) >= max(generated)


def asked_every_hook(cluster: Cluster) -> None:
    """The trainer all four, the rollout those that concern generation."""
    asked = {path.name for path in cluster.run_dir.iterdir()}
    assert {f"{hook}-0" for hook in HOOKS} | {"plan_tasks-1", "place_timesteps-1"} <= asked


@pytest.mark.processes
@pytest.mark.parametrize(
    ("target", "cause"),
    [
        (
            "digenrl.algorithms.grpo.GRPO",
            "is no subclass of digenrl.strategy.disaggregated.DisaggregatedStrategy",
        ),
        (
            "nowhere.Patient",
            "cannot be imported .*nowhere.* correct the name, or add the directory",
        ),
        ("patient.Impatient", "cannot be imported .*Impatient.* correct the name"),
    ],
)
def test_a_strategy_that_is_none_is_refused_before_ranks_start(
    module: str, target: str, cause: str
) -> None:
    config = configured(f"strategy._target_={target}", f"allow_targets=[{module},nowhere]")
    with pytest.raises(ValueError, match=rf"strategy\._target_ = {target}: {cause}"):
        parts.check_parts(config)


def test_the_default_strategy_is_a_value_of_the_configuration() -> None:
    assert instantiate(configured().strategy).func is DisaggregatedStrategy
