"""Ranks and roles of a run, and the smaller world that Lightning sees.

Launch ranks 0..n-1 are trainers, the others are rollouts. A rollout that joins later gets a new
number. The *default* process group of a process is the group of its role: all trainers, or one
rollout alone. Lightning, torchmetrics and DeviceMesh use the default group in places that no
override reaches. Lightning, for example, broadcasts on it before every micro-batch.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

from lightning.fabric.plugins.environments import ClusterEnvironment

from digenrl.cluster.handshake import Handshake
from digenrl.cluster.limits import Limits
from digenrl.cluster.network import Network
from digenrl.record.progress import Progress


@dataclass(frozen=True)
class World:
    """Position of this process in the run.

    Example:
        >>> ranks = [World(rank, trainers=2, rollouts=1) for rank in range(4)]
        >>> [(world.role, world.role_rank, world.role_size) for world in ranks[1:3]]
        [('trainer', 1, 2), ('rollout', 0, 1)]
        >>> [world.joined for world in ranks]
        [False, False, False, True]
    """

    rank: int
    """Launch rank, 0..trainers+rollouts-1; higher for each rollout that joins."""
    trainers: int
    rollouts: int
    """Number of rollouts that the run began with; 0 = colocated: trainers generate too."""
    local_rank: int = 0
    """Index of this process's device on its machine."""

    @property
    def joined(self) -> bool:
        """Whether this rank joined a run that was already going on."""
        return self.rank >= self.size

    @property
    def role(self) -> str:
        return "trainer" if self.rank < self.trainers else "rollout"

    @property
    def is_trainer(self) -> bool:
        return self.rank < self.trainers

    @property
    def role_rank(self) -> int:
        """Rank among the processes of this role; 0 for every rollout, which is a world of its
        own."""
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
    """How a rank reaches its run: the control store, the run directory, and the time limits."""

    store_host: str
    store_port: int
    handshake: Handshake
    """Token and limits with which ranks of this run reach the store and each other."""
    run_dir: Path
    epoch: float
    """Wall-clock second (Unix time) that counts as zero in the run's spans."""
    host: str = "127.0.0.1"
    """Address on which this rank's data link listens."""
    network: Network = field(default_factory=Network)
    """Ports of that listener, and the interface."""
    limits: Limits = field(default_factory=Limits)
    progress: Progress = field(default_factory=Progress)
    """Present activity of this rank's threads, sent with its heartbeat."""
    leave: threading.Event = field(default_factory=threading.Event)
    """Event that is set when this rank, a rollout, shall leave the run while the run goes on."""
    over: threading.Event = field(default_factory=threading.Event)
    """Event that is set when this rank's part of the run has ended, well or not. Only the report
    and the exit are left."""
    watched: bool = True
    """Whether a launcher sees every death and judges it. Without a launcher any death ends the
    run."""

    @property
    def store(self) -> tuple[str, int, Handshake]:
        """Arguments for a `StoreClient` of this run. A launcher that may be suspended for long (a
        debugger) has as much time for an answer."""
        answer_s = max(self.handshake.answer_s, 2.0 * self.limits.suspended_s)
        return self.store_host, self.store_port, replace(self.handshake, answer_s=answer_s)


class RoleEnvironment(ClusterEnvironment):
    """Lightning's view of the cluster: only the ranks of this process's role."""

    # The ranks exist already, so Lightning starts none.
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
        """Do nothing: the role fixes the number."""

    def global_rank(self) -> int:
        return self._world.role_rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the role fixes the number."""

    def local_rank(self) -> int:
        # Each process has taken its GPU (`devices.take_gpu`), and Lightning gets this one alone.
        return 0

    def node_rank(self) -> int:
        return 0
