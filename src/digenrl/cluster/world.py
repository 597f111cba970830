"""Who is who: launch ranks, roles, and the role-scoped world that Lightning sees.

Launch ranks 0..n-1 are trainers, the rest are rollouts; one that joins later gets the next number, which nobody had.
Each process's *default* process group is its role's group (all trainers; each rollout alone), because Lightning,
torchmetrics and DeviceMesh use the default group in places that no override reaches: Lightning broadcasts on it before
every micro-batch.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

from lightning.fabric.plugins.environments import ClusterEnvironment

from digenrl.cluster.handshake import Handshake
from digenrl.cluster.limits import Limits
from digenrl.cluster.network import Network
from digenrl.record.progress import Progress


@dataclass(frozen=True)
class World:
    """This process's place in the run."""

    rank: int
    """Launch rank, 0..trainers+rollouts-1; one above for each rollout that joins."""
    trainers: int
    rollouts: int
    """Those that the run began with; 0 = colocated: trainers generate too."""
    local_rank: int = 0
    """Index of this process's device on its machine."""

    @property
    def joined(self) -> bool:
        """Whether this rank joined a run that had begun without it."""
        return self.rank >= self.size

    @property
    def role(self) -> str:
        return "trainer" if self.rank < self.trainers else "rollout"

    @property
    def is_trainer(self) -> bool:
        return self.rank < self.trainers

    @property
    def role_rank(self) -> int:
        """Rank inside the role's own world: a rollout is a world of one."""
        return self.rank if self.is_trainer else 0

    @property
    def role_size(self) -> int:
        return self.trainers if self.is_trainer else 1

    @property
    def size(self) -> int:
        return self.trainers + self.rollouts

    @property
    def rollout_ranks(self) -> range:
        return range(self.trainers, self.size)


@dataclass(frozen=True)
class Session:
    """How a rank reaches its run: the control store, the run directory, and how long it is waited for."""

    store_host: str
    store_port: int
    handshake: Handshake
    """How ranks of this run, and nobody else, reach the store and each other."""
    run_dir: Path
    epoch: float
    """Wall-clock second that spans call zero."""
    host: str = "127.0.0.1"
    """Address that this rank's data link listens on ..."""
    network: Network = field(default_factory=Network)
    """... in its range of ports."""
    limits: Limits = field(default_factory=Limits)
    progress: Progress = field(default_factory=Progress)
    """What this rank does at the moment; its heartbeat carries it."""
    leave: threading.Event = field(default_factory=threading.Event)
    """Set when this rank, a rollout, shall leave the run, which goes on."""
    watched: bool = True
    """A launcher sees every death and judges it. Without one the ranks see to each other: any death ends the run."""

    @property
    def store(self) -> tuple[str, int, Handshake]:
        """What a `StoreClient` needs."""
        return self.store_host, self.store_port, self.handshake


class RoleEnvironment(ClusterEnvironment):
    """Lightning's view of the cluster: only the ranks of this process's role."""

    creates_processes_externally, main_address, main_port = True, "127.0.0.1", 0

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._world.role_size

    def set_world_size(self, size: int) -> None:
        """Fixed by the role."""

    def global_rank(self) -> int:
        return self._world.role_rank

    def set_global_rank(self, rank: int) -> None:
        """Fixed by the role."""

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return 0
