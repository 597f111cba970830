"""Circuit breaker and Retry-After: when a service may be asked again. Pure functions; the caller
brings the clock.

A closed breaker lets calls pass. An open breaker refuses calls until `open_s` seconds have passed.
Then it is half-open and lets one probe pass: a success closes the breaker, a failure opens it
again.
"""

from __future__ import annotations

import email.utils
import math
import time
from dataclasses import dataclass


@dataclass
class Breaker:
    """State of the breaker of one URL."""

    max_failures: int
    """Consecutive failures that open the breaker."""
    open_s: float
    failures: int = 0
    opened_at: float | None = None
    probing: bool = False

    def wait_s(self, now: float) -> float:
        """Return the seconds until a call may be made: 0 = now; `open_s` while a probe is in
        progress."""
        if self.opened_at is None:
            return 0.0
        if self.probing:
            return self.open_s
        return max(0.0, self.opened_at + self.open_s - now)

    def begin(self) -> None:
        """Note that a call starts (after `wait_s` returned 0)."""
        if self.opened_at is not None:
            self.probing = True

    def succeed(self) -> None:
        """Note that the URL answered."""
        self.failures, self.opened_at, self.probing = 0, None, False

    def fail(self, now: float) -> None:
        """Note that the URL did not answer, or answered with an error."""
        self.failures += 1
        if self.probing or self.failures >= self.max_failures:
            self.opened_at = now
        self.probing = False


def retry_after_s(value: str | None) -> float | None:
    """Return the seconds of a Retry-After header (number or HTTP date); None if it is absent or
    malformed."""
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
