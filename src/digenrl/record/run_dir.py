"""Write the files of a run directory: names of files, events, JSON lines. `digenrl.report.read_run`
reads them.

Writers append one JSON object per line with a single `write`, so several processes may share a file
and a reader sees whole lines.

A record never stops a run. Lines that a full or read-only disk refuses are counted. Events of kind
"unwritten" report them, once at the first line and once at the end. A run reserves a little disk
space for these events.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import stat
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from digenrl.record.redact import redact

Row = dict[str, Any]

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
SPANS = "spans"
DECISIONS = "decisions"
SAMPLES = "samples"
SUMMARY = "summary.json"
TRACE = "trace.json"
REPORT = "report.html"
PLOTS = "plots"
BEFORE_AFTER = "samples/before_after.png"
LOGS = "logs"
CHECKPOINTS = "checkpoints"
_FOLDERS = (SPANS, DECISIONS, SAMPLES, PLOTS, LOGS, CHECKPOINTS)
_FILES = (CONFIG, METRICS, EVENTS, SUMMARY, TRACE, REPORT, "access.json", "eval.json", "eval.png")
_LAST = "checkpoints/last"
_WANDB = "wandb"
"""Folder of W&B, which links its newest files inside it."""
_REPLACED = (f"{CHECKPOINTS}/", f"{_WANDB}/")
"""Folders in which no file is written on: it is written anew under another name, or removed."""
_CORE_LOG = re.compile(rf"{_WANDB}/(?:offline-)?run-[\w-]+/logs/debug-core\.log")
"""W&B's link to a log of the machine, which nobody here reads or writes."""

LAUNCH = "launch"
"""Kind of the event with which a launcher opens an attempt: the first, and each `make resume`;
carries `world`."""
END = "end"
"""Kind of the event with which a launcher closes an attempt; carries `status` and `cause`."""
LOST = "lost"
"""Kind of the event with which a launcher notes a rank's death while the run continues; carries
`rank` and `cause`."""
RESTART = "restart"
"""Kind of the event with which a launcher notes that it begins again; carries `cause`, `rl_step`
and `checkpoint`."""
LEFT, JOINED = "left", "joined"
"""Kinds of the events that note a rollout which left as it was asked to (`rank`, `cause`), or
joined (`rank`)."""
CHECKPOINT_FAILED = "checkpoint_failed"
"""Kind of the event that tells of a checkpoint that could not be written; carries `rl_step` and
`cause`."""
EVALUATED = "evaluated"
"""Kind of the event that tells how many `seconds` the evaluation of `rl_step` took, from its
beginning to its line in metrics.jsonl."""
LOGGER = "logger"
"""Kind of the event that tells of `failures` of a `logger`, with the first `cause`."""
UNWRITTEN = "unwritten"
"""Kind of the event that tells of `lines` that `file` could not take, with the `cause`."""
PROMPT_STORE = "prompt_store"
"""Kind of the event with the number of `texts` that a run needs, and the number that this rank has
`encoded`. Rank 0 always writes this event. Other ranks write it if they have encoded texts."""
ROUTINE = ("evaluated", "publish", "lend", "dropped", "missing", "shares", "warning", "checkpoint")
"""Kinds of events that a step may repeat. Beyond the limit of `limit_events` they are refused."""

_APPENDED = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_RESERVE, _RESERVE_BYTES = ".reserve", 64 << 10
_unwritten: Counter[Path] = Counter()
"""Lines that this process could not write and has not reported yet, by file. A file that failed
once stays here."""
_events_limit: float = math.inf
_events_name = EVENTS


_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_ZERO = time.time() - time.clock_gettime(_CLOCK)
"""Unix second at which this process's steady clock stood at zero. Forked ranks inherit it."""


def unix_time() -> float:
    """Return the Unix second by a clock that nobody can set: a run's times keep their distances
    when the machine's time is corrected."""
    return _ZERO + time.clock_gettime(_CLOCK)


def limit_events(size: float) -> None:
    """Refuse routine events once their file has `size` bytes."""
    global _events_limit
    _events_limit = size


def write_events_of(host: str) -> None:
    """Write events of this process into a file of its machine's own, `events-HOST.jsonl`.

    On NFS, machines that append to one file overwrite each other's lines: O_APPEND is atomic within
    a machine alone. Only the machine with the control store writes events.jsonl.
    """
    global _events_name
    _events_name = f"events-{re.sub(r'[^0-9A-Za-z.-]', '-', host)}.jsonl"


def event_files(run_dir: str | os.PathLike[str]) -> list[Path]:
    """Return the files with a run's events: events.jsonl, and those of other machines."""
    return [Path(run_dir) / EVENTS, *sorted(Path(run_dir).glob("events-*.jsonl"))]


def hold_reserve(run_dir: str | os.PathLike[str]) -> None:
    """Reserve a little disk space, for what a full disk must still take (`append_event`)."""
    with suppress(OSError), atomic_replace(Path(run_dir) / _RESERVE) as path:
        path.write_bytes(bytes(_RESERVE_BYTES))


def release_reserve(run_dir: str | os.PathLike[str]) -> bool:
    """Release the reserve, and return whether there was one."""
    with suppress(OSError):
        (Path(run_dir) / _RESERVE).unlink()
        return True
    return False


def free_space(path: str | os.PathLike[str]) -> str:
    """Return the free space on the disk of `path`, in words."""
    try:
        state = os.statvfs(path)
    except OSError as error:
        return f"its disk does not answer: {error.strerror}"
    return f"{state.f_bavail * state.f_frsize / 2**20:.1f} MiB free"


class ForeignEntry(ValueError):
    """A run directory holds a link, a pipe or a device, or a folder in place of a file."""


def require_own(run_dir: str | os.PathLike[str]) -> None:
    """Check that whatever is read or written in a run directory stays in it.

    Links are refused, with two exceptions: `checkpoints/last` to a checkpoint beside it, and what
    W&B links inside its own folder or to its own log. Pipes, devices and sockets are refused too,
    and so is a folder in place of a file. A file with a second name elsewhere (a hard link) is
    refused, because a later command may write to it. Files of checkpoints and of W&B may have a
    second name: they are replaced, never written to.

    Raises:
        ForeignEntry: names what is wrong, and what to do.
    """
    root = Path(run_dir)
    problems = []
    for found, why in _find_strangers(root, root):
        problems.append(f"{found}: {why}")
        if len(problems) == 4:
            break
    if problems:
        raise ForeignEntry(
            f"{'; '.join(map(printable_text, problems))}. A run directory holds plain files "
            "and folders alone, because resume, evaluation, export and report read and write "
            "there: remove what is named, or copy the run without it."
        )


def _find_strangers(root: Path, folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield (path, fault) of everything below `folder` that leads elsewhere; links are not
    followed."""
    found: list[os.DirEntry[str]] = []
    with suppress(FileNotFoundError), os.scandir(folder) as entries:  # a running run removes some
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        path = folder / entry.name
        name = path.relative_to(root).as_posix()
        try:
            facts = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        if stat.S_ISLNK(facts.st_mode):
            target = os.readlink(path)
            named = _is_newest(name, target) or _CORE_LOG.fullmatch(name) is not None
            if not (named or _stays_inside(root / _WANDB, path, target)):
                yield path, f"is a link to {target}"
        elif stat.S_ISDIR(facts.st_mode):
            if name in _FILES:
                yield path, "is a folder, and no file"
            else:
                yield from _find_strangers(root, path)
        elif not stat.S_ISREG(facts.st_mode):
            yield path, "is neither a file nor a folder"
        elif name in _FOLDERS:
            yield path, "is a file, and no folder"
        elif facts.st_nlink > 1 and not name.startswith(_REPLACED):
            yield path, "may be written on, and has a second name elsewhere (a hard link)"


def _is_newest(name: str, target: str) -> bool:
    """Return whether a link is `checkpoints/last`, to a name beside it."""
    return name == _LAST and "/" not in target and target not in ("", ".", "..", "last")


def _stays_inside(folder: Path, path: Path, target: str) -> bool:
    """Return whether a relative link inside `folder` ends inside of it."""
    if folder not in path.parents or os.path.isabs(target) or folder.is_symlink():
        return False
    real = os.path.realpath(folder)
    return os.path.realpath(path).startswith(f"{real}{os.sep}")


def printable_text(text: str) -> str:
    r"""Return `text` without control characters, so that a terminal shows it and obeys nothing.

    >>> printable_text("a\x1b]0;b\nc")
    'a\\x1b]0;b\\nc'
    """
    if text.isprintable():  # nearly every text
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def own_folder(folder: Path) -> Path:
    """Make a folder of a run directory, and return it.

    Raises:
        OSError: it is a link, which is not followed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if folder.is_symlink():
        raise OSError(errno.ELOOP, f"{folder.name} is a link, which is not followed", str(folder))
    return folder


def open_below(path: Path, flags: int) -> int:
    """Return a descriptor of a file of a run directory, whose own folders are no links, even if
    somebody exchanges one after it was checked.

    Raises:
        OSError: the file cannot be opened, or its folder is a link.
    """
    own = os.O_NOFOLLOW if path.parent.name in _FOLDERS else 0
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | own)
    try:
        return os.open(path.name, flags, 0o644, dir_fd=folder)
    finally:
        os.close(folder)


def open_log(path: Path) -> int:
    """Return a descriptor that appends to a file in a folder of a run directory.

    Raises:
        OSError: the file or its folder is a link, or the file is no regular one.
    """
    own_folder(path.parent)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = open_below(path, flags)
    try:
        require_plain(descriptor, path)
    except OSError:
        os.close(descriptor)
        raise
    os.set_blocking(descriptor, True)
    return descriptor


def require_plain(descriptor: int, path: Path) -> None:
    """Raise OSError unless an open file is a regular one that has no second name."""
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if facts.st_nlink > 1:
        raise OSError(errno.EMLINK, "has a second name, which would be written on", str(path))


@contextmanager
def atomic_replace(path: Path) -> Iterator[Path]:
    """Yield a new, empty file beside `path`, whose name nobody can guess. It replaces `path` after
    the body, and is removed if the body fails."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    os.close(os.open(temporary, flags, 0o666))
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def share_as_folder(path: Path) -> None:
    """Let those read and write a file who read and write its folder: safetensors leaves files that
    only their owner reads."""
    path.chmod(path.parent.stat().st_mode & 0o666)


def json_safe(value: object) -> object:
    """Return `value` for JSON: NaN and infinities become null, 0-d tensors and numpy scalars become
    plain numbers.

    Example:
        >>> json_safe({"loss": float("nan"), 3: (1.0, Path("runs"))})
        {'loss': None, '3': [1.0, 'runs']}
    """
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def append_jsonl(path: str | os.PathLike[str], row: Mapping[str, object]) -> None:
    """Append `row` as one line, in one write; a line that cannot be written is counted
    (`count_unwritten`)."""
    try:
        _append_row(Path(path), row)
    except OSError as error:
        count_unwritten(Path(path), 1, error)


def _append_row(path: Path, row: Mapping[str, object], limit: float = math.inf) -> None:
    """Append `row` to a file of less than `limit` bytes.

    After a line that a crash tore, the row still begins on a new line.

    Raises:
        OSError: the file cannot be opened, has reached `limit`, or does not take the whole line.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.parent.name in _FOLDERS:
        own_folder(path.parent)
    line = (
        json.dumps(json_safe(row), ensure_ascii=False, separators=(",", ":")).encode(
            errors="replace"
        )
        + b"\n"
    )
    descriptor = open_below(path, _APPENDED)
    try:
        require_plain(descriptor, path)
        size = os.fstat(descriptor).st_size
        if size >= limit:
            raise OSError(errno.EFBIG, "the limit of record.keep_mib")
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        write_whole(descriptor, line)
    finally:
        os.close(descriptor)


def write_whole(descriptor: int, data: bytes) -> None:
    """Write `data` in one call.

    Raises:
        OSError: the file took nothing, or only a part of it, which is what a disk does that fills
            up.
    """
    if os.write(descriptor, data) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def append_event(
    run_dir: str | os.PathLike[str],
    kind: str,
    facts: Mapping[str, object] | None = None,
    urgent: bool = False,
) -> bool:
    """Append {"time": Unix seconds, "kind": kind, **facts} to the run's events.jsonl, or to the
    file of `write_events_of`; return whether it was written. Secrets are masked, because facts
    contain texts of errors.

    Args:
        urgent: whether the event takes the reserve if the disk is full.
    """
    path = Path(run_dir) / _events_name
    event = {"time": unix_time(), "kind": kind, **redact(facts or {})}
    try:
        _append_row(path, event, _events_limit if kind in ROUTINE else math.inf)
    except OSError as error:
        if urgent:
            return release_reserve(run_dir) and append_event(run_dir, kind, facts, urgent)
        count_unwritten(path, 1, error)
        return False
    return True


def count_unwritten(path: Path, lines: int, error: OSError) -> None:
    """Count lines that `path`, a file of a run directory, could not take. The first failure is
    reported at once."""
    first = path not in _unwritten
    _unwritten[path] += lines
    if first:
        _report_unwritten(path, error.strerror or str(error))


def tell_unwritten(run_dir: str | os.PathLike[str]) -> None:
    """Report the lines that this process could not write. Called at the end of its part of the
    run."""
    for path in [
        path for path, lines in _unwritten.items() if lines and Path(run_dir) in path.parents
    ]:
        _report_unwritten(path, None)


def _report_unwritten(path: Path, cause: str | None) -> None:
    run_dir = (
        path.parent
        if path.suffix == ".jsonl" and path.parent.name not in (SPANS, DECISIONS)
        else path.parents[1]
    )
    facts = {"file": str(path.relative_to(run_dir)), "lines": _unwritten[path], "cause": cause}
    if append_event(run_dir, UNWRITTEN, facts, urgent=True):
        _unwritten[path] = 0


def write_json(path: str | os.PathLike[str], value: object, indent: int | None = 2) -> None:
    """Write `value` beside `path` and rename it over, so that no reader ever sees half a file.

    Raises:
        OSError: the file cannot be written; no part of the file stays.
    """
    with atomic_replace(Path(path)) as temporary:
        text = json.dumps(json_safe(value), indent=indent, ensure_ascii=False)
        temporary.write_text(text + "\n", encoding="utf-8", errors="replace")


def write_trace(path: str | os.PathLike[str], events: Iterable[Mapping[str, object]]) -> None:
    """Write Chrome trace events as one JSON object, one event a line, without holding them in
    memory.

    Raises:
        OSError: the file cannot be written; no part of the file stays.
    """
    with (
        atomic_replace(Path(path)) as temporary,
        temporary.open("w", encoding="utf-8", errors="replace") as file,
    ):
        file.write('{"displayTimeUnit":"ms","traceEvents":[')
        for number, event in enumerate(events):
            file.write(
                (",\n" if number else "\n") + json.dumps(json_safe(event), separators=(",", ":"))
            )
        file.write("\n]}\n")
