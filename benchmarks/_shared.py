"""What the benchmarks share: their words on the command line, their dated tables, and ranks on one
machine.

They run as modules (`python -m benchmarks.link`): a script's own directory would come first on the
import path, and `kernels` is also a package that transformers looks for.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import platform
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path

import torch
import torch.distributed as dist

from digenrl.cluster.control import Control
from digenrl.cluster.handshake import Handshake
from digenrl.cluster.launcher import keep_memory
from digenrl.cluster.store import StoreClient, StoreServer
from digenrl.transport.link import SocketLink
from digenrl.transport.wire import Message

HOST = "127.0.0.1"
RESULTS = Path(__file__).parent / "results"


def options(
    words: Sequence[str], defaults: Mapping[str, str], quick: Mapping[str, str]
) -> dict[str, str]:
    """The `key=value` words over the defaults. `quick=true` stands for the values in `quick`, and
    keeps no table.

    Raises:
        SystemExit: a word without `=`, or an unknown key.
    """
    given = dict(word.partition("=")[::2] for word in words)
    if unknown := set(given) - set(defaults) - {"quick"}:
        raise SystemExit(
            f"{sys.argv[0]}: unknown {sorted(unknown)}; known: "
            f"{', '.join(sorted([*defaults, 'quick']))}."
        )
    short = quick if given.get("quick") == "true" else {}
    return {"quick": "false"} | dict(defaults) | dict(short) | given


def require_known(given: Mapping[str, str], key: str, names: Iterable[str]) -> None:
    """Raise SystemExit unless all of the words at `key`, separated by commas, are among `names`."""
    if unknown := sorted(set(given[key].split(",")) - set(names)):
        raise SystemExit(f"{key}={','.join(unknown)}: unknown; known: {', '.join(names)}.")


def spread_of(values: Iterable[float], digits: int = 3) -> str:
    """The least, the lower median and the largest value, or a dash where there is none.

    Example:
        >>> spread_of([0.3, 0.1, 0.2, 0.7], digits=1)
        '0.1, 0.2, 0.7'
    """
    ordered = sorted(values)
    if not ordered:
        return "-"
    three = (ordered[0], ordered[(len(ordered) - 1) // 2], ordered[-1])
    return ", ".join(f"{value:.{digits}f}" for value in three)


class Report:
    """A table that is printed row by row, and kept with its date and machine under
    benchmarks/results/."""

    def __init__(self, title: str, notes: str, columns: Sequence[str]) -> None:
        self._name, self.met = Path(sys.argv[0]).stem, True
        self._date = datetime.date.today().isoformat()
        command = " ".join(["python -m", f"benchmarks.{self._name}", *sys.argv[1:]])
        load = os.getloadavg()[0]
        machine = (
            f"{os.cpu_count()} CPU cores ({_processor()}), load {load:.1f} at the start, Python "
            f"{platform.python_version()}, torch {torch.__version__}."
        )
        self._lines = [
            f"# {title} ({self._date})",
            "",
            f"Command: `{command}`. {machine}",
            *notes.splitlines(),
        ]
        self.table(columns)

    def table(self, columns: Sequence[str]) -> None:
        """Begin a new table."""
        self._widths = [len(column) for column in columns]
        self._lines.append("")
        self._print(columns)
        self._print(["-" * width for width in self._widths])

    def row(self, *cells: object) -> None:
        """One row, in the order of the columns."""
        self._print([str(cell) for cell in cells])

    def verdict(self, met: bool, text: str) -> None:
        """A bar, and whether it is met."""
        self.met = self.met and met
        self.say(f"{'met' if met else 'NOT MET'}: {text}")

    def say(self, text: str) -> None:
        """A line below the table."""
        print(text, flush=True)
        self._lines += ["", text]

    def close(self, given: Mapping[str, str], kind: str = "") -> int:
        """Keep the table, unless the run was a quick one; the exit code. `kind` goes into the
        file's name where a benchmark has several tables."""
        if given["quick"] != "true":
            self.write(RESULTS / f"{self._name}{kind}-{self._date}.md")
        return 0 if self.met else 1

    def write(self, path: Path) -> None:
        """Keep the table so far."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(self._lines) + "\n", encoding="utf-8")
        print(path)

    def _print(self, cells: Sequence[str]) -> None:
        padded = [cell.rjust(width) for cell, width in zip(cells, self._widths, strict=True)]
        self._lines.append(f"| {' | '.join(padded)} |")
        print(self._lines[-1], flush=True)


@dataclass(frozen=True)
class BenchRank:
    """One rank of a benchmark: its link, its control store, and gloo as the default process
    group."""

    rank: int
    control: Control
    link: SocketLink
    handshake: Handshake

    def receive(self) -> Message:
        """The next message, however long it takes."""
        while (message := self.link.receive(5.0)) is None:
            continue
        return message


def on_ranks(count: int, body: Callable[[BenchRank], int]) -> int:
    """Run `body` in `count` forked processes; the largest exit code. One that fails ends the
    others."""
    handshake = Handshake()
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_run_rank, args=(rank, count, port, handshake, body))
        for rank in range(count)
    ]
    for process in ranks:
        process.start()
    StoreServer(listener, handshake)  # after the forks, as the launcher does
    alive = ranks
    while alive and not any(process.exitcode for process in ranks):
        connection.wait([process.sentinel for process in alive])
        alive = [process for process in alive if process.exitcode is None]
    for process in ranks:
        process.kill()
        process.join()
    return max(abs(process.exitcode or 0) for process in ranks)


def _run_rank(
    rank: int, count: int, port: int, handshake: Handshake, body: Callable[[BenchRank], int]
) -> None:
    torch.set_num_threads(1)
    keep_memory()  # as every rank does
    store = StoreClient(HOST, port, handshake)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("world", store), rank=rank, world_size=count
    )
    control = Control(store, rank)
    link = SocketLink(control, rank, HOST, handshake)
    code = body(BenchRank(rank, control, link, handshake))
    link.close()
    dist.destroy_process_group()
    sys.exit(code)


def _processor() -> str:
    for line in (
        Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ()
    ):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
