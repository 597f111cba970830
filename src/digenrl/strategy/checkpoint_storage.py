"""The tensors of a checkpoint on disk, for torch.distributed.checkpoint: each trainer writes and
reads its own part.

Files are safetensors, so nothing has to be trusted: torch's own storage describes its files in a
pickle.

    part of trainer 0 --+- state-00000.safetensors          what only a resume needs; stays as it is
                        `- policy-00000.part --+
    part of trainer 1 --+- policy-00001.part --+-> policy.safetensors: whole rows, as who trained
                        alone would write it `- state-00001.safetensors

A part says in its header at which row of the whole tensor each of its tensors begins. torch plans
from that who reads which rows, so another number of trainers may read what one wrote.
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
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import (
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from digenrl.transport.wire import tensor_bytes

POLICY = "policy.safetensors"
PREFIX = "policy.transformer."
"""Prefix of the transformer's entries in the LightningModule's state dict."""
_WHERE = f"state_dict/{PREFIX}"
"""Prefix of the transformer's entries in a checkpoint."""
_PART = ".part"
_SAFETENSORS = ".safetensors"
_ROWS = "first_rows"
"""Key of a part's header: name -> the row of the whole tensor at which it begins."""

Description = dict[str, Any]
"""Facts of a file: `bytes` and `xxh3`."""


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
        stage: Callable[[], AbstractContextManager[Any]],
        complete: Callable[[dict[str, Description]], None],
    ) -> None:
        self._directory, self._stage, self._complete = directory, stage, complete

    def reset(self, checkpoint_id: Any = None) -> None:
        """A writer writes a single checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Make the directory, in place of what was left by processes that were killed."""
        if is_coordinator:
            self._directory.parent.mkdir(parents=True, exist_ok=True)
            for unfinished in self._directory.parent.glob(".tmp-step-*"):
                shutil.rmtree(unfinished, ignore_errors=True)
            self._directory.mkdir()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=number) for number, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write, flush and read back this trainer's part.

        Raises:
            OSError: no space, no permission, or other bytes were read back than were written.
        """
        policy, state = dict[str, Tensor](), dict[str, Tensor]()
        rows: dict[str, int] = {}
        for item in plan.items:
            assert item.tensor_data is not None, "only tensors are handed over"
            name, tensor = item.index.fqn, planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            chunk, size = item.tensor_data.chunk, item.tensor_data.size
            assert chunk.sizes[1:] == size[1:], f"{name}: only rows can be shared out"
            if not tensor.numel() and size.numel():
                continue  # a tensor with fewer rows than there are trainers
            (policy if name.startswith(_WHERE) else state)[name.removeprefix(_WHERE)] = (
                tensor.contiguous()
            )
            rows[name.removeprefix(_WHERE)] = (*chunk.offsets, 0)[0]
        number = f"{plan.storage_data:05d}"
        results = []
        for file, tensors in (
            (f"policy-{number}{_PART}", policy),
            (f"state-{number}{_SAFETENSORS}", state),
        ):
            if tensors:
                with self._stage():
                    first_rows = {name: rows[name] for name in tensors}
                    save_weights(
                        tensors,
                        self._directory / file,
                        first_rows if any(first_rows.values()) else None,
                    )
                    facts = described(self._directory / file)
                results.append(WriteResult(MetadataIndex(file), facts["bytes"], facts))
        return _now(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make policy.safetensors of its parts; one part is the whole."""
        files = {result.index.fqn: result.storage_data for of_one in results for result in of_one}
        parts = [name for name in files if name.endswith(_PART)]
        with self._stage():
            if len(parts) == 1:
                (self._directory / parts[0]).rename(self._directory / POLICY)
                files[POLICY] = files.pop(parts[0])
            else:
                _assemble(
                    [self._directory / name for name in parts], self._directory / POLICY, metadata
                )
                for name in parts:
                    (self._directory / name).unlink()
                    del files[name]
                files[POLICY] = described(self._directory / POLICY)
            self._complete(files)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class PartReader(StorageReader):
    """Reads the tensors of the checkpoint in `directory`, which has `files`."""

    def __init__(self, directory: Path, files: Iterable[str]) -> None:
        self._files = [directory / name for name in files if name.endswith(_SAFETENSORS)]
        self._where: dict[MetadataIndex, Path] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        """A reader reads a single checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        found: dict[str, TensorStorageMetadata] = {}
        for path in self._files:
            with safe_open(path, framework="pt") as file:
                rows = _first_rows(file)
                for name in file.keys():  # noqa: SIM118  # not a mapping
                    sizes = file.get_slice(name).get_shape()
                    offsets = [rows.get(name, 0), *([0] * (len(sizes) - 1))][: len(sizes)]
                    dtype = _read(file, name, tuple(slice(0, 0) for _ in sizes)).dtype
                    place = _WHERE + name if path.name == POLICY else name
                    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                    facts = found.setdefault(
                        place, TensorStorageMetadata(TensorProperties(dtype), chunk.sizes, [])
                    )
                    ends = (offset + size for offset, size in zip(offsets, sizes, strict=True))
                    facts.size = torch.Size(
                        max(pair) for pair in zip(facts.size, ends, strict=True)
                    )
                    facts.chunks.append(chunk)
                    self._where[MetadataIndex(place, chunk.offsets)] = path
        return Metadata(dict(found))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """`read_metadata` has said it all."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the rows that `plan` asks for, and nothing more."""
        wanted = defaultdict(list)
        for item in plan.items:
            wanted[self._where[item.storage_index]].append(item)
        for path, items in wanted.items():
            with safe_open(path, framework="pt") as file:
                for item in items:
                    ends = zip(item.storage_offsets, item.lengths, strict=True)
                    rows = tuple(slice(start, start + length) for start, length in ends)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(_read(file, item.storage_index.fqn.removeprefix(_WHERE), rows))
                    planner.commit_tensor(item, target)
        return _now(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def save_weights(
    tensors: Mapping[str, Tensor], path: Path, first_rows: Mapping[str, int] | None = None
) -> None:
    """safetensors' own error says what the disk said; raised as the OSError that it is."""
    try:
        save_file(
            dict(tensors), path, None if first_rows is None else {_ROWS: json.dumps(first_rows)}
        )
    except SafetensorError as error:
        told = re.search(r"os error (\d+)", str(error))
        if told is None:
            raise
        raise OSError(int(told[1]), os.strerror(int(told[1])), str(path)) from error


def described(path: Path) -> Description:
    """Flush a file that was written, and say what is in it."""
    _flush(path)
    return describe(path)


def describe(path: Path) -> Description:
    """Size and digest of a file."""
    state = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(16 << 20):
            state.update(chunk)
    return {"bytes": path.stat().st_size, "xxh3": state.hexdigest()}


def _assemble(parts: Iterable[Path], path: Path, metadata: Metadata) -> None:
    """Write the whole tensors of which `parts` have rows; one piece at a time is in memory."""
    with ExitStack() as stack:
        pieces: defaultdict[str, list[tuple[int, Any]]] = defaultdict(list)
        for part in parts:
            file = stack.enter_context(safe_open(part, framework="pt"))
            rows = _first_rows(file)
            for name in file.keys():  # noqa: SIM118  # not a mapping
                pieces[name].append((rows.get(name, 0), file))
        facts: Mapping[str, Any] = {
            name: metadata.state_dict_metadata[_WHERE + name] for name in pieces
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
        text += b" " * (-len(text) % 8)
        with path.open("wb") as target:
            target.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                for _, file in sorted(pieces[name], key=lambda piece: piece[0]):
                    target.write(tensor_bytes(file.get_tensor(name)))


def _first_rows(file: Any) -> dict[str, int]:
    return dict(json.loads((file.metadata() or {}).get(_ROWS, "{}")))


def _read(file: Any, name: str, rows: tuple[slice, ...]) -> Tensor:
    tensor: Tensor = file.get_slice(name)[rows] if rows else file.get_tensor(name)
    return tensor


def _now(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
