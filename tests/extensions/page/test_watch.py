"""`digenrl watch`: the page of a run that goes on, over real HTTP; who may read it; that the run's
directory stays."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from digenrl.extensions.page import plots
from digenrl.extensions.page.cli import watch
from digenrl.extensions.page.plots import PICTURES
from tests.conftest import ROOT
from tests.report.synthetic import evaluation, write_lines, write_run

pytestmark = pytest.mark.heavy


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that has not ended."""
    path = write_run(tmp_path / "digits_flowgrpo" / "run-0", steps=9, ended=False)
    (path / "logs").mkdir()
    secret = "Authorization: Bearer " + "sk-" + "a" * 40
    (path / "logs" / "rank-000.log").write_text(
        "old line\n" * 5000 + f"{secret}\nthe newest line\n"
    )
    return path


@pytest.fixture
def url(run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where `run` is served."""
    monkeypatch.setattr(
        plots, "PICTURES", {"plots/reward.png": PICTURES["plots/reward.png"]}
    )  # the others take seconds
    with watch.Server(watch.Live(watch.WatchKeys(run=run, refresh_s=0.1, log_kib=1)), 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.url
        server.shutdown()
        thread.join()


def get(
    url: str, path: str = "", method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], str]:
    there = urlsplit(url)
    connection = http.client.HTTPConnection(str(there.hostname), int(there.port or 0), timeout=60)
    connection.request(method, there.path + path, headers=headers)
    answer = connection.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read().decode()


def contents(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_page_that_follows_the_run_is_served_to_who_knows_its_address(
    run: Path, url: str
) -> None:
    before = contents(run)
    status, headers, page = get(url)
    assert status == 200
    assert "running" in page
    assert page.count("data:image/png") > 10
    assert "RL step 8" in page
    assert contents(run) == before

    (nonce,) = re.findall(r'<script nonce="([^"]+)">', page)
    assert f"script-src 'nonce-{nonce}'" in headers["Content-Security-Policy"]
    assert "default-src 'none'" in headers["Content-Security-Policy"]

    state: dict[str, Any] = json.loads(get(url, "state")[2])
    assert (state["done"], state["total"]) == (9, 24)
    assert state["line"].startswith("RL step 9 of 24, reward ")
    log = state["logs"]["rank-000"]
    assert log.endswith("the newest line\n")
    assert len(log) <= 1024
    assert "a" * 40 not in log

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    write_lines(run / "metrics.jsonl", [*lines, evaluation(9, lines[-1]["time"])])
    until = time.monotonic() + 60
    while json.loads(get(url, "state")[2])["version"] == state["version"]:
        assert time.monotonic() < until
        time.sleep(0.1)
    assert page != get(url)[2]

    assert get(url.rsplit("/", 2)[0] + "/")[0] == 404  # without the secret word
    assert get(url, "../metrics.jsonl")[0] == 404
    assert get(url, Host="example.org")[0] == 404
    assert get(url, method="POST")[0] == 501


@pytest.mark.slow
@pytest.mark.processes
def test_it_says_what_it_serves_and_ends_on_ctrl_c(run: Path) -> None:
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    with subprocess.Popen(
        [sys.executable, "-m", "digenrl", "watch", f"run={run}"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": paths},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert get(url)[2].count("data:image/png;base64,") > len(PICTURES) - 2
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 0
    assert str(run) in said
    assert "Traceback" not in said


def test_a_port_that_is_taken_and_a_directory_that_is_no_run_are_said(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = watch.Server(watch.Live(watch.WatchKeys(run=run)), 0)
    with taken:
        assert taken.server_address[0] == "127.0.0.1"
        assert watch.main([f"run={run}", f"port={taken.server_port}"]) == 2
    assert (
        f"port = {taken.server_port}: Address already in use; leave it out"
        in capsys.readouterr().err
    )
    assert watch.main([f"run={tmp_path}"]) == 2
    assert "not a run directory" in capsys.readouterr().err
