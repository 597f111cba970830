"""Closed forms of the fit, and an independent search of its maximum."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq, minimize

from digenrl.extensions.votes import bradley_terry
from digenrl.extensions.votes.bradley_terry import PRIOR, fit_scores


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("wins", [1, 2, 7, 1000])
def test_two_samples_of_which_one_always_wins_solve_one_equation(wins):
    """The scores are (s, -s) by symmetry. The slope in s vanishes: n sigmoid(-2s) = PRIOR
    (sigmoid(s) - 1/2)."""
    s = brentq(lambda s: wins * sigmoid(-2 * s) - PRIOR * (sigmoid(s) - 0.5), 0, 50)
    np.testing.assert_allclose(fit_scores(2, [(0, 1, "left")] * wins), [s, -s], atol=1e-6)
    np.testing.assert_allclose(fit_scores(2, [(0, 1, "right")] * wins), [-s, s], atol=1e-6)


def test_with_a_vanishing_prior_the_odds_are_those_of_the_votes(monkeypatch):
    monkeypatch.setattr(bradley_terry, "PRIOR", 1e-7)
    first, second = fit_scores(2, [(0, 1, "left")] * 3 + [(1, 0, "left")])
    assert first - second == pytest.approx(math.log(3), abs=1e-4)


@pytest.mark.parametrize("times", [1, 3])
def test_ties_are_equal_and_liked_or_not(times):
    """Both beat the neutral sample n times, against which they have half a victory each way."""
    level = math.log((times + PRIOR / 2) / (PRIOR / 2))
    np.testing.assert_allclose(fit_scores(2, [(0, 1, "both")] * times), level, atol=1e-6)
    np.testing.assert_allclose(fit_scores(2, [(1, 0, "neither")] * times), -level, atol=1e-6)


def test_votes_that_cancel_and_no_votes_are_zero():
    np.testing.assert_allclose(fit_scores(3, []), 0, atol=1e-12)
    np.testing.assert_allclose(fit_scores(2, [(0, 1, "left"), (0, 1, "right")]), 0, atol=1e-9)
    circle = [(0, 1, "left"), (1, 2, "left"), (2, 0, "left")]
    np.testing.assert_allclose(fit_scores(3, circle), 0, atol=1e-9)


def test_what_beats_a_winner_is_best_without_having_met_the_loser():
    best, middle, worst = fit_scores(3, [(0, 1, "left"), (1, 2, "left")])
    assert best > middle > worst
    assert best == pytest.approx(-worst, abs=1e-9)
    assert middle == pytest.approx(0, abs=1e-9)


CHOICES = st.sampled_from(["left", "right", "both", "neither"])
VERDICTS = st.lists(
    st.tuples(st.sampled_from([*itertools.permutations(range(4), 2)]), CHOICES).map(
        lambda each: (*each[0], each[1])
    ),
    max_size=12,
)


@given(VERDICTS, st.permutations(range(4)))
def test_it_is_the_maximum_of_the_likelihood_whatever_the_samples_are_called(verdicts, names):
    def loss(scores):
        total = sum(PRIOR / 2 * (math.log(sigmoid(s)) + math.log(sigmoid(-s))) for s in scores)
        for left, right, choice in verdicts:
            gap = scores[left] - scores[right]
            for side, weight in ((1, choice != "right"), (-1, choice != "left")):
                half = 0.5 if choice in ("both", "neither") else 1.0
                total += half * weight * math.log(sigmoid(side * gap))
            sign = {"both": 1, "neither": -1}.get(choice)
            if sign:
                total += sum(math.log(sigmoid(sign * scores[each])) for each in (left, right))
        return -total

    found = fit_scores(4, verdicts)
    other = minimize(
        loss, np.zeros(4), method="Nelder-Mead", options={"maxiter": 4000, "xatol": 1e-7}
    )
    assert loss(found) <= other.fun + 1e-9
    renamed = fit_scores(4, [(names[a], names[b], choice) for a, b, choice in verdicts])
    np.testing.assert_allclose(renamed[list(names)], found, atol=1e-6)
