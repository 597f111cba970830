"""The tensors of a checkpoint on disk, for torch.distributed.checkpoint: each trainer writes and
reads its own part.

Files are safetensors, so nothing has to be trusted: torch's own storage describes its files in a
pickle.

    part of trainer 0 --+- state-00000.safetensors          what only a resume needs; stays as it is
                        `- policy-00000.part --+
    part of trainer 1 --+- policy-00001.part --+-> policy.safetensors: whole rows, as who trained
                        alone would write it `- state-00001.safetensors

The header of a part gives the row of the whole tensor at which each of its tensors begins. torch
plans the reads from these rows, so a resumed run may have another number of trainers.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypedDict, TypeVar

import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import (
    Metadata,
    SavePlan,
    SavePlanner,
    StorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    MetadataIndex,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from digenrl.record.run_dir import own_folder, share_as_folder
from digenrl.transport.wire import tensor_bytes

POLICY = "policy.safetensors"
PREFIX = "policy.transformer."
"""Prefix of the transformer's entries in the LightningModule's state dict."""
WHERE = f"state_dict/{PREFIX}"
"""Prefix of the transformer's entries in a checkpoint."""
_PART = ".part"
_OFFSETS = "DCP_SHARDING_INFO"
"""Key of a part's header, as torch's `HuggingFaceStorageReader` reads it: name -> the row of the
whole tensor at which it begins."""

_Value = TypeVar("_Value")


class Description(TypedDict):
    """Size and digest of a file."""

    bytes: int
    xxh3: str


class PartWriter(StorageWriter):
    """Writes into the new folder `directory`; see the module docstring.

    Args:
        stage: entered by the writing thread while it writes.
        complete: called by trainer 0 with every file's description when all trainers have written
            theirs.
    """

    def __init__(
        self,
        directory: Path,
        stage: Callable[[], AbstractContextManager[object]],
        complete: Callable[[dict[str, Description]], None],
    ) -> None:
        self._directory, self._stage, self._complete = directory, stage, complete

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer writes a single checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Make the directory, in place of what was left by processes that were killed."""
        if is_coordinator:
            own_folder(self._directory.parent)
            for unfinished in self._directory.parent.glob(".tmp-step-*"):
                if unfinished.is_dir() and not unfinished.is_symlink():
                    shutil.rmtree(unfinished, ignore_errors=True)
                else:  # a link, or a pipe on which rmtree would wait
                    unfinished.unlink()
            self._directory.mkdir()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # The trainer's number, which names its files.
        return [replace(plan, storage_data=number) for number, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write, flush and read back this trainer's part.

        Raises:
            OSError: no space, no permission, or other bytes were read back than were written.
        """
        policy, state = dict[str, Tensor](), dict[str, Tensor]()
        offsets: dict[str, dict[str, list[int]]] = {}
        for item in plan.items:
            assert item.tensor_data is not None, "only tensors are handed over"
            name, tensor = item.index.fqn, planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            chunk, size = item.tensor_data.chunk, item.tensor_data.size
            assert chunk.sizes[1:] == size[1:], f"{name}: only rows can be shared out"
            if not tensor.numel() and size.numel():
                continue  # a tensor with fewer rows than there are trainers
            tensors = policy if name.startswith(WHERE) else state
            tensors[place := name.removeprefix(WHERE)] = tensor.contiguous()
            offsets[place] = {"saved_offsets": [*chunk.offsets]}
        number = f"{plan.storage_data:05d}"
        results = []
        for file, tensors in (
            (f"policy-{number}{_PART}", policy),
            (f"state-{number}.safetensors", state),
        ):
            if tensors:
                with self._stage():
                    # Trainer 0's rows begin at row 0, which a reader takes where nothing is said.
                    places = {name: offsets[name] for name in tensors if plan.storage_data}
                    save_weights(tensors, self._directory / file, places)
                    facts = flush_and_describe(self._directory / file)
                # A result for each file, not for each tensor: trainer 0 needs what the manifest
                # lists.
                results.append(WriteResult(MetadataIndex(file), facts["bytes"], facts))
        return _finished_future(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make policy.safetensors of its parts; one part is the whole."""
        files = {result.index.fqn: result.storage_data for of_one in results for result in of_one}
        parts = [name for name in files if name.endswith(_PART)]
        with self._stage():
            if len(parts) == 1:
                (self._directory / parts[0]).rename(self._directory / POLICY)
                files[POLICY] = files.pop(parts[0])
            else:
                _join_parts(
                    [self._directory / name for name in parts], self._directory / POLICY, metadata
                )
                for name in parts:
                    (self._directory / name).unlink()
                    del files[name]
                files[POLICY] = flush_and_describe(self._directory / POLICY)
            self._complete(files)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def save_weights(
    tensors: Mapping[str, Tensor],
    path: Path,
    offsets: Mapping[str, Mapping[str, list[int]]] = MappingProxyType({}),
) -> None:
    """Write weights. safetensors' own error holds what the disk said, and is raised as an
    OSError."""
    try:
        header = {_OFFSETS: json.dumps(offsets)} if offsets else None
        save_file(dict(tensors), path, header)
        share_as_folder(path)
    except SafetensorError as error:
        told = re.search(r"os error (\d+)", str(error))
        if told is None:
            raise
        raise OSError(int(told[1]), os.strerror(int(told[1])), str(path)) from error


def flush_and_describe(path: Path) -> Description:
    """Flush a file that was written, and say what is in it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return describe_file(path)


def describe_file(path: Path) -> Description:
    """Size and digest of a file."""
    state = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(16 << 20):
            state.update(chunk)
    return {"bytes": path.stat().st_size, "xxh3": state.hexdigest()}


def _join_parts(parts: Iterable[Path], path: Path, metadata: Metadata) -> None:
    """Write the whole tensors of which `parts` have rows; one piece at a time is in memory."""
    with ExitStack() as stack:
        pieces: defaultdict[str, list[tuple[int, Any]]] = defaultdict(list)
        for part in parts:
            file = stack.enter_context(safe_open(part, framework="pt"))
            for name in file.keys():  # noqa: SIM118  # not a mapping
                pieces[name].append((_first_row(file, name), file))
        facts: Mapping[str, Any] = {
            name: metadata.state_dict_metadata[WHERE + name] for name in pieces
        }
        # The order in which safetensors writes: each tensor is aligned to its dtype.
        order = sorted(facts, key=lambda name: (-facts[name].properties.dtype.itemsize, name))
        header: dict[str, Any] = {}
        end = 0
        for name in order:
            start, end = end, end + facts[name].size.numel() * facts[name].properties.dtype.itemsize
            dtype = pieces[name][0][1].get_slice(name).get_dtype()
            header[name] = {
                "dtype": dtype,
                "shape": list(facts[name].size),
                "data_offsets": [start, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        # The file by hand: 8 bytes of length, a header padded to 8, then the tensors in its order.
        text += b" " * (-len(text) % 8)
        with path.open("wb") as target:
            target.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                # Rows are contiguous, so the parts in the order of their first rows are the whole
                # tensor.
                for _, file in sorted(pieces[name], key=lambda piece: piece[0]):
                    target.write(tensor_bytes(file.get_tensor(name)))


def _first_row(file: safe_open, name: str) -> int:
    """Return the row of the whole tensor at which a part's tensor begins."""
    offsets = json.loads((file.metadata() or {}).get(_OFFSETS, "{}"))
    return int(offsets[name]["saved_offsets"][0]) if offsets else 0


def _finished_future(value: _Value) -> Future[_Value]:
    future: Future[_Value] = Future()
    future.set_result(value)
    return future
