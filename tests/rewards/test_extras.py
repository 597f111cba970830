"""What happens without an optional package: an error that names the extra to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITHOUT = {
    "rapidfuzz": ("import reward_models.ocr", "ocr"),
    "starlette": ("import digenrl.rewards.service", "serve"),
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
    assert f"pip install 'digenrl[{extra}]'" in done.stderr.splitlines()[-1]
