"""What a command prints, and to which streams: no terminal obeys a prompt, and closed streams and
odd directories end in no traceback."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from digenrl import config
from digenrl.cli.main import main
from digenrl.cli.streams import guard_streams, without_controls
from digenrl.cli.terminal import format_event
from digenrl.record.run_dir import append_event
from digenrl.report.build import rebuild_report
from digenrl.report.tables import final_table
from tests.report.synthetic import write_run
from tests.training import PATIENCE_S, ROOT, SMALL, TINY, fork_main

EVIL = "\x1b]0;pwned\x07\x1b[2J\x1b[31mred\x9b5n\u202eabc\r\b"
RAW = ("\x1b", "\x07", "\x9b", "\u202e", "\b")


def ended(words: list[str]) -> None:
    with suppress(SystemExit):
        main(words)


def is_calm(text: str) -> bool:
    return not any(each in text for each in RAW)


@pytest.mark.parametrize("terminal", [False, True])
def test_control_characters_are_spelled_out(terminal: bool) -> None:
    shown = without_controls(EVIL + "\tä 中 \n", terminal)
    assert not any(each in shown.replace("\x1b[31m", "") for each in RAW)
    assert shown.endswith("\tä 中 \n")
    assert ("\x1b[31m" in shown) == terminal
    for hides in ("\x1b[8m", "\x1b[0;8m", "\x1b[38;5;0m", "\x1b[40m", "\x1b[m\x1b]52;c;x\x07"):
        assert without_controls(hides, True).replace("\x1b[m", "").isprintable()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_stream_is_guarded_once_and_keeps_what_rich_colours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    guard_streams()
    guard_streams()
    print(EVIL, file=sys.stderr)
    Console(stderr=True, force_terminal=True).print("[yellow]calm[/yellow]")
    said = stream.getvalue()
    assert "\\x1b]0;pwned\\x07" in said
    assert "\\\\x1b" not in said
    assert "\x1b[33mcalm\x1b[0m" in said


@pytest.mark.heavy
def test_prompts_images_and_keys_of_others_reach_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "p.jsonl"
    lines = [{"prompt": "a", "image": f"{EVIL}.png"}, {"prompt": "b", f"k{EVIL}": 1}, {EVIL: 1}]
    for line in lines:
        prompts.write_text(json.dumps(line, ensure_ascii=False) + "\n")
        ended(["train", f"data.prompts={prompts}", "--cfg"])
        (tmp_path / f"{EVIL}.txt").write_text("a\n")
        ended(["train", f"data.prompts={tmp_path}/{EVIL}.txt", f"+x.{EVIL}=1", "max_rl_steps=x"])
    run = config.prepare_run_dir(config.load([f"hydra.run.dir={tmp_path}/run-0"]))
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text + json.dumps({EVIL: {EVIL: EVIL}})[1:-1] + "\n")
    ended(["resume", str(run)])
    ended(["eval", str(run), f"data={tmp_path}/{EVIL}"])
    ended([EVIL])
    ended(["report", EVIL])
    captured = capsys.readouterr()
    assert "x1b" in captured.err
    assert is_calm(captured.err)
    assert is_calm(captured.out)


def test_a_foreign_runs_words_reach_no_terminal(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2, samples=False)
    append_event(run, "warning", {"message": EVIL})
    append_event(run, "checkpoint_failed", {"cause": EVIL, EVIL: EVIL, "rl_step": 1})
    append_event(run, "end", {"status": "stopped", "cause": EVIL})
    stream = io.StringIO()
    Console(file=stream, force_terminal=True, no_color=True).print(final_table(rebuild_report(run)))
    assert not any(each in stream.getvalue() for each in RAW[1:])
    assert "\x1b]" not in stream.getvalue()
    assert is_calm(format_event({"kind": EVIL, "cause": EVIL, EVIL: EVIL, "time": 1.0}))


def command(tmp_path: Path | bytes, tail: str, *words: str) -> subprocess.CompletedProcess[bytes]:
    line = shlex.join([sys.executable, "-m", "digenrl", "train", *words])
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["bash", "-c", f"{line} {tail}"], cwd=tmp_path, capture_output=True, env=environment
    )


@pytest.mark.heavy
@pytest.mark.processes
def test_a_run_with_closed_streams_is_complete(tmp_path: Path) -> None:
    done = command(tmp_path, "<&- >&- 2>&-", *TINY, *SMALL, "max_rl_steps=1")
    assert done.returncode == 0
    assert_complete(tmp_path)


@pytest.mark.processes
@pytest.mark.parametrize("closed", [1, 2], ids=["stdout", "stderr"])
def test_a_run_with_one_closed_stream_is_complete(tmp_path: Path, closed: int) -> None:
    files = [tmp_path / name for name in ("out", "err")]
    process = fork_main(
        ["train", *TINY, *SMALL, "max_rl_steps=1"], tmp_path, *files, closed=[closed]
    )
    process.join(PATIENCE_S)
    said = "".join(file.read_text() for file in files)
    assert process.exitcode == 0, said
    assert "Traceback" not in said
    assert files[closed - 1].read_text() == ""
    assert files[2 - closed].read_text()
    assert_complete(tmp_path)


def assert_complete(directory: Path) -> None:
    """The run in it has ended well, and no file of it has a traceback."""
    (summary,) = directory.glob("outputs/*/*/summary.json")
    assert json.loads(summary.read_text())["status"] == "completed"
    for file in summary.parent.rglob("*"):
        if file.is_file():
            assert b"Traceback" not in file.read_bytes()


@pytest.mark.heavy
@pytest.mark.processes
@pytest.mark.parametrize("closed", ["", ">&-", "2>&-"])
def test_a_directory_whose_name_is_no_text_is_refused_in_words(tmp_path: Path, closed: str) -> None:
    folder = os.fsencode(tmp_path) + b"/odd-\xff"
    os.mkdir(folder)
    done = command(folder, closed, *TINY, *SMALL, "max_rl_steps=1")
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr + done.stdout
    if closed != "2>&-":
        assert b"is no UTF-8" in done.stderr
    elsewhere = command(folder, "", *TINY, "--cfg", f"output_root={tmp_path}/there", *SMALL)
    assert elsewhere.returncode == 0, elsewhere.stderr
