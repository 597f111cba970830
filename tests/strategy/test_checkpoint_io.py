"""Checkpoints are whole or not there: damage is found, crashes and full disks leave the previous
one."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from safetensors.torch import load_file

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
    verify,
)
from digenrl.strategy.checkpoint_storage import POLICY, PREFIX
from digenrl.strategy.shared import TrainerState

pytestmark = pytest.mark.heavy

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
                verify(path)
        (path / name).write_bytes(good)
    verify(path)


def test_every_flipped_byte_of_the_manifest_is_detected(tmp_path: Path) -> None:
    path = saved(tmp_path, 1, 2.0)
    good = (path / MANIFEST).read_bytes()
    for position in range(len(good)):
        for bit in (0, 3, 6):
            bad = bytearray(good)
            bad[position] ^= 1 << bit
            (path / MANIFEST).write_bytes(bytes(bad))
            with pytest.raises(CheckpointError):
                verify(path)
    (path / MANIFEST).write_bytes(good)
    verify(path)


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
    facts["files"][name.format(root=path.parent)] = storage.describe(outside)
    (path / MANIFEST).write_text(module._manifest(facts))
    with pytest.raises(CheckpointError, match="is no file of the checkpoint"):
        verify(path)


@pytest.mark.parametrize("target", ["/dev/zero", "../outside"])
def test_a_manifest_lies_in_its_own_checkpoint(tmp_path: Path, target: str) -> None:
    path = saved(tmp_path, 1, 2.0)
    (path / MANIFEST).rename(path.parent / "outside")
    (path / MANIFEST).symlink_to(target)
    with pytest.raises(CheckpointError, match="is no file of the checkpoint"):
        verify(path)


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_or_missing_file_is_named_and_an_older_checkpoint_serves(
    tmp_path: Path, name: str
) -> None:
    older, newer = saved(tmp_path, 1, 1.0), saved(tmp_path, 2, 2.0)
    (newer / name).write_bytes((newer / name).read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=name):
        verify(newer)
    assert newest_valid(tmp_path / "checkpoints") == older
    (newer / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        verify(newer)
    shutil.rmtree(older)
    with pytest.raises(CheckpointError, match=r"no valid checkpoint.*\n.*" + name):
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
        verify(last.resolve())
        outcomes.append(int(found.name[-1]))
        saved(root, 4, 4.0)  # what the crash left behind does not stand in the way
        assert newest_valid(root / "checkpoints").name == "step-000004"
        if os.waitstatus_to_exitcode(status) == 0:
            break
    assert outcomes[0] == 2
    assert outcomes[-1] == 3
    assert outcomes == sorted(outcomes), "a later crash found an older checkpoint"
    assert len(outcomes) > 8, "the hooks met too few disk operations to show anything"


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
    verify(saved(tmp_path, 2, 2.0))
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


class _Alone(SingleDeviceStrategy):
    """The only trainer; notes the cause of a stop that it is asked for."""

    stop, full, state = "", False, TrainerState()
    parts = SimpleNamespace(
        shares=SimpleNamespace(state=lambda version: {}),
        checkpoints=SimpleNamespace(
            writing=SimpleNamespace(future=SimpleNamespace(done=lambda: True))
        ),
    )

    def saved(self) -> None:
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
