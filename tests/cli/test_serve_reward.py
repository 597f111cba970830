"""The service as its own process: announced URL, a giant body, clean end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys

import psutil
import pytest
import torch

from digenrl.cli.serve_reward import main, service_token
from digenrl.config import ConfigError, load
from digenrl.rewards.remote import RemoteScorer
from digenrl.types import Prompt
from reward_models.jpeg_size import JpegSize

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def service(repository):
    """(process, base URL) of `serve_reward reward=jpeg`."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(repository / "src"), str(repository)]),
    }
    command = [sys.executable, "-m", "digenrl", "serve-reward", "reward=jpeg", "port=0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    line = process.stdout.readline()
    assert line.startswith("serving at http://127.0.0.1:"), line
    yield process, line.split()[-1]
    process.send_signal(signal.SIGINT)
    assert process.wait(10) in (0, 128 + signal.SIGINT)
    process.stdout.close()


def test_it_scores_as_the_scorer_does(service):
    media = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    prompts = [Prompt("a"), Prompt("b")]
    client = RemoteScorer([service[1]])
    assert torch.equal(client(media, prompts), JpegSize()(media, prompts))
    assert client.identity().model_id.startswith("jpeg_size")
    client.close()


@pytest.mark.parametrize("declared", [b"Content-Length: 1073741824", b"Transfer-Encoding: chunked"])
def test_a_gigabyte_never_enters_memory(service, declared):
    process, url = service
    host, port = url.removeprefix("http://").split(":")
    before = psutil.Process(process.pid).memory_info().rss
    block = b"\0" * (1 << 20)
    chunk = b"100000\r\n" + block + b"\r\n" if b"chunked" in declared else block
    sent = 0
    with (
        contextlib.suppress(ConnectionError, TimeoutError),
        socket.create_connection((host, int(port)), timeout=2) as connection,
    ):
        connection.sendall(b"POST /score HTTP/1.1\r\nHost: x\r\n" + declared + b"\r\n\r\n")
        while sent < 1 << 30:
            connection.sendall(chunk)
            sent += len(block)
            assert psutil.Process(process.pid).memory_info().rss - before < 160 << 20
    assert sent < 256 << 20
    assert psutil.Process(process.pid).memory_info().rss - before < 160 << 20


def test_off_loopback_a_token_is_written_for_the_owner_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("T", raising=False)
    file = tmp_path / "token"
    assert service_token("127.0.0.1", "T", file) is None
    assert not file.exists()
    token = service_token("0.0.0.0", "T", file)
    assert len(token) >= 32
    assert file.read_text() == token
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert token not in "".join(capsys.readouterr())
    with pytest.raises(FileExistsError, match="exists"):
        service_token("0.0.0.0", "T", file)
    monkeypatch.setenv("T", "given")
    assert service_token("0.0.0.0", "T", file) == service_token("127.0.0.1", "T", file) == "given"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["reward=jpg"], 2, "nearest: jpeg"),
        (["reward=ocr_clip", "hardware.build=tiny"], 1, "choose one with name="),
        (["reward=jpeg", "name=jpeg"], 1, "Unknown reward `jpeg`"),
        (
            ["reward=jpeg", "limits.max_pending=0"],
            2,
            "limits.max_pending = 0: is too small; allowed: whole number >= 1",
        ),
        (["reward=jpeg", "port=70000"], 2, "port = 70000: is too large"),
        (["reward=jpeg", "host=256.0.0.1", "token_file=/nonexistent/token"], 1, "nonexistent"),
    ],
)
def test_mistakes_are_explained(words, code, message, capsys):
    assert main(words) == code
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_client_reads_its_token_from_our_own_variables_only() -> None:
    words = ["reward=remote", "reward.rewards.remote.scorer.token_env=WANDB_API_KEY"]
    with pytest.raises(
        ConfigError, match=r"token_env = WANDB_API_KEY: .* variables named DIGENRL_"
    ):
        load(words)
