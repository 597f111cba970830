"""Tiny builds: the same bytes every time, the real classes, the real template lengths."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from digenrl.models import tiny as builds
from tests.models.tiny_policies import FAMILIES, ROWS

pytestmark = pytest.mark.heavy


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.slow
@pytest.mark.parametrize("family", ["wan", "sd3"])
def test_another_process_builds_the_same_bytes_and_another_seed_does_not(family, tmp_path):
    code = "from pathlib import Path; from digenrl.models.tiny import build_pipeline; "
    code += f"build_pipeline('{family}', Path('{tmp_path}/a'))"
    subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, env=_environment()
    )
    first = contents(builds.ensure(family))
    assert contents(tmp_path / "a") == first
    builds.build_pipeline(family, tmp_path / "b", seed=1)
    second = contents(tmp_path / "b")
    changed = {name for name in first if first[name] != second[name]}
    assert changed
    assert all(name.endswith(".safetensors") for name in changed)


def _environment() -> dict[str, str]:
    import os

    return {
        **os.environ,
        "PYTHONHASHSEED": "7",
        "PYTHONPATH": str(Path(builds.__file__).parents[3]),
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_build_has_the_layout_and_classes_of_the_real_checkpoint(family):
    folder = builds.ensure(family)
    index = json.loads((folder / "model_index.json").read_text())
    assert index["_class_name"] in FAMILIES[family].pipelines
    assert index["transformer"][1] == FAMILIES[family].transformer_class.__name__
    assert index["vae"][1] == FAMILIES[family].codec_class.vae_class.__name__
    assert sum(path.stat().st_size for path in folder.rglob("*")) < 1e6 * ROWS[family].megabytes


def test_existing_build_is_kept(tmp_path):
    first = builds.ensure("wan", root=tmp_path)
    stamp = (first / "model_index.json").stat().st_mtime_ns
    assert builds.ensure("wan", root=tmp_path) == first
    assert (first / "model_index.json").stat().st_mtime_ns == stamp
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


def test_unknown_family_names_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match=r"no tiny build of family 'mochi'; known: .*wan"):
        builds.ensure("mochi", root=tmp_path)
