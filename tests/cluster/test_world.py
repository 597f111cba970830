"""Ranks and their roles, what a run is launched with if nobody says otherwise, and when it starts
again."""

from __future__ import annotations

import os
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import pytest
import yaml

from digenrl.cluster import launcher, signals
from digenrl.cluster.handshake import Handshake
from digenrl.cluster.launcher import Launch, RunOutcome
from digenrl.cluster.limits import Limits
from digenrl.cluster.members import Terms
from digenrl.cluster.network import Network
from digenrl.cluster.restarts import Restarts
from digenrl.cluster.world import RoleEnvironment, Session, World


@pytest.mark.parametrize(
    ("world", "joined", "role", "seen"),
    [
        (World(0, 2, 1), False, "trainer", (2, 0)),
        (World(1, 2, 1), False, "trainer", (2, 1)),
        (World(2, 2, 1), False, "rollout", (1, 0)),
        (World(3, 2, 1), True, "rollout", (1, 0)),
        (World(2, 3, 0), False, "trainer", (3, 2)),
    ],
)
def test_lightning_sees_the_ranks_of_a_role_alone(
    world: World, joined: bool, role: str, seen: tuple[int, int]
) -> None:
    assert (world.joined, world.role, world.is_trainer) == (joined, role, role == "trainer")
    assert (world.role_size, world.role_rank, world.size) == (*seen, 3)
    assert [*world.rollout_ranks] == [*range(world.trainers, 3)]
    environment = RoleEnvironment(world)
    environment.set_world_size(9)
    environment.set_global_rank(9)
    assert (environment.world_size(), environment.global_rank()) == seen
    assert (environment.local_rank(), environment.node_rank(), environment.detect()) == (
        0,
        0,
        False,
    )
    assert environment.creates_processes_externally
    assert (environment.main_address, environment.main_port) == ("127.0.0.1", 0)
    assert world.local_rank == 0


def test_limits_and_network_are_those_of_the_configuration(repository: Path) -> None:
    written: Any = yaml.safe_load((repository / "configs" / "train.yaml").read_text())
    assert asdict(Limits()) == written["limits"]
    network = written["network"]
    assert Network(network["interface"], network["ports"]) == Network()


def test_what_a_run_is_launched_with_if_nobody_says_otherwise(tmp_path: Path) -> None:
    assert asdict(Terms(1, 2)) == {
        "trainers": 1, "rollouts": 2, "max_lost": None, "patience_s": 0.0, "fewest": 1,
    }  # fmt: skip
    spec = Launch(1, 2, lambda *_: None, tmp_path)
    assert (spec.stop_grace(), spec.stop_save_s, spec.host, spec.places) == (
        30.0,
        60.0,
        "127.0.0.1",
        None,
    )
    assert (spec.network, spec.credentials, spec.limits) == (Network(), {}, Limits())
    assert spec.signals.count == 0
    assert astuple(RunOutcome()) == ("completed", None, 0, False)
    one, other = Handshake(), Handshake()
    assert (one.seconds, one.waiting, one.connect_s, one.rank) == (10.0, 64, 60.0, -1)
    assert len(one.token) == len(other.token) == 32
    assert one.token != other.token
    session = Session("there", 7, one, tmp_path, 1.5)
    assert session.store == ("there", 7, one)
    assert (session.host, session.watched, session.leave.is_set()) == ("127.0.0.1", True, False)


DIED = "rank 0 died"
RESTARTS: dict[str, tuple[int, list[tuple[int, int]], list[str | None]]] = {
    "never": (0, [(0, 3)], [DIED]),
    "from the start": (3, [(0, 0)], [DIED]),
    "resumed, from the start": (3, [(4, 4)], [DIED]),
    "later": (3, [(0, 2), (2, 4)], [None, None]),
    "before its first step": (3, [(0, 2), (2, 2)], [None, "; RL step 3 is poison: the run has died in it before"]),
    "again there": (3, [(0, 2), (1, 3), (1, 2)], [None, None, "; RL step 3 is poison"]),
    "too often": (2, [(0, 1), (1, 2), (2, 3)], [None, None, "; it had begun again 2 times (allocation.max_restarts)"]),
    "behind the last": (3, [(8, 9), (8, 9)], [None, "; the run has died after its last RL step before"]),
    "in the last": (3, [(7, 8), (7, 8)], [None, "; RL step 9 is poison"]),
}  # fmt: skip


@pytest.mark.parametrize("case", RESTARTS)
def test_a_run_starts_again_unless_that_is_in_vain(case: str) -> None:
    most, deaths, expected = RESTARTS[case]
    restarts = Restarts(most, 1.5, steps=9)
    assert restarts.pause_s == 1.5
    for number, ((began, finished), said) in enumerate(zip(deaths, expected, strict=True)):
        refused = restarts.refuse_restart(f"rank {number} died", began, finished)
        if said is None or said == DIED:
            assert refused == said
        else:
            assert refused is not None
            assert refused.startswith(f"rank {number} died{said}")
            assert refused.endswith(("max_restarts)", "(rank 0 died)"))
        assert restarts.pause_s == 1.5 * 2**number


def test_a_process_has_an_exit_code_of_its_own_for_a_run_that_stops_itself() -> None:
    assert (launcher.EXIT_STOPPED, signals._PR_SET_PDEATHSIG) == (os.EX_TEMPFAIL, 1)


def test_a_failure_of_the_launchers_own_is_the_outcome_and_its_traceback_in_a_log(
    tmp_path: Path,
) -> None:
    with pytest.raises(OSError, match="no port is free") as caught:
        raise OSError("no port is free")
    outcome = launcher._own_failure(caught.value, tmp_path)
    assert launcher._own_failure(caught.value, tmp_path / "nowhere") == outcome
    assert (outcome.status, outcome.exit_code) == ("failed", 1)
    assert outcome.cause == "the launcher raised OSError: no port is free; see logs/launcher.log"
    assert "in test_a_failure_of_the_launchers_own" in (tmp_path / "launcher.log").read_text()
