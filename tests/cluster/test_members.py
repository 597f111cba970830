"""Who is there, by the store: a rank that was given up is not heard any more."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from digenrl.cluster.control import Control
from digenrl.cluster.handshake import Handshake
from digenrl.cluster.store import StoreClient, StoreLost, StoreServer


def test_who_is_shut_out_is_not_heard() -> None:
    handshake = Handshake()
    server = StoreServer(socket.create_server(("127.0.0.1", 0)), handshake)
    try:
        guest = Control(StoreClient(server.host, server.port, replace(handshake, rank=7)), 7)
        host = Control(StoreClient(server.host, server.port, handshake), -1)
        guest.add_joined_rank(7)
        assert (host.joined_ranks(), host.surviving_ranks([1]), server.connected_ranks()) == (
            [7],
            [1, 7],
            {7},
        )
        server.exclude_rank(7)
        host.mark_lost(7)
        with pytest.raises(StoreLost):
            guest.set("claim", "7")
        with pytest.raises(StoreLost):
            Control(StoreClient(server.host, server.port, replace(handshake, rank=7)), 7).set(
                "claim", "7"
            )
        assert host.get("claim") is None
        assert host.surviving_ranks([1]) == [1]
    finally:
        server.close()
