"""The self-check says ok, warning or fix, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from digenrl.extensions.tools.cli import check as setup


def levels(findings: list[setup.Finding]) -> list[str]:
    return [finding.level for finding in findings]


def test_this_environment_has_nothing_to_fix() -> None:
    findings = [
        finding
        for check in (setup.packages, setup.processor, setup.limits, setup.configurations)
        for finding in check()
    ]
    assert "fix" not in levels(findings)
    assert any("scenes_flowgrpo composes" in finding.text for finding in findings)


def test_a_missing_package_must_be_fixed() -> None:
    findings = list(setup.packages(["no-such-package-h5>=1", "numpy>=1", "ruff; extra == 'dev'"]))
    (finding,) = [finding for finding in findings if finding.level == "fix"]
    assert "missing: no-such-package-h5;" in finding.text
    assert "make setup" in finding.text


def test_a_missing_extra_is_none_of_the_faults(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = list(setup.packages(["numpy>=1", 'no-such-package-h5; extra == "ocr"']))
    assert "fix" not in levels(findings)
    assert "not installed: ocr" in findings[-1].text
    monkeypatch.setattr(setup, "CHECKS", (lambda: iter(findings),))
    assert setup.main() == 0
    assert "'.[ocr]'" in capsys.readouterr().out


def test_an_untested_version_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "_pinned", lambda: {"numpy": "0.1"})
    (finding,) = setup.packages(["numpy>=1"])
    assert finding.level == "warning"
    assert "tested: 0.1" in finding.text


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
    assert levels(list(setup.disk())) == ["ok"]
    monkeypatch.setattr(setup, "MIN_DISK_GIB", 1e9)
    assert levels(list(setup.disk())) == ["warning"]
    monkeypatch.setattr(setup.os, "access", lambda *_: False)
    (finding,) = setup.disk()
    assert finding.level == "fix"
    assert "output_root=" in finding.text


def test_exit_code_follows_the_worst_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(level: setup.Level) -> list[setup.Finding]:
        return [setup.Finding("thing", level, "told")]

    for level, code in (("ok", 0), ("warning", 0), ("fix", 1)):
        monkeypatch.setattr(setup, "CHECKS", (lambda level=level: iter(check(level)),))
        assert setup.main() == code
        assert level in capsys.readouterr().out
