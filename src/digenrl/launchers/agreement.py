"""Agreement of the processes of a run, before any of them reads weights.

    process 0 -> store: its facts            every process compares its own, and says that it agrees
    first processes of nodes, in pairs:      send some MiB over the run's own network, time it
    trainers of several machines:            one all-reduce and one all-gather

A difference ends the run and names both values and both hosts. A slow pair of nodes is a warning.
Ranks that Ray starts compare themselves with the driver, and a rollout that joins with the run.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from digenrl import accelerator
from digenrl.cluster.control import Control
from digenrl.cluster.store import StoreClient
from digenrl.cluster.world import Session, World
from digenrl.config.settings import Settings
from digenrl.config.stored import configuration_identity, find_disagreements
from digenrl.hardware import CONNECTION_GB_S, assign_ranks, parse_hardware
from digenrl.launchers.places import Place, process_ranks
from digenrl.record.code_version import code_version
from digenrl.record.run_dir import append_event

SHARED_MEMORY = Path("/dev/shm")
SHARED_MIB_A_RANK = 32
"""Shared memory that NCCL's ranks of one machine need, in MiB each. A judgement: containers get 64
MiB by default, with which NCCL fails (NVIDIA's documents ask for --shm-size=1g)."""
PROBE_BYTES, PROBE_S = 64 * 2**20, 1.0
"""Most bytes and most seconds of sending between two nodes."""
SLOW = 5.0
"""Factor below the expected speed from which a pair of nodes is called slow."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProcessFacts:
    """What the processes of one job must have in common."""

    host: str
    first_on_node: bool
    """Whether this process tests the network for its machine."""
    versions: Mapping[str, str]
    """Digest of the package and versions of libraries, as every process must have them."""
    architecture: str
    """`x86_64`, `aarch64`, ... Machines may differ."""
    configuration: Mapping[str, Any]
    """Dotted key -> value (`config.stored.identity`)."""


def facts_of(settings: Settings, first_on_node: bool = True) -> ProcessFacts:
    """Return the facts of this process."""
    return ProcessFacts(
        socket.gethostname(),
        first_on_node,
        {
            "code": code_version(),
            "torch": torch.__version__,
            "CUDA": str(torch.version.cuda or torch.version.hip),
        },
        platform.machine(),
        configuration_identity(settings.tree),
    )


def check_machine(
    ranks: int, gpus: bool, alone: bool, environment: Mapping[str, str] = os.environ
) -> None:
    """Check what this machine must have, whatever the others have.

    Args:
        ranks: ranks on this machine.
        gpus: whether they have GPUs.
        alone: whether all ranks of the run are on this machine, where the hub's library makes a
            missing HF_HOME.

    Raises:
        ValueError: HF_HOME names no directory, or GPUs share too little memory for NCCL.
    """
    host = socket.gethostname()
    home = environment.get("HF_HOME")
    if home and not alone and not Path(home).is_dir():
        raise ValueError(
            f"HF_HOME = {home}: no such directory on {host}: set it to one that every machine "
            "sees, or unset it and fetch the weights on each machine (make fetch)."
        )
    need = SHARED_MIB_A_RANK * ranks
    if (
        gpus
        and ranks > 1
        and environment.get("NCCL_SHM_DISABLE") != "1"
        and (has := shutil.disk_usage(SHARED_MEMORY).total // 2**20) < need
    ):
        raise ValueError(
            f"{SHARED_MEMORY} on {host} has {has} MiB for {ranks} ranks, at least "
            f"{need} are needed: start the container with --shm-size=1g or --ipc=host, or set "
            "NCCL_SHM_DISABLE=1."
        )


def describe_kinds(machines: Iterable[tuple[str, str]]) -> str:
    """Return the warning for machines, each as (architecture, host), whose processors are of
    several kinds: the same update differs there in a last bit. Empty: all are of one kind.

    Example:
        >>> describe_kinds([("x86_64", "a"), ("aarch64", "b"), ("x86_64", "c")])
        'processors of several kinds: aarch64 on b, x86_64 on a'
        >>> describe_kinds([("x86_64", "a"), ("x86_64", "c")])
        ''
    """
    first_hosts: dict[str, str] = {}
    for architecture, host in machines:
        first_hosts.setdefault(architecture, host)
    if len(first_hosts) < 2:
        return ""
    named = (f"{architecture} on {host}" for architecture, host in sorted(first_hosts.items()))
    return f"processors of several kinds: {', '.join(named)}"


def compare_processes(settings: Settings, place: Place, world: World, session: Session) -> None:
    """Wait for every process of the job, compare them, and test the network between their nodes.

    Raises:
        Aborted: a process did not come within `limits.start_s`, or another one ended the run.
        ValueError: this process differs from process 0, or does not reach another node.
        RuntimeError: a collective of the trainers gave a wrong result.
    """
    store = StoreClient(*session.store)
    control = Control(store, world.rank, session.limits.start_s)
    own = facts_of(settings, place.local_rank == 0)
    if place.rank == 0:
        control.set("process/0", json.dumps(asdict(own)))
    first = _facts_of_process_0(control)
    if differences := find_differences(first, own):
        raise ValueError(
            f"process {place.rank} on {own.host} differs from process 0 on {first.host}: "
            f"{'; '.join(differences)}. Start every process with the same words, from the same "
            "checkout and environment."
        )
    control.set(f"agreed/{place.rank}", json.dumps([own.host, own.architecture, own.first_on_node]))
    all_said = [
        json.loads(control.wait_for(f"agreed/{process}", f"process {process} to agree"))
        for process in range(place.size)
    ]
    hosts, architectures, firsts = zip(*all_said, strict=True)
    if place.rank == 0 and (warning := describe_kinds(zip(architectures, hosts, strict=True))):
        _record_warning(session, warning)
    nodes = [process for process, is_first in enumerate(firsts) if is_first]
    speeds = _test_pairs(control, session, nodes, place.rank)
    if place.rank == 0 and len(nodes) > 1:
        _report_pairs(settings, session, hosts, speeds)
    if world.is_trainer and len(nodes) > 1 and world.trainers > 1:
        check_collectives(world, session, store)


def compare_with_driver(
    driver: ProcessFacts, settings: Settings, world: World, session: Session, gpus: bool
) -> None:
    """Compare a rank that a driver started elsewhere with the driver, and check the machine. A
    refusal ends the run for all, as every further rank on this machine would meet it.

    Args:
        gpus: whether the ranks of this machine have GPUs.

    Raises:
        ValueError: this process differs from the driver, or as `check_machine`.
    """
    own, control = facts_of(settings), Control(StoreClient(*session.store), world.rank)
    # Nobody knows how many ranks come to this machine. The last one counts them all.
    here = control.add(f"seated/{own.host}", 1)
    kinds = ((facts.architecture, facts.host) for facts in (driver, own))
    if here == 1 and (warning := describe_kinds(kinds)):
        _record_warning(session, warning)
    try:
        if differences := find_differences(driver, own):
            raise ValueError(
                f"it differs on {own.host} from the driver on {driver.host}: "
                f"{'; '.join(differences)}. Install the driver's digenrl and libraries on every "
                "node."
            )
        check_machine(here, gpus, alone=own.host == driver.host)
    except ValueError as error:
        control.abort_run(f"rank {world.rank} ({world.role}): {error}")
        raise


def find_differences(first: ProcessFacts, own: ProcessFacts) -> list[str]:
    """Return in what `own` differs from the facts of process 0, with both values.

    Example:
        >>> first = ProcessFacts("a", True, {"torch": "2.11"}, "x86_64", {"seed": 0})
        >>> second = ProcessFacts("b", True, {"torch": "2.10"}, "x86_64", {"seed": 7})
        >>> find_differences(first, second)
        ['torch is 2.10 (there: 2.11)', "seed = 7 (the run's: 0)"]
    """
    versions = [
        f"{name} is {own.versions.get(name)} (there: {value})"
        for name, value in first.versions.items()
        if own.versions.get(name) != value
    ]
    return versions + find_disagreements(first.configuration, own.configuration)


def check_collectives(world: World, session: Session, store: dist.Store) -> None:
    """Run one all-reduce and one all-gather of the trainers, in a group that is closed again.

    Raises:
        RuntimeError: a result is wrong.
    """
    device = accelerator.current_device()
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        store=dist.PrefixStore("probe/trainers", store),
        rank=world.role_rank,
        world_size=world.role_size,
        timeout=timedelta(seconds=session.limits.start_s),
        device_id=accelerator.bound_device(device),
    )
    number = torch.tensor([float(world.role_rank + 1)], device=device)
    gathered = [torch.zeros_like(number) for _ in range(world.role_size)]
    total = number.clone()
    dist.all_reduce(total)
    dist.all_gather(gathered, number)
    found = [float(value) for value in gathered]
    dist.destroy_process_group()
    expected = [float(rank + 1) for rank in range(world.role_size)]
    if found != expected or float(total) != sum(expected):
        raise RuntimeError(
            f"trainer {world.role_rank} gathered {found} and summed {float(total):g}, expected "
            f"{expected} and {sum(expected):g}: the collectives of these machines are broken "
            "(NCCL_DEBUG=INFO shows the path; NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1 try others)."
        )


def rounds_of_pairs(nodes: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of disjoint pairs, in which every two nodes meet once. Pairs of one round may
    run at once.

    Example:
        >>> list(rounds_of_pairs([0, 8, 16]))
        [[(8, 16)], [(0, 16)], [(0, 8)]]
    """
    left = list(combinations(nodes, 2))[::-1]
    while left:
        chosen: list[tuple[int, int]] = []
        for pair in left:
            if not any(node in other for other in chosen for node in pair):
                chosen.append(pair)
        yield chosen
        left = [pair for pair in left if pair not in chosen]


def _facts_of_process_0(control: Control) -> ProcessFacts:
    said = control.wait_for("process/0", "process 0 to say what it runs")
    return ProcessFacts(**json.loads(said))


def _test_pairs(
    control: Control, session: Session, nodes: Sequence[int], own: int
) -> dict[tuple[int, int], float]:
    """Send between every two nodes; return pair of processes -> GB/s. Only process 0 waits for the
    results of all; the others return what concerns them."""
    speeds: dict[tuple[int, int], float] = {}
    for pairs in rounds_of_pairs(nodes):
        for pair in pairs:
            key = f"probe/{pair[0]}-{pair[1]}"
            if own == pair[0]:
                _receive_probe(control, session, key)
            elif own == pair[1]:
                speeds[pair] = _send_probe(control, session, key)
                control.set(f"{key}/gb_s", str(speeds[pair]))
    if own == 0:
        for pair in combinations(nodes, 2):
            key = f"probe/{pair[0]}-{pair[1]}/gb_s"
            speeds[pair] = float(control.wait_for(key, f"nodes {pair} to test their network"))
    return speeds


def _receive_probe(control: Control, session: Session, key: str) -> None:
    """Listen for the peer of this pair, read all that it sends and answer with one byte."""
    with session.network.open_listener(session.host) as listener:
        listener.settimeout(session.limits.start_s)
        port = listener.getsockname()[1]
        control.set(key, json.dumps([session.host, port]))
        while True:
            peer, _ = listener.accept()
            with peer:
                if session.handshake.authenticate_peer(peer, "probe") is None:
                    continue  # a stranger
                peer.settimeout(session.limits.start_s)
                peer.sendall(b"+")
                buffer = bytearray(2**20)
                while peer.recv_into(buffer):
                    pass
                peer.sendall(b"+")
                return


def _send_probe(control: Control, session: Session, key: str) -> float:
    """Connect to the peer of this pair and send; return GB/s, from the first byte to the answer."""
    host, port = json.loads(control.wait_for(key, f"the peer of {key} to listen"))
    try:
        sock = session.handshake.connect(host, port, "probe")
    except OSError as error:
        raise ValueError(
            f"{socket.gethostname()} does not reach {host}:{port} ({error}): name an interface "
            "that every machine has (network.interface=NAME), and open its ports "
            "(network.ports=[first,last])."
        ) from error
    with sock:
        sock.settimeout(session.limits.start_s)
        piece, sent, began = bytes(2**20), 0, time.monotonic()
        while sent < PROBE_BYTES and time.monotonic() < began + PROBE_S:
            sock.sendall(piece)
            sent += len(piece)
        sock.shutdown(socket.SHUT_WR)
        sock.recv(1)
        return sent / (time.monotonic() - began) / 1e9


def _report_pairs(
    settings: Settings,
    session: Session,
    hosts: Sequence[str],
    speeds: Mapping[tuple[int, int], float],
) -> None:
    """Record the speed of each pair of nodes, and warn of pairs that are far slower than expected.

    Expected is the profile's speed, but no more than one TCP connection can reach: the probe is
    one, and a 25 GB/s network needs many. A connection reaches `CONNECTION_GB_S`, or what the
    fastest pair of this run reached.
    """
    trainers, rollouts = settings.allocation.split
    hardware = parse_hardware(settings.hardware)
    interface = session.network.interface_of(session.host)
    placed = assign_ranks(hardware, trainers, rollouts)
    pools = [placed[rank][0] for rank in process_ranks(hardware, trainers, rollouts)]
    found, reachable = [], max(CONNECTION_GB_S, *speeds.values())
    for (one, other), speed in sorted(speeds.items()):
        found.append({"hosts": [hosts[one], hosts[other]], "gb_s": round(speed, 3)})
        line = hardware.line_between(pools[one], pools[other])
        profiled = (
            min(hardware.find_pool(pools[process]).inter_gb_s for process in (one, other))
            if line is None
            else line.gb_s
        )
        if speed * SLOW < min(profiled, reachable) and not settings.hardware.emulate:
            _record_warning(
                session,
                f"{hosts[one]} and {hosts[other]}: {speed:.3g} GB/s over {interface}, where the "
                f"profile says {profiled:.3g} and one connection can reach {reachable:.3g}: choose "
                "another network.interface, or correct the profile",
            )
    append_event(session.run_dir, "network", {"interface": interface, "pairs": found})


def _record_warning(session: Session, text: str) -> None:
    """Print a warning, and record it for the report."""
    _log.warning("%s", text)
    append_event(session.run_dir, "warning", {"message": text})
