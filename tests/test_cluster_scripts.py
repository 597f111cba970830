"""Every script of a cluster is started with stand-ins for what the cluster brings: the scheduler's
commands, its variables, and its shared folder."""

from __future__ import annotations

import os
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from digenrl.config import load
from tests.conftest import ROOT

EXAMPLES = ROOT / "examples"
NOTE = 'printf "%s\\n" "$(basename "$0") $(printf "%q " "$@")" >> "$CALLS"'


@pytest.fixture
def shell(tmp_path: Path) -> Any:
    """Return a function that runs a script of bash with stand-ins which note their words, and
    returns (exit code, the noted lines)."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tmp_path / "work/scripts").mkdir(parents=True)
    (tmp_path / "shared").mkdir()

    def run(script: str, stand_ins: dict[str, str], **more: str) -> tuple[int, list[list[str]]]:
        for name, body in stand_ins.items():
            file = tmp_path / "work" / name if "/" in name else tools / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"#!/usr/bin/env bash\n{NOTE}\n{body}\n")
            file.chmod(0o755)
        calls = tmp_path / "calls"
        calls.write_text("")
        environment = {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "HOME": str(tmp_path),
            "CALLS": str(calls),
        }
        done = subprocess.run(
            ["bash", "-ec", script],
            cwd=tmp_path / "work",
            env=environment | more,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.returncode, [shlex.split(line) for line in calls.read_text().splitlines()]

    return run


def saved(run: Path, checkpoint: bool = True) -> None:
    """Make a run directory as an attempt leaves it that was taken away."""
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("{}\n")
    if checkpoint:
        (run / "checkpoints").mkdir()
        (run / "checkpoints/last").symlink_to("step-000001")
        (run / "checkpoints/step-000001").mkdir()


SLURM = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1"}


def batch(*words: str) -> str:
    return shlex.join(["bash", str(ROOT / "scripts/slurm.sbatch"), *words])


@pytest.mark.parametrize(
    ("words", "directory"),
    [
        (["experiment=a"], "outputs/slurm/7-0"),
        (["experiment=a", "allow_targets=[mine]"], "outputs/slurm/7-0"),
        (["resume=outputs/x/1-0", "max_rl_steps=50"], "outputs/x/1-0"),
        (["resume=outputs/x/1-0", "allow_targets=[mine]"], "outputs/x/1-0"),
        (["hydra.run.dir=outputs/own (1)", "seed=3"], "outputs/own (1)"),
        (["seed=3", "hydra.run.dir=outputs/own"], "outputs/own"),
    ],
)
@pytest.mark.parametrize("checkpoint", [True, False])
def test_a_slurm_job_that_lost_a_task_is_queued_again(
    shell: Any, tmp_path: Path, words: list[str], directory: str, checkpoint: bool
) -> None:
    saved(tmp_path / "work" / directory, checkpoint)
    stand_ins = {"srun": "exit 137", "scontrol": ""}
    code, calls = shell(batch(*words), stand_ins, **SLURM)
    assert code == 137
    assert ["scontrol", "requeue", "7"] in calls
    started = calls[0]
    resumes = [word for word in started if word.startswith("resume=")]
    if checkpoint or words[0].startswith("resume="):
        assert resumes == [f"resume={directory}"]
    else:
        assert [w for w in started if w.startswith("hydra.run.dir=")] == [
            f"hydra.run.dir={directory}"
        ]
    kept = [word for word in words if word.startswith("allow_targets=")]
    assert [word for word in started if word.startswith("allow_targets=")] == kept
    _, calls = shell(batch(*words), stand_ins, **SLURM, SLURM_RESTART_COUNT="3")
    assert ["scontrol", "requeue", "7"] not in calls


def test_a_slurm_job_without_a_step_or_of_another_number_is_not_queued_again(
    shell: Any, tmp_path: Path
) -> None:
    saved(tmp_path / "work/outputs/slurm/70-0")
    code, calls = shell(batch("seed=1"), {"srun": "exit 1", "scontrol": ""}, **SLURM)
    assert (code, len(calls)) == (1, 1)
    assert "hydra.run.dir=outputs/slurm/7-0" in calls[0]
    for ended in (0, 2, 143):
        saved(tmp_path / f"work/outputs/slurm/7-{ended}")
        stand_ins = {"srun": f"exit {ended}", "scontrol": ""}
        code, calls = shell(batch("seed=1"), stand_ins, **SLURM)
        assert (code, len(calls)) == (ended, 1)


def test_the_later_directory_of_a_slurm_job_is_continued(shell: Any, tmp_path: Path) -> None:
    saved(tmp_path / "work/outputs/slurm/7-0", checkpoint=False)
    saved(tmp_path / "work/outputs/slurm/7-1")
    _, (call,) = shell(batch("seed=1"), {"srun": "", "scontrol": ""}, **SLURM)
    assert "resume=outputs/slurm/7-1" in call


def sky(tmp_path: Path, part: str) -> str:
    task = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())
    return str(task[part]).replace("/shared", str(tmp_path / "shared"))


SKY = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "t",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
}


def test_skypilot_fetches_and_goes_on_with_its_own_run_alone(shell: Any, tmp_path: Path) -> None:
    stand_ins = {"make": "", ".venv/bin/activate": "", "scripts/torchrun.sh": ""}
    _, calls = shell(sky(tmp_path, "setup"), stand_ins, **SKY)
    fetched = next(call for call in calls if call[1] == "fetch")
    saved(tmp_path / "shared/outputs/other/1-0")
    saved(tmp_path / "shared/outputs/wan-0")
    script = sky(tmp_path, "run")
    code, calls = shell(script, stand_ins, **SKY)
    (started,) = (call for call in calls if call[0] == "torchrun.sh")
    assert code == 0
    assert not [word for word in started if word.startswith("resume=")]
    assert f"experiment={fetched[2].removeprefix('EXP=')}" in started
    composed = load(started[1:])
    saved(composed.run_dir)
    _, calls = shell(script, stand_ins, **SKY)
    (again,) = (call for call in calls if call[0] == "torchrun.sh")
    assert again[1:] == [f"resume={composed.run_dir}"]


def pods(tmp_path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    text = (EXAMPLES / "kubernetes.yaml").read_text().replace("/shared", str(tmp_path / "shared"))
    job, deployment = yaml.safe_load_all(text)
    return job["spec"]["template"]["spec"], deployment["spec"]["template"]["spec"]


def test_kubernetes_fetches_trains_and_goes_on(shell: Any, tmp_path: Path) -> None:
    job, rollouts = pods(tmp_path)
    (init,), (trainers,), (rollout,) = (
        job["initContainers"],
        job["containers"],
        rollouts["containers"],
    )
    assert init["env"] == trainers["env"] == rollout["env"], "one HF_HOME for all"
    composed = load([*init["command"][2:], "allocation.trainers=7", "allocation.rollouts=1"])
    assert init["command"][:2] == ["digenrl", "fetch"]
    stand_ins = {"digenrl": ""}
    (script,) = trainers["args"]
    _, (first,) = shell(script, stand_ins)
    assert first[:2] == ["digenrl", "train"]
    assert load(first[2:]).choices["experiment"] == composed.choices["experiment"]
    run = Path(next(word for word in first if word.startswith("hydra.run.dir=")).partition("=")[2])
    saved(run, checkpoint=False)
    _, (again,) = shell(script, stand_ins)
    assert again == first, "a run that never saved leaves its name to the next"
    assert not run.exists()
    saved(run)
    _, (resumed,) = shell(script, stand_ins)
    assert resumed == ["digenrl", "resume", str(run)]
    (run / "access.json").write_text("{}")
    _, (joined,) = shell(rollout["args"][0], stand_ins)
    assert joined == ["digenrl", "join", str(run)]


def test_kuberay_fetches_before_it_trains(shell: Any, tmp_path: Path) -> None:
    job = yaml.safe_load((EXAMPLES / "kuberay.yaml").read_text())["spec"]
    assert "HF_HOME" in yaml.safe_load(job["runtimeEnvYAML"])["env_vars"]
    _, (fetched, trained) = shell(job["entrypoint"], {"digenrl": ""})
    assert (fetched[1], trained[1]) == ("fetch", "train")
    words = [word for word in trained[2:] if not word.startswith("output_root=")]
    assert load(words).choices["experiment"] == load(fetched[2:]).choices["experiment"]
    code, calls = shell(job["entrypoint"], {"digenrl": '[ "$1" = train ]'})
    assert (code != 0, len(calls)) == (True, 1), "without weights nothing is trained"


def test_the_image_has_what_the_examples_run() -> None:
    image = (ROOT / "Dockerfile").read_text()
    (extras,) = (line for line in image.splitlines() if "pip install -c" in line)
    assert "ray" in extras.partition("[")[2].partition("]")[0].split(",")


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").glob("*.s*")), ids=lambda p: p.name)
def test_every_script_is_one(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


def agent_words(calls: list[list[str]]) -> dict[str, str]:
    """Return the options of the one agent that `scripts/torchrun.sh` started."""
    (call,) = calls
    assert call[1:3] == ["-m", "torch.distributed.run"]
    return {name: value for name, value in pairwise(call) if name[:2] == "--"}


def test_torchrun_starts_the_python_of_the_environment_beside_it(shell: Any) -> None:
    script = f"bash {shlex.quote(str(ROOT / 'scripts/torchrun.sh'))} seed=1"
    code, calls = shell(script, {"python": "exit 3"}, RANKS="2")
    assert (code, calls[0][0]) == (3, "python")
    stand_ins = {".venv/bin/python": "exit 4", "python": "exit 3"}
    code, calls = shell(script, stand_ins, RANKS="2")
    assert code == 4
    assert len(calls) == 1, "the python on the PATH ran too"
    assert calls[0][-3:] == ["-m", "digenrl.cli.train", "seed=1"]


def test_torchrun_gives_each_job_of_one_machine_a_port_and_an_id(shell: Any) -> None:
    script = f"bash {shlex.quote(str(ROOT / 'scripts/torchrun.sh'))} seed=1"

    def started(**more: str) -> tuple[str, str]:
        _, calls = shell(script, {"python": ""}, RANKS="2", **more)
        words = agent_words(calls)
        return words["--rdzv-endpoint"], words["--rdzv-id"]

    (endpoint, first), (again, second) = started(), started()
    assert (endpoint, again) == ("localhost:0", "localhost:0"), "0: any free port"
    assert first != second
    assert started(RUN_ID="own", PORT="7") == ("localhost:7", "own")
    both = {"NODES": "2", "HEAD": "head"}
    assert started(**both) == started(**both), "machines of one job would not meet"
    assert started(**both, RUN_ID="a") != started(**both, RUN_ID="b")
