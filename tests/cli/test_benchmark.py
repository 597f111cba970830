"""`make benchmark`: base beside a checkpoint, images that are not made twice, the folders of other tools."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from digenrl.cli.benchmark import main
from tests.cli.finished import finished_run

pytestmark = pytest.mark.heavy
FEW = ["prompts=3", "samples=2", "sampling.eval.steps=2"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("run"), "scenes_flowgrpo")


def test_scenes_are_scored_beside_the_base_and_made_once(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"run={run_dir}", "suite=scenes", *FEW]
    assert main(words) == 0
    told = capsys.readouterr()
    path = Path(told.out.splitlines()[-1])
    result = json.loads(path.read_text())
    assert set(result["models"]) == {"base", "step-000007"}
    assert result["models"]["base"]["overall"]["prompts"] == result["difference"]["overall"]["prompts"] == 3
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
    assert "holds images of another seed (1234, asked for 5): remove the folder" in capsys.readouterr().err
    assert main([*words, "step=3"]) == 1
    assert "keeps no checkpoint of it; there are: 7" in capsys.readouterr().err


def test_other_suites_are_written_as_their_tools_read_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a run: a model as it is. Four scenes in one picture, scored with a reward."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.csv"
    file.write_text("item_id,text\nfirst,a red circle\nsecond,a blue square\n")
    words = ["suite=dpg", "experiment=scenes_flowgrpo", f"file={file}", "sampling.eval.steps=2", "reward=jpeg"]
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
    assert main(["suite=vbench", "experiment=scenes_flowgrpo", "step=base", f"file={videos}", *FEW]) == 2
    assert "take a video model" in capsys.readouterr().err
    assert main(["suite=genevl", "step=base"]) == 2
    assert "allowed: geneval | dpg | parti | vbench | scenes" in capsys.readouterr().err
