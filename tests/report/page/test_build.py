"""All derived files of a run, made from its files alone."""

from __future__ import annotations

import base64
import json
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from digenrl.cli import report
from digenrl.record.run_dir import append_event
from digenrl.report.build import finish_report, rebuild_report
from digenrl.report.page import plots
from digenrl.report.page.comparison import draw_comparison
from digenrl.report.page.plots import PICTURES
from digenrl.report.page.style import paper_style
from digenrl.report.pictures import read_samples
from digenrl.report.read_run import Run
from tests.report.synthetic import write_run

pytestmark = pytest.mark.heavy


class Page(HTMLParser):
    """Collects what a report is made of, and checks that its tags balance."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.images: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.links += [str(values[name]) for name in ("href", "src") if name in values]
        if tag == "img":
            self.images.append(str(values["src"]))
        elif tag not in ("meta", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read_page(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    assert page.open == []
    return page


def test_every_picture_is_drawn_and_in_the_report(built: Path) -> None:
    for name in PICTURES:
        with Image.open(built / name) as picture:
            assert min(picture.size) > 200
            assert sum(map(bool, picture.convert("L").histogram())) > 10, "gray levels"
    page = read_page(built / "report.html")
    drawn = [image for image in page.images if image.startswith("data:image/png;base64,")]
    assert len(drawn) > len(PICTURES)  # and the gallery's
    assert all(link.startswith("data:image/") for link in page.links)  # self-contained
    inside = base64.b64decode(page.images[0].partition(",")[2])
    assert inside == (built / "samples/before_after.png").read_bytes()
    text = " ".join(page.text)
    for expected in (
        "Over time: the same prompts",
        "Best and worst at RL step 16",
        "digits_flowgrpo",
        "completed",
        "0.560 → 0.843",
        "first fragment",
        "prompts_per_batch: 6",
    ):
        assert expected in text


def test_trace_has_a_track_per_rank_and_an_event_per_span(built: Path) -> None:
    trace = json.loads((built / "trace.json").read_text())
    lines = sum(len(file.read_text().splitlines()) for file in (built / "spans").iterdir())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == lines
    assert len({(event["pid"], event["tid"]) for event in spans}) == 4


def test_rebuilding_changes_nothing(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(run: Run, name: str, _: object, pictures: dict[str, bytes]) -> None:
        if (run.path / name).exists():
            pictures[name] = (run.path / name).read_bytes()

    monkeypatch.setattr(plots, "_draw_plot", kept)  # drawing them again takes seconds
    before = {
        name: (built / name).read_bytes() for name in ("summary.json", "trace.json", "report.html")
    }
    rebuild_report(built)
    assert {name: (built / name).read_bytes() for name in before} == before


def test_a_crashed_run_still_gets_its_report(crashed: Path) -> None:
    summary = rebuild_report(crashed)
    assert summary["status"] == "unfinished"
    assert json.loads((crashed / "summary.json").read_text()) == summary
    page = read_page(crashed / "report.html")
    assert (
        len(page.images) == len(PICTURES) - 2
    )  # no samples: no before/after, no distribution of scores
    assert not (crashed / "samples/before_after.png").exists()
    assert "damaged line(s)" in " ".join(page.text)


def test_a_run_that_died_at_once_gets_a_report(tmp_path: Path) -> None:
    append_event(tmp_path, "launch", {})
    finish_report(tmp_path, "failed", "no free port")
    assert "no free port" in " ".join(read_page(tmp_path / "report.html").text)


def test_one_picture_that_fails_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_run(tmp_path / "run", steps=8)
    np.savez(
        path / "samples" / "eval-8.npz",
        media=np.zeros((2, 1, 8, 8), np.float32),
        prompts=np.array(["a", "b"]),
    )
    kept = {name: PICTURES[name] for name in ("samples/before_after.png", "plots/reward.png")}
    monkeypatch.setattr(plots, "PICTURES", kept)
    summary = rebuild_report(path)
    assert (path / "plots/reward.png").exists()
    named = [warning.split(" could")[0] for warning in summary["warnings"]]
    assert named == ["samples/before_after.png", "the gallery"]
    assert "media is float32" in summary["warnings"][0]


def test_text_from_a_run_cannot_become_markup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "PICTURES", {})
    path = write_run(tmp_path / "run", steps=1, samples=False)
    finish_report(path, "failed", "<script>alert(1)</script>")
    html = (path / "report.html").read_text()
    assert "<script" not in html
    assert "&lt;script&gt;" in html


def test_finish_refuses_an_unknown_status(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="completed, stopped or failed"):
        finish_report(tmp_path, "done")


def test_comparison_matches_samples_by_prompt_and_position(tmp_path: Path) -> None:
    """A file with other prompts in between still pairs each sample with the one of the same
    noise."""
    levels = np.arange(6, dtype=np.uint8).reshape(6, 1, 1, 1) * 40
    media = np.broadcast_to(levels, (6, 1, 8, 8))
    np.savez(tmp_path / "eval-0.npz", media=media, prompts=np.array(["a", "a", "b", "b", "c", "c"]))
    np.savez(tmp_path / "eval-8.npz", media=media, prompts=np.array(["b", "a", "x", "b", "a", "x"]))
    before, after = read_samples(tmp_path / "eval-0.npz"), read_samples(tmp_path / "eval-8.npz")
    with paper_style():
        figure = draw_comparison(before, after)
    shown = {}
    for axes in figure.axes:
        if axes.images:
            spec = axes.get_subplotspec()
            assert spec is not None
            outer = spec.get_topmost_subplotspec().rowspan.start
            shown[outer, spec.rowspan.start, spec.colspan.start] = (
                int(axes.images[0].get_array()[0, 0]) // 40
            )
    # column a: samples 0, 1 before and 1, 4 after; column b: 2, 3 before and 0, 3 after; c was not
    # evaluated again
    assert shown == {(0, 0, 0): 0, (0, 1, 0): 1, (1, 0, 0): 1, (1, 1, 0): 4,
                     (0, 0, 1): 2, (0, 1, 1): 3, (1, 0, 1): 0, (1, 1, 1): 3}  # fmt: skip


@pytest.mark.parametrize("animated", [False, True], ids=["from text", "from images"])
def test_videos_are_shown_as_film_strips(tmp_path: Path, animated: bool) -> None:
    media = np.random.default_rng(0).integers(0, 255, (4, 9, 3, 16, 24), dtype=np.uint8)
    more = {"sources": media[:, 0]} if animated else {}
    for step in (0, 5):
        np.savez(
            tmp_path / f"eval-{step}.npz",
            media=media,
            prompts=np.array(["a red ball rolls", "rain"] * 2),
            **more,
        )
    with paper_style():
        figure = draw_comparison(
            read_samples(tmp_path / "eval-0.npz"), read_samples(tmp_path / "eval-5.npz")
        )
    shown = [np.asarray(axes.images[0].get_array()) for axes in figure.axes]
    first = media[0, 0] if animated else np.concatenate(media[0, ::2], axis=-1)
    assert len(shown) == 2 * 2 * (2 + animated)
    assert (shown[0] == np.moveaxis(first, 0, -1)).all()


def test_command_prints_the_reports_path_last(
    built: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "PICTURES", {})
    assert report.main([f"run={built}"]) == 0
    captured = capsys.readouterr()
    assert captured.out.strip() == f"{built}/report.html"
    assert "held-out score" in captured.err


@pytest.mark.parametrize(
    "arguments", [[], ["run="], ["rum=x"], ["run=/nonexistent/x"], ["run=x", "y=z"]]
)
def test_command_refuses_bad_arguments(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "run" in captured.err
