"""Scorer that asks people: it shows a group on the run's page and waits for votes.

    rank: group -> votes/GROUP/ ... <- votes/votes.jsonl <- page (in one rank) <- people

Each rank that scores can serve the page. The one that holds the lock of the folder does; when that
rank ends, another one takes over. Ranks and page meet in the run's directory alone.
"""

from __future__ import annotations

import fcntl
import io
import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_urlsafe

import torch
from PIL import Image
from torch import Tensor

from digenrl.cluster.access import ACCESS, Access, write_access
from digenrl.extensions.votes.ballots import (
    FOLDER,
    MAX_PROMPT,
    Ballots,
    Group,
    post_group,
    renew_group,
    votes_wanted,
)
from digenrl.extensions.votes.bradley_terry import fit_scores
from digenrl.extensions.votes.page import VotePage
from digenrl.record.run_dir import own_folder
from digenrl.report.media import encode_mp4, to_uint8
from digenrl.rewards.protocol import RewardError, RewardUnavailable, source_images
from digenrl.types import Prompt

_LOG = logging.getLogger(__name__)
_POLL_S = 0.2


class Votes:
    """Scores of a group by the votes of people between pairs of its samples.

    Args:
        per_sample: votes that each sample needs; half as many pairs are shown as samples have
            votes. A sample with fewer has no score.
        wait_s: seconds that a group waits for its votes. After them the samples that have enough
            are scored, and the others are missing.
        grace_s: seconds after the last vote of a group within which it can be taken back.
        port: port of the page on 127.0.0.1; 0 = any free port.
    """

    asks_people = True
    weights_digest = "none"

    def __init__(
        self, per_sample: int = 2, wait_s: float = 86400.0, grace_s: float = 1.0, port: int = 0
    ) -> None:
        if per_sample < 1 or wait_s <= 0 or grace_s < 0 or not 0 <= port < 65536:
            raise ValueError(
                f"votes: per_sample = {per_sample}, wait_s = {wait_s}, grace_s = {grace_s}, port = "
                f"{port}: give per_sample >= 1, wait_s > 0, grace_s >= 0 and a port below 65536."
            )
        self.model_id = f"votes of people, {per_sample} a sample, Bradley-Terry"
        self._per_sample, self._wait_s, self._grace_s = per_sample, wait_s, grace_s
        self._port = port
        self._folder: Path | None = None
        self._closed = threading.Event()
        self._host: threading.Thread | None = None

    def join_run(self, run_dir: Path, tick: Callable[[], None]) -> None:
        """Serve the page of a run, or stand by to do so.

        Args:
            tick: called again and again while people are waited for, so that a rank that waits
                does not count as hanging.
        """
        self._folder, self._tick = own_folder(run_dir / FOLDER), tick
        self._ballots = Ballots(self._folder)
        self._host = threading.Thread(
            target=_host_page,
            args=(self._folder, self._port, self._closed),
            name="votes",
            daemon=True,
        )
        self._host.start()

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Return the scores [B] of a group; NaN = too few votes.

        Raises:
            RewardUnavailable: samples have too few votes, because nobody voted in time, because
                the group was skipped, or because the run ends.
            RewardError: there is no run, or the samples are no group.
        """
        if self._folder is None:
            raise RewardError(
                "The reward `votes` asks people on the page of a run, and there is no run: name "
                "another reward here."
            )
        if len(prompts) < 2 or len({prompt.uid for prompt in prompts}) > 1:
            raise RewardError(
                f"The reward `votes` compares the samples of one prompt, and got {len(prompts)} of "
                f"{len({prompt.uid for prompt in prompts})} prompts: set sampling.task_size to "
                "data.group_size."
            )
        source = any(image.role == "image" for image in prompts[0].images)
        files = [_encode_sample(sample) for sample in media]
        files += [_encode_sample(source_images(media, prompts[:1])[0])] if source else []
        group = Group(
            prompt=prompts[0].text[:MAX_PROMPT],
            mime="image/png" if media.dim() == 4 else "video/mp4",
            samples=len(media),
            per_sample=self._per_sample,
            source=source,
        )
        return self._collect_scores(group, files)

    def _collect_scores(self, group: Group, files: Sequence[bytes]) -> Tensor:
        """Show a group until it has its votes, and return its scores."""
        assert self._folder is not None
        deadline, path = time.monotonic() + self._wait_s, post_group(self._folder, group, files)
        votes, changed = self._ballots.votes_of(path.name), -self._grace_s
        try:
            while not self._closed.wait(_POLL_S) and time.monotonic() < deadline:
                self._tick()
                if not renew_group(path):
                    post_group(self._folder, group, files)
                before, votes = votes, self._ballots.votes_of(path.name)
                if votes != before:
                    changed = time.monotonic()
                if group.is_complete(votes) and time.monotonic() >= changed + self._grace_s:
                    break
        finally:
            shutil.rmtree(path, ignore_errors=True)
        judged = group.votes_per_sample(votes)
        scores = torch.from_numpy(fit_scores(group.samples, group.pair_outcomes(votes))).float()
        few = torch.tensor([judged[i] < group.per_sample for i in range(group.samples)])
        scores[few] = torch.nan
        if few.any():
            why = "the run ends" if self._closed.is_set() else "nobody voted in time (wait_s)"
            why = "people skipped the group" if group.is_complete(votes) else why
            raise RewardUnavailable(f"too few votes: {why}", scores)
        return scores

    def close(self) -> None:
        """Stop waiting and serving. Idempotent."""
        self._closed.set()
        if self._host is not None:
            self._host.join(5.0)
            self._ballots.close()


def _encode_sample(sample: Tensor) -> bytes:
    pixels = to_uint8(sample)
    if pixels.ndim == 4:
        return encode_mp4(pixels)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def _open_listener(port: int) -> socket.socket:
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        _LOG.warning(
            "reward votes: port %d of 127.0.0.1 cannot be had (%s), so the page has another one; "
            "digenrl vote RUN says which.",
            port,
            error.strerror,
        )
        return socket.create_server(("127.0.0.1", 0))


def _host_page(folder: Path, port: int, closed: threading.Event) -> None:
    """Serve the page as soon as no other rank does, until `closed`."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    lock = os.open(folder / ".lock", flags, 0o600)
    try:
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if closed.wait(_POLL_S):
                return
        token = token_urlsafe(32)
        with _open_listener(port) as listener:
            server = VotePage(folder, token, *votes_wanted(folder.parent)).make_server()
            serving = threading.Thread(
                target=server.run, kwargs={"sockets": [listener]}, daemon=True, name="votes page"
            )
            serving.start()
            port = listener.getsockname()[1]
            access = Access(socket.gethostname(), port, token, time.time())
            write_access(folder, access)
            closed.wait()
            (folder / ACCESS).unlink(missing_ok=True)
            server.should_exit = True
            serving.join(3.0)
    finally:
        os.close(lock)
