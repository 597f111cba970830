"""`make watch RUN=outputs/<experiment>/<run>`: a live page of a run, for a browser on this machine.

    digenrl watch run=outputs/digits_flowgrpo/2026-01-01_12-00-00-0

The page shows the report as it would be now (curves, pictures, timeline), the state of the run, and
the end of each rank's log. The server listens on the loopback interface only, answers only the
address that it prints, reads only the run's directory and writes nothing there. Ctrl-C ends it.
From another machine: `ssh -L PORT:127.0.0.1:PORT`.
"""

from __future__ import annotations

import json
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any

from digenrl.config.help import Arguments, RunDirectory, own_command
from digenrl.config.schema import AtLeast1, Port, Positive
from digenrl.extensions.page import html
from digenrl.extensions.page.plots import draw_all
from digenrl.record.redact import redact_text
from digenrl.record.run_dir import END, EVENTS, METRICS, SAMPLES, Row
from digenrl.report.find import files_of, open_own
from digenrl.report.read_run import JsonlTail, append_step, is_number, read_run
from digenrl.report.summary import build_summary
from digenrl.report.tables import duration, number

ADDRESS = "127.0.0.1"
REST = 10.0
"""Pause before the next drawing, in durations of the last one, because drawing shares the processor
with the run."""


class WatchKeys(Arguments):
    """Arguments of the command line."""

    run: RunDirectory
    """Run to show. It may be finished, crashed or still running."""
    port: Port | None = None
    """Port to listen on. null: any free port."""
    refresh_s: Positive | None = None
    """Least seconds between two drawings. null: ten times the seconds that drawing takes."""
    log_kib: AtLeast1 = 16
    """KiB shown from the end of each rank's log."""


class Live:
    """Page of a run directory, drawn when a browser asks for it and the files have changed."""

    def __init__(self, request: WatchKeys) -> None:
        self._request, self._run = request, read_run(request.run)
        self._nonce = secrets.token_urlsafe(12)
        self._metrics, self._steps, self._evals = (
            JsonlTail(request.run / METRICS),
            list[Row](),
            list[Row](),
        )
        self._lock = threading.Lock()
        self._page, self._version, self._again_at = b"", "", 0.0

    @property
    def policy(self) -> str:
        """Content security policy: a browser may run the page's one script, which may ask only this
        server."""
        return (
            f"default-src 'none'; script-src 'nonce-{self._nonce}'; style-src 'unsafe-inline'; "
            "img-src data:; media-src data:; connect-src 'self'; base-uri 'none'; form-action "
            "'none'; frame-ancestors 'none'"
        )

    def page(self) -> bytes:
        """The page as HTML."""
        with self._lock:
            version = self._due()
            if version != self._version:
                began = time.monotonic()
                self._run = read_run(self._request.run)
                self._page, self._version = self._draw(version).encode(errors="replace"), version
                self._again_at = began + (
                    self._request.refresh_s or REST * (time.monotonic() - began)
                )
            return self._page

    def state(self) -> dict[str, Any]:
        """Return the state that the page asks for every two seconds. A new `version` means that
        there is a newer page."""
        with self._lock:
            for row in self._metrics.read():
                kept = {"step": self._steps, "eval": self._evals}.get(str(row.get("kind")))
                if kept is not None and is_number(row.get("rl_step")):
                    append_step(kept, row)
            logs = files_of(self._request.run, "logs", "*.log")
            return {
                "version": self._due(),
                "done": self._steps[-1]["rl_step"] if self._steps else 0,
                "total": self._total,
                "line": self._line(),
                "logs": {path.stem: _tail(path, self._request.log_kib << 10) for path in logs},
            }

    @property
    def _total(self) -> int:
        total = self._run.config.get("max_rl_steps")
        return int(total) if is_number(total) else 0

    def _due(self) -> str:
        """Return the state of the files to draw from; the state of the last page while drawing must
        pause."""
        if time.monotonic() < self._again_at:
            return self._version
        run = self._request.run
        files = [run / METRICS, run / EVENTS, *files_of(run, SAMPLES, "eval-*.npz")]
        return "-".join(f"{_size(file):x}" for file in files)

    def _line(self) -> str:
        """Return a line about the state of the run."""
        run, done = self._request.run, int(self._steps[-1]["rl_step"]) if self._steps else 0
        parts = [f"RL step {done} of {self._total}"]
        for rows, key, name in (
            (self._steps, "reward", "reward"),
            (self._evals, "heldout", "held-out"),
        ):
            parts += (
                [f"{name} {number(rows[-1][key])}"] if rows and is_number(rows[-1].get(key)) else []
            )
        recent = [float(row["step_s"]) for row in self._steps[-10:] if is_number(row.get("step_s"))]
        if recent and done < self._total:
            pace = median(recent)
            parts += [
                f"{duration(pace)} per step",
                f"{duration(pace * (self._total - done))} to go",
            ]
        files = [run / METRICS, run / EVENTS, *run.glob("spans/*"), *run.glob("logs/*")]
        ago = time.time() - max(
            (file.stat().st_mtime for file in files if file.exists()), default=time.time()
        )
        return ", ".join([*parts, f"last sign of life {duration(max(0.0, ago))} ago"])

    def _draw(self, version: str) -> str:
        run, summary = self._run, build_summary(self._run)
        if not any(event.get("kind") == END for event in (run.attempts() or [[]])[-1]):
            summary |= {"status": "running", "cause": None}
        pictures = draw_all(run, summary["warnings"], write=False)
        live = {"nonce": self._nonce, "version": version}
        return html.render(run, summary, pictures, "watch.html.j2", **live)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _tail(path: Path, size: int) -> str:
    """Return the last whole lines of a log within `size` bytes, with secrets masked."""
    try:
        with open_own(path) as file:
            start = max(0, _size(path) - size)
            file.seek(start)
            text = file.read(size).decode(errors="replace")
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return redact_text(text.partition("\n")[2] if start else text)


class Server(ThreadingHTTPServer):
    """HTTP server for the paths below a secret word, which other users of this machine do not
    know."""

    daemon_threads = True

    def __init__(self, live: Live, port: int) -> None:
        self.live, self.word = live, secrets.token_urlsafe(16)
        super().__init__((ADDRESS, port), Handler)

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{ADDRESS}:{self.server_port}/{self.word}/"


class Handler(BaseHTTPRequestHandler):
    """Handler of one request; only GET is allowed."""

    server: Server
    timeout = 10.0
    """Seconds within which a connection must send its request."""

    def do_GET(self) -> None:
        # Another name in Host is a page elsewhere on the web that had its name resolved to this
        # machine.
        known = self.headers.get("Host") in [
            f"{name}:{self.server.server_port}" for name in (ADDRESS, "localhost")
        ]
        here, _, asked = self.path.lstrip("/").partition("/")
        if not known or not secrets.compare_digest(here.encode(), self.server.word.encode()):
            return self.send_error(404)
        if asked == "state":
            return self._answer("application/json", json.dumps(self.server.live.state()).encode())
        return (
            self._answer("text/html; charset=utf-8", self.server.live.page())
            if not asked
            else self.send_error(404)
        )

    def _answer(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            ("Content-Security-Policy", self.server.live.policy),
            ("Cache-Control", "no-store"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because each request of a page would be a line."""


def main(arguments: Sequence[str]) -> int:
    """Serve until Ctrl-C and return exit code 0; 2 if the arguments or the directory do not fit, or
    the port is taken."""

    def work(request: WatchKeys, _: list[str]) -> None:
        live = Live(request)
        try:
            server = Server(live, request.port or 0)
        except OSError as error:
            raise OSError(
                f"port = {request.port}: {error.strerror}; leave it out for any free one."
            ) from error
        with server:
            print(
                f"Report, timeline and logs of {request.run}, on this machine alone; Ctrl-C ends "
                "it:",
                file=sys.stderr,
            )
            print(server.url, flush=True)
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                print("", file=sys.stderr)

    return own_command(WatchKeys, __doc__, arguments, work)
