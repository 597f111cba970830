"""Samples are heard where a reward asks for their sound, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from digenrl.callbacks.evaluation import save_pictures
from digenrl.diffusion.sde import FlowSDE
from digenrl.diffusion.steps import AllButLast
from digenrl.report.pictures import read_samples
from digenrl.rewards.suite import RewardSuite
from digenrl.rollout.engine import RolloutEngine, SamplingSpec
from digenrl.rollout.evaluation import FixedSamples, join_pictures, pictures_of, tensors_of
from digenrl.rollout.scouts import ScoutingEngine
from digenrl.schedule import Task
from digenrl.types import Prompt
from tests.models.tiny_policies import BOTH, make
from tests.rewards.services import Loudness

pytestmark = pytest.mark.heavy

TASK = Task(step=0, index=0, group=0, first_sample=0, samples=2, version=0)
RAIN, BELL = Prompt("rain on a roof"), Prompt("a bell")
LOUD: Any = {"loud": {"scorer": Loudness()}}
BRIGHT: Any = {"bright": {"scorer": lambda media, prompts: media.flatten(1).mean(1)}}


def engine_of(rewards: Any, heldout: Any = None, kind: Any = RolloutEngine, **more: int) -> Any:
    suite = RewardSuite(rewards, heldout=heldout, placement="inline")
    spec = SamplingSpec(steps=2)
    return kind(make(BOTH), suite, FlowSDE(0.7), AllButLast(), spec, 3, **more)


def run_task(engine: Any) -> tuple[Any, Any]:
    generation = engine.begin_task(TASK, RAIN)
    while engine.steps_left(generation):
        generation = engine.take_step(generation)
    trajectory = engine.score(generation, engine.decode(generation)).result(5)
    return trajectory, generation.state.latents


@pytest.mark.parametrize("kind", [RolloutEngine, ScoutingEngine])
def test_a_rollouts_score_is_that_of_its_own_sound(kind: Any) -> None:
    more = {"candidates": 2, "scout_steps": 2} if kind is ScoutingEngine else {}
    engine = engine_of(LOUD, kind=kind, **more)
    trajectory, latents = run_task(engine)
    sound = engine.policy.codec.decode_sound(latents)
    torch.testing.assert_close(trajectory.rewards["loud"], Loudness()(None, None, sound))
    assert trajectory.rewards["loud"].unique().numel() == 2


def test_nothing_that_makes_sound_is_loaded_for_rewards_of_the_video() -> None:
    engine = engine_of(BRIGHT)
    run_task(engine)
    pictures = engine.evaluate_prompts([RAIN], 1, seed=1)
    assert pictures.sound is None
    assert "_sound_decoders" not in vars(engine.policy.codec)
    held_out = engine_of(BRIGHT, LOUD)
    run_task(held_out)
    assert "_sound_decoders" not in vars(held_out.policy.codec), "rollouts do not ask for it"
    assert held_out.evaluate_prompts([RAIN], 1, seed=1).sound is not None


def test_kept_samples_of_an_evaluation_are_heard(tmp_path: Path) -> None:
    engine, drawn = engine_of(LOUD), FixedSamples((RAIN, BELL), 2, 7, None, 0)
    parts = [drawn.draw_pieces(engine, [number]) for number in (0, 1)]
    sent = [pictures_of(tensors_of(part), drawn.pieces[n]) for n, part in enumerate(parts)]
    pictures = join_pictures(sent)
    assert pictures.sound is not None
    assert pictures.sound.rate == 24000
    torch.testing.assert_close(pictures.rewards["loud"], Loudness()(None, None, pictures.sound))
    save_pictures(tmp_path / "eval-3.npz", pictures, 1)
    kept = read_samples(tmp_path / "eval-3.npz")
    assert kept.sound is not None
    assert kept.sound.rate == 24000
    assert set(kept.scores) == {"loud"}
    whole = pictures.sound.waveform[[0, 2]].numpy()
    assert np.abs(kept.sound.samples / 32767.0 - whole).max() <= 0.5 / 32767 + 1e-7
