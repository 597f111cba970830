"""The documents and the code agree: citations, links, commands, paths, and the tests that prove the
invariants."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
DESIGN, ALGORITHMS = ROOT / "docs" / "design.md", ROOT / "docs" / "algorithms.md"
PROMISES = ROOT / "docs" / "invariants.md"
FAULTS = ROOT / "docs" / "faults.md"
FOLDERS = (
    "src",
    "reward_models",
    "tests",
    "configs",
    "benchmarks",
    "scripts",
    "examples",
    "notebooks",
    "docs",
)
FOREIGN = re.compile(r"(arXiv[^;)]*|\b[\w-]+/[\w-]+(?:'s README)? )$")
"""What stands before a section or a path of somebody else's paper or repository."""
PATH = re.compile(
    r"(?<![\w./-])((?:src|digenrl|reward_models|tests|configs|benchmarks|scripts|examples|notebooks|docs|\.ci)"
    r"(?:/[\w.-]+)+\.(?:py|md|yaml|json|sbatch|sh|ipynb|png))\b"
)
ROOM_PATH = re.compile(r"`((?:[a-z_]+/)+[a-z_]+\.py)`")
PLACEHOLDER = re.compile(r"NAME|patient\.py|brightness|redness|damped|two_kinds|my_node")
"""Files that a reader of docs/adding.md, docs/quickstart.md or a notebook makes."""
INVARIANTS = range(1, 20)


def sources() -> list[Path]:
    """Every text file that may cite a document."""
    found = [ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / ".ci" / "run", *ROOT.glob("*.md")]
    for folder in FOLDERS:
        found += [
            path
            for path in (ROOT / folder).rglob("*")
            if path.suffix in (".py", ".yaml", ".md", ".ipynb", ".sh", ".sbatch")
            and "results" not in path.parts
        ]
    return sorted(path for path in found if path != Path(__file__))


def flat(text: str) -> str:
    """`text` with line breaks inside sentences (and the marks of comments after them) as one
    space."""
    return re.sub(r"\s*\n\s*(?:# ?)?", " ", text)


@cache
def headings(path: Path) -> tuple[str, ...]:
    """The document's headings, without their marks."""
    return tuple(re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE))


@cache
def listed(path: Path, section: str, item: str) -> frozenset[int]:
    """Numbers of the items of a list in the section whose heading begins with `section`."""
    body = path.read_text(encoding="utf-8").partition(f"\n## {section}")[2].partition("\n## ")[0]
    return frozenset(int(number) for number in re.findall(item, body, re.MULTILINE))


def checks() -> frozenset[int]:
    return listed(ALGORITHMS, "7.", r"^(\d+)\. ")


@cache
def targets() -> frozenset[str]:
    return frozenset(
        re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )


def sections(said: str) -> Iterator[str]:
    """`design section 5`, `docs/algorithms.md section 3.9`; a plain `Section 1.8` means the
    formulas."""
    for match in re.finditer(r"(?:§ ?|\b[Ss]ections? )(\d+(?:\.\d+)?)", said):
        before = said[max(0, match.start() - 60) : match.start()]
        document = DESIGN if re.search(r"[Dd]esign(\.md)?,? \(?$", before) else ALGORITHMS
        if not FOREIGN.search(before) and not any(
            re.match(rf"{match[1]}\.? ", title) for title in headings(document)
        ):
            yield f"{match[0]} is not in {document.name}"
    for document, title in re.findall(r'\b(README|[Dd]esign)(?:\.md)?, "([^"]+)"', said):
        if title not in headings(ROOT / "README.md" if document == "README" else DESIGN):
            yield f'{document} has no section "{title}"'


def items(said: str) -> Iterator[str]:
    """Numbered checks, traps and invariants."""
    for cited in re.findall(r"\b[Cc]hecks? (\d+(?:(?:, | and | to )\d+)*)\b(?! of)", said):
        if unlisted := {int(number) for number in re.findall(r"\d+", cited)} - checks():
            yield f"check {sorted(unlisted)}"
    for number in map(int, re.findall(r"\btrap T(\d+)", said)):
        if number not in listed(ALGORITHMS, "8.", r"^- T(\d+):"):
            yield f"trap T{number}"
    for number in map(int, re.findall(r"\bI(\d{1,2})\b", said)):
        if number not in INVARIANTS:
            yield f"invariant I{number}"


def paths(said: str) -> Iterator[str]:
    """Files named from the repository's root; in documents also `room/file.py`."""
    for match in (*PATH.finditer(said), *ROOM_PATH.finditer(said)):
        roots = (ROOT, ROOT / "src", ROOT / "src" / "digenrl")
        if not (
            any((root / match[1]).exists() for root in roots)
            or FOREIGN.search(said[max(0, match.start() - 60) : match.start()])
            or PLACEHOLDER.search(match[1])
        ):
            yield f"{match[1]} does not exist"


def commands(said: str) -> Iterator[str]:
    """`make x y`, at the beginning of a line or of quoted code."""
    for words in re.findall(r"(?:`|^|\| )make ((?:[a-z-]+)(?: [a-z-]+)*)", said, re.MULTILINE):
        yield from (f"make {word} is no target" for word in words.split() if word not in targets())


def broken(text: str) -> list[str]:
    """What `text` cites and nobody finds."""
    said = flat(text)
    outside = re.findall(r"\.\./shared|\breference/\w+\.md", said)
    return [*sections(said), *items(said), *paths(said), *commands(text), *outside]


@pytest.mark.parametrize(
    "text",
    [
        "the grid (design, section 99)",
        "docs/algorithms.md section 3.99",
        'see README, "No such part"',
        "Check 25: nothing",
        "trap T99",
        "this breaks I20",
        "see docs/nothing.md",
        "as `strategy/nothing.py` does",
        "say `make nothing`",
        "see ../shared/design.md",
    ],
)
def test_a_broken_citation_is_found(text: str) -> None:
    assert len(broken(text)) == 1


def test_a_citation_of_somebody_else_is_left_alone() -> None:
    assert not broken(
        "DDPO (arXiv:2305.13301, section 99), yifan123/flow_grpo scripts/train_sd3.py:345"
    )


@pytest.mark.heavy
def test_citations_resolve() -> None:
    assert checks() == set(range(1, 25))
    found = [
        f"{path.relative_to(ROOT)}: {problem}"
        for path in sources()
        for problem in broken(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_resolve(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if not re.match(r"[a-z]+:", target):
            file, _, heading = target.partition("#")
            page = path.parent / file if file else path
            assert page.exists(), f"{path.name} links to {target}"
            assert not heading or heading in anchors(page), f"{path.name} links to {target}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs name them."""
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings(page)}


@pytest.mark.parametrize(
    ("document", "letter", "numbers"),
    [(PROMISES, "I", INVARIANTS), (FAULTS, "F", range(1, 42))],
    ids=["invariants", "faults"],
)
def test_each_invariant_and_fault_names_a_test_that_exists(
    document: Path, letter: str, numbers: Sequence[int]
) -> None:
    rows = dict(
        re.findall(
            rf"^\| {letter}(\d+) \|(.*)\|$", document.read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    assert [int(number) for number in rows] == list(numbers)
    for number, row in rows.items():
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named or "not tested" in row, f"{letter}{number} names no test"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_each_test_that_a_document_names_exists(path: Path) -> None:
    for file, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)", path.read_text(encoding="utf-8")):
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{test}"


def test_an_entry_of_the_changes_has_at_most_two_lines() -> None:
    entries = re.findall(
        r"^- .*(?:\n  .*)*", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(entries) > 50
    assert [
        entry
        for entry in entries
        if entry.count("\n") > 1 or max(map(len, entry.splitlines())) > 145
    ] == []


def test_the_first_hours_pages_are_as_long_as_the_design_says() -> None:
    """The pages are at most eight, and together have at most 1,500 lines."""
    said = re.findall(r"^\| `([a-z_]+/?[a-z_]+\.py)` \| (\d+) \|", DESIGN.read_text(), re.MULTILINE)
    lines = {page: len((ROOT / "src/digenrl" / page).read_text().splitlines()) for page, _ in said}
    assert all(abs(lines[page] - int(count)) <= 10 for page, count in said), lines
    assert 5 <= len(said) <= 8
    assert sum(lines.values()) <= 1500


def test_the_table_of_supported_versions_is_that_of_the_package() -> None:
    """CONTRIBUTING.md; floors of pyproject.toml, and what CI installs."""
    table = {
        name: (old, new)
        for name, old, new in re.findall(
            r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \|$",
            (ROOT / "CONTRIBUTING.md").read_text(),
            re.MULTILINE,
        )
    }
    project, pinned = (ROOT / "pyproject.toml").read_text(), (ROOT / "constraints.txt").read_text()
    python = re.search(r'requires-python = ">=([\d.]+)"', project)
    assert python is not None
    assert table.pop("Python")[0] == python[1]
    assert len(table) >= 4
    for name, (old, new) in table.items():
        assert f'"{name}>={old}"' in project
        assert f"\n{name}=={new}" in pinned
