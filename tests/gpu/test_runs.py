"""Runs on a GPU as a user starts them: tiny builds through the command line, NCCL in place of
gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from digenrl import accelerator
from digenrl.extensions.planner.memory import GIB
from digenrl.hardware import parse_hardware
from tests.conftest import ROOT

SMALL = (
    "experiment=flux1_flowgrpo", "hardware=cpu_tiny", "trainer.accelerator=gpu", "reward=jpeg", "max_rl_steps=2",
    "logger=none", "~callbacks.evaluation", "model.dtype=bfloat16", "allocation.trainers=1", "allocation.rollouts=0",
)  # fmt: skip
pytestmark = [pytest.mark.processes, pytest.mark.timeout(420)]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "digenrl.cli.train", *words]


def trained(out: Path, *words: str) -> tuple[Path, dict]:
    """(run directory, summary.json) of a run that must end well."""
    done = subprocess.run(
        command(*SMALL, f"output_root={out}", *words),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    run_dir = Path(done.stdout.splitlines()[-1])
    return run_dir, json.loads((run_dir / "summary.json").read_text())


def test_a_colocated_run_trains_in_bf16(tmp_path: Path) -> None:
    _, summary = trained(tmp_path)
    assert (summary["status"], summary["rl_steps"]) == ("completed", 2)
    assert summary["first_ratio_max_dev"] == 0.0


def resumed(run_dir: Path) -> dict:
    """summary.json of the run after a third RL step."""
    done = subprocess.run(
        command(f"resume={run_dir}", "max_rl_steps=3"),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((run_dir / "summary.json").read_text())


def test_all_weights_are_trained_saved_and_resumed(tmp_path: Path) -> None:
    run_dir, summary = trained(tmp_path, "model.lora=null")
    assert (summary["status"], summary["rl_steps"]) == ("completed", 2)
    assert (run_dir / "checkpoints/last/policy.safetensors").is_file()
    summary = resumed(run_dir)
    assert (summary["status"], summary["rl_steps"], summary["restarts"]) == ("completed", 3, 1)


@pytest.mark.skipif(accelerator.device_count() < 2, reason="needs two GPUs on one machine")
def test_sharded_trainers_train_save_and_resume(tmp_path: Path) -> None:
    run_dir, _ = trained(
        tmp_path, "model.lora=null", "allocation.trainers=2", "parallel.sharding=fsdp"
    )
    assert resumed(run_dir)["rl_steps"] == 3


def test_a_process_that_has_counted_gpus_may_still_fork() -> None:
    """The launcher has its GPUs counted by a child: it makes no context and asks no driver, so that
    its forked ranks can."""
    code = (
        "import os, torch\n"
        "import digenrl.launchers.start, digenrl.run\n"
        "from digenrl import accelerator, devices\n"
        "assert devices.usable_gpus()\n"
        "kind = accelerator.device_kind()\n"
        "assert not getattr(torch, kind).is_initialized(), 'imports or counting made a context'\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if float(torch.ones(2, device=kind).sum()) == 2.0 else 1)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, 'the forked rank has no "
        "GPU'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=200,
        env={**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},  # as the command does
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_profile_that_names_this_gpu_promises_no_more_than_it_has() -> None:
    """A plan uses at most 0.9 of the smaller of profile and device."""
    name = torch.get_device_module().get_device_name().upper().replace("-", " ")
    total = torch.get_device_module().get_device_properties(0).total_memory / GIB
    found = []
    for path in sorted((ROOT / "configs" / "hardware").glob("*.yaml")):
        node = yaml.safe_load(path.read_text())
        node = node.get("hardware", node)
        if "pools" in node:
            here = [
                pool
                for pool in parse_hardware(node).pools
                if pool.gpu.upper().split("-")[0] in name.split()
            ]
            found += [(path.name, pool) for pool in here]
    if not found:
        pytest.skip(f"no profile names a {name}")
    for file, pool in found:
        assert 0.9 * pool.memory_gib <= total, (
            f"{file}: {pool.memory_gib} GiB, the device has {total:.1f}"
        )


@pytest.mark.skipif(accelerator.device_count() < 2, reason="needs two GPUs on one machine")
def test_each_rank_keeps_to_its_own_gpu(tmp_path: Path) -> None:
    """Weights, reward model, scorer stream and contexts of local rank 1 are on GPU 1 alone."""
    if accelerator.device_kind() != "cuda":
        pytest.skip("nvidia-smi tells which process uses which GPU")
    words = [
        *SMALL,
        "allocation.rollouts=1",
        "reward=clip_score",
        "max_rl_steps=20",
        f"output_root={tmp_path}",
    ]
    run = subprocess.Popen(
        command(*words), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    query = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader"]
    most: dict[str, set[str]] = {}
    try:
        while run.poll() is None:
            for line in subprocess.run(query, capture_output=True, text=True).stdout.splitlines():
                gpu, _, process = line.partition(", ")
                most.setdefault(gpu, set()).add(process)
            time.sleep(0.5)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 0
    assert len(most) == 2
    assert all(len(processes) == 1 for processes in most.values()), most
