"""Time by the observer's own observations: an observer that was suspended has seen nothing."""

from __future__ import annotations

import time

BEAT_EVERY_S = 1.0
"""Seconds between two heartbeats of a rank."""


class ConditionTimer:
    """Measures how long a condition has held, by the observer's own observations."""

    def __init__(self, most: float) -> None:
        self._most, self._last, self.seconds = most, time.monotonic(), 0.0

    def observe(self, true: bool) -> float:
        """Return the seconds that the condition has held. One observation adds at most `most`
        seconds."""
        now = time.monotonic()
        self.seconds = self.seconds + min(now - self._last, self._most) if true else 0.0
        self._last = now
        return self.seconds


def suggest_raising(key: str) -> str:
    """Return what helps a rank that only needs longer than `key` allows."""
    return f"raise {key} if it only needs longer"
