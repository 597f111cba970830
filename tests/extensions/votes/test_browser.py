"""The page in a real browser: opened as `digenrl vote` opens it, judged with keys and clicks."""

from __future__ import annotations

import pytest
import torch

from digenrl.extensions.votes.cli import vote
from tests.extensions.votes.browser import DRIVER, browser
from tests.extensions.votes.people import PROMPT, Person, asking, blue_of, pictures

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.skipif(DRIVER is None, reason="no chromedriver on this machine"),
]
SHOWN = "return shown && !busy && shown"


@pytest.fixture
def window(tmp_path):
    with browser(tmp_path / "browser") as window:
        yield window


def opened(window, run, monkeypatch):
    """Open the page by the file that `digenrl vote` writes."""
    opened = []
    monkeypatch.setattr(vote.webbrowser, "open", opened.append)
    person = Person(run)
    vote.open_page(run / "votes", f"{person.url}/#{person.token}")
    window.open(opened[0])
    return person


def test_a_person_who_prefers_blue_judges_a_group_with_the_keys(tmp_path, window, monkeypatch):
    media = torch.cat([pictures(0.2, 0.9, 0.5), torch.full((1, 3, 8, 8), 1.0)])
    with asking(tmp_path, per_sample=2, grace_s=3.0) as ask:
        asked = ask(media)
        person = opened(window, tmp_path, monkeypatch)
        pair = window.wait(SHOWN)
        assert window.run("return location.href").endswith("/"), "the token stays in the address"
        assert PROMPT.text in window.run("return document.body.innerText")
        sizes = window.run(
            "return [...document.querySelectorAll('.side img')].map(i => [i.clientWidth, i.clientHeight])"
        )
        assert all(min(size) > 500 for size in sizes), "the samples are small"
        window.press(" ")
        skipped = window.wait(SHOWN, lambda found: found and found != pair)
        assert skipped["given"] == 0
        for _ in range(3):
            pair = window.wait(SHOWN)
            left, right = map(blue_of, pair["media"])
            window.press("left" if left > right else "right")
            window.wait(
                "return shown && shown.given", lambda given, old=pair: given == old["given"] + 1
            )
        window.press("u")
        window.wait("return shown && shown.given", lambda given: given == 2)
        window.run("document.querySelector('[data-choice=neither]').click()")
        window.wait("return shown && shown.given", lambda given: given == 3)
        pair = window.wait(SHOWN)
        window.run("document.querySelector('#left').click()")
        window.wait("return !shown && !busy")
        scores = asked.result(20)
        assert scores.isfinite().all()
        window.wait("return document.body.innerText", lambda text: "No samples wait" in text)
        assert person.http.get("/next?voter=" + "cd" * 8).json()["waiting"] == 0
    window.wait("return document.body.innerText", lambda text: "does not answer" in text)
    assert [line for line in window.complaints() if "ERR_CONNECTION" not in line] == []


def test_a_reload_keeps_the_token_and_another_tab_has_none(tmp_path, window, monkeypatch):
    with asking(tmp_path) as ask:
        ask(pictures(0.1, 0.9))
        person = opened(window, tmp_path, monkeypatch)
        pair = window.wait(SHOWN)
        window.tell("refresh")
        assert window.wait(SHOWN) == pair
        window.tell("window", handle=window.tell("window/new", type="tab")["handle"])
        window.open(person.url)
        window.wait("return document.body.innerText", lambda text: "does not know this" in text)


def test_a_prompt_is_text_and_a_video_plays(tmp_path, window, monkeypatch):
    pytest.importorskip("imageio")
    prompt = type(PROMPT)("<img src=x onerror=alert(1)> **bold**")
    clips = torch.rand(2, 8, 3, 32, 32)
    with asking(tmp_path) as ask:
        asked = ask(clips, prompt)
        opened(window, tmp_path, monkeypatch)
        assert window.wait(SHOWN)["video"]
        assert window.run("return document.querySelector('#prompt').innerText") == prompt.text
        window.wait("return document.querySelector('video').currentTime", lambda now: now > 0)
        window.press("up")
        assert (asked.result(20) > 0).all()
