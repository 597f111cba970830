"""The site of the documents: its generated pages are fresh, and it builds without a broken link."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import digenrl
from scripts import api_reference, catalogue
from tests.conftest import ROOT


def test_the_catalogue_is_what_the_files_say() -> None:
    page = (ROOT / "docs" / "models_and_rewards.md").read_text(encoding="utf-8")
    assert page == catalogue.page(), "run `make docs`"
    for group in ("model", "reward"):
        for path in (ROOT / "configs" / group).glob("[a-z]*.yaml"):
            assert f"\n| `{path.stem}` | " in page
    assert "`hf download black-forest-labs/FLUX.1-dev`" in page


def test_the_reference_of_python_is_what_the_docstrings_say() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert page == api_reference.page(), "run `make docs`"
    assert {f"### `{name}`" for name in set(digenrl.__all__) - {"__version__"}} <= set(
        page.splitlines()
    )


def test_every_document_is_in_the_menu() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    documents = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert not [name for name in documents if f": {name}\n" not in text]


@pytest.mark.slow
@pytest.mark.processes
def test_it_builds_and_a_broken_link_stops_it(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")

    def built(document: Path) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--strict",
            "-f",
            str(document),
        ]
        environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
        return subprocess.run(
            [*command, "-d", str(tmp_path / "site")],
            capture_output=True, text=True, timeout=200, check=False, env=environment,
        )  # fmt: skip

    done = built(ROOT / "mkdocs.yml")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "index.html").exists()
    assert (tmp_path / "site" / "models_and_rewards.html").exists()
    page = (tmp_path / "site" / "index.html").read_text()
    assert (tmp_path / "site" / "search" / "search_index.js").exists(), "searched from the disk"
    assert 'src="iframe-worker.js"' in page
    assert "unpkg" not in page, "nothing is loaded from elsewhere"
    assert "site.css" in page

    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[nowhere](absent.md)\n")
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    own = {key: settings[key] for key in ("site_name", "validation")} | {
        "docs_dir": str(tmp_path / "docs")
    }
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(own))
    done = built(tmp_path / "mkdocs.yml")
    assert done.returncode != 0
    assert "absent.md" in done.stdout + done.stderr
