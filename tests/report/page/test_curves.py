"""Curves say what the figures say: no shifted ends, no invented zero, a second axis only where
scales differ."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from digenrl.report.page import curves
from digenrl.report.page.style import paper_style
from digenrl.report.read_run import Run, read_run
from tests.report.synthetic import write_run


@pytest.fixture
def run(finished: Path) -> Run:
    return read_run(finished)


def test_smoothing_keeps_ends_and_lines() -> None:
    assert curves.running_mean([2.0, 4.0, 6.0, 8.0, 10.0], 3) == [2.0, 4.0, 6.0, 8.0, 10.0]
    assert curves.running_mean([0.0, 3.0, 0.0], 3) == [0.0, 1.0, 0.0]


def test_reward_and_held_out_share_an_axis_only_on_the_same_scale(run: Run) -> None:
    with paper_style():
        figure = curves.draw_reward(run)
        assert figure is not None
        assert len(figure.axes) == 1
        other = replace(
            run, evals=tuple({**row, "heldout": 10 * row["heldout"]} for row in run.evals)
        )
        figure = curves.draw_reward(other)
    assert figure is not None
    assert len(figure.axes) == 2
    assert figure.axes[0].get_ylim()[1] < 1.1


def test_clip_fraction_is_shown_by_age_when_weights_of_several_ages_were_used(run: Run) -> None:
    ages = {"clip_fraction/stale_0": 0.1, "clip_fraction/stale_1": 0.2}
    with paper_style():
        figure = curves.draw_policy(replace(run, steps=tuple({**row, **ages} for row in run.steps)))
    assert figure is not None
    legend = figure.axes[1].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [
        "all",
        "0 version(s) old",
        "1 version(s) old",
    ]


def test_one_slow_step_does_not_flatten_the_others(run: Run) -> None:
    slow = ({**run.steps[0], "step_s": 500.0}, *run.steps[1:])
    with paper_style():
        figure = curves.step_time(replace(run, steps=slow))
    assert figure is not None
    assert figure.axes[0].get_ylim()[1] < 10


@pytest.mark.parametrize(
    "plot", [curves.draw_reward, curves.draw_policy, curves.draw_diversity, curves.step_time]
)
def test_nothing_is_drawn_of_nothing(run: Run, plot: object) -> None:
    assert plot(replace(run, steps=(), evals=())) is None  # type: ignore[operator]


def test_a_published_curve_is_a_band_behind_the_rewards(tmp_path: Path) -> None:
    from tests.report.test_tables import CURVE

    path = write_run(tmp_path / "run", steps=8, samples=False)
    plain = curves.draw_reward(read_run(path))
    with (path / "config.yaml").open("a") as config:
        config.write(CURVE)
    figure = curves.draw_reward(read_run(path))
    assert plain is not None
    assert figure is not None
    assert len(figure.axes[0].patches) == len(plain.axes[0].patches) + 1
    told = [text.get_text() for text in figure.axes[0].texts]
    assert told == ["published, ocr at first", "published, ocr after 600 RL steps"]
