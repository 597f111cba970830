"""`digenrl COMMAND [key=value ...]`: every command by one name, from any directory.

With allow_targets=[...] on the command line, modules of the working directory can be named in
`_target_`, after those that are installed. Without it nothing is imported from there.
"""

from __future__ import annotations

import importlib
import os
import resource
import signal
import sys
from collections.abc import Sequence

from digenrl.cli.commands import all_commands
from digenrl.cli.own_modules import find_own_modules
from digenrl.cli.streams import guard_streams


def main(words: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code; 2 if there is no such command.

    Args:
        words: the command line; None: this process's own.
    """
    guard_streams()
    try:
        return _run_command(words)
    except KeyboardInterrupt:  # before the command takes signals, or it takes none
        print("digenrl: stopped by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT


def _names_run(word: str) -> bool:
    """Return whether a first word is a run. A directory may have an = in its name."""
    is_pair = "=" in word and not os.path.isdir(os.path.expanduser(word))
    return not is_pair and not word.startswith("-")


def _run_command(words: Sequence[str] | None) -> int:
    name, *rest = [*(sys.argv[1:] if words is None else words)] or ["--help"]
    known = all_commands()
    if name in ("-h", "--help"):
        from digenrl.config.help import show_page

        listed = [f"  {each:<17}{command.does}" for each, command in known.items()]
        show_page(
            "\n".join(
                [(__doc__ or "").strip(), "", *listed, "", "digenrl COMMAND --help lists its keys."]
            )
        )
        return 0
    if name not in known:
        from digenrl.config.errors import nearest_name

        close = nearest_name(name, list(known))
        hint = f"nearest: {close}." if close else f"there are {', '.join(known)}."
        print(f"digenrl {name}: no such command; {hint}", file=sys.stderr)
        return 2
    command = known[name]
    key = command.run_key
    if key and rest and _names_run(rest[0]):
        rest[0] = f"{key}={rest[0]}"
    if (
        key
        and command.run_required
        and not any(word.startswith((f"{key}=", "-h", "--help")) for word in rest)
    ):
        given = f"no {key}=... in {' '.join(rest)}; " if rest else ""
        print(
            f"digenrl {name}: {given}say which run, e.g. digenrl {name} outputs/EXPERIMENT/TIME-0",
            file=sys.stderr,
        )
        return 2
    if command.sweeps and {*rest} & {"-m", "--multirun"}:
        from digenrl.cli.sweeps import run_sweep

        return run_sweep(rest, name)
    find_own_modules(rest)
    try:
        return int(importlib.import_module(command.module).main(rest))
    except (ImportError, MemoryError) as error:
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit == resource.RLIM_INFINITY:
            raise
        cause = str(error).strip().splitlines() or ["out of memory"]
        print(
            f"digenrl {name}: {cause[-1]}. A process here may take {limit / 2**30:.1f} GiB "
            "of addresses (ulimit -v); PyTorch's libraries alone take about 4: ulimit -v unlimited",
            file=sys.stderr,
        )
        return 1
