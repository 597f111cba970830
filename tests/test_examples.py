"""The files of examples/: their commands are configurations that a run accepts."""

from __future__ import annotations

import shlex
from pathlib import Path

import yaml

from digenrl.config import load

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def test_the_commands_of_examples_compose(tmp_path: Path) -> None:
    job = yaml.safe_load((EXAMPLES / "kuberay.yaml").read_text())["spec"]
    task = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())
    command = task["run"].replace("\\\n", " ").split("else")[1].split("fi")[0]
    for line, first in ((job["entrypoint"], "train"), (command, "scripts/torchrun.sh")):
        words = shlex.split(line)
        given = [word for word in words[words.index(first) + 1 :] if not word.startswith("output_root=")]
        config = load([*given, f"output_root={tmp_path}"]).config
        assert (config.allocation.trainers, config.allocation.rollouts) == (8, 8)
    assert sum(group["replicas"] for group in job["rayClusterSpec"]["workerGroupSpecs"]) == 3
