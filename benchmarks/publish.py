"""Seconds from a trainer's optimizer step to adopted weights, against a bare gloo broadcast of the
same bytes, alternating in one run. Or over slow lines, with and without `network.compress`.

    python -m benchmarks.publish [sizes=1,16,256,1024] [rollouts=1] [rounds=9] [by=memory]
    python -m benchmarks.publish links=8,100,1000,10000 [mib=16] [moved=0.05]

Publish-to-adopted is everything: the copy of the parameters, the digest, the sends, the check of
the digest and the adoption by every (idle) rollout. `by`: memory (what a run does between ranks of
one machine), stream (to another machine) or broadcast (`network.publication=broadcast`). Wanted: .9
of the broadcast's GB/s from 256 MiB on, and below that at most twice its time plus 10 ms.

`links` are Mb/s of a proxy between two processes. An adapter of 16-bit values is published over it
while `moved` of its values move by one step of their precision a version. Wanted: a third of the
seconds at 100 Mb/s. Exit code 1 where a bar is not met.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks._shared import HOST, BenchRank, Report, on_ranks, options
from benchmarks._throttle import Throttle
from digenrl.transport.broadcast import Audience, BroadcastLink
from digenrl.transport.compress import CodedLine
from digenrl.transport.lines import chosen_lines
from digenrl.transport.link import PeerLine, SocketLink
from digenrl.transport.weights import Arrivals, adopt, publish
from digenrl.transport.wire import Message, MessageKind

MIB = 1 << 20
TENSORS = 64
"""Parameters of the weights."""
FAST_FROM_MIB, FAST_SHARE = 256, 0.9
LINK_BAR_MBIT, LINK_BAR = 100.0, 3.0
VERSIONS = 4
"""Versions over each line: the first shows its speed, the last is measured."""
Exchange = Callable[[dict[str, Tensor], Arrivals, int], None]


def exchange(
    link: SocketLink,
    sender: int,
    receivers: tuple[int, ...],
    parameters: dict[str, Tensor],
    arrivals: Arrivals,
    number: int,
) -> None:
    """Publish a version and wait for every acknowledgement, or adopt it and acknowledge."""
    if link._rank == sender:
        publish(number, parameters, link, dict.fromkeys(receivers, ()), lambda digest: None)
        for _ in receivers:
            while link.receive(5.0) is None:
                continue
        return
    version = None
    while version is None:
        if (message := link.receive(5.0)) is not None:
            version = arrivals.add_message(message)
    adopt(parameters, version)
    link.send(sender, Message(MessageKind.CELLS, {}))


def measure(here: BenchRank, size: int, rounds: int, once: Exchange) -> tuple[list[float], ...]:
    """Return the seconds of every round: broadcast, publication."""
    flat = torch.full((size // 4,), float(here.rank))
    parts = flat.view(TENSORS, -1)  # one copy of the bytes serves both
    parameters = {f"layer.{i}": parts[i].clone() if here.rank else parts[i] for i in range(TENSORS)}
    arrivals = Arrivals(parameters)
    bare, ours = [], []
    for number in range(rounds + 1):
        dist.barrier()
        began = time.perf_counter()
        dist.broadcast(flat, 0)
        dist.barrier()
        middle = time.perf_counter()
        once(parameters, arrivals, number)
        if number:  # the first round opens connections
            bare.append(middle - began)
            ours.append(time.perf_counter() - middle)
    if not all(bool((tensor == 0).all()) for tensor in parameters.values()):
        raise SystemExit(f"rank {here.rank} holds other weights than were published")
    return bare, ours


def against_broadcast(given: dict[str, str]) -> int:
    """Print GB/s of a bare broadcast and of a publication for each size."""
    rounds, rollouts = int(given["rounds"]), int(given["rollouts"])
    sizes = [int(size) for size in given["sizes"].split(",")]

    def body(here: BenchRank) -> int:
        first = 100  # apart from the ranks of `here`'s own link
        ranks = tuple(range(first, first + 1 + rollouts))
        arguments: Any = (here.control, first + here.rank, HOST, here.handshake)
        if given["by"] == "broadcast":
            audience = Audience(ranks, here.control.store, torch.device("cpu"), lambda *_: None)
            link: SocketLink = BroadcastLink(audience, *arguments)
        elif given["by"] == "memory":
            lines = chosen_lines(here.control, first + here.rank, compress=False)
            link = partial(SocketLink, lines=lines)(*arguments)
        else:
            link = SocketLink(*arguments)
        once = partial(exchange, link, first, ranks[1:])
        if here.rank:
            for size in sizes:
                measure(here, size * MIB, rounds, once)
            link.close()
            return 0
        columns = (
            "  MiB",
            "broadcast GB/s",
            "publication GB/s",
            "ratio",
            "ratio of best",
            "limit met",
        )
        report = Report(
            f"Publication by {given['by']} to {rollouts} idle rollout(s) against a bare gloo broadcast",
            f"{TENSORS} fp32 tensors, processes on this machine, loopback. Medians of {rounds} rounds.",
            columns,
        )
        late = []
        for size in sizes:
            bare, ours = measure(here, size * MIB, rounds, once)
            median = statistics.median(bare), statistics.median(ours)
            speed = [size * MIB / seconds / 1e9 for seconds in median]
            ratio, best = median[0] / median[1], min(bare) / min(ours)
            fast = size >= FAST_FROM_MIB
            met = ratio >= FAST_SHARE if fast else median[1] <= 2 * median[0] + 0.01
            report.row(size, *(f"{figure:.2f}" for figure in (*speed, ratio, best)), met)
            late += [] if met else [f"{size} MiB"]
        report.verdict(
            not late,
            f"{FAST_SHARE} of the broadcast from {FAST_FROM_MIB} MiB on, below at most twice its "
            f"time + 10 ms{'; not at ' * bool(late)}{', '.join(late)}",
        )
        link.close()
        return report.close(given, f"_{given['by']}")

    return on_ranks(1 + rollouts, body)


def moved_on(weights: dict[str, Tensor], share: float, generator: torch.Generator) -> None:
    """Move a share of bf16 values by one step of their precision, as an optimizer's step does whose
    updates are much smaller than the weights."""
    for tensor in weights.values():
        steps = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
        chosen = torch.rand(tensor.shape, generator=generator) < share
        tensor.view(torch.int16).add_((steps * chosen).to(torch.int16))


def over_line(
    here: BenchRank, number: int, mbit: float, coded: bool, given: dict[str, str]
) -> float:
    """Return the seconds of the last version over a line of `mbit` Mb/s (on rank 0)."""
    sender, receiver = 1000 + 2 * number, 1001 + 2 * number
    control, ready = here.control, f"ready/{number}"
    if here.rank == 2:  # the line
        host, _, port = control.wait_for(f"real/{number}", "the receiver").rpartition(":")
        throttle = Throttle(host, int(port), mbit * 1e6 / 8)
        control.set(f"address/{receiver}", f"{HOST}:{throttle.port}")
        control.set(ready, "1")
        control.wait_for(f"over/{number}", "the versions to arrive")
        throttle.close()
        return 0.0
    lines: Any = (lambda peer: CodedLine()) if coded else (lambda peer: PeerLine())
    rank = receiver if here.rank else sender
    link = SocketLink(control, rank, HOST, here.handshake, lines=lines)
    if here.rank:
        control.set(f"real/{number}", control.wait_for(f"address/{receiver}", "this link"))
    control.wait_for(ready, "the line")
    generator = torch.Generator().manual_seed(0)
    width = int(float(given["mib"]) * MIB) // 2 // TENSORS
    weights = {
        f"layer.{i}": torch.randn(width, generator=generator).bfloat16() for i in range(TENSORS)
    }
    arrivals, seconds = Arrivals({name: value.clone() for name, value in weights.items()}), 0.0
    own = {name: value.clone() for name, value in weights.items()}
    for version in range(1, VERSIONS + 1):
        moved_on(weights, float(given["moved"]), generator)
        began = time.perf_counter()
        exchange(link, sender, (receiver,), own if here.rank else weights, arrivals, version)
        seconds = time.perf_counter() - began
        if here.rank and not all(torch.equal(own[name], value) for name, value in weights.items()):
            raise SystemExit(f"version {version} arrived with other bits")
    if here.rank == 0:
        control.set(f"over/{number}", "1")
    link.close()
    return seconds


def over_lines(given: dict[str, str]) -> int:
    """Print the seconds of a version over each line, as it is and with differences."""
    speeds = [float(word) for word in given["links"].split(",")]

    def body(here: BenchRank) -> int:
        report, gains = None, dict[float, float]()
        if here.rank == 0:
            report = Report(
                f"A version of {given['mib']} MiB over slow lines, with and without network.compress",
                f"16-bit values of which {float(given['moved']):.0%} move a version. A proxy in a process "
                "of its own lets so many bits through; at 10 Gb/s it is the proxy that is measured.",
                ("  Mb/s", "off: seconds", "auto: seconds", "times as fast"),
            )
        for place, mbit in enumerate(speeds):
            plain, coded = (
                over_line(here, 2 * place + on, mbit, bool(on), given) for on in (False, True)
            )
            if report is not None:
                report.row(f"{mbit:g}", f"{plain:.3f}", f"{coded:.3f}", f"{plain / coded:.2f}")
                gains[mbit] = plain / coded
        if report is None:
            return 0
        if (gain := gains.get(LINK_BAR_MBIT)) is not None:
            bar = f"{LINK_BAR:g} times as fast at {LINK_BAR_MBIT:g} Mb/s"
            report.verdict(gain >= LINK_BAR, bar)
        return report.close(given, "_links")

    return on_ranks(3, body)


def main(words: list[str]) -> int:
    defaults = {
        "sizes": "1,4,16,64,256,512,1024", "rollouts": "1", "rounds": "9", "by": "memory",
        "links": "", "mib": "16", "moved": "0.05",
    }  # fmt: skip
    given = options(words, defaults, quick={"sizes": "1,16,64", "rounds": "3", "mib": "2"})
    return over_lines(given) if given["links"] else against_broadcast(given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
