"""Scorer that runs elsewhere: a client of `digenrl serve-reward`, with bounds, retries and a pinned
identity.

An answer that cannot be trusted becomes a missing score or an error, never a number.

| answer | what happens |
|---|---|
| refused, reset, time-out, 408, 500, 502-504 | retried (scoring is idempotent), at the URL that may be asked soonest |
| 429 | the same, without making the URL's pauses longer: the service lives |
| 3xx, other 4xx | RewardError at once: the set-up is wrong, and a redirect is never followed |
| not the schema, wrong ids, order or number, too long | missing, not retried; too many missing scores end the run (`reward.max_missing_share`) |
| another model_id or weights_digest than pinned | RewardError at once |

A URL that fails is left alone for a random pause, whose bound doubles with each failure in a row, or for the
seconds of Retry-After.
"""  # noqa: E501

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import random
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypeVar

import httpx
import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal
from torch import Tensor

from digenrl.images import ImageError
from digenrl.rewards import frames
from digenrl.rewards.protocol import Identity, RewardError, RewardUnavailable
from digenrl.types import Prompt, Sound

_Result = TypeVar("_Result")
_RETRIED = frozenset({408, 429, 500, 502, 503, 504})
_JSON_ALLOWANCE = 2048
"""Bytes of JSON reserved per sample, beside its prompt, when a batch is cut to the service's body
limit."""
_BACKOFF_S, _LONGEST_BACKOFF_S = 0.25, 10.0
"""Bounds of a URL's pause after its first failure, and of any pause."""
_MAX_ANSWER_BYTES = 1 << 20


class _Retry(Exception):
    """An attempt failed in a way that a retry may not."""

    def __init__(
        self,
        endpoint: _Endpoint,
        cause: str,
        status: int | None = None,
        after_s: float | None = None,
    ) -> None:
        """Keep the HTTP status; None = no answer came."""
        super().__init__(f"{endpoint.url}: {cause}")
        self.endpoint, self.status, self.after_s = endpoint, status, after_s


@dataclass
class _Endpoint:
    url: str
    limits: frames.WireLimits | None = None
    """Limits of the service; None until its first answer to GET /identity."""
    images: bool = False
    """Whether the service needs the images of prompts."""
    not_before: float = 0.0
    """Monotonic time of the next call, after a failure's pause or a Retry-After."""
    failures: int = 0
    """Failures since the last answer."""
    failure: _Retry | None = None
    """Latest failure."""


class Unanswered(RewardUnavailable):
    """No service answered at all: connections were refused, reset or too slow."""


@dataclass
class _Outcome:
    scores: Tensor
    errors: list[Exception] = field(default_factory=list)


class RemoteScorer:
    """Scorer that asks one or more equal services. Seconds are wall time by the monotonic clock.

    Args:
        urls: base URLs, `http(s)://host:port`, without user information (secrets come from the
            environment); requests are spread over them.
        deadline_s: seconds within which every call returns or raises, whatever happens.
        attempt_s: seconds of the longest single attempt; None = half of `deadline_s`.
        max_attempts: attempts per request, over all URLs.
        dtype: dtype on the wire. float32 is exact. uint8 takes a quarter of the bytes and rounds to
            1/255.
        model_id, weights_digest: identity that every answer must have; both null = the identity of
            the first answer.
        token_env: environment variable with the bearer token; no token is sent if the variable is
            unset or empty.
        token: the bearer token itself, in place of the variable's.
        hears: whether the services score sound too, which is then sent to them.
    """

    def __init__(
        self,
        urls: Sequence[str],
        deadline_s: float = 60.0,
        attempt_s: float | None = None,
        max_attempts: int = 6,
        dtype: frames.DtypeName = "float32",
        model_id: str | None = None,
        weights_digest: str | None = None,
        token_env: str = "DIGENRL_REWARD_TOKEN",
        token: str | None = None,
        hears: bool = False,
    ) -> None:
        self.hears = hears
        attempt_s = deadline_s / 2 if attempt_s is None else attempt_s
        if not urls or min(deadline_s, attempt_s, max_attempts) <= 0:
            raise ValueError(
                f"{len(urls)} urls, deadline_s = {deadline_s}, attempt_s = {attempt_s}, "
                f"max_attempts = {max_attempts}: give one URL or more, and positive bounds."
            )
        if dtype not in frames.WIRE_DTYPES:
            raise ValueError(f"dtype is {dtype!r}: choose one of {', '.join(frames.WIRE_DTYPES)}.")
        if (model_id is None) != (weights_digest is None):
            raise ValueError(
                "Pin both model_id and weights_digest (see GET /identity of the service), or "
                "neither."
            )
        self._deadline_s, self._attempt_s = deadline_s, attempt_s
        self._max_attempts, self._dtype = max_attempts, dtype
        self._endpoints = [self._parse_endpoint(url) for url in urls]
        self._pinned: Identity | None = None
        if model_id is not None and weights_digest is not None:
            self._pinned = Identity(model_id, weights_digest)
        self._token = token or os.environ.get(token_env) or None
        self._turn = 0
        self._lock = threading.Lock()
        self._portal: BlockingPortal | None = None
        """Event loop in a thread of its own, from the first call on: deadlines are then of a whole
        call, while timeouts of sockets are of each read."""
        self._threads = ExitStack()
        self._http = httpx.AsyncClient(follow_redirects=False, trust_env=False, timeout=None)

    @property
    def model_id(self) -> str:
        """Model id of the service, which is asked on first use."""
        return self.pinned_identity().model_id

    @property
    def weights_digest(self) -> str:
        """Weights digest of the service, which is asked on first use."""
        return self.pinned_identity().weights_digest

    def __call__(
        self, media: Tensor, prompts: Sequence[Prompt], sound: Sound | None = None
    ) -> Tensor:
        """Return scores [B] fp32; NaN = the service has no score for the sample.

        Raises:
            RewardUnavailable: some or all samples got no scores; `scores` holds the others. It is
                `Unanswered` if no service answered at all.
            RewardError: wrong set-up or changed identity; see the module's table.
        """
        deadline = time.monotonic() + self._deadline_s
        outcome = self._run_in_thread(self._score_batch, media, prompts, sound, deadline)
        if outcome.errors:
            unanswered = any(isinstance(error, Unanswered) for error in outcome.errors)
            kind = Unanswered if unanswered else RewardUnavailable
            raise kind("; ".join(dict.fromkeys(map(str, outcome.errors))), outcome.scores)
        return outcome.scores

    def pinned_identity(self) -> Identity:
        """Return the pinned identity, and ask a service for it if none has answered yet. Raises as
        a call does."""
        if self._pinned is None:
            deadline = time.monotonic() + self._deadline_s
            self._run_in_thread(self._retry_request, None, deadline)
        assert self._pinned is not None
        return self._pinned

    def close(self) -> None:
        """Close connections and the client's thread. Idempotent."""
        with self._lock:
            portal, self._portal = self._portal, None
        if portal is not None:
            portal.call(self._http.aclose)
            self._threads.close()

    def _run_in_thread(
        self, work: Callable[..., Awaitable[_Result]], *arguments: object
    ) -> _Result:
        """Return the result of `work(*arguments)`. Raises TimeoutError soon after the deadline."""
        with self._lock:
            if self._portal is None:
                self._portal = self._threads.enter_context(start_blocking_portal())
            future = self._portal.start_task_soon(work, *arguments)
        try:
            return future.result(self._deadline_s + 5.0)
        finally:
            future.cancel()

    def _parse_endpoint(self, url: str) -> _Endpoint:
        parsed = httpx.URL(url)
        if parsed.scheme not in ("http", "https") or not parsed.host or parsed.userinfo:
            raise ValueError(
                f"{parsed.copy_with(userinfo=b'')} is no reward URL: write http(s)://host:port, "
                "without user or password (the token comes from the environment)."
            )
        return _Endpoint(str(parsed).rstrip("/"))

    async def _score_batch(
        self, media: Tensor, prompts: Sequence[Prompt], sound: Sound | None, deadline: float
    ) -> _Outcome:
        outcome = _Outcome(torch.full((len(prompts),), math.nan))
        try:
            if not any(endpoint.limits for endpoint in self._endpoints):
                await self._retry_request(None, deadline)
            images = any(endpoint.images for endpoint in self._endpoints)
            heard = 0 if sound is None else sound.waveform[0].numel() * torch.float32.itemsize
            parts = self._split_rows(media, prompts, images, heard)
        except RewardUnavailable as error:
            outcome.errors.append(error)
            return outcome
        gate = asyncio.Semaphore(len(self._endpoints))

        async def score_rows(rows: slice) -> None:
            async with gate:
                try:
                    request_id = uuid.uuid4().hex
                    own = None if sound is None else sound.rows(rows)
                    body = frames.encode_request(
                        media[rows], prompts[rows], request_id, self._dtype, images, own
                    )
                    scores = await self._retry_request(
                        (body, request_id, len(prompts[rows])), deadline
                    )
                    assert scores is not None
                    outcome.scores[rows] = scores
                except RewardUnavailable as error:
                    outcome.errors.append(error)
                except ImageError as error:
                    raise RewardError(str(error)) from error

        results = await asyncio.gather(
            *(score_rows(rows) for rows in parts), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return outcome

    def _split_rows(
        self, media: Tensor, prompts: Sequence[Prompt], images: bool, heard: int
    ) -> list[slice]:
        """Return the rows of each request: as many as the known service with the smallest limits
        takes. `heard`: bytes of a sample's sound."""
        limits = [endpoint.limits for endpoint in self._endpoints if endpoint.limits is not None]
        sample_bytes = media[0].numel() * frames.WIRE_DTYPES[self._dtype].itemsize
        longest = max(
            len(repr(prompt)) * 6 for prompt in prompts
        )  # JSON writes a character as at most 6 bytes
        files = (
            max(sum(image.size for image in prompt.images) for prompt in prompts) if images else 0
        )
        room = sample_bytes + heard + longest + files + _JSON_ALLOWANCE
        fits = min((limit.max_body_bytes - frames.HEADER.size) // room for limit in limits)
        pixels = media[0].numel() // media.shape[-3]
        if fits < 1 or pixels > min(limit.max_pixels for limit in limits):
            raise RewardError(
                f"A sample {list(media.shape[1:])} ({self._dtype}) is "
                f"{sample_bytes + heard + files} bytes, {pixels} "
                f"pixels; the reward service takes {limits}: raise its limits, or send dtype=uint8."
            )
        step = min(fits, *(limit.max_samples for limit in limits))
        return [
            slice(start, min(start + step, len(prompts))) for start in range(0, len(prompts), step)
        ]

    async def _retry_request(
        self, request: tuple[bytes, str, int] | None, deadline: float
    ) -> Tensor | None:
        """Attempts until one succeeds: scores of `request`, or None after a description (`request`
        None)."""
        failure = None
        for _ in range(self._max_attempts):
            endpoint, wait = self._choose_endpoint(time.monotonic())
            if time.monotonic() + wait >= deadline:
                raise self._given_up(endpoint.failure)
            await asyncio.sleep(wait)
            limit = min(self._attempt_s, deadline - time.monotonic())
            try:
                async with asyncio.timeout(limit):
                    return await self._ask_endpoint(endpoint, request)
            except (TimeoutError, httpx.TransportError) as error:
                failure = _Retry(endpoint, repr(error))
            except _Retry as error:
                failure = error
            self._back_off(endpoint, failure)
        raise self._given_up(failure) from failure

    def _back_off(self, endpoint: _Endpoint, failure: _Retry) -> None:
        """Leave an endpoint alone after a failure."""
        endpoint.failure = failure
        endpoint.failures += failure.status != 429
        bound = _BACKOFF_S * 2.0 ** min(endpoint.failures, 32)
        pause = random.uniform(0.0, min(_LONGEST_BACKOFF_S, bound))
        after = pause if failure.after_s is None else failure.after_s
        endpoint.not_before = time.monotonic() + after

    def _given_up(self, failure: _Retry | None) -> RewardUnavailable:
        kind = Unanswered if failure is None or failure.status is None else RewardUnavailable
        cause = failure or "no attempt was possible"
        return kind(f"no scores within {self._deadline_s:g} s; last failure: {cause}")

    def _choose_endpoint(self, now: float) -> tuple[_Endpoint, float]:
        """Return the endpoint that may be called soonest (in turn among equals), and the seconds
        until then."""
        self._turn += 1
        first = self._turn % len(self._endpoints)
        order = self._endpoints[first:] + self._endpoints[:first]
        waits = [max(endpoint.not_before - now, 0.0) for endpoint in order]
        return order[waits.index(min(waits))], min(waits)

    async def _ask_endpoint(
        self, endpoint: _Endpoint, request: tuple[bytes, str, int] | None
    ) -> Tensor | None:
        if endpoint.limits is None:
            description = self._parse_answer(
                frames.decode_description, await self._send_http(endpoint, "GET", "/identity")
            )
            self._pin_identity(endpoint, description.identity)
            endpoint.limits, endpoint.images = description.limits, description.images
        if request is None:
            return None
        body, request_id, samples = request
        raw = await self._send_http(endpoint, "POST", "/score", body)
        scores, identity = self._parse_answer(
            lambda document: frames.decode_response(document, request_id, samples), raw
        )
        self._pin_identity(endpoint, identity)
        return scores

    async def _send_http(
        self, endpoint: _Endpoint, method: str, path: str, body: bytes | None = None
    ) -> bytes:
        """Body of a 200 answer, at most `max_response_bytes`. Raises _Retry,
        RewardUnavailable, RewardError, httpx errors."""
        url = endpoint.url + path
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/octet-stream"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        async with self._http.stream(method, url, content=body, headers=headers) as response:
            if response.status_code in _RETRIED:
                cause = f"HTTP {response.status_code}{await self._refusal_cause(response)}"
                after_s = _retry_seconds(response.headers.get("Retry-After"))
                raise _Retry(endpoint, cause, response.status_code, after_s)
            endpoint.failures = 0
            if response.status_code != 200:
                cause = await self._refusal_cause(response)
                raise RewardError(_refusal_text(method, url, response, cause))
            raw = bytearray()
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise RewardUnavailable(f"{url}: the answer is compressed, which was not asked for")
            async for chunk in response.aiter_raw(1 << 16):
                raw += chunk
                if len(raw) > _MAX_ANSWER_BYTES:
                    raise RewardUnavailable(f"{url}: the answer exceeds {_MAX_ANSWER_BYTES} bytes")
        return bytes(raw)

    async def _refusal_cause(self, response: httpx.Response) -> str:
        """Return what a service says about its refusal, as ": ...", without the token; "" where it
        says nothing."""
        async for raw in response.aiter_raw(1024):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                cause = " ".join(str(json.loads(raw)["error"]).split())
                return f": {cause.replace(self._token, '[token]') if self._token else cause}"
            break
        return ""

    def _parse_answer(self, decode: Callable[[bytes], _Result], raw: bytes) -> _Result:
        try:
            return decode(raw)
        except frames.FrameError as error:
            raise RewardUnavailable(f"malformed answer: {error}") from error

    def _pin_identity(self, endpoint: _Endpoint, identity: Identity) -> None:
        with self._lock:
            if self._pinned is None:
                self._pinned = identity
        if identity != self._pinned:
            raise RewardError(
                f"{endpoint.url} scores with {identity}, this run is pinned to {self._pinned}: "
                "serve the pinned model again, or start a new run."
            )


def _retry_seconds(retry_after: str | None) -> float | None:
    """Return the seconds of a Retry-After header; None where it says none (a date counts so)."""
    try:
        seconds = float(retry_after or "nan")
    except ValueError:
        return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _refusal_text(method: str, url: str, response: httpx.Response, cause: str) -> str:
    remedy = {
        401: "set the token's environment variable to the service's token",
        403: "set the token's environment variable to the service's token",
        404: "check that the URL is a digenrl reward service",
        413: "raise the service's limits, or send smaller batches",
    }.get(
        response.status_code,
        "redirects are not followed" if response.is_redirect else "check service and URL",
    )
    return f"{method} {url} answered HTTP {response.status_code}{cause}: {remedy}."
