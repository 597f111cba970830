"""mkdocs' hooks: the site has the repository's own pages too, and links between all of them are
checked."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md"} | {
    name: name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
}
"""File of the repository -> page of the site."""
LINKED = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")
"""A link to a file, without its anchor."""


def on_files(files: Files, config: Any) -> Files:
    """Add `PAGES`, and the files that README cites: tables of figures, the example to read
    first."""
    found = [(ROOT / own, page) for own, page in PAGES.items()]
    found += [(path, f"results/{path.name}") for path in (ROOT / "benchmarks" / "results").iterdir()
              if path.suffix in (".md", ".png", ".jsonl")]  # fmt: skip
    found += [(ROOT / name, name) for name in _linked_files()]
    for path, page in found:
        files.append(File.generated(config, page, abs_src_path=str(path)))
    return files


def _linked_files() -> list[str]:
    """Return the files of the repository, no pages, that a page links to."""
    pages = [ROOT / own for own in PAGES]
    pages += [*(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks" / "results").glob("*.md")]
    found = set()
    for page in pages:
        for target in LINKED.findall(page.read_text(encoding="utf-8")):
            path = (page.parent / target).resolve()
            own = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
            if (
                path.is_file()
                and path.suffix != ".md"
                and not own.startswith(("docs/", "benchmarks/results/"))
            ):
                found.add(own)
    return sorted(found)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn a page's links into the repository into links of the site."""
    source = Path(page.file.abs_src_path).relative_to(ROOT).parent.as_posix()
    here = posixpath.dirname(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(source, match[1]))
        if target.startswith("benchmarks/results/"):
            target = "results/" + posixpath.basename(target)
        target = PAGES.get(target, target.removeprefix("docs/"))
        return f"]({posixpath.relpath(target, here or '.')}"

    return LINKED.sub(moved, markdown)
