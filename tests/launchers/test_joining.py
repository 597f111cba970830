"""How a rollout that joined a run ends."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from digenrl import config
from digenrl.cluster.control import Control
from digenrl.cluster.handshake import Handshake
from digenrl.cluster.signals import StopSignals
from digenrl.cluster.store import StoreClient, StoreServer
from digenrl.cluster.world import Session, World
from digenrl.launchers.joining import join_run

pytestmark = pytest.mark.processes
WORDS = ("experiment=digits_flowgrpo", "allocation.trainers=1", "allocation.rollouts=1")


@pytest.fixture
def store() -> Iterator[tuple[StoreServer, Handshake]]:
    handshake = Handshake("secret")
    server = StoreServer(socket.create_server(("127.0.0.1", 0)), handshake)
    yield server, handshake
    server.close()


@pytest.mark.parametrize(
    ("told", "status", "cause"),
    [
        ((), "left", "None"),
        (("done",), "completed", "None"),
        (("done", "abort"), "completed", "None"),
        (("abort",), "failed", "the run ended: rank 0 (trainer) raised E; see"),
    ],
    ids=["leaves", "done", "told late", "had to leave"],
)
def test_who_had_to_leave_an_aborted_run_has_failed(
    store: tuple[StoreServer, Handshake],
    tmp_path: Path,
    told: tuple[str, ...],
    status: str,
    cause: str,
) -> None:
    """A rank that could not leave in time says that it leaves, and no longer why."""
    server, handshake = store
    Control(StoreClient(server.host, server.port, handshake), 0).add("ranks", 2)

    def ends(world: World, session: Session) -> None:
        control = Control(StoreClient(*session.store), world.rank)
        for key in told:
            control.set(key, "rank 0 (trainer) raised E")
        control.set(f"left/{world.rank}", "1")
        os._exit(1)

    request: Any = SimpleNamespace(
        connect_control=lambda rank=-1: Control(
            StoreClient(server.host, server.port, handshake), rank
        ),
        access=SimpleNamespace(host=server.host, port=server.port, epoch=0.0),
        settings=config.load(WORDS).settings,
        make_handshake=lambda rank: handshake,
        run_dir=tmp_path,
        local_rank=0,
    )
    found = join_run(request, ends, StopSignals())
    assert found.status == status
    assert cause in str(found.cause)
