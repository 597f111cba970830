"""The rounding of replay is settled by the clip range: steps per forward, compiled blocks, and what
the first ratios may reach."""

from __future__ import annotations

import math

import pytest

from digenrl import config
from digenrl.cli.extensions import choose_advisor
from digenrl.config import Composed
from digenrl.extensions.planner.reading import workload_of as work_of
from digenrl.rounding import first_ratio_bound, most_steps_per_forward, replay_rounding
from digenrl.settle import settle_run, steps_within_bound, trained_steps


@pytest.mark.parametrize(
    ("dtype", "clip", "bound"),
    [
        ("bfloat16", None, 1e-3),
        ("bfloat16", (4e-6, 4e-6), 1e-6),
        ("bfloat16", (1e-2, 1e-5), 2.5e-6),
        ("bfloat16", (0.2, 0.2), 1e-3),
        ("float32", None, 1e-5),
        ("float32", (2e-6, 2e-6), 5e-7),
        ("float64", (5e-3, 5e-3), 1e-5),
    ],
)
def test_the_bound_is_a_quarter_of_the_clip_or_what_rounding_can_be(
    dtype: str, clip: tuple[float, float] | None, bound: float
) -> None:
    assert first_ratio_bound(dtype, clip) == pytest.approx(bound, rel=1e-12)


@pytest.mark.parametrize("dimensions", [16_384, 65_536, 2_000_000])
@pytest.mark.parametrize("clip", [2e-6, 1e-5, 1e-4, 1e-3])
def test_no_larger_number_of_steps_would_stay_within_the_bound(
    clip: float, dimensions: int
) -> None:
    bound = clip / 4
    most = most_steps_per_forward(bound, "bfloat16", dimensions, 20)
    assert most == 1 or replay_rounding(most, False, dimensions) <= bound
    assert most == 20 or replay_rounding(most + 1, False, dimensions) > bound
    assert most_steps_per_forward(bound, "float32", dimensions, 20) == 20


def test_rounding_falls_with_the_root_of_the_dimensions() -> None:
    one, four = (replay_rounding(2, False, d * 65_536) for d in (1, 4))
    assert one == 2 * four
    assert replay_rounding(1, True, 65_536) == 1.1e-5
    assert math.isclose(replay_rounding(12, True, 65_536), 1.05e-4)


def settled(*words: str) -> Composed:
    return settle_run(config.load(list(words)), choose_advisor())


@pytest.mark.parametrize(
    ("experiment", "steps"), [("flux1_guard", 1), ("flux1_cps", 1), ("flux1_flowgrpo", 2)]
)
def test_a_run_gets_the_steps_per_forward_that_its_clip_allows(experiment: str, steps: int) -> None:
    """Before, flux1_guard got 2 on this profile, with rounding of three times its clip range."""
    run = settled(f"experiment={experiment}", "hardware=node_8xh100").settings
    assert run.schedule.tsp.batch <= steps
    work = work_of(config.load([f"experiment={experiment}", "hardware=node_8xh100"]))
    assert work.most_tsp_batch == steps


def test_what_a_user_says_stays() -> None:
    words = ("experiment=flux1_guard", "hardware=node_8xh100")
    assert settled(*words, "schedule.tsp.batch=2").settings.schedule.tsp.batch == 2
    wider = config.load([*words, "algorithm.ratio_bound=1e-3"])
    assert (work_of(wider).most_tsp_batch or 99) >= 5


def test_compiled_blocks_are_refused_where_their_rounding_would_end_the_run() -> None:
    words = ["experiment=flux1_guard", "hardware=node_8xh100", "model.compile=true"]
    with pytest.raises(ValueError, match=r"model\.compile = true: .*1\.1e-05.*1\.0e-06.*false"):
        work_of(config.load(words))
    assert work_of(config.load([*words, "algorithm.ratio_bound=1e-4"])).compiles
    assert work_of(config.load([*words, "algorithm.clip_range=1e-4"])).compiles
    assert not work_of(config.load(words[:2])).compiles


def test_a_tiny_build_of_guard_computes_in_whole_precision() -> None:
    """With all steps in one forward, rounding is far below a quarter of the clip range."""
    run = config.load(["experiment=flux1_guard", "hardware=cpu_tiny"]).settings
    assert steps_within_bound(run, 1024) == trained_steps(run) > 1
