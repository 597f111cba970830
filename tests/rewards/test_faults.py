"""Fault scripts against the reward client: the exact number of calls, the right outcome, no
silently wrong sample."""

from __future__ import annotations

import json
import math
import random
import socket
import time

import pytest
import torch

from digenrl.rewards import remote
from digenrl.rewards.protocol import RewardError, RewardUnavailable
from digenrl.rewards.remote import RemoteScorer
from digenrl.types import Prompt
from tests.rewards.services import edited, good, scripted, status

pytestmark = pytest.mark.processes

PROMPTS = [Prompt("a"), Prompt("b"), Prompt("c")]
MEDIA = torch.rand(3, 3, 4, 4, generator=torch.Generator().manual_seed(0))
HONEST = [0.25, 1.25, 2.25]
QUICK = {"deadline_s": 3.0, "attempt_s": 1.0, "max_attempts": 3}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(remote, "_BACKOFF_S", 0.01)


def ask(url, **arguments):
    """(scores as a list with None for missing, error or None)."""
    client = RemoteScorer([url] if isinstance(url, str) else url, **QUICK | arguments)
    try:
        return client(MEDIA, PROMPTS).tolist(), None
    except RewardUnavailable as error:
        return [None if math.isnan(score) else score for score in error.scores.tolist()], error
    except RewardError as error:
        return None, error
    finally:
        client.close()


def slow(handler, honest):
    time.sleep(0.6)
    good(handler, honest)


def set_score(value):
    return edited(lambda honest: honest["scores"][1].update(score=value))


def swap(honest):
    honest["scores"].reverse()


def huge(handler, honest):
    handler.send_response(200)
    handler.end_headers()
    try:
        for _ in range(1 << 10):
            handler.wfile.write(b" " * (1 << 20))
    except OSError:
        handler.close_connection = True


PASSING = {
    "429 with Retry-After": ([status(429, ("Retry-After", "0")), good], 2),
    "429 without": ([status(429), good], 2),
    "500": ([status(500), good], 2),
    "502 then 503": ([status(502), status(503), good], 3),
    "reset": ([lambda handler, honest: handler.reset(), good], 2),
    "slow once": ([slow, good], 2),
}


@pytest.mark.parametrize("fault", PASSING)
def test_a_passing_fault_is_retried(fault):
    script, calls = PASSING[fault]
    with scripted(*script) as server:
        assert ask(server.url, deadline_s=5.0, attempt_s=0.4) == (HONEST, None)
        assert len(server.posts) == calls


PERSISTENT = {
    "always 500": (status(500), 3),
    "always 429": (status(429), 3),
    "always slow": (slow, 3),
    "always reset": (lambda handler, honest: handler.reset(), 3),
    "Retry-After beyond the deadline": (status(503, ("Retry-After", "60")), 1),
}


@pytest.mark.parametrize("fault", PERSISTENT)
def test_a_persistent_fault_is_missing_within_the_deadline(fault):
    action, calls = PERSISTENT[fault]
    with scripted(action) as server:
        began = time.monotonic()
        scores, error = ask(server.url, attempt_s=0.3)
        assert scores == [None, None, None]
        assert isinstance(error, RewardUnavailable)
        assert server.url in str(error)
        assert time.monotonic() - began < 3.5
        assert len(server.posts) == calls


@pytest.mark.parametrize(("code", "failures"), [(429, 0), (500, 3), (503, 3), (408, 3)])
def test_a_service_that_is_busy_is_not_one_that_fails(code, failures, monkeypatch):
    """429 says that the service lives: its pauses do not grow. Every other fault doubles them, and
    an answer ends that."""
    bounds = []
    monkeypatch.setattr(random, "uniform", lambda low, high: bounds.append(high) or 0.0)
    with scripted(*[status(code)] * 3, good) as server:
        client = RemoteScorer([server.url], **QUICK)
        try:
            with pytest.raises(RewardUnavailable):
                client(MEDIA, PROMPTS)
            assert client._endpoints[0].failures == failures
            assert client(MEDIA, PROMPTS).tolist() == HONEST
            assert client._endpoints[0].failures == 0
        finally:
            client.close()
    assert bounds == ([0.02, 0.04, 0.08] if failures else [0.01] * 3)


MALFORMED = {
    "not JSON": edited(lambda honest: b"<html>gateway</html>"),
    "empty": edited(lambda honest: b""),
    "too few": edited(lambda honest: honest["scores"].pop()),
    "too many": edited(lambda honest: honest["scores"].append({"id": "x", "score": 1.0})),
    "wrong order": edited(swap),
    "NaN": set_score(math.nan),
    "infinity": set_score(math.inf),
    "beyond fp32": set_score(1e300),
    "true": set_score(True),
    "text": set_score("0.5"),
    "null": set_score(None),
    "other request": edited(lambda honest: honest.update(request_id="other")),
    "unknown field": edited(lambda honest: honest.update(extra=1)),
    "a bare list": edited(lambda honest: json.dumps([0.1, 0.2, 0.3]).encode()),
    "huge body": huge,
    "compressed": lambda handler, honest: handler.answer(
        200, json.dumps(honest).encode(), [("Content-Encoding", "gzip")]
    ),
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_a_malformed_answer_is_missing_and_not_retried(fault):
    with scripted(MALFORMED[fault]) as server:
        scores, error = ask(server.url)
        assert scores == [None, None, None]
        assert isinstance(error, RewardUnavailable)
        assert len(server.posts) == 1


def test_of_two_urls_one_may_refuse_connections():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = f"http://127.0.0.1:{listener.getsockname()[1]}"
    scores, error = ask(closed)
    assert scores == [None] * 3
    assert "ConnectError" in str(error)
    with scripted(good) as server:
        for urls in ([closed, server.url], [server.url, closed]):
            assert ask(urls) == (HONEST, None)
        assert len(server.posts) == 2


@pytest.mark.parametrize("key", ["model_id", "weights_digest"])
def test_a_changed_identity_ends_the_run(key):
    with scripted(
        good, edited(lambda honest: honest["identity"].update({key: "swapped"}))
    ) as server:
        client = RemoteScorer([server.url], **QUICK)
        assert client(MEDIA, PROMPTS).tolist() == HONEST
        with pytest.raises(RewardError, match=r"swapped.*pinned to"):
            client(MEDIA, PROMPTS)
        client.close()
        assert len(server.posts) == 2


def test_a_pinned_identity_is_compared_before_anything_is_sent():
    with scripted(good) as server:
        scores, error = ask(server.url, model_id="other", weights_digest="d")
        assert scores is None
        assert "pinned to" in str(error)
        assert server.posts == []


@pytest.mark.parametrize("code", [301, 302, 307, 308])
def test_a_redirect_is_never_followed(code):
    with (
        scripted(good) as elsewhere,
        scripted(status(code, ("Location", elsewhere.url + "/score"))) as server,
    ):
        scores, error = ask(server.url)
        assert scores is None
        assert "redirects are not followed" in str(error)
        assert len(server.posts) == 1
        assert elsewhere.posts == elsewhere.gets == []


@pytest.mark.parametrize(
    ("code", "remedy"), [(401, "token"), (404, "URL"), (413, "limits"), (422, "service")]
)
def test_a_refusal_ends_the_run_at_once(code, remedy):
    with scripted(status(code)) as server:
        scores, error = ask(server.url)
        assert scores is None
        assert remedy in str(error)
        assert len(server.posts) == 1


def test_a_score_that_the_service_lacks_is_missing():
    def drop(honest):
        honest["scores"][1] = {"id": honest["scores"][1]["id"], "missing": "no face found"}

    with scripted(edited(drop)) as server:
        scores, error = ask(server.url)
        assert error is None
        assert math.isnan(scores[1])
        assert (scores[0], scores[2]) == (0.25, 2.25)


def test_a_dripping_answer_does_not_outlive_the_deadline():
    def drip(handler, honest):
        handler.send_response(200)
        handler.end_headers()
        try:
            for _ in range(100):
                handler.wfile.write(b" ")
                time.sleep(0.05)
        except OSError:
            handler.close_connection = True

    with scripted(drip) as server:
        began = time.monotonic()
        scores, _ = ask(server.url, deadline_s=0.8, attempt_s=0.6, max_attempts=5)
        assert scores == [None] * 3
        assert time.monotonic() - began < 1.5


def test_the_token_is_sent_and_kept_out_of_every_artefact(monkeypatch, caplog):
    secret = "canary-5f0c2d7e"
    monkeypatch.setenv("DIGENRL_REWARD_TOKEN", secret)
    echo = edited(lambda honest: f"<html>denied: Bearer {secret}</html>".encode())
    with scripted(echo) as server:
        scores, error = ask(server.url)
        assert server.posts[0][1]["Authorization"] == f"Bearer {secret}"
    assert scores == [None] * 3
    assert secret not in str(error)
    assert secret not in caplog.text
    with scripted(status(401)) as server:
        _, error = ask(server.url)
    assert secret not in str(error)


@pytest.mark.parametrize(
    "url", ["ftp://host", "file:///etc/passwd", "http://user:password@host", "host:80", "http://"]
)
def test_an_odd_url_is_refused_without_showing_its_password(url):
    with pytest.raises(ValueError, match="no reward URL") as caught:
        RemoteScorer([url])
    assert "password@" not in str(caught.value)
