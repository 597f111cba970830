"""A hub on this machine: serves the files of folders as the public hub does, for its own client."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "c0ffee" + "0" * 34


class Hub(ThreadingHTTPServer):
    """Serves `repositories` (id -> folder) on 127.0.0.1 until `shutdown`."""

    daemon_threads = True

    def __init__(self, repositories: dict[str, Path], gated: tuple[str, ...] = ()) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.repositories, self.gated = repositories, gated
        self.sent: list[tuple[str, int]] = []
        """(file, first byte) of each answer that had a body."""
        self.cut: dict[str, int] = {}
        """File -> bytes after which its next answer breaks off."""
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answers(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if asked := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/(.+)", path):
            self._json(self._entries(asked[1]))
        elif asked := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/.+)?", path):
            card = {"license": "other", "license_name": "no-commercial-use"}
            gated = "manual" if asked[1] in self.server.gated else False
            files = [
                {"rfilename": entry["path"], "size": entry["size"]}
                for entry in self._entries(asked[1])
            ]
            told = {"id": asked[1], "sha": COMMIT, "gated": gated, "cardData": card}
            self._json(told | {"siblings": files})
        elif asked := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            self._file(*asked.groups())
        else:
            self.send_error(404)

    def _entries(self, repository: str) -> list[dict[str, Any]]:
        folder = self.server.repositories[repository]
        return [
            {
                "type": "file",
                "path": str(file.relative_to(folder)),
                "size": file.stat().st_size,
                "oid": hashlib.sha1(file.read_bytes(), usedforsecurity=False).hexdigest(),
            }
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        ]

    def _json(self, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self, repository: str, name: str) -> None:
        if repository in self.server.gated:
            self.send_response(403)
            self.send_header("X-Error-Code", "GatedRepo")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = (self.server.repositories[repository] / name).read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        first = int(asked[1]) if asked else 0
        body = content[first:]
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{hashlib.sha1(content, usedforsecurity=False).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        self.server.sent.append((name, first))
        stop = self.server.cut.pop(name, len(body))
        self.wfile.write(body[:stop])
        if stop < len(body):
            self.close_connection = True
