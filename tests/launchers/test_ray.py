"""`launch=ray` on clusters of this machine: places, results, the death of a node, what no cluster
has, Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest

from digenrl import config as configuration
from digenrl.cluster.launcher import MACHINE_LOST
from digenrl.config.errors import ConfigError
from digenrl.launchers.on_ray import (
    Places,
    RayRank,
    all_reserved,
    driver_host,
    inherited_variables,
)
from tests.training import SMALL, Train

pytestmark = pytest.mark.processes

LOCAL = (*SMALL, "max_rl_steps=3", "allocation.rollouts=2")
RAY = ("launch=ray", "ray.resources={local:{CPU:0.1}}")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head with room for a trainer."""
    utils = pytest.importorskip("ray.cluster_utils")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_BACKEND_LOG_LEVEL", "error")
    head = {"num_cpus": 1, "resources": {"train": 1}, "include_dashboard": False}
    found = utils.Cluster(initialize_head=True, head_node_args=head)
    yield found
    found.shutdown()


def weights(train: Train) -> bytes:
    return (train.run_dir / "checkpoints/last/policy.safetensors").read_bytes()


def profile() -> list[str]:
    """A pool of trainers and one of rollouts."""
    pools = {
        name: (
            f"{{gpu:cpu,count:{count},role:{role},memory_gib:16,tflops:1,hbm_tb_s:1,intra_gb_s:1,inter_gb_s:1}}"
        )
        for name, count, role in (("fixed", 1, "trainer"), ("spot", 2, "rollout"))
    }
    words = [f"+hardware.pools.{name}={pool}" for name, pool in pools.items()]
    return ["~hardware.pools.local", *words, "ray.resources={fixed:{train:1},spot:{spot:1}}"]


OWN = {"NCCL_DEBUG_SUBSYS": "of-this-test", "DIGENRL_OWN": "of-this-test"}


def environments() -> Iterator[dict[str, str]]:
    """Yield the variables of each process that Ray started for an actor."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.name().startswith("ray::Seat"):
                yield process.environ()


@pytest.mark.slow
def test_two_nodes_give_the_weights_of_one_machine(running: Any, cluster: Any) -> None:
    """The rollouts have a node of their own; the logs of all ranks are in the run's directory. The
    ranks have variables of the driver that their nodes started without."""
    cluster.add_node(num_cpus=1, resources={"spot": 2})
    local = running(*LOCAL, fork=True)
    assert local.finish() == 0, local.stderr
    words = (*LOCAL, *profile(), "launch=ray", f"ray.address={cluster.address}")
    far = running(*words, wrapper=("env", *(f"{name}={value}" for name, value in OWN.items())))
    far.wait_for_step(1)
    ranks = [found for found in environments() if OWN.items() <= found.items()]
    assert far.finish() == 0, far.stderr
    assert len(ranks) == 3
    assert weights(far) == weights(local)
    assert far.summary["world"] == {"trainer": 1, "rollout": 2}
    assert all((far.run_dir / f"logs/rank-00{rank}.log").is_file() for rank in range(3))


def wait_for(train: Train, kind: str) -> dict[str, Any]:
    while not (found := [row for row in train.rows("events.jsonl") if row["kind"] == kind]):
        assert train.poll() is None, train.stderr
        time.sleep(0.1)
    return found[0]


def assert_as_calm(running: Any, train: Train, *words: str) -> None:
    """Stop it; a local run of as many steps, which nobody disturbs, has the same weights."""
    os.killpg(train.pid, signal.SIGINT)
    assert train.finish() == 128 + signal.SIGINT, train.stderr
    calm = running(*words, f"max_rl_steps={train.summary['rl_steps']}", fork=True)
    assert calm.finish() == 0, calm.stderr
    assert weights(train) == weights(calm)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_nodes_that_are_lost_cost_time_alone(running: Any, cluster: Any) -> None:
    """A rollout's: another one joins where there is a place. The trainer's: the run begins again on
    another node."""
    same = (
        *LOCAL,
        "max_rl_steps=10000",
        "callbacks.checkpoint.every=10",
        "allocation.max_restarts=1",
    )
    trainer, rollout, _ = (
        cluster.add_node(num_cpus=1, resources={name: 1}) for name in ("fix", "spot", "spot")
    )
    words = [word.replace("train:1", "fix:1") for word in profile()]
    struck = running(*same, *words, "launch=ray", f"ray.address={cluster.address}")
    struck.wait_for_step(2)
    cluster.remove_node(rollout, allow_graceful=False)
    cluster.add_node(num_cpus=1, resources={"spot": 1})
    wait_for(struck, "joined")
    cluster.remove_node(trainer, allow_graceful=False)
    cluster.add_node(num_cpus=1, resources={"fix": 1})
    struck.wait_for_step(wait_for(struck, "restart")["rl_step"] + 1)
    assert_as_calm(running, struck, *same)
    assert "(rollout) is gone with its machine" in struck.summary["lost"][0]
    (restarted,) = struck.summary["restarted"]
    assert "rank 0 (trainer) is gone with its machine" in restarted


class Sleeps:
    """An actor with a process of its own."""

    def pid(self) -> int:
        return os.getpid()

    def live(self) -> None:
        time.sleep(1000.0)


@pytest.mark.slow
def test_the_loss_of_a_machine_is_told_from_that_of_a_process(cluster: Any) -> None:
    """By Ray's own errors: a process that is killed, a node that ends in order, one that is cut
    off."""
    import ray

    def live_on(node: str) -> tuple[RayRank, int]:
        actor: Any = ray.remote(Sleeps).options(num_cpus=0, resources={node: 1}).remote()
        pid = ray.get(actor.pid.remote())
        return RayRank(actor, actor.live.remote()), pid

    nodes = {name: cluster.add_node(num_cpus=1, resources={name: 1}) for name in ("a", "b", "c")}
    ray.init(address=cluster.address, include_dashboard=False, log_to_driver=False)
    try:
        (killed, pid), (ended, _), (cut_off, _) = (live_on(node) for node in nodes)
        os.kill(pid, signal.SIGKILL)
        killed.join(60.0)
        cluster.remove_node(nodes["b"], allow_graceful=True)
        cluster.remove_node(nodes["c"], allow_graceful=False)
        for rank in (ended, cut_off):
            rank.join(60.0)
        codes = [rank.exitcode for rank in (killed, ended, cut_off)]
        assert codes == [-signal.SIGKILL, MACHINE_LOST, MACHINE_LOST]
    finally:
        ray.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_begins_with_the_fewest_rollouts_and_grows_with_its_cluster(
    running: Any, cluster: Any
) -> None:
    """The second rollout has no place at first; it joins with the node that comes, and changes no
    bit."""
    same = (*LOCAL, "max_rl_steps=10000", "callbacks.checkpoint.every=10000")
    cluster.add_node(num_cpus=1, resources={"spot": 1})
    span = ("allocation.rollouts={min:1,max:2}", "launch=ray", f"ray.address={cluster.address}")
    train = running(*same, *profile(), *span)
    train.wait_for_step(2)
    assert "1 trainer + 1 rollout (up to 2, as there are places)" in train.stderr
    cluster.add_node(num_cpus=1, resources={"spot": 1})
    wait_for(train, "joined")
    assert_as_calm(running, train, *same)
    assert train.summary["world"] == {"trainer": 1, "rollout": 1}


@pytest.mark.slow
def test_a_cluster_of_this_machine_alone_ends_with_the_run(running: Any) -> None:
    """Ctrl-C saves and leaves no process; what the cluster will never have ends in one message."""
    pytest.importorskip("ray")
    refused = running(*LOCAL, "launch=ray", "ray.resources={local:{moon:1}}", "ray.wait_s=2")
    assert refused.finish() == 1
    assert "failed: 3 ranks have no place yet (rank 0: {'moon': 1" in refused.stderr
    assert "set a smaller allocation; raise ray.wait_s where nodes still start." in refused.stderr
    assert "Traceback" not in refused.stderr
    train = running(*LOCAL, *RAY, "max_rl_steps=1000")
    train.wait_for_step(1)
    os.killpg(train.pid, signal.SIGINT)
    assert train.finish() == 128 + signal.SIGINT, train.stderr
    assert train.summary["status"] == "stopped"
    assert (train.run_dir / "checkpoints/last/manifest.json").is_file()
    deadline = time.monotonic() + 10
    while left := [*train.left(), *refused.left()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_ranks_take_over_what_the_driver_was_given() -> None:
    """Ranks get no secret, and no variable that says which GPUs a rank sees."""
    taken = {
        "HF_HOME": "/shared/hf",
        "HF_HUB_OFFLINE": "1",
        "DIGENRL_CACHE": "/shared/cache",
        "NCCL_SOCKET_IFNAME": "=ib0",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "OMP_NUM_THREADS": "1",
    }
    left = {
        "HF_TOKEN": "hf_" + "a" * 20,
        "DIGENRL_RUN_TOKEN": "0" * 32,
        "CUDA_VISIBLE_DEVICES": "0",
        "HOME": "/root",
        "MY_HF_HOME": "/x",
    }
    assert inherited_variables(taken | left) == taken


def test_no_lack_is_told_while_processes_start() -> None:
    places = Places(None, ({"GPU": 1}, {"CPU": 1, "spot": 0.5}, {"far": 9}), 2, 60.0, 60.0, 1.0)
    free = {"GPU": 2.0, "CPU": 4.0, "spot": 1.0}
    assert all_reserved(places, free, {"GPU": 1.0, "CPU": 3.0, "spot": 0.5})
    assert not all_reserved(places, free, {"GPU": 2.0, "CPU": 3.0, "spot": 0.5})
    assert not all_reserved(places, {"CPU": 4.0, "spot": 1.0}, {"CPU": 3.0, "spot": 0.5})


SLOWLY = """
from digenrl.launchers.on_ray import Places, seated_ranks

with seated_ranks(Places(None, ({"CPU": 0.1},), 1, 60.0, 0.0, 1.0), 1):
    pass
"""


@pytest.mark.slow
def test_a_process_that_starts_slowly_lacks_no_place() -> None:
    """Resources of the process are reserved, so the limit for a start holds, not the limit for a
    place."""
    pytest.importorskip("ray")
    done = subprocess.run([sys.executable, "-c", SLOWLY], capture_output=True, text=True)
    assert "PlacementError: the processes of 1 ranks (rank 0: {'CPU': 0.1}) have not" in done.stderr
    assert "no place" not in done.stderr


def test_an_address_that_ranks_could_not_answer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(
        ValueError, match=r"ray.address = ray://head:10001: ranks could not reach .*ray job submit"
    ):
        driver_host(None)
    assert driver_host("127.0.0.1:6379") == "127.0.0.1"


def test_resources_of_no_pool_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"ray\.resources\.spot: is no pool .* its pools are local"
    ):
        configuration.load(["experiment=digits_flowgrpo", "ray.resources={spot:{GPU:1}}"])
