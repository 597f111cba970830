"""Kernels of the hub: a commit is named, and what cannot be loaded is refused before a rank
starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from diffusers.models import attention_dispatch
from huggingface_hub import constants

from digenrl.config import load
from digenrl.models import hub_kernels
from digenrl.models.hub_kernels import pin_kernel, require_kernel
from digenrl.parts import check_parts
from tests.models.tiny_policies import make

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: Any) -> Path:
    """An offline machine with a cache of its own."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", ["_flash_3_hub", "_flash_3_hub@main", "flash_hub@" + COMMIT[:-1]])
def test_a_kernel_without_a_whole_commit_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"name the commit of https://.*kernels-community/flash"):
        require_kernel(name)


def test_an_offline_machine_says_what_to_fetch(cache: Path) -> None:
    said = rf"HF_HUB_OFFLINE is set.*hf download .*flash-attn3 --revision {COMMIT}.*=auto"
    with pytest.raises(ValueError, match=said):
        require_kernel(f"_flash_3_hub@{COMMIT}")


def test_the_package_is_asked_for_by_its_extra(cache: Path, monkeypatch: Any) -> None:
    (cache / "kernels--kernels-community--flash-attn3" / "snapshots" / COMMIT).mkdir(parents=True)
    monkeypatch.setattr(hub_kernels.PathFinder, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the package kernels.*\[kernels\]"):
        require_kernel(f"_flash_3_hub@{COMMIT}")


def test_diffusers_takes_the_commit_and_no_branch(cache: Path, monkeypatch: Any) -> None:
    (cache / "kernels--kernels-community--flash-attn3" / "snapshots" / COMMIT).mkdir(parents=True)
    monkeypatch.setattr(hub_kernels.PathFinder, "find_spec", lambda name: object())
    entry = attention_dispatch._HUB_KERNELS_REGISTRY[
        attention_dispatch.AttentionBackendName._FLASH_3_HUB
    ]
    monkeypatch.setattr(entry, "revision", None)
    monkeypatch.setattr(entry, "version", entry.version)
    assert pin_kernel(f"_flash_3_hub@{COMMIT}") == "_flash_3_hub"
    assert (entry.revision, entry.version) == (COMMIT, None)
    assert [pin_kernel(name) for name in ("native", "_native_math")] == ["native", "_native_math"]


def test_unknown_and_forward_only_kernels_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"knows no such kernel of the hub; it knows .*_flash_3_hub"
    ):
        require_kernel(f"_flash_9_hub@{COMMIT}")
    with pytest.raises(ValueError, match="has no backward pass"):
        make("wan", attention_backend=f"sage_hub@{COMMIT}")


def test_a_run_is_refused_before_it_starts(cache: Path) -> None:
    words = ["experiment=flux1_flowgrpo", "hardware=cpu_tiny"]
    with pytest.raises(ValueError, match=r"HF_HUB_OFFLINE is set"):
        check_parts(load([*words, f"model.attention_backend=_flash_3_hub@{COMMIT}"]).settings)
