"""Votes of a run in `votes/votes.jsonl`, and the groups that wait for votes in `votes/GROUP/`.

Only the process that serves the page writes votes. Ranks that wait read the file, and so does a
resumed run: it draws the same samples again, finds their votes, and asks for what is missing. A
group's name is a digest of its prompt and pixels, so votes never count for other samples.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from yaml import YAMLError

from digenrl.config.relations import votes_of_step
from digenrl.record.line_file import LineFile
from digenrl.record.run_dir import CONFIG, own_folder
from digenrl.record.stored_yaml import read_plain
from digenrl.report.find import open_own
from digenrl.report.read_run import JsonlTail

FOLDER = "votes"
MAX_BYTES = 64 << 20
"""Most bytes of the file of votes (about 300,000 votes), and of a group's file."""
MAX_PROMPT = 1 << 16
"""Characters of a prompt that are shown."""
_WAITS_S = 15.0
"""Seconds without a sign of the rank that waits, after which a group is no longer shown."""
_NAME = re.compile(r"[0-9a-f]{32}")
_Id = Annotated[str, Field(pattern=r"^[0-9a-f]{8,32}$")]
_Sample = Annotated[int, Field(ge=0, lt=512)]


class Vote(BaseModel):
    """One line of votes.jsonl: what a voter chose of a pair of samples, or took back."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    id: _Id
    """Chosen by the page, so that a vote that is sent twice counts once. With `choice` "undo", the
    vote that is taken back."""
    voter: _Id
    group: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    left: _Sample
    right: _Sample
    choice: Literal["left", "right", "both", "neither", "skip", "undo"]
    time: Annotated[float, Field(ge=0, le=2.5e11)] = 0.0


class Ballots:
    """Votes that count, by group, in the order in which they were given."""

    def __init__(self, folder: Path) -> None:
        self._file, self._tail = LineFile(folder / "votes.jsonl"), JsonlTail(folder / "votes.jsonl")
        self._votes: dict[str, dict[str, Vote]] = {}

    def votes_of(self, group: str) -> list[Vote]:
        """Return the votes on a group, skips included, after a look at the file."""
        self.read_new_votes()
        return [*self._votes.get(group, {}).values()]

    def read_new_votes(self) -> None:
        """Read what the file has got since the last look."""
        with suppress(FileNotFoundError):
            if os.lstat(self._tail.path).st_size > 2 * MAX_BYTES:
                raise OSError(f"{self._tail.path}: has more than {2 * MAX_BYTES} bytes; remove it.")
        for row in self._tail.read_new_rows():
            with suppress(ValidationError):  # a crash tore it, or somebody wrote into the file
                self._count_vote(Vote.model_validate(row))

    def count_votes(self) -> int:
        """Return how many votes there are in all, without skips, as of the last look."""
        every = (vote for votes in self._votes.values() for vote in votes.values())
        return sum(vote.choice != "skip" for vote in every)

    def append_vote(self, vote: Vote) -> bool:
        """Append a vote, and return whether the file took it."""
        line = vote.model_copy(update={"time": time.time()}).model_dump_json().encode() + b"\n"
        return self._file.size < MAX_BYTES and self._file.write(line)

    def last_of(self, voter: str, groups: Sequence[str]) -> Vote | None:
        """Return the voter's newest vote on one of `groups`."""
        own = [vote for name in groups for vote in self.votes_of(name) if vote.voter == voter]
        return max(own, key=lambda vote: vote.time, default=None)

    def _count_vote(self, vote: Vote) -> None:
        votes = self._votes.setdefault(vote.group, {})
        if vote.choice != "undo":
            votes.setdefault(vote.id, vote)
        elif vote.id in votes and votes[vote.id].voter == vote.voter:
            del votes[vote.id]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Group(BaseModel):
    """Group of samples that waits for votes, as a rank has written it for the page."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    prompt: Annotated[str, Field(max_length=MAX_PROMPT)]
    mime: Literal["image/png", "video/mp4"]
    samples: Annotated[int, Field(ge=2, le=512)]
    per_sample: Annotated[int, Field(ge=1, le=4096)]
    source: bool = False
    """Whether the last file is the picture that the prompt edits."""

    @property
    def wanted(self) -> int:
        """Votes that the group needs."""
        return -(-self.samples * self.per_sample // 2)

    def votes_per_sample(self, votes: Sequence[Vote]) -> Counter[int]:
        """Return how many votes each sample has; a skip is none."""
        given = self._without_skips(votes)
        return Counter(sample for vote in given for sample in (vote.left, vote.right))

    def pair_outcomes(self, votes: Sequence[Vote]) -> list[tuple[int, int, str]]:
        """Return the votes as `bradley_terry.fit_scores` takes them."""
        return [(vote.left, vote.right, vote.choice) for vote in self._without_skips(votes)]

    def has_pair(self, vote: Vote) -> bool:
        """Return whether a vote names two samples of this group."""
        return max(vote.left, vote.right) < self.samples and vote.left != vote.right

    def _without_skips(self, votes: Sequence[Vote]) -> list[Vote]:
        return [vote for vote in votes if vote.choice != "skip" and self.has_pair(vote)]

    def is_complete(self, votes: Sequence[Vote]) -> bool:
        """Return whether no further vote is asked for: every sample has enough, or the group was
        skipped as often as it needs votes."""
        judged = self.votes_per_sample(votes)
        skipped = sum(vote.choice == "skip" for vote in votes)
        enough = all(judged[sample] >= self.per_sample for sample in range(self.samples))
        return enough or skipped >= self.wanted


@dataclass(frozen=True)
class Waiting:
    """A group that is shown now, with its place on disk."""

    path: Path
    group: Group

    def read_media(self, sample: int) -> bytes:
        """Return the file of a sample. Raise OSError if there is none."""
        with open_own(self.path / f"{sample}.media") as file:
            return file.read(MAX_BYTES)


def name_of(prompt: str, media: Sequence[bytes]) -> str:
    """Return the name of a group: a digest of its prompt and the files of its samples."""
    digest = blake2b(json.dumps([prompt, len(media)]).encode(), digest_size=16)
    for each in media:
        digest.update(blake2b(each).digest())
    return digest.hexdigest()


def post_group(folder: Path, group: Group, media: Sequence[bytes]) -> Path:
    """Write a group for the page, whole or not at all, and return its folder."""
    target = folder / name_of(group.prompt, media)
    unfinished = own_folder(folder) / f".{secrets.token_hex(8)}.tmp"
    unfinished.mkdir()
    for number, content in enumerate(media):
        (unfinished / f"{number}.media").write_bytes(content)
    (unfinished / "group.json").write_text(group.model_dump_json(), encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)  # left by a rank that died
    unfinished.rename(target)
    return target


def renew_group(path: Path) -> bool:
    """Say that a rank still waits for the votes of a group; return False if its folder is gone."""
    try:
        os.utime(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return path.is_dir() and not path.is_symlink()


def waiting_groups(folder: Path) -> list[Waiting]:
    """Return the groups that a rank waits for, the oldest first. What a dead rank has left is
    removed."""
    found: list[tuple[float, Waiting]] = []
    for path in folder.iterdir():
        if not (_NAME.fullmatch(path.name) or path.suffix == ".tmp") or path.is_symlink():
            continue
        with suppress(OSError, ValidationError):
            if time.time() - path.lstat().st_mtime > _WAITS_S:
                shutil.rmtree(path, ignore_errors=True)
            elif path.suffix != ".tmp":
                with open_own(path / "group.json") as file:
                    group = Group.model_validate_json(file.read(1 << 20))
                    found.append((os.fstat(file.fileno()).st_mtime, Waiting(path, group)))
    return [each for _, each in sorted(found, key=lambda pair: (pair[0], pair[1].path.name))]


def votes_wanted(run: Path) -> tuple[int, int]:
    """Return (votes that an RL step asks for, RL steps) of a run; 0 of what nobody knows."""
    config: object = None
    with suppress(OSError, ValueError, YAMLError):
        config = read_plain(run / CONFIG)
    if not isinstance(config, Mapping):
        return 0, 0
    steps = config.get("max_rl_steps")
    return sum(votes_of_step(config).values()), steps if isinstance(steps, int) else 0
