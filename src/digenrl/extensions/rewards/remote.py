"""Scorer that runs elsewhere, as a client of `digenrl serve-reward`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from digenrl.extensions.rewards.client import ClientOptions, RewardClient
from digenrl.extensions.rewards.frames import DtypeName
from digenrl.rewards.protocol import Identity
from digenrl.types import Prompt


class RemoteScorer:
    """Scorer that asks a reward service. See `digenrl.extensions.rewards.client` for retries and
    errors.

    Args:
        urls: equal services; requests are spread over them.
        deadline_s: seconds within which every call returns or raises.
        attempt_s: seconds of the longest single attempt; None = half of `deadline_s`.
        max_attempts: attempts per request.
        dtype: dtype on the wire; float32 is exact, uint8 takes a quarter of the bytes.
        model_id, weights_digest: identity that must answer; both null = that of the first answer.
        token_env: environment variable with the bearer token.
    """

    def __init__(
        self,
        urls: Sequence[str],
        deadline_s: float = 60.0,
        attempt_s: float | None = None,
        max_attempts: int = 6,
        dtype: DtypeName = "float32",
        model_id: str | None = None,
        weights_digest: str | None = None,
        token_env: str = "DIGENRL_REWARD_TOKEN",
    ) -> None:
        if (model_id is None) != (weights_digest is None):
            raise ValueError(
                "Pin both model_id and weights_digest (see GET /identity of the service), or "
                "neither."
            )
        pinned = (
            Identity(model_id, weights_digest)
            if model_id is not None and weights_digest is not None
            else None
        )
        attempt_s = deadline_s / 2 if attempt_s is None else attempt_s
        options = ClientOptions(
            deadline_s=deadline_s, attempt_s=attempt_s, max_attempts=max_attempts, dtype=dtype
        )
        self.client = RewardClient(list(urls), options, pinned, token_env)

    @property
    def model_id(self) -> str:
        """Model id of the service, which is asked on first use."""
        return self.client.identity().model_id

    @property
    def weights_digest(self) -> str:
        """Weights digest of the service, which is asked on first use."""
        return self.client.identity().weights_digest

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Return scores [B]. Raises as `RewardClient.score` does."""
        return self.client.score(media, prompts)

    def close(self) -> None:
        """Close the connections."""
        self.client.close()
