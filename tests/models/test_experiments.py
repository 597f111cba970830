"""The nine experiments: published values, and what `hardware=cpu_tiny` may change of them (design, section 6)."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from omegaconf import OmegaConf

from digenrl import config as configuration

pytestmark = pytest.mark.heavy

# experiment -> published (P, G, T, guidance, learning rate, clip range, KL weight, LoRA rank)
PUBLISHED = {
    "sd35_flowgrpo": (48, 24, 10, 4.5, 3e-4, 1e-4, 0.04, 32),
    "flux1_flowgrpo": (48, 24, 6, 3.5, 3e-4, 1e-4, 0.0, 64),
    "flux1_dancegrpo": (16, 12, 16, 3.5, 1e-5, 1e-4, 0.0, None),
    "flux1_mixgrpo": (32, 12, 25, 3.5, 1e-5, 1e-4, 0.0, None),
    "qwen_image_flowgrpo": (32, 16, 10, 4.0, 3e-4, 1e-4, 0.0, 64),
    "qwen_image_nft": (24, 16, 10, 1.0, 3e-4, None, 1e-4, 64),
    "flux2_klein_flowgrpo": (48, 16, 8, 4.0, 3e-4, 1e-4, 0.0, 64),
    "zimage_flowgrpo": (48, 16, 10, 5.0, 3e-4, 1e-4, 0.0, 64),
    "wan21_flowgrpo": (32, 4, 20, 4.5, 1e-4, 1e-3, 4e-3, 32),
    "wan21_dancegrpo": (16, 12, 20, 5.0, 1e-5, 1e-4, 0.0, None),
    "hunyuanvideo_dancegrpo": (32, 24, 16, 6.018, 1e-5, 1e-4, 0.0, None),
}
TINY_CHANGES = {
    "hardware",
    "allocation.trainers",
    "allocation.rollouts",
    "sampling.height",
    "sampling.width",
    "sampling.frames",
    "sampling.steps",
    "sampling.task_size",
    "data.prompts_per_batch",
    "data.group_size",
    "model.build",
    "model.height",
    "model.width",
    "model.frames",
}
SCORER_CHANGES = (".scorer.build", ".scorer.path")


@cache
def composed(experiment: str, *words: str) -> dict[str, Any]:
    loaded = configuration.load([f"experiment={experiment}", *words])
    plain: Any = OmegaConf.to_container(loaded.config, resolve=True)
    return plain


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {path: tree}
    return {key: value for name, item in tree.items() for key, value in flat(item, f"{path}.{name}".strip(".")).items()}


@pytest.mark.parametrize("experiment", PUBLISHED)
def test_experiment_holds_the_published_values(experiment):
    config = composed(experiment, "hardware=node_8xh100")
    algorithm, lora = config["algorithm"], config["model"]["lora"]
    assert (
        config["data"]["prompts_per_batch"],
        config["data"]["group_size"],
        config["sampling"]["steps"],
        config["sampling"]["guidance_scale"],
        algorithm["optimizer"]["lr"],
        algorithm.get("clip_range"),
        algorithm["kl_weight"],
        lora and lora["rank"],
    ) == PUBLISHED[experiment]
    assert config["model"]["build"] == "real"
    assert "/" in config["model"]["path"]


@pytest.mark.parametrize("experiment", PUBLISHED)
def test_tiny_hardware_changes_sizes_and_nothing_else(experiment):
    real, small = flat(composed(experiment, "hardware=node_8xh100")), flat(composed(experiment, "hardware=cpu_tiny"))
    keys = {key for key in real.keys() | small.keys() if real.get(key) != small.get(key)}
    unexpected = {
        key
        for key in keys
        if not key.startswith("hardware.")
        and key not in TINY_CHANGES
        and not key.endswith(SCORER_CHANGES)
        and not key.startswith(("hydra", "parallel"))
    }
    assert unexpected == set()
    assert small["model.build"] == "tiny"
    assert small["data.group_size"] >= 4
    assert small["sampling.steps"] >= 6


def test_the_small_wan_runs_the_same_experiment():
    large, small = (
        flat(composed("wan21_flowgrpo", "hardware=node_8xh100")),
        flat(composed("wan21_flowgrpo", "model=wan21_1_3b", "hardware=node_8xh100")),
    )
    assert {key for key in large if large[key] != small.get(key)} == {"model.path"}
