"""One URL's circuit breaker."""

from __future__ import annotations

from digenrl.extensions.rewards.breaker import Breaker


def test_it_opens_after_enough_failures_probes_once_and_closes():
    breaker = Breaker(max_failures=2, open_s=10)
    breaker.fail(0)
    assert breaker.wait_s(0) == 0
    breaker.fail(1)
    assert breaker.wait_s(4) == 7
    assert breaker.wait_s(11) == 0
    breaker.begin()
    assert breaker.wait_s(11) == 10
    breaker.fail(12)
    assert breaker.wait_s(12) == 10
    breaker.begin()
    breaker.succeed()
    assert breaker.wait_s(12) == 0
    breaker.fail(13)
    assert breaker.wait_s(13) == 0
