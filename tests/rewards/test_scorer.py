"""Asynchronous scoring: overlap, bounds, failures."""

from __future__ import annotations

import asyncio
import signal
import threading
from concurrent.futures import CancelledError, Future

import pytest
import torch

from digenrl.rewards.protocol import RewardError
from digenrl.rewards.scorer import AsyncScorer
from digenrl.rewards.suite import RewardSuite
from digenrl.types import Prompt


class Gated:
    """Brightness, but only once `gate` is set; remembers the sizes of its batches."""

    def __init__(self):
        self.gate, self.entered, self.calls = threading.Event(), threading.Event(), []
        self.closed = False

    def close(self):
        self.closed = True

    def __call__(self, media, prompts):
        self.entered.set()
        assert self.gate.wait(10)
        self.calls.append(len(prompts))
        return media.flatten(1).mean(1)


def task(seed, rows=2, size=4):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, 3, size, size, generator=generator), [
        Prompt(f"p{seed}-{row}") for row in range(rows)
    ]


@pytest.fixture
def gated():
    return Gated()


def scorer_of(function, **options):
    return AsyncScorer(RewardSuite({"r": {"scorer": function}}, **options))


def test_submit_returns_before_the_score_is_there(gated):
    scorer = scorer_of(gated)
    media, prompts = task(0)
    future = scorer.submit(media, prompts)
    assert gated.entered.wait(5)
    assert not future.done()
    later = scorer.submit(media, prompts)
    expected = media.flatten(1).mean(1)
    media.zero_()  # the rollout rank reuses its memory while the score is computed
    gated.gate.set()
    for each in (future, later):
        torch.testing.assert_close(each.result(5)["r"], expected)
    scorer.close()


def test_waiting_tasks_are_bounded(gated):
    scorer = scorer_of(gated, pending=1)
    running = scorer.submit(*task(0))
    assert gated.entered.wait(5)
    waiting = scorer.submit(*task(1))
    third: list[Future[dict[str, torch.Tensor]]] = []
    beyond = threading.Thread(target=lambda: third.append(scorer.submit(*task(2))))
    beyond.start()
    beyond.join(0.05)
    assert not third, "it waits for a place"
    gated.gate.set()
    beyond.join(5)
    assert (
        running.result(5)["r"].shape
        == waiting.result(5)["r"].shape
        == third[0].result(5)["r"].shape
        == (2,)
    )
    scorer.close()


def test_tasks_are_scored_one_by_one(gated):
    scorer = scorer_of(gated, pending=8)
    futures = [scorer.submit(*task(0))]
    assert gated.entered.wait(5)
    tasks = [task(1), task(2), task(3, rows=3, size=8)]
    futures += [scorer.submit(*each) for each in tasks]
    gated.gate.set()
    for future, (media, _) in zip(futures[1:], tasks, strict=True):
        torch.testing.assert_close(future.result(5)["r"], media.flatten(1).mean(1))
    assert gated.calls == [2, 2, 2, 3]
    scorer.close()


def test_an_error_reaches_its_own_future_and_the_thread_lives_on():
    def picky(media, prompts):
        if prompts[0].text == "p1-0":
            raise ValueError("bad prompt")
        return media.flatten(1).mean(1)

    scorer = scorer_of(picky)
    with pytest.raises(
        RewardError, match=r"Reward `r` raised ValueError: bad prompt .*test_scorer"
    ):
        scorer.submit(*task(1)).result(5)
    with pytest.raises(ValueError, match="2 samples but 1 prompts"):
        scorer.submit(task(2)[0], [Prompt("one")])
    assert scorer.submit(*task(0)).result(5)["r"].shape == (2,)
    scorer.close()


def test_inline_placement_scores_in_the_callers_thread():
    threads = []

    def where(media, prompts):
        threads.append(threading.current_thread())
        return media.flatten(1).mean(1)

    scorer = scorer_of(where, placement="inline")
    assert scorer.submit(*task(0)).done()
    assert threads == [threading.current_thread()]
    scorer.close()


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()], ids=repr
)
def test_a_scorer_that_asks_to_end_the_process_fails_like_any_other(error):
    errors = [error]

    def scores(media, prompts):
        if errors:
            raise errors.pop()
        return media.flatten(1).mean(1)

    scorer = scorer_of(scores)
    said = f"Scorer `r` raised {type(error).__name__}{': 3' if str(error) else ''}, which"
    with pytest.raises(RewardError, match=said):
        scorer.submit(*task(0)).result(5)
    assert scorer.submit(*task(0)).result(5)["r"].shape == (2,), "the thread lives on"
    scorer.close()


def test_ctrl_c_in_a_scorer_of_the_main_thread_is_the_users():
    def interrupted(media, prompts):
        signal.raise_signal(signal.SIGINT)

    scorer = scorer_of(interrupted, placement="inline")
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell ignores it for background jobs
    try:
        with pytest.raises(KeyboardInterrupt):
            scorer.submit(*task(0)).result(5)
    finally:
        signal.signal(signal.SIGINT, before)
    scorer.close()


def test_closing_cancels_what_waits_and_refuses_more(gated):
    scorer = scorer_of(gated, pending=3)
    running = scorer.submit(*task(0))
    assert gated.entered.wait(5)
    waiting = scorer.submit(*task(1))
    threading.Timer(0.1, gated.gate.set).start()
    scorer.close()
    assert running.done(), "it was waited for"
    assert running.result(5)["r"].shape == (2,)
    with pytest.raises(CancelledError):
        waiting.result(5)
    with pytest.raises(RuntimeError, match="closed"):
        scorer.submit(*task(2))
    assert gated.closed
    scorer.close()


def test_a_task_that_its_owner_cancelled_is_not_scored(gated):
    scorer = scorer_of(gated, pending=3)
    running = scorer.submit(*task(0))
    assert gated.entered.wait(5)
    unwanted, wanted = scorer.submit(*task(1)), scorer.submit(*task(2, rows=3))
    assert unwanted.cancel()
    gated.gate.set()
    assert [running.result(5)["r"].numel(), wanted.result(5)["r"].numel()] == [2, 3]
    assert gated.calls == [2, 3]
    scorer.close()


def test_heldout_rewards_have_their_own_cache_entry():
    suite = RewardSuite(
        {"r": {"scorer": lambda media, prompts: media.flatten(1).mean(1)}},
        heldout={"h": {"scorer": lambda media, prompts: -media.flatten(1).mean(1)}},
    )
    scorer = AsyncScorer(suite)
    media, prompts = task(0)
    assert set(scorer.submit(media, prompts).result(5)) == {"r"}
    assert set(scorer.submit(media, prompts, heldout=True).result(5)) == {"r", "h"}
    scorer.close()


def test_closing_waits_for_no_place_in_a_full_queue(gated):
    scorer = scorer_of(gated, pending=1)
    running = scorer.submit(*task(0))
    assert gated.entered.wait(5)
    waiting = scorer.submit(*task(1))
    closing = threading.Thread(target=scorer.close, args=(0.05,))
    closing.start()
    closing.join(5)
    ended, gone = not closing.is_alive(), waiting.cancelled()
    gated.gate.set()
    closing.join(5)
    assert (ended, gone) == (True, True)
    assert running.result(5)["r"].shape == (2,)
    assert gated.closed
    assert scorer._thread is not None
    assert scorer._thread.daemon, "a scorer that hangs does not keep its process"
    scorer._thread.join(5)
    assert not scorer._thread.is_alive(), "a late scorer's thread ends all the same"


def test_a_scorers_thread_works_on_its_ranks_device_and_on_a_stream_of_its_own(monkeypatch):
    used = []
    device = torch.device("cuda", 1)
    monkeypatch.setattr("digenrl.accelerator.current_device", lambda: device)
    monkeypatch.setattr(torch, "Stream", lambda device: ("stream", device))
    monkeypatch.setattr(torch.accelerator, "set_device_index", used.append)
    monkeypatch.setattr(torch.accelerator, "set_stream", used.append)
    scorer = scorer_of(lambda media, prompts: media.flatten(1).mean(1))
    scorer.submit(*task(0)).result(5)
    scorer.close()
    assert used == [device, ("stream", device)]
