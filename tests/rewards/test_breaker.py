from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.rewards.breaker import Breaker, backoff_s


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


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.001, 10), st.floats(0.001, 100), st.floats(0, 1, exclude_max=True))
def test_delays_grow_and_stay_below_the_cap(attempt, base, cap, random):
    delay = backoff_s(attempt, base, cap, random)
    assert 0 <= delay <= cap
    assert delay <= base * 2.0 ** min(attempt, 30)
    assert backoff_s(attempt + 1, base, cap, random) >= delay
