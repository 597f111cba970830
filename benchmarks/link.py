"""The data link against a bare gloo send, in the same run, alternating.

    python -m benchmarks.link [rounds=15]

The time of one message at each size and the ratio of bandwidths (link / gloo), of the medians and
of the best rounds. Two processes on this machine; a round is several messages and one
acknowledgement. Exit code 1 below a bar.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks._shared import BenchRank, Report, on_ranks, options
from digenrl.transport.wire import Message, MessageKind

MIB = 1 << 20
SIZES = (MIB // 16, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
BARS = {MIB: 0.5, 16 * MIB: 0.7, 64 * MIB: 0.7}
"""Size of a message -> least share of gloo's bandwidth."""


def messages_per_round(size: int) -> int:
    return max(2, min(32, 64 * MIB // size))


def with_gloo(here: BenchRank, payload: torch.Tensor, count: int) -> None:
    acknowledgement = torch.zeros(1)
    for _ in range(count):
        dist.send(payload, 1) if here.rank == 0 else dist.recv(torch.empty_like(payload), 0)
    dist.recv(acknowledgement, 1) if here.rank == 0 else dist.send(acknowledgement, 0)


def with_link(here: BenchRank, payload: torch.Tensor, count: int) -> None:
    for _ in range(count):
        here.link.send(
            1, Message(MessageKind.CELLS, {}, {"x": payload})
        ) if here.rank == 0 else here.receive()
    here.receive() if here.rank == 0 else here.link.send(0, Message(MessageKind.CELLS, {}))


def measure(
    here: BenchRank, size: int, rounds: int
) -> dict[Callable[[BenchRank, torch.Tensor, int], None], list[float]]:
    """Milliseconds per message of every round. Rank 0 sends, rank 1 receives and acknowledges."""
    payload, count = torch.ones(size // 4), messages_per_round(size)
    times: dict[Callable[[BenchRank, torch.Tensor, int], None], list[float]] = {
        with_gloo: [],
        with_link: [],
    }
    for number in range(rounds + 1):
        for transport, milliseconds in times.items():
            dist.barrier()
            began = time.perf_counter()
            transport(here, payload, count)
            if number:  # the first round opens connections
                milliseconds.append((time.perf_counter() - began) / count * 1e3)
    return times


def main(words: list[str]) -> int:
    given = options(words, {"rounds": "15"}, quick={"rounds": "3"})

    def body(here: BenchRank) -> int:
        if here.rank:
            for size in SIZES:
                measure(here, size, int(given["rounds"]))
            return 0
        columns = (
            "     MiB",
            "gloo median ms",
            "link median ms",
            "ratio",
            "gloo best ms",
            "link best ms",
            "ratio of best",
        )
        report = Report(
            "The data link against a bare gloo send",
            "Two processes on this machine, loopback. Ratio: link / gloo in bandwidth; above 1 the "
            "link is faster.",
            columns,
        )
        ratios = {}
        for size in SIZES:
            gloo, ours = measure(here, size, int(given["rounds"])).values()
            medians, best = (
                (statistics.median(gloo), statistics.median(ours)),
                (min(gloo), min(ours)),
            )
            ratios[size] = medians[0] / medians[1]
            figures = [*medians, ratios[size], *best, best[0] / best[1]]
            report.row(f"{size / MIB:.2f}", *(f"{figure:.3f}" for figure in figures))
        for size, bar in BARS.items():
            report.verdict(
                ratios[size] >= bar,
                f"{size // MIB} MiB: {ratios[size]:.2f} of gloo, at least {bar} wanted",
            )
        return report.close(given)

    return on_ranks(2, body)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
