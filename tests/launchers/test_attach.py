"""Ranks that somebody else started: torchrun with two agents, SLURM's environment, two network
namespaces."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from digenrl import config
from digenrl.cli import join
from digenrl.cluster.access import Access, write_access
from digenrl.hardware import parse_hardware
from digenrl.launchers import attach
from digenrl.launchers.job import find_place
from digenrl.launchers.places import Place, check_allocation, place_of, process_ranks
from digenrl.launchers.reaching import read_access
from digenrl.strategy.checkpoint_io import newest_valid
from tests.changed import hardware_settings
from tests.conftest import ROOT
from tests.launchers.scheduled import (
    SCRIPTS,
    STEP,
    Processes,
    agent,
    free_port,
    srun,
    summary,
    wait_for_a_step,
    words,
)
from tests.namespaces import bytes_sent, two_machines
from tests.strategy.processes import TINY
from tests.training import fault


def test_a_task_of_srun_finds_its_place() -> None:
    place = place_of(STEP)
    assert place == Place(
        9, 12, 1, "gpu03-ib", 23456, "digenrl-77-2-0", hosts_store=False, local_size=4
    )
    first = place_of(
        STEP | {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "4(x2),4"}
    )
    assert (first.hosts_store, first.local_size) == (True, 4)
    again = place_of(STEP | {"SLURM_RESTART_COUNT": "1", "MASTER_ADDR": "head"})
    assert (again.prefix, again.address) == ("digenrl-77-2-1", "head")
    with pytest.raises(
        ValueError, match=r"MASTER_PORT: export one free port .* scripts/slurm\.sbatch"
    ):
        place_of({key: value for key, value in STEP.items() if key != "MASTER_PORT"})


@pytest.mark.parametrize(
    ("agent", "rank", "hosts"),
    [(None, 0, False), ("True", 0, False), ("False", 0, True), ("False", 1, False)],
)
def test_process_0_hosts_the_store_where_torchruns_agent_does_not(
    agent: str | None, rank: int, hosts: bool
) -> None:
    environment = {"TORCHELASTIC_RUN_ID": "a", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    environment |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "head", "MASTER_PORT": "29500"}
    environment |= {} if agent is None else {"TORCHELASTIC_USE_AGENT_STORE": agent}
    expected = Place(rank, 2, rank, "head", 29500, "digenrl-a-0", hosts, 2)
    assert find_place(environment) == expected


def test_a_process_that_joins_is_prepared_as_one_that_starts_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it asks the run, which does not answer: torch loads meanwhile, and with it peft."""
    run = config.prepare_run_dir(config.load([f"hydra.run.dir={tmp_path}/run-0"]))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    write_access(run, Access("127.0.0.1", port, "0" * 32, 0.0))
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    del sys.modules["bitsandbytes"]
    monkeypatch.setattr(os, "environ", environment := dict(os.environ) | {"OMP_NUM_THREADS": "3"})
    assert join.main([f"run={run}"]) == 2
    assert sys.modules["bitsandbytes"] is None
    assert environment["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    assert environment["OMP_NUM_THREADS"] == "3"


def test_a_batch_script_that_starts_us_without_srun_is_one_machine() -> None:
    batch = {key: value for key, value in STEP.items() if "STEP" not in key}
    assert find_place(batch) is None
    assert find_place({}) is None


def test_the_route_to_a_scheduler_on_ipv6_begins_at_an_ipv6_address() -> None:
    assert Place(1, 2, 1, "::1", 29500, "job", hosts_store=False, local_size=2).host == "::1"


def test_a_wrong_number_of_processes_names_both_numbers_and_the_remedy() -> None:
    place = place_of(STEP)
    check_allocation(place, 8, 4)
    for trainers, rollouts in ((8, 8), (-1, 13)):
        message = (
            rf"trainers = {trainers} and .*rollouts = {rollouts} .* 12 "
            r"processes.*nproc-per-node.*ntasks.*auto"
        )
        with pytest.raises(ValueError, match=message):
            check_allocation(place, trainers, rollouts)


def pools(**counts_and_roles: tuple[int, str]) -> Mapping[str, Any]:
    figures = {"memory_gib": 80, "tflops": 300, "hbm_tb_s": 2, "intra_gb_s": 300, "inter_gb_s": 25}
    return {
        "pools": {
            name: {"gpu": name, "count": count, "role": role, **figures}
            for name, (count, role) in counts_and_roles.items()
        }
    }


@pytest.mark.parametrize(
    ("profile", "trainers", "rollouts", "ranks"),
    [
        (pools(a=(4, "auto")), 2, 2, (0, 1, 2, 3)),
        (pools(old=(2, "rollout"), new=(2, "trainer")), 2, 2, (2, 3, 0, 1)),
        (pools(new=(3, "auto"), old=(2, "auto")), 2, 3, (0, 1, 4, 2, 3)),
        (pools(a=(4, "auto")), 2, 0, (0, 1)),
    ],
    ids=["one-pool", "rollouts-first", "a-mixed-pool", "colocated"],
)
def test_the_profile_says_which_process_trains(
    profile: Mapping[str, Any], trainers: int, rollouts: int, ranks: tuple[int, ...]
) -> None:
    assert (
        process_ranks(parse_hardware(hardware_settings(profile["pools"])), trainers, rollouts)
        == ranks
    )
    assert sorted(ranks) == list(range(trainers + rollouts))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_agents_of_torchrun_on_one_machine(tmp_path: Path, processes: Processes) -> None:
    """Two trainers under one agent, two rollouts under the other."""
    port = str(free_port())
    for _ in range(2):
        agent(tmp_path, processes, PORT=port)
    assert processes.codes() == [0, 0], processes.tails()
    found = summary(processes)
    assert (found["status"], found["rl_steps"]) == ("completed", 2)
    assert found["world"] == {"trainer": 2, "rollout": 2}


def endless_run(tmp_path: Path, processes: Processes) -> list[subprocess.Popen[bytes]]:
    """Two agents whose run is in its second RL step or later."""
    port = str(free_port())
    agents = [agent(tmp_path, processes, more=("max_rl_steps=10000",), PORT=port) for _ in range(2)]
    wait_for_a_step(tmp_path)
    assert list(tmp_path.glob("outputs/*/*/metrics.jsonl")), processes.tails()
    return agents


def workers(agents: Sequence[subprocess.Popen[bytes]]) -> dict[int, psutil.Process]:
    """RANK -> process, of what the agents have started."""
    started = [child for process in agents for child in psutil.Process(process.pid).children()]
    return {int(child.environ()["RANK"]): child for child in started if "RANK" in child.environ()}


def assert_gone(ranks: Mapping[int, psutil.Process], seconds: float) -> None:
    _, alive = psutil.wait_procs(list(ranks.values()), timeout=seconds)
    assert not alive, f"ranks outlived their agents: {alive}"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "signalled"), [("SIGTERM", (0, 1)), ("SIGINT", (1,))], ids=["all", "one-agent"]
)
def test_a_signal_to_torchrun_saves_and_leaves(
    tmp_path: Path, processes: Processes, name: str, signalled: tuple[int, ...]
) -> None:
    """Torchrun passes the signal on to its own ranks; one of them suffices to stop all after the
    step in progress."""
    agents = endless_run(tmp_path, processes)
    ranks = workers(agents)
    assert sorted(ranks) == [0, 1, 2, 3]
    for number in signalled:
        agents[number].send_signal(signal.Signals[name])
    assert all(code != 0 for code in processes.codes())
    assert_gone(ranks, 5.0)
    found = summary(processes)
    assert (found["status"], found["cause"]) == ("stopped", f"signal {name}"), processes.tails()
    (saved,) = tmp_path.glob("outputs/*/*/checkpoints/last")
    assert newest_valid(saved.parent) == saved.resolve()
    assert saved.resolve().name == f"step-{found['rl_steps']:06d}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_under_torchrun_takes_rollouts_in_and_outlives_them(
    tmp_path: Path, processes: Processes
) -> None:
    """One that joined is killed. The next one is a job of scripts/slurm_join.sbatch near its time
    limit: it leaves and queues itself again. The weights are those of a run that nobody joined."""
    same = words(tmp_path, 1, 1, "sampling.steps=3", "callbacks.checkpoint.every=1000")
    torchrun = ["bash", str(SCRIPTS / "torchrun.sh"), *same, "max_rl_steps=10000"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    agent = processes.start(
        torchrun, RANKS="2", RUN_ID=tmp_path.name, PORT=str(free_port()), PATH=path
    )
    wait_for_a_step(tmp_path)
    (run_dir,) = tmp_path.glob("outputs/*/*")

    def noted(kind: str, rank: int) -> dict[str, Any] | None:
        rows = [
            json.loads(line)
            for line in (run_dir / "events.jsonl").read_text().splitlines()
            if line.endswith("}")
        ]
        return next((row for row in rows if (row["kind"], row.get("rank")) == (kind, rank)), None)

    def wait_for(found: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + 200
        while not found():
            assert agent.poll() is None, processes.tails()
            assert time.monotonic() < deadline, processes.tails()
            time.sleep(0.05)
        return found()

    def join(rank: int, *command: str, **environment: str) -> subprocess.Popen[bytes]:
        joiner = processes.start(command, **environment)
        spans = run_dir / f"spans/rank-{rank:03d}.jsonl"
        wait_for(lambda: spans.is_file() and '"generate"' in spans.read_text())
        return joiner

    killed = join(2, sys.executable, "-m", "digenrl", "join", f"run={run_dir}")
    os.killpg(killed.pid, signal.SIGKILL)
    at = time.time()
    assert wait_for(lambda: noted("lost", 2))["time"] - at < 2.0
    job = slurm(tmp_path, 'exec "$@"') | {"SLURM_JOB_ID": "9", "RUN": str(run_dir)}
    asked = join(3, "env", "-C", str(tmp_path), "bash", str(SCRIPTS / "slurm_join.sbatch"), **job)
    asked.send_signal(signal.SIGUSR1)
    assert "left: signal SIGTERM" in wait_for(lambda: noted("left", 3))["cause"]
    assert asked.wait(timeout=60) == 0, processes.tails()
    assert (tmp_path / "requests").read_text() == "requeue 9\n"
    agent.send_signal(signal.SIGTERM)
    processes.codes()
    found = summary(processes)
    assert (found["status"], found["cause"]) == ("stopped", "signal SIGTERM"), processes.tails()
    calm = [sys.executable, "-m", "digenrl.cli.train", *same, f"max_rl_steps={found['rl_steps']}"]
    assert processes.start(calm).wait(timeout=400) == 0, processes.tails()
    (other,) = set(tmp_path.glob("outputs/*/*")) - {run_dir}
    weights = [path / "checkpoints/last/policy.safetensors" for path in (run_dir, other)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", [3, 1], ids=["rollout", "trainer"])
def test_a_rank_killed_under_torchrun_ends_the_job(
    tmp_path: Path, processes: Processes, victim: int
) -> None:
    """The victim's agent sees the death. The other agent does not, but its ranks do: nobody waits
    for what the dead rank owned. If the victim owned nothing, the SIGTERM that its agent sends to
    its neighbour may end the run in order, before anybody misses the victim."""
    agents = endless_run(tmp_path, processes)
    ranks = workers(agents)
    ranks[victim].kill()
    assert all(code != 0 for code in processes.codes())
    assert_gone(ranks, 5.0)
    found = summary(processes)
    if victim == 3 and found["status"] == "stopped":
        assert found["cause"] == "signal SIGTERM"
        return
    assert found["status"] == "failed", processes.tails()
    # Its monitor and the links of the others see it at the same time.
    told = f"rank {victim} ended before the run did", f"rank {victim} (rollout) (process"
    assert any(cause in found["cause"] for cause in told) or victim == 1, found["cause"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("point", "rank", "stage"), [("decode", 2, "decode"), ("save", 0, "checkpoint")]
)
def test_a_rank_that_hangs_under_torchrun_ends_the_job_and_is_named(
    tmp_path: Path, processes: Processes, point: str, rank: int, stage: str
) -> None:
    """No launcher sees it: process 0 judges, itself too."""
    limits = ("limits.stage_floor_s=8", "callbacks.checkpoint.every=1", "max_rl_steps=50")
    for port in [str(free_port())] * 2:
        agent(
            tmp_path, processes, more=(*limits, *fault(point, rank, "hang", call=2)), PORT=port,
            PYTHONPATH=f"{ROOT / 'src'}:{ROOT}",
        )  # fmt: skip
    assert 0 not in processes.codes()
    found = summary(processes)
    assert found["status"] == "failed"
    assert (
        f"rank {rank} ({'trainer' if rank < 2 else 'rollout'}) hangs in stage {stage}"
        in found["cause"]
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tasks_of_slurm_run_a_run_in_which_the_profile_chooses_the_trainer(
    tmp_path: Path, processes: Processes
) -> None:
    """The first process stands on a pool of rollouts, hosts the store, and becomes rank 1."""
    profile = [
        f"+hardware.pools.front={{{_pool('rollout')}}}",
        f"+hardware.pools.back={{{_pool('trainer')}}}",
    ]
    command = [
        sys.executable,
        "-m",
        "digenrl.cli.train",
        *words(tmp_path, 1, 1, "~hardware.pools.local", *profile),
    ]
    srun(processes, command, 2)
    assert processes.codes() == [0, 0], processes.tails()
    found = summary(processes)
    assert (found["status"], found["world"]) == ("completed", {"trainer": 1, "rollout": 1})
    assert "Trainer.fit" in processes.said(1, "err"), "process 1 must be the trainer"


def _pool(role: str) -> str:
    return (
        f"gpu:cpu,count:1,role:{role},memory_gib:16,tflops:1,hbm_tb_s:1,intra_gb_s:1,inter_gb_s:1"
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sigterm_of_a_scheduler_ends_in_a_checkpoint(tmp_path: Path, processes: Processes) -> None:
    command = [
        sys.executable,
        "-m",
        "digenrl.cli.train",
        *words(tmp_path, 1, 1, "max_rl_steps=10000"),
    ]
    srun(processes, command, 2)
    wait_for_a_step(tmp_path)
    for process in processes._started:
        process.terminate()
    assert processes.codes() == [128 + signal.SIGTERM] * 2, processes.tails()
    found = summary(processes)
    assert (found["status"], found["cause"]) == ("stopped", "signal SIGTERM")
    assert list(tmp_path.glob("outputs/*/*/checkpoints/last/manifest.json"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("task", "role"), [(0, "trainer"), (1, "rollout")])
def test_a_task_that_is_suspended_ends_the_job_within_seconds(
    tmp_path: Path, processes: Processes, task: int, role: str
) -> None:
    """Nobody on its machine is its launcher; a process of its own notices."""
    command = [
        sys.executable,
        "-m",
        "digenrl.cli.train",
        *words(tmp_path, 1, 1, "max_rl_steps=10000"),
    ]
    srun(processes, command, 2)
    wait_for_a_step(tmp_path)
    processes._started[task].send_signal(signal.SIGSTOP)
    since = time.monotonic()
    processes._started[1 - task].wait(timeout=60)
    assert time.monotonic() - since < 20
    assert processes.codes()[1 - task] == 1, processes.tails()
    assert processes.codes()[task] == -signal.SIGKILL
    (path,) = tmp_path.glob("outputs/*/*/summary.json")
    told = json.loads(path.read_text())
    assert told["status"] == "failed"
    assert (
        f"rank {task} ({role}) (process {processes._started[task].pid}) stopped responding"
        in told["cause"]
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_task_that_never_joins_is_named_with_the_key(
    tmp_path: Path, processes: Processes
) -> None:
    command = [
        sys.executable,
        "-m",
        "digenrl.cli.train",
        *words(tmp_path, 1, 1, "limits.start_s=20"),
    ]
    srun(processes, command, 2)
    processes._started[1].send_signal(signal.SIGSTOP)
    assert processes._started[0].wait(timeout=120) == 1, processes.tails()
    found = summary(processes)
    assert (found["status"], found["rl_steps"]) == ("failed", 0)
    # Its heartbeat and its agreement are waited for equally long.
    said = "rank 1 (rollout) has not joined", "waited 20 s (limits.start_s) for process 1 to agree"
    assert any(words in found["cause"] for words in said), found["cause"]
    assert "limits.start_s" in found["cause"]


def slurm(tmp_path: Path, srun: str) -> dict[str, str]:
    """The environment of a batch script in `tmp_path`; srun is that line of shell, scontrol notes
    its requests."""
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parents[1])
    for name, body in {"srun": srun, "scontrol": 'echo "$@" >> requests'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    return {"SLURM_CPUS_PER_TASK": "1", "PATH": path, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_batch_job_that_lost_a_task_is_queued_again_and_goes_on(tmp_path: Path) -> None:
    """scripts/slurm.sbatch, with srun and scontrol as SLURM's: one starts the tasks, the other gets
    the request."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("SLURM_", "TORCHELASTIC"))
    }
    tasks = (
        f'shift; exec {sys.executable} -m torch.distributed.run --nproc-per-node 2 --no-python "$@"'
    )
    environment |= slurm(tmp_path, tasks) | {"SLURM_JOB_ID": "7"}
    allocation = [
        "allocation.trainers=1",
        "allocation.rollouts=1",
        "max_rl_steps=4",
        "callbacks.checkpoint.every=1",
    ]
    strike = [*fault("accumulate", 0, "kill", call=60)]

    def submit(*more: str, **settings: str) -> int:
        script = ["bash", str(SCRIPTS / "slurm.sbatch"), *TINY, *allocation, *more]
        return subprocess.run(
            script, cwd=tmp_path, env=environment | settings, timeout=300
        ).returncode

    assert submit(*strike) != 0
    (run,) = tmp_path.glob("outputs/slurm/7-*")
    assert (tmp_path / "requests").read_text() == "requeue 7\n"
    finished = newest_valid(run / "checkpoints").name
    assert finished in ("step-000001", "step-000002", "step-000003")
    assert submit(*strike, SLURM_RESTART_COUNT="1") == 0
    assert list(tmp_path.glob("outputs/slurm/*")) == [run]
    told = json.loads((run / "summary.json").read_text())
    assert (told["status"], told["rl_steps"], told["attempts"]) == ("completed", 4, 2)
    assert submit("sampling.steps=0", SLURM_JOB_ID="8") != 0
    assert (tmp_path / "requests").read_text() == "requeue 7\n"


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    with two_machines() as names:
        yield names


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_agents_in_two_network_namespaces(
    tmp_path: Path, processes: Processes, namespaces: tuple[str, str]
) -> None:
    """The agents meet on one interface; store, gloo and data links take the configured one, in
    IPv6."""
    for number, ns in enumerate(namespaces):
        settings = {"HEAD": "10.77.0.1", "ADDRESS": f"10.77.0.{number + 1}"}
        more = ("parallel.sharding=fsdp", "network.interface=data0", "network.ports=[29610,29619]")
        agent(tmp_path, processes, "ip", "netns", "exec", ns, more=more, **settings)
    deadline, access = time.monotonic() + 400, {}
    while time.monotonic() < deadline and not access:
        access = {
            path: json.loads(path.read_text() or "{}")
            for path in tmp_path.glob("outputs/*/*/access.json")
        }
        time.sleep(0.1)
    (found,) = access.values()
    assert (found["host"], found["port"]) == ("fd77::1", 29610)
    sent = {}
    while any(process.poll() is None for process in processes._started):
        sent = {name: bytes_sent(namespaces[0], name) or sent[name] for name in ("front0", "data0")}
        time.sleep(0.2)
    assert processes.codes() == [0, 0], processes.tails()
    done = summary(processes)
    assert (done["status"], done["rl_steps"]) == ("completed", 2)
    assert sent["data0"] > 4 * sent["front0"], (
        f"the agents talk on front0, the ranks on data0: {sent}"
    )


BLOCKED = ("parallel.sharding=fsdp", "max_rl_steps=1000", "limits.abort_s=1", "limits.leave_s=1")
"""Settings of a sharded run without end, and of a short patience after an abort."""


def sharded_trainers(
    tmp_path: Path, processes: Processes, scheduler: str, *faults: str
) -> dict[int, psutil.Process]:
    """Start a run of two sharded trainers, with `faults`. Return rank -> its process."""
    command = words(tmp_path, 2, 0, *BLOCKED, *faults)
    if scheduler == "slurm":
        srun(processes, [sys.executable, "-m", "digenrl.cli.train", *command], 2)
        return {rank: psutil.Process(it.pid) for rank, it in enumerate(processes._started)}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"RANKS": "2", "RUN_ID": tmp_path.name, "PORT": str(free_port()), "PATH": path}
    started = processes.start(["bash", str(SCRIPTS / "torchrun.sh"), *command], **own)
    wait_for_a_step(tmp_path)
    return workers([started])


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("scheduler", ["slurm", "torchrun"])
@pytest.mark.parametrize("end", ["raise", "kill"])
def test_nobody_stays_in_a_collective_of_a_run_that_is_over(
    tmp_path: Path, processes: Processes, scheduler: str, end: str
) -> None:
    """Trainer 1 raises, or is killed, in a forward. Trainer 0 never comes out of that forward, and
    the process group of trainer 1 never ends: so it is with NCCL."""
    ranks = sharded_trainers(
        tmp_path,
        processes,
        scheduler,
        *fault("accumulate", 1, end, "ends", call=20),
        *fault("accumulate", 0, "hang", "blocks", call=20),
        *fault("torch.distributed.destroy_process_group", 1, "hang", "destroys"),
    )
    assert 0 not in processes.codes(100.0), processes.tails()
    assert_gone(ranks, 5.0)
    (told,) = tmp_path.glob("outputs/*/*/summary.json")
    found = json.loads(told.read_text())
    cause = "raised InjectedError: injected fault" if end == "raise" else "was killed"
    assert found["status"] == "failed"
    assert "rank 1 (trainer)" in found["cause"], found["cause"]
    assert cause in found["cause"]
    assert cause in processes.said(0, "err")


def ended(process: psutil.Process) -> bool:
    """Return whether a process has ended, even if its agent waits for the other agent and has not
    reaped it."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cut_cable_ends_the_processes_of_both_machines(
    tmp_path: Path, processes: Processes, namespaces: tuple[str, str]
) -> None:
    """One sharded trainer on each of two machines, with the limits of the defaults. Nothing passes
    any more, and no end says so."""
    more = ("parallel.sharding=fsdp", "max_rl_steps=100000", "network.interface=front0")
    script = ["bash", str(SCRIPTS / "torchrun.sh"), *words(tmp_path, 2, 0, *more)]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"HEAD": "10.77.0.1", "NODES": "2", "RANKS": "1", "RUN_ID": tmp_path.name, "PATH": path}
    agents = [
        processes.start(
            ["ip", "netns", "exec", ns, *script], ADDRESS=f"10.77.0.{number + 1}", **own
        )
        for number, ns in enumerate(namespaces)
    ]
    wait_for_a_step(tmp_path)
    ranks = workers(agents)
    assert sorted(ranks) == [0, 1], processes.tails()
    subprocess.run(["ip", "-n", namespaces[1], "link", "set", "front0", "down"], check=True)
    at, after = time.monotonic(), dict[int, float]()
    while len(after) < 2 and time.monotonic() < at + 120.0:
        for rank, process in ranks.items():
            if rank not in after and ended(process):
                after[rank] = time.monotonic() - at
        time.sleep(0.1)
    print("seconds after the cut:", after)
    assert sorted(after) == [0, 1], processes.tails()
    assert max(after.values()) < 60.0
    found = summary(processes)
    assert found["status"] == "failed"
    assert "rank 1" in found["cause"], found["cause"]
    assert "the store does not answer any more" in processes.said(1, "err"), processes.tails()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rollout_leaves_a_run_that_vanished(
    tmp_path: Path, processes: Processes, namespaces: tuple[str, str]
) -> None:
    """The run's machine is cut off: the rollout that joined gives its own machine back."""
    train = [sys.executable, "-m", "digenrl.cli.train", *words(tmp_path, 1, 1)]
    more = ("max_rl_steps=100000", "network.interface=front0")
    here, there = (["ip", "netns", "exec", ns] for ns in namespaces)
    run = processes.start([*here, *train, *more])
    wait_for_a_step(tmp_path)
    (run_dir,) = tmp_path.glob("outputs/*/*")
    joiner = processes.start([*there, sys.executable, "-m", "digenrl", "join", f"run={run_dir}"])
    spans, deadline = run_dir / "spans/rank-002.jsonl", time.monotonic() + 100
    while not (spans.is_file() and '"generate"' in spans.read_text()):
        assert joiner.poll() is None, processes.tails()
        assert time.monotonic() < deadline, processes.tails()
        time.sleep(0.1)
    subprocess.run(["ip", "-n", namespaces[1], "link", "set", "front0", "down"], check=True)
    at = time.monotonic()
    assert joiner.wait(timeout=60) == 1, processes.tails()
    print("seconds after the cut:", time.monotonic() - at)
    assert "the run has ended, or goes on without this rank" in processes.said(1, "err")
    assert run.poll() is None, "a run outlives a rollout that joined"


def test_no_reader_sees_half_an_access_file(tmp_path):
    write_access(tmp_path, Access("127.0.0.1", 1, "0" * 32, 0.0))
    done = threading.Event()

    def write_on() -> None:
        while not done.is_set():
            write_access(tmp_path, Access("127.0.0.1", 2, "1" * 32, 0.0))

    writer = threading.Thread(target=write_on)
    writer.start()
    try:
        tokens = {read_access(tmp_path).token for _ in range(400)}
    finally:
        done.set()
        writer.join()
    assert tokens <= {"0" * 32, "1" * 32}
    assert [path.name for path in tmp_path.iterdir()] == ["access.json"]
    assert stat.S_IMODE((tmp_path / "access.json").stat().st_mode) == 0o600


@pytest.mark.parametrize("comes", [True, False])
def test_a_directory_that_a_file_server_shows_late_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    """Process 0 has announced it; this machine sees it half a second later, or never."""
    monkeypatch.setattr(attach, "SHARED_S", 20.0 if comes else 0.5)
    run_dir, notices = tmp_path / "run", dist.HashStore()
    notices.set("run_dir", str(run_dir))
    place = Place(1, 2, 0, "127.0.0.1", 0, "job", False)
    if comes:
        threading.Timer(0.5, run_dir.mkdir).start()
        assert attach._learn_run_dir(notices, place, 5.0) == run_dir
        return
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"does not see the run directory .*set output_root"):
        attach._learn_run_dir(notices, place, 5.0)
    assert time.monotonic() - began >= 0.5
