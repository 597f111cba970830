"""Which rollouts get a version from trainer 0, and which from a rank of their own node."""

from __future__ import annotations

import socket
from dataclasses import replace

from digenrl.cluster.control import Control
from digenrl.cluster.handshake import Handshake
from digenrl.cluster.store import StoreClient, StoreServer
from digenrl.strategy.publishing import relayed

HOSTS = {1: "10.0.0.1", 2: "10.0.0.2", 3: "10.0.0.2", 4: "10.0.0.1", 5: "10.0.0.2", 6: "10.0.0.2"}


def test_a_version_goes_once_to_each_other_node_and_to_each_rank_that_joined() -> None:
    handshake = Handshake("secret", seconds=2.0, waiting=8)
    server = StoreServer(socket.create_server(("127.0.0.1", 0)), handshake)
    try:
        control = Control(StoreClient(server.host, server.port, handshake), 0, patience=0.5)
        guest = StoreClient(server.host, server.port, replace(handshake, rank=6))
        Control(guest, 6).join(6)
        for rank, host in HOSTS.items():
            control.set(f"address/{rank}", f"{host}:70{rank}")
        routes = relayed(control, range(1, 6), own_host="10.0.0.1")
        assert routes == {1: [], 2: [3, 5], 4: [], 6: []}
    finally:
        server.close()
