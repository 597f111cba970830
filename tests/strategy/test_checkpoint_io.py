"""Checkpoints are whole or not there: damage is found, crashes and full disks leave the previous
one."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from digenrl.callbacks import checkpoint
from digenrl.callbacks.checkpoint import KEY, Checkpoint
from digenrl.strategy import checkpoint_io as module
from digenrl.strategy import checkpoint_storage as storage
from digenrl.strategy.checkpoint_io import (
    MANIFEST,
    STATE,
    CheckpointError,
    DirectoryCheckpointIO,
    newest_valid,
    verify_checkpoint,
)
from digenrl.strategy.checkpoint_storage import POLICY, PREFIX
from digenrl.strategy.shared import TrainerState
from tests.strategy.test_gradients import group

__all__ = ["group"]

GROWN = "state-00000.safetensors"
FILES = (POLICY, GROWN, STATE, MANIFEST)


def content(value: float, epoch: int) -> dict[str, Any]:
    """What Lightning hands over: weights, optimizer, loops, RNG."""
    moment = torch.full((4, 3), value)
    return {
        "epoch": epoch,
        "state_dict": {
            f"{PREFIX}lora.weight": torch.full((4, 3), value),
            "ema.weight": torch.full((2,), value),
        },
        "optimizer_states": [
            {"state": {"lora.weight": {"exp_avg": moment}}, "param_groups": [{"lr": 0.1}]}
        ],
        KEY: {
            "rng": torch.get_rng_state(),
            "version": epoch,
            "previous": {"lora.weight": torch.zeros(4, 3)},
        },
    }


def saved(root: Path, step: int, value: float) -> Path:
    path = root / "checkpoints" / f"step-{step:06d}"
    DirectoryCheckpointIO().save_checkpoint(content(value, step), path)
    return path


def test_round_trip_with_tensors_and_plain_values_only(tmp_path: Path) -> None:
    path = saved(tmp_path, 3, 1.5)
    loaded = DirectoryCheckpointIO().load_checkpoint(path)
    assert torch.equal(loaded["state_dict"][f"{PREFIX}lora.weight"], torch.full((4, 3), 1.5))
    assert torch.equal(loaded["state_dict"]["ema.weight"], torch.full((2,), 1.5))
    assert torch.equal(loaded[KEY]["rng"], torch.get_rng_state())
    assert loaded["optimizer_states"][0]["param_groups"] == [{"lr": 0.1}]
    assert set(load_file(path / POLICY)) == {"lora.weight"}
    torch.load(path / STATE, weights_only=True)
    assert (tmp_path / "checkpoints" / "last").resolve() == path


@pytest.mark.heavy
def test_every_flipped_byte_is_detected(tmp_path: Path) -> None:
    """One bit in each byte of the payload files (every 7th of long ones), and any change of a
    manifest's facts."""
    path = saved(tmp_path, 1, 2.0)
    for name in (POLICY, GROWN, STATE):
        good = (path / name).read_bytes()
        for position in range(0, len(good), 7):
            bad = bytearray(good)
            bad[position] ^= 1 << position % 8
            (path / name).write_bytes(bytes(bad))
            with pytest.raises(CheckpointError, match=name):
                verify_checkpoint(path)
        (path / name).write_bytes(good)
    verify_checkpoint(path)


def test_every_flipped_byte_of_the_manifest_is_detected(tmp_path: Path) -> None:
    path = saved(tmp_path, 1, 2.0)
    good = (path / MANIFEST).read_bytes()
    for position in range(len(good)):
        for bit in (0, 3, 6):
            bad = bytearray(good)
            bad[position] ^= 1 << bit
            (path / MANIFEST).write_bytes(bytes(bad))
            with pytest.raises(CheckpointError):
                verify_checkpoint(path)
    (path / MANIFEST).write_bytes(good)
    verify_checkpoint(path)


@pytest.mark.parametrize(
    "name", ["../outside", "{root}/outside", "link", "link/../../outside", "pipe", "nul\0"]
)
def test_a_manifest_names_only_files_of_its_own_checkpoint(tmp_path: Path, name: str) -> None:
    """What the manifest names elsewhere is intact, so that only its place can be what is wrong."""
    path = saved(tmp_path, 1, 2.0)
    outside = path.parent / "outside"
    outside.write_text("a secret")
    (path / "link").symlink_to(outside)
    os.mkfifo(path / "pipe")
    facts = json.loads((path / MANIFEST).read_text())
    del facts["xxh3"]
    facts["files"][name.format(root=path.parent)] = storage.describe_file(outside)
    (path / MANIFEST).write_text(module._manifest_text(facts))
    with pytest.raises(CheckpointError, match="is no file of the checkpoint"):
        verify_checkpoint(path)


@pytest.mark.parametrize("target", ["/dev/zero", "../outside"])
def test_a_manifest_lies_in_its_own_checkpoint(tmp_path: Path, target: str) -> None:
    path = saved(tmp_path, 1, 2.0)
    (path / MANIFEST).rename(path.parent / "outside")
    (path / MANIFEST).symlink_to(target)
    with pytest.raises(CheckpointError, match="is no file of the checkpoint"):
        verify_checkpoint(path)


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_or_missing_file_is_named_and_an_older_checkpoint_serves(
    tmp_path: Path, name: str
) -> None:
    older, newer = saved(tmp_path, 1, 1.0), saved(tmp_path, 2, 2.0)
    (newer / name).write_bytes((newer / name).read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=name):
        verify_checkpoint(newer)
    assert newest_valid(tmp_path / "checkpoints") == older
    (newer / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        verify_checkpoint(newer)
    shutil.rmtree(older)
    with pytest.raises(CheckpointError, match=r"no valid checkpoint.*\n.*" + name):
        newest_valid(tmp_path / "checkpoints")
    shutil.rmtree(newer)
    with pytest.raises(CheckpointError, match=r"0 looked at.*\n.*begin a new run"):
        newest_valid(tmp_path / "checkpoints")


def _disk_operations(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None]) -> list[int]:
    """Call `act(n)` before the n-th operation of a save that touches the disk; returns the
    counter."""
    count = [0]

    def hooked(original: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            act(count[0])
            return original(*args, **kwargs)

        return operation

    monkeypatch.setattr(storage, "save_file", hooked(storage.save_file))
    monkeypatch.setattr(module.torch, "save", hooked(torch.save))
    monkeypatch.setattr(os, "fsync", hooked(os.fsync))
    monkeypatch.setattr(module.shutil, "rmtree", hooked(shutil.rmtree))
    for name in ("write_text", "mkdir", "rename", "symlink_to", "unlink"):
        monkeypatch.setattr(Path, name, hooked(getattr(Path, name)))
    return count


@pytest.mark.heavy
def test_a_crash_at_any_write_or_rename_leaves_a_resumable_run(tmp_path: Path) -> None:
    """A forked child dies by os._exit before its n-th disk operation; a valid checkpoint remains,
    `last` is one."""
    outcomes: list[int] = []
    for kill_at in range(1, 100):
        root = tmp_path / str(kill_at)
        saved(root, 1, 1.0)
        saved(root, 2, 2.0)
        child = os.fork()
        if child == 0:
            _disk_operations(
                pytest.MonkeyPatch(), lambda n, limit=kill_at: os._exit(9) if n == limit else None
            )  # type: ignore[misc]
            saved(root, 3, 3.0)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        found = newest_valid(root / "checkpoints")
        assert DirectoryCheckpointIO().load_checkpoint(found)["epoch"] == int(found.name[-1])
        last = root / "checkpoints" / "last"
        assert last.exists(), f"`last` dangles after a crash at disk operation {kill_at}"
        verify_checkpoint(last.resolve())
        outcomes.append(int(found.name[-1]))
        saved(root, 4, 4.0)  # what the crash left behind does not stand in the way
        assert newest_valid(root / "checkpoints").name == "step-000004"
        if os.waitstatus_to_exitcode(status) == 0:
            break
    assert outcomes[0] == 2
    assert outcomes[-1] == 3
    assert outcomes == sorted(outcomes), "a later crash found an older checkpoint"
    assert len(outcomes) > 8, "the hooks met too few disk operations to show anything"


@pytest.mark.heavy
def test_saving_a_step_again_never_leaves_a_gap(tmp_path: Path) -> None:
    """A resumed run writes a checkpoint of the same name; a crash in between must not lose the only
    one."""
    for kill_at in range(1, 100):
        root = tmp_path / str(kill_at)
        saved(root, 1, 1.0)
        child = os.fork()
        if child == 0:
            _disk_operations(
                pytest.MonkeyPatch(), lambda n, limit=kill_at: os._exit(9) if n == limit else None
            )  # type: ignore[misc]
            saved(root, 1, 1.5)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert newest_valid(root / "checkpoints")
        saved(root, 2, 2.0)
        assert not list((root / "checkpoints").glob(".old-*"))
        if os.waitstatus_to_exitcode(status) == 0:
            return
    pytest.fail("the save never came to its end")


def test_a_link_in_place_of_an_outdated_checkpoint_stops_no_save_and_its_target_stays(
    tmp_path: Path,
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").touch()
    first = saved(tmp_path, 1, 1.0)
    for name in (".old-step-000000", "step-000000"):
        (first.parent / name).symlink_to(elsewhere)
    (first.parent / ".old-note").touch()
    verify_checkpoint(saved(tmp_path, 2, 2.0))
    assert sorted(path.name for path in first.parent.iterdir()) == [
        "last",
        "step-000001",
        "step-000002",
    ]
    assert (elsewhere / "mine").exists()


def test_a_full_disk_keeps_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    previous = saved(tmp_path, 1, 1.0)

    def full(n: int, at: int) -> None:
        if n == at:
            raise OSError(errno.ENOSPC, "No space left on device")

    for at in range(2, 30):
        with monkeypatch.context() as patch:
            count = _disk_operations(patch, lambda n, at=at: full(n, at))  # type: ignore[misc]
            try:
                saved(tmp_path, 2, 2.0)
            except OSError:
                pass
            else:
                assert count[0] < at or count[0] >= at
        assert newest_valid(tmp_path / "checkpoints").name in ("step-000001", "step-000002")
        assert (tmp_path / "checkpoints" / "last").exists()
        assert not list((tmp_path / "checkpoints").glob(".tmp-step*")), "a torn checkpoint was left"
        shutil.rmtree(tmp_path / "checkpoints" / "step-000002", ignore_errors=True)
        if not (tmp_path / "checkpoints" / "last").exists():
            saved(tmp_path, 1, 1.0)
    assert DirectoryCheckpointIO().load_checkpoint(previous)["epoch"] == 1


def _on_disk(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Notes what is flushed and what gets another name, in order."""
    done: list[tuple[str, ...]] = []
    fsync, rename = os.fsync, Path.rename

    def flush(number: int) -> None:
        done.append(("flush", Path(os.readlink(f"/proc/self/fd/{number}")).name))
        fsync(number)

    def move(path: Path, to: Path) -> Path:
        done.append(("rename", path.name, to.name))
        return rename(path, to)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(Path, "rename", move)
    return done


def test_every_file_is_flushed_before_the_checkpoint_has_its_name_and_last_comes_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = _on_disk(monkeypatch)
    saved(tmp_path, 1, 1.0)
    saved(tmp_path, 1, 2.0)
    part, temporary, name = "policy-00000.part", ".tmp-step-000001", "step-000001"
    written = [
        ("flush", part),
        ("flush", GROWN),
        ("rename", part, POLICY),
        ("flush", STATE),
        ("flush", MANIFEST),
    ]
    moved = [("rename", temporary, name), ("rename", ".tmp-last", "last")]
    assert done == [*written, *moved, *written, ("rename", name, f".old-{name}"), *moved]


@pytest.mark.parametrize("name", ["policy-00000.part", GROWN, STATE, MANIFEST])
def test_other_bytes_than_were_written_are_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A disk that changes a file after it was flushed."""
    older = saved(tmp_path, 1, 1.0)
    plain = storage.flush_and_describe

    def flips(path: Path) -> storage.Description:
        facts = plain(path)
        if path.name == name:
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        return facts

    monkeypatch.setattr(storage, "flush_and_describe", flips)
    monkeypatch.setattr(module, "flush_and_describe", flips)
    with pytest.raises(OSError, match="other bytes were read back than were written") as error:
        saved(tmp_path, 2, 2.0)
    assert error.value.errno == errno.EIO
    assert {path.name for path in older.parent.iterdir()} == {older.name, "last"}


def test_what_the_disk_said_is_raised_where_not_even_the_directory_could_be_made(
    tmp_path: Path,
) -> None:
    (tmp_path / "checkpoints").touch()
    with pytest.raises(FileExistsError):
        saved(tmp_path, 1, 1.0)


@pytest.mark.parametrize("keep", [1, 2])
def test_as_many_checkpoints_are_kept_as_asked_and_a_removed_one_is_gone(
    tmp_path: Path, keep: int
) -> None:
    io, root = DirectoryCheckpointIO(keep), tmp_path / "checkpoints"
    for step in range(1, 5):
        io.save_checkpoint(content(1.0, step), root / f"step-{step:06d}")
    left = [f"step-{step:06d}" for step in range(5 - keep, 5)]
    assert sorted(path.name for path in root.glob("step-*")) == left
    io.remove_checkpoint(root / left[-1])
    assert sorted(path.name for path in root.glob("step-*")) == left[:-1]
    io.remove_checkpoint(root / left[-1])  # it is gone already


def test_a_damaged_checkpoint_is_not_loaded_and_no_object_of_a_foreign_one_is_made(
    tmp_path: Path,
) -> None:
    path = saved(tmp_path, 1, 1.0)

    class Foreign:
        def __reduce__(self) -> Any:
            return (path / "executed").touch, ()

    torch.save({"epoch": Foreign()}, path / STATE)
    with pytest.raises(CheckpointError, match=STATE):
        DirectoryCheckpointIO().load_checkpoint(path)
    with pytest.raises(Exception, match="weights_only"):
        module.read_checkpoint(path)
    assert not (path / "executed").exists()


def test_a_first_trainer_writes_everything_and_another_only_what_is_sharded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: None
) -> None:
    rows = distribute_tensor(
        torch.arange(6.0).view(3, 2), init_device_mesh("cpu", (1,)), [Shard(0)]
    )
    stored = content(1.0, 3)
    stored["state_dict"][f"{PREFIX}rows"] = rows
    io, path = DirectoryCheckpointIO(), tmp_path / "checkpoints" / "step-000003"
    io.begin_writing(stored, path, torch.distributed.group.WORLD).wait_until_complete()
    whole = io.load_checkpoint(path)
    assert torch.equal(whole["state_dict"][f"{PREFIX}rows"], torch.arange(6.0).view(3, 2))
    assert torch.equal(whole["state_dict"]["ema.weight"], torch.ones(2))
    assert whole["epoch"] == 3
    given: list[tuple[dict[str, Tensor], bool, Any]] = []
    monkeypatch.setattr(module.dist, "get_rank", lambda group: 1)

    def noted(own: dict[str, Tensor], *, process_group: Any, no_dist: bool, **_: Any) -> None:
        given.append((own, no_dist, process_group))

    everyone, rows_alone = torch.distributed.group.WORLD, {f"state_dict/{PREFIX}rows"}
    monkeypatch.setattr(module.dcp, "async_save", noted)
    monkeypatch.setattr(module.dcp, "load", noted)
    io.begin_writing(stored, path, everyone)
    module.read_checkpoint(path, group=everyone)
    io.begin_writing(stored, path)
    module.read_checkpoint(path)
    assert [how[1:] for how in given] == [(False, everyone)] * 2 + [(True, None)] * 2
    assert set(given[0][0]) == rows_alone < set(given[2][0])
    assert set(given[1][0]) == set(given[3][0])


def test_a_trainer_is_told_what_a_disk_said_before_anything_else_and_the_rest_is_removed(
    tmp_path: Path,
) -> None:
    full, lost = OSError(errno.ENOSPC, "No space left"), ValueError("lost")
    for causes, told in (((lost, full), full), ((lost, ValueError("also")), lost)):
        failed: Any = module.concurrent.futures.Future()
        failures = {rank: (cause, None) for rank, cause in enumerate(causes)}
        failed.set_exception(CheckpointException("failed", failures))  # type: ignore[arg-type]
        (tmp_path / "unfinished").mkdir()
        with pytest.raises(type(told)) as error:
            module.Writing(failed, tmp_path / "unfinished").wait_until_complete()
        assert error.value is told
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", ["a list", "no weights", "no state", "nothing that grows"])
def test_a_manifest_lists_weights_and_state_and_need_list_nothing_else(
    tmp_path: Path, change: str
) -> None:
    path = saved(tmp_path, 1, 2.0)
    facts = json.loads((path / MANIFEST).read_text())
    del facts["xxh3"]
    gone = {"no weights": POLICY, "no state": STATE, "nothing that grows": GROWN}.get(change)
    if gone:
        del facts["files"][gone]
        (path / gone).unlink()
    else:
        facts["files"] = list(facts["files"])
    (path / MANIFEST).write_text(module._manifest_text(facts))
    if gone == GROWN:
        verify_checkpoint(path)
    else:
        with pytest.raises(CheckpointError, match="does not list"):
            verify_checkpoint(path)


def test_the_newest_intact_checkpoint_counts_and_damaged_ones_are_told(tmp_path: Path) -> None:
    paths = [saved(tmp_path, step, 1.0) for step in (1, 2)]
    root, said = paths[0].parent, list[str]()
    for path in paths:
        path.rename(root / f".old-{path.name}")
    newer, older = root / ".old-step-000002", root / ".old-step-000001"
    (root / "step-note").mkdir()
    assert newest_valid(root, said.append) == newer
    assert said == []
    (newer / STATE).unlink()
    assert newest_valid(root, said.append) == older
    (told,) = said
    assert told.startswith(f"passed over for {older.name}: {newer / STATE} is no file")
    assert [module.step_of(path) for path in (newer, paths[0])] == [2, 1]


def test_what_a_full_disk_says_is_raised_and_other_errors_stay_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(OSError, match="No space left") as error:
        module._save_state({"epoch": torch.zeros(4096)}, Path("/dev/full"))
    assert error.value.errno == errno.ENOSPC

    def fails(*args: Any) -> None:
        raise RuntimeError("another")

    def broken(*args: Any) -> None:
        raise storage.SafetensorError("an error with no number")

    monkeypatch.setattr(module.torch, "save", fails)
    with pytest.raises(RuntimeError, match="another"):
        module._save_state({}, Path("/dev/null"))
    with pytest.raises(FileNotFoundError) as missing:
        storage.save_weights({"a": torch.zeros(4)}, Path("/absent/weights"))
    assert (missing.value.errno, missing.value.filename) == (errno.ENOENT, "/absent/weights")
    shared = torch.zeros(4)
    with pytest.raises(RuntimeError, match="share memory"):
        storage.save_weights({"a": shared, "b": shared}, Path("/absent/weights"))
    monkeypatch.setattr(storage, "save_file", broken)
    with pytest.raises(storage.SafetensorError, match="no number"):
        storage.save_weights({}, Path("/absent/weights"))


def test_the_parts_of_two_trainers_become_the_file_that_one_would_have_written(
    tmp_path: Path,
) -> None:
    """Rows of one part begin where the other's end, the second trainer's part is read first, and
    the wide dtype comes first in the file."""
    whole = {
        "b.half": torch.arange(10).half().view(5, 2),
        "a.wide": torch.arange(6.0).view(3, 2),
        "c.few": torch.ones(1),
    }
    storage.save_weights(whole, tmp_path / "whole")
    cuts = {"b.half": 3, "a.wide": 1, "c.few": 1}
    first = {name: tensor[: cuts[name]].clone() for name, tensor in whole.items()}
    second = {n: tensor[cuts[n] :].clone() for n, tensor in whole.items() if cuts[n] < len(tensor)}
    offsets = {name: {"saved_offsets": [cuts[name], 0]} for name in second}
    parts = {"policy-00001.part": (second, offsets), "policy-00000.part": (first, {})}
    for name, (tensors, at) in parts.items():
        storage.save_weights(tensors, tmp_path / name, at)
    (tmp_path / GROWN).touch()
    facts = {
        storage.WHERE + name: SimpleNamespace(
            size=tensor.shape, properties=SimpleNamespace(dtype=tensor.dtype)
        )
        for name, tensor in whole.items()
    }
    told: list[Any] = []
    stages: list[str] = []

    @contextmanager
    def stage() -> Iterator[None]:
        stages.append("begin")
        yield
        stages.append("end")

    def complete(files: dict[str, Any]) -> None:
        told.append((files, list(stages)))

    results = [
        [SimpleNamespace(index=SimpleNamespace(fqn=name), storage_data=name)]
        for name in (*parts, GROWN)
    ]
    writer: Any = storage.PartWriter(tmp_path, stage, complete)
    writer.finish(SimpleNamespace(state_dict_metadata=facts), results)
    assert (tmp_path / POLICY).read_bytes() == (tmp_path / "whole").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {POLICY, GROWN, "whole"}
    assert told == [({GROWN: GROWN, POLICY: storage.describe_file(tmp_path / "whole")}, ["begin"])]
    assert stages == ["begin", "end"]


def test_a_writer_removes_what_was_left_unfinished_and_only_the_first_makes_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run" / "checkpoints"
    unused: Any = None
    writer = storage.PartWriter(root / ".tmp-step-000002", unused, unused)
    writer.set_up_storage_writer(False)
    assert not root.exists()
    for name in (".tmp-step-000001/deep", ".tmp-last", "step-000001"):
        (root / name).mkdir(parents=True)
    gone, rmtree = root / ".tmp-step-000001", shutil.rmtree

    def twice(path: Path, **options: Any) -> None:
        rmtree(path, **options)
        rmtree(path, **options)

    monkeypatch.setattr(storage.shutil, "rmtree", twice)
    writer.set_up_storage_writer(True)
    assert not gone.exists()
    left = {".tmp-step-000002", ".tmp-last", "step-000001"}
    assert {path.name for path in root.iterdir()} == left


class _Alone(SingleDeviceStrategy):
    """The only trainer; notes the cause of a stop that it is asked for."""

    stop, full, state = "", False, TrainerState()
    parts = SimpleNamespace(
        shares=SimpleNamespace(checkpoint_state=lambda version: {}),
        checkpoints=SimpleNamespace(
            writing=SimpleNamespace(future=SimpleNamespace(done=lambda: True))
        ),
    )

    def wait_for_checkpoint(self) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")

    @property
    def control(self) -> _Alone:
        return self

    def request_stop(self, cause: str) -> None:
        self.stop = cause


class _Trainer:
    """The few attributes of a Trainer that the callback reads; saving fails as often as told."""

    def __init__(self, root: Path, failures: int) -> None:
        self.default_root_dir, self._failures, self.strategy = (
            str(root),
            failures,
            _Alone(torch.device("cpu")),
        )
        self.current_epoch, self.max_epochs, self.should_stop, self.is_global_zero = (
            0,
            10,
            False,
            True,
        )
        self.saved: list[str] = []
        self.global_step = 0
        self._checkpoint_connector = SimpleNamespace(_get_loops_state_dict=dict)

    def save_checkpoint(self, path: Path) -> None:
        self.strategy.full = self._failures > 0
        self._failures -= 1
        if not self.strategy.full:
            self.saved.append(Path(path).name)


def events(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "events.jsonl").read_text().splitlines()]


def test_a_failed_checkpoint_is_told_and_goes_on_only_if_asked_to(tmp_path: Path) -> None:
    module_ = pl.LightningModule()
    callback, trainer = Checkpoint(every=1, on_error="continue"), _Trainer(tmp_path, failures=2)
    for trainer.current_epoch in range(4):
        callback.on_train_epoch_end(trainer, module_)  # type: ignore[arg-type]
    assert trainer.saved == ["step-000003", "step-000004"]
    assert not trainer.should_stop
    assert [event["kind"] for event in events(tmp_path)] == [
        "checkpoint_failed",
        "checkpoint_failed",
        "checkpoint",
    ]
    assert "No space left on device" in events(tmp_path)[0]["cause"]
    # Found out at the end of the next step; the last one of a run always counts.
    stops, goes_on = (
        Checkpoint(every=1, retry_s=0),
        Checkpoint(every=1, on_error="continue", retry_s=0),
    )
    for callback, epochs in ((stops, (0, 1)), (goes_on, (9,))):
        trainer = _Trainer(tmp_path, failures=9)
        for trainer.current_epoch in epochs:
            assert not trainer.should_stop
            callback.on_train_epoch_end(trainer, module_)  # type: ignore[arg-type]
        assert trainer.should_stop
        assert "could not be written" in trainer.strategy.stop


def test_the_last_checkpoint_is_tried_again_for_as_long_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(checkpoint.time, "sleep", pauses.append)
    for failures, saved in ((3, ["step-000010"]), (9, [])):
        trainer = _Trainer(tmp_path, failures)
        trainer.current_epoch = 9
        Checkpoint(retry_s=15.0).on_train_epoch_end(trainer, pl.LightningModule())  # type: ignore[arg-type]
        assert (trainer.saved, trainer.should_stop) == (saved, not saved)
    assert pauses == [1.0, 2.0, 4.0, 1.0, 2.0, 4.0, 8.0]
    assert [event["kind"] for event in events(tmp_path)] == [
        "checkpoint_failed",
        "checkpoint",
        "checkpoint_failed",
    ]


@pytest.mark.parametrize(
    ("step", "stop", "written"),
    [(1, False, False), (5, False, True), (7, True, True), (10, False, True)],
)
def test_a_checkpoint_is_due_every_few_steps_at_the_end_and_at_a_stop(
    tmp_path: Path, step: int, stop: bool, written: bool
) -> None:
    trainer = _Trainer(tmp_path, failures=0)
    trainer.current_epoch, trainer.should_stop = step - 1, stop
    Checkpoint(every=5).on_train_epoch_end(trainer, pl.LightningModule())  # type: ignore[arg-type]
    assert bool(trainer.saved) == written


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"callbacks\.checkpoint\.every = 0"):
        Checkpoint(every=0)
    with pytest.raises(ValueError, match="use stop or continue"):
        Checkpoint(on_error="ignore")
    with pytest.raises(ValueError, match=r"callbacks\.checkpoint\.retry_s = -1"):
        Checkpoint(retry_s=-1.0)
    with pytest.raises(ValueError, match="keep at least 1"):
        DirectoryCheckpointIO(keep=0)
