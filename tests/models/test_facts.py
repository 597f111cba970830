"""Facts of families: they say what the adapters say, and a family is named in few files."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from benchmarks import _families
from digenrl import facts
from digenrl.config import config_directory
from tests.models.tiny_policies import FACTS, FAMILIES, ROWS

SIZES = {
    "network",
    "encoders",
    "points",
    "blocks",
    "attention_blocks",
    "hidden",
    "text_tokens",
    "joint_attention",
}
COUNTS = {
    "parameters",
    "largest_block_parameters",
    "outside_parameters",
    "tensors",
    "lora_parameters_per_rank",
    "flops",
    "kept_bytes",
}
COUNTS |= {"beside_bytes", "repeated_flops", "forward_bytes", "decode"}


def test_every_family_has_a_row_and_every_model_an_option() -> None:
    assert set(ROWS) == {family for family, known in facts.facts_by_family().items() if known.tiny}
    options = {path.stem for path in (config_directory() / "model").glob("*.yaml")}
    for family, row in ROWS.items():
        assert set(row.published) == set(FACTS[family].models), family
        assert set(row.published) <= options
        for sizes in FACTS[family].models.values():
            assert sizes.keys() - {"period", "padded", "buffers"} == SIZES | COUNTS


@pytest.mark.parametrize("family", FAMILIES)
def test_facts_are_those_of_the_adapter(family: str) -> None:
    known, adapter = FACTS[family], FAMILIES[family]
    codec = adapter.codec_class
    assert adapter.family == family
    assert adapter.facts() == known
    assert facts.of_target(f"{adapter.__module__}.{adapter.__name__}") == known
    assert known.context == bool(adapter.context_plan), (
        "the planner knows whose tokens can be shared"
    )
    assert known.latents.side == codec.vae_stride
    assert known.latents.channels == codec.channels
    if (grid := getattr(codec, "_grid_shape", None)) is None:
        assert known.latents.frames == (codec.temporal_stride or known.latents.frames)
    else:  # 8 k + 1 and 17 k + 5 frames
        for frames in range(73, 1000, 8 * 17):
            assert grid(64, 64, frames)[0] == int((frames - 1) / known.latents.frames) + 1
    assert known.latents.patch == codec.spatial_stride // codec.vae_stride
    assert set(codec.reads) <= set(known.conditioning) | {"image"}


def test_a_module_without_facts_has_none() -> None:
    assert facts.of_module("digenrl.models.policy") == {}
    assert facts.of_module("nowhere.at.all") == {}
    assert facts.of_module("digenrl/../secrets") == {}
    assert facts.of_target("") is None
    assert facts.cpu_tiny("digenrl.models.policy.Policy", "steps", 6) == 6


def test_an_unknown_key_names_file_and_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_family.facts.yaml").write_text("mine: {adapter: Mine, heads: 3}\n")
    (tmp_path / "my_family.py").write_text("raise AssertionError('facts import no adapter')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ValueError,
        match=r"my_family\.facts\.yaml: mine: .*'heads'.*fields of digenrl\.facts\.Facts",
    ):
        facts.of_module("my_family")
    (tmp_path / "other.facts.yaml").write_text("mine: {adapter: Mine, cpu_tiny: {steps: 9}}\n")
    (tmp_path / "other.py").touch()
    assert facts.cpu_tiny("other.Mine", "steps", 6) == 9


ELSEWHERE = (
    "docs/",
    "benchmarks/calibration.py",
    "benchmarks/paper.py",
    "benchmarks/results/",
    "configs/",
    "CHANGELOG.md",
    "tests/config/reachable.txt",
    "src/digenrl/extensions/planner/published.csv",
)
"""What is generated, measured, counted, published or compared with publications, and options of
configurations."""
WORKLOADS = "tests/extensions/planner/"
"""Tests that compute with a model's sizes, as experiments do."""
EXAMPLES = {"flux", "sd3", "wan"}
"""Families that documents, tests and measurements use as examples."""
ZOO = [family for family in FACTS if family not in EXAMPLES]


@pytest.mark.parametrize("family", ZOO)
def test_a_family_is_named_by_its_adapter_its_facts_and_its_row(
    family: str, repository: Path
) -> None:
    """Options of configs/model and experiments name a family too. Everything else asks the
    facts."""
    names = [family, FACTS[family].adapter]
    network = FAMILIES[family].transformer_class
    alike = [other for other in FAMILIES.values() if other.transformer_class is network]
    if len({other.__module__ for other in alike}) == 1:
        names.append(network.__name__)
    listed = subprocess.run(
        ["git", "grep", "-lwiE", "|".join(re.escape(name) for name in names)],
        cwd=repository, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    facts_file = FACTS[family].file.relative_to(repository)
    own = {
        str(facts_file),
        str(facts_file).replace(facts.ENDING, ".py"),
        "tests/models/families.py",
    }
    special = f"tests/models/test_{family}.py"
    code = {name for name in listed if not name.startswith((*ELSEWHERE, WORKLOADS, special))}
    derived = {
        name
        for name in code - own
        if Path(name).parent == facts_file.parent and name.endswith(".py")
    }
    assert code - derived == own
    assert len(own) + len([name for name in listed if name.startswith("configs/model/")]) <= 5
    assert _families.models()[next(iter(FACTS[family].models))] is FACTS[family]
