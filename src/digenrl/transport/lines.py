"""What becomes of messages on the way to each peer: shared memory on this machine, differences on
slow connections."""

from __future__ import annotations

from digenrl.cluster.control import Control
from digenrl.cluster.store import StoreLost
from digenrl.transport.compress import CodedLine
from digenrl.transport.link import Lines, PeerLine
from digenrl.transport.node_memory import SharedBuckets, SharedLine, machine_identity


def chosen_lines(control: Control, rank: int, compress: bool) -> Lines:
    """Return what makes the line between `rank` and a peer. Both ends choose alike, because each
    says on the store where it is before anybody can connect to it.

    Args:
        compress: `network.compress=auto`.
    """
    own, shared = machine_identity(), SharedBuckets()
    control.set(f"machine/{rank}", own)

    def choose_line(peer: int) -> PeerLine:
        try:
            together = own != "" and control.get(f"machine/{peer}") == own
        except StoreLost:  # the run is over
            together = False
        if together:
            return SharedLine(shared)
        return CodedLine() if compress else PeerLine()

    return choose_line
