"""Reward service: one scorer behind HTTP, bounded in bytes, samples, pixels, time and waiting
requests.

    GET  /health    200 {"status": "ok"}: the process lives; needs no token.
    GET  /identity  `ServiceDescription`: what scores, and what a request may hold.
    POST /score     a request frame (`digenrl.rewards.frames`) -> `ScoreResponse`.

The body is checked while it streams in: its header declares every length, and nothing beyond the
limits is kept. Only a request whose body is complete takes one of the `max_pending` places, so that
slow senders keep nobody out. A request that finds none is refused with 429, before its body is read
if it can be. With a token, every path but /health needs it.

A browser is no client. A request with an `Origin`, or for a host that is not this service, is
refused: a page on the web may then make a browser ask, but learns and changes nothing. So is a
request that says its length in two ways.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import math
import os
import re
import socket
import threading
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from digenrl import extras
from digenrl.rewards import frames
from digenrl.rewards.protocol import (
    Identity,
    RewardUnavailable,
    Scorer,
    call_scorer,
    check_media,
    check_scores,
    contain_exits,
    identity_of,
)

with extras.named_in_errors("serve", "a reward service"):
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Receive, Scope, Send
    from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)
_HOST = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[\w.-]+))(?::\d{0,5})?")
GRACE_S, END_S = 2, 2.5
"""Seconds that requests under way get when the service ends, and seconds until it has ended."""
_CLOSING = frozenset({400, 401, 408, 413, 422})
"""Refusals after which the connection is closed. On an open connection the server would read and
discard the rest of the body."""


@dataclass(frozen=True)
class ServiceLimits:
    """Bounds of one service."""

    max_body_bytes: int = 64 << 20
    max_samples: int = 256
    max_pixels: int = 1 << 26
    """Most pixels (F x H x W) of one sample."""
    max_pending: int = 4
    """Most requests that wait or are scored; the next one gets 429. Bodies that are being read may
    together take as many times `max_body_bytes`."""
    max_connections: int = 64
    """Most open connections. A further connection closes the one that has waited longest for a
    request."""
    head_s: float = 10.0
    """Seconds within which a connection must send the head of its next request, or it is closed."""
    body_s: float = 30.0
    """Seconds within which a body must be complete, or it is refused (408)."""
    score_s: float = 300.0
    """Seconds of scoring after which the answer is 504. The request's place stays taken until the
    scorer returns."""
    retry_after_s: float = 1.0
    """Seconds of Retry-After in a 429."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(
                    f"{name} is {value}: every limit of a reward service is a positive, finite "
                    "number."
                )


class Refused(Exception):
    """A request is answered with a status other than 200."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers


class Guard:
    """Check of the token, and every refusal as JSON, around the handlers of a service.

    Args:
        token: bearer token that requests must carry. None = no token (loopback only, see
            `serve_rewards`).
    """

    def __init__(self, token: str | None) -> None:
        self._token = token

    def _guard_handler(
        self, handler: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return `handler` with a check of the token and with every refusal as JSON."""

        async def guarded_handler(request: Request) -> Response:
            try:
                self._check_token(request)
                return await handler(request)
            except Refused as refused:
                headers = dict(refused.headers or {})
                if refused.status in _CLOSING:
                    headers["Connection"] = "close"
                return JSONResponse({"error": str(refused)}, refused.status, headers)
            except ClientDisconnect:
                return Response(status_code=400)
            except Exception as error:
                # The cause goes to the service's log; a caller learns only its kind.
                log.exception("a request failed")
                return JSONResponse({"error": f"the scorer failed: {type(error).__name__}"}, 500)

        return guarded_handler

    def _check_token(self, request: Request) -> None:
        if self._token is None:
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            raise Refused(401, "a bearer token is needed", {"WWW-Authenticate": "Bearer"})


class RewardService(Guard):
    """Request handlers around one scorer.

    Args:
        scorer: scorer, which a single thread calls with one batch at a time.
        limits: bounds.
        token: see `Guard`.
    """

    def __init__(
        self, scorer: Scorer, limits: ServiceLimits | None = None, token: str | None = None
    ) -> None:
        super().__init__(token)
        self.scorer, self.limits = scorer, limits or ServiceLimits()
        self.identity: Identity = identity_of(scorer)
        self._pending, self._reading = 0, 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="reward-service")

    def make_app(self, hosts: Collection[str] | None = None) -> Gate:
        """Return the ASGI application.

        Args:
            hosts: see `Gate`.
        """
        routes = [
            Route("/health", self._answer_health),
            Route("/identity", self._guard_handler(self._answer_identity)),
            Route("/score", self._guard_handler(self._answer_score), methods=["POST"]),
        ]
        return Gate(Starlette(routes=routes), hosts)

    def make_server(self, hosts: Collection[str] | None = None) -> Server:
        """Return a server of the application. `hosts`: see `Gate`."""
        return server_of(self.make_app(hosts), self.limits)

    async def _answer_health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _answer_identity(self, request: Request) -> Response:
        limits = {name: getattr(self.limits, name) for name in frames.WireLimits.model_fields}
        images = bool(getattr(self.scorer, "reads_images", False))
        return JSONResponse(
            {"protocol": 1, "identity": vars(self.identity), "limits": limits, "images": images}
        )

    async def _answer_score(self, request: Request) -> Response:
        self._require_place()
        try:
            async with asyncio.timeout(self.limits.body_s):
                asked, payload = await self._read_request(request)
        except TimeoutError as error:
            raise Refused(
                408, f"the body was not complete after {self.limits.body_s:g} s"
            ) from error
        self._require_place()
        self._pending += 1
        running: asyncio.Future[Tensor] | None = None
        try:
            running = asyncio.get_running_loop().run_in_executor(
                self._worker, self._call_scorer, asked, payload
            )
            done, _ = await asyncio.wait({running}, timeout=self.limits.score_s)
            if not done:
                raise Refused(504, f"scoring took longer than {self.limits.score_s:g} s")
            return Response(
                frames.encode_response(asked, running.result(), self.identity),
                media_type="application/json",
            )
        finally:
            if running is None or running.done():
                self._release_place()
            else:
                running.add_done_callback(self._release_place)

    def _require_place(self) -> None:
        """Raise Refused while all places are taken."""
        if self._pending >= self.limits.max_pending:
            headers = {"Retry-After": f"{self.limits.retry_after_s:g}"}
            raise Refused(429, f"{self._pending} requests are under way; come back later", headers)

    def _release_place(self, _: object = None) -> None:
        self._pending -= 1

    async def _read_request(self, request: Request) -> tuple[frames.ScoreRequest, bytearray]:
        """Return the request and its payload. Raises Refused as soon as a limit is passed."""
        limit = self.limits.max_body_bytes
        declared = request.headers.get("content-length")
        if declared is not None and (not declared.isdecimal() or int(declared) > limit):
            raise Refused(413, f"the body exceeds {limit} bytes")
        raw, expected = bytearray(), limit
        try:
            return await self._read_frame(request, raw, expected)
        finally:
            self._reading -= len(raw)

    async def _read_frame(
        self, request: Request, raw: bytearray, expected: int
    ) -> tuple[frames.ScoreRequest, bytearray]:
        """Read the frame of a request into `raw`. See `_read_request`."""
        limit = expected
        async for chunk in request.stream():
            if self._reading + len(chunk) > limit * self.limits.max_pending:
                headers = {"Retry-After": f"{self.limits.retry_after_s:g}"}
                raise Refused(429, "too many bodies are being read; come back later", headers)
            if len(raw) + len(chunk) > expected:
                raise Refused(413, f"the body exceeds {expected} bytes")
            raw += chunk
            self._reading += len(chunk)
            if expected == limit and len(raw) >= frames.HEADER.size:
                expected = frames.HEADER.size + sum(self._parse_lengths(raw))
                if expected > limit or len(raw) > expected:
                    raise Refused(
                        413, f"the frame declares {expected} bytes; at most {limit} are read"
                    )
        if len(raw) < frames.HEADER.size or len(raw) != expected:
            raise Refused(400, f"the body ends after {len(raw)} bytes, its frame is longer")
        json_bytes, payload_bytes = self._parse_lengths(raw)
        head = frames.HEADER.size + json_bytes
        try:
            asked = frames.decode_request(bytes(raw[frames.HEADER.size : head]), payload_bytes)
        except frames.FrameError as error:
            raise Refused(422, str(error)) from error
        shape = asked.media.shape
        pixels = math.prod(shape[1:]) // shape[-3]
        if shape[0] > self.limits.max_samples or pixels > self.limits.max_pixels:
            raise Refused(
                413,
                f"media {shape} exceeds {self.limits.max_samples} samples of "
                f"{self.limits.max_pixels} pixels",
            )
        del raw[:head]
        self._reading -= head
        return asked, raw

    @staticmethod
    def _parse_lengths(raw: bytearray) -> tuple[int, int]:
        try:
            return frames.parse_header(bytes(raw[: frames.HEADER.size]))
        except frames.FrameError as error:
            raise Refused(422, str(error)) from error

    def _call_scorer(self, asked: frames.ScoreRequest, payload: bytearray) -> Tensor:
        try:
            media = frames.decode_media(asked.media, payload)
            prompts = frames.decode_prompts(asked, payload, self.limits.max_pixels)
            check_media(media, prompts)
            sound = frames.decode_sound(asked, payload)
        except ValueError as error:  # of which WireError is one
            raise Refused(422, str(error)) from error
        try:
            with torch.no_grad(), contain_exits(self.identity.model_id):
                answer = call_scorer(self.scorer, media, prompts, sound)
                return check_scores(self.identity.model_id, answer, len(prompts))
        except RewardUnavailable as error:
            raise Refused(503, str(error)) from error
        except ValueError as error:
            raise Refused(422, str(error)) from error


class Gate:
    """ASGI application before another one: it refuses requests that no client of ours sends.

    Args:
        app: the application behind it.
        hosts: names and addresses by which clients may call this service, beside those of
            loopback, in small letters; None: any.
        page: path of a page without data, which a browser may open from anywhere, and whose own
            requests are then admitted; None: no request of a browser.
    """

    def __init__(
        self, app: ASGIApp, hosts: Collection[str] | None = None, page: str | None = None
    ) -> None:
        self._app, self._hosts, self._page = app, hosts, page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or hand it on."""
        refused = self._find_refusal(scope) if scope["type"] == "http" else None
        if refused is None:
            await self._app(scope, receive, send)
            return
        status, message = refused
        answer = JSONResponse({"error": message}, status, {"Connection": "close"})
        await answer(scope, receive, send)

    def _find_refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return status and message for a request that is refused."""
        headers: Sequence[tuple[bytes, bytes]] = scope.get("headers", ())
        names = [name.lower() for name, _ in headers]
        if {b"content-length", b"transfer-encoding"} <= {*names} or any(
            names.count(name) > 1 for name in (b"content-length", b"transfer-encoding", b"host")
        ):
            return 400, "the request says its length or its host in two ways"
        browser = b"origin" in names or any(name.startswith(b"sec-fetch-") for name in names)
        if browser and self._page is None:
            return 403, "a browser is no client of this service"
        if browser and not self._from_page(scope, headers):
            return 403, "another page may not ask this service"
        asked = next((value for name, value in headers if name.lower() == b"host"), b"")
        name = host_of(asked.decode("latin-1"))
        if self._hosts is None or is_loopback(name) or name in self._hosts:
            return None
        return 421, "this service has another name; see the key `hosts` of serve-reward"

    def _from_page(self, scope: Scope, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        """Return whether a browser opens the page of this service, or the page itself asks."""
        said = {name.lower(): value.lower() for name, value in headers}
        origin, site = said.get(b"origin"), said.get(b"sec-fetch-site", b"same-origin")
        if origin is not None and origin != b"http://" + said.get(b"host", b""):
            return False
        opens = (scope["method"], said.get(b"sec-fetch-dest")) == ("GET", b"document")
        return site == b"same-origin" or (opens and scope["path"] == self._page)


def host_of(header: str) -> str:
    """Return the name or address in a Host header, in small letters, without the port.

    "" for anything else than a name or an address, and a port.

    >>> host_of("[::1]:8700"), host_of("Example.org.:80"), host_of("10.0.0.1")
    ('::1', 'example.org', '10.0.0.1')
    >>> host_of("127.0.0.1:80@example.org"), host_of("[::1].example.org")
    ('', '')
    """
    found = _HOST.fullmatch(header.strip().lower())
    return "" if found is None else found["address"] or found["name"].removesuffix(".")


class Server(uvicorn.Server):
    """uvicorn's server, which a signal ends within `END_S`, whatever its scorer does."""

    on_end: Callable[[], None] | None = None
    """Called when a signal has begun the end."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the end: requests under way get `GRACE_S`."""
        self._call_on_end()  # when it has ended, uvicorn raises the signal again
        timer = threading.Timer(END_S, self._exit_now, [sig])
        timer.daemon = True
        timer.start()
        super().handle_exit(sig, frame)

    def _call_on_end(self) -> None:
        if self.on_end is not None:
            with suppress(Exception):
                self.on_end()

    def _exit_now(self, sig: int) -> None:
        os._exit(128 + sig)


def server_of(app: ASGIApp, limits: ServiceLimits) -> Server:
    """Return a server of an application that also bounds connections, which uvicorn itself does
    not."""
    config = uvicorn.Config(
        app,
        http=partial(_Connection, limits=limits),  # type: ignore[arg-type]  # called as the class would be
        ws="none",
        # accepted at once, before any of them can be refused
        backlog=limits.max_connections,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=GRACE_S,
    )
    return Server(config)


class _Connection(H11Protocol):
    """HTTP connection with a timeout for the head of a request."""

    def __init__(self, *, limits: ServiceLimits, **server: Any) -> None:
        super().__init__(**server)
        self._limits = limits
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self._limits.max_connections:
            waiting = [
                (other._timer.when(), other)
                for other in self.connections
                if isinstance(other, _Connection) and other._timer
            ]
            if not waiting:
                transport.abort()
            else:
                _, oldest = min(waiting, key=itemgetter(0))
                # Its end is told later. Left in the set, it would be chosen again for each of a
                # burst of connections.
                oldest._stop_timer()
                self.connections.discard(oldest)
                oldest.transport.abort()
        super().connection_made(transport)
        self._set_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._set_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._set_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def _set_timer(self) -> None:
        """Start the timer that runs from the end of a request to the end of the next request's
        head."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(self._limits.head_s, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def is_loopback(host: str) -> bool:
    """Return whether `host` can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve_rewards(
    service: RewardService,
    host: str,
    port: int,
    announce: Callable[[str], None],
    hosts: Sequence[str] = (),
    on_end: Callable[[], None] | None = None,
) -> None:
    """Serve until interrupted. SIGTERM and SIGINT end it within `END_S`.

    Args:
        service: what to serve. It must have a token: other users of this machine reach loopback
            too.
        host: address to bind.
        port: port to bind; 0 = any free port.
        announce: called once with the base URL, when connections are accepted.
        hosts: further names by which clients may call the service.
        on_end: called when a signal has begun the end.

    Raises:
        ValueError: there is no token.
        OSError: the address cannot be bound.
    """
    if service._token is None:
        raise ValueError(
            f"{host} can be reached by others: a reward service needs a token everywhere."
        )
    names = {host, socket.gethostname(), *hosts}
    if not is_loopback(host):
        names |= {address for name in names for address in _host_addresses(name)}
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listener:
        bound = listener.getsockname()[1]
        announce(f"http://{f'[{host}]' if ':' in host else host}:{bound}")
        server = service.make_server({name.lower() for name in names})
        server.on_end = on_end
        server.run(sockets=[listener])


def _host_addresses(name: str) -> set[str]:
    """Return the addresses of a host's name; none of a name that nobody knows."""
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(name, None)}
    except OSError:
        return set()


def describe_service(service: RewardService) -> str:
    """Return a line of JSON for the start of a log: identity and limits, never the token."""
    return json.dumps({"identity": vars(service.identity), "limits": vars(service.limits)})
