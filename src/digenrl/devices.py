"""GPUs of this machine: the GPU that a rank takes, and the check against the hardware profile.

A process that has asked the driver about GPUs cannot fork ranks that use GPUs. Therefore a forked
child asks. An error that stops the child would also stop the ranks.
"""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.connection import Connection

import torch
from lightning.pytorch.accelerators import Accelerator

from digenrl import accelerator
from digenrl.cluster.control import Control
from digenrl.cluster.store import StoreClient
from digenrl.cluster.world import Session
from digenrl.config.settings import Settings
from digenrl.hardware import Pool, assign_ranks, parse_hardware

_LEAST = 0.97
"""Part of a pool's memory that its GPU must have. Drivers and firmware take a little, in different
amounts."""


@dataclass(frozen=True)
class Device:
    """A GPU as torch sees it."""

    name: str
    memory_gib: float


def take_gpu(local_rank: int) -> int | None:
    """Make this process's GPU the current GPU, before anything is built. Return its number; None on
    processors.

    A scheduler that gives each process a GPU of its own lets the process see only that GPU.
    """
    if accelerator.device_kind() == "cpu":
        return None
    number = 0 if accelerator.device_count() == 1 else local_rank
    torch.accelerator.set_device_index(number)
    return number


def peak_bytes(number: int) -> int:
    """Return the most bytes that tensors held on GPU `number` since the last call.

    Both calls are to the allocator's counters on the host. Nothing waits for the GPU.
    """
    most = torch.accelerator.max_memory_allocated(number)
    torch.accelerator.reset_peak_memory_stats(number)
    return most


def _device_numbers(devices: int | Sequence[int]) -> Sequence[int]:
    return range(devices) if isinstance(devices, int) else devices


class OtherAccelerator(Accelerator):
    """Lightning's view of a kind of device that Lightning does not know (XPU, NPU), through
    `torch.accelerator`."""

    parse_devices = staticmethod(_device_numbers)
    get_parallel_devices = staticmethod(
        lambda devices: [torch.device(accelerator.device_kind(), number) for number in devices]
    )
    auto_device_count = staticmethod(accelerator.device_count)
    is_available = staticmethod(lambda: accelerator.device_count() > 0)
    name = staticmethod(accelerator.device_kind)

    def setup_device(self, device: torch.device) -> None:
        """Make `device` the current one."""
        torch.accelerator.set_device_index(device)

    teardown = staticmethod(torch.accelerator.empty_cache)


def lightning_accelerator(asked: str = "auto") -> str | OtherAccelerator:
    """Return what Lightning's `accelerator` argument takes: for `auto` this process's kind."""
    own = accelerator.device_kind() if asked == "auto" else asked
    if own in ("cpu", "cuda") or asked != "auto":  # Lightning has classes of its own
        return own
    return OtherAccelerator()


def claim_gpu(session: Session, rank: int) -> None:
    """Tell the other ranks which GPU this rank has taken, if a scheduler assigned the GPUs.

    Raises:
        ValueError: another rank has the same GPU.
    """
    if accelerator.device_kind() == "cpu":
        return
    facts = torch.get_device_module().get_device_properties(accelerator.current_device().index)
    uuid = getattr(facts, "uuid", None)
    if "MIG" in facts.name or uuid is None:  # slices share a number; not every kind has one
        return
    control, key = Control(StoreClient(*session.store), rank), f"gpu/{uuid}"
    if not control.compare_set(key, "", str(rank)):
        raise ValueError(
            f"ranks {control.get(key)} and {rank} were given one GPU ({facts.name}, {uuid}): start "
            "one process for each GPU (torchrun --nproc-per-node, srun --ntasks-per-node = "
            "--gpus-per-node), or let every process see all GPUs of its machine."
        )


@lru_cache(maxsize=1)
def usable_gpus() -> tuple[Device, ...]:
    """Return the GPUs that ranks forked from this process can use; () without any.

    Raises:
        ValueError: there are GPUs, but a forked process cannot use them.
    """
    # A forked child asks the driver and exits, so that this process can still fork ranks.
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_send_gpus, args=(theirs,))
    process.start()
    # With its own copy open, this process would never see the end of a child that died.
    theirs.close()
    try:
        answer: list[tuple[str, float]] | str = ours.recv()
    except EOFError:
        answer = "the process that asked the driver died"
    process.join()
    if isinstance(answer, str):
        raise ValueError(
            f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees GPUs that forked ranks "
            f"cannot use: {answer} Where NVML does not answer, the GPU is a MIG slice or an import "
            "has used it already, start the ranks as processes of their own (scripts/torchrun.sh); "
            "where the driver is older than this CUDA, install the torch that fits it; or set "
            "CUDA_VISIBLE_DEVICES= to run on processors."
        )
    return tuple(Device(*facts) for facts in answer)


def uses_gpus(settings: Settings) -> bool:
    """Return whether ranks that are forked from this process use its GPUs.

    Raises:
        ValueError: as `usable_gpus`.
    """
    return not settings.hardware.emulate and bool(usable_gpus())


def visible_gpus() -> tuple[Device, ...]:
    """Return the GPUs of this process. It asks the driver itself, and must therefore fork no rank
    that uses GPUs."""
    # Without any, torch's module may be that of processors, which knows no devices.
    facts = (
        torch.get_device_module().get_device_properties(n)
        for n in range(accelerator.device_count())
    )
    return tuple(Device(fact.name, fact.total_memory / 2**30) for fact in facts)


def _send_gpus(pipe: Connection) -> None:
    """Send (name, GiB) of every GPU, or the error that prevents it."""
    try:
        pipe.send([(device.name, device.memory_gib) for device in visible_gpus()])
    except Exception as error:  # whatever the driver says goes into the message
        pipe.send(f"{' '.join(str(error).split())}.")


def check_gpus(
    settings: Settings, seats: Mapping[int, int], processes: int, devices: Sequence[Device]
) -> None:
    """Refuse a run whose ranks cannot have the GPUs that the hardware profile gives them. Emulated
    GPUs need none.

    Args:
        settings: settled.
        seats: rank -> local rank of the ranks to check: all of them, or this process's own where a
            scheduler started it.
        processes: ranks of this machine.
        devices: what this process sees.

    Raises:
        ValueError: too few, others than the profile's, or less memory.
    """
    if settings.hardware.emulate:
        return
    pools = {name: pool.gpu for name, pool in settings.hardware.pools.items() if pool.gpu != "cpu"}
    if pools and not devices:
        asked = ", ".join(f"{name}: {gpu}" for name, gpu in pools.items())
        raise ValueError(
            f"the hardware profile has GPUs ({asked}), but torch {torch.__version__} sees none on "
            "this machine: start the run where they are, or set hardware=cpu, hardware=cpu_tiny "
            "(small builds), hardware.emulate=true (sleeps in their place), or ask `make plan`."
        )
    dealt = len(seats) < processes and len(devices) == 1  # every process sees a GPU of its own
    if devices and processes > len(devices) and not dealt:
        raise ValueError(
            f"allocation.trainers = {settings.allocation.trainers} and allocation.rollouts = "
            f"{settings.allocation.rollouts}: {processes} ranks start on this machine, which has "
            f"{len(devices)} GPUs; lower one, start the run on every machine of the profile "
            "(scripts/torchrun.sh, scripts/slurm.sbatch), or set CUDA_VISIBLE_DEVICES= to run on "
            "processors."
        )
    if pools:
        hardware = parse_hardware(settings.hardware)
        places = assign_ranks(hardware, *settings.allocation.split)
        for rank, local_rank in seats.items():
            pool = hardware.find_pool(places[rank][0])
            if pool.gpu != "cpu":
                _compare_gpu(rank, pool, devices[0 if len(devices) == 1 else local_rank])


def check_own_gpus(settings: Settings, ranks: int) -> None:
    """Refuse a run that starts all its ranks on this machine, rank r on GPU r.

    Raises:
        ValueError: as `check_gpus`.
    """
    if not settings.hardware.emulate:
        check_gpus(settings, {rank: rank for rank in range(ranks)}, ranks, usable_gpus())


def _compare_gpu(rank: int, pool: Pool, device: Device) -> None:
    wanted, given = _model_in_name(pool.gpu), _model_in_name(device.name)
    if wanted and given and wanted != given:
        raise ValueError(
            f"rank {rank} belongs to pool {pool.name} of the hardware profile ({pool.gpu}), but "
            f"its GPU is {device.name} ({device.memory_gib:.1f} GiB): choose the profile of this "
            f"machine (configs/hardware), or set hardware.pools.{pool.name}.gpu, memory_gib and "
            "tflops to what is there."
        )
    if device.memory_gib < _LEAST * pool.memory_gib:
        raise ValueError(
            f"rank {rank} belongs to pool {pool.name} of the hardware profile ({pool.memory_gib:g} "
            f"GiB), but its GPU {device.name} has {device.memory_gib:.1f} GiB: set "
            f"hardware.pools.{pool.name}.memory_gib={int(device.memory_gib)}."
        )


def _model_in_name(name: str) -> str | None:
    """Return the part of a GPU's name that tells its model: `NVIDIA A100-SXM4-80GB` -> `A100`; None
    without one."""
    parts = re.split(r"[^A-Z0-9]+", name.upper())
    return next(
        (part for part in parts if re.search(r"\d", part) and not part.endswith(("GB", "GIB"))),
        None,
    )
