"""The rank of a process that torchrun or SLURM started, read from its environment."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from lightning.fabric.plugins.environments import SLURMEnvironment

from digenrl import devices
from digenrl.config.settings import Settings
from digenrl.hardware import Hardware, assign_ranks, parse_hardware
from digenrl.launchers.reaching import source_address
from digenrl.settle import begins_with

UNUSED_ADDRESS = "192.0.2.1"
"""An address that no machine has (RFC 5737). Routes to this address start at the machine's outward
address."""


@dataclass(frozen=True)
class Place:
    """Position of this process among the started processes."""

    rank: int
    size: int
    local_rank: int
    address: str
    """Host of the store on which process 0 announces the run directory."""
    port: int
    prefix: str
    hosts_store: bool
    """Whether this process must host the store at `address` itself, because no agent does."""
    local_size: int = 1
    """Number of processes on this machine."""

    @property
    def host(self) -> str:
        """Address under which peers reach this process: the one on the route to the store.

        A machine may resolve its own name to the loopback interface (Debian's 127.0.1.1). Other
        machines then need its outward address.
        """
        host = source_address(self.address)
        if ipaddress.ip_address(host).is_loopback and self.size > self.local_size:
            return source_address(UNUSED_ADDRESS)
        return host

    def check_run(self, settings: Settings) -> None:
        """Refuse a run with other ranks than the started processes, or without this rank's GPU.

        Raises:
            ValueError: as `check_allocation`, `devices.check_gpus`, `devices.usable_gpus`.
        """
        if not settings.hardware.emulate:
            trainers, rollouts = begins_with(settings)
            check_allocation(self, trainers, rollouts)
            rank = process_ranks(parse_hardware(settings.hardware), trainers, rollouts)[self.rank]
            devices.check_gpus(
                settings, {rank: self.local_rank}, self.local_size, devices.usable_gpus()
            )


def place_of(environment: Mapping[str, str]) -> Place:
    """Return the position of this process as torchrun or SLURM wrote it into its environment.

    Raises:
        ValueError: SLURM tasks without MASTER_PORT.
    """
    if "TORCHELASTIC_RUN_ID" in environment:
        restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        agent = environment.get("TORCHELASTIC_USE_AGENT_STORE", "True") == "True"
        return Place(
            rank=int(environment["RANK"]),
            size=int(environment["WORLD_SIZE"]),
            local_rank=int(environment["LOCAL_RANK"]),
            address=environment["MASTER_ADDR"],
            port=int(environment["MASTER_PORT"]),
            prefix=f"digenrl-{environment['TORCHELASTIC_RUN_ID']}-{restarts}",
            hosts_store=not agent and environment["RANK"] == "0",
            local_size=int(environment["LOCAL_WORLD_SIZE"]),
        )
    if "MASTER_PORT" not in environment:
        raise ValueError(
            "SLURM tasks need MASTER_PORT: export one free port of the first node, see "
            "scripts/slurm.sbatch."
        )
    rank, job = int(environment["SLURM_PROCID"]), ("JOB_ID", "STEP_ID", "RESTART_COUNT")
    return Place(
        rank=rank,
        size=int(environment["SLURM_STEP_NUM_TASKS"]),
        local_rank=int(environment["SLURM_LOCALID"]),
        address=environment.get("MASTER_ADDR")
        or SLURMEnvironment.resolve_root_node_address(environment["SLURM_STEP_NODELIST"]),
        port=int(environment["MASTER_PORT"]),
        prefix="-".join(["digenrl", *(environment.get(f"SLURM_{name}", "0") for name in job)]),
        hosts_store=rank == 0,
        local_size=_tasks_here(environment),
    )


def _tasks_here(environment: Mapping[str, str]) -> int:
    """Return the number of SLURM tasks on this node. `SLURM_STEP_TASKS_PER_NODE` lists the counts
    of all nodes, such as `8(x2),4`; SLURM_NODEID is this node's index."""
    counts: list[int] = []
    for part in environment["SLURM_STEP_TASKS_PER_NODE"].split(","):
        count, _, times = part.rstrip(")").partition("(x")
        counts += [int(count)] * int(times or 1)
    return counts[int(environment["SLURM_NODEID"])]


def process_ranks(hardware: Hardware, trainers: int, rollouts: int) -> tuple[int, ...]:
    """Return the rank of each process that a scheduler started. The first ranks are trainers.

    Processes are started pool by pool in the profile's order, as many in each as `assign` gives it.
    The profile decides which of them train. Example: [3, 0, 1, 2] means that the first process is
    on a rollout pool and becomes rank 3.
    """
    placed = [pool for pool, _ in assign_ranks(hardware, trainers, rollouts)]
    return tuple(
        rank for pool in hardware.pools for rank, name in enumerate(placed) if name == pool.name
    )


def check_allocation(place: Place, trainers: int, rollouts: int) -> None:
    """Check that every started process is a rank.

    Raises:
        ValueError: the allocation does not add up to the number of started processes.
    """
    if trainers < 1 or trainers + rollouts != place.size:
        raise ValueError(
            f"allocation.trainers = {trainers} and allocation.rollouts = {rollouts} are "
            f"{trainers + rollouts} ranks, "
            f"but {place.size} processes were started: start as many (torchrun --nnodes x "
            "--nproc-per-node, srun "
            "--ntasks), or change one of the two keys; auto takes what is left."
        )
