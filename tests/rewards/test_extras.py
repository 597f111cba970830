"""What happens without an optional package: an error that names the extra to install."""

from __future__ import annotations

import re
import subprocess
import sys

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


@pytest.mark.processes
@pytest.mark.parametrize(
    "package",
    [pytest.param(name, marks=() if name == "imageio" else pytest.mark.slow) for name in WITHOUT],
)
def test_the_error_names_the_extra(package):
    statement, extra = WITHOUT[package]
    code = f"import sys; sys.modules['{package}'] = None; {statement}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert f"pip install -e '{ROOT}[{extra}]'" in done.stderr.splitlines()[-1]


@pytest.mark.processes
def test_a_run_whose_reward_lacks_a_package_is_refused_before_its_ranks_start() -> None:
    """A page of votes that nobody can serve would be waited for without end."""
    code = (
        "import sys; sys.modules['starlette'] = None; from digenrl.cli.main import main; "
        "sys.argv[1:] = ['check', 'experiment=scenes_flowgrpo', 'reward=votes']; sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0, done.stdout
    assert f"pip install -e '{ROOT}[serve]'" in " ".join((done.stdout + done.stderr).split())


def test_without_a_checkout_the_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """No index has digenrl."""
    monkeypatch.setattr(extras, "__file__", "/site-packages/digenrl/extras.py")
    assert re.fullmatch(r"pip install 'ray>=[\d.]+'", extras.install_command("ray"))
    assert {"starlette", "vllm"} <= {re.split("[<>=]", p)[0] for p in extras.packages_of("judges")}
