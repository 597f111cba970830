"""Settings with which others saw a model break: told before a run starts, and in its report."""

# Its experiments need digenrl.extensions.methods and digenrl.extensions.zoo.
from __future__ import annotations

import pytest

from digenrl import config as configuration
from digenrl.advisor import PlainAdvisor
from digenrl.config.traps import known_traps
from digenrl.facts import facts_by_family
from digenrl.settle import settle_run


def told(*words: str) -> list[str]:
    return list(known_traps(configuration.load([*words]).settings))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["experiment=minimax_h3_flowgrpo"], ["noise_level = 0.7", "blue and white", "UniRL#347"]),
        (["experiment=flux2_klein_flowgrpo"], ["clip_range = 0.0001", "Flow-Factory#108"]),
        (
            ["experiment=flux2_klein_flowgrpo", "algorithm.clip_range=[1e-6, 1e-4]"],
            ["clip_range = 0.0001"],
        ),
    ],
)
def test_a_known_trap_is_told_with_its_source(words: list[str], said: list[str]) -> None:
    (line,) = told(*words)
    assert all(text in line for text in said), line


@pytest.mark.parametrize(
    "words",
    [
        ["experiment=minimax_h3_flowgrpo", "algorithm.sde.noise_level=0.2"],
        ["experiment=flux2_klein_flowgrpo", "algorithm.clip_range=1e-5"],
        ["experiment=digits_flowgrpo"],
        ["experiment=sd35_flowgrpo"],
    ],
)
def test_others_are_quiet(words: list[str]) -> None:
    assert not told(*words)


def test_a_run_says_it_before_it_starts() -> None:
    composed = configuration.load(["experiment=flux2_klein_flowgrpo", "hardware=cpu_tiny"])
    assert any("Flow-Factory#108" in note for note in settle_run(composed, PlainAdvisor()).notes)


def test_every_trap_has_its_parts() -> None:
    for family, facts in facts_by_family().items():
        for trap in facts.traps:
            assert set(trap) == {"key", "at_least", "seen", "do"}, family
