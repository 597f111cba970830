"""The self-check says ok, warning or fix, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from digenrl import accelerator
from digenrl.extensions.tools.cli import check as setup


def levels(findings: list[setup.Finding]) -> list[str]:
    return [finding.level for finding in findings]


@pytest.mark.parametrize(
    ("driver", "built", "told"),
    [
        ("12.4", "13.2", "torch torchvision --index-url https://download.pytorch.org/whl/cu126"),
        ("13.0", None, "whl/cu130"),
        ("13.0", "13.2", "CUDA_VISIBLE_DEVICES"),
        ("11.8", "13.2", "update the driver"),
    ],
)
def test_a_driver_that_torch_does_not_fit_is_told_which_torch(
    driver: str, built: str | None, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`nvidia-smi` of a machine whose torch sees no GPU, as here."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '| NVIDIA-SMI 550.54   CUDA Version: {driver}     |'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("torch.version.cuda", built)
    (finding,) = (each for each in setup.torch_and_devices() if each.subject == "devices")
    assert finding.level == "fix"
    assert f"runs CUDA {driver}" in finding.text
    assert told in finding.text


def test_full_or_protected_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert levels(list(setup.check_disk())) == ["ok"]
    monkeypatch.setattr(setup, "MIN_DISK_GIB", 1e9)
    assert levels(list(setup.check_disk())) == ["warning"]
    monkeypatch.setattr(setup.os, "access", lambda *_: False)
    (finding,) = setup.check_disk()
    assert finding.level == "fix"
    assert "output_root=" in finding.text


def test_gpus_need_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule of a run (`agreement.check_machine`), on a machine with more GPUs than it has
    memory for. Stand-ins are the GPUs alone."""
    monkeypatch.setattr(accelerator, "device_count", lambda: 0)
    assert "memory" in {found.subject for found in setup.check_memory()}
    assert "shared memory" not in {found.subject for found in setup.check_memory()}
    monkeypatch.delenv("NCCL_SHM_DISABLE", raising=False)
    monkeypatch.setattr(accelerator, "device_count", lambda: 10**7)
    (found,) = (each for each in setup.check_memory() if each.subject == "shared memory")
    assert (found.level, "--shm-size=1g" in found.text) == ("fix", True)
    monkeypatch.setattr(accelerator, "device_count", lambda: 1)
    (found,) = (each for each in setup.check_memory() if each.subject == "shared memory")
    assert found.level == "ok"


def test_exit_code_follows_the_worst_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(level: setup.Level) -> list[setup.Finding]:
        return [setup.Finding("thing", level, "told")]

    for level, code in (("ok", 0), ("warning", 0), ("fix", 1)):
        monkeypatch.setattr(setup, "CHECKS", (lambda level=level: iter(check(level)),))
        assert setup.main() == code
        assert level in capsys.readouterr().out


@pytest.mark.parametrize(("caller", "command"), [("", "digenrl fetch "), ("make", "make fetch ")])
def test_what_a_run_lacks_is_fetched_by_the_command_of_the_caller(
    caller: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIGENRL_CALLER", caller)
    words = ["experiment=digits_flowgrpo", "reward=pickscore", "hardware.build=real"]
    (lacking,) = (found for found in setup.check_needs(words) if found.level == "fix")
    assert f"`{command}" in lacking.text
    assert "of this run" not in lacking.text
