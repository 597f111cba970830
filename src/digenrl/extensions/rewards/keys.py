"""Keys of configs/serve_reward.yaml."""

from __future__ import annotations

from pydantic import Field

from digenrl.config.schema import AtLeast1, Closed, File, Positive, ScorerKeys, Text


class LimitsKeys(Closed):
    """limits.*"""

    max_body_bytes: AtLeast1 = Field(description="of a request")
    max_samples: AtLeast1 = Field(description="of a request")
    max_pixels: AtLeast1 = Field(description="frames x height x width of a sample")
    max_pending: AtLeast1 = Field(description="requests that may wait")
    max_connections: AtLeast1 = Field(
        description="open ones; one more ends the one that waits longest for a request"
    )
    head_s: Positive = Field(description="seconds in which the head of a request must have arrived")
    body_s: Positive = Field(description="seconds in which a request must have arrived")
    score_s: Positive = Field(description="seconds that scoring may take")
    retry_after_s: Positive = Field(
        description="seconds after which a refused client may ask again"
    )


class ServeRewardKeys(ScorerKeys):
    """A reward over HTTP: configs/serve_reward.yaml."""

    name: Text | None = Field(description="which reward of the mixture; null: its only one")
    host: Text = Field(description="address; anything but loopback needs a token")
    port: int = Field(ge=0, le=65535, description="0: a free one, which is printed")
    token_env: Text = Field(description="environment variable DIGENRL_... that holds the token")
    token_file: File = Field(
        description="where a new token is written, off loopback without that variable"
    )
    limits: LimitsKeys
