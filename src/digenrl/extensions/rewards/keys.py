"""Keys of configs/serve_reward.yaml."""

from __future__ import annotations

from pydantic import Field

from digenrl.config.schema import AtLeast1, Closed, File, Positive, ScorerKeys, Text


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
    """address; anything but loopback needs a token"""
    port: int = Field(ge=0, le=65535)
    """0: a free one, which is printed"""
    token_env: Text
    """environment variable DIGENRL_... that holds the token"""
    token_file: File
    """where a new token is written, off loopback without that variable"""
    limits: LimitsKeys
