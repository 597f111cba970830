"""The service as its own process: announced URL, a giant body, clean end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch

from digenrl.cli.serve_reward import main, service_token
from digenrl.config import ConfigError, load
from digenrl.rewards.protocol import RewardError, RewardUnavailable
from digenrl.rewards.remote import RemoteScorer
from digenrl.types import Prompt
from reward_models.jpeg_size import JpegSize

TOKEN = "token-of-a-test"
pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def service(repository):
    """(process, base URL) of `serve_reward reward=jpeg`."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(repository / "src"), str(repository)]),
        "DIGENRL_REWARD_TOKEN": TOKEN,
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
    with pytest.raises(RewardError, match="token"):
        RemoteScorer([service[1]]).pinned_identity()
    client = RemoteScorer([service[1]], token=TOKEN)
    assert torch.equal(client(media, prompts), JpegSize()(media, prompts))
    assert client.pinned_identity().model_id.startswith("jpeg_size")
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
        connection.sendall(
            b"POST /score HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
            + TOKEN.encode()
            + b"\r\n"
            + declared
            + b"\r\n\r\n"
        )
        while sent < 1 << 30:
            connection.sendall(chunk)
            sent += len(block)
            assert psutil.Process(process.pid).memory_info().rss - before < 160 << 20
    assert sent < 256 << 20
    assert psutil.Process(process.pid).memory_info().rss - before < 160 << 20


def test_a_token_is_written_for_the_owner_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("T", raising=False)
    file = tmp_path / "token"
    token, made = service_token("T", file)
    assert made == file
    assert len(token) >= 32
    assert file.read_text() == token
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert token not in "".join(capsys.readouterr())
    with pytest.raises(FileExistsError, match="exists"):
        service_token("T", file)
    monkeypatch.setenv("T", "given")
    assert service_token("T", file) == ("given", None)


def ask(client):
    with contextlib.suppress(RewardUnavailable):
        client(torch.rand(1, 3, 4, 4), [Prompt("a")])


SLOW = """
import time
class Slow:
    def __call__(self, media, prompts):
        time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_service_in_three_seconds_whatever_its_scorer_does(
    tmp_path, repository, number
):
    (tmp_path / "own_slow.py").write_text(SLOW)
    (tmp_path / "reward").mkdir()
    yaml = "_target_: digenrl.rewards.suite.RewardSuite\nplacement: inline\nrewards: {slow: {scorer: {_target_: own_slow.Slow}}}\n"
    (tmp_path / "reward" / "slow.yaml").write_text(yaml)
    environment = {**os.environ, "PYTHONPATH": f"{repository / 'src'}{os.pathsep}{repository}"}
    environment.pop("DIGENRL_REWARD_TOKEN", None)
    words = ["reward=slow", "port=0", "allow_targets=[own_slow]", "--config-dir", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "digenrl", "serve-reward", *words],
        stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path,
    )  # fmt: skip
    try:
        url = process.stdout.readline().split()[-1]
        token = (tmp_path / "reward_token").read_text()
        client = RemoteScorer([url], token=token)
        asked = threading.Thread(target=ask, args=(client,), daemon=True)
        asked.start()
        host, port = url.removeprefix("http://").split(":")
        held = [socket.create_connection((host, int(port))) for _ in range(4)]
        time.sleep(0.7)
        began = time.monotonic()
        process.send_signal(number)
        process.wait(10)
        assert time.monotonic() - began < 3.0
        assert not (tmp_path / "reward_token").exists()
        for connection in held:
            connection.close()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


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
