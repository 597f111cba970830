"""Ranks that somebody else started: torchrun, SLURM.

Under torchrun the elastic agent's store serves, and any death ends the job (torchrun stops all workers). Under SLURM
rank 0 hosts the store and leaves last. In both, `allocation` must add up to the number of processes, and trainers are
the first ranks.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from digenrl.strategy.control import Control, host_store, join_store
from digenrl.strategy.world import Session, World


@dataclass(frozen=True)
class Place:
    """A process among those that were started."""

    rank: int
    size: int
    local_rank: int
    address: str
    """Host of the store."""
    port: int
    prefix: str
    hosts_store: bool
    """This process must host the store (no agent does)."""

    @property
    def host(self) -> str:
        """The address under which peers reach this process: that of the route to the store."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((self.address, self.port or 9))
            return str(probe.getsockname()[0])


def find_place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Where this process stands, or None when nobody but the user started it.

    Raises:
        ValueError: SLURM tasks without MASTER_PORT.
    """
    if "TORCHELASTIC_RUN_ID" in environment:
        return Place(
            rank=int(environment["RANK"]),
            size=int(environment["WORLD_SIZE"]),
            local_rank=int(environment["LOCAL_RANK"]),
            address=environment["MASTER_ADDR"],
            port=int(environment["MASTER_PORT"]),
            prefix=f"digenrl-{environment['TORCHELASTIC_RUN_ID']}-{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}",
            hosts_store=environment.get("TORCHELASTIC_USE_AGENT_STORE", "True") != "True",
        )
    if int(environment.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in environment:
        if "MASTER_PORT" not in environment:
            raise ValueError(
                "SLURM tasks need MASTER_PORT: export one free port of the first node, see scripts/slurm.sbatch."
            )
        rank = int(environment["SLURM_PROCID"])
        return Place(
            rank=rank,
            size=int(environment["SLURM_NTASKS"]),
            local_rank=int(environment.get("SLURM_LOCALID", "0")),
            address=environment.get("MASTER_ADDR") or first_host(environment["SLURM_JOB_NODELIST"]),
            port=int(environment["MASTER_PORT"]),
            prefix=f"digenrl-{environment.get('SLURM_JOB_ID', '0')}-{environment.get('SLURM_RESTART_COUNT', '0')}",
            hosts_store=rank == 0,
        )
    return None


def first_host(nodelist: str) -> str:
    """The first name of a SLURM node list: `gpu[03-05,9],cpu1` -> `gpu03`."""
    found = re.match(r"([^,\[]+)(?:\[(\w+))?", nodelist)
    if found is None:
        raise ValueError(f"SLURM_JOB_NODELIST = {nodelist!r} names no host; set MASTER_ADDR.")
    return found[1] + (found[2] or "")


def attach(
    place: Place,
    trainers: int,
    rollouts: int,
    prepare: Callable[[], Path],
    rank_main: Callable[[World, Session], None],
) -> tuple[Path, str | None]:
    """Run this process's rank to its end; returns the run directory and the cause if it failed.

    Args:
        prepare: makes the run directory; called by rank 0 alone, the others learn its path from the store.
        rank_main: as in `launcher.Launch`.

    Raises:
        ValueError: the allocation does not add up to the processes that were started.
    """
    if trainers + rollouts != place.size:
        raise ValueError(
            f"allocation.trainers = {trainers} and allocation.rollouts = {rollouts} are {trainers + rollouts} ranks, "
            f"but {place.size} processes were started; make them equal."
        )
    server: dist.TCPStore | None = None
    if place.hosts_store:
        server = host_store(place.host, place.port)
    control = Control(join_store(place.address, place.port, place.prefix), place.rank)
    if place.rank == 0:
        run_dir = prepare()
        control.set("token", secrets.token_hex(16))
        control.set("epoch", repr(time.time()))
        control.set("run_dir", str(run_dir))
    run_dir = Path(control.wait_for("run_dir", "rank 0 to make the run directory"))
    session = Session(
        store_host=place.address,
        store_port=place.port,
        prefix=place.prefix,
        token=control.wait_for("token", "rank 0"),
        run_dir=run_dir,
        epoch=float(control.wait_for("epoch", "rank 0")),
        host=place.host,
    )
    cause: str | None = None
    try:
        rank_main(World(place.rank, trainers, rollouts, place.local_rank), session)
    except Exception as error:
        cause = control.get("abort") or f"rank {place.rank} raised {type(error).__name__}: {error}"
        control.abort(cause)
    control.set(f"left/{place.rank}", "1")
    if server is not None:  # last out: the others still talk to the store
        for rank in range(place.size):
            control.wait_for(f"left/{rank}", f"rank {rank} to leave")
    return run_dir, cause
