"""A test of the tests: every planted mistake (`planted.py`) is found by a test on the device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deleting import copy_without
from tests.device.environment import run_pytest
from tests.device.planted import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_without((), tmp_path_factory.mktemp("planted"))


def devices(test: str) -> int:
    return 6 if test.endswith("test_runs.py") else 2


def test_there_are_enough_and_each_has_its_place() -> None:
    assert len(FAULTS) >= 25
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    found = {fault.name: (ROOT / fault.file).read_text().count(fault.old) for fault in FAULTS}
    assert {name: count for name, count in found.items() if count != 1} == {}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_mistake_is_found(tree: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    # Bytecode is compared by second and size: a mistake could outlive its removal.
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    path = tree / fault.file
    text = path.read_text()
    path.write_text(text.replace(fault.old, fault.new))
    try:
        words = (fault.test, "-x", "-k", fault.only)
        done = run_pytest(*words, root=tree, devices=devices(fault.test), memory_mib=512)
    finally:
        path.write_text(text)
    assert done.returncode in (1, -11), f"not found: {fault.why}\n{done.stdout[-3000:]}"
    assert "no tests ran" not in done.stdout
