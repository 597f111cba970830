"""Which GPU a rank takes, and when, shown with GPUs that do not exist."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from digenrl import accelerator, devices, run
from digenrl.cluster.handshake import Handshake
from digenrl.cluster.store import StoreServer
from digenrl.cluster.world import Session, World
from digenrl.config.settings import Settings
from digenrl.devices import Device, OtherAccelerator
from digenrl.rewards import suite
from digenrl.rewards.protocol import resolve_device
from tests.strategy.processes import configured

pytestmark = pytest.mark.heavy

H100, L40 = Device("NVIDIA H100 80GB HBM3", 79.1), Device("NVIDIA L40", 44.5)


class Gpus:
    """`torch.cuda` of a machine with `count` GPUs, as far as placing asks."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, count: int, name: str = "NVIDIA L40"
    ) -> None:
        self.current, self.name = 0, name
        told = {
            "current_accelerator": lambda check_available=False: torch.device("cuda"),
            "device_count": lambda: count,
            "current_device_index": lambda: self.current,
            "set_device_index": lambda number: setattr(self, "current", number),
        }
        for name, answer in told.items():
            monkeypatch.setattr(torch.accelerator, name, answer)
        monkeypatch.setattr(torch.cuda, "get_device_properties", self.properties)

    def properties(self, number: int) -> SimpleNamespace:
        return SimpleNamespace(name=self.name, total_memory=int(44.5 * 2**30), uuid=f"GPU-{number}")


def session(run_dir: Path, port: int = 0, handshake: Handshake | None = None) -> Session:
    return Session("127.0.0.1", port, handshake or Handshake(), run_dir, time.time())


def built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, *words: str
) -> tuple[list[Any], Any, set[str]]:
    """(devices of the scorers that rank `rank` of 1 + 1 built, the engine's and Lightning's
    device)."""
    placed: list[Any] = []

    def make() -> Any:
        placed.append(resolve_device("auto"))
        return lambda media, prompts: torch.zeros(len(prompts))

    monkeypatch.setattr(suite, "place_scorer", lambda *entry: make)
    config = configured("reward.placement=inline", *words)
    config = config.with_values({"trainer.precision": None})
    given: dict[str, Any] = {}
    made = Settings.build

    def build(settings: Settings, group: str, *arguments: Any, **more: Any) -> Any:
        if group == "trainer":
            given.update(more)
            return SimpleNamespace(**more)
        return made(settings, group, *arguments, **more)

    monkeypatch.setattr(Settings, "build", build)
    world = World(rank, 1, 1, local_rank=7)
    engine = run.build_rank(config, world, session(tmp_path)).strategy.engine
    events = (tmp_path / "events.jsonl").read_text() if (tmp_path / "events.jsonl").exists() else ""
    return (
        placed,
        (engine._scorer._device, given["devices"]),
        {line for line in events.splitlines() if "identities" in line},
    )


@pytest.mark.parametrize("seen", [8, 1])
def test_scorers_and_lightning_are_on_the_ranks_own_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: int
) -> None:
    """The device is set before rewards and engine are built; a rank that sees one GPU alone takes
    that one."""
    Gpus(monkeypatch, seen)
    own = 7 if seen == 8 else 0
    placed, (scorer, given), _ = built(tmp_path, monkeypatch, 1)
    assert placed
    assert set(placed) == {torch.device("cuda", own)}
    assert (scorer, given) == (torch.device("cuda", own), [own])


def test_trainers_that_never_score_build_no_reward_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed, _, told = built(tmp_path / "a", monkeypatch, 0, "schedule.tag=false")
    assert not placed
    assert not told
    placed, _, told = built(tmp_path / "b", monkeypatch, 1, "schedule.tag=false")
    assert placed
    assert len(told) == 1, "the first rank that scores says which reward models there are"
    evaluation = (
        "+callbacks.evaluation={_target_: digenrl.callbacks.evaluation.Evaluation, prompts: "
        "digits.jsonl}"
    )
    assert not built(tmp_path / "c", monkeypatch, 0, "schedule.tag=false", evaluation)[0], (
        "rollouts evaluate"
    )
    for words in (("schedule.tag=true",), (evaluation, "allocation.evaluation=trainers")):
        assert built(tmp_path / "d", monkeypatch, 0, *words)[0], (
            "a trainer that lends or evaluates scores"
        )


@pytest.mark.parametrize(
    ("present", "kind", "lightning"),
    [
        (None, "cpu", "cpu"),
        ("mps", "cpu", "cpu"),  # a Mac's first run stays on the CPU
        ("cuda", "cuda", "cuda"),
        ("xpu", "xpu", OtherAccelerator),
    ],
)
def test_a_kind_of_device_decides(
    monkeypatch: pytest.MonkeyPatch, present: str | None, kind: str, lightning: Any
) -> None:
    found = None if present is None else torch.device(present)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: found
    )
    assert accelerator.device_kind() == kind
    assert accelerator.is_own(torch.device(present or "cpu")) == (kind != "cpu")
    third = torch.device(present or "cpu", 3)
    # gloo has no group beside XPU's.
    assert accelerator.bound_device(third) == (third if kind == "cuda" else None)
    made = devices.lightning_accelerator()
    assert made == lightning or isinstance(made, OtherAccelerator)
    if isinstance(made, OtherAccelerator):
        assert made.get_parallel_devices(made.parse_devices(2)) == [
            torch.device("xpu", 0),
            torch.device("xpu", 1),
        ]


def test_gpus_are_counted_in_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """What asks the driver cannot fork ranks afterwards, so this process never asks."""
    gpus = Gpus(monkeypatch, 2)
    here, asked = os.getpid(), gpus.properties

    def properties(number: int) -> SimpleNamespace:
        assert os.getpid() != here, "asked in the process that forks the ranks"
        return asked(number)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    devices.usable_gpus.cache_clear()
    try:
        assert devices.usable_gpus() == (Device("NVIDIA L40", 44.5),) * 2
        devices.usable_gpus.cache_clear()

        def poisoned(number: int) -> SimpleNamespace:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.")

        monkeypatch.setattr(torch.cuda, "get_device_properties", poisoned)
        with pytest.raises(ValueError, match=r"(?s)Cannot re-initialize CUDA.*NVML.*MIG.*torchrun"):
            devices.usable_gpus()
    finally:
        devices.usable_gpus.cache_clear()


SMALL = ("hardware=l40x32", "allocation.trainers=1", "allocation.rollouts=1")


@pytest.mark.parametrize(
    ("words", "present", "seats", "processes", "message"),
    [
        (
            ("hardware=l40x32",),
            (),
            {0: 0},
            32,
            r"has GPUs \(a: .*sees none on this machine.* hardware=cpu",
        ),
        (
            SMALL,
            (L40,),
            {0: 0, 1: 1},
            2,
            "2 ranks start on this machine, which has 1 GPUs; .*torchrun",
        ),
        (
            (),
            (L40,),
            {0: 0, 1: 1},
            2,
            "2 ranks start on this machine, which has 1 GPUs; .*CUDA_VISIBLE_DEVICES=",
        ),
        (
            SMALL,
            (L40, H100),
            {0: 0, 1: 1},
            2,
            r"rank 1 belongs to pool a .*\(L40\), but its GPU is NVIDIA H100 80GB",
        ),
        (SMALL, (L40,), {1: 1}, 3, None),
        (SMALL, (L40, L40), {1: 2}, 3, "3 ranks start on this machine, which has 2 GPUs"),
        (
            (*SMALL, "hardware.pools.a.memory_gib=48"),
            (L40, L40),
            {0: 0, 1: 1},
            2,
            r"rank 0 .*\(48 GiB\), but its GPU NVIDIA L40 has 44\.5 GiB: set "
            r"hardware\.pools\.a\.memory_gib=44",
        ),
        (SMALL, (Device("NVIDIA L40 MIG 1g.10gb", 9.8),) * 2, {0: 0, 1: 1}, 2, "has 9.8 GiB: set"),
    ],
)
def test_ranks_without_their_device_are_refused(
    words: tuple[str, ...],
    present: tuple[Device, ...],
    seats: dict[int, int],
    processes: int,
    message: str | None,
) -> None:
    settled = (*words, "allocation.trainers=1", f"allocation.rollouts={max(1, processes - 1)}")
    config = configured(*settled)
    if message is None:
        devices.check_gpus(config, seats, processes, present)
        return
    with pytest.raises(ValueError, match=message):
        devices.check_gpus(config, seats, processes, present)
    devices.check_gpus(configured(*settled, "hardware.emulate=true"), seats, processes, present)


@pytest.mark.parametrize(
    ("profile", "name", "same"),
    [
        ("A100-SXM-80GB", "NVIDIA A100-SXM4-80GB", True),
        ("RTX-4090-48GB", "NVIDIA GeForce RTX 4090", True),
        ("H200", "NVIDIA H200", True),
        ("H200", "NVIDIA H20", False),
        ("L40", "NVIDIA L40S", False),
        ("mine", "NVIDIA L40S", True),
    ],
)
def test_a_gpu_is_known_by_its_model(profile: str, name: str, same: bool) -> None:
    words = ("hardware=h20x16", f"hardware.pools.c.gpu={profile}", *SMALL[1:])
    config = configured(*words)
    seats, present = {0: 0}, (Device(name, 200.0),) * 2
    if same:
        return devices.check_gpus(config, seats, 2, present)
    with pytest.raises(ValueError, match=f"its GPU is {name}"):
        devices.check_gpus(config, seats, 2, present)


def test_one_gpu_is_dealt_out_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun on a machine where every process sees the same single GPU."""
    handshake = Handshake()
    store = StoreServer(socket.create_server(("127.0.0.1", 0)), handshake)
    Gpus(monkeypatch, 1)
    devices.claim_gpu(session(tmp_path, store.port, handshake), 0)
    with pytest.raises(ValueError, match=r"ranks 0 and 1 were given one GPU \(NVIDIA L40, GPU-0\)"):
        devices.claim_gpu(session(tmp_path, store.port, handshake), 1)
    store.close()
