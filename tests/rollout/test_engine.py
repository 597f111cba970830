"""What the engine makes of a task, what it says of one beforehand, and what an evaluation draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from digenrl import keys
from digenrl.diffusion.sde import FlowSDE
from digenrl.diffusion.steps import AllButLast
from digenrl.extensions.methods.noise_levels import NoiseLevels
from digenrl.extensions.tasks.digits import DigitsPolicy
from digenrl.rewards.protocol import RewardError
from digenrl.rewards.suite import RewardSuite
from digenrl.rollout import divergence, evaluation
from digenrl.rollout.engine import RolloutEngine, SamplingSpec, fixed_batches
from digenrl.rollout.evaluation import FixedSamples, join_pictures, pictures_of, tensors_of
from digenrl.schedule import Task
from digenrl.types import Prompt, Trajectory

SEED, TASK = 5, Task(step=2, index=1, group=0, first_sample=2, samples=2, version=1)
SEVEN, ONE = Prompt("number seven", target="7"), Prompt("number one", target="1")


def brightness(media: Tensor, prompts: Any) -> Tensor:
    return media.flatten(1).mean(1)


def engine_of(selection: Any = None, **options: Any) -> RolloutEngine:
    kept = {name: options.pop(name) for name in ("keep_means", "keep_final") if name in options}
    rewards = RewardSuite(
        {"bright": {"scorer": options.pop("scorer", brightness), "weight": 2.0}},
        heldout={"dark": {"scorer": lambda media, prompts: -brightness(media, prompts)}},
        placement="inline",
    )
    sampling = SamplingSpec(**{"steps": 3} | options)
    return RolloutEngine(
        DigitsPolicy(), rewards, FlowSDE(0.9), selection or AllButLast(), sampling, SEED, **kept
    )


def made(engine: RolloutEngine) -> Trajectory:
    generation = engine.begin_task(TASK, SEVEN)
    left = []
    while steps := engine.steps_left(generation):
        left.append(steps)
        generation = engine.take_step(generation)
    assert left == [3, 2, 1]
    return engine.score(generation, engine.decode(generation)).result(5)


@pytest.mark.parametrize(
    ("selection", "kept"),
    [
        (AllButLast(), {}),
        (AllButLast(), {"keep_means": True}),
        (AllButLast(), {"keep_final": True, "storage_dtype": torch.float16}),
        (NoiseLevels(), {}),
    ],
    ids=["transitions", "means", "clean latents", "forward process"],
)
def test_a_trajectory_has_what_its_algorithm_needs(selection: Any, kept: dict[str, Any]) -> None:
    found = made(engine_of(selection, **kept))
    assert (found.final is not None) == (
        kept.get("keep_final", False) or not isinstance(selection, AllButLast)
    )
    assert (found.means is not None) == kept.get("keep_means", False)
    assert (found.step, found.index, found.uid, found.first_sample, found.version) == (
        2,
        1,
        SEVEN.uid,
        2,
        1,
    )


def test_a_sample_begins_with_the_noise_of_its_key() -> None:
    shape = DigitsPolicy().latent_shape
    own = keys.noise(SEED, 2, SEVEN.uid, [2, 3], keys.INITIAL, shape)
    assert torch.equal(engine_of().begin_task(TASK, SEVEN).state.latents, own)
    of_group = keys.noise(SEED, 2, SEVEN.uid, [0, 0], keys.INITIAL, shape)
    assert torch.equal(engine_of(same_noise=True).begin_task(TASK, SEVEN).state.latents, of_group)


def test_a_prompt_is_encoded_once_for_all_steps_of_its_tasks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, asked = engine_of(), list[Prompt]()
    encode = engine.policy.codec.encode
    monkeypatch.setattr(
        engine.policy.codec, "encode", lambda prompts: asked.extend(prompts) or encode(prompts)
    )
    made(engine)
    made(engine)
    assert asked == [SEVEN]
    engine.take_step(engine.begin_task(TASK, ONE))
    assert asked == [SEVEN, ONE]


def test_the_steps_are_those_of_the_seed_the_rl_step_and_the_prompt() -> None:
    """Whoever exchanges two of them trains other steps than its trainers wait for."""

    class Asked(AllButLast):
        def plan_steps(self, *facts: Any) -> Any:
            asked.append(facts)
            return super().plan_steps(*facts)

    asked: list[tuple[Any, ...]] = []
    made(engine_of(Asked()))
    assert set(asked) == {(SEED, TASK.step, 3, SEVEN.uid)}


def test_a_closed_engine_scores_nothing_and_gives_its_scorer_the_time_it_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, given = engine_of(), list[float]()
    monkeypatch.setattr(engine._scorer, "close", given.append)
    engine.close()
    engine.close(3.0)
    assert given == [10.0, 3.0]


def test_an_error_of_a_scorer_is_the_trajectorys() -> None:
    def fails(media: Tensor, prompts: Any) -> Tensor:
        raise ValueError("no score")

    engine = engine_of(scorer=fails)
    with pytest.raises(RewardError, match="no score"):
        made(engine)


@pytest.mark.parametrize(("batch", "rows"), [(None, [2, 2]), (3, [3, 1]), (4, [4])])
def test_an_evaluation_draws_rows_prompt_by_prompt_with_noise_of_their_own(
    batch: int | None, rows: list[int]
) -> None:
    policy = DigitsPolicy()
    sampling = SamplingSpec(steps=3, eval_batch=batch)
    found = [draw(4) for _, draw in fixed_batches(policy, sampling, [SEVEN, ONE], 2, 9, "here")]
    assert [len(each) for each in found] == rows
    shape = policy.latent_shape
    alone = [keys.noise(9, 0, p.uid, [i], 4, shape, "here") for p in (SEVEN, ONE) for i in range(2)]
    assert torch.equal(torch.cat(found), torch.cat(alone))


def test_evaluations_take_their_own_steps_and_every_reward() -> None:
    for options, asked, steps in (
        ({}, None, 3),
        ({"eval_steps": 2}, None, 2),
        ({"eval_steps": 2}, 4, 4),
    ):
        count: list[None] = []
        pictures = engine_of(**options).evaluate_prompts(
            [SEVEN, ONE], 2, 9, asked, lambda count=count: count.append(None)
        )
        assert len(count) == 2 * steps, "two batches of a prompt's samples"
        assert pictures.prompts == (SEVEN, SEVEN, ONE, ONE)
        assert torch.equal(pictures.rewards["bright"], -pictures.rewards["dark"])
        assert pictures.media.shape[0] == len(pictures.kl) == 4
        assert pictures.kl.isnan().all()


@pytest.mark.parametrize(
    ("prompts", "batch", "sizes"),
    [
        (3, None, [1, 1, 1]),
        (3, 5, [1, 1, 1]),
        (4, 5, [2, 2]),
        (4, 8, [4]),
        (3, 7, [3]),
        (2, 1, [1, 1]),
    ],
)
def test_pieces_are_equal_and_as_large_as_a_batch_allows(
    prompts: int, batch: int | None, sizes: list[int]
) -> None:
    many = tuple(Prompt(f"number {n}") for n in range(prompts))
    pieces = FixedSamples(many, 2, 9, None, 0, batch).pieces
    assert [len(piece) for piece in pieces] == sizes
    assert sum(pieces, ()) == many


def test_a_piece_that_was_sent_is_the_piece_that_was_made() -> None:
    engine, drawn = engine_of(), FixedSamples((SEVEN, ONE), 2, 9, 2, 0, None)
    first, second = (drawn.draw_pieces(engine, [number]) for number in (0, 1))
    both = drawn.draw_pieces(engine, [0, 1])
    sent = join_pictures(
        [pictures_of(tensors_of(part), drawn.pieces[n]) for n, part in enumerate((first, second))]
    )
    whole = engine.evaluate_prompts((SEVEN, ONE), 2, 9, 2).media
    assert both.media.dtype == torch.uint8
    assert (whole - both.media / 255).abs().max() <= 0.5 / 255 + 1e-6, "rounded to 0 .. 255"
    assert both.media.max() > 1
    for other in (sent, join_pictures([first, second])):
        assert other.prompts == both.prompts == (SEVEN, SEVEN, ONE, ONE)
        assert torch.equal(other.media, both.media)
        assert other.rewards.keys() == {"bright", "dark"}
        assert all(torch.equal(other.rewards[name], both.rewards[name]) for name in other.rewards)
        assert torch.equal(other.kl.isnan(), both.kl.isnan())


@pytest.mark.parametrize("shares", [[[0, 1, 2]], [[0, 1], [2, 0]], [[2], [1], [0]]])
def test_the_noise_of_a_run_is_compared_alike_whoever_draws_which_pieces(
    shares: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "NOISY_PIECES", 2)
    drawn, steps = FixedSamples((SEVEN, ONE, Prompt("number three")), 1, 9, 2, 0), list[int]()
    noisy = {}
    for rank, share in enumerate(shares):
        count = lambda rank=rank: steps.append(rank)  # noqa: E731
        noisy |= dict(
            zip(share, drawn.draw_pieces(engine_of(), share, count, noise=True).noisy, strict=True)
        )
    for number, prompt in enumerate((SEVEN, ONE)):
        alone = engine_of().evaluate_prompts((prompt,), 1, 9, 2, noisy_too=True).noisy
        torch.testing.assert_close(noisy[number], alone[0], rtol=1e-6, atol=0.0)
    assert noisy[2].isnan()
    for rank, share in enumerate(shares):  # as sharded weights need it
        assert steps.count(rank) == 2 * len(share) + 3 * min(2, len(share))
    assert drawn.draw_pieces(engine_of(), [0]).noisy.isnan().all()


def test_scores_that_are_missing_too_often_are_trouble() -> None:
    engine = engine_of(scorer=lambda media, prompts: torch.full((len(prompts),), torch.nan))
    engine._rewards.min_missing_samples = 2
    assert engine.reward_trouble() is None
    made(engine)
    assert str(engine.reward_trouble()).startswith("Reward `bright` is missing for 2 of 2 samples")


@pytest.mark.parametrize(("reference", "compared"), [(True, 1), (False, 0)])
def test_an_evaluation_is_compared_with_the_base_model_where_there_is_one(
    reference: bool, compared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[tuple[Any, ...]] = []

    def measure(*facts: Any) -> Tensor:
        measured.append(facts)
        return torch.full((2,), 0.5)

    engine = engine_of()
    monkeypatch.setattr(type(engine.policy.adapter), "has_reference", reference)
    monkeypatch.setattr(divergence, "measure_divergence", measure)
    drawn = FixedSamples((SEVEN, ONE), 2, 9, 1, 1, 4).draw_pieces(engine, [0])
    if compared:
        ((policy, batches, grid, _),) = measured
        assert policy is engine.policy
        assert grid is engine.grid
        assert len(list(batches)) == 2, "a batch for each prompt, of one sample"
        assert drawn.kl[[0, 2]].tolist() == [0.5, 0.5]
        assert drawn.kl[[1, 3]].isnan().all(), "one sample of each prompt"
    else:
        assert not measured
        assert drawn.kl.isnan().all()
