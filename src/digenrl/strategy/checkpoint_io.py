"""Checkpoints as directories that are either whole or not there.

    checkpoints/step-000010/policy.safetensors   the trained parameters, by their names in the transformer
                            state.pt             optimizer, loops, callbacks, RNG (tensors and plain values only)
                            manifest.json        size and xxh3 of both files, and its own digest; written last
    checkpoints/last -> step-000010

Files are written under a temporary name, flushed to disk, read back and compared, then renamed; `last` moves
afterwards, in one rename. Neither safetensors nor torch.save notices a flipped bit: the manifest does.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

log = logging.getLogger(__name__)
POLICY = "policy.safetensors"
STATE = "state.pt"
MANIFEST = "manifest.json"
_ASIDE = ".old-"
PREFIX = "policy.transformer."
"""Where the LightningModule's state dict holds the transformer."""


class CheckpointError(RuntimeError):
    """A checkpoint that is damaged, incomplete or foreign."""


class DirectoryCheckpointIO(CheckpointIO):
    """Lightning's checkpoint dictionary as a directory (see the module docstring).

    Args:
        keep: newest checkpoints kept; older ones are removed after a successful save.
    """

    def __init__(self, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"callbacks.checkpoint.keep = {keep}: keep at least 1 checkpoint.")
        self._keep = keep

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write one checkpoint; nothing of an older one is touched before this one is complete.

        Raises:
            OSError: no space, no permission, or other bytes were read back than were written; the temporary directory
                is removed.
        """
        target = Path(path)
        temporary = target.with_name(f".tmp-{target.name}")
        target.parent.mkdir(parents=True, exist_ok=True)
        for unfinished in target.parent.glob(".tmp-step-*"):  # of a process that was killed
            shutil.rmtree(unfinished, ignore_errors=True)
        try:
            temporary.mkdir()
            rest = dict(checkpoint)
            state = rest.pop("state_dict")
            policy = {
                k.removeprefix(PREFIX): v.detach().cpu().contiguous() for k, v in state.items() if k.startswith(PREFIX)
            }
            rest["state_dict"] = {k: v for k, v in state.items() if not k.startswith(PREFIX)}
            _save_weights(policy, temporary / POLICY)
            _save_state(rest, temporary / STATE)
            files = {name: _describe(temporary / name) for name in (POLICY, STATE)}
            (temporary / MANIFEST).write_text(_manifest({"epoch": rest.get("epoch"), "files": files}))
            for name in (POLICY, STATE, MANIFEST):
                _flush(temporary / name)
            verify(temporary)
            if target.exists():  # a resumed run reaches a step again: set aside, so that a crash finds one of the two
                target.rename(target.with_name(f"{_ASIDE}{target.name}"))
            temporary.rename(target)
        except CheckpointError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise OSError(errno.EIO, f"other bytes were read back than were written ({error})") from error
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _point(target.with_name("last"), target.name)
        outdated = [old for old in sorted(target.parent.glob("step-*"))[: -self._keep] if old != target]
        for directory in [*outdated, *target.parent.glob(f"{_ASIDE}*")]:
            shutil.rmtree(directory)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read and verify one checkpoint. Tensors and plain values only: nothing in it can execute.

        Raises:
            CheckpointError: see `verify`.
        """
        source = Path(path)
        verify(source)
        checkpoint: dict[str, Any] = torch.load(source / STATE, map_location=map_location or "cpu", weights_only=True)
        policy = {PREFIX + name: tensor for name, tensor in load_file(source / POLICY).items()}
        checkpoint["state_dict"] = checkpoint["state_dict"] | policy
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        shutil.rmtree(path, ignore_errors=True)


def verify(directory: Path) -> None:
    """Compare every file with the manifest.

    Raises:
        CheckpointError: no manifest (the write never finished) or one that does not list the checkpoint's files, a
            missing file, or other bytes than were written.
    """
    try:
        text = (directory / MANIFEST).read_text()
        facts = {key: value for key, value in json.loads(text).items() if key != "xxh3"}
        files = facts["files"]
        intact = text == _manifest(facts)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{directory} is not a complete checkpoint: {MANIFEST} cannot be read ({error})."
        ) from error
    if not intact:
        raise CheckpointError(
            f"{directory / MANIFEST} is damaged: it does not give its own digest. "
            "Resume from an older checkpoint of the run, or restore the file."
        )
    if not isinstance(files, dict) or not {POLICY, STATE} <= files.keys():
        raise CheckpointError(
            f"{directory / MANIFEST} does not list {POLICY} and {STATE}: {directory} is not a complete checkpoint. "
            "Resume from an older checkpoint of the run."
        )
    for name, written in files.items():
        found = _describe(directory / name) if (directory / name).is_file() else None
        if found != written:
            raise CheckpointError(
                f"{directory / name} is damaged: its manifest says {written}, the file is {found}. "
                "Resume from an older checkpoint of the run, or restore the file."
            )


def newest_valid(checkpoints: Path, say: Callable[[str], object] = log.warning) -> Path:
    """The newest checkpoint of a run that verifies; `say` is told which damaged ones were passed over, and why.

    Raises:
        CheckpointError: there is none; the message tells what is wrong with each.
    """
    aside = sorted(checkpoints.glob(f"{_ASIDE}*"), reverse=True)  # there only after a crash between two renames
    named = [*sorted(checkpoints.glob("step-*"), reverse=True), *aside]
    found = [path for path in named if path.name.rpartition("-")[2].isdecimal()]
    problems: list[str] = []
    for directory in found:
        try:
            verify(directory)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            say(f"passed over for {directory.name}: {problem}")
        return directory
    raise CheckpointError("\n".join([f"no valid checkpoint in {checkpoints} ({len(found)} looked at).", *problems]))


def _save_weights(tensors: dict[str, Tensor], path: Path) -> None:
    """safetensors' own error says what the disk said; raised as the OSError that it is."""
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        told = re.search(r"os error (\d+)", str(error))
        if told is None:
            raise
        raise OSError(int(told[1]), os.strerror(int(told[1])), str(path)) from error


def _save_state(state: dict[str, Any], path: Path) -> None:
    """torch.save hides what the disk said behind a RuntimeError about positions."""
    with path.open("wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def step_of(checkpoint: Path) -> int:
    """RL steps that a checkpoint's run had finished, from its directory's name."""
    return int(checkpoint.name.rpartition("-")[2])


def _manifest(facts: dict[str, Any]) -> str:
    """The text of a manifest, which ends with the digest of its own facts."""
    own = xxhash.xxh3_64_hexdigest(json.dumps(facts).encode())
    return json.dumps(facts | {"xxh3": own}, indent=2)


def _describe(path: Path) -> dict[str, Any]:
    state = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(16 << 20):
            state.update(chunk)
    return {"bytes": path.stat().st_size, "xxh3": state.hexdigest()}


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _point(link: Path, name: str) -> None:
    """Make `link` point to its sibling `name`, in one rename."""
    temporary = link.with_name(f".tmp-{link.name}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(name)
    temporary.rename(link)
