"""Which files a run passes through, from the command to the function at the end of a way: the
counts of docs/design.md, section 4.

    python -m scripts.ways

One small run is started (digits, one RL step on two ranks, in a temporary directory). At the first
call of each function of `ENDS`, the files of the package on the call stack are kept, in order, and
the function's own. Ranks are forks of the launcher, so their stacks begin with the command's.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import digenrl
from digenrl.algorithms.surrogates import Clipped
from digenrl.cli import train
from digenrl.schedule.scheduler import Scheduler
from digenrl.strategy import publishing

PACKAGE = Path(digenrl.__file__).parent
RUN = (
    "experiment=digits_flowgrpo",
    "max_rl_steps=1",
    "data.prompts_per_batch=4",
    "data.group_size=4",
    "sampling.task_size=4",
    "schedule.tag=true",
    "callbacks.evaluation.every=0",
)
ENDS: dict[str, tuple[object, str]] = {
    "loss": (Clipped, "loss"),
    "lending": (Scheduler, "next_move"),
    "publication": (publishing, "publish"),
}
"""Name of a way -> owner and name of the function at its end."""


def files_on_stack(function: Callable[..., Any]) -> list[str]:
    """Return the files of the package on the call stack, from the command on, and that of
    `function`, each once."""
    names = [frame.filename for frame in traceback.extract_stack()]
    paths = map(Path, [*names, inspect.unwrap(function).__code__.co_filename])
    inside = (path.relative_to(PACKAGE) for path in paths if path.is_relative_to(PACKAGE))
    return list(dict.fromkeys(map(str, inside)))


def keep_stack(function: Callable[..., Any], file: Path) -> Callable[..., Any]:
    """Return `function`, which writes the files on its stack to `file` at its first call."""

    @functools.wraps(function)
    def kept(*arguments: Any, **named: Any) -> Any:
        if not file.exists():
            file.write_text(json.dumps(files_on_stack(function)), encoding="utf-8")
        return function(*arguments, **named)

    return kept


def walk_ways(directory: Path) -> dict[str, list[str]]:
    """Return way -> the files on it, by a run that writes into `directory`."""
    for name, (owner, function) in ENDS.items():
        setattr(owner, function, keep_stack(getattr(owner, function), directory / f"{name}.json"))
    words = [*RUN, f"output_root={directory}"]
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        code = train.main(words)
    if code:
        raise SystemExit(code)
    return {
        name: json.loads((directory / f"{name}.json").read_text(encoding="utf-8")) for name in ENDS
    }


def main() -> None:
    """Print each way: its number of files, and the files."""
    with tempfile.TemporaryDirectory() as directory:
        for name, files in walk_ways(Path(directory)).items():
            print(f"{name}: {len(files)} files\n  " + "\n  ".join(files), file=sys.stdout)


if __name__ == "__main__":
    main()
