"""Runs that several files look at."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.shared import made_once

if TYPE_CHECKING:
    from tests.strategy.processes import Cluster

_ALL = ("schedule=full", "schedule.tsp.batch=1")
EVERYTHING = {"full": (*_ALL, "schedule.async_steps=0"), "async": (*_ALL, "max_rl_steps=3")}
"""Every mechanism is on: without asynchrony, and with it."""


@pytest.fixture(scope="session")
def everything(shared_folder: Path) -> dict[str, Cluster]:
    """Name in `EVERYTHING` -> the completed run of one trainer and two slow rollouts, with its
    files."""
    return made_once(shared_folder, "everything", partial(_run_everything, shared_folder))


def _run_everything(folder: Path) -> dict[str, Cluster]:
    # This file is read also where an extension that runs need was deleted.
    from tests.strategy.processes import Job, completed, configured, run_series, slow_rollouts
    from tests.strategy.test_equality import LIGHT

    path, found = folder / "everything", {}
    jobs = [
        Job(name, configured(*LIGHT, *words), slow_rollouts) for name, words in EVERYTHING.items()
    ]
    for job, cluster in run_series(path, 1, 2, jobs):
        completed(cluster)
        kept = shutil.copytree(cluster.run_dir, path / f"{job.name}-kept")
        found[job.name] = replace(cluster, run_dir=kept)
    return found
