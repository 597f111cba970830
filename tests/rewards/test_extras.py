"""What happens without an optional package: an error that names the extra to install."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from digenrl import extras
from tests.conftest import ROOT

WITHOUT = {
    "rapidfuzz": ("import reward_models.ocr", "ocr"),
    "starlette": ("import digenrl.rewards.service", "serve"),
    "starlette.routing": ("import digenrl.extensions.votes.scorer", "serve"),
    "uvicorn": ("import digenrl.rewards.vlm_server", "serve"),
    "imageio": (
        "from digenrl.extensions.bench.media_files import read_media as f, Path; f(Path('a.mp4'), "
        "1, 1)",
        "video",
    ),
    "imageio.v3": (
        "import torch; from digenrl.report.media import write_mp4 as f; "
        "f('a.mp4', torch.zeros(1, 3, 8, 8))",
        "video",
    ),
}


def said_without(package: str, statement: str, file: Path) -> list[str]:
    """Return the lines that `statement` prints where `package` is not installed: in a fork, which
    imports digenrl again and keeps what else is imported. An exception is printed too."""
    process = multiprocessing.get_context("fork").Process(
        target=_execute, args=(package, statement, file)
    )
    process.start()
    process.join(120)
    assert process.exitcode == 1, "it took no notice"
    return file.read_text().splitlines()


def _execute(package: str, statement: str, file: Path) -> None:
    again = {"digenrl", "reward_models", package.partition(".")[0]}
    for name in [each for each in sys.modules if each.partition(".")[0] in again]:
        del sys.modules[name]
    sys.modules[package] = None  # type: ignore[assignment]  # so that its import fails
    code = 0
    with file.open("w") as out, redirect_stdout(out), redirect_stderr(out):
        try:
            exec(statement, {})
        except SystemExit as exit:
            code = int(bool(exit.code))
        except BaseException:
            traceback.print_exc()
            code = 1
    os._exit(code)


@pytest.mark.processes
@pytest.mark.parametrize(
    "package",
    [pytest.param(name, marks=() if name == "imageio" else pytest.mark.slow) for name in WITHOUT],
)
def test_the_error_names_the_extra(package: str, tmp_path: Path) -> None:
    statement, extra = WITHOUT[package]
    said = said_without(package, statement, tmp_path / "said")
    assert f"pip install -e '{ROOT}[{extra}]'" in said[-1]


@pytest.mark.processes
def test_a_run_whose_reward_lacks_a_package_is_refused_before_its_ranks_start(
    tmp_path: Path,
) -> None:
    """A page of votes that nobody can serve would be waited for without end."""
    statement = (
        "import sys; from digenrl.cli.main import main; "
        "sys.argv[1:] = ['check', 'experiment=scenes_flowgrpo', 'reward=votes']; sys.exit(main())"
    )
    said = said_without("starlette", statement, tmp_path / "said")
    assert f"pip install -e '{ROOT}[serve]'" in " ".join(" ".join(said).split())


def test_without_a_checkout_the_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """No index has digenrl."""
    monkeypatch.setattr(extras, "__file__", "/site-packages/digenrl/extras.py")
    assert re.fullmatch(r"pip install 'ray>=[\d.]+'", extras.install_command("ray"))
    assert {"starlette", "vllm"} <= {re.split("[<>=]", p)[0] for p in extras.packages_of("judges")}
