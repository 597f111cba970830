"""A model's folder runs no code of its own, neither by its index nor by its configurations, with
the installed diffusers and by our own checks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import pytest

from digenrl.cli.own_modules import find_own_modules
from digenrl.model_folder import CodeInFolder, require_data
from digenrl.models import pretrained, tiny
from digenrl.models.flux import FluxPolicy
from digenrl.models.pretrained import PretrainedError
from digenrl.rewards.vlm_server import Chat
from reward_models.qwen_vl import write_tiny
from reward_models.weights import checkpoint

EVIL = "import pathlib; pathlib.Path(__file__).with_name('ran').touch()\nclass Evil: pass\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny FLUX with a module beside its files and in the working directory."""
    source = tiny.ensure(FluxPolicy.facts())
    made = Path(shutil.copytree(source, tmp_path / "model"))
    for place in (made, made / "tokenizer", tmp_path):
        (place / "evil_module.py").write_text(EVIL)
    return made


def change(file: Path, **entries: Any) -> None:
    content = json.loads(file.read_text())
    content.update(entries)
    file.write_text(json.dumps(content))


def ran(root: Path) -> list[Path]:
    return list(root.rglob("ran"))


def test_a_model_as_it_is_published_is_data(folder: Path) -> None:
    require_data(folder)
    pretrained.folder_of(str(folder), "model_index.json")
    require_data("owner/of-no-folder")


@pytest.mark.heavy
@pytest.mark.parametrize(
    "entry",
    [["evil_module", "Evil"], ["os", "system"], ["subprocess", "Popen"], ["builtins", "eval"]],
    ids=str,
)
def test_an_index_that_names_a_library_is_refused_by_the_installed_diffusers_and_by_us(
    folder: Path, entry: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(folder.parent))
    change(folder / "model_index.json", tokenizer=entry)
    with pytest.raises(PretrainedError, match=r"model_index\.json: tokenizer"):
        pretrained.folder_of(str(folder), "model_index.json")
    given = dict.fromkeys(("transformer", "vae", "scheduler"))
    with pytest.raises((ValueError, AttributeError, TypeError, OSError)):
        diffusers.FluxPipeline.from_pretrained(folder, local_files_only=True, **given)
    assert not ran(folder.parent)


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("model_index.json", {"_class_name": ["evil_module", "Evil"]}),
        ("model_index.json", {"x": ["evil_module", "Evil"]}),
        ("model_index.json", {"x": ["transformers_evil.sub", "Evil"]}),
        ("modular_model_index.json", {"x": [None, None, {"type_hint": ["evil_module", "Evil"]}]}),
        ("text_encoder/config.json", {"_attn_implementation": "owner/kernel"}),
        ("text_encoder/config.json", {"attn_implementation": "owner/kernel@main:run"}),
        ("text_encoder/config.json", {"_attn_implementation_internal": "owner/kernel"}),
        ("text_encoder/config.json", {"_attn_implementation": {"": "eager", "text": "o/k"}}),
        ("text_encoder/config.json", {"text_config": {"_attn_implementation": "paged|o/k"}}),
        ("text_encoder_2/config.json", {"sub": [{"experts_implementation": "o/k"}]}),
        ("text_encoder/config.json", {"_attn_implementation": "flash_attention_3"}),
        ("text_encoder/config.json", {"_attn_implementation": 7}),
        ("text_encoder/config.json", {"use_kernels": True}),
        ("text_encoder/adapter_config.json", {"base_model_name_or_path": "evil/model"}),
        ("tokenizer/tokenizer_config.json", {"a": {"_attn_implementation": "o/k"}}),
    ],
)
def test_a_folder_that_names_code_is_refused(
    folder: Path, name: str, entries: Mapping[str, Any]
) -> None:
    file = folder / name
    file.write_text(file.read_text() if file.exists() else "{}")
    change(file, **entries)
    with pytest.raises(CodeInFolder, match=file.name):
        require_data(folder)
    with pytest.raises(PretrainedError, match=file.name):
        pretrained.folder_of(str(folder), "x")
    with (
        pytest.raises(CodeInFolder),
        checkpoint(str(folder), "real", lambda made: None),
    ):
        pass


def test_what_is_built_in_is_taken(folder: Path) -> None:
    file = folder / "text_encoder" / "config.json"
    change(file, _attn_implementation="sdpa", text_config={"attn_implementation": None})
    require_data(folder)


@pytest.mark.heavy
def test_a_judges_folder_is_looked_at_before_it_is_served(tmp_path: Path) -> None:
    write_tiny(tmp_path, "Qwen2_5_VL").save_pretrained(tmp_path)
    change(tmp_path / "config.json", _attn_implementation="owner/kernel")
    with pytest.raises(CodeInFolder, match="owner/kernel"):
        Chat(str(tmp_path), "judge")


@pytest.mark.heavy
@pytest.mark.processes
@pytest.mark.parametrize("module", ["digenrl", "digenrl.cli.train"])
def test_no_module_of_the_working_directory_is_imported_unasked(
    tmp_path: Path, module: str
) -> None:
    """Neither one that stands in for an installed module, nor one that is installed nowhere."""
    for name in ("yaml", "ctypes", "own_module"):
        (tmp_path / f"{name}.py").write_text(EVIL)
    words = [*(["train"] if module == "digenrl" else []), "max_rl_steps=1", "--cfg"]
    done = subprocess.run(
        [sys.executable, "-m", module, *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not ran(tmp_path)


@pytest.mark.parametrize(
    ("words", "added"),
    [
        ([], False),
        (["seed=1"], False),
        (["allow_targets=[]"], False),
        (["allow_targets=null"], False),
        (["xallow_targets=[own]"], False),
        (["allow_targets=[own]", "allow_targets=[]"], False),
        (["seed=1", "allow_targets=[own]"], True),
        (["++allow_targets=[own]"], True),
    ],
)
def test_own_modules_are_found_last_where_the_command_line_allows_targets(
    words: list[str], added: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    find_own_modules(words)
    assert sys.path[-1:] == [str(tmp_path)] if added else str(tmp_path) not in sys.path
