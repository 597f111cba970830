"""Attention kernels that diffusers takes from the hub through the package `kernels`, such as
FlashAttention-3.

A kernel is foreign machine code, so the configuration names the commit it is taken from
(`model.attention_backend=_flash_3_hub@COMMIT`): diffusers itself asks for a branch, which moves.
Only the command line can name one (`digenrl.config.reaching`).
"""

from __future__ import annotations

import os
import re
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from diffusers.models import attention_dispatch
from huggingface_hub import constants

from digenrl import extras

_COMMIT = re.compile(r"[0-9a-f]{40}")
_KEY = "model.attention_backend"


def is_of_hub(backend: str) -> bool:
    """Return whether a backend's kernel comes from the hub.

    >>> [is_of_hub(name) for name in ("auto", "_flash_3_hub", "flash_hub@main")]
    [False, True, True]
    """
    return backend.partition("@")[0].endswith("_hub")


def require_kernel(backend: str) -> None:
    """Refuse a kernel that could not be loaded, before any rank starts. Others pass.

    Raises:
        ValueError: the name is unknown or has no commit, the package `kernels` is absent, or this
            machine is offline and does not have the kernel.
    """
    if not is_of_hub(backend):
        return
    name, _, commit = backend.partition("@")
    registry = _registry()
    if name not in registry:
        raise ValueError(
            f"{_KEY} = {backend}: diffusers knows no such kernel of the hub; it knows "
            f"{', '.join(sorted(registry))}."
        )
    repository = registry[name].repo_id
    if not _COMMIT.fullmatch(commit):
        raise ValueError(
            f"{_KEY} = {backend}: a kernel is code that is fetched and run, so name the commit of "
            f"https://huggingface.co/kernels/{repository} that you want, all 40 digits: "
            f"{_KEY}={name}@COMMIT."
        )
    if constants.HF_HUB_OFFLINE and not _folder_of(repository, commit).is_dir():
        raise ValueError(
            f"{_KEY} = {backend}: HF_HUB_OFFLINE is set, and {_folder_of(repository, commit)} is "
            f"not there; run `hf download --repo-type kernel {repository} --revision {commit}` "
            f"where there is a network, or set {_KEY}=auto."
        )
    if PathFinder.find_spec("kernels") is None:
        raise ValueError(
            f"{_KEY} = {backend}: needs the package kernels, which is not installed; run "
            f"{extras.install_command('kernels')}, or set {_KEY}=auto."
        )


def pin_kernel(backend: str) -> str:
    """Let diffusers take the kernel of `backend` from its commit, and return the name by which
    diffusers knows it. Other backends are returned as they are.

    Raises:
        ValueError: see `require_kernel`.
    """
    if not is_of_hub(backend):
        return backend
    require_kernel(backend)
    name, _, commit = backend.partition("@")
    entry = _registry()[name]
    # The registry is diffusers' own: this holds for the whole process.
    entry.revision, entry.version = commit, None
    return name


def _registry() -> dict[str, Any]:
    """Return name -> diffusers' entry of a kernel: `repo_id`, `revision`, `version`."""
    # Private to diffusers, which has no public way to name a commit.
    found = attention_dispatch._HUB_KERNELS_REGISTRY.items()
    return {str(backend.value): entry for backend, entry in found}


def _folder_of(repository: str, commit: str) -> Path:
    """Return where the package `kernels` keeps a commit of a repository."""
    cache = os.environ.get("KERNELS_CACHE") or constants.HF_HUB_CACHE
    return Path(cache) / f"kernels--{repository.replace('/', '--')}" / "snapshots" / commit
