"""Files of the messages that trainers consume: written by `record.trajectories`, read by `replay`.

trajectories/rank-000/step-000012.cells   the messages of an RL step, back to back, as they came to trainer 0
                      index.jsonl         a line per finished step: bytes, digest, and what the messages hold

                      This module handles bytes only; `digenrl.extensions.records.replay` reads
                      their content.
"""  # noqa: E501

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import xxhash

from digenrl.record.run_dir import TRAJECTORIES, Row, append_event, append_jsonl, free_space

_INDEX = "index.jsonl"


class TrajectoryError(ValueError):
    """There is no record, one of its files is damaged, or it lacks data that a run needs."""


class TrajectoryFiles:
    """Writer of the messages that one trainer rank consumes.

    A record never ends a run. If a step has no room, the record ends with the step before, and an
    event says so.

    Args:
        limit: most bytes of this rank's record.
    """

    def __init__(self, run_dir: Path, rank: int, limit: float = math.inf) -> None:
        self._run_dir, self._rank, self._limit = run_dir, rank, limit
        self._directory = _directory(run_dir, rank)
        self._kept = {step: int(row["bytes"]) for step, row in _index(self._directory).items()}
        self._open: dict[int, tuple[BinaryIO, xxhash.xxh3_64]] = {}
        self._over = False

    def take(self, step: int, buffers: Iterable[memoryview]) -> None:
        """Append a message of RL step `step`."""
        if self._over:
            return
        try:
            if step not in self._open:
                self._directory.mkdir(parents=True, exist_ok=True)
                self._open[step] = self._unfinished(step).open("wb"), xxhash.xxh3_64()
                self._kept[step] = 0
            file, digest = self._open[step]
            for buffer in buffers:
                self._kept[step] += len(buffer)
                if sum(self._kept.values()) > self._limit:
                    mib = self._limit / 2**20
                    return self._end(
                        f"this rank's part of record.trajectories_mib, {mib:.4g} MiB, is full"
                    )
                digest.update(buffer)
                file.write(buffer)
        except OSError as error:
            self._end(f"{error.strerror or error}, {free_space(self._run_dir)}")

    def finish(self, step: int, facts: Mapping[str, object]) -> None:
        """Complete RL step `step`, and write its line of the index with `facts`."""
        if self._over or step not in self._open:
            return
        file, digest = self._open.pop(step)
        try:
            file.close()
            os.replace(self._unfinished(step), _file(self._directory, step))
        except OSError as error:
            return self._end(f"{error.strerror or error}, {free_space(self._run_dir)}")
        row = {"step": step, "bytes": self._kept[step], "xxh3": digest.hexdigest(), **facts}
        append_jsonl(self._directory / _INDEX, row)

    def _end(self, cause: str) -> None:
        self._over = True
        self.close()
        kept = sum(1 for step in self._kept if _file(self._directory, step).exists())
        said = f"{cause}: the record of trajectories ends after {kept} RL steps, the run goes on"
        append_event(self._run_dir, TRAJECTORIES, {"rank": self._rank, "cause": said})

    def close(self) -> None:
        """Remove the files of unfinished steps."""
        for step, (file, _) in self._open.items():
            with suppress(OSError):
                file.close()
            with suppress(OSError):
                self._unfinished(step).unlink(missing_ok=True)
        self._open.clear()

    def _unfinished(self, step: int) -> Path:
        return _file(self._directory, step).with_suffix(".tmp")


@dataclass(frozen=True)
class Recorded:
    """Record of trajectories in a run directory."""

    run_dir: Path

    @cached_property
    def ranks(self) -> tuple[Mapping[int, Row], ...]:
        """Index of each trainer that recorded: RL step -> line."""
        return tuple(_index(path) for path in sorted((self.run_dir / TRAJECTORIES).glob("rank-*")))

    @property
    def steps(self) -> int:
        """Number of RL steps from 0 on that every trainer has recorded."""
        step = 0
        while self.ranks and all(step in rows for rows in self.ranks):
            step += 1
        return step

    def require(self, steps: int, means: bool, final: bool, rewards: Iterable[str]) -> None:
        """Raise TrajectoryError, which names the key, if the record lacks data that a run would
        read.

        Args:
            steps: RL steps of the run.
            means: whether the run reads the means of the rollout's transitions.
            final: whether the run reads clean latents.
            rewards: rewards that the run optimises.
        """
        if not self.steps:
            raise TrajectoryError(
                f"replay = {self.run_dir}: has no trajectories from RL step 0 on; name a run that "
                "was made with record.trajectories=true."
            )
        if steps > self.steps:
            raise TrajectoryError(
                f"max_rl_steps = {steps}: replay = {self.run_dir} holds {self.steps} RL steps; set "
                f"max_rl_steps={self.steps} or less."
            )
        first = self.ranks[0][0]
        if means and not first["means"]:
            raise TrajectoryError(
                "algorithm.surrogate: needs the means of the rollout's transitions, which replay = "
                f"{self.run_dir} does not hold; record with a surrogate that needs them "
                "(grpo_guard, dppo), or take another one."
            )
        if final != first["final"]:
            raise TrajectoryError(
                f"algorithm: {'needs' if final else 'does not train on'} clean latents, and replay "
                f"= {self.run_dir} holds {'transitions' if final else 'clean latents'}; keep the "
                "record's algorithm._target_."
            )
        if unknown := sorted(set(rewards) - set(first["rewards"])):
            raise TrajectoryError(
                f"reward.rewards: {', '.join(unknown)} is not in replay = {self.run_dir}, which "
                f"holds the scores of {', '.join(first['rewards'])}."
            )

    def read(self, rank: int, step: int) -> memoryview:
        """Return the messages of RL step `step` as trainer `rank` received them.

        Raises:
            TrajectoryError: the file is missing, or its bytes are not those that were written.
        """
        path, row = _file(_directory(self.run_dir, rank), step), self.ranks[rank][step]
        try:
            data = path.read_bytes()
        except OSError as error:
            raise TrajectoryError(f"{path}: cannot be read ({error.strerror or error}).") from error
        if (len(data), xxhash.xxh3_64_hexdigest(data)) != (row["bytes"], row["xxh3"]):
            raise TrajectoryError(
                f"{path} is damaged: it is not what its index says ({row['bytes']} bytes, xxh3 "
                f"{row['xxh3']}); restore it, or set max_rl_steps={step}."
            )
        return memoryview(data)


def _directory(run_dir: Path, rank: int) -> Path:
    return run_dir / TRAJECTORIES / f"rank-{rank:03d}"


def _file(directory: Path, step: int) -> Path:
    return directory / f"step-{step:06d}.cells"


def _index(directory: Path) -> dict[int, Row]:
    """Return RL step -> its newest whole line of the index. A resumed run may have written a step
    twice."""
    rows: dict[int, Row] = {}
    with suppress(OSError):
        for line in (directory / _INDEX).read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, TypeError, KeyError):
                row = json.loads(line)
                rows[int(row["step"])] = row
    return rows
