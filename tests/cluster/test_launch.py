"""The launcher's own work, with ranks that train nothing: what a rank is started with, and what is
left of a run."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from digenrl.cluster.access import ACCESS
from digenrl.cluster.control import Control
from digenrl.cluster.handshake import Handshake
from digenrl.cluster.launcher import Launch, PlacementError, RankProcess, fork_rank, launch_ranks
from digenrl.cluster.limits import Limits
from digenrl.cluster.network import Network
from digenrl.cluster.signals import STOPS
from digenrl.cluster.store import StoreClient
from digenrl.cluster.world import Session, World
from tests.cluster.test_network import LOOPBACK

pytestmark = pytest.mark.processes

FORK = multiprocessing.get_context("fork")


def until(reached: Callable[[], object], most: float = 20.0) -> None:
    deadline = time.monotonic() + most
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def launched(*args: Any, **options: Any) -> tuple[Any, ...]:
    """Launch with the streams of a process, as pytest's own lead past the descriptors."""
    with pytest.MonkeyPatch.context() as patch:
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            stream = open(descriptor, "w", closefd=False)  # noqa: SIM115
            patch.setattr(sys, name, stream)
        found = launch_ranks(Launch(*args, **options))
    return found.status, found.cause, found.exit_code


def told(folder: Path, rank: int) -> dict[str, Any]:
    return dict(json.loads((folder / f"rank-{rank}.json").read_text()))


def listens() -> list[int]:
    """Ports at which this process listens; another test may have left some."""
    return sorted(c.laddr.port for c in psutil.Process().net_connections() if c.status == "LISTEN")


def tell(world: World, session: Session) -> None:
    """Write what this rank was given and print a secret, then wait for the others."""
    control = Control(StoreClient(*session.store), world.rank)
    until(lambda: control.get("ranks"))
    access = session.run_dir / ACCESS
    found = {
        "world": vars(world),
        "host": (session.host, session.store_host, session.network.interface),
        "store": json.loads(access.read_text()) | {"mode": stat.S_IMODE(access.stat().st_mode)},
        "port": session.store_port,
        "limits": session.limits.leave_s,
        "epoch": session.epoch,
        "credentials": control.get("credentials"),
        "held": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
        "parent": os.getppid(),
        "pid": os.getpid(),
        "listens": listens(),
        "gloo": os.environ.get("GLOO_SOCKET_IFNAME"),
    }
    print("token=hf_abcdefghijklmnopqrstuvwxyzabcdefgh")
    print("to the other stream", file=sys.stderr)
    os.write(1, b"past Python\n")
    (session.run_dir / f"rank-{world.rank}.json").write_text(json.dumps(found))
    control.add("there", 1)
    until(lambda: control.get("there") == str(world.size))


def test_ranks_are_told_who_they_are_and_nothing_is_left_of_them(tmp_path: Path) -> None:
    seen, descriptors = list[Any](), psutil.Process().num_fds()
    gc.collect()
    children, others = psutil.Process().children(recursive=True), listens()

    def end() -> None:
        seen.append([psutil.pid_exists(told(tmp_path, rank)["pid"]) for rank in range(3)])
        seen.append((tmp_path / ACCESS).exists())

    before, began = [signal.getsignal(number) for number in STOPS], time.time()
    outcome = launched(
        2, 1, tell, tmp_path, credentials={"seed": 3}, limits=Limits(leave_s=7.0), on_end=end,
        network=Network(interface=LOOPBACK), host="127.0.0.3", handshake=Handshake("the token"),
    )  # fmt: skip
    assert outcome == ("completed", None, 0)
    assert seen == [[False] * 3, True]
    assert not (tmp_path / ACCESS).exists()
    for rank in range(3):
        found = told(tmp_path, rank)
        assert found["world"] == {"rank": rank, "trainers": 2, "rollouts": 1, "local_rank": rank}
        assert found["host"] == ["127.0.0.1", "127.0.0.1", LOOPBACK]
        store = {"host": "127.0.0.1", "port": found["port"], "token": "the token"}
        assert found["store"] == store | {"epoch": found["epoch"], "prefix": "", "mode": 0o600}
        assert (found["limits"], found["credentials"]) == (7.0, '{"seed": 3}')
        assert began <= found["epoch"] <= time.time()
        assert found["held"] == sorted(map(int, STOPS))
        assert (found["parent"], found["gloo"]) == (os.getpid(), LOOPBACK)
        assert found["listens"] == others, "the launcher's store is closed in a rank"
        log = (tmp_path / "logs" / f"rank-{rank:03d}.log").read_text()
        assert {"past Python", "to the other stream"} < set(log.splitlines())
        assert "token=" in log
        assert "hf_abcdef" not in log
    assert [signal.getsignal(number) for number in STOPS] == before
    assert psutil.Process().children(recursive=True) == children
    until(lambda: psutil.Process().num_fds() <= descriptors)


def raises(world: World, session: Session) -> None:
    """The trainer waits for ever, and the rollout removes the access file and fails."""
    if not world.is_trainer:
        access = session.run_dir / ACCESS
        until(access.exists)
        access.unlink()
        raise ValueError("no such luck")
    control = Control(StoreClient(*session.store), world.rank)
    while True:
        control.check_abort()
        time.sleep(0.01)


def fail() -> Any:
    raise RuntimeError("odd")


def test_an_error_of_a_rank_ends_the_others_with_its_cause(tmp_path: Path) -> None:
    """A later error of the launcher does not hide it."""
    cause = "rank 1 (rollout) raised ValueError: no such luck; see logs/rank-001.log"
    assert launched(1, 1, raises, tmp_path, max_lost=0, on_end=fail) == ("failed", cause, 1)
    assert "in raises" in (tmp_path / "logs" / "rank-001.log").read_text()
    assert (tmp_path / "logs" / "rank-000.log").read_text() == f"rank 0 stops: {cause}\n"
    assert not (tmp_path / "logs" / "launcher.log").exists()


def test_an_error_of_the_launcher_is_the_outcome(tmp_path: Path) -> None:
    def full() -> Any:
        raise PlacementError("no machine is free")

    assert launched(1, 0, tell, tmp_path, places=full) == ("failed", "no machine is free", 1)
    assert not (tmp_path / "logs" / "launcher.log").exists()
    cause = "the launcher raised RuntimeError: odd; see logs/launcher.log"
    assert launched(1, 0, tell, tmp_path, places=fail) == ("failed", cause, 1)
    assert "RuntimeError: odd" in (tmp_path / "logs" / "launcher.log").read_text()
    assert launched(1, 0, lambda *_: None, tmp_path, on_end=fail) == ("failed", cause, 1)


def test_only_ranks_keep_what_they_were_born_with(tmp_path: Path) -> None:
    """Objects that a launch freezes in its own process would never be collected there."""
    frozen = gc.get_freeze_count()
    new = [[number] for number in range(10_000)]

    def body(world: World, session: Session) -> None:
        assert gc.get_freeze_count() > frozen + len(new) // 2

    assert launched(1, 0, body, tmp_path) == ("completed", None, 0)
    assert gc.get_freeze_count() <= frozen


def test_places_start_the_ranks_and_are_given_back_when_all_have_ended(tmp_path: Path) -> None:
    happened = list[Any]()

    @contextmanager
    def places() -> Iterator[Callable[..., RankProcess]]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a library may

        def start(main: Any, world: World, session: Session) -> RankProcess:
            happened.append(world.rank)
            return fork_rank(main, world, session, lambda: None)

        yield start
        happened.append("given back")

    def terminated(states: Callable[[], dict[int, str]]) -> None:
        if happened == [0, 1]:
            happened.append(dict(states()))
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    outcome = launched(
        1, 1, lambda *_: time.sleep(60.0), tmp_path, places=places, on_tick=terminated,
        on_end=lambda: happened.append("end"),
    )  # fmt: skip
    signal.signal(signal.SIGTERM, before)
    assert outcome == ("stopped", "signal SIGTERM", 143)
    assert happened == [0, 1, {0: "starting", 1: "starting"}, "end", "given back"]


class Elsewhere:
    """A rank on another machine, which never comes."""

    pid = None

    def __init__(self, process: Any) -> None:
        self._process = process
        self.sentinel, self.kill, self.join = process.sentinel, process.kill, process.join

    @property
    def exitcode(self) -> int | None:
        return self._process.exitcode  # type: ignore[no-any-return]


def test_a_rank_that_never_comes_is_named_after_its_time_to_join(tmp_path: Path) -> None:
    @contextmanager
    def places() -> Iterator[Callable[..., RankProcess]]:
        def start(main: Any, world: World, session: Session) -> RankProcess:
            process = FORK.Process(target=time.sleep, args=(60.0,))
            process.start()
            return Elsewhere(process)

        yield start

    limits = Limits(start_s=0.5, abort_s=0.1, leave_s=5.0)
    said = (
        "has not joined (no sign of life for 0.5 s; raise limits.start_s if it only needs longer)"
    )
    outcome = launched(1, 0, tell, tmp_path, places=places, limits=limits)
    assert outcome == ("failed", f"rank 0 (trainer) {said}", 1)


@pytest.mark.parametrize(
    ("harm", "cause"),
    [
        (signal.SIGKILL, "was killed"),
        (signal.SIGSTOP, "stopped responding (it is suspended)"),
    ],
)
def test_a_launcher_that_dies_takes_its_ranks_along_and_its_monitor_says_why(
    tmp_path: Path, harm: signal.Signals, cause: str
) -> None:
    def wait(world: World, session: Session) -> None:
        (session.run_dir / "pid").write_text(str(os.getpid()))
        time.sleep(60.0)

    def host() -> None:
        os.setsid()
        told = (tmp_path / "why").write_text
        launched(1, 0, wait, tmp_path, limits=Limits(suspended_s=0.4), on_orphaned=told)

    launcher = FORK.Process(target=host)
    launcher.start()
    assert launcher.pid is not None
    try:
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        rank = psutil.Process(int((tmp_path / "pid").read_text()))
        os.kill(launcher.pid, harm)
        until(lambda: (tmp_path / "why").exists() and (tmp_path / "why").read_text())
        said = (tmp_path / "why").read_text()
        assert said == f"the launcher (process {launcher.pid}) {cause}"
        launcher.join(20.0)
        assert launcher.exitcode == -signal.SIGKILL
        until(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE)
    finally:
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.join()
