"""The real service over a real socket: what it answers, what it refuses, and when."""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import sys
import threading
import time

import httpx
import pytest
import torch

from digenrl.data import load_prompts
from digenrl.rewards import frames
from digenrl.rewards.protocol import Identity, RewardError, RewardUnavailable, source_images
from digenrl.rewards.remote import RemoteScorer
from digenrl.rewards.service import RewardService, ServiceLimits, is_loopback, serve_rewards
from digenrl.rewards.suite import RewardSuite
from digenrl.types import Prompt
from tests.rewards.services import Brightness, running

pytestmark = pytest.mark.processes

PROMPTS = [Prompt(f"p{i}", target="t", metadata={"k": [1, None]}) for i in range(5)]
MEDIA = torch.rand(5, 3, 4, 4, generator=torch.Generator().manual_seed(0))
FRAME = frames.encode_request(MEDIA, PROMPTS, "request")


def post(url, body, **headers):
    return httpx.post(url + "/score", content=body, headers=headers, timeout=5, trust_env=False)


def test_scores_are_those_of_the_scorer_bit_by_bit():
    media = MEDIA.clone()
    media[2] = 0
    with running(RewardService(Brightness())) as url:
        client = RemoteScorer([url])
        scores = client(media, PROMPTS)
        assert client.pinned_identity() == RewardService(Brightness()).identity
        client.close()
        assert httpx.get(url + "/health", trust_env=False).json() == {"status": "ok"}
    expected = Brightness()(media, PROMPTS)
    assert torch.equal(scores[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])
    assert math.isnan(scores[2])


def test_a_suite_may_place_its_scorers_behind_http():
    with running(RewardService(Brightness())) as url:
        scorer = {"_target_": "reward_models.jpeg_size.JpegSize"}
        suite = RewardSuite({"r": {"scorer": scorer}}, placement="http", urls={"r": [url]})
        assert torch.equal(suite.score(MEDIA, PROMPTS)["r"], Brightness()(MEDIA, PROMPTS))
        assert suite.scorer_identities()["r"] == Identity("brightness", "d1")
        suite.close()
    with pytest.raises(ValueError, match=r"list its services under reward\.urls\.r"):
        RewardSuite({"r": {"scorer": scorer}}, placement="http")


def test_a_batch_is_cut_to_the_limits_of_the_service():
    calls = []

    def scorer(media, prompts):
        calls.append(len(prompts))
        return media.flatten(1).mean(1)

    with running(RewardService(scorer, ServiceLimits(max_samples=2))) as url:
        client = RemoteScorer([url])
        torch.testing.assert_close(client(MEDIA, PROMPTS), MEDIA.flatten(1).mean(1))
        client.close()
        assert sorted(calls) == [1, 2, 2]
    with running(RewardService(scorer, ServiceLimits(max_pixels=15))) as url:
        client = RemoteScorer([url])
        with pytest.raises(RewardError, match="raise its limits"):
            client(MEDIA, PROMPTS)
        client.close()


def test_a_token_is_needed_everywhere_but_for_health(monkeypatch):
    with running(RewardService(Brightness(), token="right")) as url:
        assert httpx.get(url + "/health", trust_env=False).status_code == 200
        assert httpx.get(url + "/identity", trust_env=False).status_code == 401
        for given in ("", "Bearer", "Bearer wrong", "right", "bearer right"):
            assert post(url, FRAME, Authorization=given).status_code == 401
        assert post(url, FRAME, Authorization="Bearer right").status_code == 200
        monkeypatch.setenv("DIGENRL_REWARD_TOKEN", "wrong")
        client = RemoteScorer([url])
        with pytest.raises(RewardError, match="token"):
            client(MEDIA, PROMPTS)
        client.close()


def test_a_token_is_obligatory_everywhere():
    for host in ("0.0.0.0", "127.0.0.1", "::1"):
        with pytest.raises(ValueError, match="needs a token"):
            serve_rewards(RewardService(Brightness()), host, 0, print)
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("example.org")


BROKEN = {
    "other magic": (b"PK\x03\x04" + FRAME[4:], 422),
    "truncated": (FRAME[:-1], 400),
    "trailing byte": (FRAME + b"x", 413),
    "no header": (b"abc", 400),
    "empty": (b"", 400),
    "declares a terabyte": (frames.HEADER.pack(frames.MAGIC, 10, 1 << 40) + b"x" * 64, 413),
    "declares 1 GB of JSON": (frames.HEADER.pack(frames.MAGIC, 1 << 30, 0) + b"x" * 64, 422),
    "pickle": (b"\x80\x04\x95" + b"x" * 100, 422),
    "NaN media": (frames.encode_request(torch.full((1, 3, 2, 2), math.nan), PROMPTS[:1], "r"), 422),
    "media beyond [0, 1]": (
        frames.encode_request(torch.full((1, 3, 2, 2), 2.0), PROMPTS[:1], "r"),
        422,
    ),
    "four channels": (frames.encode_request(torch.zeros(1, 4, 2, 2), PROMPTS[:1], "r"), 422),
    "too many samples": (
        frames.encode_request(torch.zeros(9, 1, 1, 1), [Prompt("p")] * 9, "r"),
        413,
    ),
    "too many pixels": (
        frames.encode_request(torch.zeros(1, 1, 300, 300), [Prompt("p")], "r"),
        413,
    ),
}


def test_broken_requests_are_refused_and_the_service_lives_on():
    limits = ServiceLimits(max_body_bytes=1 << 20, max_samples=8, max_pixels=1 << 16)
    with running(RewardService(Brightness(), limits)) as url:
        got = {name: post(url, body).status_code for name, (body, _) in BROKEN.items()}
        assert got == {name: code for name, (_, code) in BROKEN.items()}
        assert post(url, FRAME).status_code == 200


def test_a_body_beyond_the_limit_is_refused_while_it_streams():
    sent = 0

    def endless():
        nonlocal sent
        yield frames.HEADER.pack(frames.MAGIC, 100, 1 << 19)
        while sent < 1 << 30:
            sent += 1 << 16
            yield b"\0" * (1 << 16)

    limits = ServiceLimits(max_body_bytes=1 << 20)
    with running(RewardService(Brightness(), limits)) as url:
        with contextlib.suppress(
            httpx.TransportError
        ):  # the service may close before the answer is read
            assert post(url, endless()).status_code == 413
        assert sent < 1 << 26
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=3) as connection:
            connection.sendall(
                b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 1073741824\r\n\r\n"
            )
            assert b"413" in connection.recv(1000).split(b"\r\n")[0]


def test_more_requests_than_places_get_429_and_then_a_place():
    gate, entered = threading.Event(), threading.Event()

    def scorer(media, prompts):
        entered.set()
        gate.wait(5)
        return media.flatten(1).mean(1)

    with running(RewardService(scorer, ServiceLimits(max_pending=1, retry_after_s=0.05))) as url:
        answers = []
        first = threading.Thread(target=lambda: answers.append(post(url, FRAME).status_code))
        first.start()
        assert entered.wait(5)
        refused = post(url, FRAME)
        assert refused.status_code == 429
        assert refused.headers["Retry-After"] == "0.05"
        threading.Timer(0.2, gate.set).start()
        client = RemoteScorer([url], max_attempts=100)
        torch.testing.assert_close(client(MEDIA, PROMPTS), MEDIA.flatten(1).mean(1))
        client.close()
        first.join(5)
        assert answers == [200]


def test_slow_bodies_and_slow_scorers_are_answered_in_time():
    def scorer(media, prompts):
        time.sleep(0.5)
        return media.flatten(1).mean(1)

    with running(
        RewardService(scorer, ServiceLimits(body_s=0.2, score_s=0.2, max_pending=2))
    ) as url:
        assert post(url, FRAME).status_code == 504
        time.sleep(0.5)
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=3) as connection:
            connection.sendall(
                b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n" + FRAME[:20]
            )
            assert b"408" in connection.recv(1000).split(b"\r\n")[0]


@pytest.mark.parametrize(
    ("scorer", "code"),
    [
        (lambda media, prompts: torch.zeros(2), 500),
        (lambda media, prompts: {}["secret-in-a-trace"], 500),
        (lambda media, prompts: sys.exit("secret-in-a-trace"), 500),
    ],
)
def test_a_broken_scorer_is_an_error_without_its_details(scorer, code):
    with running(RewardService(scorer)) as url:
        answer = post(url, FRAME)
        assert answer.status_code == code
        assert "secret-in-a-trace" not in answer.text
        assert post(url, FRAME).status_code == code, "the service lives on"


def test_an_unavailable_scorer_is_503_which_clients_take_as_missing():
    def scorer(media, prompts):
        raise RewardUnavailable("the judge is away")

    with running(RewardService(scorer)) as url:
        assert post(url, FRAME).status_code == 503
        client = RemoteScorer([url], max_attempts=2)
        with pytest.raises(RewardUnavailable, match="503"):
            client(MEDIA, PROMPTS)
        client.close()


def test_limits_must_be_positive_and_finite():
    for value in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match="body_s"):
            ServiceLimits(body_s=value)
    assert struct.calcsize(">4sIQ") == frames.HEADER.size


def raw(url: str, head: bytes, body: bytes = b"") -> bytes:
    """The first line of the answer to a request as it stands."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(head + b"\r\n\r\n" + body)
        return connection.recv(1000).split(b"\r\n")[0]


OWN = (
    b"POST /score HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer t\r\nContent-Length: %d"
    % (len(FRAME))
)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (OWN, b"200"),
        (OWN.replace(b"127.0.0.1", b"localhost:80"), b"200"),
        (OWN.replace(b"127.0.0.1", b"[::1]:1"), b"200"),
        (OWN.replace(b"127.0.0.1", b"proxy.example"), b"200"),
        (OWN.replace(b"127.0.0.1", b"evil.example"), b"421"),
        (OWN.replace(b"127.0.0.1", b"127.0.0.1.evil.example"), b"421"),
        (OWN.replace(b"127.0.0.1", b""), b"421"),
        (OWN.replace(b"127.0.0.1", b"127.0.0.1:80@evil.example"), b"421"),
        (OWN.replace(b"127.0.0.1", b"[127.0.0.1].evil.example"), b"421"),
        (OWN.replace(b"127.0.0.1", b"[::1].evil.example:80"), b"421"),
        (OWN.replace(b"127.0.0.1", b"127.0.0.1:x"), b"421"),
        (OWN + b"\r\nOrigin: http://127.0.0.1", b"403"),
        (OWN + b"\r\nOrigin: null", b"403"),
        (OWN + b"\r\nSec-Fetch-Site: cross-site", b"403"),
        (OWN + b"\r\nTransfer-Encoding: chunked", b"400"),
        (OWN + b"\r\nTransfer-Encoding: identity", b"400"),
        (OWN + b"\r\nContent-Length: 3", b"400"),
        (OWN + b"\r\nHost: 127.0.0.1", b"400"),
        (b"GET /health HTTP/1.1\r\nHost: evil.example", b"421"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nOrigin: http://x", b"403"),
    ],
)
def test_a_browser_another_host_and_two_lengths_are_refused(head: bytes, status: bytes) -> None:
    service = RewardService(Brightness(), token="t")
    with running(service, hosts={"proxy.example"}) as url:
        assert status in raw(url, head, FRAME)
        assert b"200" in raw(url, OWN, FRAME), "the service lives on"


def test_slow_bodies_take_no_places() -> None:
    limits = ServiceLimits(max_pending=1, body_s=20.0)
    slow = b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n" + FRAME[:20]
    with running(RewardService(Brightness(), limits)) as url:
        held = half_open(url, 20, slow)
        time.sleep(0.3)
        assert post(url, FRAME).status_code == 200
        for connection in held:
            connection.close()


def test_bodies_that_are_being_read_are_bounded_together() -> None:
    limits = ServiceLimits(max_pending=2, max_body_bytes=1 << 16, body_s=20.0)
    head = b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 65000\r\n\r\n"
    frame = frames.HEADER.pack(frames.MAGIC, 100, 65000 - 100 - frames.HEADER.size)
    service = RewardService(Brightness(), limits)
    with running(service) as url:
        held = half_open(url, 6, head + frame + b"x" * 40_000)
        time.sleep(0.5)
        assert service._reading <= 2 << 16
        for connection in held:
            connection.close()
        time.sleep(0.5)
        assert service._reading == 0
        assert post(url, FRAME).status_code == 200


HALF = b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Le"


def half_open(url: str, count: int, opening: bytes = HALF) -> list[socket.socket]:
    host, port = url.removeprefix("http://").split(":")
    found = [socket.create_connection((host, int(port)), timeout=10) for _ in range(count)]
    for connection in found:
        connection.sendall(opening)
    return found


def ended(connection: socket.socket) -> bool:
    """Whether the service closes the connection within 10 s."""
    try:
        while connection.recv(1 << 12):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def test_half_open_requests_neither_stay_nor_keep_others_out():
    with running(RewardService(Brightness(), ServiceLimits(max_connections=16, head_s=1.0))) as url:
        flood = half_open(url, 48)
        assert post(url, FRAME).status_code == 200
        began = time.monotonic()
        assert all(ended(connection) for connection in flood)
        assert time.monotonic() - began < 5.0
        (slow,) = half_open(
            url, 1, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /hea"
        )  # the second head never ends
        assert ended(slow)
        assert post(url, FRAME).status_code == 200


def test_a_burst_leaves_no_more_connections_than_the_limit():
    with running(RewardService(Brightness(), ServiceLimits(max_connections=8, head_s=60.0))) as url:
        flood = half_open(url, 24)
        assert post(url, FRAME).status_code == 200
        time.sleep(0.5)
        still_open = 0
        for connection in flood:
            connection.setblocking(False)
            try:
                connection.recv(1)
            except BlockingIOError:
                still_open += 1
            except ConnectionError:
                pass
        assert still_open <= 8


def test_the_oldest_half_open_connection_makes_room() -> None:
    with running(RewardService(Brightness(), ServiceLimits(max_connections=4, head_s=60.0))) as url:
        found = []
        for _ in range(6):
            found += half_open(url, 1)
            time.sleep(0.05)
        assert all(ended(connection) for connection in found[:2])
        for connection in found[2:]:
            connection.setblocking(False)
            with pytest.raises(BlockingIOError):
                connection.recv(1)


def test_a_request_under_way_outlives_the_time_for_heads_and_the_limit_of_connections():
    def scorer(media, prompts):
        time.sleep(0.8)
        return media.flatten(1).mean(1)

    with running(RewardService(scorer, ServiceLimits(max_connections=4, head_s=0.2))) as url:
        answers = []
        first = threading.Thread(target=lambda: answers.append(post(url, FRAME).status_code))
        first.start()
        time.sleep(0.3)
        flood = half_open(url, 20)
        first.join(10)
        assert answers == [200]
        assert all(ended(connection) for connection in flood)


class Likeness:
    """1 - the mean difference from the source; asks for images."""

    reads_images = True

    def __call__(self, media, prompts):
        return 1.0 - (media - source_images(media, prompts)).abs().flatten(1).mean(1)


def test_images_go_once_to_a_scorer_that_asks_and_never_to_another():
    edits = load_prompts("edits.jsonl")
    asked = [edits[0], edits[0], edits[1], edits[2]]
    media = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    with running(RewardService(Likeness())) as url, running(RewardService(Brightness())) as other:
        client, without = RemoteScorer([url]), RemoteScorer([other])
        assert torch.equal(client(media, asked), Likeness()(media, asked))
        assert torch.equal(without(media, asked), Brightness()(media, asked))
        frame = bytearray(frames.encode_request(media, asked, "request", images=True))
        files = {image.digest: image.size for prompt in asked for image in prompt.images}
        plain = frames.encode_request(media, asked, "request")
        assert len(frame) > len(plain) + sum(files.values())
        assert len(frame) < len(plain) + sum(files.values()) + 2000, "each file travels once"
        frame[-30] ^= 1
        assert "is not what its digest says" in post(url, bytes(frame)).json()["error"]
        small = RewardService(Likeness(), ServiceLimits(max_pixels=64 * 63))
    with running(small) as url:
        refused = post(url, frames.encode_request(media, asked, "request", images=True))
        assert refused.status_code == 422
        assert "64x64 pixels" in refused.json()["error"]
        with pytest.raises(RewardError, match=r"HTTP 422: .*64x64 pixels.*: check service"):
            RemoteScorer([url])(media, asked)
        client.close()
        without.close()
