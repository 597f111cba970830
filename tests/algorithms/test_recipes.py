"""Variants are recipes: every algorithm YAML and every option of its groups builds, and two
variants are YAML alone."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import Parameter, signature
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from digenrl.algorithms.advantages import Advantage
from digenrl.algorithms.base import PolicyModule
from digenrl.algorithms.copies import Ema
from digenrl.algorithms.grpo import GRPO
from digenrl.algorithms.surrogates import Clipped
from digenrl.diffusion.sde import FlowSDE
from digenrl.diffusion.steps import AllButLast, RandomSubset
from digenrl.extensions.methods.sde import DanceSDE, FlowCPS
from digenrl.extensions.methods.steps import Window
from tests.algorithms.toy_policy import ToyPolicy

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
RECIPES = sorted(path.stem for path in (CONFIGS / "algorithm").glob("*.yaml"))
GROUPS = ("sde", "train_steps", "advantage", "surrogate", "optimizer")
OPTIONS = [
    (group, path.stem)
    for group in GROUPS
    for path in sorted((CONFIGS / "algorithm" / group).glob("*.yaml"))
]
FORWARD = {("sde", "ode"), ("train_steps", "noise_levels")}  # of digenrl.extensions.methods


@pytest.fixture(scope="module", autouse=True)
def search_path() -> Iterator[None]:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        yield


def build(recipe: str, *overrides: str) -> PolicyModule:
    """The recipe alone, which composes faster than a whole run."""
    config = compose(f"algorithm/{recipe}", overrides=["+seed=0", *overrides])
    module = instantiate(config.algorithm, policy=ToyPolicy())
    assert isinstance(module, PolicyModule)
    return module


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_builds(recipe: str) -> None:
    module = build(recipe)
    assert module.train_steps.count_trained(20) >= 1
    assert module.configure_optimizers().param_groups[0]["lr"] > 0


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_part_builds(group: str, option: str) -> None:
    base = "nft" if (group, option) in FORWARD else "flow_grpo"
    build(base, f"algorithm/{group}={option}")


def test_variants_differ_from_flow_grpo_in_yaml_alone() -> None:
    """Dance, CPS and Mix are the same class with another kernel or window."""
    flow, dance, cps, mix = (
        build(name) for name in ("flow_grpo", "dance_grpo", "flow_cps", "mix_grpo")
    )
    assert {type(module) for module in (flow, dance, cps, mix)} == {GRPO}
    assert (flow.sde, dance.sde, cps.sde, mix.sde) == (
        FlowSDE(0.7),
        DanceSDE(0.3),
        FlowCPS(0.8),
        FlowSDE(0.7),
    )
    assert flow.train_steps == AllButLast()
    assert dance.train_steps == RandomSubset(0.6)
    assert mix.train_steps == Window(4, order="progressive", hold=25, overlap=3)
    for module in (flow, dance, cps, mix):
        assert isinstance(module, GRPO)
        assert module.surrogate == Clipped()


def test_published_values_are_there() -> None:
    flow = build("flow_grpo")
    assert isinstance(flow, GRPO)
    assert flow.clip == (1e-4, 1e-4)
    assert flow.updates_per_batch == 2
    assert (flow.needs_final, flow.rewarded) == (False, True)
    needs = flow.surrogate
    assert [needs.needs_means, needs.needs_proximal, needs.needs_gaussian] == [False] * 3
    guard = build("grpo_guard")
    assert isinstance(guard, GRPO)
    assert guard.clip == (2e-6, 2e-6)
    assert guard.needs_means
    assert build("nft").needs_final


def test_parts_can_be_changed_from_the_command_line() -> None:
    module = build(
        "flow_grpo",
        "algorithm/sde=dance",
        "algorithm.sde.eta=0.25",
        "algorithm.clip_range=[1e-4,2e-4]",
    )
    assert isinstance(module, GRPO)
    assert module.sde == DanceSDE(0.25)
    assert module.clip == (1e-4, 2e-4)
    whole = compose(
        "train",
        overrides=["~experiment", "~hardware", "algorithm=flow_grpo", "+algorithm/ema=default"],
    )
    ema = instantiate(whole.algorithm.ema)
    assert isinstance(ema, Ema)
    usual = Ema()
    assert (ema.decay, ema.every, ema.times) == (usual.decay, usual.every, usual.times)


def test_defaults_of_the_code_are_those_of_the_files() -> None:
    written = OmegaConf.load(CONFIGS / "algorithm" / "flow_grpo.yaml")
    both = (*signature(PolicyModule).parameters.values(), *signature(GRPO).parameters.values())
    given = {each.name: each.default for each in both}
    own = {name: value for name, value in given.items() if value is not Parameter.empty}
    assert {name: value for name, value in own.items() if written[name] != value} == {
        "kl_weight": 0.0,
        "updates_per_batch": 1,
    }
    usual = OmegaConf.load(CONFIGS / "algorithm" / "advantage" / "group.yaml")
    assert instantiate(usual) == Advantage()


def test_guard_on_cps_is_refused_from_yaml_too() -> None:
    with pytest.raises(Exception, match="Guard needs a Gaussian log-prob"):
        build("grpo_guard", "algorithm/sde=cps")


def test_no_algorithm_file_imports_systems_code() -> None:
    """Design section 3: algorithms see diffusion, types and the policy protocol; diffusion sees
    types alone at run time."""
    source = CONFIGS.parent / "src" / "digenrl"
    allowed = {
        "algorithms": ("algorithms", "diffusion", "types", "models.policy", "rounding"),
        "diffusion": ("diffusion", "types", "keys"),
    }
    for folder, rooms in allowed.items():
        for path in sorted((source / folder).glob("*.py")):
            imports = [
                line
                for line in path.read_text().splitlines()
                if line.startswith(("import ", "from "))
            ]
            for line in imports:
                if "digenrl" in line:
                    named = line.replace("from digenrl import ", "from digenrl.")
                    assert any(f"digenrl.{room}" in named for room in rooms), f"{path.name}: {line}"
                assert "torch.distributed" not in line or "tensor" in line, f"{path.name}: {line}"
