"""Waits of a rank for others, what it reports, and what a launcher prepares."""

from __future__ import annotations

import io
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from digenrl.cluster import control as module
from digenrl.cluster import launcher
from digenrl.cluster.control import Aborted, Control, PeerLost
from digenrl.cluster.handshake import Handshake, _read_exactly
from digenrl.cluster.launcher import check_open_files, keep_memory, mask_secrets, run_rank
from digenrl.cluster.store import StoreClient, StoreLost, StoreServer
from digenrl.cluster.world import Session, World


class Clock:
    """Time that passes in sleeps alone, and what happens meanwhile."""

    def __init__(self) -> None:
        self.now, self.pause = 0.0, time.sleep
        self.slept: list[float] = []
        self.script: dict[float, Callable[[], object]] = {}

    def sleep(self, seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            return self.pause(seconds)
        self.slept.append(seconds)
        self.now += seconds
        for second in [s for s in self.script if s <= self.now]:
            self.script.pop(second)()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module.time, "sleep", clock.sleep)
    monkeypatch.setattr(module.time, "monotonic", lambda: clock.now)
    return clock


@pytest.fixture
def controls() -> Iterator[tuple[Control, Control]]:
    handshake = Handshake()
    server = StoreServer(socket.create_server(("127.0.0.1", 0)), handshake)
    store = StoreClient(server.host, server.port, handshake)
    yield Control(store, -1), Control(store, 1, patience=3.0)
    server.close()


def test_a_wait_ends_with_the_value_the_cause_the_death_or_the_patience(
    clock: Clock, controls: tuple[Control, Control]
) -> None:
    host, rank = controls
    clock.script[1.0] = lambda: host.set("news", "good")
    assert rank.wait_for("news", "the news") == "good"
    assert clock.slept[:8] == [0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.05, 0.05]
    clock.script[2.0] = lambda: host.mark_lost(2)
    with pytest.raises(PeerLost, match="rank 2 is lost: more news will not come"):
        rank.wait_for("more", "more news", rank=2)
    began = clock.now
    with pytest.raises(Aborted, match=r"rank 1 waited 3 s \(limits.start_s\) for more news"):
        rank.wait_for("more", "more news", rank=3)
    assert 3.0 < clock.now - began < 3.1
    clock.script[clock.now + 1.0] = lambda: host.abort_run("it is over")
    began = clock.now
    assert host.goes_on_without(2, 5.0)
    assert not host.goes_on_without(3, 0.5)
    assert 0.5 <= clock.now - began < 0.6
    with pytest.raises(Aborted, match="rank 1 stops: it is over"):
        rank.goes_on_without(3, 5.0)
    assert clock.now - began < 1.2
    with pytest.raises(Aborted, match="rank 1 stops: it is over"):
        rank.wait_for("more", "more news")


def test_who_waits_for_a_key_looks_soon_and_then_less_often(
    clock: Clock, controls: tuple[Control, Control]
) -> None:
    """What process groups do at their rendezvous."""
    store = controls[1].store
    clock.script[0.005] = lambda: store.set("a", "1")
    store.set("b", "2")
    store.wait(["a", "b"], timedelta(seconds=1.0))
    assert clock.slept == [0.001, 0.002, 0.004]
    with pytest.raises(dist.DistStoreError, match="nobody set a, c in time"):
        store.wait(["a", "c"], timedelta(seconds=1.0))
    assert 1.0 < clock.now < 1.1
    assert max(clock.slept) == 0.05
    clock.script[clock.now + 0.25] = lambda: store.set("late", "3")
    assert store.get("late") == b"3"


def test_frames_hold_values_of_every_length(controls: tuple[Control, Control]) -> None:
    store = controls[1].store
    values = {
        str(size): bytes(size % 251 for _ in range(size)) for size in (0, 1, 255, 256, 70_000)
    }
    for key, value in values.items():
        store.set(key, value)
    assert store.read_values([*values, "nobody"]) == [*values.values(), None]
    assert [store.get(key) for key in values] == [*values.values()]
    assert (store.check(["0", "255"]), store.check(["0", "nobody"])) == (True, False)
    assert store.clone() is store
    assert (store.add("n", -3), store.add("n", 5), store.get("n")) == (-3, 2, b"2")
    assert [
        store.compare_and_swap("s", *words)
        for words in (("a", "b"), ("", "b"), ("", "c"), ("b", "c"))
    ] == [False, True, False, True]
    assert [store.delete_key("s") for _ in range(2)] == [True, False]


def test_an_answer_that_nobody_has_read_is_not_the_next_calls(
    controls: tuple[Control, Control], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = controls[1].store
    store.set("a", "old")
    receive = store._frames.receive_frame
    monkeypatch.setattr(
        store._frames, "receive_frame", lambda: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        store.set("a", "new")
    monkeypatch.setattr(store._frames, "receive_frame", receive)
    with pytest.raises(StoreLost, match="does not answer any more"):
        store.get("a")


def test_as_many_bytes_are_read_as_were_asked_for_and_before_the_deadline() -> None:
    ours, theirs = socket.socketpair()
    soon = time.monotonic() + 20.0
    with ours, theirs:
        timer = threading.Timer(0.05, theirs.sendall, (b"defghij",))
        theirs.sendall(b"abc")
        timer.start()
        assert _read_exactly(ours, 5, soon) == b"abcde"
        assert _read_exactly(ours, 5, soon) == b"fghij"
        theirs.sendall(b"k")
        with pytest.raises(TimeoutError):
            _read_exactly(ours, 2, time.monotonic() + 0.02)
        theirs.sendall(b"lm")
        with pytest.raises(TimeoutError, match="took too long"):
            _read_exactly(ours, 2, time.monotonic() - 1.0)
        theirs.sendall(b"n")
        theirs.close()
        with pytest.raises(EOFError, match="closed the connection during the handshake"):
            _read_exactly(ours, 2, soon)


def test_who_has_proved_itself_stays_whoever_comes_later() -> None:
    handshake = Handshake(waiting=2)
    server = StoreServer(socket.create_server(("127.0.0.1", 0)), handshake)
    clients = [StoreClient(server.host, server.port, handshake) for _ in range(6)]
    assert [client.add("n", 1) for client in clients] == [1, 2, 3, 4, 5, 6]
    assert not server._acceptor._waiting
    server.close()


def test_the_oldest_of_too_many_strangers_is_sent_away() -> None:
    server = StoreServer(socket.create_server(("127.0.0.1", 0)), Handshake(waiting=2))
    strangers = [socket.create_connection((server.host, server.port)) for _ in range(3)]
    strangers[0].settimeout(5.0)
    assert strangers[0].recv(1) == b""
    with server._acceptor._lock:  # it is sent away before the next one is noted
        assert len(server._acceptor._waiting) == 2
    for stranger in strangers[1:]:
        stranger.setblocking(False)
        with pytest.raises(BlockingIOError):
            stranger.recv(1)
    for stranger in strangers:
        stranger.close()
    server.close()


def test_who_is_connected_is_known_by_rank_and_may_be_shut_out() -> None:
    handshake = Handshake()
    server = StoreServer(socket.create_server(("127.0.0.1", 0)), handshake)
    host = StoreClient(server.host, server.port, handshake)
    guests = [
        StoreClient(server.host, server.port, replace(handshake, rank=rank)) for rank in (0, 4, 4)
    ]
    for guest in guests:
        guest.set("here", "1")
    assert server.connected_ranks() == {0, 4}
    serving = [t for t in threading.enumerate() if t.name in ("store", "accept store")]
    assert serving
    assert all(thread.daemon for thread in serving), "a process ends while others are connected"
    guests[1]._socket.close()
    guests[2].set("still", "here")
    assert server.connected_ranks() == {0, 4}
    server.exclude_rank(4)
    deadline = time.monotonic() + 20.0
    while server.connected_ranks() != {0}:  # without a request of rank 4
        assert time.monotonic() < deadline
        time.sleep(0.002)
    with pytest.raises(StoreLost):
        guests[2].set("still", "there")
    assert host.read_values(["still", "here"]) == [b"here", b"1"]
    guests[0].set("me", "too")
    with pytest.raises(ValueError, match=r"no request b'sing' of 1 fields"):
        server._answer_request(b"sing", b"a")
    server.close()
    server.close()


def test_the_first_cause_stays_and_an_error_of_a_trainer_ends_the_run(
    controls: tuple[Control, Control],
) -> None:
    host, rank = controls
    rank.report_error(False, ValueError("small"))
    said = "raised ValueError: small; see logs/rank-001.log"
    assert (host.get("cause/1"), host.get("abort")) == (said, None)
    host.check_abort()
    rank.report_error(True, ValueError("small"))
    assert host.get("abort") == f"rank 1 (trainer) {said}"
    host.abort_run("later")
    assert host.get("abort") == f"rank 1 (trainer) {said}"
    assert not rank.stopping
    rank.request_stop("enough")
    rank.request_stop("more than enough")
    assert rank.stopping
    assert host.get("stop") == "enough"
    for joined in (5, 4):
        host.add_joined_rank(joined)
    host.set("work/5", "busy")
    host.mark_lost(5)
    assert (host.get("work/5"), host.joined_ranks(), host.lost_ranks()) == ("", [5, 4], {5})
    assert host.surviving_ranks([0, 5, 2]) == [0, 2, 4]


@pytest.mark.parametrize(
    ("limits", "raised"),
    [
        ((216, 400), None),
        ((215, 216), (216, 216)),
        ((50, resource.RLIM_INFINITY), (216, resource.RLIM_INFINITY)),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
    ],
)
def test_open_files_are_raised_as_far_as_two_ranks_need(
    limits: tuple[int, int], raised: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, to: set_to.append(to))
    check_open_files(2)
    assert set_to == [raised] * (raised is not None)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (80, 215))
    with pytest.raises(
        ValueError, match=r"2 ranks need 216 open files .* allows 215: .*ulimit -n 216"
    ):
        check_open_files(2)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, ""),
        (ValueError("small"), "ValueError: small"),
        (Aborted("rank 1 stops: it is over"), "rank 1 stops: it is over"),
    ],
)
def test_a_rank_writes_into_its_log_and_says_how_it_ended(
    error: Exception | None, said: str, tmp_path: Path
) -> None:
    handshake = Handshake()
    server = StoreServer(socket.create_server(("127.0.0.1", 0)), handshake)
    control = Control(StoreClient(server.host, server.port, handshake), -1)
    session = Session(server.host, server.port, handshake, tmp_path, 0.0)
    log = tmp_path / "logs" / "rank-001.log"
    log.parent.mkdir()

    def body(world: World, given: Session) -> None:
        print(f"out of {world.rank} in {given.run_dir.name}, api_key=abcdefghijklmnop")
        os.write(2, b"from C\n")
        if error is not None:
            raise error

    if (child := os.fork()) == 0:
        launcher.keep_memory = (tmp_path / "kept").touch
        sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
        for stream in (sys.stdout, sys.stderr):
            print("of the launcher", file=stream)  # not written yet
        os._exit(run_rank(body, World(1, 1, 1), session))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (error is not None)
    assert (tmp_path / "kept").exists()
    text = log.read_text()
    assert f"out of 1 in {tmp_path.name}" in text
    assert "abcdefgh" not in text
    assert "from C\n" in text
    assert "of the launcher" not in text
    assert said in text
    assert ("Traceback" in text) == isinstance(error, ValueError)
    umask = os.umask(0)
    os.umask(umask)
    assert log.stat().st_mode & 0o777 == 0o644 & ~umask
    assert (control.get("left/1") is not None) == (error is None)
    cause = "raised ValueError: small; see logs/rank-001.log"
    assert control.get("cause/1") == (cause if isinstance(error, ValueError) else None)
    assert control.get("abort") is None
    server.close()


def test_freed_memory_is_kept() -> None:
    """Mapping pages again takes as long as sending them: a second buffer gets the first one's."""
    if (child := os.fork()) == 0:
        keep_memory()
        faults = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
        for _ in range(2):
            bytearray(16 << 20)
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        os._exit(int(faults[2] - faults[1] > 400 or faults[1] - faults[0] < 2000))
    assert os.waitpid(child, 0)[1] == 0


def test_what_a_rank_prints_is_masked_and_a_full_disk_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

        def flush(self) -> None:
            self.write("")

    out, kept = Full(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", kept)
    mask_secrets()
    assert sys.stdout is out
    print("lost", flush=True)
    assert sys.stderr.write("Authorization: Bearer abcdefghijklmnop123\n") == 42
    assert "abcdefgh" not in kept.getvalue()
    assert kept.getvalue().startswith("Authorization")
