"""Words that are composed for another process or a shell mean what they were made from."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from digenrl import config
from digenrl.cli.sweeps import expand_sweep
from digenrl.config.commands import to_continue
from digenrl.config.compose import read_word
from digenrl.config.words import (
    format_word,
    quote_path_word,
    quote_value,
    shell_word,
    unquote_text,
)
from tests.conftest import ROOT

FOLDERS = ["Dropbox (Lab)", "a,b", "it's", "k=v", "[1]", "{x}", "two  spaces", "ü ", "50%", "a\\"]
TEXTS = st.text(st.characters(exclude_characters="\0\n\r$", exclude_categories=["Cs"]), min_size=1)


@given(TEXTS)
@example("true")
@example("10")
@example("1e3")
@example("inf")
def test_a_word_is_read_as_the_text_that_it_was_made_from(text: str) -> None:
    assert str(read_word(format_word("data.heldout", text)).value()) == text
    (read,) = shlex.split(shell_word("data.heldout", text))
    assert str(read_word(read).value()) == text
    if text[0] not in "'\"":
        assert str(read_word(quote_path_word(f"hydra.run.dir={text}")).value()) == text


@pytest.mark.parametrize("folder", FOLDERS)
def test_runs_and_jobs_of_a_sweep_lie_in_folders_of_any_name(tmp_path: Path, folder: str) -> None:
    root = tmp_path / folder
    for given_word in (format_word("output_root", root), f"hydra.run.dir={root}/run-0"):
        assert root in config.load(["experiment=digits_flowgrpo", given_word]).run_dir.parents
    words = ["-m", "experiment=digits_flowgrpo", "seed=1,2", format_word("output_root", root)]
    directory, jobs = expand_sweep(words)
    assert root in directory.parents
    for job in jobs:
        composed = config.load([*job.words, format_word("hydra.run.dir", job.run_dir)])
        assert composed.run_dir == job.run_dir


@pytest.mark.parametrize("folder", ["Dropbox (Lab)", "it's", "two  spaces", "a:b"])
def test_a_path_needs_no_quotes_for_what_only_a_path_can_mean(tmp_path: Path, folder: str) -> None:
    file = tmp_path / folder / "mine.txt"
    file.parent.mkdir()
    file.write_text("one\ntwo\n")
    words = ["experiment=digits_flowgrpo", "data.prompts_per_batch=2", f"data.prompts={file}"]
    assert config.load(words).settings.data.prompts == str(file)


def test_a_comma_is_said_to_be_a_sweep_or_to_need_quotes() -> None:
    with pytest.raises(config.ConfigError) as caught:
        config.load(["experiment=sd35_flowgrpo", "model.negative_prompt=blurry, grey"])
    said = str(caught.value)
    assert "add -m" in said
    remedy = "\"model.negative_prompt='blurry, grey'\""
    assert f"quote the value: {remedy}" in said
    (given_word,) = shlex.split(remedy)
    settings = config.load(["experiment=sd35_flowgrpo", "hardware=cpu_tiny", given_word]).settings
    assert settings.tree.model.negative_prompt == "blurry, grey"


def test_the_command_that_continues_a_run_is_read_again(tmp_path: Path) -> None:
    words = ["experiment=digits_flowgrpo", "allow_targets=[fractions,'my.own']"]
    run = config.prepare_run_dir(config.load([*words, f"hydra.run.dir={tmp_path}/it's (1)/run-0"]))
    tree = (run / "config.yaml").read_text()
    assert "fractions" in tree
    _, _, where, *more = shlex.split(to_continue(run))
    again = config.load([f"resume={where}", *more])
    assert (again.run_dir, again.settings.allow_targets) == (run, ["fractions", "my.own"])


@pytest.mark.processes
def test_keep_sh_begins_in_a_folder_of_any_name(tmp_path: Path) -> None:
    run = tmp_path / "Dropbox (Lab), it's" / "run-0"
    command = ["bash", str(ROOT / "scripts/keep.sh"), sys.executable, "-m", "digenrl", "train"]
    words = ["experiment=digits_flowgrpo", "--cfg", "seed=3"]
    environment = os.environ | {"RUN": str(run), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(
        [*command, *words], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "seed: 3" in done.stdout


@pytest.mark.parametrize("text", ["it's", "(a)", "a=b", "!", "a; b", "50 %}", 'say "no"'])
def test_a_word_that_cannot_be_read_says_how_to_quote_it(text: str) -> None:
    with pytest.raises(config.ConfigError) as caught:
        config.load(
            ["experiment=sd35_flowgrpo", "hardware=cpu_tiny", f"model.negative_prompt={text}"]
        )
    (problem,) = caught.value.problems
    (word,) = shlex.split(problem.partition("quote it: ")[2].removesuffix("."))
    loaded = config.load(["experiment=sd35_flowgrpo", "hardware=cpu_tiny", word])
    assert loaded.settings.model.negative_prompt == text


@given(TEXTS)
@example("it's")
@example("ends with \\")
@example("\\'")
def test_unquoting_undoes_quoting(text: str) -> None:
    assert unquote_text(quote_value(text)) == text
