"""Arguments that a target does not take are refused, and nothing is imported for that."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest
from omegaconf import OmegaConf

from digenrl import config
from digenrl.config.arguments import argument_problems
from digenrl.config.compose import group_options
from digenrl.config.targets import target_problems


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
