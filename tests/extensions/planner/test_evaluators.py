"""`allocation.evaluation=auto` lets those evaluate who keep trainers waiting less, in plans and in
runs alike."""

from __future__ import annotations

import pytest

from digenrl import config
from digenrl.advisor import PlainAdvisor
from digenrl.cli.extensions import choose_advisor
from digenrl.config.settings import Settings
from digenrl.extensions.planner.bound import step_bound
from digenrl.extensions.planner.cli.plan import booking_of
from digenrl.extensions.planner.outcome import simulate_candidate
from digenrl.extensions.planner.plan_text import Booking, evaluation_words
from digenrl.extensions.planner.reading import candidate_of, costing_of, drawn_of
from digenrl.settle import settle_run

WIDE = ["experiment=wan21_flowgrpo", "hardware=l40x32_h20x16", "schedule=gap_tsp_tag"]


def split(trainers: int, rollouts: int, *words: str) -> list[str]:
    given = [f"allocation.trainers={trainers}", f"allocation.rollouts={rollouts}"]
    return [*WIDE, *given, "model.gradient_checkpointing=auto", *words]


def chosen(words: list[str]) -> tuple[str, str]:
    """Return (`allocation.evaluation` of the settled run, its notes)."""
    composed = settle_run(config.load(words), choose_advisor())
    return composed.settings.allocation.evaluation, "\n".join(composed.notes)


def test_a_run_lets_many_trainers_evaluate_in_place_of_one_rollout() -> None:
    asked, notes = chosen(split(47, 1))
    assert asked == "trainers"
    assert "1 rollouts would take" in notes
    assert "47 trainers take" in notes
    assert chosen(split(16, 32))[0] == "auto"
    assert chosen(split(47, 1, "allocation.evaluation=rollouts"))[0] == "rollouts"


@pytest.mark.parametrize("trainers", [47, 32, 16, 8])
def test_a_plan_books_the_shorter_of_both_and_says_whose_it_is(trainers: int) -> None:
    plans = {}
    for who in ("auto", "trainers", "rollouts"):
        composed = config.load(
            split(trainers, 48 - trainers, f"allocation.evaluation={who}"), "plan"
        )
        settings = composed.settings
        assert isinstance(settings, Settings)
        costing, drawn = costing_of(composed), drawn_of(settings)
        assert drawn is not None
        candidate = candidate_of(settings, trainers, 48 - trainers, costing.work.trained_steps)
        outcome = simulate_candidate(costing, candidate, step_bound(costing))
        plans[who] = (Booking(100, None, 11, drawn).gpu_hours(outcome), outcome, drawn)
    hours, outcome, drawn = plans["auto"]
    assert hours <= 1.001 * min(plans["trainers"][0], plans["rollouts"][0])
    by_trainers = evaluation_words(outcome, drawn) == ["allocation.evaluation=trainers"]
    settled, _ = chosen(split(trainers, 48 - trainers))
    assert by_trainers == (settled == "trainers"), "the run does as the plan says"


def test_without_costs_few_rollouts_leave_evaluations_to_many_trainers() -> None:
    words = ["experiment=digits_flowgrpo", "hardware=cpu"]
    for trainers, rollouts, who in ((9, 2, "trainers"), (8, 2, "auto"), (1, 1, "auto")):
        given = [f"allocation.trainers={trainers}", f"allocation.rollouts={rollouts}"]
        composed = settle_run(config.load([*words, *given]), PlainAdvisor())
        assert composed.settings.allocation.evaluation == who


def test_a_plan_books_evaluations_as_they_are_configured() -> None:
    settings = config.load(split(16, 32), "plan").settings
    booking = booking_of(settings)  # type: ignore[arg-type]
    assert booking.drawn == drawn_of(settings)
