"""Votes from the page to the scores: several people, undo and skip, restarts, and requests that
come from elsewhere."""

from __future__ import annotations

import json
import os
import socket
import stat
import time

import httpx
import pytest
import torch

from digenrl.extensions.votes import ballots
from digenrl.extensions.votes.cli import vote
from digenrl.extensions.votes.page import VotePage
from digenrl.extensions.votes.scorer import Votes
from digenrl.rewards.protocol import RewardError, RewardUnavailable
from digenrl.rewards.suite import RewardSuite
from digenrl.types import Prompt
from tests.extensions.votes.people import PROMPT, Person, asking, blue_of, pictures

pytestmark = pytest.mark.processes


def test_the_votes_of_a_person_become_scores(tmp_path):
    with asking(tmp_path, per_sample=2) as ask:
        asked, person = ask(pictures(0.1, 0.9, 0.5, 0.3)), Person(tmp_path)
        for given in range(4):
            pair = person.next()
            assert (pair["prompt"], pair["given"], pair["wanted"]) == (PROMPT.text, given, 4)
            assert person.prefer_blue(pair).status_code == 200
        scores = asked.result(10)
    assert scores.argmax() == 1
    assert scores.argmin() == 0
    assert not list((tmp_path / "votes").glob("?" * 32)), "the group stays behind"


def test_two_people_see_different_pairs_and_their_votes_add_up(tmp_path):
    with asking(tmp_path) as ask:
        asked = ask(pictures(0.1, 0.9, 0.5, 0.3))
        one, two = Person(tmp_path, "aa" * 8), Person(tmp_path, "bb" * 8)
        first, second = one.next(), two.next()
        assert not {first["left"], first["right"]} & {second["left"], second["right"]}
        assert one.next() == first, "a reload shows the same pair"
        assert two.prefer_blue(second).json().get("media") is None, "one looks at the others"
        one.prefer_blue(first)
        assert asked.result(10).isfinite().all()


def test_a_vote_sent_twice_counts_once_and_an_undone_one_not_at_all(tmp_path):
    with asking(tmp_path, grace_s=0.5) as ask:
        asked, person = ask(pictures(0.1, 0.9)), Person(tmp_path)
        pair = person.next()
        wrong = "left" if blue_of(pair["media"][0]) < 0.5 else "right"
        for _ in range(2):
            assert "media" not in person.send(pair, wrong, again="0" * 16).json()
        again = person.send(pair, "undo", "/undo").json()
        assert (again["left"], again["right"], again["given"]) == (pair["left"], pair["right"], 0)
        assert person.send(pair, "undo", "/undo").status_code == 409
        person.prefer_blue(again)
        scores = asked.result(10)
    assert scores[1] > 0 > scores[0]


def test_a_group_that_is_skipped_is_missing_and_never_zero(tmp_path):
    with asking(tmp_path) as ask:
        asked, person = ask(pictures(0.1, 0.2, 0.8, 0.9)), Person(tmp_path)
        first = person.next()
        second = person.send(first, "skip").json()
        assert {first["left"], first["right"]} != {second["left"], second["right"]}
        person.send(second, "skip")
        with pytest.raises(RewardUnavailable, match="skipped") as told:
            asked.result(10)
    assert told.value.scores.isnan().all()


def test_samples_without_enough_votes_in_time_are_missing_alone(tmp_path):
    with asking(tmp_path, wait_s=2.0) as ask:
        asked, person = ask(pictures(0.1, 0.9, 0.5, 0.3)), Person(tmp_path)
        pair = person.next()
        person.prefer_blue(pair)
        with pytest.raises(RewardUnavailable, match="wait_s") as told:
            asked.result(10)
    judged = [pair["left"], pair["right"]]
    assert told.value.scores[judged].isfinite().all()
    assert told.value.scores.isnan().sum() == 2


def test_votes_survive_the_death_of_everything(tmp_path):
    """The second scorer finds the votes of the first one, and asks for the others alone."""
    media = pictures(0.1, 0.9, 0.5, 0.3)
    with asking(tmp_path) as ask:
        asked, person = ask(media), Person(tmp_path)
        token = person.token
        person.prefer_blue(person.next())
    with pytest.raises(RewardUnavailable, match="the run ends"):
        asked.result(10)
    assert not (tmp_path / "votes" / "access.json").exists()
    with (tmp_path / "votes" / "votes.jsonl").open("a") as file:
        file.write('{"id": "torn')
    with asking(tmp_path) as ask:
        asked, person = ask(media), Person(tmp_path)
        assert person.token != token
        pair = person.next()
        assert pair["given"] == 1
        person.prefer_blue(pair)
        scores = asked.result(10)
    assert scores.isfinite().all()
    with asking(tmp_path) as ask:  # all is known already
        assert torch.equal(ask(media).result(10), scores)


def test_another_rank_serves_the_page_when_one_ends(tmp_path):
    second = Votes(per_sample=1)
    with asking(tmp_path) as ask:
        person = Person(tmp_path)
        second.join_run(tmp_path, lambda: None)
        time.sleep(0.5)
        assert Person(tmp_path).token == person.token, "one page at a time"
        asked = ask(pictures(0.1, 0.9))
        person.next()
    with pytest.raises(RewardUnavailable):
        asked.result(10)
    try:
        assert Person(tmp_path).token != person.token
    finally:
        second.close()


def test_what_a_dead_rank_has_left_is_neither_shown_nor_kept(tmp_path):
    folder = tmp_path / "votes"
    group = ballots.Group(prompt="old", mime="image/png", samples=2, per_sample=1)
    path = ballots.post_group(folder, group, [b"a", b"b"])
    assert [each.path for each in ballots.waiting_groups(folder)] == [path]
    os.utime(path, (1, 1))
    assert ballots.waiting_groups(folder) == []
    assert not path.exists()


def test_no_sample_has_a_side_of_its_own(tmp_path):
    """Somebody who always says left prefers no sample."""
    page = VotePage(tmp_path, "token", 0, 0)
    group = ballots.Group(prompt="p", mime="image/png", samples=2, per_sample=1)
    names = [f"{number:032x}" for number in range(200)]
    pairs = [
        page._choose_pair(ballots.Waiting(tmp_path / name, group), [], "voter") for name in names
    ]
    assert {*pairs} == {(0, 1), (1, 0)}
    assert 70 < pairs.count((0, 1)) < 130


HOSTILE_LINES = [
    b"[]",
    b"\xff\xfe",
    b"{" * 100_000,
    json.dumps({"id": "a" * 16, "voter": "b" * 16, "group": "../x", "left": 0, "right": 1,
                "choice": "left"}).encode(),
    json.dumps({"id": "a" * 16, "voter": "b" * 16, "group": "0" * 32, "left": -1, "right": 1e9,
                "choice": "left"}).encode(),
]  # fmt: skip


@pytest.mark.parametrize("line", HOSTILE_LINES)
def test_lines_of_others_count_for_nothing(tmp_path, line):
    (tmp_path / "votes.jsonl").write_bytes(line + b"\n")
    assert ballots.Ballots(tmp_path).votes_of("0" * 32) == []


def test_no_link_is_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "votes").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="link"):
        Votes().join_run(tmp_path, lambda: None)


def test_a_full_file_takes_no_vote_and_says_so(tmp_path, monkeypatch):
    with asking(tmp_path) as ask:
        ask(pictures(0.1, 0.9))
        person = Person(tmp_path)
        pair = person.next()
        monkeypatch.setattr(ballots, "MAX_BYTES", 0)
        assert person.send(pair, "left").status_code == 507
        monkeypatch.undo()
        assert person.send(pair, "left").status_code == 200


# ---- who may ask

OWN = {"Sec-Fetch-Site": "same-origin"}
OPENED = {
    "Sec-Fetch-Site": "cross-site",
    "Sec-Fetch-Mode": "navigate",
    "Sec-Fetch-Dest": "document",
}
REFUSED = {
    "no token": ({"Authorization": ""}, 401),
    "another token": ({"Authorization": "Bearer " + "x" * 43}, 401),
    "another origin": ({"Origin": "http://evil.example"}, 403),
    "no origin at all": ({"Origin": "null"}, 403),
    "the origin of another port": ({"Origin": "http://127.0.0.1:1"}, 403),
    "a page of another site": ({"Sec-Fetch-Site": "cross-site"}, 403),
    "a page of another port": ({"Sec-Fetch-Site": "same-site"}, 403),
    "typed by a user": ({"Sec-Fetch-Site": "none", "Sec-Fetch-Dest": "document"}, 403),
    "another host": ({"Host": "evil.example"}, 421),
    "a rebound name": ({"Host": "evil.example", "Origin": "http://evil.example", **OWN}, 421),
}


@pytest.fixture
def person(tmp_path):
    with asking(tmp_path) as ask:
        ask(pictures(0.1, 0.9))
        person = Person(tmp_path)
        person.next()
        yield person


@pytest.mark.parametrize("case", REFUSED)
def test_strangers_are_refused(person, case):
    headers, status = REFUSED[case]
    for path in ("/next?voter=" + "ab" * 8, "/vote", "/undo"):
        asked = person.http.get if path.startswith("/next") else person.http.post
        assert asked(path, headers=headers).status_code == status, path


def test_the_page_itself_is_admitted(person):
    host = person.url.removeprefix("http://")
    for name in (host, host.replace("127.0.0.1", "localhost")):
        headers = {"Host": name, "Origin": f"http://{name}", **OWN}
        found = person.http.get("/next?voter=" + "ab" * 8, headers=headers)
        assert found.status_code == 200
        assert found.json()["media"]


def test_the_page_opens_without_a_token_and_says_nothing(person):
    page = httpx.get(person.url, headers=OPENED, trust_env=False)
    assert page.status_code == 200
    assert person.token not in page.text
    assert PROMPT.text not in page.text
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert "http" not in page.text.replace("<!DOCTYPE html>", ""), "an address of elsewhere"
    framed = httpx.get(person.url, headers=OPENED | {"Sec-Fetch-Dest": "iframe"}, trust_env=False)
    assert framed.status_code == 403


BAD_VOTES = {
    "nothing": (b"", 422),
    "no vote": (b"{}", 422),
    "too long": (b" " * 5000, 413),
    "undo by another door": (None, 422),
}


@pytest.mark.parametrize("case", BAD_VOTES)
def test_what_is_no_vote_is_refused(person, case):
    body, status = BAD_VOTES[case]
    pair = person.next()
    answer = (
        person.http.post("/vote", content=body) if body is not None else person.send(pair, "undo")
    )
    assert answer.status_code == status
    assert person.send({**pair, "left": 5}, "left").status_code == 422
    assert person.send({**pair, "right": pair["left"]}, "left").status_code == 422
    assert person.send({**pair, "group": "0" * 32}, "left").status_code == 409
    assert person.http.get("/next?voter=../../x").status_code == 422
    assert person.next() == pair


def test_others_of_this_machine_cannot_read_the_token(person, tmp_path):
    assert stat.S_IMODE((tmp_path / "votes" / "access.json").stat().st_mode) == 0o600


# ---- the command


def test_the_command_prints_the_address_and_opens_it_by_a_file_of_this_user(
    person, tmp_path, monkeypatch, capsys
):
    votes = "{rewards: {v: {scorer: {_target_: x.Votes, per_sample: 2}}}}"
    sizes = "{prompts_per_batch: 3, oversample: 1, group_size: 4}"
    (tmp_path / "config.yaml").write_text(f"reward: {votes}\ndata: {sizes}\nmax_rl_steps: 10\n")
    opened = []
    monkeypatch.setattr(vote.webbrowser, "open", opened.append)
    monkeypatch.setenv("DISPLAY", ":0")
    assert vote.main([f"run={tmp_path}"]) == 0
    said = capsys.readouterr()
    assert said.out == f"{person.url}/#{person.token}\n"
    assert said.err == "16 votes an RL step, 160 in all\n"
    assert person.token not in opened[0]
    file = tmp_path / "votes" / "open.html"
    assert opened == [file.as_uri()]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert vote.main([f"run={tmp_path}", "open=false"]) == 0
    assert len(opened) == 1
    monkeypatch.setattr(socket, "gethostname", lambda: "laptop")
    assert vote.main([f"run={tmp_path}"]) == 0
    assert "first: ssh -L" in capsys.readouterr().err
    assert len(opened) == 1


def test_the_command_says_that_a_run_has_ended(tmp_path, capsys):
    with asking(tmp_path):
        Person(tmp_path)
    votes = "{rewards: {v: {scorer: {_target_: x.Votes, per_sample: 2}}}}"
    data = "{prompts_per_batch: 3, group_size: 4}"
    (tmp_path / "config.yaml").write_text(f"reward: {votes}\ndata: {data}\n")
    assert vote.main([f"run={tmp_path}"]) == 2
    assert "no page is served" in capsys.readouterr().err


# ---- in a suite


def suite_of(tmp_path, **given):
    node = {"_target_": "digenrl.extensions.votes.scorer.Votes", "per_sample": 1, **given}
    quality = {"_target_": "reward_models.jpeg_size.JpegSize"}
    suite = RewardSuite({"votes": {"scorer": node}}, {"size": {"scorer": quality}})
    suite.run_dir = tmp_path
    return suite


def test_an_evaluation_asks_nobody_and_counts_nothing_as_failed(tmp_path):
    suite = suite_of(tmp_path, wait_s=3600.0)
    media = torch.rand(3, 3, 8, 8)
    began = time.monotonic()
    scores = suite.score(media, [Prompt(f"p{i}") for i in range(3)], heldout=True)
    assert time.monotonic() < began + 60
    assert list(scores) == ["size"]
    assert suite.failure_counts()["votes"].missing == 0
    suite.close()


def test_people_are_asked_once_and_what_is_missing_is_counted(tmp_path):
    suite, ticks, told = suite_of(tmp_path, wait_s=1.0), [], []
    suite.tick = lambda: ticks.append(1)
    suite.on_missing = lambda *facts: told.append(facts)
    began = time.monotonic()
    scores = suite.score(pictures(0.1, 0.9), [PROMPT] * 2)
    assert time.monotonic() < began + 1.9, "asked twice"
    assert scores["votes"].isnan().all()
    assert told == [("votes", 2, "too few votes: nobody voted in time (wait_s)")]
    assert ticks, "a rank that waits counts as hanging"
    suite.close()


def test_without_a_run_and_without_a_group_it_says_what_to_do(tmp_path):
    with pytest.raises(RewardError, match="there is no run"):
        Votes()(pictures(0.1, 0.9), [PROMPT] * 2)
    with asking(tmp_path) as ask, pytest.raises(RewardError, match=r"sampling\.task_size"):
        ask(pictures(0.1)).result(10)
    with pytest.raises(ValueError, match="per_sample >= 1"):
        Votes(per_sample=0)
