"""Time limits for waiting for ranks: the `limits` group of a run's configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Time limits in seconds, unless said otherwise. The defaults are those of
    configs/train.yaml."""

    stage_factor: float | None = 10.0
    """A rank hangs when it shows no progress in a stage for this many times the longest such time
    of any rank. A rank's own first time in each stage counts twice at most. None = no rank is
    judged by its progress."""
    stage_floor_s: float = 300.0
    """Shortest time without progress that counts as a hang, and how long all ranks may wait for
    each other."""
    start_s: float = 1800.0
    """Replaces both limits for a rank's start, for its first time in a stage, and outside of any
    stage. Also the longest wait for another rank to start, and for the first sign of life of a
    process on another machine."""
    collective_s: float = 7200.0
    """Longest duration of one collective of the trainers, in which the fast ranks wait for the
    slowest."""
    join_s: float = 120.0
    """Longest time in which ranks form the group of their broadcasts. Beyond it versions travel as
    streams."""
    silent_s: float = 30.0
    """Longest time without both heartbeat and processor time. A file server may stall a process, so
    the default is not shorter."""
    absent_s: float = 10.0
    """Longest silence of the process that watches a joined rollout on its machine. Beyond it the
    machine counts as gone, or as out of reach."""
    suspended_s: float = 3.0
    """Longest time that a rank or the launcher may be in state T (SIGSTOP, a debugger)."""
    leave_s: float = 10.0
    """Time at the end of a run for data that is still queued for other ranks, and to wait for the
    exit of a killed process."""
    verdict_s: float = 6.0
    """Longest wait, after a connection broke, for the launcher to declare that the run goes on
    without the peer."""
    abort_s: float = 4.0
    """Time that ranks have to leave by themselves after a failure, before SIGKILL."""
