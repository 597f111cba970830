"""Which tasks a rank may claim, and what it makes, sends, gives away and tells of them: on a real
store, without ranks."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from digenrl.cluster.claims import StoredClaims, note_version, work_of
from digenrl.cluster.control import Control
from digenrl.cluster.world import World
from digenrl.data import PromptSampler
from digenrl.record.span_log import SpanLog
from digenrl.rewards.protocol import RewardError
from digenrl.rewards.scorer import AsyncScorer
from digenrl.rewards.suite import RewardSuite
from digenrl.schedule import ScheduleSpec, Task, place_fragment, version_queue
from digenrl.schedule.claims import NOBODY, Claim, Claims
from digenrl.schedule.ranks import Roles, Work
from digenrl.schedule.scheduler import Scheduler
from digenrl.strategy.lending import Lending
from digenrl.strategy.rollout_loop import finish_task
from digenrl.strategy.setup import RankRuntime, RankSetup
from digenrl.strategy.shared import TrainerState
from digenrl.strategy.tasks import Interrupt, TaskRunner
from digenrl.transport.cells import Part
from digenrl.transport.suspended import Suspended
from digenrl.transport.wire import Message, decode, tensor_bytes
from digenrl.types import Prompt
from tests.cluster.test_claims import Store
from tests.rollout.test_engine import engine_of
from tests.transport.test_weights import Wire
from tests.transport.test_wire import reader

SPEC = ScheduleSpec(prompts=3, group_size=2, task_size=1, denoise_steps=3, trained_steps=2)


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store()
    yield store
    store.close()


def runners(store: Store, **roles: bool) -> list[TaskRunner]:
    """Two colocated ranks."""
    unused: Any = None

    def plan(version: int) -> tuple[Any, ...]:
        return version_queue(SPEC, version, 1)

    return [
        TaskRunner(
            SPEC,
            World(rank, 2, 0),
            Scheduler(SPEC, Roles(2, 0, **roles), plan, None),
            plan,
            unused,
            unused,
            unused,
            control,
            unused,
            SpanLog(None, rank, "trainer", 0.0),
        )
        for rank, control in enumerate(store.controls(2)[1])
    ]


@pytest.mark.parametrize("lockstep", [False, True], ids=["replicas", "sharded"])
def test_divided_tasks_are_claimed_in_halves_and_sharded_ranks_end_together(
    store: Store, lockstep: bool
) -> None:
    first, second = runners(store, lockstep=lockstep, split=True)
    total = len(version_queue(SPEC, 0, 1))
    own = [first.claim_task(0) for _ in range(total // 2)]
    assert [task.index for task in own if task] == list(range(total // 2))
    assert first.claim_task(0) is None
    assert (first.unclaimed_tasks(0), second.unclaimed_tasks(0)) == (
        total // 2 if lockstep else 0,
        total // 2,
    )
    assert second.claim_task(0).index == total // 2
    assert (first.unclaimed_tasks(0), second.unclaimed_tasks(0)) == (
        total // 2 - 1 if lockstep else 0,
        total // 2 - 1,
    )


def test_a_divided_queue_is_of_those_who_generate(store: Store, tmp_path: Path) -> None:
    roles = Roles(2, 2, split=True)
    for number, rank in enumerate((2, 3)):
        rollout = Rollout(store.controls(4)[1][rank], rank, tmp_path, roles=roles)
        assert rollout.runner.claim_task(0).index == 3 * number


@pytest.mark.parametrize(
    ("left", "head", "many", "looks"),
    [(4, 4, True, True), (4, 0, True, False), (4, 0, False, True), (0, 0, False, False)],
)
def test_others_are_looked_at_only_where_it_may_change_whether_a_task_is_taken(
    rollouts: list[Rollout], monkeypatch: pytest.MonkeyPatch,
    left: int, head: int, many: bool, looks: bool,
) -> None:  # fmt: skip
    runner, done = rollouts[0].runner, list[Any]()
    monkeypatch.setattr(runner, "unclaimed_tasks", lambda version: left)
    monkeypatch.setattr(runner.claims, "head_left", lambda version: head)
    monkeypatch.setattr(runner.scheduler, "many_left", lambda *facts: done.append(facts) or many)
    monkeypatch.setattr(runner, "report_other_ranks", lambda: done.append("see"))
    monkeypatch.setattr(runner.scheduler, "takes", lambda *facts: facts)
    monkeypatch.setattr(runner._spans, "now", lambda: 5.0)
    assert runner.takes_next_task(7) == (2, 7, left, 5.0, head)
    assert done == [(2, left)] * (left != head) + ["see"] * looks


def test_undivided_tasks_are_claimed_by_whoever_is_free(store: Store) -> None:
    first, second = runners(store)
    total = len(version_queue(SPEC, 0, 1))
    assert [second.claim_task(0).index, first.claim_task(0).index] == [0, 1]
    assert first.unclaimed_tasks(0) == second.unclaimed_tasks(0) == total - 2


class Post(Wire):
    """A link that keeps what is sent, with the receiver."""

    def __init__(self) -> None:
        super().__init__()
        self.to: list[int] = []

    def send(self, peer: int, message: Message) -> None:
        self.to.append(peer)
        super().send(peer, message)

    def messages(self) -> list[Message]:
        return [decode(reader(bytes(data)), 1 << 22) for data in self.sent]


class Rollout:
    """A rank of a run, by default with two trainers which share the steps of each task, and two
    rollouts."""

    def __init__(
        self,
        control: Control,
        rank: int,
        directory: Path,
        spec: ScheduleSpec = replace(SPEC, tsp_shard=True),  # noqa: B008
        post: Post | None = None,
        roles: Roles = Roles(2, 2),  # noqa: B008
        record: Any = None,
        **engine: Any,
    ) -> None:
        def plan(version: int) -> tuple[Any, ...]:
            return version_queue(spec, version, 1)

        self.control, self.rank, self.post = control, rank, post or Post()
        self._path = directory / f"{rank}.jsonl"
        self.spans = SpanLog(self._path, rank, "rollout", 0.0)
        prompts = [Prompt(f"number {name}", target=name) for name in ("one", "two", "six")]
        self.spec, self.plan_tasks = spec, plan
        self.runner = TaskRunner(
            spec,
            World(rank, roles.trainers, roles.rollouts),
            Scheduler(spec, roles, plan, record),
            plan,
            lambda fragment, step: place_fragment(spec, roles.trainers, fragment),
            engine_of(**engine),
            PromptSampler(prompts, 3, 0),
            control,
            self.post,
            self.spans,
        )

    def work(self, rank: int | None = None) -> Work | None:
        """What the others know of this rank, or of `rank`."""
        return work_of(self.control, range(4))[self.rank if rank is None else rank]

    def rows(self) -> list[dict[str, Any]]:
        self.spans.close()
        return [json.loads(line) for line in self._path.read_text().splitlines()]


def run_task(runner: TaskRunner, task: Task, interrupt: Interrupt | None = None) -> None:
    """Let a rank make a whole task."""
    finish_task(runner, runner.begin_task(task), "generate", interrupt)


def resume_task(
    runner: TaskRunner, suspended: Suspended, interrupt: Interrupt | None = None
) -> None:
    """Let a rank go on with a task, if it is still its own."""
    if (begun := runner.take_over(suspended)) is not None:
        finish_task(runner, begun, "generate", interrupt)


@pytest.fixture
def rollouts(store: Store, tmp_path: Path) -> list[Rollout]:
    controls = store.controls(4)[1]
    return [Rollout(controls[rank], rank, tmp_path) for rank in (2, 3)]


def test_a_task_goes_to_every_trainer_under_its_claim_and_is_told_meanwhile(
    rollouts: list[Rollout],
) -> None:
    rollout, _ = rollouts
    runner = rollout.runner
    assert rollout.work() == Work(), "before its first task"
    seen: list[Work | None] = []
    for number in (0, 1):
        task = runner.claim_task(0)
        run_task(runner, task, interrupt=lambda task: seen.append(rollout.work()))
        assert (task.index, rollout.post.to) == (number, [0, 1] * (number + 1))
    runner.settle_sends(wait=True)
    parts = [Part(message) for message in rollout.post.messages()[2:]]
    assert [part.positions for part in parts] == [[0], [1]], "each trainer gets its own steps"
    assert {part.claim for part in parts} == {Claim(1, 2, 0)}
    assert {(part.meta["index"], part.meta["version"]) for part in parts} == {(1, 0)}
    first, second = (Part(rollout.post.messages()[n]).seconds for n in (0, 2))
    assert rollout.work().task_seconds == pytest.approx(0.5 * (first + second))
    assert not rollout.work().busy, "it is free again"
    busy = seen[2:]
    assert len(busy) == len(seen) - 2 == 2, "a task is never given up before its first step"
    assert {(work.version, work.step, work.group) for work in busy} == {(0, task.step, task.group)}
    assert {work.task_seconds for work in busy} == {first}
    rows = rollout.rows()
    stages = ["generate", "decode", "score", "send"]
    assert sorted(row["stage"] for row in rows) == sorted(stages * 2)
    assert {(row["step"], row["group"]) for row in rows[-4:]} == {(task.step, task.group)}
    made = [row for row in rows if row["stage"] == "generate"]
    assert {(row["samples"], row["version"]) for row in made} == {(1, 0)}
    assert "handed_to" not in made[0]
    took = sum(row["end"] - row["start"] for row in rows[-4:] if row["stage"] in stages[:2])
    assert second == pytest.approx(took, abs=1e-5), "of making and decoding"
    told_at = busy[0].until - first
    assert made[0]["end"] - 1e-5 <= told_at <= made[1]["start"] + 1e-5


def test_a_task_that_is_given_away_ends_with_its_receiver_once(rollouts: list[Rollout]) -> None:
    giver, receiver = rollouts
    task = giver.runner.claim_task(0)
    run_task(giver.runner, task, interrupt=lambda task: 3)
    assert (giver.post.to, giver.work().busy) == ([3], False)
    suspended = Suspended.from_message(giver.post.messages()[0], 3)
    assert (suspended.task, suspended.next_step) == (task, 1)
    resume_task(receiver.runner, suspended)
    receiver.runner.settle_sends(wait=True)
    assert receiver.post.to == [0, 1]
    assert {Part(message).claim for message in receiver.post.messages()} == {Claim(0, 3, 0)}
    assert receiver.work().task_seconds == 0.0, "a rest of a task is no measure of one"
    (handed,) = giver.rows()
    assert (handed["stage"], handed["handed_to"]) == ("generate", 3)
    resume_task(giver.runner, Suspended.from_message(giver.post.messages()[0], 2))
    assert giver.post.to == [3], "somebody else has it"


def test_a_task_ticks_at_each_step_and_is_asked_for_after_each_of_its_own_but_the_first(
    rollouts: list[Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same holds if another rank has made some of the task's steps before."""
    giver, receiver = rollouts
    asked: list[str] = []
    run_task(giver.runner, giver.runner.claim_task(0), interrupt=lambda task: 3)
    suspended = Suspended.from_message(giver.post.messages()[0], 3)
    assert suspended.next_step == 1
    progress = receiver.spans.progress
    plain, said = progress.mark_progress, list[str]()
    monkeypatch.setattr(progress, "mark_progress", lambda: asked.append("tick") or plain())
    receiver.post.send = lambda *_: said.append(progress.said)  # type: ignore[method-assign]
    resume_task(receiver.runner, suspended, lambda task: asked.append("asked"))
    receiver.runner.settle_sends(wait=True)
    assert asked == ["tick", "asked", "tick"]
    assert len(said) == 2
    assert "send" not in " ".join(said), "it would hide what the rank does"


def test_what_was_not_waited_for_is_no_wait_and_what_was_done_is_read_before_it_is_shipped(
    rollouts: list[Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout, done = rollouts[0], list[str]()
    engine, spans = rollout.runner._engine, rollout.spans
    engine._rewards = RewardSuite({"bright": {"scorer": lambda media, _: media.flatten(1).mean(1)}})
    engine._scorer = AsyncScorer(engine._rewards)
    score, read = engine.score, spans.record_finished
    monkeypatch.setattr(spans, "now", lambda: 5.0)
    monkeypatch.setattr(engine, "score", lambda *task: done.append("score") or score(*task))
    monkeypatch.setattr(
        spans, "record_finished", lambda *last, **how: done.append("read") or read(*last, **how)
    )
    run_task(rollout.runner, rollout.runner.claim_task(0))
    assert done[-2:] == ["score", "read"]
    rollout.runner.settle_sends(wait=True)
    engine.close()
    assert "wait" not in {row["stage"] for row in rollout.rows()}


def test_the_receiver_confirms_the_very_task_that_it_was_given(rollouts: list[Rollout]) -> None:
    giver, receiver = rollouts
    run_task(giver.runner, giver.runner.claim_task(1), interrupt=lambda task: 3)
    resume_task(receiver.runner, Suspended.from_message(giver.post.messages()[0], 3))
    receiver.runner.settle_sends(wait=True)
    assert {Part(message).claim for message in receiver.post.messages()} == {Claim(0, 3, 0)}


def test_who_leaves_passes_a_task_that_waits_to_the_next_or_gives_it_up(
    rollouts: list[Rollout],
) -> None:
    giver, leaving = rollouts
    task = giver.runner.claim_task(0)
    run_task(giver.runner, task, interrupt=lambda task: 3)
    suspended = Suspended.from_message(giver.post.messages()[0], 3)
    leaving.runner.stop_taking_tasks()
    assert leaving.work() is None
    leaving.runner.announce_work(0)
    assert leaving.work() is None, "it takes no more tasks"
    giver.runner.announce_work(1)
    leaving.runner.hand_over_task(suspended)
    assert leaving.post.to == [], "nobody holds the version"
    giver.runner.announce_work(0)
    assert leaving.runner.find_successor(task, 0) == 2
    leaving.runner.hand_over_task(suspended)
    assert leaving.post.to == [2]
    assert giver.runner.claims.confirm_claim(0, 0, 0) == Claim(0, 2, 0)
    last = giver.runner.claim_task(0)
    run_task(giver.runner, last, interrupt=lambda task: NOBODY)
    assert giver.post.to == [3]
    assert giver.runner.claims.confirm_claim(0, 1, 0) is None
    assert "handed_to" not in giver.rows()[-1]


def test_a_task_stays_with_its_rank_if_the_receiver_is_lost(rollouts: list[Rollout]) -> None:
    giver, receiver = rollouts
    receiver.control.mark_lost(3)
    run_task(giver.runner, giver.runner.claim_task(0), interrupt=lambda task: 3)
    assert giver.post.to == [0, 1]


def test_a_discarded_task_makes_its_steps_and_sends_nothing(rollouts: list[Rollout]) -> None:
    rollout, _ = rollouts
    asked: list[int] = []
    rollout.runner.run_discarded(version_queue(SPEC, 0, 1)[0], lambda task: asked.append(1))
    assert (len(asked), rollout.post.to) == (2, [])
    assert [(row["stage"], row["discarded"]) for row in rollout.rows()] == [("lend", True)]


def test_an_error_of_a_scorer_is_raised_before_the_next_task(store: Store, tmp_path: Path) -> None:
    def fails(media: Tensor, prompts: Any) -> Tensor:
        raise ValueError("no score")

    rollout = Rollout(store.controls(4)[1][2], 2, tmp_path, scorer=fails)
    run_task(rollout.runner, rollout.runner.claim_task(0))
    task = rollout.runner.claim_task(0)
    with pytest.raises(RewardError, match="no score"):
        run_task(rollout.runner, task)
    assert rollout.post.to == []


def test_a_rank_waits_for_its_scorer_when_too_many_tasks_do_and_says_so(
    rollouts: list[Rollout],
) -> None:
    rollout, gate = rollouts[0], threading.Event()

    def slow(media: Tensor, prompts: Any) -> Tensor:
        assert gate.wait(10.0)
        return media.flatten(1).mean(1)

    engine = rollout.runner._engine
    engine._rewards = RewardSuite({"bright": {"scorer": slow}}, pending=1)
    engine._scorer = AsyncScorer(engine._rewards)
    waiting = threading.Event()

    def open_gate() -> None:
        """Let the scorer go on a while after its rank has begun to wait."""
        for _ in range(1000):
            if any(
                stretch.stage == "wait reward"
                for stretch in rollout.spans.progress.current_stretches()
            ):
                waiting.set()
                break
            time.sleep(0.005)
        time.sleep(0.05)
        gate.set()

    for number in range(3):
        if number == 2:
            threading.Thread(target=open_gate).start()
        run_task(rollout.runner, rollout.runner.claim_task(0))
    assert waiting.is_set()
    rollout.runner.settle_sends(wait=True)
    engine.close()
    assert rollout.post.to == [0, 1] * 3
    rows = rollout.rows()
    assert {row["stage"] for row in rows} == {"generate", "decode", "send", "wait"}
    waits = [row for row in rows if row["stage"] == "wait"]
    assert {(row["cause"], row["step"]) for row in waits} == {("reward", 0)}
    assert waits[-1]["end"] - waits[-1]["start"] > 0.02, "a busy machine may show others too"


def test_too_many_missing_scores_stop_the_run_after_they_are_sent(
    store: Store, tmp_path: Path
) -> None:
    def nothing(media: Tensor, prompts: Any) -> Tensor:
        return torch.full((len(media),), torch.nan)

    rollout = Rollout(store.controls(4)[1][2], 2, tmp_path, scorer=nothing)
    rollout.runner._engine._rewards.min_missing_samples = 2
    for stops in (False, True):
        run_task(rollout.runner, rollout.runner.claim_task(0))
        assert rollout.control.stopping == stops
    assert rollout.post.to == [0, 1] * 2


@pytest.mark.parametrize("left", [(3, 4), (4,), ()])
def test_weights_of_the_version_before_go_once_to_who_can_make_its_lost_task(
    store: Store, tmp_path: Path, left: tuple[int, ...]
) -> None:
    """Rank 2 dies with a task of version 0, which no rank may hold any more in step 1."""
    launcher, controls = store.controls(5)
    note_version(launcher, 1)
    spec = replace(SPEC, gap=1, async_steps=1, stale_fraction=1.0)
    trainer, dying = (Rollout(controls[rank], rank, tmp_path, spec) for rank in (0, 2))
    runner, unused = trainer.runner, cast(Any, None)
    world, engine = World(0, 2, 3), runner._engine
    setup = RankSetup(world, unused, spec, engine, runner._sampler, 1)
    before, now = {"a": torch.zeros(3)}, {"a": torch.ones(3)}
    state = TrainerState(version=1, previous=before, current=now)
    runtime = RankRuntime(
        setup, cast(Any, trainer), unused, state, trainer.control, trainer.post, trainer.spans
    )
    lending = Lending(runtime, runner, unused, unused, unused, unused)
    asked: list[int] = []
    seen: list[None] = []
    see = runner.report_other_ranks
    trainer.plan_tasks = lambda version: asked.append(version) or version_queue(spec, version, 1)  # type: ignore[method-assign, assignment]
    runner.report_other_ranks = lambda: seen.append(None) or see()  # type: ignore[method-assign]
    if left != (4,):  # else it was not looked before
        lending._republish_previous(1)
        assert trainer.post.to == [], "nothing came back"
    dying.runner.claim_task(0)
    for rank in {2, 3, 4} - set(left):
        launcher.mark_lost(rank)
    Claims(StoredClaims(launcher), -1).return_lost_tasks(2, "died", 2)
    lending._republish_previous(1)
    sent = [message.meta["version"] for message in trainer.post.messages()]
    assert set(asked) == {0}
    assert len(seen) == 1
    if not left:
        assert sent == [], "nobody is there; a rank that joins gives another chance"
        assert lending._recalled == 0
        return
    assert sent == [0, 0, 1, 1], "its bucket and its digest, then those of the present version"
    assert set(trainer.post.to) == {left[0]}
    for message, tensors in zip(trainer.post.messages()[::2], (before, now), strict=True):
        assert bytes(message.tensors["data"][:12].numpy()) == tensor_bytes(tensors["a"])
    lending._republish_previous(1)
    assert len(trainer.post.to) == 4, "once"
    state.previous = None
    lending._recalled = 0
    lending._republish_previous(1)
    assert len(trainer.post.to) == 4, "there is no version before"
