"""How a process gets the strict device: the environment for a command, and pytest in such a
process.

The device is a property of a process: once `import torch` has brought it, everything that asks
`torch.accelerator` finds it. So the tests of `inside/` run in processes of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT
from tests.device import build

MARK = "STRICT_TESTS"
"""Set where `inside/` and `tests/gpu` may be collected."""


def environment(root: Path = ROOT, **settings: int | str) -> dict[str, str]:
    """Return the environment of a command that computes on the device.

    Args:
        root: the tree whose code and tests are used.
        settings: e.g. devices=4, memory_mib=512, op_us=100: STRICT_DEVICES, ... of strict.cpp.
    """
    paths = (root / "tests/device/autoload", root / "src", root)
    own = {f"STRICT_{name.upper()}": str(value) for name, value in settings.items()}
    threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONFAULTHANDLER": "1"}
    told = {"PYTHONPATH": os.pathsep.join(map(str, paths)), MARK: "1", "HF_HUB_OFFLINE": "1"}
    return os.environ | threads | told | own


def python(
    *words: str, timeout: float = 200.0, root: Path = ROOT, **settings: int | str
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` with the device, to its end."""
    build.load_or_build()
    return subprocess.run(
        [sys.executable, *words],
        cwd=root,
        env=environment(root, **settings),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def run_pytest(
    *words: str, timeout: float = 200.0, root: Path = ROOT, **settings: int | str
) -> subprocess.CompletedProcess[str]:
    """Run pytest with the device. WORDS are its arguments; no marker is left out but by them."""
    given = words if "-m" in words else ("-m", "", *words)
    return python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", *given, timeout=timeout, root=root, **settings
    )  # fmt: skip
