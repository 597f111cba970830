"""I9 and I10."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.schedule import ScheduleSpec, group_version
from digenrl.schedule.staleness import AccountingError, Ledger, StalenessError, check_staleness


@settings(deadline=None)
@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 1))
def test_i9_versions_outside_the_bound_raise(version: int, trainer: int, steps: int) -> None:
    if 0 <= trainer - version <= steps:
        assert check_staleness(version, trainer, steps) == trainer - version
    else:
        with pytest.raises(StalenessError, match=f"version {version} .* version {trainer}"):
            check_staleness(version, trainer, steps)


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(0, 9), st.floats(0, 1), st.integers(0, 1))
def test_i8_the_rule_never_breaks_i9(prompts: int, step: int, fraction: float, steps: int) -> None:
    spec = ScheduleSpec(prompts, 2, 1, 4, 3, async_steps=steps, stale_fraction=fraction)
    for group in range(prompts):
        check_staleness(group_version(spec, step, group), step, steps)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["train", "drop", "keep"])), max_size=30)
)
def test_i10_identity(events: list[tuple[int, str]]) -> None:
    ledger = Ledger()
    for number, (samples, fate) in enumerate(events):
        ledger.count_issued(number, 0, samples)
        if fate == "train":
            ledger.count_trained(number, 0)
        elif fate == "drop":
            ledger.count_dropped(number, 0, "missing_reward")
        ledger.check_balance()
    kept = [number for number, (_, fate) in enumerate(events) if fate == "keep"]
    assert sorted(step for step, _ in ledger.open) == kept
    if kept:
        with pytest.raises(
            AccountingError, match=f"group 0 of step {kept[0]} was issued, but neither"
        ):
            ledger.check_balance(before=kept[-1] + 1)
    ledger.check_balance(before=kept[0] if kept else len(events))


def test_i10_a_ledger_says_how_many_samples_left() -> None:
    ledger = Ledger()
    assert (ledger.issued, ledger.trained, ledger.dropped, ledger.in_flight) == (0, 0, {}, 0)
    for part, samples in enumerate((3, 4, 5)):
        ledger.count_issued(0, 1, samples, part)
    assert ledger.count_trained(0, 1, [0]) == 3
    assert ledger.count_dropped(0, 1, "odd", [2]) == 5
    assert (ledger.in_flight, ledger.open) == (4, {(0, 1): {1: 4}})
    assert ledger.count_dropped(0, 1, "odd") == 4
    assert (ledger.issued, ledger.trained, ledger.dropped, ledger.open) == (12, 3, {"odd": 9}, {})


def test_i10_double_and_unknown_groups_raise() -> None:
    ledger = Ledger()
    ledger.count_issued(0, 1, 8)
    with pytest.raises(AccountingError, match="issued twice"):
        ledger.count_issued(0, 1, 8)
    ledger.count_trained(0, 1)
    with pytest.raises(AccountingError, match="not in flight"):
        ledger.count_trained(0, 1)
    ledger.trained += 1
    with pytest.raises(AccountingError, match="issued 8"):
        ledger.check_balance()
