"""When a service may be asked again: circuit breaker (pure, the caller brings the clock) and Retry-After.

A breaker is closed (calls pass), open (refused until `open_s` have passed) or half-open (one probe passes; its success
closes the breaker, its failure opens it again).
"""

from __future__ import annotations

import email.utils
import math
import time
from dataclasses import dataclass


@dataclass
class Breaker:
    """State of one URL."""

    max_failures: int
    """Consecutive failures that open it."""
    open_s: float
    failures: int = 0
    opened_at: float | None = None
    probing: bool = False

    def wait_s(self, now: float) -> float:
        """Seconds until a call may be made; 0 = now. While a probe is under way, `open_s`."""
        if self.opened_at is None:
            return 0.0
        if self.probing:
            return self.open_s
        return max(0.0, self.opened_at + self.open_s - now)

    def begin(self) -> None:
        """A call starts (after `wait_s` gave 0)."""
        if self.opened_at is not None:
            self.probing = True

    def succeed(self) -> None:
        """The URL answered."""
        self.failures, self.opened_at, self.probing = 0, None, False

    def fail(self, now: float) -> None:
        """The URL did not answer, or answered that it is broken."""
        self.failures += 1
        if self.probing or self.failures >= self.max_failures:
            self.opened_at = now
        self.probing = False


def retry_after_s(value: str | None) -> float | None:
    """Seconds of a Retry-After header (number or HTTP date); None where it is absent or neither."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
