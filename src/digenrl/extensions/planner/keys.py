"""Keys of configs/plan.yaml."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from digenrl.config.schema import Amount, AtLeast1, Closed, TrainKeys


class PlanOptionsKeys(Closed):
    """plan.*"""

    asynchronous: bool = Field(alias="async")
    """may choose asynchrony where schedule.async_steps is 0"""
    show: AtLeast1
    """candidates printed"""
    simulated_steps: Annotated[int, Field(ge=4)] | None
    """RL steps of each finalist's simulation; null: until its step no longer changes"""
    price_per_gpu_hour: Amount | None
    """for the cost of the run, in any currency"""
    plot: bool
    """draw the winner's step as plots/gantt.png"""


class PlanKeys(TrainKeys):
    """A plan: the keys of a run, and `plan`."""

    plan: PlanOptionsKeys
