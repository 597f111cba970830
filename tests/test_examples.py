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
        given = [
            word for word in words[words.index(first) + 1 :] if not word.startswith("output_root=")
        ]
        config = load([*given, f"output_root={tmp_path}"]).settings
        assert (config.allocation.trainers, config.allocation.rollouts) == (8, 8)
    assert sum(group["replicas"] for group in job["rayClusterSpec"]["workerGroupSpecs"]) == 3


def test_the_pods_of_kubernetes_join_the_run_that_its_job_starts(tmp_path: Path) -> None:
    trainers, rollouts = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    (job,), (pod,) = (
        each["spec"]["template"]["spec"]["containers"] for each in (trainers, rollouts)
    )
    start = shlex.split(job["args"][0].replace("\\\n", " ").split("fi\n")[1])
    config = load(
        [word for word in start[3:] if not word.startswith("hydra.run.dir=")]
        + [f"output_root={tmp_path}"]
    ).settings
    ranks = config.allocation.trainers + config.allocation.rollouts
    assert (start[:3], str(ranks)) == (
        ["exec", "digenrl", "train"],
        job["resources"]["limits"]["nvidia.com/gpu"],
    )
    (run,) = (word.partition("=")[2] for word in start if word.startswith("hydra.run.dir="))
    assert shlex.split(pod["args"][0])[-4:] == ["exec", "digenrl", "join", run]
    assert (
        rollouts["spec"]["selector"]["matchLabels"]
        == rollouts["spec"]["template"]["metadata"]["labels"]
    )
    assert config.network.interface is not None, "on loopback nobody joins from another pod"
