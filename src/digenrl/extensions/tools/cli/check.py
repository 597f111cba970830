"""`make setup` ends with this self-check: Python, devices, memory, disk, each ok, warning or fix.

    digenrl check
    digenrl check experiment=NAME hardware=NAME [key=value ...]

With words of `digenrl train` it lists all that this run lacks on this machine: GPUs, memory, the
model's weights, the rewards' weights and packages. Nothing is built.

A `warning` line says what will be slower or unavailable; a `fix` line says what to do before
anything runs, and makes the exit code 1.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from digenrl import config as configuration
from digenrl.cli.extensions import choose_advisor
from digenrl.config.commands import shell_command
from digenrl.config.help import show_page, wants_help
from digenrl.config.help_pages import command_help

Level = Literal["ok", "warning", "fix"]
_STYLES = {"ok": "green", "warning": "yellow", "fix": "bold red"}
_GIB = 1 << 30
MIN_MEMORY_GIB = 4.0
"""Two ranks, the launcher and the report of the first run take about 2 GiB together."""
MIN_DISK_GIB = 2.0
_INDEXES = {"12": "cu126", "13": "cu130"}
"""Major CUDA version of a driver -> PyTorch's index of builds that all such drivers run."""


@dataclass(frozen=True)
class Finding:
    """One line of the self-check."""

    subject: str
    level: Level
    text: str


def _ok_or_warning(subject: str, fine: bool, text: str, note: str) -> Finding:
    """Return `text` as ok, or as a warning with a note."""
    return Finding(subject, "ok", text) if fine else Finding(subject, "warning", text + note)


def python_version() -> Iterator[Finding]:
    """Python itself."""
    yield Finding(
        "python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    )


def torch_and_devices() -> Iterator[Finding]:
    """Yield findings about torch, its sister package and the devices that torch can use."""
    try:
        import torch
        import torchvision

        from digenrl import accelerator
    except Exception as error:
        yield Finding(
            "torch",
            "fix",
            f"cannot be imported ({type(error).__name__}: {error}); `rm -rf .venv && make setup`",
        )
        return
    yield Finding(
        "torch", "ok", f"torch {torch.__version__}, torchvision {torchvision.__version__}"
    )
    own, gpus = accelerator.device_kind(), accelerator.device_count()
    if not gpus and (cuda := _driver_cuda()) is not None:
        yield _explain_unseen_gpu(cuda, torch.__version__, torch.version.cuda)
    elif not gpus:
        yield Finding(
            "devices",
            "ok",
            "no GPU: runs on CPU, with tiny models (hardware=cpu_tiny) and the digits",
        )
    for index in range(gpus):
        module = torch.get_device_module()
        name, memory = module.get_device_name(index), module.mem_get_info(index)
        free, total = (value / _GIB for value in memory)
        said = f"{name}, {free:.0f} of {total:.0f} GiB free"
        yield _ok_or_warning(f"gpu {index}", free > 0.8 * total, said, "; another process uses it")
    backend = torch.distributed.get_default_backend_for_device(own)
    if gpus and not torch.distributed.is_backend_available(backend):
        yield Finding(
            backend,
            "fix",
            f"torch was built without {backend.upper()}; install the build of torch for {own}",
        )


def _driver_cuda() -> str | None:
    """Return the newest CUDA that NVIDIA's driver runs, as "13.0"; None without a driver."""
    try:
        told = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"CUDA Version:\s*(\d+\.\d+)", told)
    return found and found[1]


def _explain_unseen_gpu(driver: str, version: str, built: str | None) -> Finding:
    """Return what to do when there is a driver, and torch sees no GPU.

    A driver runs every build for its own major CUDA version or an older one.
    """
    if built is not None and int(built.split(".")[0]) <= int(driver.split(".")[0]):
        told = "look at CUDA_VISIBLE_DEVICES, and at what `nvidia-smi -L` lists"
    elif (index := _INDEXES.get(driver.split(".")[0])) is None:
        told = "update the driver: PyTorch has no build for its CUDA"
    else:
        command = f"{sys.executable} -m pip install --force-reinstall torch torchvision"
        told = f"`{command} --index-url https://download.pytorch.org/whl/{index}`"
    return Finding(
        "devices",
        "fix",
        f"the driver runs CUDA {driver}, torch {version} is built for {built or 'processors'} and "
        f"sees no GPU: {told}",
    )


def check_memory() -> Iterator[Finding]:
    """Yield findings about the host's memory, and the shared memory that ranks on GPUs need."""
    available = psutil.virtual_memory().available / _GIB
    note = f"; the first run wants {MIN_MEMORY_GIB:.0f}"
    yield _ok_or_warning(
        "memory", available >= MIN_MEMORY_GIB, f"{available:.1f} GiB available", note
    )
    try:
        from digenrl import accelerator
    except Exception:  # `torch_and_devices` says what is wrong
        return
    # A rank for each GPU, as a run on all of them has.
    if gpus := accelerator.device_count():
        from digenrl.launchers.agreement import check_machine  # seconds, for Lightning

        try:
            check_machine(gpus, gpus=True, alone=True)
        except ValueError as error:
            yield Finding("shared memory", "fix", str(error))
        else:
            yield Finding("shared memory", "ok", f"enough for {gpus} ranks")


def check_disk() -> Iterator[Finding]:
    """Room for runs, and permission to write them."""
    here = Path.cwd()
    free = shutil.disk_usage(here).free / _GIB
    if not os.access(here, os.W_OK):
        yield Finding(
            "disk",
            "fix",
            f"{here} is not writable; run elsewhere or set output_root=/a/writable/directory",
        )
    else:
        note = f"; runs of large models need {MIN_DISK_GIB:.0f}"
        yield _ok_or_warning("disk", free >= MIN_DISK_GIB, f"{free:.1f} GiB free in {here}", note)


def check_needs(words: Sequence[str]) -> Iterator[Finding]:
    """Yield what the run of a command line lacks here, GPUs first."""
    from digenrl.launchers import missing

    try:
        composed = configuration.load(words)
    except configuration.ConfigError as error:
        yield from (Finding("configuration", "fix", problem) for problem in error.problems)
        return
    for need in missing.find_needs(composed, choose_advisor()):
        text = missing.name_commands(need.text, composed.overrides)
        yield Finding(need.subject, "fix" if need.missing else "ok", text)


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    python_version,
    torch_and_devices,
    check_memory,
    check_disk,
)


def main(words: Sequence[str] = ()) -> int:
    """Print every finding; exit code 1 if something must be fixed first."""
    if wants_help(words):
        show_page(command_help(__doc__))
        return 0
    checks = (partial(check_needs, words),) if words else CHECKS
    findings = [finding for check in checks for finding in check()]
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for finding in findings:
        level = Text(finding.level, style=_STYLES[finding.level])
        table.add_row(level, finding.subject, Text(finding.text))
    Console().print(table)
    broken = any(finding.level == "fix" for finding in findings)
    print(
        "Fix the lines above first."
        if broken
        else f"Ready: `{shell_command('train', words)}` starts the run."
        if words
        else "Ready: `make train`, or `digenrl train`, starts the first run."
    )
    return 1 if broken else 0
