"""Bradley-Terry scores of the samples of a group, from votes between pairs of them.

Sample i beats sample j with probability sigmoid(s_i - s_j). A neutral sample of score 0, which
nobody sees, is part of every group:

- Each sample has tied with the neutral sample `PRIOR` times, so scores are finite and unique.
- The vote "both" lets both samples beat the neutral one. "neither" lets the neutral one beat both.
  So scores of two groups can be compared: if people like every sample of a group, all score above
  0.

A tie counts as half a victory for each side. The fit is the maximum of a strictly concave function.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit, log_expit

Verdict = tuple[int, int, str]
"""(left sample, right sample, what was chosen): "left", "right", "both" or "neither"."""
PRIOR = 1.0


def count_victories(samples: int, verdicts: Iterable[Verdict]) -> NDArray[np.float64]:
    """Return [samples + 1, samples + 1]: how often row beat column. The last one is the neutral
    sample.

    >>> count_victories(2, [(0, 1, "both")]) - count_victories(2, [])
    array([[0. , 0.5, 1. ],
           [0.5, 0. , 1. ],
           [0. , 0. , 0. ]])
    """
    won = np.zeros((samples + 1, samples + 1))
    won[:samples, samples] = won[samples, :samples] = PRIOR / 2
    for left, right, choice in verdicts:
        if choice in ("left", "right"):
            winner, loser = (left, right) if choice == "left" else (right, left)
            won[winner, loser] += 1
        else:
            won[left, right] += 0.5
            won[right, left] += 0.5
            for each in (left, right):
                row, column = (each, samples) if choice == "both" else (samples, each)
                won[row, column] += 1
    return won


def fit_scores(samples: int, verdicts: Iterable[Verdict]) -> NDArray[np.float64]:
    """Return the scores [samples] of a group. A sample that no verdict names has 0."""
    won = count_victories(samples, verdicts)
    met = won + won.T

    def score_gaps(scores: NDArray[np.float64]) -> NDArray[np.float64]:
        every = np.append(scores, 0.0)
        return every[:, None] - every[None, :]

    def loss(scores: NDArray[np.float64]) -> float:
        return -float((won * log_expit(score_gaps(scores))).sum())

    def gradient(scores: NDArray[np.float64]) -> NDArray[np.float64]:
        return (met * expit(score_gaps(scores)) - won).sum(1)[:samples]

    def curvature(scores: NDArray[np.float64]) -> NDArray[np.float64]:
        gap = score_gaps(scores)
        weight = met * expit(gap) * expit(-gap)
        return (np.diag(weight.sum(1)) - weight)[:samples, :samples]

    start = np.zeros(samples)
    found = minimize(loss, start, jac=gradient, hess=curvature, method="trust-exact", tol=1e-9)
    return np.asarray(found.x)
