"""Arguments that a target does not take are refused, and nothing is imported for that."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from digenrl import config
from digenrl.config.arguments import argument_problems
from digenrl.config.compose import group_options
from digenrl.config.targets import target_problems
from digenrl.parts import check_parts
from digenrl.rewards.needs import require_weights


def test_reads_constructors_without_importing() -> None:
    before = set(sys.modules)
    tree = {"_target_": "reward_models.jpeg_size.JpegSize", "qality": 3, "quality": 90}
    (text,) = target_problems({"scorer": tree})
    assert text == "scorer.qality: JpegSize takes no such argument; nearest: scorer.quality."
    assert "reward_models.jpeg_size" not in set(sys.modules) - before


def test_accepts_dataclasses_and_their_inherited_fields() -> None:
    assert (
        target_problems(
            {"_target_": "digenrl.diffusion.steps.RandomSubset", "size": 2, "last": "ode"}
        )
        == []
    )
    (text,) = target_problems(
        {"s": {"_target_": "digenrl.diffusion.steps.RandomSubset", "sizes": 2}}
    )
    assert "nearest: s.size" in text


def test_a_function_is_no_component() -> None:
    (text,) = argument_problems("a._target_", "a", "reward_models.weights.read_state", {})
    assert "read_state is a function; a component is a class" in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["experiment=digits_flowgrpo", "+model.pth=x"], ["model.pth", "nearest: model.path"]),
        (["+trainer.max_epoch=3"], ["trainer.max_epoch", "Trainer takes no such argument"]),
        (["+algorithm.lr=1e-3"], ["algorithm.lr", "GRPO takes no such argument"]),
        (["+strategy.lend=1"], ["strategy.lend", "takes no such argument"]),
    ],
)
def test_a_configuration_names_the_nearest_argument(
    words: Sequence[str], expected: Sequence[str]
) -> None:
    with pytest.raises(config.ConfigError) as caught:
        config.load(words)
    assert any(all(part in text for part in expected) for text in caught.value.problems)


MODELS = [
    OmegaConf.load(config.config_directory() / "model" / f"{name}.yaml").get("_target_")
    for name in group_options(config.config_directory())["model"]
]
JUDGES = ["reward_models.vlm_judge.PairJudge", "reward_models.unified_reward.UnifiedReward"]


@pytest.mark.parametrize("target", [*filter(None, dict.fromkeys(MODELS)), *JUDGES])
def test_keys_are_known_through_bases_of_other_files_and_handed_on_kwargs(target: str) -> None:
    (text,) = target_problems({"a": {"_target_": target, "no_such_key": 1}})
    assert "a.no_such_key" in text
    assert "takes no such argument" in text


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("model.height=abc", ["model.height = abc: is text; allowed: whole number."]),
        ("model.height=1.5", ["model.height = 1.5: is a number; allowed: whole number."]),
        ("model.height=true", ["model.height = true: is true/false; allowed: whole number."]),
        ("model.shift=[1]", ["model.shift = [1]: is a list; allowed: number or null."]),
        ("model.keep_reference=1", ["is a whole number; allowed: true or false."]),
        ("model.negative_prompt=3", ["\"model.negative_prompt='3'\" if you mean the text"]),
        ("algorithm.advantage.eps=small", ["is text; allowed: number."]),
        ("callbacks.checkpoint.every=abc", ["is text; allowed: whole number."]),
        ("trainer.log_every_n_steps=abc", ["is text; allowed: whole number or null."]),
        ("reward.rewards.ocr.scorer.frames=all", ["is text; allowed: whole number"]),
    ],
)
def test_a_value_is_of_the_type_that_the_component_takes(
    word: str, expected: Sequence[str]
) -> None:
    with pytest.raises(config.ConfigError) as caught:
        config.load(["experiment=sd35_flowgrpo", "hardware=cpu_tiny", word])
    (text,) = caught.value.problems
    assert text.startswith(word.partition("=")[0])
    assert all(part in text for part in expected), text


@pytest.mark.parametrize("name", ["half", "fp16", "bf16", "BF16", "float", "double", "int8", "x"])
@pytest.mark.parametrize("key", ["model.dtype", "reward.rewards.clip_score.scorer.dtype"])
def test_a_dtype_has_one_name(key: str, name: str) -> None:
    words = ["experiment=sd35_flowgrpo", "hardware=cpu_tiny", "reward=ocr_clip", f"{key}={name}"]
    with pytest.raises(
        config.ConfigError, match=rf"{key} = {name}: is no dtype; allowed: bfloat16"
    ):
        config.load(words)


def test_an_embedded_model_has_the_same_names_of_dtypes() -> None:
    with pytest.raises(config.ConfigError, match=r"model\.dtype = half: is no dtype"):
        config.load(["experiment=digits_flowgrpo", "model.dtype=half"])


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (
            "model.lora.targets=3",
            "model.lora.targets = 3: is a whole number; allowed: text or list",
        ),
        ("+callbacks.mine.every=3", "callbacks.mine: has no _target_; name its class"),
        ("+logger.mine.project=x", "logger.mine: has no _target_; name its class"),
    ],
)
def test_a_part_without_its_class_or_layers_is_refused(word: str, expected: str) -> None:
    with pytest.raises(config.ConfigError) as caught:
        config.load(["experiment=digits_flowgrpo", word])
    (text,) = caught.value.problems
    assert text.startswith(expected)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["model.path=/nowhere/x.safetensors"], "model.path: no base weights at /nowhere"),
        (["model.height=9"], "digits are 8x8, got height=9"),
        (["reward.rewards.judge_a.weight=much"], "Weight of reward `judge_a` is 'much'"),
        (["reward.rewards.judge_a.weight=null"], "Weight of reward `judge_a` is None"),
        (
            [
                "callbacks.evaluation.statistics=[{_target_:reward_models.clip_statistics."
                "ClipStatistics,build:tiny,reference:/nowhere}]"
            ],
            "callbacks.evaluation.statistics.0.reference = /nowhere: there is no such file",
        ),
    ],
)
def test_what_only_ranks_would_notice_is_refused_before_they_start(
    words: Sequence[str], expected: str, tmp_path: Path
) -> None:
    base = ["experiment=digits_flowgrpo", "hardware=cpu_tiny", f"output_root={tmp_path}"]

    def check_words() -> None:
        settings = config.load([*base, *words]).settings
        require_weights(settings.node_at("reward"), settings.callbacks)
        check_parts(settings)

    with pytest.raises((ValueError, config.ConfigError), match=expected):
        check_words()
