"""The data link against a bare gloo send, in the same run, alternating.

    python benchmarks/link.py [rounds]

Prints the time of one message at each size and the ratio of bandwidths (link / gloo): at least 0.5 is wanted at 1 MiB,
at least 0.7 at 16-64 MiB. Two processes on this machine; a round is several messages and one acknowledgement.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from digenrl.strategy.control import Control, host_store, join_store
from digenrl.strategy.launcher import keep_memory
from digenrl.strategy.link import SocketLink
from digenrl.strategy.wire import Kind, Message

HOST = "127.0.0.1"
MIB = 1 << 20
SIZES = (MIB // 16, MIB, 4 * MIB, 16 * MIB, 64 * MIB)


def messages_per_round(size: int) -> int:
    return max(2, min(32, 64 * MIB // size))


def peer(rank: int, port: int, rounds: int) -> None:
    """Rank 0 sends and measures, rank 1 receives and acknowledges."""
    torch.set_num_threads(1)
    keep_memory()  # as every rank does
    store = join_store(HOST, port, "bench")
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=2)
    link = SocketLink(Control(join_store(HOST, port, "link"), rank), rank, HOST, "token")
    acknowledgement = torch.zeros(1)

    def receive() -> Message:
        while (message := link.receive(5.0)) is None:
            continue
        return message

    def with_gloo(payload: torch.Tensor, count: int) -> None:
        for _ in range(count):
            dist.send(payload, 1) if rank == 0 else dist.recv(torch.empty_like(payload), 0)
        dist.recv(acknowledgement, 1) if rank == 0 else dist.send(acknowledgement, 0)

    def with_link(payload: torch.Tensor, count: int) -> None:
        for _ in range(count):
            link.send(1, Message(Kind.CELLS, {}, {"x": payload})) if rank == 0 else receive()
        receive() if rank == 0 else link.send(0, Message(Kind.CELLS, {}))

    if rank == 0:
        print(f"{'size':>9} {'gloo min/median ms':>22} {'link min/median ms':>22} {'ratio of mins':>14} {'medians':>8}")
    for size in SIZES:
        payload, count = torch.ones(size // 4), messages_per_round(size)
        times: dict[Callable[[torch.Tensor, int], None], list[float]] = {with_gloo: [], with_link: []}
        for number in range(rounds + 1):
            for transport, seconds in times.items():
                dist.barrier()
                began = time.perf_counter()
                transport(payload, count)
                if number:  # the first round opens connections
                    seconds.append((time.perf_counter() - began) / count * 1e3)
        if rank == 0:
            gloo, ours = times[with_gloo], times[with_link]
            median_gloo, median_ours = statistics.median(gloo), statistics.median(ours)
            print(
                f"{size / MIB:6.2f}MiB {min(gloo):10.3f} /{median_gloo:10.3f} {min(ours):10.3f} /{median_ours:10.3f} "
                f"{min(gloo) / min(ours):14.2f} {median_gloo / median_ours:8.2f}",
                flush=True,
            )
    link.close()
    dist.destroy_process_group()


def main() -> None:
    store = host_store(HOST)
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=peer, args=(rank, store.port, rounds)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))


if __name__ == "__main__":
    main()
