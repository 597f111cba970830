"""Servers for the tests: the real service on a free loopback port, and one that follows a script of
faults. The scorers here are built in processes of their own too, which import this file: it needs
torch alone, where a test's file imports all of digenrl for ten seconds."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from digenrl.rewards import frames
from digenrl.rewards.protocol import RewardUnavailable
from digenrl.rewards.service import RewardService, ServiceLimits


class Brightness:
    """Scores the mean pixel; black pictures have no score."""

    model_id = "brightness"
    weights_digest = "d1"

    def __call__(self, media, prompts):
        mean = media.flatten(1).mean(1)
        return torch.where(mean == 0, torch.nan, mean)


class Loudness:
    """Scores the mean of a sound's absolute values; silence has no score."""

    hears = True
    model_id = "loudness"

    def __call__(self, media, prompts, sound):
        mean = sound.waveform.abs().mean((1, 2)) * sound.rate
        return torch.where(mean == 0, torch.nan, mean)


class Moody:
    """Scores 1, unless a prompt's text asks for trouble."""

    def __call__(self, media, prompts):
        for prompt in prompts:
            if prompt.text == "away":
                raise RewardUnavailable("the judge is away")
            if prompt.text == "broken":
                raise KeyError("no such weight")
            if prompt.text == "exit":
                sys.exit(3)
            if prompt.text == "helpers":
                subprocess.Popen(["sleep", "300"])
            if prompt.text == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(len(prompts))


class Chatty:
    """Prints a secret in three ways: by Python, past it, and from a process that it starts."""

    def __init__(self) -> None:
        print(f"token={os.environ['CHATTY_API_KEY']}", file=sys.stderr)
        os.write(1, f"raw {os.environ['CHATTY_API_KEY']}\n".encode())
        subprocess.run(["sh", "-c", 'echo "shell $CHATTY_API_KEY"; printf "no end"'], check=True)

    def __call__(self, media, prompts):
        return torch.ones(len(prompts))


class Littering:
    """Leaves a temporary file behind."""

    def __call__(self, media, prompts):
        tempfile.mkstemp(prefix="litter-")
        return torch.ones(len(media))


@contextmanager
def running(service: RewardService, hosts: set[str] | None = None) -> Iterator[str]:
    """The real service under uvicorn in a thread; yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = service.make_server(hosts)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)


Action = Callable[["ScriptedHandler", dict], None]
"""Answers one POST, given the honest response document."""


class ScriptedHandler(BaseHTTPRequestHandler):
    """GET /identity is honest; POST /score takes the next action of the script (the last one
    repeats)."""

    def log_message(self, format, *args):
        pass

    def do_GET(self):
        self.server.gets.append(self.path)
        limits = {"max_body_bytes": 1 << 26, "max_samples": 64, "max_pixels": 1 << 20}
        identity = {"model_id": "m", "weights_digest": "d"}
        self.answer(
            200, json.dumps({"protocol": 1, "identity": identity, "limits": limits}).encode()
        )

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        json_bytes, payload_bytes = frames.parse_header(body[: frames.HEADER.size])
        request = frames.decode_request(
            body[frames.HEADER.size : frames.HEADER.size + json_bytes], payload_bytes
        )
        honest = {
            "protocol": 1,
            "request_id": request.request_id,
            "identity": {"model_id": "m", "weights_digest": "d"},
            "scores": [{"id": id_, "score": 0.25 + row} for row, id_ in enumerate(request.ids)],
        }
        self.server.posts.append((self.path, dict(self.headers)))
        script = self.server.script
        script[min(len(self.server.posts), len(script)) - 1](self, honest)

    def answer(self, status, body, headers=()):
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def reset(self):
        """Closes with RST."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True


def status(code, *headers) -> Action:
    return lambda handler, honest: handler.answer(code, b'{"error": "scripted"}', headers)


def good(handler: ScriptedHandler, honest: dict) -> None:
    handler.answer(200, json.dumps(honest).encode())


def edited(edit: Callable[[dict], object]) -> Action:
    """The honest document after `edit`, which changes it in place or returns another body."""

    def act(handler, honest):
        other = edit(honest)
        handler.answer(200, other if isinstance(other, bytes) else json.dumps(honest).encode())

    return act


@contextmanager
def scripted(*script: Action) -> Iterator[ThreadingHTTPServer]:
    """A server with `.url`, `.posts` (path, headers) and `.gets` (paths)."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), ScriptedHandler)
    server.daemon_threads = True
    server.script, server.posts, server.gets = script, [], []
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


__all__ = [
    "Brightness",
    "Moody",
    "ServiceLimits",
    "edited",
    "good",
    "running",
    "scripted",
    "status",
]
