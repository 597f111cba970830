"""The schema of every file that a command composes: configs/train.yaml and those of other
commands."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from digenrl.config.checked_tree import Closed
from digenrl.config.settings import ScorerSettings, Settings
from digenrl.config.value_types import Amount, AtLeast1, Directory, File, Positive, PromptFile, Text


class PlanOptionsSettings(Closed):
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


class PlanSettings(Settings):
    """A plan: the keys of a run, and `plan`."""

    plan: PlanOptionsSettings


class ScoreSettings(ScorerSettings):
    """Scoring a folder: configs/score.yaml."""

    images: Directory
    """its pictures and videos are taken in order of name, 2.png before 10.png"""
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


class ServiceLimitsSettings(Closed):
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


class ServeRewardSettings(ScorerSettings):
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
    limits: ServiceLimitsSettings


_COMMANDS: dict[str, type[Settings] | type[ScorerSettings]] = {
    "train": Settings,
    "plan": PlanSettings,
    "score": ScoreSettings,
    "serve_reward": ServeRewardSettings,
}


def schema_of(config_name: str) -> type[Closed]:
    """Return the class that holds the keys of configs/<config_name>.yaml."""
    return _COMMANDS[config_name]


def scorer_settings_of(config_name: str) -> type[ScorerSettings]:
    """Return the class of the settings of a command around one option of the group `reward`."""
    found = _COMMANDS[config_name]
    if not issubclass(found, ScorerSettings):
        raise ValueError(f"configs/{config_name}.yaml describes a run")
    return found


def settings_of(config_name: str) -> type[Settings]:
    """Return the class of a run's settings that configs/<config_name>.yaml makes."""
    found = _COMMANDS[config_name]
    if not issubclass(found, Settings):
        raise ValueError(f"configs/{config_name}.yaml describes no run")
    return found
