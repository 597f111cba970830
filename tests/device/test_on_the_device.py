"""The strict device, and what runs on it: each test is a pytest or a command in a process that has
the device."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.device.environment import python, run_pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


def passed(*words: str, skips: int = 0, **settings: int | str) -> None:
    """The tests that WORDS choose pass, and at most `skips` of them were skipped."""
    done = run_pytest(*words, timeout=380.0, **settings)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    skipped = re.search(r"(\d+) skipped", done.stdout)
    assert skipped is None or int(skipped[1]) <= skips, done.stdout[-3000:]


INSIDE = "tests/device/inside"
POLICIES = "tests/gpu/test_policies.py"
SIZE = {"devices": 6, "memory_mib": 512}
LEFT_OUT = "not the_clock and not (test_policies and compiled)"
"""Inductor's test, and the clock's, whose matrices take a processor minutes."""
LONGER = "first_ratios and (full or sd35 or qwen or hunyuan)"
"""Tests of `POLICIES` with all weights (which a sharded world trains too), and of further families."""


def test_inside_a_process_that_has_the_device() -> None:
    """One process, because its start costs seconds. Runs come first: they fork it, which is only
    possible before it has used the device."""
    forking = (f"{INSIDE}/test_{name}.py" for name in ("runs", "memory"))
    using = (f"{INSIDE}/test_{name}.py" for name in ("strict", "parts", "commands"))
    chosen = f"{LEFT_OUT} and not ({LONGER})"
    passed(*forking, *using, POLICIES, "-m", "not slow", "-k", chosen, **SIZE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["runs", "memory", "peaks", "families", "commands"])
def test_what_takes_longer(name: str) -> None:
    passed(f"{INSIDE}/test_{name}.py", "-m", "slow", **SIZE)


@pytest.mark.slow
def test_first_ratios_of_all_weights_and_of_further_families() -> None:
    passed(POLICIES, "-k", LONGER, **SIZE)


def started(out: Path, *words: str, devices: int = 2) -> dict[str, torch.Tensor]:
    """The trained weights of a run that the command `train` starts; `devices=0`: on the CPU."""
    asked = ("-m", "digenrl.cli.train", f"output_root={out}", *words)
    done = python(*asked, timeout=300.0, devices=devices)
    assert done.returncode == 0, done.stderr[-4000:]
    return load_file(Path(done.stdout.split()[-1]) / "checkpoints/last/policy.safetensors")


ELSEWHERE = {
    "tests/strategy/test_context.py": "equals_replicas",
    "tests/strategy/test_evaluating.py": "evaluate_what_trainers_would",
    "tests/strategy/test_witnesses.py": "lending or tag",
    "tests/rewards/test_service.py": "bit_by_bit or behind_http",
}
"""Files of tests that know of no device -> those that also run on it: what they compare are runs."""


@pytest.mark.slow
def test_tests_that_know_of_no_device_pass_on_it() -> None:
    passed(*ELSEWHERE, "-k", " or ".join(ELSEWHERE.values()), **SIZE)


@pytest.mark.slow
def test_the_digits_run_through_the_launcher(tmp_path: Path) -> None:
    """What the CPU trains, to the bit."""
    words = ("experiment=digits_flowgrpo", "max_rl_steps=2", "logger=none", "~callbacks.evaluation")
    found, wanted = (started(tmp_path / str(n), *words, devices=n) for n in (2, 0))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
