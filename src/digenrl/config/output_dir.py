"""Creation of the run directory: the first thing that a run writes, after every check has
passed."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from digenrl.config.errors import ConfigError
from digenrl.config.loading import Composed
from digenrl.record.redact import redact
from digenrl.record.run_dir import CONFIG, atomic_replace

_JOB = re.compile(r"-(\d+)$")
_MAX_ATTEMPTS = 1000


def prepare_run_dir(composed: Composed) -> Path:
    """Create the run directory with `store_config` in it, and return its absolute path.

    If the directory exists, it belongs to another run of the same second. The job number at its end
    is then counted up. A resumed run keeps its directory, and keeps its config.yaml until its ranks
    have loaded the checkpoint.

    Raises:
        ConfigError: the directory cannot be created or written.
    """
    try:
        # Its old config.yaml still says with what the checkpoint was trained.
        if composed.resumed:
            return composed.run_dir
        directory = _make_fresh(composed.run_dir)
        store_config(composed.settings.tree, directory)
    except OSError as error:
        raise ConfigError(
            [
                f"output_root: cannot write {error.filename or composed.run_dir} "
                f"({error.strerror}); set "
                "output_root=... to a directory that you may write, with free space."
            ]
        ) from error
    return directory


def store_config(tree: DictConfig, directory: Path) -> None:
    """Write config.yaml, resolved and with secrets masked, in one rename.

    Raises:
        OSError: the file cannot be written; the file that was there is untouched.
    """
    plain: Any = redact(OmegaConf.to_container(tree))
    plain["resume"] = None  # naming the run that is resumed is the command line's part
    with atomic_replace(directory / CONFIG) as temporary:
        temporary.write_text(OmegaConf.to_yaml(OmegaConf.create(plain)), encoding="utf-8")


def prepare_run_dir_or_exit(composed: Composed) -> Path:
    """Return `prepare_run_dir`'s result for a command. A ConfigError is printed to stderr, exit
    code 2."""
    try:
        return prepare_run_dir(composed)
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


def _make_fresh(wanted: Path) -> Path:
    wanted.parent.mkdir(parents=True, exist_ok=True)
    numbered = _JOB.search(wanted.name)
    stem, first = (
        (wanted.name[: numbered.start()], int(numbered[1])) if numbered else (wanted.name, 0)
    )
    candidates = [
        wanted,
        *(wanted.with_name(f"{stem}-{first + k}") for k in range(1, _MAX_ATTEMPTS)),
    ]
    # By attempts and not by looking first: two jobs of a sweep look at once.
    for candidate in candidates:
        # mkdir decides, so that two runs of one second never share a directory.
        try:
            candidate.mkdir()
        except FileExistsError:
            continue
        return candidate
    raise OSError(17, "every numbered name is taken", str(wanted))  # EEXIST
