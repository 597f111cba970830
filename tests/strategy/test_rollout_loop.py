"""The life of a rollout rank, told by its link: what it does when weights, tasks of others or
nothing comes, and when it shall leave."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from digenrl.cluster.claims import StoredClaims
from digenrl.cluster.handshake import Handshake
from digenrl.cluster.world import Session, World
from digenrl.rollout.evaluation import FixedSamples
from digenrl.schedule.claims import NOBODY, Claims, evaluation_pieces, evaluation_queue
from digenrl.strategy.evaluating import EvaluationWorker
from digenrl.strategy.rollout_loop import RolloutWorker
from digenrl.strategy.setup import RankRuntime, RankSetup
from digenrl.strategy.shared import TrainerState
from digenrl.transport.cells import Part
from digenrl.transport.suspended import Suspended
from digenrl.transport.weights import Version, publish
from digenrl.transport.wire import Message, MessageKind
from digenrl.types import Prompt
from tests.cluster.test_claims import Store
from tests.strategy.test_tasks import SPEC, Post, Rollout, run_task

DRAWN = FixedSamples(
    (Prompt("number one", target="1"), Prompt("number two", target="2")), 1, 7, 2, 0
)


class Fed(Post):
    """A link on which comes what the test says: one step each time that the rank waits, and, from
    another list, one between two denoising steps."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = deque[Message]()
        self.at_rest = deque[Callable[[], Any]]()
        self.within = deque[Callable[[], Any]]()
        self.makes: Callable[[], bool] = lambda: False
        self.waited = list[float]()

    def receive(self, timeout: float) -> Message | None:
        if not self.waiting and timeout:
            self.waited.append(timeout)
            self.at_rest.popleft()()
        elif self.makes() and self.within:
            self.within.popleft()()
        return self.waiting.popleft() if self.waiting else None


class Life(Rollout):
    """A rollout rank beside two trainers and another rollout, with its worker."""

    def __init__(
        self, store: Store, directory: Path, rank: int = 2, drawn: FixedSamples | None = None
    ) -> None:
        self.launcher, self.controls = store.controls(5)
        super().__init__(self.controls[rank], rank, directory, SPEC, Fed())
        self.link, self.unused = cast(Fed, self.post), cast(Any, None)
        self.link.makes = lambda: bool(self.runner._held)
        self.session = Session("", 0, Handshake(), directory, 0.0, progress=self.spans.progress)
        engine, world = self.runner._engine, World(rank, 2, 2)
        setup = RankSetup(
            world, self.session, SPEC, engine, self.runner._sampler, 1, evaluated=drawn
        )
        hooks, state = cast(Any, self), TrainerState()
        runtime = RankRuntime(setup, hooks, self.unused, state, self.control, self.post, self.spans)
        evaluating = EvaluationWorker(drawn, runtime, self.runner)
        self.worker = RolloutWorker(runtime, self.runner, evaluating)
        self.mail, self.runtime = self.worker._mail, runtime
        self.parameters = engine.policy.adapter.trained_parameters()
        self.versions = [
            {name: torch.full_like(p, 0.01 * n) for name, p in self.parameters.items()}
            for n in range(3)
        ]
        self.versions[0] = {name: p.detach().clone() for name, p in self.parameters.items()}

    def arrive(self, *versions: int, tensors: dict[str, Tensor] | None = None) -> None:
        """Let versions come, of which only the digest is sent of version 0 at first."""
        for version in versions:
            wire, held = Post(), tensors or self.versions[version]
            there = version == 0 and self.worker._version < 0
            self.digest = publish(version, held, wire, {2: []}, lambda d: None, None, there).digest
            self.link.waiting += wire.messages()

    def done(self) -> None:
        self.launcher.set("done", "1")

    def holds(self, version: int) -> bool:
        own = (p.detach() for p in self.parameters.values())
        return all(map(torch.equal, own, self.versions[version].values()))

    def trace(self) -> list[tuple[Any, ...]]:
        """(stage, what tells it apart) of what it did, without decoding, scoring and sending."""
        named = {
            "wait": "cause",
            "adopt": "version",
            "generate": "version",
            "eval": "piece",
        }
        rows = self.rows()
        return [(row["stage"], row[named[row["stage"]]]) for row in rows if row["stage"] in named]


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store()
    yield store
    store.close()


def test_a_rollout_adopts_works_and_waits_until_the_run_is_done(
    store: Store, tmp_path: Path
) -> None:
    life = Life(store, tmp_path)
    seen: list[Any] = []

    def look() -> None:
        stage = life.spans.progress.current_stretches()[0].stage
        work = life.work()
        seen.append((stage, work.version, work.busy, life.holds(work.version)))

    steps = [lambda: life.arrive(0), look, lambda: life.arrive(1), look, life.done]
    life.link.at_rest += steps
    life.worker.run_until_done()
    tasks = [("generate", 0)] * 6, [("generate", 1)] * 6
    first, last = (
        [("wait", "startup"), ("adopt", 0)],
        [("wait", "weights"), ("adopt", 1)],
    )
    assert seen == [("wait weights", 0, False, True), ("wait weights", 1, False, True)]
    assert life.post.to == [0, 1] * 12
    assert set(life.link.waited) == {0.2}
    assert life.spans.progress.current_stretches()[0].stage not in ("wait weights", "wait startup")
    rows = life.rows()
    assert life.trace() == [*first, *tasks[0], *last, *tasks[1]]
    (waited,) = (row for row in rows if row.get("cause") == "weights")
    before, after = (row for row in rows if row["stage"] == "adopt")
    assert before["end"] < waited["start"] < waited["end"] <= after["start"]
    assert after["digest"] == life.digest != before["digest"]


def noted(monkeypatch: pytest.MonkeyPatch, done: list[Any], *parts: tuple[Any, str, Any]) -> None:
    """Replace methods by what notes its call and gives this answer."""
    for owner, name, answer in parts:

        def called(*args: Any, name: str = name, answer: Any = answer, **kwargs: Any) -> Any:
            done.append((name, *args, *kwargs.values()))
            return answer

        monkeypatch.setattr(owner, name, called)


def test_a_rollout_looks_at_everything_in_its_order(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life, done = Life(store, tmp_path), list[Any]()
    worker, runner = life.worker, life.runner
    ends = iter([None, "1", None])
    looks = [
        ((life.mail, "receive_messages", None), ("receive_messages",)),
        ((life.mail, "has_older_version", False), ("has_older_version", -1)),
        ((worker, "_make_task", False), ("_make_task",)),
        ((worker, "_make_evaluation_piece", False), ("_make_evaluation_piece",)),
        ((runner, "settle_sends", None), ("settle_sends",)),
        ((life.mail, "wait_for_message", None), ("wait_for_message", -1)),
    ]
    monkeypatch.setattr(life.control, "get", lambda key: done.append(("get", key)) or next(ends))
    noted(monkeypatch, done, (life.control, "check_abort", None), *(part for part, _ in looks))
    worker.run_until_done()
    rest = [look for _, look in looks]
    assert done == [("get", "done"), ("check_abort",), *rest, ("get", "done")]
    done.clear()
    noted(
        monkeypatch,
        done,
        (runner, "stop_taking_tasks", 0),
        (runner, "hand_over_task", 0),
        (runner, "settle_sends", 0),
    )
    life.session.leave.set()
    life.mail.suspended.extend(cast(Any, ["one", "two"]))
    worker.run_until_done()
    hands_in = [
        ("stop_taking_tasks",),
        ("receive_messages",),
        ("hand_over_task", "one"),
        ("hand_over_task", "two"),
    ]
    assert done == [("get", "done"), *hands_in, ("settle_sends", True)]


def test_a_wait_has_its_end_before_whatever_is_done_next(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life, done = Life(store, tmp_path, drawn=DRAWN), list[Any]()
    worker, runner, evaluating = life.worker, life.runner, life.worker._evaluation_worker
    suspended: Any = SimpleNamespace(task=SimpleNamespace(version=4))
    piece: Any = SimpleNamespace(position=1)
    noted(
        monkeypatch, done, (life.mail, "end_wait", None), (runner, "take_over", "taken over"),
        (runner, "begin_task", "begun"), (runner, "generate", "made"), (runner, "score", "scored"),
        (runner, "send_results", None), (runner, "takes_next_task", True), (runner, "claim_task", "task"),
        (evaluating, "claim_piece", piece), (evaluating, "make_piece", None),
    )  # fmt: skip
    between = worker._between_steps
    worker._version = 4
    life.mail.suspended.append(suspended)
    assert worker._make_task()
    rest = [("score", "made"), ("send_results", "made", "scored")]
    taken = [("end_wait", "tail"), ("take_over", suspended)]
    assert done == [*taken, ("generate", "taken over", "generate", between), *rest]
    done.clear()
    assert worker._make_task()
    claimed = [
        ("takes_next_task", 4),
        ("claim_task", 4),
        ("end_wait", "tail"),
        ("begin_task", "task"),
    ]
    assert done == [*claimed, ("generate", "begun", "generate", between), *rest]
    done.clear()
    noted(monkeypatch, done, (runner, "generate", None))
    assert worker._make_task()
    assert done[-1] == ("generate", "begun", "generate", between), "another rank goes on with it"
    done.clear()
    assert worker._make_evaluation_piece()
    assert done == [
        ("claim_piece", 4),
        ("end_wait", "tail"),
        ("make_piece", 4, piece, life.mail.receive_messages),
    ]
    done.clear()
    noted(monkeypatch, done, (runner, "take_over", None))
    life.mail.suspended.append(suspended)
    assert worker._make_task()
    assert [name for name, *_ in done][1:4] == ["take_over", "takes_next_task", "claim_task"], (
        "it is another's"
    )
    done.clear()
    monkeypatch.setattr(runner, "claim_task", lambda version: None)
    assert not worker._make_task()
    monkeypatch.setattr(runner, "takes_next_task", lambda version: False)
    assert not worker._make_task()
    worker._version = -1
    assert not worker._make_task()
    monkeypatch.setattr(evaluating, "claim_piece", lambda version: None)
    assert not worker._make_evaluation_piece()
    assert done == [("takes_next_task", 4)]


def test_who_adopts_tells_it_and_only_who_joined_asks_and_only_before_its_first_version(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []
    for rank, version in ((2, -1), (4, -1), (4, 0)):
        life = Life(store, tmp_path, rank)
        worker = life.worker
        noted(
            monkeypatch, done, (life.mail, "_ask_for_weights", None), (life.mail, "receive_messages", None),
            (life.runner, "announce_work", None),
            (worker._evaluation_worker, "drop_old_weights", None),
        )  # fmt: skip
        worker._version = version
        life.mail.wait_for_message(version)
        looks = [("receive_messages", 0.2)]
        assert done == [("_ask_for_weights",)] * (rank == 4 and version < 0) + looks
        stage = "wait startup" if version < 0 else "wait weights"
        assert life.spans.progress.current_stretches()[0].stage == stage
        done.clear()
        life.mail.weights.append(Version(3, "digest", life.versions[1]))
        worker._adopt_next_version()
        assert done == [("drop_old_weights", 3), ("announce_work", 3)]
        assert life.holds(1)
        assert life.spans.progress.current_stretches()[0].stage != stage, "the wait is over"
        done.clear()


def test_who_is_to_leave_takes_no_more_work_before_it_names_its_successor(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life, done = Life(store, tmp_path), list[Any]()
    noted(
        monkeypatch, done, (life.runner, "stop_taking_tasks", None), (life.runner, "find_successor", 3),
        (life.mail, "receive_messages", None),
    )  # fmt: skip
    task: Any = "task"
    life.worker._version = 4
    assert life.worker._between_steps(task) is None
    assert done == [("receive_messages",)]
    done.clear()
    life.session.leave.set()
    assert life.worker._between_steps(task) == 3
    assert done == [("stop_taking_tasks",), ("find_successor", "task", 4)]
    monkeypatch.setattr(life.runner, "find_successor", lambda *_: None)
    assert life.worker._between_steps(task) == NOBODY


def test_a_piece_looks_between_its_steps(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life, done = Life(store, tmp_path, drawn=DRAWN), list[Any]()
    evaluating = life.worker._evaluation_worker

    def draw(engine: Any, pieces: list[int], before_step: Callable[[], None], noise: bool) -> str:
        done.append(("draw", pieces, noise))
        before_step()
        return "pictures"

    monkeypatch.setattr(FixedSamples, "draw_pieces", lambda self, *args: draw(*args))
    noted(
        monkeypatch, done, (life.spans.progress, "mark_progress", None), (life.control, "check_abort", None),
        (life.mail, "receive_messages", None),
    )  # fmt: skip
    assert cast(Any, evaluating._draw_piece(0, 1, life.mail.receive_messages)) == "pictures"
    assert done == [
        ("draw", [1], True),
        ("mark_progress",),
        ("check_abort",),
        ("receive_messages",),
    ]


def test_who_leaves_gives_away_its_task_at_the_next_step_and_what_waits_for_it(
    store: Store, tmp_path: Path
) -> None:
    life = Life(store, tmp_path)
    other = Rollout(life.controls[3], 3, tmp_path, SPEC)
    given = other.runner.claim_task(0)
    run_task(other.runner, given, interrupt=lambda task: 2)

    def leave() -> None:
        life.session.leave.set()
        life.link.waiting += other.post.messages()

    life.link.at_rest.append(lambda: life.arrive(0))
    life.link.within.append(leave)
    life.worker.run_until_done()
    passed = [Suspended.from_message(message, 3) for message in life.post.messages()]
    assert life.post.to == [3, 3]
    assert [(each.task.index, each.next_step) for each in passed] == [(1, 2), (0, 1)]
    assert life.work() is None
    assert [row["handed_to"] for row in life.rows() if row["stage"] == "generate"] == [3]


def test_who_leaves_sends_what_is_still_being_scored(store: Store, tmp_path: Path) -> None:
    life, late = Life(store, tmp_path), Future[None]()
    life.link.at_rest.append(life.session.leave.set)
    life.runner._unsent.append(late)
    timer = threading.Timer(0.05, late.set_exception, [ValueError("its scorer failed")])
    timer.start()
    with pytest.raises(ValueError, match="its scorer failed"):
        life.worker.run_until_done()


def test_who_leaves_without_a_successor_gives_its_task_up(store: Store, tmp_path: Path) -> None:
    life = Life(store, tmp_path)
    life.link.at_rest.append(lambda: life.arrive(0))
    life.link.within.append(life.session.leave.set)
    life.worker.run_until_done()
    assert (life.post.to, life.work()) == ([], None)
    assert life.runner.claims.confirm_claim(0, 0, 0) is None, "nobody's"


def test_a_task_of_the_next_version_waits_for_it_and_goes_before_the_queue(
    store: Store, tmp_path: Path
) -> None:
    life = Life(store, tmp_path)
    other = Rollout(life.controls[3], 3, tmp_path, SPEC)
    run_task(other.runner, other.runner.claim_task(1), interrupt=lambda task: 2)

    def both() -> None:
        life.link.waiting += other.post.messages()
        life.arrive(0)

    life.link.at_rest += [both, lambda: life.arrive(1), life.done]
    life.worker.run_until_done()
    rows = [row for row in life.rows() if row["stage"] in ("generate", "adopt", "send")]
    stages = [row["stage"][0] for row in rows]
    assert "".join(stages) == "a" + "gs" * 6 + "a" + "gs" * 6
    parts = [Part(message).meta for message in life.post.messages()[::2]]
    assert [(part["version"], part["index"]) for part in parts] == [
        (version, index) for version in (0, 1) for index in range(6)
    ], "the first of version 1 was the other's"


def test_a_version_that_comes_back_goes_before_the_tasks_of_the_present_one(
    store: Store, tmp_path: Path
) -> None:
    life = Life(store, tmp_path)
    life.link.at_rest += [lambda: life.arrive(1), life.done]
    life.link.within.append(lambda: life.arrive(0, 1))
    life.worker.run_until_done()
    one, rest = [("generate", 1)], [("generate", 1)] * 5
    older = [("adopt", 0), *[("generate", 0)] * 6]
    assert life.trace() == [
        ("wait", "startup"),
        ("adopt", 1),
        *one,
        *older,
        ("adopt", 1),
        *rest,
    ]
    assert life.holds(1)


def test_who_joined_asks_once_for_weights_and_not_before_there_are_any(
    store: Store, tmp_path: Path
) -> None:
    life = Life(store, tmp_path, rank=4)
    asked: list[int] = []

    def note() -> None:
        asked.append(len(life.post.to))

    def published() -> None:
        note()
        life.launcher.set("version", "1")

    life.link.at_rest += [published, note, note, lambda: life.arrive(1, 1), note, life.done]
    life.worker.run_until_done()
    assert asked == [0, 1, 1, 13]
    tasks = [("generate", 1)] * 6
    assert life.trace() == [("wait", "startup"), ("adopt", 1), *tasks, ("adopt", 1)], (
        "the same version has no hurry"
    )
    ask = life.post.messages()[0]
    assert (ask.kind, ask.meta, life.post.to[0]) == (MessageKind.ASK, {"rank": 4}, 0)


@pytest.mark.parametrize("apart", [False, True], ids=["the version's", "an average"])
def test_an_evaluation_is_made_between_tasks_and_weights_by_the_weights_it_is_of(
    store: Store, tmp_path: Path, apart: bool
) -> None:
    life = Life(store, tmp_path, drawn=DRAWN)
    engine = life.runner._engine

    def opened() -> None:
        life.arrive(0)
        if apart:
            life.arrive(evaluation_queue(0), tensors=life.versions[2])
        life.launcher.set("evaluation", f"0:{life.digest if apart else ''}")

    life.link.at_rest += [opened, lambda: life.arrive(1), life.done]
    life.worker.run_until_done()
    assert life.holds(1)
    pieces = [("eval", 0), ("eval", 1), ("wait", "weights"), ("adopt", 1)]
    made = [("generate", 0)] * 6, [("generate", 1)] * 6
    assert life.trace() == [
        ("wait", "startup"),
        ("adopt", 0),
        *made[0],
        *pieces,
        *made[1],
    ]
    sent = [m for m in life.post.messages() if m.kind is MessageKind.EVALUATION]
    assert life.post.to[12:14] == [0, 0]
    for name, value in life.versions[2 if apart else 0].items():
        life.parameters[name].data = value
    for number, message in enumerate(sent):
        assert message.meta == {"version": 0, "piece": number}
        wanted = DRAWN.draw_pieces(engine, [number])
        assert torch.equal(message.tensors["media"], wanted.media)
        for name, scores in wanted.rewards.items():
            assert torch.equal(message.tensors[f"rewards/{name}"], scores)


def test_no_piece_is_claimed_of_another_version_or_before_its_weights_are_there(
    store: Store, tmp_path: Path
) -> None:
    life = Life(store, tmp_path, drawn=DRAWN)
    nobody = EvaluationWorker(None, life.runtime, life.runner)
    evaluating = life.worker._evaluation_worker
    assert evaluating.claim_piece(0) is None, "none is open"
    life.arrive(evaluation_queue(0), tensors=life.versions[2])
    life.mail.receive_messages()
    held = evaluating._weights
    life.launcher.set("evaluation", f"0:{life.digest}")
    assert evaluating.claim_piece(1) is None
    assert nobody.claim_piece(0) is None
    life.launcher.set("evaluation", "0:other")
    assert evaluating.claim_piece(0) is None
    life.launcher.set("evaluation", f"0:{life.digest}")
    assert evaluating.claim_piece(0).position == 0
    evaluating.drop_old_weights(0)
    assert evaluating._weights is held
    evaluating.drop_old_weights(1)
    assert evaluating._weights is None
    assert evaluating.claim_piece(0) is None


def test_who_leaves_in_a_piece_gives_it_back(store: Store, tmp_path: Path) -> None:
    life = Life(store, tmp_path, drawn=DRAWN)

    def opened() -> None:
        life.arrive(0)
        life.launcher.set("evaluation", "0:")

    life.link.at_rest.append(opened)
    life.link.makes = lambda: life.spans.progress.current_stretches()[0].stage == "eval"
    life.link.within += [lambda: None, life.session.leave.set]
    before = life.spans.progress.current_stretches()[0].number
    life.worker.run_until_done()
    assert life.post.to == [0, 1] * 6, "no piece"
    assert life.spans.progress.current_stretches()[0].number > before
    launcher = Claims(StoredClaims(life.launcher), -1)
    assert launcher.offer_released_tasks(2) == ["piece 0 of the evaluation of version 0"]
    pieces = evaluation_pieces(0, 2)
    other = Claims(StoredClaims(life.controls[3]), 3)
    assert [other.take_next_task(-1, pieces, range(2)).position for _ in pieces] == [0, 1]
