"""What a newcomer reads: the messages of docs/troubleshooting.md are the code's, the keys of
docs/configuration.md the schema's, and the Python of docs/quickstart.md runs."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from digenrl import config, prompts
from digenrl.cli.commands import all_commands
from digenrl.cli.main import main
from digenrl.cli.sweeps import expand_sweep
from digenrl.record.spans import WAIT_CAUSES
from digenrl.reward_command import reward_config
from scripts.configuration_reference import page
from tests.conftest import ROOT
from tests.extensions.export.test_export import make_run

pytestmark = pytest.mark.heavy

DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
QUICKSTART = (DOCS / "quickstart.md").read_text(encoding="utf-8")


def said() -> Iterator[str]:
    """Every text of the source, `…` in place of what an f-string fills in."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "…"
                    for part in node.values
                )


def test_every_message_is_one_of_the_codes() -> None:
    rows = re.findall(
        r"^\| `([^`]+)` \|", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(rows) > 30
    patterns = {
        row: re.compile(".*".join(map(re.escape, row.split("…"))), re.DOTALL) for row in rows
    }
    texts = list(said())
    assert not [row for row, pattern in patterns.items() if not any(map(pattern.search, texts))]


def test_the_reference_of_keys_is_fresh() -> None:
    assert (DOCS / "configuration.md").read_text(encoding="utf-8") == page(), "run `make docs`"


def test_the_glossary_knows_the_waits() -> None:
    named = re.search(
        r"each has a cause: (.*) \.\.\.", (DOCS / "glossary.md").read_text(encoding="utf-8")
    )
    assert named is not None
    assert set(re.findall(r"`(\w+)`", named[1])) <= set(WAIT_CAUSES)


@pytest.mark.parametrize("document", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_every_digenrl_command_exists(document: Path) -> None:
    words = re.findall(
        r"(?:`|^|\| )digenrl ([a-z-]+)", document.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert set(words) <= {*all_commands(), "--help"}


def test_the_commands_of_the_quickstart_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Skeletons are written, and the reward is the one shown. Commands with a configuration compose
    it. For commands on a run, only the keys are checked."""
    make_run(tmp_path / "RUN", "experiment=digits_flowgrpo")
    monkeypatch.chdir(tmp_path)
    blocks = "".join(re.findall(r"```bash\n(.*?)```", QUICKSTART, re.DOTALL))
    lines = [shlex.split(line)[1:] for line in blocks.splitlines() if line.startswith("digenrl ")]
    assert len(lines) > 10
    for command, *words in sorted(lines, key=lambda line: line[0] != "new"):
        if command == "new":
            assert main([command, *words]) == 0
            if words == ["reward", "brightness"]:
                assert f"```python\n{(tmp_path / 'brightness.py').read_text()}```" in QUICKSTART
        elif "-m" in words:
            assert [config.load(job.words) for job in expand_sweep(words)[1]]
        elif command in ("train", "plan"):
            assert config.load(words, command).settings is not None
        elif command == "score":
            assert reward_config([word.lower() for word in words], "score").reward is not None
        elif command == "resume":
            assert config.load([f"resume={words[0]}", *words[1:]]).resumed
        else:
            assert command in all_commands() or command == "--help"


@pytest.mark.parametrize(
    "document", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda path: path.name
)
def test_the_runs_and_plans_of_every_page_compose(document: Path) -> None:
    """`make train EXP=... HW=... ARGS="..."`, unless it names what its reader has yet to make."""
    groups = config.group_options(config.config_directory())
    blocks = "".join(
        re.findall(r"```bash\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL)
    )
    for command, rest in re.findall(r"^make (train|plan) (.*)$", blocks, re.MULTILINE):
        given = dict(word.partition("=")[::2] for word in shlex.split(rest, comments=True))
        words = [
            f"{group}={given[key]}"
            for key, group in (("EXP", "experiment"), ("HW", "hardware"))
            if key in given
        ]
        words += given.get("ARGS", "").split()
        own = [word.partition("=") for word in words if word.partition("=")[0] in groups]
        if all(value in groups[group] for group, _, value in own) and "allow_targets" not in rest:
            assert config.load(words, command).settings is not None


def test_the_prompts_of_the_data_page_are_read(tmp_path: Path) -> None:
    lines, edit = re.findall(
        r"```json\n(.*?)```", (DOCS / "data.md").read_text(encoding="utf-8"), re.DOTALL
    )
    (tmp_path / "prompts.jsonl").write_text(lines)
    first, second = prompts.read_prompt_file(tmp_path / "prompts.jsonl").prompts
    assert (first.target, first.metadata, second.negative) == (
        "OPEN",
        {"id": 7, "style": "neon"},
        "people",
    )
    assert edit in prompts.locate_file("drawn_edits.jsonl").read_text(), (
        "the example is one of those shipped"
    )


def test_the_python_of_the_quickstart_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, reading, looping = re.findall(r"```python\n(.*?)```", QUICKSTART, re.DOTALL)
    make_run(tmp_path / "run", "experiment=digits_flowgrpo")
    line = '{"kind": "step", "rl_step": 1, "reward": 0.5}\n'
    (tmp_path / "run" / "metrics.jsonl").write_text(
        line + line.replace("step", "eval", 1).replace("reward", "heldout")
    )
    exec(compile(reading, "quickstart.md", "exec"), {"RUN": tmp_path / "run"})
    assert "(8, 1, 8, 8)" in capsys.readouterr().out
    exec(compile(looping, "quickstart.md", "exec"), {})
    assert "'reward'" in capsys.readouterr().out


def test_the_overrides_of_the_readme_fit_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = README.split("Copy and change.")[1].split("```text\n")[1].split("```")[0]
    lines = [line.partition("#")[0] for line in block.splitlines()]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    shipped = [
        *dict.fromkeys(prompts.read_prompt_file("drawn_scenes.txt").path.read_text().splitlines())
    ]
    (tmp_path / "mine.txt").write_text("\n".join(shipped[:20]))
    (tmp_path / "mine_heldout.txt").write_text("\n".join(shipped[20:24]))
    for line in lines:
        words = shlex.split(line.replace("/data/runs", str(tmp_path)))
        run = ["experiment=scenes_flowgrpo"] * ("experiment=" not in line)
        if words[0] == "-m":
            key, _, values = words[1].partition("=")
            words = [f"{key}={values.split(',')[0]}"]
        config.load([*run, *words])
    assert len(lines) == 9
