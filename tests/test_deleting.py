"""An extension can be deleted (I18): the core imports, its fast tests pass, and the first run
computes the same."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deleting import EXTENSIONS, copy_without

ROOMS = (
    "algorithms callbacks cluster config data diffusion models record report rewards schedule "
    "strategy transport"
)
"""Folders of tests/ that belong to the core."""
FAST = "not slow and not cluster and not processes and not heavy and not alone"


def run(
    tree: Path, *words: str, without: str = "", timeout: float = 900.0
) -> subprocess.CompletedProcess[str]:
    """Run Python in `tree`, with its sources. Tests that need the extension `without` are left
    out."""
    environment = os.environ | {
        "PYTHONPATH": f"{tree / 'src'}:{tree}",
        "DIGENRL_TESTS_WITHOUT": without,
    }
    return subprocess.run(
        [sys.executable, *words],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.mark.heavy
def test_the_core_imports_without_any_extension(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tree = copy_without(tuple(EXTENSIONS), tmp_path)
    sources = (path.relative_to(tree / "src") for path in (tree / "src/digenrl").rglob("*.py"))
    modules = sorted(
        ".".join(path.with_suffix("").parts) for path in sources if path.stem != "__main__"
    )
    assert len(modules) > 100

    def imports() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] in copied]:
            del sys.modules[name]
        sys.path[:0] = [str(tree / "src"), str(tree)]
        for name in modules:
            importlib.import_module(name)
        assert str(sys.modules["digenrl"].__file__).startswith(str(tree))

    copied = ("digenrl", "reward_models")
    process = multiprocessing.get_context("fork").Process(target=imports)
    process.start()  # a fork, which has torch and the other libraries
    process.join()
    assert process.exitcode == 0, capfd.readouterr().err[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", EXTENSIONS)
def test_the_fast_tests_of_the_core_pass_without(name: str, tmp_path: Path) -> None:
    tree = copy_without((name,), tmp_path)
    rooms = [f"tests/{room}" for room in ROOMS.split()]
    done = run(
        tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", FAST, *rooms, without=name
    )
    assert done.returncode == 0, done.stdout[-6000:]


@pytest.mark.slow
@pytest.mark.processes
def test_the_first_run_is_the_same_with_its_task_alone(tmp_path: Path) -> None:
    trees = [
        Path.cwd(),
        copy_without(tuple(name for name in EXTENSIONS if name != "tasks"), tmp_path / "tree"),
    ]
    weights = []
    for number, tree in enumerate(trees):
        out = tmp_path / f"run{number}"
        words = ("max_rl_steps=3", "logger=none", f"hydra.run.dir={out}", f"output_root={tmp_path}")
        done = run(tree, "-m", "digenrl", "train", "experiment=digits_flowgrpo", *words)
        assert done.returncode == 0, done.stderr[-3000:]
        weights.append((out / "checkpoints/step-000003/policy.safetensors").read_bytes())
    assert weights[0] == weights[1]
