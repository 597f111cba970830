"""A schedule setting that has no effect is named before the run starts."""

from __future__ import annotations

import pytest

from digenrl import config
from digenrl.advisor import PlainAdvisor
from digenrl.settle import allocated_ranks, with_allocation

TWO = ("allocation.trainers=2", "allocation.rollouts=1")


@pytest.mark.parametrize(
    ("words", "idle"),
    [
        (["schedule=full"], ["tsp.shard = true"]),
        (["schedule=sync", "schedule.gap=8"], ["gap = 8"]),
        (["schedule=gap_tsp_tag", "allocation.rollouts=0"], ["tag = true"]),
        (["schedule=gap_tsp_tag", "allocation.trainers=2", "allocation.rollouts=2"], []),
        (["schedule.shares=measured"], ["shares = measured"]),
        ([*TWO, "schedule.shares=[3,1]", "parallel.sharding=fsdp"], ["shares = [3, 1]"]),
        ([*TWO, "schedule.shares=measured", "parallel.sharding=hsdp"], ["shares = measured"]),
        ([*TWO, "schedule.shares=[3,1]"], []),
        (["schedule.async_steps=1", "schedule.stale_fraction=0"], ["async_steps = 1"]),
    ],
    ids=[
        "one trainer",
        "long fragments",
        "colocated",
        "all used",
        "shares of one",
        "shares under fsdp",
        "measured under hsdp",
        "shares of two",
        "no stale group",
    ],
)
def test_a_schedule_setting_without_effect_is_named(words: list[str], idle: list[str]) -> None:
    composed = config.load(words)
    notes = [
        note
        for note in with_allocation(
            composed, *allocated_ranks(composed.settings), PlainAdvisor()
        ).notes
        if "has no effect" in note
    ]
    assert len(notes) == len(idle)
    assert all(
        note.startswith(f"schedule.{setting}") for note, setting in zip(notes, idle, strict=True)
    ), notes
