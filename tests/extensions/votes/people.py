"""A reward that waits for people, in a run's directory, and people who vote over HTTP."""

from __future__ import annotations

import base64
import io
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from PIL import Image

from digenrl.extensions.votes.scorer import Votes
from digenrl.launchers.reaching import read_access
from digenrl.types import Prompt

PROMPT = Prompt("a blue circle")


def pictures(*blue: float) -> torch.Tensor:
    """Return pictures [N, 3, 8, 8] with so much blue."""
    media = torch.zeros(len(blue), 3, 8, 8)
    media[:, 2] = torch.tensor(blue)[:, None, None]
    return media


def blue_of(address: str) -> float:
    """Return how blue a picture of the page is."""
    content = base64.b64decode(address.partition(",")[2])
    pixels = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"), dtype=float) / 255
    return float((pixels[..., 2] - pixels[..., :2].mean(-1)).clip(0).mean())


@contextmanager
def asking(run: Path, **given: Any) -> Iterator[Callable[..., Future[torch.Tensor]]]:
    """Yield what asks people for the scores of samples, in a thread as a rank does."""
    scorer = Votes(**{"per_sample": 1, "grace_s": 0.0, "wait_s": 30.0, **given})
    scorer.join_run(run, lambda: None)
    with ThreadPoolExecutor() as pool:
        try:
            yield lambda media, prompt=PROMPT: pool.submit(scorer, media, [prompt] * len(media))
        finally:
            scorer.close()


class Person:
    """Somebody with the page's address, who keeps to what the page sends."""

    def __init__(self, run: Path, voter: str = "ab" * 8) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                access = read_access(run / "votes")
                break
            except FileNotFoundError:
                assert time.monotonic() < deadline, "no page"
                time.sleep(0.05)
        self.voter, self.count = voter, 0
        self.url = f"http://127.0.0.1:{access.port}"
        self.token = access.token
        self.http = httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {access.token}"}, trust_env=False
        )

    def next(self, wait_s: float = 20.0) -> dict[str, Any]:
        """Return the pair that is shown next."""
        deadline = time.monotonic() + wait_s
        while "media" not in (found := self.http.get("/next", params={"voter": self.voter}).json()):
            assert time.monotonic() < deadline, found
            time.sleep(0.02)
        return found

    def send(
        self, pair: dict[str, Any], choice: str, path: str = "/vote", again: str | None = None
    ) -> httpx.Response:
        """Send a choice; `again`: the id of an earlier one."""
        self.count += 1
        vote = {
            "id": again or secrets.token_hex(8),
            "voter": self.voter,
            "choice": choice,
            **{key: pair[key] for key in ("group", "left", "right")},
        }
        return self.http.post(path, content=json.dumps(vote))

    def prefer_blue(self, pair: dict[str, Any]) -> httpx.Response:
        left, right = map(blue_of, pair["media"])
        choice = "left" if left > right + 1e-3 else "right" if right > left + 1e-3 else "neither"
        return self.send(pair, choice)


def vote_until(run: Path, done: threading.Event, most: int) -> int:
    """Prefer blue until `done`, at most `most` times; return how often."""
    person = Person(run)
    while not done.is_set() and person.count < most:
        try:
            answer = person.http.get("/next", params={"voter": person.voter}).json()
            if "media" in answer:
                person.prefer_blue(answer)
            else:
                time.sleep(0.02)
        except httpx.TransportError:  # the run ends
            done.wait(0.2)
    return person.count
