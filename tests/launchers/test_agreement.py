"""Processes of one job compare themselves, and test the network between their nodes, before
weights are read."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import platform
import shutil
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from digenrl.cluster.access import Access
from digenrl.cluster.control import Aborted, Control
from digenrl.cluster.handshake import Handshake
from digenrl.cluster.limits import Limits
from digenrl.cluster.members import CREDENTIALS
from digenrl.cluster.network import Network
from digenrl.cluster.store import StoreClient, StoreServer
from digenrl.cluster.world import Session, World
from digenrl.config import load
from digenrl.launchers import agreement
from digenrl.launchers.agreement import (
    ProcessFacts,
    check_machine,
    compare_processes,
    find_differences,
)
from digenrl.launchers.job import newest_checkpoint
from digenrl.launchers.joining import JoinRequest, check_agreement
from digenrl.launchers.on_ray import RayLauncher
from digenrl.launchers.places import Place
from tests.launchers.scheduled import Processes, srun, summary, words
from tests.strategy.processes import TINY


def facts(**changed: Any) -> ProcessFacts:
    return replace(ProcessFacts("a", True, {"torch": "2.11"}, "x86_64", {"seed": 0}), **changed)


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({}, []),
        ({"host": "b", "first_on_node": False, "architecture": "aarch64"}, []),
        ({"configuration": {"seed": 7}}, ["seed = 7 (the run's: 0)"]),
        ({"configuration": {}}, ["seed = absent (the run's: 0)"]),
        ({"versions": {"torch": "2.10"}}, ["torch is 2.10 (there: 2.11)"]),
        ({"versions": {}}, ["torch is None (there: 2.11)"]),
    ],
)
def test_a_difference_names_both_values(own: Mapping[str, Any], said: list[str]) -> None:
    assert find_differences(facts(), facts(**own)) == said


@pytest.mark.parametrize("nodes", range(7))
def test_every_two_nodes_meet_once_and_no_node_twice_in_a_round(nodes: int) -> None:
    rounds = list(agreement.rounds_of_pairs(range(nodes)))
    met = [pair for pairs in rounds for pair in pairs]
    assert len(met) == len(set(met)) == nodes * (nodes - 1) // 2
    for pairs in rounds:
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy))


def test_a_machine_has_its_cache_and_enough_shared_memory(tmp_path: Path) -> None:
    missing = {"HF_HOME": str(tmp_path / "none")}
    check_machine(8, gpus=False, alone=False, environment={"HF_HOME": str(tmp_path)})
    check_machine(8, gpus=False, alone=True, environment=missing)
    with pytest.raises(ValueError, match=r"HF_HOME = .*/none: no such directory on .*make fetch"):
        check_machine(1, gpus=False, alone=False, environment=missing)
    has = shutil.disk_usage(agreement.SHARED_MEMORY).total // 2**20
    many = has // agreement.SHARED_MIB_A_RANK + 1
    with pytest.raises(ValueError, match=rf"has {has} MiB for {many} ranks.*--shm-size=1g"):
        check_machine(many, gpus=True, alone=True, environment={})
    check_machine(many, gpus=False, alone=True, environment={})
    check_machine(many, gpus=True, alone=True, environment={"NCCL_SHM_DISABLE": "1"})


def test_an_interface_is_enough_where_the_machine_has_no_route() -> None:
    """Debian resolves a host's own name to loopback, and a compute node may lack a default
    route."""

    def unreachable() -> str:
        raise OSError("Network is unreachable")

    assert Network("lo").interface_address(unreachable) == "127.0.0.1"
    with pytest.raises(OSError, match="unreachable"):
        Network().interface_address(unreachable)


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    handshake = Handshake()
    server = StoreServer(Network().open_listener("127.0.0.1"), handshake)
    yield Session(server.host, server.port, handshake, tmp_path, 0.0, limits=Limits(start_s=20.0))
    server.close()


def all_agree(
    session: Session, places: list[tuple[int, int]], seeds: Mapping[int, int]
) -> dict[int, str]:
    """Let threads stand for the processes of a job; return process -> what it raised.

    Args:
        places: (local rank, processes on this machine) of each process.
        seeds: process -> the seed that it was started with, where it is not 0.
    """
    raised: dict[int, str] = {}
    split = ("allocation.trainers=1", "allocation.rollouts=3")
    composed = [
        load([*TINY, *split, f"seed={seeds.get(process, 0)}"]) for process in range(len(places))
    ]

    def be(process: int) -> None:
        local, size = places[process]
        given = composed[process]
        place = Place(process, len(places), local, "127.0.0.1", 0, "job", False, size)
        world = World(process, 1, len(places) - 1, local)
        try:
            compare_processes(given.settings, place, world, session)
        except (ValueError, Aborted) as error:
            raised[process] = str(error)
            Control(StoreClient(*session.store), process).abort_run(str(error))

    threads = [threading.Thread(target=be, args=(n,)) for n in range(len(places))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_three_nodes_agree_and_measure_their_network(session: Session) -> None:
    """Two processes are on the first machine, one on each of two others."""
    assert all_agree(session, [(0, 2), (1, 2), (0, 1), (0, 1)], {}) == {}
    rows = [json.loads(row) for row in (session.run_dir / "events.jsonl").read_text().splitlines()]
    (network,) = (row for row in rows if row["kind"] == "network")
    assert network["interface"] == "lo"
    assert len(network["pairs"]) == 3
    assert all(0.01 < pair["gb_s"] < 1000 for pair in network["pairs"])


def test_a_pair_that_is_far_slower_than_the_profile_is_a_warning(
    session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    given = load(
        [
            *TINY,
            "hardware.pools.local.inter_gb_s=1000",
            "allocation.trainers=1",
            "allocation.rollouts=1",
        ]
    )
    agreement._report_pairs(given.settings, session, ["a", "b"], {(0, 1): 0.1})
    assert "a and b: 0.1 GB/s" in caplog.text
    assert "profile says 1e+03 and one connection can reach 1.2: choose another" in caplog.text
    assert "a and b" in (session.run_dir / "events.jsonl").read_text()


@pytest.mark.parametrize(
    ("profile", "speeds", "slow"),
    [
        # A healthy InfiniBand network: one TCP connection reaches a part of its 25 GB/s.
        (25.0, [2.0, 1.9, 2.1], []),
        # The slowest that one connection may be: a fifth of CONNECTION_GB_S.
        (25.0, [0.25, 0.25, 0.25], []),
        (25.0, [0.2, 0.2, 0.2], ["0.2", "0.2", "0.2"]),
        (25.0, [2.0, 0.1, 2.0], ["0.1"]),
        # Fast enough for a connection in general, but not for these machines.
        (25.0, [2.0, 0.35, 2.0], ["0.35"]),
        # No connection is faster than the network, and the profile of this one says so.
        (0.5, [2.0, 0.11, 0.4], []),
        (0.5, [0.4, 0.09, 0.4], ["0.09"]),
    ],
)
def test_a_pair_is_judged_by_what_one_connection_can_reach(
    session: Session,
    caplog: pytest.LogCaptureFixture,
    profile: float,
    speeds: list[float],
    slow: list[str],
) -> None:
    given = load(
        [
            *TINY,
            f"hardware.pools.local.inter_gb_s={profile}",
            "allocation.trainers=1",
            "allocation.rollouts=2",
        ]
    )
    found = dict(zip([(0, 1), (0, 2), (1, 2)], speeds, strict=True))
    agreement._report_pairs(given.settings, session, ["a", "b", "c"], found)
    warned = [record.getMessage() for record in caplog.records]
    assert [text.partition(": ")[2].partition(" ")[0] for text in warned] == slow


@pytest.mark.processes
@pytest.mark.parametrize("wrong", [False, True])
def test_trainers_compute_together_before_they_read_weights(session: Session, wrong: bool) -> None:
    """Two processes with gloo. A second trainer that gives a wrong number stands for a network that
    changes what it carries."""
    store = StoreClient(*session.store)

    def gather_wrongly() -> None:
        own = StoreClient(*session.store)  # torch keeps no reference to it
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("probe/trainers", own),
            rank=1,
            world_size=2,
            timeout=timedelta(seconds=20),
        )
        number = torch.tensor([5.0])
        dist.all_reduce(number.clone())
        dist.all_gather([torch.zeros(1), torch.zeros(1)], number)

    def be_trainer(rank: int) -> None:
        if wrong and rank == 1:
            return gather_wrongly()
        try:
            agreement.check_collectives(World(rank, 2, 0), session, StoreClient(*session.store))
        except RuntimeError as error:
            StoreClient(*session.store).set(f"said/{rank}", str(error))
        return None

    context = multiprocessing.get_context("fork")
    started = [context.Process(target=be_trainer, args=(rank,), daemon=True) for rank in range(2)]
    for process in started:
        process.start()
    for process in started:
        process.join(60.0)
    assert [process.exitcode for process in started] == [0, 0]
    said = store.read_values(["said/0", "said/1"])
    if not wrong:
        assert said == [None, None]
        return
    assert said[1] is None
    text = (said[0] or b"").decode()
    assert "trainer 0 gathered [1.0, 5.0] and summed 6, expected [1.0, 2.0] and 3" in text
    assert "NCCL_P2P_DISABLE=1" in text


def test_other_words_on_one_machine_end_all_before_weights_are_read(session: Session) -> None:
    raised = all_agree(session, [(0, 1), (0, 1), (0, 1)], {2: 7})
    assert "process 2 on " in raised[2]
    assert "differs from process 0 on " in raised[2]
    assert "seed = 7 (the run's: 0)" in raised[2]
    assert all("seed = 7" in raised[process] for process in (0, 1))


def test_a_rank_of_ray_agrees_with_its_driver_before_it_takes_a_gpu(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The body of a rank travels as Ray sends it. Patched facts stand for another machine's."""
    settings = load([*TINY, "launch=ray"]).settings
    driver, fitted = socket.gethostname(), list[int]()
    sent = pickle.dumps(RayLauncher(settings).rank_main(partial(_note_rank, fitted)))
    control = Control(StoreClient(*session.store), 0)

    def be_rank(rank: int) -> None:
        body = pickle.loads(sent)  # noqa: S301  # its own bytes
        body(World(rank, 1, 2), session)
        fitted.extend(body.args[2].args[0])

    be_rank(0)
    assert fitted == [0]
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    monkeypatch.setattr(platform, "machine", lambda: "sparc")
    be_rank(1)
    assert fitted == [0, 1]
    text = (session.run_dir / "events.jsonl").read_text()
    assert "processors of several kinds" in text
    assert "sparc on elsewhere" in text
    monkeypatch.setenv("HF_HOME", str(session.run_dir / "none"))
    with pytest.raises(ValueError, match="none: no such directory on elsewhere"):
        be_rank(2)
    assert fitted == [0, 1]
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setattr(torch, "__version__", "0.1")
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    with pytest.raises(
        ValueError,
        match=rf"on elsewhere from the driver on {driver}: torch is 0\.1 \(there: .*"
        r"CUDA is 99\.1 \(there: ",
    ):
        be_rank(2)
    assert "rank 2 (rollout): " in str(control.get("abort")), "a rollout would only be replaced"


def test_the_ranks_that_ray_puts_on_one_machine_share_its_memory(session: Session) -> None:
    settings = load([*TINY, "launch=ray"]).settings
    many = shutil.disk_usage(agreement.SHARED_MEMORY).total // 2**20 // agreement.SHARED_MIB_A_RANK
    Control(StoreClient(*session.store), 0).add(f"seated/{socket.gethostname()}", many - 1)
    own = agreement.facts_of(settings)
    agreement.compare_with_driver(own, settings, World(0, 2, 0), session, gpus=True)
    with pytest.raises(ValueError, match=rf"for {many + 1} ranks.*--shm-size=1g"):
        agreement.compare_with_driver(own, settings, World(1, 2, 0), session, gpus=True)


def test_a_rollout_that_joins_agrees_with_the_run(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load([*TINY, "allocation.trainers=1", "allocation.rollouts=1"]).settings
    shown = json.dumps(asdict(agreement.facts_of(settings)))
    Control(StoreClient(*session.store), 0).set(CREDENTIALS, shown)
    access = Access(session.store_host, session.store_port, session.handshake.token, 0.0)
    request = JoinRequest(access, settings, session.run_dir, 0)
    here = socket.gethostname()
    check_agreement(request, agreement.facts_of(settings))
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    check_agreement(request, agreement.facts_of(settings))
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    with pytest.raises(
        ValueError, match=rf"on elsewhere differs from .* on {here}: CUDA is 99\.1 \(there: "
    ):
        check_agreement(request, agreement.facts_of(settings))
    monkeypatch.undo()
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    monkeypatch.setenv("HF_HOME", str(session.run_dir / "none"))
    with pytest.raises(ValueError, match="none: no such directory on elsewhere"):
        check_agreement(request, agreement.facts_of(settings))


def _note_rank(fitted: list[int], world: World, session: Session) -> None:
    fitted.append(world.rank)


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_tasks_with_different_words_do_not_train(tmp_path: Path, processes: Processes) -> None:
    """Each composes its own configuration; before, both trained and the run was "completed"."""
    srun(processes, ["train", *words(tmp_path, 2, 0)], 2, more=(["seed=0"], ["seed=7"]), fork=True)
    assert processes.codes() == [1, 1], processes.tails()
    found = summary(processes)
    assert (found["status"], found["rl_steps"]) == ("failed", 0)
    assert "seed = 7 (the run's: 0)" in found["cause"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_task_that_is_ready_early_waits_for_process_0(
    tmp_path: Path, processes: Processes
) -> None:
    """For `limits.start_s`; it was a minute, which a cold file system takes to import torch."""
    command = [sys.executable, "-m", "digenrl.cli.train", *words(tmp_path, 1, 1)]
    srun(processes, command, 2, order=(1, 0), pause_s=75.0)
    assert processes.codes() == [0, 0], processes.tails()


@pytest.mark.processes
@pytest.mark.timeout(400)
def test_one_process_verifies_the_checkpoint_of_all(tmp_path: Path, processes: Processes) -> None:
    """The newest one is damaged: process 0 passes it over, and the other follows it."""
    given = words(tmp_path, 2, 0, "callbacks.checkpoint.every=1")
    srun(processes, ["train", *given], 2, fork=True)
    assert processes.codes() == [0, 0], processes.tails()
    (run_dir,) = tmp_path.glob("outputs/*/*")
    damaged = run_dir / "checkpoints/step-000002/policy.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    assert newest_checkpoint(run_dir).name == "step-000001"
    assert newest_checkpoint(run_dir, verifies=False).name == "step-000002"
    srun(processes, ["train", f"resume={run_dir}", "max_rl_steps=3"], 2, fork=True)
    assert processes.codes() == [0, 0, 0, 0], processes.tails()
    assert "passed over for step-000001" in processes.said(2, "err")
    assert "passed over" not in processes.said(3, "err")
    rows = [json.loads(row) for row in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["rl_step"] for row in rows if row["kind"] == "step"][-2:] == [2, 3]
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "completed"
