"""From a trainer's optimizer step to adopted weights, against a bare gloo broadcast in the same
run, alternating.

    python -m benchmarks.publish [rollouts=1] [rounds=9]

Publish-to-adopted is everything: the copy of the parameters, the digest, the sends, the check of
the digest and the adoption by every (idle) rollout. Wanted: at most twice the broadcast plus 10 ms.
Exit code 1 above that.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
import torch.distributed as dist

from benchmarks._shared import BenchRank, Report, on_ranks, options
from digenrl.transport.weights import Arrivals, adopt, publish
from digenrl.transport.wire import Message, MessageKind

MIB = 1 << 20
SIZES = (MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
TENSORS = 64
"""Parameters of the adapter."""


def publish_and_adopt(
    here: BenchRank, parameters: dict[str, torch.Tensor], arrivals: Arrivals, number: int
) -> None:
    """Rank 0 publishes and waits for every acknowledgement; the others adopt."""
    if here.rank:
        version = None
        while version is None:
            version = arrivals.add(here.receive())
        adopt(parameters, version)
        here.link.send(0, Message(MessageKind.CELLS, {}))
        return
    rollouts = range(1, dist.get_world_size())
    publish(number, parameters, here.link, dict.fromkeys(rollouts, ()), lambda digest: None)
    for _ in rollouts:
        here.receive()


def measure(here: BenchRank, size: int, rounds: int) -> tuple[list[float], list[float]]:
    """Milliseconds of every round: broadcast, publish."""
    parameters = {
        f"layer.{i}": torch.full((size // 4 // TENSORS,), float(here.rank)) for i in range(TENSORS)
    }
    flat, arrivals = torch.full((size // 4,), float(here.rank)), Arrivals(parameters)
    bare, ours = [], []
    for number in range(rounds + 1):
        dist.barrier()
        began = time.perf_counter()
        dist.broadcast(flat, 0)
        dist.barrier()
        middle = time.perf_counter()
        publish_and_adopt(here, parameters, arrivals, number)
        if number:  # the first round opens connections
            bare.append((middle - began) * 1e3)
            ours.append((time.perf_counter() - middle) * 1e3)
    if not all(torch.equal(tensor, torch.zeros_like(tensor)) for tensor in parameters.values()):
        raise SystemExit(f"rank {here.rank} holds other weights than were published")
    return bare, ours


def main(words: list[str]) -> int:
    given = options(words, {"rollouts": "1", "rounds": "9"}, quick={"rounds": "3"})
    rounds = int(given["rounds"])

    def body(here: BenchRank) -> int:
        if here.rank:
            for size in SIZES:
                measure(here, size, rounds)
            return 0
        columns = (
            "  MiB",
            "broadcast median ms",
            "publish median ms",
            "limit ms",
            "broadcast best ms",
            "publish best ms",
        )
        report = Report(
            f"Publish-to-adopted with {given['rollouts']} idle rollout(s) against a bare gloo "
            "broadcast",
            f"{TENSORS} fp32 tensors, processes on this machine, loopback. The limit is twice the "
            "broadcast + 10 ms.",
            columns,
        )
        late = []
        for size in SIZES:
            bare, ours = measure(here, size, rounds)
            limit = 2 * statistics.median(bare) + 10
            figures = (
                statistics.median(bare),
                statistics.median(ours),
                limit,
                min(bare),
                min(ours),
            )
            report.row(size // MIB, *(f"{figure:.2f}" for figure in figures))
            if statistics.median(ours) > limit:
                late.append(f"{size // MIB} MiB")
        report.verdict(
            not late,
            "at most 2 x broadcast + 10 ms at every "
            f"size{'; above it: ' * bool(late)}{', '.join(late)}",
        )
        return report.close(given)

    return on_ranks(1 + int(given["rollouts"]), body)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
