"""A scorer in a process of its own: same scores, and its death is a missing score, not the
run's."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time

import psutil
import pytest
import torch

from digenrl.cluster.launcher import mask_secrets
from digenrl.rewards.managed import ManagedScorer
from digenrl.rewards.process import ProcessScorer
from digenrl.rewards.protocol import RewardError, RewardUnavailable, identity_of
from digenrl.rewards.suite import RewardSuite
from digenrl.types import Prompt
from reward_models.jpeg_size import JpegSize

pytestmark = pytest.mark.processes

NODE = {"_target_": "reward_models.jpeg_size.JpegSize", "quality": 80}
PROMPTS = [Prompt("a", metadata={"k": 1}), Prompt("b")]
MEDIA = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def test_scores_equal_inline_and_a_killed_child_starts_again():
    suite = RewardSuite({"jpeg": {"scorer": NODE}}, placement="process")
    scorer = suite.find_scorer("jpeg")
    expected = JpegSize(80)(MEDIA, PROMPTS)
    try:
        assert torch.equal(suite.score(MEDIA, PROMPTS)["jpeg"], expected)
        assert identity_of(scorer) == identity_of(JpegSize(80))
        video = MEDIA[:, None].expand(2, 3, 3, 16, 16)
        assert torch.equal(suite.score(video, PROMPTS)["jpeg"], expected)
        pid = scorer._child.pid
        os.kill(pid, signal.SIGSTOP)
        scorer._client._deadline_s = 0.3
        scorer._call_s = 0.3
        began = time.monotonic()
        with pytest.raises(RewardUnavailable, match=r"did not answer within 0\.3 s"):
            scorer(MEDIA, PROMPTS)
        assert time.monotonic() - began < 3
        assert not psutil.pid_exists(pid)
        scorer._call_s = 60
        assert torch.equal(suite.score(MEDIA, PROMPTS)["jpeg"], expected)
        assert suite.failure_counts()["jpeg"].missing == 0
    finally:
        suite.close()
    assert scorer._child is None


@pytest.mark.parametrize("kind", [ProcessScorer, ManagedScorer])
@pytest.mark.parametrize("started", [False, True], ids=["while-it-starts", "while-it-scores"])
def test_closing_does_not_wait_for_the_child(kind: type[ProcessScorer], started: bool) -> None:
    """A run that fails leaves in seconds, and a scorer may load or score for minutes."""
    scorer = kind({"_target_": "tests.rewards.test_process.Slow", "at_start": not started})
    caught: list[BaseException] = []

    def ask() -> None:
        try:
            scorer(MEDIA, PROMPTS)
        except RewardUnavailable as error:
            caught.append(error)

    if started:
        assert scorer.model_id == "slow"
    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(3.0 if started else 0.5)
    child, began = psutil.Process(scorer._child.pid), time.monotonic()
    scorer.close()
    assert time.monotonic() - began < 5
    thread.join(5)
    assert len(caught) == 1
    assert gone(child)
    with pytest.raises(RewardUnavailable, match=r"Slow is closed"):
        scorer(MEDIA, PROMPTS)


class Slow:
    """A scorer that takes minutes, to load or to score."""

    model_id, weights_digest = "slow", "0"

    def __init__(self, at_start: bool) -> None:
        time.sleep(300 * at_start)

    def __call__(self, media: torch.Tensor, prompts: list[Prompt]) -> torch.Tensor:
        time.sleep(300)
        return torch.zeros(len(prompts))


def test_a_scorer_that_fails_names_its_error():
    scorer = ProcessScorer({"_target_": "reward_models.jpeg_size.JpegSize", "quality": 500})
    with pytest.raises(RewardError, match=r"JPEG quality lies in 1\.\.95") as caught:
        scorer(MEDIA, PROMPTS)
    assert not isinstance(caught.value, RewardUnavailable)
    scorer.close()


@pytest.mark.slow
def test_each_failure_of_a_call_is_told_apart():
    scorer = ProcessScorer({"_target_": "tests.rewards.services.Moody"}, max_deaths=2)
    one = MEDIA[:1]
    try:
        for _ in range(3):  # as often as it likes: it answers
            with pytest.raises(RewardUnavailable, match="the judge is away"):
                scorer(one, [Prompt("away")])
        with pytest.raises(RewardUnavailable, match=r"died \(exit code -9\); it starts again"):
            scorer(one, [Prompt("killed")])
        assert scorer(one, [Prompt("fine")]).tolist() == [1.0]
        with pytest.raises(RewardError, match="KeyError: 'no such weight'") as caught:
            scorer(one, [Prompt("broken")])
        assert not isinstance(caught.value, RewardUnavailable)
        with pytest.raises(RewardError, match="Scorer `Moody` raised SystemExit: 3") as caught:
            scorer(one, [Prompt("exit")])
        assert not isinstance(caught.value, RewardUnavailable)
        with pytest.raises(RewardUnavailable, match="died"):
            scorer(one, [Prompt("killed")])
        with pytest.raises(RewardError, match="2 times in a row") as caught:
            scorer(one, [Prompt("killed")])
        assert not isinstance(caught.value, RewardUnavailable)
    finally:
        scorer.close()


def gone(process: psutil.Process) -> bool:
    psutil.wait_procs([process], timeout=5)
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_what_a_scorer_has_started_ends_with_it():
    scorer = ProcessScorer({"_target_": "tests.rewards.services.Moody"})

    def helper() -> psutil.Process:
        scorer(MEDIA[:1], [Prompt("helpers")])
        (found,) = psutil.Process(scorer._child.pid).children()
        return found

    first = helper()
    with pytest.raises(RewardUnavailable, match="died"):
        scorer(MEDIA[:1], [Prompt("killed")])
    assert gone(first)
    second = helper()
    scorer.close()
    assert gone(second)


def test_the_child_and_what_it_started_end_when_its_parent_is_killed():
    ours, theirs = multiprocessing.Pipe(duplex=False)

    def scores():
        scorer = ProcessScorer({"_target_": "tests.rewards.services.Moody"})
        scorer(MEDIA[:1], [Prompt("helpers")])
        theirs.send_bytes(str(scorer._child.pid).encode())
        time.sleep(60)

    parent = multiprocessing.get_context("fork").Process(target=scores)
    parent.start()
    assert ours.poll(100)
    child = psutil.Process(int(ours.recv_bytes()))
    (helper,) = child.children()
    parent.kill()
    parent.join()
    assert gone(child)
    assert gone(helper)


SECRET = "canary-of-a-scorer-5512"


@pytest.mark.processes
def test_what_a_child_prints_passes_the_ranks_filter(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CHATTY_API_KEY", SECRET)
    log = (tmp_path / "log").open("w", buffering=1)
    monkeypatch.setattr(sys, "stderr", log)
    monkeypatch.setattr(sys, "stdout", log)
    mask_secrets()
    scorer = ProcessScorer({"_target_": "tests.rewards.services.Chatty"})
    try:
        scorer(torch.rand(1, 3, 4, 4), [Prompt("a")])
    finally:
        scorer.close()
    deadline = time.monotonic() + 10
    while "no end" not in (tmp_path / "log").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    said = (tmp_path / "log").read_text()
    assert all(word in said for word in ("token=", "raw ", "shell ", "no end"))
    assert SECRET not in said
