"""Read the published values of docs/recipes.csv from checkouts of their sources.

python -m scripts.recipe_facts yifan123/flow_grpo=DIRECTORY Tencent-Hunyuan/MixGRPO=DIRECTORY ...

A checkout is a git directory that holds the commit which the table names. For every row that cites
lines, docs/recipe_facts.json gets the literals of these lines and their SHA-256. Literals are
numbers, truth values, quoted words and switches of a command line. No line of a source is copied. A
row without line numbers, or of a repository that is not given, keeps the fact it had.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE, FACTS = ROOT / "docs" / "recipes.csv", ROOT / "docs" / "recipe_facts.json"
_LITERAL = re.compile(
    r"""(?P<text>"[^"]*"|'[^']*')|(?P<switch>(?<!\S)--[A-Za-z]\w*(?=\s*\\?\s*$))"""
    r"""|(?P<name>\b(?:True|False|None|true|false|null)\b)"""
    r"""|(?P<number>(?<![\w.])-?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.]))"""
)


def lines_of(cited: str) -> list[int] | None:
    """Return the line numbers of "54", "82-83" or "30,32,85"; None for the name of a function."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", cited):
        return None
    ends = [[int(end) for end in part.split("-")] for part in cited.split(",")]
    return [number for part in ends for number in range(part[0], part[-1] + 1)]


def literals(lines: list[str]) -> list[str]:
    """Return the distinct literals of lines of Python, YAML or shell, without their comments."""
    found: dict[str, None] = {}
    for line in lines:
        for match in _LITERAL.finditer(re.sub(r"(^|\s)#.*", "", line)):
            found[match.group().strip("\"'")] = None
    return list(found)


def fact(directory: Path, row: dict[str, str]) -> dict[str, object] | None:
    """Return the fact of one row of the table, or None where the row cites no lines."""
    numbers = lines_of(row["line"])
    if numbers is None:
        return None
    command = ["git", "-C", str(directory), "show", f"{row['commit']}:{row['file']}"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    cited = [text[number - 1].strip() for number in numbers]
    return {
        "source": f"{row['repository']}@{row['commit']}:{row['file']}:{row['line']}",
        "sha256": hashlib.sha256("\n".join(cited).encode()).hexdigest()[:16],
        "literals": literals(cited),
    }


def main(words: list[str]) -> None:
    """Write docs/recipe_facts.json: "experiment key" -> its fact."""
    given = {name: Path(path) for name, _, path in (word.partition("=") for word in words)}
    kept = json.loads(FACTS.read_text(encoding="utf-8")) if FACTS.exists() else {}
    facts = {}
    with TABLE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            name = f"{row['experiment']} {row['key']}"
            found = (
                fact(given[row["repository"]], row)
                if row["repository"] in given
                else kept.get(name)
            )
            if found is not None:
                facts[name] = found
    body = ",\n".join(f" {json.dumps(name)}: {json.dumps(facts[name])}" for name in sorted(facts))
    FACTS.write_text(f"{{\n{body}\n}}\n", encoding="utf-8")
    print(f"{len(facts)} facts")


if __name__ == "__main__":
    main(sys.argv[1:])
