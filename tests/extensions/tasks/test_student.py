"""The two-step student of the scenes: committed, small, and nearer to the base of many steps than
the base is in two."""

from __future__ import annotations

import pytest
import torch

from digenrl.extensions.tasks.scenes import STUDENT_FILE, ScenesPolicy, ScenesStudentPolicy
from digenrl.rollout.engine import picture_detail
from reward_models.drawn_scenes import SCENES
from reward_models.scene_judges import SceneDetector
from scripts.pretrain_scenes import Settings, sample_scenes
from scripts.scenes_student import distil_student


@pytest.mark.heavy
def test_the_student_draws_in_two_steps_what_the_base_needs_more_for() -> None:
    assert STUDENT_FILE.stat().st_size < 4 << 20
    scenes = [scene for scene in SCENES[::22] for _ in range(8)]
    detector, pictures = SceneDetector(perfect=True), {}
    for name, policy, steps in (
        ("student", ScenesStudentPolicy(), 2),
        ("base, 2", ScenesPolicy(), 2),
        ("base, 12", ScenesPolicy(), 12),
    ):
        pictures[name] = sample_scenes(policy, scenes, steps)
    right = {name: float(detector.judge(made, scenes).mean()) for name, made in pictures.items()}
    sharp = {name: float(picture_detail(made).mean()) for name, made in pictures.items()}
    assert right["student"] > 1.5 * right["base, 2"]
    assert sharp["student"] > 0.9 * sharp["base, 12"]
    assert sharp["base, 2"] < 0.75 * sharp["base, 12"]
    apart = [
        float((pictures[name] - pictures["base, 12"]).square().mean())
        for name in ("student", "base, 2")
    ]
    assert apart[0] < apart[1]  # of the same noise


@pytest.mark.heavy
def test_distilling_is_one_deterministic_command() -> None:
    settings = Settings(task="student", pairs=32, teacher_steps=2, student_steps=3, batch=8)
    first, again = (
        {k: v.clone() for k, v in distil_student(settings).transformer.state_dict().items()}
        for _ in range(2)
    )
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    base = ScenesPolicy().transformer.state_dict()
    assert any(not torch.equal(value, base[name]) for name, value in first.items())
