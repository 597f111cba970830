"""What a command of `digenrl` is, and commands as texts that a user can paste."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from digenrl.config.words import format_value
from digenrl.record.run_dir import CONFIG


@dataclass(frozen=True)
class Command:
    """One command of `digenrl`."""

    module: str
    """Module whose `main(words)` runs the command."""
    does: str
    """One line for the list of commands."""
    run_key: str | None = None
    """Key for the command's first bare word; None: the command takes `key=value` words only."""
    run_required: bool = True
    """Whether a command with a `run_key` refuses to start without a run."""
    sweeps: bool = False
    """Whether `-m` runs the command once for each combination of values."""


_VARIABLES = {"experiment": "EXP", "hardware": "HW"}
"""Keys that have a variable of their own in the Makefile."""


def shell_command(
    name: str, words: Sequence[str], run: Path | None = None, dialect: str | None = None
) -> str:
    """Return a command that a shell reads as it stands: `make NAME ...` where make called this
    process (the Makefile sets DIGENRL_CALLER), else `digenrl NAME ...`.

    Args:
        name: of the command, such as "resume".
        words: key=value words.
        run: run directory that the command works on.
        dialect: "make" or "digenrl"; None: the caller's.
    """
    if (dialect or os.environ.get("DIGENRL_CALLER")) != "make":
        where = [] if run is None else [str(run)]
        return shlex.join(["digenrl", name, *where, *words])
    given = {} if run is None else {"RUN": str(run)}
    # make has variables for some keys. The rest goes into ARGS as one text.
    pairs = [(word, *word.split("=", 1)) for word in words]
    given |= {_VARIABLES[key]: its[0] for _, key, *its in pairs if key in _VARIABLES}
    rest = shlex.join([word for word, key, *_ in pairs if key not in _VARIABLES])
    given |= {"ARGS": rest} if rest else {}
    # make reads "$$" as "$".
    doubled = [f"{key}={text.replace('$', '$$')}" for key, text in given.items()]
    return shlex.join(["make", name, *doubled])


def to_continue(run_dir: Path, *words: str, given: Mapping[str, object] | None = None) -> str:
    """Return the command that resumes a run. What counts only on the command line is repeated.

    Args:
        given: the configuration as this command line made it, or {} where it allows nothing. None:
            the run's config.yaml, which must be this user's own: a foreign one would be allowed
            what it asks for by whoever pastes the command.
    """
    # Imported here, because listing the commands loads this page and needs neither.
    from digenrl.config.reaching import reaching_words
    from digenrl.record.stored_yaml import read_plain

    stored = read_plain(run_dir / CONFIG) if given is None else given
    config = stored if isinstance(stored, Mapping) else {}
    repeated = [
        f"{key}=[{','.join(map(format_value, names))}]"
        for key in ("allow_targets", "confirm_hosts")
        if isinstance(names := config.get(key), list) and names
    ]
    return shell_command("resume", [*repeated, *reaching_words(config), *words], run_dir)
