"""`make pretrain` and `make pretrain-scenes`: settings, determinism, and files that are whole or
absent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from digenrl.extensions.tasks.scenes import BASE_FILE
from scripts import pretrain_scenes
from scripts.flow_matching import save
from scripts.pretrain_digits import Settings, fit_judge, main, pretrain_base, sample_digits


def test_two_steps_are_deterministic_and_move_the_weights() -> None:
    settings = Settings(steps=2, batch=8, seed=3)
    first, second = pretrain_base(settings), pretrain_base(settings)
    other = pretrain_base(Settings(steps=2, batch=8, seed=3, wrong_captions=1.0))
    for left, right in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(left, right)
    # The share of wrong captions changes what is learned and nothing else (same images, noise and
    # levels).
    pairs = zip(first.parameters(), other.parameters(), strict=True)
    assert any(not torch.equal(left, right) for left, right in pairs)


def test_training_a_judge_is_deterministic_and_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()
    first, second = fit_judge("a", seed=3, steps=3), fit_judge("a", seed=3, steps=3)
    assert torch.equal(torch.get_rng_state(), before)
    for left, right in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.heavy
@pytest.mark.parametrize("task", ["scenes", "edits"])
def test_the_last_steps_of_scenes_and_edits_learn_from_wrong_captions(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrain_scenes, "CHUNK", 16)
    short = {"task": task, "steps": 1, "noise_steps": 2, "batch": 8}
    right, again, wrong = (
        pretrain_scenes.pretrain_base(pretrain_scenes.Settings(**short, wrong_captions=share))
        for share in (0.0, 0.0, 1.0)
    )
    for left, same in zip(right.parameters(), again.parameters(), strict=True):
        assert torch.equal(left, same)
        assert torch.equal(left, left.half().float())  # the file keeps all that was learned
    pairs = zip(right.parameters(), wrong.parameters(), strict=True)
    assert any(not torch.equal(left, other) for left, other in pairs)


def test_saved_weights_load_into_the_policy_and_sample(tmp_path: Path) -> None:
    policy = pretrain_base(Settings(steps=1, batch=4))
    path = tmp_path / "deep" / "base.safetensors"
    save(dict(policy.transformer.state_dict()), path)
    assert set(load_file(path)) == set(policy.transformer.state_dict())
    assert [file.name for file in path.parent.iterdir()] == ["base.safetensors"]
    media, prompts = sample_digits(policy, per_prompt=2, steps=2)
    assert media.shape == (20, 1, 8, 8)
    assert len(prompts) == 20


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("stepz=3", "stepz = 3: no such key; nearest: steps"),
        ("steps=many", "steps = many: is text; allowed: whole number >= 1"),
        ("wrong_captions=1.5", "wrong_captions = 1.5: is too large; allowed: number >= 0 and <= 1"),
        ("steps=0", "steps = 0: is too small; allowed: whole number >= 1"),
        ("steps", "steps: settings are key=value"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_written(
    argument: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base.safetensors"
    assert main([f"base={base}", f"judges={tmp_path / 'judges.safetensors'}", argument]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_bad_setting_of_scenes_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pretrain_scenes.main([f"base={tmp_path / 'b'}", "stepz=3"]) == 2
    assert "stepz = 3: no such key; nearest: steps" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert load_file(BASE_FILE)["proj_out.bias"].dtype == torch.float16
