"""An attempt to resume a run. If it ends before its ranks have loaded the checkpoint, the run stays
as it was."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from digenrl.record.run_dir import CONFIG, DECISIONS, EVENTS, SPANS


class ResumeAttempt:
    """State of the records before a resume writes its first line.

    config.yaml is replaced only when every trainer has loaded the checkpoint.

    Args:
        run_dir: the run's directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._config = run_dir, _stamp(run_dir / CONFIG)
        self._records = {path: path.stat() for path in _records(run_dir)}

    def undone(self) -> bool:
        """Cut the records back to their old state, unless the checkpoint was loaded; return whether
        they were cut.

        logs/ stays, and so does a record that was written anew.
        """
        if _stamp(self._run_dir / CONFIG) != self._config:
            return False
        sizes = {facts.st_ino: facts.st_size for facts in self._records.values()}
        for path in list(_records(self._run_dir)):
            facts = path.stat()
            if facts.st_ino in sizes:  # by its number: a record may have been renamed since
                os.truncate(path, min(facts.st_size, sizes[facts.st_ino]))
            elif path not in self._records:
                path.unlink()
        return True


def _records(run_dir: Path) -> Iterator[Path]:
    """Yield the files that ranks and launcher write before training begins."""
    yield from run_dir.glob(EVENTS)
    for name in (SPANS, DECISIONS):
        yield from (run_dir / name).glob("*.jsonl")


def _stamp(path: Path) -> tuple[int, int]:
    facts = path.stat()
    return facts.st_ino, facts.st_mtime_ns
