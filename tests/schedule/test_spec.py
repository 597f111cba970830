"""A schedule's numbers, from a configuration and back to the words that set them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from digenrl import config as configuration
from digenrl.config.settings import Settings
from digenrl.schedule import ScheduleSpec
from digenrl.schedule.spec import groups_of_step, steps_per_forward
from digenrl.settle import schedule_of
from tests.changed import but

SPEC = ScheduleSpec(6, 4, 2, 8, 5)
CONFIG: dict[str, Any] = {
    "data": {
        "prompts_per_batch": 4, "oversample": 2, "group_size": 4, "updates_split": "samples",
        "zero_variance_groups": "drop",
    },
    "sampling": {"task_size": 2, "steps": 8},
    "algorithm": {"updates_per_batch": 2},
    "parallel": {"context": 3},
    "schedule": {
        "gap": 1, "tsp": {"batch": 9, "shard": True}, "tag": True, "shares": [1, 0.5], "skip_zero": False,
        "async_steps": 1, "stale_fraction": 0.25,
    },
}  # fmt: skip


def settings(groups: dict[str, Any]) -> Settings:
    values = {
        f"{name}__{key}": value for name, keys in groups.items() for key, value in keys.items()
    }
    return but(configuration.load([]), **values).settings


def test_a_configuration_says_every_number() -> None:
    said = ScheduleSpec(
        6,
        4,
        2,
        8,
        5,
        2,
        "samples",
        1,
        5,
        True,
        True,
        (1.0, 0.5),
        False,
        2,
        "drop",
        3,
        False,
        1,
        0.25,
    )
    assert schedule_of(settings(CONFIG), 5) == said
    shares: list[tuple[Any, tuple[float, ...], bool]] = [
        ("equal", (), False), ("measured", (3.0, 1.0), True), ([2, 1], (2.0, 1.0), False),
    ]  # fmt: skip
    for asked, given, measured in shares:
        config = CONFIG | {"schedule": CONFIG["schedule"] | {"shares": asked}}
        found = schedule_of(settings(config), 5, speeds=(3, 1))
        assert (found.shares, found.measured_shares) == (given, measured)


def test_what_nobody_says_is_off() -> None:
    usual = {each.name: each.default for each in fields(ScheduleSpec)[5:]}
    assert usual == {
        "updates_per_batch": 1, "updates_split": "groups", "gap": 0, "tsp_batch": 1, "tsp_shard": False,
        "tag": False, "shares": (), "measured_shares": False, "oversample": 0,
        "zero_variance_groups": "keep", "context": 1, "skip_zero": True, "async_steps": 0,
        "stale_fraction": 0.5,
    }  # fmt: skip
    assert [steps_per_forward(asked, 5) for asked in (1, 4, 5, 6, "auto", "all")] == [
        1,
        4,
        5,
        5,
        5,
        5,
    ]
    assert groups_of_step({"prompts_per_batch": 4}) == 4
    assert groups_of_step({"prompts_per_batch": 4, "oversample": 2}) == 6


def test_words_set_the_schedule_again() -> None:
    assert SPEC.override_words() == [
        "schedule.gap=0", "schedule.tsp.batch=1", "schedule.tsp.shard=false", "schedule.tag=false",
        "schedule.shares=equal", "schedule.skip_zero=true", "schedule.async_steps=0",
        "schedule.stale_fraction=0.5",
    ]  # fmt: skip
    shared = replace(SPEC, shares=(0.5, 0.0, 1.25), stale_fraction=1 / 3, tag=True)
    said = dict(word.split("=") for word in shared.override_words())
    assert said["schedule.shares"] == "[1,0,2.5]"
    assert (said["schedule.stale_fraction"], said["schedule.tag"]) == ("0.333333", "true")


@pytest.mark.parametrize(("split", "cells"), [("groups", 3 * 4 * 5), ("samples", 6 * 2 * 5)])
def test_the_denominator_counts_the_cells_of_an_update(split: Any, cells: int) -> None:
    found = replace(SPEC, updates_per_batch=2, updates_split=split).cells_per_update
    assert (found, type(found)) == (cells, int)
