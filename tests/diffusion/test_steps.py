"""Step selection: docs/algorithms.md section 1.7 and check 19."""

from __future__ import annotations

import pytest

from digenrl.diffusion.steps import AllButLast, RandomSubset, StepPlan, StepSelection
from digenrl.extensions.methods.noise_levels import NoiseLevels
from digenrl.extensions.methods.steps import FirstFraction, Window

ALL: list[StepSelection] = [
    AllButLast(),
    AllButLast(last="sde"),
    FirstFraction(0.5),
    RandomSubset(0.6),
    RandomSubset(size=3, stop=5, untrained="ode"),
    Window(2),
    Window(4, order="progressive", hold=2, overlap=1),
    NoiseLevels(size=3),
]


@pytest.mark.parametrize("selection", ALL)
@pytest.mark.parametrize("steps", [6, 10, 25])
def test_plans_are_deterministic_sized_and_leave_the_last_step_out(
    selection: StepSelection, steps: int
) -> None:
    """Check 19: the plan is the same wherever it is computed, S is the count, and SDE training
    excludes the last step."""
    for step in range(30):
        plan = selection.plan_steps(7, step, steps)
        assert plan == selection.plan_steps(7, step, steps)
        assert len(plan.trained) == selection.count_trained(steps)
        assert max((*plan.trained, *plan.sde)) < steps
        if not plan.forward_process:
            assert set(plan.trained) <= set(plan.sde)
            assert max(plan.trained) < steps - 1


def union(selection: StepSelection, steps: int, rl_steps: int = 200) -> set[int]:
    return {k for step in range(rl_steps) for k in selection.plan_steps(0, step, steps).trained}


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (Window(2, first=0, stop=5), range(5)),
        (Window(2, first=1, stop=4), range(1, 4)),
        (Window(4, order="progressive", hold=3), range(9)),
        (Window(4, order="progressive", hold=3, overlap=1), range(9)),
        (RandomSubset(size=2, first=1, stop=6), range(1, 6)),
        (NoiseLevels(size=2), range(10)),
        (NoiseLevels(size=1), range(10)),
    ],
)
def test_windows_cover_exactly_their_range(selection: StepSelection, expected: range) -> None:
    """Check 19: the union over starts is the configured range, no more, no less (UniRL's floor
    leaves a remainder out)."""
    assert union(selection, 10) == set(expected)


def test_check_19_can_fail() -> None:
    """A window that floors the number of positions, as UniRL's does, never trains the last
    steps."""

    class Floored(Window):
        def window_start(self, seed: int, step: int, steps: int) -> int:
            room = steps - 1 - self.size
            return self.size * ((step // self.hold) % (room // self.size + 1))

    assert union(Floored(4, order="progressive", hold=3), 10) != set(range(9))


def test_progressive_window_holds_moves_wraps_or_stays() -> None:
    """MixGRPO: 25 RL steps per window, the start moves by `prog_overlap_step=1` = size -
    overlap."""
    published = Window(4, order="progressive", hold=25, overlap=3)
    assert [published.window_start(0, step, 25) for step in range(300)] == [
        step // 25 for step in range(300)
    ]
    window = Window(4, order="progressive", hold=25, overlap=1)
    starts = [window.window_start(0, step, 25) for step in range(0, 25 * 9, 25)]
    assert starts == [0, 3, 6, 9, 12, 15, 18, 20, 0]
    assert {window.window_start(0, step, 25) for step in range(25)} == {0}
    stays = Window(4, order="progressive", hold=25, overlap=1, wrap=False)
    assert stays.window_start(0, 10_000, 25) == 20


def test_where_nothing_is_said_six_of_ten_steps_are_drawn_from_all_for_all_prompts() -> None:
    plans = [RandomSubset().plan_steps(0, step, 11) for step in range(40)]
    assert {len(plan.trained) for plan in plans} == {6}
    assert {k for plan in plans for k in plan.trained} == set(range(10))
    assert {plan.sde for plan in plans} == {tuple(range(10))}
    assert RandomSubset().plan_steps(0, 3, 11, 7) == plans[3]
    assert AllButLast().count_trained(2) == 1, "the least"


def test_random_choices_vary_with_step_and_seed() -> None:
    for selection in (Window(2), RandomSubset(0.5), NoiseLevels(size=3)):
        assert len({selection.plan_steps(0, step, 12).trained for step in range(20)}) > 3
        assert [selection.plan_steps(0, step, 12) for step in range(20)] != [
            selection.plan_steps(1, step, 12) for step in range(20)
        ]


def test_who_names_no_prompt_means_prompt_0() -> None:
    choice = RandomSubset(size=2, per_prompt=True)
    for seed in range(5):
        assert choice.plan_steps(seed, 1, 8) == choice.plan_steps(seed, 1, 8, 0)
    assert len({choice.plan_steps(3, 1, 8, uid) for uid in range(9)}) > 1


def test_each_prompt_may_draw_its_own_step_which_its_samples_share() -> None:
    """Flash-GRPO: one step of the pool, with noise there alone."""
    own = RandomSubset(size=1, stop=10, untrained="ode", per_prompt=True)
    drawn = [own.plan_steps(0, 3, 20, uid) for uid in range(200)]
    assert {plan.trained[0] for plan in drawn} == set(range(10))
    assert all(plan.sde == plan.trained for plan in drawn)
    assert own.plan_steps(0, 3, 20, uid=5) == drawn[5]
    shared = RandomSubset(size=1, stop=10)
    assert shared.plan_steps(0, 3, 20, 1) == shared.plan_steps(0, 3, 20, 2)


def test_a_share_of_a_pool_is_of_the_steps_that_are_in_it() -> None:
    assert RandomSubset(0.5, first=2, stop=8).count_trained(10) == 3
    assert RandomSubset(0.1, first=2, stop=8).count_trained(10) == 1
    assert RandomSubset(size=6, first=2, stop=8).count_trained(10) == 6
    with pytest.raises(ValueError, match=r"size=7 does not fit the pool of 6 steps \[2, 8\)"):
        RandomSubset(size=7, first=2, stop=8).count_trained(10)


def test_untrained_steps_follow_their_option() -> None:
    """Section 1.2: the last step is Euler (x0_hat) unless last="sde"; DanceGRPO keeps noise on
    untrained steps."""
    assert AllButLast().plan_steps(0, 0, 6).sde == (0, 1, 2, 3, 4)
    assert AllButLast(last="sde").plan_steps(0, 0, 6).sde == (0, 1, 2, 3, 4, 5)
    assert FirstFraction(0.5).plan_steps(0, 0, 6) == StepPlan((0, 1, 2, 3, 4), (0, 1, 2))
    assert FirstFraction(0.5, untrained="ode").plan_steps(0, 0, 6).sde == (0, 1, 2)
    assert FirstFraction(0.99).count_trained(10) == 9
    assert RandomSubset(0.6).count_trained(16) == 9  # DanceGRPO: 9 of 15


@pytest.mark.parametrize(
    ("selection", "steps", "message"),
    [
        (Window(2, stop=10), 10, "usable steps"),
        (Window(6, stop=5), 10, "does not fit"),
        (Window(4, first=2, stop=5), 10, "does not fit"),
        (RandomSubset(size=20), 10, "size=20"),
        (RandomSubset(0.5, first=9), 10, "usable steps"),
        (NoiseLevels(stop=11), 10, "usable steps"),
        (AllButLast(), 1, "never trained"),
        (RandomSubset(), 1, "never trained"),
    ],
)
def test_selections_outside_the_steps_are_refused(
    selection: StepSelection, steps: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        selection.count_trained(steps)


def test_bad_options_and_plans_are_refused() -> None:
    with pytest.raises(ValueError, match="overlap"):
        Window(2, overlap=2)
    with pytest.raises(ValueError, match="'random' or 'progressive'"):
        Window(2, order="sideways")
    with pytest.raises(ValueError, match="log-prob"):
        StepPlan((0, 1), (1, 2))
    with pytest.raises(ValueError, match="empty"):
        StepPlan((), ())
    with pytest.raises(ValueError, match="fraction"):
        FirstFraction(0.0)
    with pytest.raises(ValueError, match="needs size or fraction"):
        RandomSubset(fraction=None)
    for steps in ((1, 0), (0, 0), (-1, 0)):
        with pytest.raises(ValueError, match="ascending, unique and >= 0"):
            StepPlan((), steps)
    for fraction in (0.0, -0.1, 1.01):
        with pytest.raises(ValueError, match="fraction must be in"):
            RandomSubset(fraction)
    assert RandomSubset(1.0).count_trained(6) == 5
    assert RandomSubset(fraction=None, size=2).count_trained(6) == 2
    assert RandomSubset(size=2).count_trained(6) == 2, "a size overrides the share"
