"""Shares of the trainers from their measured speed.

Invariants:
1. The shares of a step are fixed before any of its cells is sent, so all ranks place alike (I2).
2. Every rank keeps a share above zero, or it could never be measured again.
3. Small changes are ignored, so that shares come to rest.
"""

from __future__ import annotations

from collections.abc import Sequence

FINEST = 100
"""Resolution of shares: whole hundredths of the fastest rank's share, 1 at least. A log prints
exactly what was used."""
WORTHWHILE = 0.05
"""Part of the slowest rank's time that new shares must save to replace the present ones."""


def relative_shares(speeds: Sequence[float]) -> tuple[float, ...]:
    """Return speeds as shares: the fastest rank has 1.0, each share is a whole number of
    hundredths.

    Raises:
        ValueError: a speed is not above zero.
    """
    if not speeds or min(speeds) <= 0:
        raise ValueError(f"speeds of the trainers = {list(speeds)}: every one must be above 0.")
    fastest = max(speeds)
    # Never 0: a rank without cells could not be measured again (2).
    return tuple(max(1, round(FINEST * speed / fastest)) / FINEST for speed in speeds)


def adjusted_shares(
    current: tuple[float, ...], seconds_per_cell: Sequence[float]
) -> tuple[float, ...]:
    """Return the shares for the next steps: those of the measured speeds if they save enough, else
    `current`.

    Example:
        A cell takes rank 1 twice as long, so its share is half. A small difference changes nothing:

        >>> adjusted_shares((1.0, 1.0), seconds_per_cell=[1.0, 2.0])
        (1.0, 0.5)
        >>> adjusted_shares((1.0, 1.0), seconds_per_cell=[1.0, 1.05])
        (1.0, 1.0)
    """
    wanted = relative_shares([1.0 / seconds for seconds in seconds_per_cell])
    before, after = (
        _slowest_seconds(current, seconds_per_cell),
        _slowest_seconds(wanted, seconds_per_cell),
    )
    # Without a threshold the noise of the clocks would move cells in every step (3).
    return wanted if after < (1.0 - WORTHWHILE) * before else current


def _slowest_seconds(shares: tuple[float, ...], seconds_per_cell: Sequence[float]) -> float:
    """Return the time of the rank that finishes last, in seconds per cell of the whole."""
    return max(
        share * seconds for share, seconds in zip(shares, seconds_per_cell, strict=True)
    ) / sum(shares)
