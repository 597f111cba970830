"""The role timeline: a typical window, lanes for what overlaps, colours for every stage and
cause."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path

import pytest

from digenrl.record.spans import STAGES, WAIT_CAUSES, Span
from digenrl.report.page.style import CAUSE_COLOURS, STAGE_COLOURS, paper_style
from digenrl.report.page.timeline import (
    NAMED_RANKS,
    SHOWN_RANKS,
    assign_lanes,
    clip_spans,
    draw_timeline,
    time_by_rank,
    typical_window,
)
from digenrl.report.read_run import extends_step, read_run
from tests.report.synthetic import write_lines, write_run


def span(start: float, end: float, step: int = 0, stage: str = "train", rank: int = 0) -> Span:
    return Span(rank, "trainer" if rank == 0 else "rollout", stage, start, end, step)


def test_every_stage_and_cause_has_a_colour_of_its_own() -> None:
    assert set(STAGES) - {"wait"} <= set(STAGE_COLOURS)
    assert set(CAUSE_COLOURS) == set(WAIT_CAUSES)
    colours = [
        *(STAGE_COLOURS[stage] for stage in STAGES if stage != "wait"),
        *CAUSE_COLOURS.values(),
    ]
    assert len(set(colours)) == len(colours)


def test_the_window_is_typical_not_the_slow_start() -> None:
    ends = dict(enumerate([50.0, 52.0, 54.0, 56.0, 80.0, 82.0, 84.0]))  # steps 0 and 4 are slow
    start, end, steps = typical_window(ends, steps=2)
    assert (end - start, len(steps)) == (4, 2)
    assert ends[steps[-1]] == end


def test_no_window_spans_steps_that_the_record_lacks() -> None:
    ends = {0: 1.0, 1: 2.0, 2: 3.0, 8: 9.0, 16: 17.0, 17: 18.0, 18: 19.0, 19: 20.0}
    start, end, steps = typical_window(ends)
    assert (start, end, list(steps)) == (17.0, 20.0, [17, 18, 19])


def test_a_run_of_one_step_is_shown_whole(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", steps=1, samples=False))
    with paper_style():
        figure = draw_timeline(run)
    assert figure is not None
    assert figure.axes[0].get_title("left") == "What each rank did, the whole run"


@pytest.mark.parametrize("ahead", [0.0, 0.5])
def test_a_version_is_finished_by_trainers_not_by_stale_generation(ahead: float) -> None:
    spans = [span(0, 2, 0), span(2, 4, 1), span(3 + ahead, 9, 0, "generate", rank=1)]
    assert [extends_step(each) for each in spans] == [True, True, False]


def test_overlapping_spans_lie_in_different_lanes_and_others_in_one() -> None:
    spans = [span(0, 3), span(1, 2), span(1.5, 4), span(2, 5), span(5, 6)]
    chosen = assign_lanes(spans)
    assert chosen == [0, 1, 2, 1, 0]
    for first, (a, lane_a) in enumerate(zip(spans, chosen, strict=True)):
        for b, lane_b in list(zip(spans, chosen, strict=True))[first + 1 :]:
            assert lane_a != lane_b or b.start >= a.end or a.start >= b.end


def test_figures_have_a_row_per_rank_and_none_without_spans(finished: Path) -> None:
    run = read_run(finished)
    with paper_style():
        for plot in (draw_timeline, time_by_rank):
            figure = plot(run)
            assert figure is not None
            rows = [label.get_text() for label in figure.axes[0].get_yticklabels()]
            assert rows == ["trainer 0", "trainer 1", "rollout 2", "rollout 3"]
            assert plot(replace(run, spans=(), seconds={}, step_ends={})) is None


def test_spans_are_cut_to_a_window() -> None:
    spans = [span(1.0, 3.0), span(0.0, 2.0, stage="generate", rank=1), span(4.0, 5.0)]
    cut = [(each.rank, each.start, each.end) for each in clip_spans(spans, 0.5, 4.0)]
    assert cut == [(0, 1.0, 3.0), (1, 0.5, 2.0)]


def test_a_record_of_any_number_of_ranks_is_drawn_with_the_first(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1, samples=False)
    rows = [span(0.0, 1.0, rank=rank).to_dict() for rank in range(5, 3005)]
    write_lines(run / "spans" / "rank-005.jsonl", rows)
    with paper_style():
        for picture in (draw_timeline, time_by_rank):
            figure = picture(read_run(run))
            assert figure is not None
            (axes,) = figure.axes
            assert len(axes.get_yticks()) + len(axes.texts) <= 2 * NAMED_RANKS
            assert f"the first {SHOWN_RANKS} of 300" in axes.get_title("left")
            assert figure.get_figheight() < 40


def test_lanes_are_the_lowest_that_are_free_in_little_time() -> None:
    rng = random.Random(3)
    starts = sorted(rng.random() * 9 for _ in range(300))
    own = [span(start, start + rng.random()) for start in starts]
    ends: list[float] = []
    for each, lane in zip(own, assign_lanes(own), strict=True):
        free = [number for number, end in enumerate(ends) if end <= each.start + 1e-9]
        assert lane == min([*free, len(ends)])
        ends[lane : lane + 1] = [each.end]
    began = time.monotonic()
    assert assign_lanes([span(0.0, 1.0)] * 50_000)[-1] == 49_999
    assert time.monotonic() - began < 5
