"""Build `strict.cpp` once for each source, torch and Python; g++ alone is needed.

The library lies outside the repository: in $STRICT_CACHE, else in the user's cache directory.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

SOURCE = Path(__file__).with_name("strict.cpp")
COMPILER = os.environ.get("CXX", "g++")


def missing() -> str | None:
    """Return why the device cannot be built here; None where it can be."""
    if library().exists() or shutil.which(COMPILER):
        return None
    return f"the strict device is built with {COMPILER}, which this machine lacks"


def library() -> Path:
    """Return where the library of this source, torch and Python lies."""
    facts = SOURCE.read_bytes() + f"{torch.__version__} {sys.version}".encode()
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "digenrl" / "device"
    cache = Path(os.environ.get("STRICT_CACHE") or user)
    return cache / f"strict_{hashlib.sha256(facts).hexdigest()[:12]}.so"


def load_or_build() -> Path:
    """Return the library; it is built first where it is missing (half a minute)."""
    found = library()
    if not found.exists():
        _build(found)
    return found


def load() -> ModuleType:
    """Return the library as a module."""
    found = load_or_build()
    spec = importlib.util.spec_from_file_location("_strict", found)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build(found: Path) -> None:
    from torch.utils import cpp_extension

    found.parent.mkdir(parents=True, exist_ok=True)
    with (found.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if found.exists():  # another process has built it meanwhile
            return
        headers = (*cpp_extension.include_paths(), sysconfig.get_paths()["include"])
        libraries = Path(torch.__file__).parent / "lib"
        part = found.with_suffix(".part")
        subprocess.run(
            [
                COMPILER, "-O1", "-std=c++20", "-shared", "-fPIC", "-w",
                *(f"-I{path}" for path in headers),
                "-DTORCH_EXTENSION_NAME=_strict", "-DUSE_C10D_GLOO", "-DUSE_DISTRIBUTED",
                str(SOURCE), "-o", str(part), f"-L{libraries}", f"-Wl,-rpath,{libraries}",
                "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python",
            ],
            check=True,
        )  # fmt: skip
        part.rename(found)
