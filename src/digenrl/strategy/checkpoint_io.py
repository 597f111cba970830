"""Checkpoints as directories that are either whole or not there.

    checkpoints/step-000010/policy.safetensors       the trained parameters, by their names in the transformer
                            state-00000.safetensors  optimizer moments, averages, copies: the rows that trainer 0 holds;
                                                     a file per trainer that holds any
                            state.pt                 loops, callbacks, RNG (tensors and plain values only)
                            manifest.json            size and xxh3 of every file, and its own digest; written last
    checkpoints/last -> step-000010

What grows with the model is copied to the host, by each trainer its own rows, and written beside
training (see `checkpoint_storage`). Files are written under a temporary name, flushed to disk, read
back and compared, then renamed; `last` moves afterwards, in one rename. Neither safetensors nor
torch.save notices a flipped bit: the manifest does.
"""  # noqa: E501

from __future__ import annotations

import concurrent.futures
import errno
import json
import logging
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.tensor import DTensor

from digenrl.record.run_dir import atomic_replace, own_folder
from digenrl.record.small_file import json_object, read_text
from digenrl.strategy.checkpoint_storage import (
    POLICY,
    WHERE,
    Description,
    PartWriter,
    describe_file,
    flush_and_describe,
)
from digenrl.strategy.exchange import UNSENT

log = logging.getLogger(__name__)
warnings.filterwarnings(
    "ignore", message="torch.distributed is disabled"
)  # so it is, where nothing is trained
STATE = "state.pt"
MANIFEST = "manifest.json"
RESUMED = "resumed.json"
"""Digests of the configuration under which a run has gone on from a checkpoint."""
_NAME = re.compile(r"step-\d+")
UNFINISHED = ".tmp-"
"""Prefix of a checkpoint's directory until it is complete."""
_ASIDE = ".old-"
GROWING = ("state_dict", "optimizer_states", "algorithm", UNSENT)
"""Entries of a checkpoint whose tensors grow with the model."""

Room = Callable[[str, torch.Size, torch.dtype], Tensor]
"""(place in the checkpoint, size, dtype) -> where that tensor is read to; its local rows alone, if
it is sharded."""


class CheckpointError(RuntimeError):
    """A checkpoint that is damaged, incomplete or foreign."""


@dataclass(frozen=True)
class Writing:
    """A checkpoint that is being written."""

    future: concurrent.futures.Future[Any]
    temporary: Path
    """Directory of the files until the checkpoint is complete."""

    def wait_until_complete(self) -> None:
        """Wait until it is complete; every trainer is told alike.

        Raises:
            OSError: no space, no permission, or other bytes were read back than were written;
                nothing of it is left.
        """
        try:
            self.future.result()
        except CheckpointException as error:
            shutil.rmtree(self.temporary, ignore_errors=True)
            raise _root_cause(error) from error


class DirectoryCheckpointIO(CheckpointIO):
    """Lightning's checkpoint dictionary as a directory (see the module docstring).

    Args:
        keep: newest checkpoints kept; older ones are removed after a successful save.
        tie: digests of the run's configuration, which a checkpoint's manifest keeps.
    """

    def __init__(self, keep: int = 2, tie: Mapping[str, str] = MappingProxyType({})) -> None:
        if keep < 1:
            raise ValueError(f"callbacks.checkpoint.keep = {keep}: keep at least 1 checkpoint.")
        self._keep, self._tie = keep, dict(tie)

    def save_checkpoint(
        self, checkpoint: Mapping[str, object], path: str | Path, storage_options: object = None
    ) -> None:
        """Write one checkpoint, alone. Raises: see `Writing.wait_until_complete`."""
        self.begin_writing(checkpoint, Path(path)).wait_until_complete()

    def begin_writing(
        self,
        checkpoint: Mapping[str, object],
        target: Path,
        group: dist.ProcessGroup | None = None,
        stage: Callable[[], AbstractContextManager[object]] = nullcontext,
        fixed: Iterable[Tensor] = (),
    ) -> Writing:
        """Copy `checkpoint` and begin to write it as `target`; nothing of an older one is touched
        before this one is complete. With a `group`, which nothing else may use meanwhile, all its
        ranks call this: each writes what it holds of sharded tensors, the first the rest.

        Args:
            stage: entered by the writing thread while it writes.
            fixed: tensors of the checkpoint that nobody changes: those need no copy.
        """
        first = group is None or dist.get_rank(group) == 0
        tensors = dict[str, Tensor]()
        # Large tensors leave the dictionary for `tensors`; what stays is small, and goes into
        # state.pt.
        rest = {
            name: _without_tensors(entry, name, tensors) if name in GROWING else entry
            for name, entry in checkpoint.items()
        }
        # Training changes the originals while the thread writes. What the memo names is not copied.
        rest = deepcopy(rest, {id(tensor): tensor for tensor in fixed}) if first else {}
        # The first rank writes what all ranks hold alike; of sharded tensors each writes its rows.
        own = {
            place: tensor
            for place, tensor in tensors.items()
            if first or isinstance(tensor, DTensor)
        }
        temporary = target.with_name(f"{UNFINISHED}{target.name}")

        # In the first rank's writing thread, when the parts of all ranks are on disk.
        def complete_checkpoint(files: dict[str, Description]) -> None:
            _save_state(rest, temporary / STATE)
            files[STATE] = flush_and_describe(temporary / STATE)
            (temporary / MANIFEST).write_text(
                _manifest_text(
                    {"epoch": rest.get("epoch"), "name": target.name, "files": files}
                    | ({"tie": self._tie} if self._tie else {})
                )
            )
            flush_and_describe(temporary / MANIFEST)
            try:
                # Read back before it gets its name: a disk that returns other bytes is found now.
                verify_checkpoint(temporary)
            except CheckpointError as error:
                raise OSError(
                    errno.EIO, f"other bytes were read back than were written ({error})"
                ) from error
            self._make_newest(temporary, target)

        writer = PartWriter(temporary, stage, complete_checkpoint)
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        future = dcp.async_save(
            own, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None
        )
        return Writing(cast("concurrent.futures.Future[Any]", future), temporary)

    def _make_newest(self, temporary: Path, target: Path) -> None:
        """Make a written checkpoint the newest one, and remove outdated checkpoints."""
        own_folder(target.parent)
        if (
            target.exists()
        ):  # a resumed run reaches a step again: set aside, so that a crash finds one of the two
            target.rename(target.with_name(f"{_ASIDE}{target.name}"))
        temporary.rename(target)
        # Last of all: a crash before this line leaves `last` at the checkpoint before.
        _point_link(target.with_name("last"), target.name)
        outdated = [
            old for old in sorted(target.parent.glob("step-*"))[: -self._keep] if old != target
        ]
        for old in [*outdated, *target.parent.glob(f"{_ASIDE}*")]:
            if old.is_dir() and not old.is_symlink():
                shutil.rmtree(old)
            else:  # not made by a save; what a link points to is not ours to remove
                old.unlink()

    def load_checkpoint(
        self, path: str | Path, map_location: object = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Verify and read one checkpoint, whole. Tensors and plain values only: nothing in it can
        execute.

        Raises:
            CheckpointError: see `verify_checkpoint`.
        """
        verify_checkpoint(Path(path))
        return read_checkpoint(Path(path))

    def remove_checkpoint(self, path: str | Path) -> None:
        shutil.rmtree(path, ignore_errors=True)


def read_checkpoint(
    source: Path,
    entries: Iterable[str] = GROWING,
    group: dist.ProcessGroup | None = None,
    room: Room = lambda place, size, dtype: torch.empty(size, dtype=dtype),
) -> dict[str, Any]:
    """Read a verified checkpoint. Of its growing entries, only `entries` are read. All others are
    mapped into memory, so that a tensor takes memory when it is used.

    Args:
        group: of the ranks that read it together, as in `DirectoryCheckpointIO.begin_writing`.
        room: where tensors are read to.

    Raises:
        CheckpointError: it does not fit.
    """
    checkpoint: dict[str, Any] = torch.load(
        source / STATE, map_location="cpu", mmap=True, weights_only=True
    )
    reader = dcp.HuggingFaceStorageReader(str(source))
    stored = cast("dict[str, Any]", reader.read_metadata().state_dict_metadata)
    # Names without a slash are those of policy.safetensors, in the transformer's own terms.
    places = {name: name if "/" in name else WHERE + name for name in stored}
    tensors = {
        name: room(places[name], facts.size, facts.properties.dtype)
        for name, facts in stored.items()
        if places[name].split("/")[0] in entries
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        dcp.load(
            tensors,
            storage_reader=reader,
            planner=planner,
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as error:
        raise CheckpointError(
            f"{source} does not fit this run: {_root_cause(error)}. Resume it with its own model "
            "and lora settings."
        ) from error
    for name, tensor in tensors.items():
        # Back into the dictionary or list from which saving took it.
        *path, leaf = places[name].split("/")
        node: Any = checkpoint
        for key in path:
            node = node[int(key) if isinstance(node, list) else key]
        node[leaf] = tensor
    return checkpoint


def verify_checkpoint(directory: Path) -> None:
    """Compare every file with the manifest.

    Raises:
        CheckpointError: no manifest (the write never finished) or one that does not list the
            checkpoint's files, a missing file, a file elsewhere, or other bytes than were written.
    """
    if directory.is_symlink() and directory.name != "last":
        raise CheckpointError(f"{directory} is a link, and no checkpoint of this run; not read.")
    if (directory / MANIFEST).exists():
        _check_inside(directory, MANIFEST)
    try:
        text = read_text(directory / MANIFEST)
        facts = {key: value for key, value in json_object(text).items() if key != "xxh3"}
        files = facts["files"]
        intact = text == _manifest_text(facts)
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
            f"{directory / MANIFEST} does not list {POLICY} and {STATE}: {directory} is not a "
            "complete checkpoint. Resume from an older checkpoint of the run."
        )
    # The directory behind the link `last`, and its name while it is written or set aside.
    own = directory.resolve().name.removeprefix(UNFINISHED).removeprefix(_ASIDE)
    if _NAME.fullmatch(own) and facts.get("name", own) != own:
        raise CheckpointError(
            f"{directory} is not the checkpoint {shown_name(facts['name'])} that its manifest "
            "describes: it was renamed or exchanged. Give it its name back."
        )
    strays = {path.name for path in directory.glob("*.safetensors")} - files.keys()
    for name in strays:  # torch's reader takes every such file
        raise CheckpointError(
            f"{directory / name} is no file of the checkpoint: {MANIFEST} does not list it; not "
            "read. Move it away."
        )
    for name, written in files.items():
        _check_inside(directory, name)
        found = describe_file(directory / name)
        if found != written:
            raise CheckpointError(
                f"{directory / name} is damaged: its manifest says {written}, the file is {found}. "
                "Resume from an older checkpoint of the run, or restore the file."
            )


def shown_name(value: object) -> str:
    """Return what a manifest holds in place of a name, for a message."""
    return ascii(str(value)[:80])


def ties_of(checkpoint: Path) -> list[dict[str, str]]:
    """Return the digests of the configurations under which a verified checkpoint was written and
    resumed; none of a checkpoint that is older than these digests."""
    found = []
    for name in (MANIFEST, RESUMED):
        with suppress(OSError, ValueError, KeyError, AttributeError):
            text = read_text(checkpoint / name)
            facts = {key: value for key, value in json_object(text).items() if key != "xxh3"}
            tie = facts["tie"]
            if text == _manifest_text(facts) and isinstance(tie, dict):
                found.append({str(key): str(value) for key, value in tie.items()})
    return found


def tie_again(checkpoint: Path, tie: Mapping[str, str]) -> None:
    """Write down that a run goes on from a checkpoint under another configuration.

    Raises:
        OSError: it cannot be written.
    """
    with atomic_replace(checkpoint / RESUMED) as temporary:
        temporary.write_text(_manifest_text({"tie": dict(tie)}))


def _check_inside(directory: Path, name: str) -> None:
    """Raise CheckpointError unless `name` is a regular file directly in `directory`, wherever links
    lead."""
    path = directory / name
    if not (path.is_file() and path.resolve().parent == directory.resolve()):
        raise CheckpointError(
            f"{path} is no file of the checkpoint: missing, no regular file, or outside of "
            f"{directory}; not read. "
            "Resume from an older checkpoint of the run, or restore the file."
        )


def newest_valid(
    checkpoints: Path,
    say: Callable[[str], object] = log.warning,
    check: Callable[[Path], object] = verify_checkpoint,
) -> Path:
    """Return the newest checkpoint of a run that passes `check`; `say` is told which damaged ones
    were passed over, and why.

    Raises:
        CheckpointError: there is none; the message tells what is wrong with each.
    """
    aside = sorted(
        checkpoints.glob(f"{_ASIDE}*"), reverse=True
    )  # there only after a crash between two renames
    named = [*sorted(checkpoints.glob("step-*"), reverse=True), *aside]
    found = [path for path in named if path.name.rpartition("-")[2].isdecimal()]
    problems: list[str] = []
    for directory in found:
        try:
            check(directory)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            say(f"passed over for {directory.name}: {problem}")
        return directory
    problems = problems or ["Nothing was saved yet (callbacks.checkpoint.every): begin a new run."]
    raise CheckpointError(
        "\n".join([f"no valid checkpoint in {checkpoints} ({len(found)} looked at).", *problems])
    )


def _save_state(state: dict[str, object], path: Path) -> None:
    """Write a state with torch.save, and raise the disk's own error. torch.save hides it behind a
    RuntimeError about positions."""
    with path.open("wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def _without_tensors(node: object, place: str, tensors: dict[str, Tensor]) -> object:
    """Return `node` without the tensors in its dictionaries. The tensors go to `tensors`.

    Example:
        >>> tensors: dict[str, Tensor] = {}
        >>> _without_tensors({"lr": 0.1, "state": [{"mean": torch.zeros(2)}]}, "adam", tensors)
        {'lr': 0.1, 'state': [{}]}
        >>> list(tensors)
        ['adam/state/0/mean']
    """
    if isinstance(node, list):
        return [
            _without_tensors(value, f"{place}/{index}", tensors) for index, value in enumerate(node)
        ]
    if not isinstance(node, dict):
        return node
    tensors |= {
        f"{place}/{key}": value.detach() for key, value in node.items() if isinstance(value, Tensor)
    }
    return {
        key: _without_tensors(value, f"{place}/{key}", tensors)
        for key, value in node.items()
        if not isinstance(value, Tensor)
    }


def _root_cause(error: CheckpointException) -> BaseException:
    """Return the error of one of the ranks. Errors of a disk come first."""
    causes = [cause for cause, _ in error.failures.values()]
    return next((cause for cause in causes if isinstance(cause, OSError)), causes[0])


def step_of(checkpoint: Path) -> int:
    """Return the RL steps that a checkpoint's run had finished, from its directory's name.

    Example:
        >>> step_of(Path("runs/digits/checkpoints/step-000012"))
        12
    """
    return int(checkpoint.name.rpartition("-")[2])


def _manifest_text(facts: dict[str, object]) -> str:
    """Return the text of a manifest, which ends with the digest of its own facts."""
    own = xxhash.xxh3_64_hexdigest(json.dumps(facts).encode())
    return json.dumps(facts | {"xxh3": own}, indent=2)


def _point_link(link: Path, name: str) -> None:
    """Make `link` point to its sibling `name`, in one rename."""
    temporary = link.with_name(f".tmp-{link.name}")
    if temporary.is_dir() and not temporary.is_symlink():
        shutil.rmtree(temporary)
    temporary.unlink(missing_ok=True)
    # A link cannot be changed in place. Renaming a new one over it leaves no moment without a link.
    temporary.symlink_to(name)
    temporary.rename(link)
