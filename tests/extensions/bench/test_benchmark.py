"""`make benchmark`: base beside a checkpoint, images that are not made twice, the folders of other
tools."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from digenrl.extensions.bench.cli.benchmark import main
from tests.cli.finished import finished_run

pytestmark = pytest.mark.heavy
FEW = ["prompts=3", "samples=2", "sampling.eval.steps=2"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("run"), "scenes_flowgrpo")


def test_scenes_are_scored_beside_the_base_and_made_once(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"run={run_dir}", "suite=scenes", *FEW]
    assert main(words) == 0
    told = capsys.readouterr()
    path = Path(told.out.splitlines()[-1])
    result = json.loads(path.read_text())
    assert set(result["models"]) == {"base", "step-000007"}
    assert (
        result["models"]["base"]["overall"]["prompts"]
        == result["difference"]["overall"]["prompts"]
        == 3
    )
    assert "overall" in told.err
    assert result["digest"] in told.err
    images = sorted(path.parent.glob("*/*/samples/*.png"))
    assert len(images) == 12
    before = {image: (image.stat().st_mtime_ns, image.read_bytes()) for image in images}
    assert len({content for _, content in before.values()}) == 12
    lost = images[3]
    lost.unlink()
    assert main([*words, "step=7"]) == 0
    assert {i for i in images if i.stat().st_mtime_ns != before[i][0]} == {lost}
    assert lost.read_bytes() == before[lost][1]
    assert json.loads(path.read_text())["models"] == result["models"]
    assert main([*words, "seed=5"]) == 2
    assert (
        "holds images of another seed (1234, asked for 5): remove the folder"
        in capsys.readouterr().err
    )
    assert main([*words, "step=3"]) == 1
    assert "keeps no checkpoint of it; there are: 7" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.processes
def test_ranks_share_the_prompts_and_go_on_where_they_were_killed(
    tmp_path: Path, run_dir: Path
) -> None:
    """Three processes, killed when some images are there; then two, then one: what one process
    makes from the start."""
    out = tmp_path / "shared"
    words = [f"run={run_dir}", "suite=scenes", "prompts=9", "samples=2", "sampling.eval.steps=2"]
    command = [sys.executable, "-m", "digenrl", "benchmark", *words]
    with subprocess.Popen(
        [*command, f"out={out}", "ranks=3"], stderr=subprocess.DEVNULL
    ) as process:
        deadline = time.monotonic() + 120
        while not (began := [*out.glob("*/base/*/samples/*.png")]) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.kill()
    assert began
    assert not (out / "scenes" / "benchmark.json").exists()
    time.sleep(1.0)  # the other ranks notice that they are alone
    kept = {image: image.stat().st_mtime_ns for image in out.glob("*/*/*/samples/*.png")}
    assert main([*words, f"out={out}", "ranks=2"]) == 0
    assert all(image.stat().st_mtime_ns == changed for image, changed in kept.items())
    assert main([*words, f"out={tmp_path / 'alone'}"]) == 0
    shared, alone = (
        json.loads((folder / "scenes/benchmark.json").read_text())
        for folder in (out, tmp_path / "alone")
    )
    for result in (shared, alone):
        for model in result["models"].values():
            del model["folder"]
        del result["official"]
    assert shared == alone
    images = [image.relative_to(out) for image in out.glob("*/*/*/samples/*.png")]
    assert len(images) == 36
    assert all(
        (out / image).read_bytes() == (tmp_path / "alone" / image).read_bytes() for image in images
    )
    assert not (out / "scenes/scores").exists()


@pytest.mark.slow
@pytest.mark.processes
def test_what_one_rank_refuses_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "two.jsonl"
    line = {"tag": "colors", "include": [{"class": "dog", "count": 1}], "prompt": "a dog"}
    file.write_text("".join(json.dumps(line | {"prompt": f"{n} dogs"}) + "\n" for n in range(2)))
    words = [
        "suite=geneval",
        "experiment=scenes_flowgrpo",
        "step=base",
        f"file={file}",
        f"out={tmp_path / 'out'}",
        *FEW,
    ]
    assert main([*words, "ranks=2", f"detector={tmp_path / 'absent'}"]) == 1
    told = capsys.readouterr().err
    assert told.count("is no directory; download a model for object-detection") == 1
    assert main([*words, "ranks=0"]) == 2


def test_other_suites_are_written_as_their_tools_read_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a run: a model as it is. Four scenes in one picture, scored with a reward."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.csv"
    file.write_text("item_id,text\nfirst,a red circle\nsecond,a blue square\n")
    words = [
        "suite=dpg",
        "experiment=scenes_flowgrpo",
        f"file={file}",
        "sampling.eval.steps=2",
        "reward=jpeg",
    ]
    assert main(words) == 2
    assert "name run=RUN or step=base" in capsys.readouterr().err
    assert main([*words, "step=base"]) == 0
    path = Path(capsys.readouterr().out.splitlines()[-1])
    assert Image.open(path.parent / "base" / "first.png").size == (48, 48)
    assert json.loads(path.read_text())["models"]["base"]["overall"]["mean"] < 0
    file.write_text("item_id,text\nfirst,a red circle\n")
    assert main([*words, "step=base"]) == 2
    assert "images of another digest" in capsys.readouterr().err
    videos = tmp_path / "videos.json"
    videos.write_text(json.dumps([{"prompt_en": "a red circle", "dimension": ["color"]}]))
    assert (
        main(["suite=vbench", "experiment=scenes_flowgrpo", "step=base", f"file={videos}", *FEW])
        == 2
    )
    assert "take a video model" in capsys.readouterr().err
    assert main(["suite=genevl", "step=base"]) == 2
    assert "allowed: geneval | dpg | parti | vbench | scenes" in capsys.readouterr().err
