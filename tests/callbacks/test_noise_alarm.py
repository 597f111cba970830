"""Samples with the run's own noise beside clean ones, at the first evaluation of a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from digenrl import config as configuration
from digenrl.callbacks.picture_alarms import NOISE_RATIO, destroyed_warning
from digenrl.parts import sampling_spec
from digenrl.rollout.engine import RolloutEngine
from digenrl.rollout.evaluation import FixedSamples, pictures_of, tensors_of


def drawn(*words: str) -> tuple[FixedSamples, RolloutEngine]:
    """The evaluation and the engine of an embedded experiment."""
    settings = configuration.load([*words]).settings
    policy: Any = settings.build("model")
    module = settings.build("algorithm", policy=policy)
    engine = RolloutEngine(
        policy,
        settings.build("reward"),
        module.sde,
        module.train_steps,
        sampling_spec(settings),
        seed=0,
    )
    evaluation = settings.build("callbacks.evaluation")
    return FixedSamples(evaluation.drawn.prompts[:6], 2, 1234, None, 0), engine


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("words", "alarms"),
    [
        (["experiment=scenes_flowgrpo"], False),
        (["experiment=digits_flowgrpo"], False),
        (["experiment=digits_dancegrpo"], False),
        (["experiment=scenes_flowgrpo", "algorithm.sde.noise_level=4"], True),
    ],
)
def test_noise_that_destroys_the_pictures_is_told(words: list[str], alarms: bool) -> None:
    fixed, engine = drawn(*words)
    pictures = fixed.draw_pieces(engine, range(6), noise=True)
    measured = pictures.noisy[~pictures.noisy.isnan()]
    assert len(measured) == 6  # a sample of each piece, which is a prompt
    told = destroyed_warning(float(measured.median()))
    assert (told is not None) is alarms, float(measured.median())
    if told is not None:
        assert "algorithm.sde.noise_level" in told
    again = fixed.draw_pieces(engine, range(6))
    assert bool(again.noisy.isnan().all())
    assert torch.equal(again.media, pictures.media)
    sent = pictures_of(tensors_of(pictures), fixed.prompts)
    assert torch.equal(sent.noisy.nan_to_num(), pictures.noisy.nan_to_num())


@pytest.mark.heavy
def test_a_run_without_noise_draws_nothing_more() -> None:
    fixed, engine = drawn("experiment=digits_nft")
    assert bool(fixed.draw_pieces(engine, range(2), noise=True).noisy.isnan().all())


def test_both_sides_of_the_bound() -> None:
    assert destroyed_warning(None) is None
    assert destroyed_warning(NOISE_RATIO) is None
    assert destroyed_warning(1 / NOISE_RATIO) is None
    assert "rollouts draw noise" in str(destroyed_warning(NOISE_RATIO * 1.01))
    assert "nearly nothing" in str(destroyed_warning(0.99 / NOISE_RATIO))
