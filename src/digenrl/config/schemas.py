"""The schema of every file that a command composes: configs/train.yaml and those of other
commands."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from digenrl.config.schema import (
    Amount,
    AtLeast1,
    Closed,
    Directory,
    File,
    Positive,
    PromptFile,
    ScorerKeys,
    Text,
    TrainKeys,
)


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


class ScoreKeys(ScorerKeys):
    """Scoring a folder: configs/score.yaml."""

    images: Directory
    """its pictures and videos are taken in order of name"""
    prompts: PromptFile
    """one prompt a line, in the order of the files"""
    output: File | None
    """where the scores are written, as JSON; null: outputs/scores/<time>.json"""
    heldout: bool
    """also the mixture's held-out rewards"""
    batch: AtLeast1
    """files read and scored together, if of equal size"""
    max_frames: AtLeast1
    """of a video; longer ones are cut"""
    max_pixels: AtLeast1
    """frames x height x width of a file, and about those held at once"""


class LimitsKeys(Closed):
    """limits.*"""

    max_body_bytes: AtLeast1
    """of a request"""
    max_samples: AtLeast1
    """of a request"""
    max_pixels: AtLeast1
    """frames x height x width of a sample"""
    max_pending: AtLeast1
    """requests that may wait"""
    max_connections: AtLeast1
    """open ones; one more ends the one that waits longest for a request"""
    head_s: Positive
    """seconds in which the head of a request must have arrived"""
    body_s: Positive
    """seconds in which a request must have arrived"""
    score_s: Positive
    """seconds that scoring may take"""
    retry_after_s: Positive
    """seconds after which a refused client may ask again"""


class ServeRewardKeys(ScorerKeys):
    """A reward over HTTP: configs/serve_reward.yaml."""

    name: Text | None
    """which reward of the mixture; null: its only one"""
    host: Text
    """address to listen on"""
    hosts: list[Text]
    """further names by which clients may call the service, such as that of a proxy"""
    port: int = Field(ge=0, le=65535)
    """0: a free one, which is printed"""
    token_env: Text
    """environment variable DIGENRL_... that holds the token"""
    token_file: File
    """where a new token is written without that variable"""
    limits: LimitsKeys


_SCHEMAS: dict[str, type[Closed]] = {
    "train": TrainKeys,
    "plan": PlanKeys,
    "score": ScoreKeys,
    "serve_reward": ServeRewardKeys,
}


def schema_of(config_name: str) -> type[Closed]:
    """Return the schema of configs/<config_name>.yaml."""
    return _SCHEMAS[config_name]
