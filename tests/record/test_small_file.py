"""What is read whole of a foreign run directory is a regular file of a bounded size: nobody waits
for a pipe, and no file fills the memory."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from digenrl.extensions.bench.cli.benchmark import SETTINGS, _same_settings
from digenrl.launchers.reaching import read_access
from digenrl.record.small_file import LONGEST, json_object, read_text
from digenrl.report.page import html
from digenrl.report.read_run import JsonlTail, read_run
from digenrl.strategy.checkpoint_io import MANIFEST, RESUMED, ties_of, verify_checkpoint

HUGE = 1 << 30


def as_pipe(path: Path) -> None:
    os.mkfifo(path, 0o600)


def as_huge(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    os.truncate(descriptor, HUGE)
    os.close(descriptor)


def as_deep(path: Path) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    path.write_text("[" * 100_000)


READERS: dict[str, Callable[[Path], Any]] = {
    MANIFEST: lambda path: verify_checkpoint(path.parent),
    RESUMED: lambda path: ties_of(path.parent),
    "access.json": lambda path: read_access(path.parent),
    "config.yaml": lambda path: html._read_or_none(path),
    "metrics.jsonl": lambda path: JsonlTail(path).read_new_rows(),
    SETTINGS: lambda path: _same_settings(path.parent, {}),
}


@pytest.fixture
def alarm() -> Iterator[None]:
    def late(_: int, __: FrameType | None) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("make", [as_pipe, as_huge, as_deep])
@pytest.mark.parametrize("name", READERS)
def test_no_reader_waits_or_fills_the_memory(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    make(tmp_path / name)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with suppress(ValueError, OSError, RuntimeError):  # its own refusal
        READERS[name](tmp_path / name)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


@pytest.mark.usefixtures("alarm")
def test_a_report_of_a_huge_configuration_is_made_without_it(tmp_path: Path) -> None:
    as_huge(tmp_path / "config.yaml")
    assert any("config.yaml cannot be read" in line for line in read_run(tmp_path).warnings)
    assert html._read_or_none(tmp_path / "config.yaml") is None


def test_a_small_file_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": "ä"}', encoding="utf-8")
    assert json_object(read_text(tmp_path / "a.json")) == {"a": "ä"}
    (tmp_path / "a.json").write_bytes(b"x" * (LONGEST + 1))
    with pytest.raises(ValueError, match="has more than"):
        read_text(tmp_path / "a.json")
    with pytest.raises(ValueError, match="nested too deeply"):
        json_object("[" * 100_000)
    (tmp_path / "link").symlink_to(tmp_path / "a.json")
    with pytest.raises(OSError, match="symbolic"):
        read_text(tmp_path / "link")
