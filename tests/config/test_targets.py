"""The allow-list of `_target_`: before any import, over the whole tree, and on the object itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from digenrl.config import instantiate
from digenrl.config.targets import ALLOWED_PACKAGES, is_allowed, target_problems, targets


def test_finds_targets_at_any_depth() -> None:
    tree = {"_target_": "a.b", "x": [{"y": {"_target_": "c.d"}}, ({"_target_": "e.f"},)], "z": 1}
    assert [(path, name) for path, name, _ in targets(tree)] == [("", "a.b"), ("x[0].y", "c.d"), ("x[1][0]", "e.f")]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("digenrl.extensions.tasks.digits.DigitsPolicy", True),
        ("torch.optim.AdamW", True),
        ("torch.load", False),
        ("torch.optimx.Y", False),
        ("lightning", False),
        ("lightning.fabric.utilities.cloud_io._load", False),
        ("digenrl.__builtins__.eval", False),
        ("posix.system", False),
    ],
)
def test_allowed(name: str, expected: bool) -> None:
    assert is_allowed(name) is expected


def test_allow_targets_adds_one_package() -> None:
    assert is_allowed("collections.OrderedDict", ["collections"])
    assert not is_allowed("collectionsx.OrderedDict", ["collections"])


def test_reads_constructors_without_importing() -> None:
    before = set(sys.modules)
    tree = {"_target_": "reward_models.jpeg_size.JpegSize", "qality": 3, "quality": 90}
    (text,) = target_problems({"scorer": tree})
    assert text == "scorer.qality: JpegSize takes no such argument; nearest: scorer.quality."
    assert "reward_models.jpeg_size" not in set(sys.modules) - before


def test_accepts_dataclasses_and_their_inherited_fields() -> None:
    assert target_problems({"_target_": "digenrl.diffusion.steps.Window", "size": 2, "overlap": 0}) == []
    (text,) = target_problems({"s": {"_target_": "digenrl.diffusion.steps.Window", "sizes": 2}})
    assert "nearest: s.size" in text


def test_instantiates_what_is_allowed() -> None:
    node = OmegaConf.create({"_target_": "digenrl.diffusion.steps.Window", "size": 3})
    assert instantiate(node).size == 3


def test_a_constructor_speaks_for_itself_at_any_depth() -> None:
    window = {"_target_": "digenrl.diffusion.steps.Window", "size": 0}
    with pytest.raises(ValueError, match=r"^[^\n]*size[^\n]*$"):
        instantiate(OmegaConf.create({"inner": {"steps": window}}))


def test_instantiate_refuses_before_importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil_h5.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    node = OmegaConf.create({"_target_": "digenrl.diffusion.steps.Window", "size": {"_target_": "evil_h5.run"}})
    with pytest.raises(PermissionError, match=r"size\._target_ = evil_h5\.run: refused"):
        instantiate(node)
    assert "evil_h5" not in sys.modules


def test_instantiate_obeys_allow_targets_of_the_root() -> None:
    tree = OmegaConf.create(
        {"allow_targets": ["fractions"], "node": {"_target_": "fractions.Fraction", "_args_": [1, 2]}}
    )
    assert instantiate(tree.node) == 0.5
    tree.allow_targets = []
    with pytest.raises(PermissionError, match="refused"):
        instantiate(tree.node)


def test_alias_of_a_foreign_object_is_refused() -> None:
    """Modules hold the names that they import; what counts is where the object was defined."""
    node = OmegaConf.create({"_target_": "torch.optim.adam.torch.hub.load"})
    with pytest.raises(PermissionError, match=r"is an alias of torch\.hub\.load"):
        instantiate(node)


def test_the_list_is_the_designs() -> None:
    assert set(ALLOWED_PACKAGES) == {"digenrl", "reward_models", "lightning", "torch.optim", "torchmetrics"}
