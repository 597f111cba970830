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

    # `async` is a word of Python.
    asynchronous: bool = Field(alias="async")
    """Whether the plan may choose asynchrony if schedule.async_steps is 0."""
    show: AtLeast1
    """Number of candidates that are printed."""
    # The first steps fill the pipeline, and the rate is taken from the last ones.
    simulated_steps: Annotated[int, Field(ge=4)] | None
    """RL steps of each finalist's simulation. null: until the seconds per step no longer change."""
    price_per_gpu_hour: Amount | None
    """Price from which the cost of the run is computed, in any currency."""
    plot: bool
    """Whether the winner's step is drawn as plots/gantt.png."""


class PlanSettings(Settings):
    """A plan: the keys of a run, and `plan`."""

    plan: PlanOptionsSettings


class ScoreSettings(ScorerSettings):
    """Scoring a folder: configs/score.yaml."""

    images: Directory
    """Folder of pictures and videos, taken in order of name (2.png before 10.png)."""
    prompts: PromptFile
    """Prompts, one a line, in the order of the files."""
    output: File | None
    """File of the scores, as JSON. null: outputs/scores/TIME.json."""
    heldout: bool
    """Whether the mixture's held-out rewards are computed too."""
    batch: AtLeast1
    """Number of files that are read and scored together, if they have the same size."""
    max_frames: AtLeast1
    """Most frames of a video. Longer videos are cut."""
    max_pixels: AtLeast1
    """Most frames x height x width of a file, and about as many of all files in memory."""


class ServiceLimitsSettings(Closed):
    """limits.*"""

    max_body_bytes: AtLeast1
    """Most bytes of a request."""
    max_samples: AtLeast1
    """Most samples of a request."""
    max_pixels: AtLeast1
    """Most frames x height x width of a sample."""
    max_pending: AtLeast1
    """Number of requests that may wait."""
    max_connections: AtLeast1
    """Number of open connections. One more closes the connection that has waited longest for a
    request."""
    head_s: Positive
    """Seconds in which the head of a request must arrive."""
    body_s: Positive
    """Seconds in which a request must arrive."""
    score_s: Positive
    """Seconds that scoring may take."""
    retry_after_s: Positive
    """Seconds after which a refused client may ask again."""


class ServeRewardSettings(ScorerSettings):
    """A reward over HTTP: configs/serve_reward.yaml."""

    name: Text | None
    """Reward of the mixture. null: its only reward."""
    host: Text
    """Address to listen on."""
    hosts: list[Text]
    """Further names by which clients may call the service, such as a proxy's."""
    # Not `Port`, which has no 0.
    port: int = Field(ge=0, le=65535)
    """Port of the service. 0: any free port, which is printed."""
    token_env: Text
    """Environment variable DIGENRL_... that holds the token."""
    token_file: File
    """File for a new token if that variable is not set."""
    limits: ServiceLimitsSettings


# Other commands have a few keys of their own (`help.Arguments`) and compose nothing.
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
    # A mistake of ours and not of a user's, so no ConfigError.
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
