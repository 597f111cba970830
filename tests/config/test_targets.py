"""The allow-list of `_target_`: before any import, over the whole tree, and on the object
itself."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import hydra.utils
import pytest
from omegaconf import OmegaConf

from digenrl.config import config_directory, instantiate
from digenrl.config.targets import (
    FOREIGN,
    ROOMS,
    find_targets,
    is_allowed,
    known_components,
    target_problems,
)
from tests.deleting import installed


def test_finds_targets_at_any_depth() -> None:
    tree = {"_target_": "a.b", "x": [{"y": {"_target_": "c.d"}}, ({"_target_": "e.f"},)], "z": 1}
    assert [(path, name) for path, name, _ in find_targets(tree)] == [
        ("", "a.b"),
        ("x[0].y", "c.d"),
        ("x[1][0]", "e.f"),
    ]


@pytest.mark.parametrize(
    "name",
    [
        "digenrl.extensions.tasks.digits.DigitsPolicy",
        "lightning.pytorch.Trainer",
        "torch.optim.SGD",
    ],
)
def test_components_are_allowed(name: str) -> None:
    assert is_allowed(name)


@pytest.mark.parametrize(
    "name",
    [
        "lightning",
        "lightning.pytorch.cli.instantiate_class",
        "lightning.pytorch.cli.LightningCLI",
        "lightning.pytorch.trainer.trainer.Trainer",
        "lightning.fabric.utilities.cloud_io._load",
        "torch.load",
        "torch.optimx.Y",
        "torchmetrics.utilities.imports.package_available",
        "hydra.utils.get_method",
        "hydra.utils.instantiate",
        "posix.system",
        "digenrl.__builtins__.eval",
        "digenrl.api.workbench.load_run",
        "digenrl.cli.report.main",
        "digenrl.extensions.planner.cli.plan.main",
        "digenrl.config.instantiate",
        "digenrl.config.targets.instantiate",
        "digenrl.rewards.process.ProcessScorer",
        "digenrl.rewards.service.RewardService",
        "reward_models.weights.read_state",
    ],
)
def test_what_is_no_component_is_refused(name: str) -> None:
    """Whoever calls something by another name, loads, serves or runs a command."""
    assert not is_allowed(name)


def test_own_packages_are_never_trusted_whole() -> None:
    """`allow_targets=[digenrl]` looks harmless, and would let a configuration run a command with
    words of its own."""
    assert not is_allowed("digenrl.cli.report.main", ["digenrl", "digenrl.cli"])
    assert is_allowed("digenrl.extensions.tasks.digits.DigitsPolicy", ["mine"])


def test_allow_targets_adds_one_package() -> None:
    assert is_allowed("collections.OrderedDict", ["collections"])
    assert not is_allowed("collectionsx.OrderedDict", ["collections"])


def test_instantiates_what_is_allowed() -> None:
    node = OmegaConf.create({"_target_": "digenrl.diffusion.steps.RandomSubset", "size": 3})
    assert instantiate(node).size == 3


def test_a_constructor_speaks_for_itself_at_any_depth() -> None:
    subset = {"_target_": "digenrl.diffusion.steps.RandomSubset", "fraction": 0}
    with pytest.raises(ValueError, match=r"^[^\n]*fraction[^\n]*$"):
        instantiate(OmegaConf.create({"inner": {"steps": subset}}))


def test_a_constructors_error_is_told_and_not_what_led_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "def build():\n    try:\n        {}[1]\n    except KeyError as error:\n"
    (tmp_path / "own_u7.py").write_text(f"{text}        raise ValueError('mine') from error\n")
    monkeypatch.syspath_prepend(tmp_path)
    tree = {"allow_targets": ["own_u7"], "node": {"inner": {"_target_": "own_u7.build"}}}
    with pytest.raises(ValueError, match="mine"):
        instantiate(OmegaConf.create(tree).node)


def test_a_target_is_resolved_before_it_is_judged() -> None:
    tree = {
        "steps": "digenrl.diffusion.steps",
        "node": {"_target_": "${steps}.RandomSubset", "size": 3},
    }
    assert instantiate(OmegaConf.create(tree).node).size == 3


def test_instantiate_refuses_before_importing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil_h5.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    node = OmegaConf.create(
        {"_target_": "digenrl.diffusion.steps.RandomSubset", "size": {"_target_": "evil_h5.run"}}
    )
    with pytest.raises(PermissionError, match=r"size\._target_ = evil_h5\.run: refused"):
        instantiate(node)
    assert "evil_h5" not in sys.modules


def test_instantiate_obeys_allow_targets_of_the_root() -> None:
    tree = OmegaConf.create(
        {
            "allow_targets": ["fractions"],
            "node": {"_target_": "fractions.Fraction", "_args_": [1, 2]},
        }
    )
    assert instantiate(tree.node) == 0.5
    tree.allow_targets = []
    with pytest.raises(PermissionError, match="refused"):
        instantiate(tree.node)


def test_alias_of_a_foreign_object_is_refused() -> None:
    """Modules hold the names that they import; what counts is where the object was defined."""
    tree = OmegaConf.create(
        {
            "allow_targets": ["torch.optim.adam"],
            "node": {"_target_": "torch.optim.adam.torch.hub.load"},
        }
    )
    with pytest.raises(PermissionError, match=r"is an alias of torch\.hub\.load"):
        instantiate(tree.node)


def named_in_configs() -> set[str]:
    files = config_directory().rglob("*.yaml")
    return {
        name
        for file in files
        for _, name, _ in find_targets(OmegaConf.to_container(OmegaConf.load(file)))
    }


def test_the_list_holds_what_configs_names_and_what_the_documents_offer(repository: Path) -> None:
    named, adding = named_in_configs(), (repository / "docs" / "adding.md").read_text()
    further = known_components() - named
    assert named <= known_components()
    assert further == {"torch.optim.Adam", "torch.optim.SGD"}
    assert [name for name in further if f"`{name}`" not in adding] == []
    assert [room for room in ROOMS if not any(name.startswith(f"{room}.") for name in named)] == []


def here(name: str) -> bool:
    """Return whether a component is no part of an extension that was deleted."""
    return not name.startswith("digenrl.extensions.") or installed(name.split(".")[2])


@pytest.mark.parametrize("name", sorted(filter(here, known_components())))
def test_a_component_is_a_class(name: str) -> None:
    assert target_problems({"_target_": name}) == []
    if name in FOREIGN:
        assert isinstance(hydra.utils.get_object(name), type)


def test_a_file_of_configs_adds_a_class_of_our_rooms_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").mkdir()
    evil = ["os.system", "lightning.pytorch.cli.instantiate_class", "digenrl.cli.report.main"]
    own = ["digenrl.algorithms.base.PolicyModule", "reward_models.weights.read_state"]
    nodes = "".join(f"- {{_target_: {name}}}\n" for name in [*evil, *own])
    (tmp_path / "configs" / "mine.yaml").write_text(nodes)
    (tmp_path / "configs" / "broken.yaml").write_text("a: [1\n")
    monkeypatch.setattr("digenrl.config.targets.config_directory", lambda: tmp_path / "configs")
    known_components.cache_clear()
    try:
        assert known_components() == {*FOREIGN, *own}
        assert target_problems({"_target_": own[0]}) == []
        monkeypatch.setattr("digenrl.config.targets.argument_problems", lambda *node: [])
        with pytest.raises(
            PermissionError, match=r"reward_models\.weights\.read_state is no class"
        ):
            instantiate({"_target_": own[1]})
    finally:
        known_components.cache_clear()


def test_no_component_calls_something_by_name(repository: Path) -> None:
    """A target could otherwise be named where neither gate looks."""
    modules = {
        name.rpartition(".")[0] for name in known_components() if name not in FOREIGN and here(name)
    }
    assert len(modules) > 20
    for module in modules:
        source = (
            repository
            / ("src" if module.startswith("digenrl.") else "")
            / f"{module.replace('.', '/')}.py"
        )
        tree = ast.parse(source.read_text())
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert names & {"eval", "exec", "__import__"} == set(), module
        assert (names | attributes) & {
            "import_module",
            "instantiate",
            "get_object",
            "get_class",
            "system",
        } == set(), module
