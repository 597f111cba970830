"""How long ranks are waited for: the `limits` group of a run's configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Seconds, unless said otherwise. The defaults are those of configs/train.yaml."""

    stage_factor: float | None = 10.0
    """A rank hangs when it shows no progress for this many times the longest such stretch of its stage, over all ranks
    (a rank's first one of each stage counts twice at most) ... None = nobody is judged by its progress."""
    stage_floor_s: float = 300.0
    """... and for this long. So long may all ranks wait for each other, too."""
    start_s: float = 1800.0
    """In place of both: a rank's start, its first stretch of a stage, and what it does outside of any stage. Also a
    wait for another rank to start."""
    collective_s: float = 7200.0
    """One collective of the trainers, in which the fast ones wait for the slowest."""
    join_s: float = 120.0
    """Until every process that a scheduler started gives its first sign of life, once process 0 is there."""
    silent_s: float = 30.0
    """No heartbeat and no processor time; not less, because a file server may stall a process."""
    absent_s: float = 10.0
    """Without a sign of life from who watches a joined rollout over there; its machine, or the way to it, is gone."""
    suspended_s: float = 3.0
    """In state T (SIGSTOP, a debugger): a rank, or the launcher."""
    leave_s: float = 10.0
    """At the end of a run: what is still queued for other ranks; so long is a killed process waited for, too."""
    verdict_s: float = 6.0
    """Until the launcher says that the run goes on without a rank to which a connection broke."""
    abort_s: float = 4.0
    """After a failure: what ranks get to leave by themselves, before SIGKILL."""
