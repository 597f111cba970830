"""Launch a run on Ray (`launch=ray`): its ranks are actors of a Ray cluster, and the launcher is
the driver.

Ray places the ranks, starts their processes and reports when one is gone. Store, claims,
trajectories and weights work as with every launcher, so the launcher watches these ranks as it
watches forked ones. Ray is imported when ranks are placed.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from digenrl import devices, extras
from digenrl.cluster.access import ACCESS
from digenrl.cluster.control import Control
from digenrl.cluster.handshake import Handshake
from digenrl.cluster.launcher import MACHINE_LOST, PlacementError, RankMain, run_rank
from digenrl.cluster.limits import Limits
from digenrl.cluster.network import Network
from digenrl.cluster.signals import end_with_parent
from digenrl.cluster.store import StoreClient
from digenrl.cluster.world import Session, World
from digenrl.config.settings import Settings
from digenrl.config.stored import words_to_join
from digenrl.hardware import assign_ranks, parse_hardware
from digenrl.launchers.agreement import ProcessFacts, compare_with_driver, facts_of
from digenrl.launchers.places import UNUSED_ADDRESS
from digenrl.launchers.reaching import source_address
from digenrl.record.redact import is_secret_name
from digenrl.record.run_dir import LOGS, open_log
from digenrl.settle import begins_with

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

_INHERITED = re.compile(
    "(HF|TRANSFORMERS|DIFFUSERS|DIGENRL|NCCL|TORCH|PYTORCH|OMP)_|XDG_CACHE_HOME$"
)
"""Names of environment variables that ranks inherit from the driver. They say where weights and
caches are, how libraries connect, and what torch reads at import, before an actor could set it.
Without these variables a rank would not find what the driver has checked. Ray alone sets which GPUs
a rank sees."""
_INTERNAL = re.compile("^node:|memory|_group_")
"""Names of resources that Ray counts for internal use."""
_TELL_S, _LOOK_S = 5.0, 0.5
"""Seconds until missing places are reported, and between two looks at a rollout."""
_OLD = 10.0
"""Lifetime of a rollout, in pauses before a restart, from which its death does not lengthen the
pause."""


@dataclass(frozen=True)
class Places:
    """Resources that a run asks of Ray, and its timeouts."""

    address: str | None
    """Address of the cluster; None = RAY_ADDRESS, or else a cluster on this machine for this
    run."""
    wants: tuple[Mapping[str, float], ...]
    """Ray resources of each rank: CPU, GPU, or any other name."""
    first: int
    """Ranks that the run begins with. The others are rollouts that join when there is a place for
    them."""
    wait_s: float
    """Seconds within which the first ranks must have a place."""
    start_s: float
    """Seconds within which their processes must then have started."""
    respawn_s: float
    """Seconds before a dead rollout is replaced. They double with each replacement that dies
    early."""
    words: tuple[str, ...] = ()
    """What the run's command line allows, for rollouts that join."""


class RayLauncher:
    """`Launcher` of a settled run with this configuration."""

    ranks_here = 0

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @property
    def host(self) -> str:
        return driver_host(self._settings.ray.address)

    def check_devices(self) -> None:
        """Do nothing: each rank checks its GPU by itself, after Ray has given it one."""
        driver_host(self._settings.ray.address)

    def rank_main(self, fit: RankMain) -> RankMain:
        return partial(_fit_on_own_gpu, self._settings, facts_of(self._settings), fit)

    def places(self) -> AbstractContextManager[Callable[[RankMain, World, Session], RayRank]]:
        """Return the context in which every rank has its place."""
        settings = self._settings
        hardware, own, emulated = (
            parse_hardware(settings.hardware),
            settings.ray,
            settings.hardware.emulate,
        )

        def wanted_resources(pool: str) -> dict[str, float]:
            if pool in own.resources:
                return dict(own.resources[pool])
            return {"CPU": 1} if emulated or hardware.find_pool(pool).gpu == "cpu" else {"GPU": 1}

        trainers, rollouts = settings.allocation.split
        wants = tuple(
            wanted_resources(pool) for pool, _ in assign_ranks(hardware, trainers, rollouts)
        )
        return seated_ranks(
            Places(
                own.address,
                wants,
                sum(begins_with(settings)),
                own.wait_s,
                settings.limits.start_s,
                own.respawn_s,
                tuple(words_to_join(settings.tree)),
            ),
            trainers,
        )


def _fit_on_own_gpu(
    settings: Settings, driver: ProcessFacts, fit: RankMain, world: World, session: Session
) -> None:
    """Run `fit` on the GPU that Ray has given this rank, once it agrees with the driver."""
    gpus = not settings.hardware.emulate and bool(devices.visible_gpus())
    compare_with_driver(driver, settings, world, session, gpus)
    devices.check_gpus(settings, {world.rank: 0}, 1, devices.visible_gpus())
    if not settings.hardware.emulate:
        devices.take_gpu(0)
        devices.claim_gpu(session, world.rank)
    fit(world, session)


class SessionFacts(TypedDict):
    """Fields of a rank's `Session` that travel to its machine."""

    store_host: str
    store_port: int
    handshake: Handshake
    run_dir: Path
    epoch: float
    network: Network
    limits: Limits


class Seat:
    """Ray actor: the process of one rank."""

    def ready(self) -> bool:
        """Return as soon as the actor has a place."""
        return True

    def live(self, rank_main: RankMain, world: World, facts: SessionFacts) -> int:
        """Run this rank and return its exit code."""
        host = facts["network"].interface_address(lambda: source_address(facts["store_host"]))
        session = Session(**facts, host=host)
        if not session.run_dir.is_dir():
            error = ValueError(
                f"this machine ({host}) does not see the run directory {session.run_dir}: set "
                "output_root to a directory that all machines share"
            )
            Control(StoreClient(*session.store), world.rank).report_error(True, error)
            return 1
        return run_rank(rank_main, world, session)

    def join(self, run_dir: str, words: Sequence[str] = ()) -> int:
        """Join the run in this directory as a further rollout, and return the exit code of `digenrl
        join`. `words` are further words of its command line."""
        own = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", "digenrl", "join", f"run={run_dir}", *words]
        with os.fdopen(open_log(Path(run_dir) / LOGS / "join.log"), "a") as log:
            return subprocess.run(
                command,
                env=own,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=partial(end_with_parent, signal.SIGTERM),
            ).returncode


class RayRank:
    """A rank as the launcher sees it, with the interface of a process."""

    pid = None  # it may be on another machine

    def __init__(self, actor: ActorHandle, call: ObjectRef) -> None:
        self._actor = actor
        self.exitcode: int | None = None
        self.sentinel, self._ends = os.pipe()
        call.future().add_done_callback(self._note_exit)

    def kill(self) -> None:
        """End the rank at once."""
        import ray

        with suppress(Exception):  # a cluster that is gone has no actors
            ray.kill(self._actor)

    def join(self, timeout: float | None = None) -> None:
        """Wait until the rank has ended."""
        if self.exitcode is None:
            connection.wait([self.sentinel], timeout)

    def _note_exit(self, call: Future[int]) -> None:
        error = call.exception()
        self.exitcode = call.result() if error is None else code_of_loss(error)
        os.close(self._ends)


def code_of_loss(error: BaseException) -> int:
    """Return the exit code for an actor that Ray lost: `MACHINE_LOST`, or SIGKILL's for its
    process alone.

    Ray names the node whose death it has seen. Of a machine that was just cut off it knows nothing
    yet, and calls the actor unavailable.
    """
    from ray.exceptions import ActorUnavailableError

    gone = isinstance(error, ActorUnavailableError) or "its node has died" in str(error)
    return MACHINE_LOST if gone else -signal.SIGKILL


def driver_host(address: str | None) -> str:
    """Return the address on which the store listens.

    It is this machine's address on the route to the cluster, or loopback without a cluster.

    Raises:
        ValueError: the address belongs to a Ray client, which the cluster cannot reach.
    """
    address = address or os.environ.get("RAY_ADDRESS")
    if address is None:
        return "127.0.0.1"
    if "://" in address:
        raise ValueError(
            f"ray.address = {address}: ranks could not reach this process; start it on a node of "
            "the cluster (ray job submit), with ray.address=auto."
        )
    return source_address(UNUSED_ADDRESS if address == "auto" else address.rpartition(":")[0])


@contextmanager
def seated_ranks(
    places: Places, trainers: int
) -> Iterator[Callable[[RankMain, World, Session], RayRank]]:
    """Give every rank a place: trainers in one placement group, each rollout by itself. At exit all
    actors end.

    Raises:
        PlacementError: Ray is missing, no cluster is at the address, or it lacks resources for the
            ranks.
    """
    try:
        import ray
    except ImportError as error:
        raise PlacementError(f"launch=ray needs Ray: {extras.install_command('ray')}.") from error
    from ray.util import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    over = threading.Event()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody
    try:
        ray.init(
            address=places.address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=False,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise PlacementError(
            f"ray.address = {places.address}: no cluster answers there ({error})."
        ) from error
    try:
        remote: Any = ray.remote(Seat)
        environment = {"env_vars": inherited_variables(os.environ)}
        free = ray.available_resources()
        group = placement_group([dict(want) for want in places.wants[:trainers]], strategy="PACK")

        def create_actor(rank: int) -> ActorHandle:
            want = places.wants[rank]
            options: dict[str, Any] = {
                "num_cpus": want.get("CPU", 0),
                "num_gpus": want.get("GPU", 0),
            }
            options["resources"] = {
                name: amount for name, amount in want.items() if name not in ("CPU", "GPU")
            }
            if rank < trainers:
                options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, rank)
            return remote.options(runtime_env=environment, max_restarts=0, **options).remote()

        seats = [create_actor(rank) for rank in range(places.first)]
        _wait_for_places(places, [actor.ready.remote() for actor in seats], free)

        def start_refilling(rank: int, run_dir: Path, life: RayRank | None) -> None:
            how = life, partial(create_actor, rank), run_dir, places.respawn_s, over, places.words
            threading.Thread(
                target=_refill_place, args=how, name=f"fill-{rank}", daemon=True
            ).start()

        def start_actor(rank_main: RankMain, world: World, session: Session) -> RayRank:
            facts: SessionFacts = {
                "store_host": session.store_host,
                "store_port": session.store_port,
                "handshake": session.handshake,
                "run_dir": session.run_dir,
                "epoch": session.epoch,
                "network": session.network,
                "limits": session.limits,
            }
            life = RayRank(
                seats[world.rank], seats[world.rank].live.remote(rank_main, world, facts)
            )
            if not world.is_trainer:
                start_refilling(world.rank, session.run_dir, life)
            if world.rank == places.first - 1:
                for rank in range(places.first, len(places.wants)):
                    start_refilling(rank, session.run_dir, None)
            return life

        yield start_actor
    finally:
        over.set()
        ray.shutdown()


def _refill_place(
    life: RayRank | None,
    seat: Callable[[], ActorHandle],
    run_dir: Path,
    respawn_s: float,
    over: threading.Event,
    words: Sequence[str] = (),
) -> None:
    """Replace the rollout of one place each time that it dies, until the run is over. Replacements
    join the run.

    `life` is the rollout in this place, or None if there was none yet.
    """
    pause_s, born = respawn_s, time.monotonic()
    while not over.wait(_LOOK_S):
        if life is None and (run_dir / ACCESS).is_file():
            actor, born = seat(), time.monotonic()
            life = RayRank(actor, actor.join.remote(str(run_dir), words))
        if life is None or life.exitcode is None:
            continue
        pause_s = respawn_s if time.monotonic() > born + _OLD * pause_s else pause_s
        if not life.exitcode or over.wait(pause_s):
            return
        life.kill()  # an actor whose method raised still holds its place
        life, pause_s = None, 2 * pause_s


def inherited_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ranks take over from the driver, without secrets: Ray keeps and
    shows them."""
    return {
        name: value
        for name, value in environment.items()
        if _INHERITED.match(name) and not is_secret_name(name)
    }


def all_reserved(places: Places, free: Mapping[str, float], now: Mapping[str, float]) -> bool:
    """Return whether Ray has set resources aside for every rank, so that their processes are
    starting.

    Args:
        free: what was free before the ranks asked.
        now: what is free now.

    Example:
        >>> places = Places(None, ({"CPU": 1}, {"CPU": 1}), 2, 60.0, 60.0, 1.0)
        >>> all_reserved(places, {"CPU": 4}, {"CPU": 2}), all_reserved(places, {"CPU": 1}, {})
        (True, False)
    """
    wanted: Counter[str] = Counter()
    for want in places.wants[: places.first]:
        wanted.update(want)
    return all(
        free.get(name, 0) - now.get(name, 0) >= amount - 1e-6 for name, amount in wanted.items()
    )


def _wait_for_places(
    places: Places, answers: Sequence[ObjectRef], before: Mapping[str, float]
) -> None:
    """Wait until every rank has a place, and then until their processes have started. `before` is
    what was free before they asked.

    Raises:
        PlacementError: a rank had no place after `wait_s`, or no process `start_s` later.
    """
    import ray

    deadline, told, reserved = time.monotonic() + places.wait_s, False, False
    while True:
        left = max(0.0, deadline - time.monotonic())
        _, missing = ray.wait(list(answers), num_returns=len(answers), timeout=min(_TELL_S, left))
        if not missing:
            try:
                ray.get(list(answers))
            except ray.exceptions.RayError as error:
                raise PlacementError(
                    f"ranks could not start: {error}; digenrl must be installed on every node, in "
                    "one version."
                ) from error
            return
        ranks = [rank for rank, answer in enumerate(answers) if answer in missing]
        wants = "; ".join(f"rank {rank}: {dict(places.wants[rank])}" for rank in ranks[:4])
        # A process imports for seconds, on a slow disk for minutes: that is no lack of places.
        if not reserved and all_reserved(places, before, ray.available_resources()):
            reserved, deadline = True, time.monotonic() + places.start_s
        if reserved:
            if time.monotonic() > deadline:
                raise PlacementError(
                    f"the processes of {len(ranks)} ranks ({wants}) have not started "
                    f"{places.start_s:g} s after they had a place: read Ray's logs on their nodes; "
                    "raise limits.start_s where disks are slow."
                )
            continue
        has, free = (
            {name: amount for name, amount in found().items() if not _INTERNAL.search(name)}
            for found in (ray.cluster_resources, ray.available_resources)
        )
        lack = (
            f"{len(ranks)} ranks have no place yet ({wants}); the cluster has {has}, of which "
            f"{free} are free"
        )
        if time.monotonic() > deadline:
            raise PlacementError(
                f"{lack}, after {places.wait_s:g} s: add nodes, change ray.resources, or set a "
                "smaller allocation; raise ray.wait_s where nodes still start."
            )
        if not told:
            print(
                f"{lack}; waiting up to {places.wait_s:g} s (ray.wait_s)",
                file=sys.stderr,
                flush=True,
            )
            told = True
