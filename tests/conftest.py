"""What every test shares: one thread per process, no network, no process left behind."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Set before torch is imported by any test: with several test processes on two cores, more threads
# only contend.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("MPLBACKEND", "Agg")

import psutil
import pytest
import torch
from hypothesis import settings

if TYPE_CHECKING:
    from tests.training import Train

# Autograd finds out at its first use, for good, that no device needs a thread. Beside fake CUDA
# tensors it would start one, and then no test could fork ranks that train. With the strict device
# (tests/device) it would start one at once, as with a GPU.
if "STRICT_TESTS" not in os.environ:
    torch.zeros(1, requires_grad=True).sum().backward()

# The same examples every time, or an old defect would fail a new change; HYPOTHESIS_PROFILE=random
# looks for others.
settings.register_profile("same", derandomize=True, deadline=None)  # a busy machine is slow
settings.register_profile("random", derandomize=False, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# Runs save checkpoints, and each save waits for the disk several times. Memory lets nobody wait. Some
# tests run what they have written.
MEMORY = Path("/dev/shm")
if (
    "TMPDIR" not in os.environ
    and MEMORY.is_dir()
    and shutil.disk_usage(MEMORY).free > 8 << 30
    and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC
):
    os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)

ROOT = Path(__file__).resolve().parents[1]
DELETED = frozenset(os.environ.get("DIGENRL_TESTS_WITHOUT", "").split())


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a command run a part of the tests: `--part 3/10` is the fourth of ten."""
    parser.addoption("--part", metavar="K/N", help="run the K-th of N parts, counted from 0")
    parser.addoption("--round", metavar="R", help="order of a part that is not run to its end")


def in_part(name: str, part: str) -> bool:
    """Return whether a test belongs to a part. A test stays in its part whatever others there are.

    Example:
        >>> name = "tests/test_layers.py::test_imports_point_downwards"
        >>> [part for part in range(10) if in_part(name, f"{part}/10")]
        [7]
    """
    number, parts = (int(word) for word in part.split("/"))
    return zlib.crc32(name.encode()) % parts == number % parts


def pytest_configure() -> None:
    """Collect no garbage until all tests are imported; programs that import this file do."""
    gc.disable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out test files that need a deleted extension (tests/test_deleting.py), and files
    without a chosen test.

    Importing all files takes ten seconds. The second half of `make test` leaves out files without a
    test that runs alone. `make test-fast` leaves out files that are marked as a whole.
    """
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    chosen = config.option.markexpr
    if chosen.endswith(" and alone"):
        return True if "mark.alone" not in collection_path.read_text(encoding="utf-8") else None
    if chosen.endswith(" and not processes and not heavy"):
        whole = r"^pytestmark = .*\bmark\.(?:processes|heavy)\b"
        text = collection_path.read_text(encoding="utf-8")
        return True if re.search(whole, text, re.MULTILINE) else None
    return True if DELETED and _extensions_needed(collection_path) & DELETED else None


@functools.cache
def _extensions_needed(path: Path) -> frozenset[str]:
    """Return the extensions that a test file names, and those that its helper modules name. Who
    composes a configuration needs `tasks`, of which configs/train.yaml chooses the first run."""
    text = path.read_text(encoding="utf-8")
    needed = frozenset(re.findall(r"\b(?:digenrl|tests)\.extensions\.(\w+)", text))
    if re.search(r"\b(config|configuration)\.load|\bcompose(_words)?\(|(?<![\w.])load\(", text):
        needed |= {"tasks"}
    imported = re.findall(r"^from ((?:tests|benchmarks)[\w.]*) import (.*)", text, re.MULTILINE)
    modules = {
        name
        for module, names in imported
        for name in (module, *(f"{module}.{n}" for n in names.split(", ")))
    }
    helpers = (ROOT / f"{name.replace('.', '/')}.py" for name in modules)
    return needed.union(*(_extensions_needed(helper) for helper in helpers if helper.is_file()))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the asked part. Tests of processes and heavy ones first, so that no worker waits for
    another's last one; with `--round`, each round has an order of its own."""
    if part := config.getoption("part"):
        left_out = [item for item in items if not in_part(item.nodeid, part)]
        items[:] = [item for item in items if in_part(item.nodeid, part)]
        config.hook.pytest_deselected(items=left_out)
    if (drawn := config.getoption("round")) is not None:
        items.sort(key=lambda item: zlib.crc32(f"{drawn} {item.nodeid}".encode()))
        return
    items.sort(key=lambda item: not any(map(item.get_closest_marker, ("processes", "heavy"))))


def pytest_collection_finish() -> None:
    """What is imported is no garbage: looking through it again and again takes a tenth of the tests'
    time, in each rank that they fork too."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def open_files() -> dict[str, int]:
    """How many files this process may keep open before all garbage is searched for them."""
    return {"most": 50}


@pytest.fixture(scope="module", autouse=True)
def searched_once(open_files: dict[str, int]) -> None:
    """What files of tests leave behind is searched once, too: before the next file, because at its
    end pytest still holds what its last test was given. All of it is searched, which takes two
    seconds, where it keeps more than 50 files open, and 10 more than the last such search could
    close: forked ranks would inherit them."""
    process = psutil.Process()
    searches_all = process.num_fds() > open_files["most"]
    if searches_all:
        gc.unfreeze()
    gc.collect()
    gc.freeze()
    if searches_all:
        open_files["most"] = max(50, process.num_fds() + 10)


def pytest_unconfigure() -> None:
    """What was frozen before a fork is freed again, or libraries report it as leaked."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def repository() -> Path:
    """The repository's root directory."""
    return ROOT


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Callable[..., Train]]:
    """Starts train commands (`fork=True`: forked), and leaves none behind."""
    from tests.training import commands

    yield from commands(tmp_path)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder that all of pytest's workers have, for `tests.shared`."""
    if worker_id == "master":
        return tmp_path_factory.mktemp("shared")
    return tmp_path_factory.getbasetemp().parent


def _is_tracker(process: psutil.Process) -> bool:
    """Return whether a process is multiprocessing's resource tracker. The tracker stays until this
    process ends."""
    with contextlib.suppress(psutil.Error):
        return "resource_tracker" in " ".join(process.cmdline())
    return False


@pytest.fixture(scope="session", autouse=True)
def no_process_left_behind() -> Iterator[None]:
    """Fail the session if a child process outlives it (each leftover rank would keep a port and a
    core)."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = [
        child
        for child in psutil.Process().children(recursive=True)
        if child.pid not in before and not _is_tracker(child)
    ]
    _, alive = psutil.wait_procs(left, timeout=5.0)
    commands = [" ".join(child.cmdline())[:120] for child in alive]
    for child in alive:
        child.kill()
    assert not commands, f"tests left processes behind: {commands}"
