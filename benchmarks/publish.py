"""From a trainer's optimizer step to adopted weights, against a bare gloo broadcast in the same run, alternating.

    python benchmarks/publish.py [rollouts] [rounds]

Publish-to-adopted is everything: the copy of the parameters, the digest, the sends, the check of the digest and the
copy into every (idle) rollout's parameters. Wanted: at most twice the broadcast plus 10 ms, for 1-256 MiB.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time

import torch
import torch.distributed as dist

from digenrl.strategy.control import Control, host_store, join_store
from digenrl.strategy.launcher import keep_memory
from digenrl.strategy.link import SocketLink
from digenrl.strategy.weights import adopt, digest, snapshot, weights_message
from digenrl.strategy.wire import Kind, Message

HOST = "127.0.0.1"
MIB = 1 << 20
SIZES = (MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
TENSORS = 64
"""Parameters of the adapter."""


def peer(rank: int, port: int, rollouts: int, rounds: int) -> None:
    """Rank 0 publishes and measures, the others adopt and acknowledge."""
    torch.set_num_threads(1)
    keep_memory()  # as every rank does
    store = join_store(HOST, port, "bench")
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=rollouts + 1)
    link = SocketLink(Control(join_store(HOST, port, "link"), rank), rank, HOST, "token")

    def receive() -> Message:
        while (message := link.receive(5.0)) is None:
            continue
        return message

    def publish(parameters: dict[str, torch.Tensor], version: int) -> None:
        if rank:
            adopt(parameters, receive())
            link.send(0, Message(Kind.CELLS, {"version": version}))
            return
        copies = snapshot(parameters)
        message = weights_message(version, copies, digest(copies.values()))
        for rollout in range(1, rollouts + 1):
            link.send(rollout, message)
        for _ in range(rollouts):
            receive()

    def broadcast(flat: torch.Tensor) -> None:
        dist.broadcast(flat, 0)
        dist.barrier()

    if rank == 0:
        print(
            f"{rollouts} rollouts\n{'size':>9} {'broadcast min/median ms':>25} {'publish min/median ms':>25} "
            f"{'limit':>8}  within"
        )
    for size in SIZES:
        parameters = {f"layer.{i}": torch.full((size // 4 // TENSORS,), float(rank)) for i in range(TENSORS)}
        flat = torch.full((size // 4,), float(rank))
        bare, ours = [], []
        for number in range(rounds + 1):
            dist.barrier()
            began = time.perf_counter()
            broadcast(flat)
            middle = time.perf_counter()
            publish(parameters, number)
            ended = time.perf_counter()
            if number:  # the first round opens connections
                bare.append((middle - began) * 1e3)
                ours.append((ended - middle) * 1e3)
        assert all(torch.equal(tensor, torch.zeros_like(tensor)) for tensor in parameters.values())
        if rank == 0:
            limit = 2 * min(bare) + 10
            print(
                f"{size / MIB:6.0f}MiB {min(bare):12.2f} /{statistics.median(bare):10.2f} {min(ours):13.2f} "
                f"/{statistics.median(ours):10.2f} {limit:8.1f}  {'yes' if min(ours) <= limit else 'NO'}",
                flush=True,
            )
    link.close()
    dist.destroy_process_group()


def main() -> None:
    store = host_store(HOST)
    rollouts = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 8
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=peer, args=(rank, store.port, rollouts, rounds)) for rank in range(rollouts + 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))


if __name__ == "__main__":
    main()
