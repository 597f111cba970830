"""The design's invariants, one test each, by name. I2 and I3 with unequal shares and dropped
groups: test_scaling."""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from digenrl import parts, run
from digenrl.cluster.world import Session, World
from digenrl.rollout.engine import Generation, RolloutEngine
from digenrl.schedule import ScheduleSpec, Task, group_tasks, group_version, place_fragment
from digenrl.schedule.claims import Claim
from digenrl.schedule.scheduler import Scheduler
from digenrl.schedule.staleness import StalenessError
from digenrl.strategy import tasks
from digenrl.strategy.checkpoint_io import DirectoryCheckpointIO, newest_valid
from digenrl.strategy.lending import Lending
from digenrl.strategy.publishing import Publisher
from digenrl.strategy.tasks import TaskRunner
from digenrl.transport.cells import Part, StepBoard, owned_positions, pack_cells
from digenrl.transport.suspended import Suspended, pack_state
from digenrl.transport.wire import Message, WireError, decode, encode
from digenrl.types import Prompt, Trajectory
from tests.strategy.conftest import EVERYTHING
from tests.strategy.processes import (
    FP64,
    Cluster,
    assert_same_cells,
    completed,
    configured,
    relative,
    run_cluster,
)
from tests.strategy.reference import Reference, reference
from tests.strategy.test_equality import LIGHT, reference_of
from tests.transport.test_wire import reader


@pytest.mark.processes
def test_I1_the_same_seeds_give_the_same_samples_in_every_mode(
    everything: dict[str, Cluster],
) -> None:
    """Samples are the reference's with everything on (colocated: test_alone). Another seed gives
    other samples."""
    found, wanted = everything["full"].record, reference_of(configured(*LIGHT, *EVERYTHING["full"]))
    assert_same_cells(found, wanted)
    assert len(found.gradients) == len(wanted.gradients) == 2
    assert all(torch.equal(found.weights[name], its) for name, its in wanted.weights.items())
    other = reference(configured(*LIGHT, "seed=1", "max_rl_steps=1"))
    assert not any(
        torch.equal(other.cells[key].latents, found.cells[key].latents) for key in other.cells
    )


@pytest.mark.processes
def test_I2_I3_order_and_size_of_fragments_do_not_change_the_gradient(tmp_path: Path) -> None:
    """Fragments of three and one group, over two updates: every cell once, same gradient."""
    words = ("schedule.gap=3", "data.prompts_per_batch=8", "algorithm.updates_per_batch=2")
    config = configured(*LIGHT, *FP64, *words, "sampling.steps=3", "max_rl_steps=1")
    found, wanted = completed(run_cluster(tmp_path, 2, 2, config)), reference(config)
    assert len(found.gradients) == 2
    for mine, theirs in zip(found.gradients, wanted.gradients, strict=True):
        assert relative(mine, theirs) <= 1e-12
    assert found.trained_by.keys() == wanted.cells.keys()
    assert all(len(ranks) == 1 for ranks in found.trained_by.values())


def backwards(rank: run.Rank, world: World) -> None:
    """Groups are generated in reverse order."""
    plan = rank.strategy.plan_tasks
    rank.strategy.plan_tasks = lambda version: plan(version)[::-1]  # type: ignore[method-assign]


def as_they_arrive(rank: run.Rank, world: World) -> None:
    """Groups are generated in reverse order, and trained as soon as they are complete."""
    backwards(rank, world)

    def newest(pending: Sequence[tuple[int, ...]], board: StepBoard) -> tuple[int, ...] | None:
        return next(
            (fragment for fragment in reversed(pending) if board.completed.issuperset(fragment)),
            None,
        )

    rank.strategy.cut_fragment = newest  # type: ignore[method-assign]


@pytest.mark.processes
@pytest.mark.parametrize(
    "change", [pytest.param(backwards, marks=pytest.mark.slow), as_they_arrive]
)
def test_I3_groups_that_arrive_backwards_give_the_same_gradient(
    tmp_path: Path, change: Callable[..., None]
) -> None:
    """Group 0 cannot complete first: three other groups are claimed before it, and only two ranks
    can be late."""
    config = configured(*LIGHT, *FP64, "schedule.gap=1", "max_rl_steps=1")
    cluster = run_cluster(tmp_path, 2, 2, config, after_build=change)
    found, wanted = completed(cluster), reference_of(config)
    (mine,), (theirs,) = found.gradients, wanted.gradients
    assert relative(mine, theirs) <= 1e-12
    assert_same_cells(found, wanted)
    for trainer in (0, 1):
        trained = [
            row["group"]
            for row in sorted(cluster.spans("train"), key=lambda row: row["start"])
            if row["rank"] == trainer
        ]
        assert sorted(trained) == [0, 1, 2, 3]
        assert (trained[0] == 0) == (change is backwards), trained


SPEC = ScheduleSpec(prompts=2, group_size=4, task_size=2, denoise_steps=4, trained_steps=3, gap=1)


def placed(fragment: tuple[int, ...]) -> Any:
    return place_fragment(SPEC, 1, fragment)


def part(task: Task, rewards: Tensor | None = None) -> Part:
    """What a trainer receives of a task."""
    return Part(message(task, Claim(task.index, 1, 0), rewards))


def message(task: Task, claim: Claim, rewards: Tensor | None = None) -> Message:
    """The same, on its way."""
    trajectory = Trajectory(
        step=task.step,
        index=task.index,
        group=task.group,
        uid=1,
        first_sample=task.first_sample,
        version=task.version,
        steps=torch.arange(3),
        sigmas=torch.linspace(1, 0, 5),
        latents=torch.randn(2, 3, 5),
        next_latents=torch.randn(2, 3, 5),
        log_probs=torch.randn(2, 3),
        rewards={
            "r": torch.rand(2) if rewards is None else rewards,
            "logged": torch.full((2,), torch.nan),
        },
        condition={"text": torch.randn(1, 2)},
    )
    positions = owned_positions(SPEC, placed, 0, task.group, task.first_sample // 2, False)
    data = b"".join(
        bytes(buffer) for buffer in encode(pack_cells(trajectory, positions, claim, 0.1))
    )
    return decode(reader(data), 1 << 20)


def test_I4_an_incomplete_or_unscored_group_never_reaches_the_loss() -> None:
    board = StepBoard(SPEC, placed, 0, step=0, reward_weights={"r": 1.0})
    first, second = group_tasks(SPEC, 0, 0)
    board.add_part(part(first))
    board.add_part(part(first))  # the same task again completes nothing
    assert not board.is_complete((0,))
    with pytest.raises(KeyError):
        board.micro_batches((0,))
    board.add_part(part(second))
    assert board.is_complete((0,))
    assert not board.left_out, "a missing reward of weight 0 drops nothing"
    assert {block.weight for batch in board.micro_batches((0,)) for block in batch.blocks} == {1.0}
    assert all(batch.rewards["r"][1].isnan().all() for batch in board.micro_batches((0,))), (
        "group 1 is not there yet"
    )
    third, fourth = group_tasks(SPEC, 0, 1)
    board.add_part(part(third, torch.tensor([0.5, torch.nan])))
    board.add_part(part(fourth))
    assert board.left_out == {1: "missing_reward"}
    batches = board.micro_batches((1,))
    assert len(batches) == len(board.micro_batches((0,))), (
        "a dropped group keeps the number of collectives"
    )
    assert not any(batch.blocks for batch in batches), "and a replica trains none of it"
    assert {batch.denominator for batch in batches} == {2 * 4 * 3.0}


@pytest.mark.processes
def test_I5_steps_in_one_forward_give_the_gradient_of_the_per_step_loop(tmp_path: Path) -> None:
    config = configured(
        *LIGHT,
        *FP64,
        "schedule.tsp.batch=all",
        "schedule.tsp.shard=true",
        "algorithm.kl_weight=0.1",
    )
    found, wanted = completed(run_cluster(tmp_path, 2, 1, config)), reference(config, block_steps=1)
    for mine, theirs in zip(found.gradients, wanted.gradients, strict=True):
        assert relative(mine, theirs) <= 1e-12


@pytest.mark.processes
@pytest.mark.parametrize(
    "corrupted",
    [
        pytest.param(False, id="as-stored", marks=pytest.mark.slow),
        pytest.param(True, id="one-corrupted"),
    ],
)
def test_I5_the_old_log_prob_is_the_one_that_the_rollout_rank_stored(
    tmp_path: Path, corrupted: bool
) -> None:
    """One stored log-prob changed by 1e-3 on its way moves `first_ratio_max_dev` by 1e-3; else it
    is exactly 0."""

    def corrupt(rank: run.Rank, world: World) -> None:
        original = tasks.pack_cells

        def pack_one_wrong(trajectory: Trajectory, *args: Any) -> Message:
            if corrupted and (trajectory.step, trajectory.index) == (0, 3):
                trajectory = replace(trajectory, log_probs=trajectory.log_probs.clone())
                trajectory.log_probs[1, 2] += 1e-3
            return original(trajectory, *args)

        tasks.pack_cells = pack_one_wrong

    config = configured(*LIGHT, "max_rl_steps=1", "algorithm.ratio_bound=1.0")
    completed(run_cluster(tmp_path, 1, 1, config, after_build=corrupt))
    saved = DirectoryCheckpointIO().load_checkpoint(newest_valid(tmp_path / "checkpoints"))
    deviation = saved["algorithm"]["first_ratio_max_dev"]
    assert deviation == pytest.approx(1e-3, rel=0.01) if corrupted else deviation == 0.0


@pytest.mark.processes
def test_I6_lending_leaves_gradients_optimizer_and_rng_bit_identical(tmp_path: Path) -> None:
    """The trainer lends once before a step's first fragment, and later whenever it may, also
    between the two updates of a batch. Nothing of its own moves, and no lent work starts while a
    fragment is ready. The published weights are used, and the run equals its reference. To make
    this happen, the rollout rank holds back the later groups of a step until the trainer has lent
    in an open update. It holds back the last groups until the trainer has lent between updates."""

    def hold_back(rank: run.Rank) -> None:
        advance = rank.strategy.engine.take_step

        def patient(generation: Generation) -> Generation:
            deadline = time.monotonic() + 100.0
            task = generation.task
            wanted = f"{'between' if task.group >= 3 else 'open'}-{task.step}"
            while task.group and not (tmp_path / wanted).exists():
                assert time.monotonic() < deadline, "the trainer did not lend inside an open update"
                time.sleep(0.01)
            return advance(generation)

        rank.strategy.engine.take_step = patient  # type: ignore[method-assign]

    def lend_always(rank: run.Rank, world: World) -> None:
        if not world.is_trainer:
            return hold_back(rank)
        strategy, wait, lend, publish, generate = (
            rank.strategy,
            Lending._wait_for_move,
            Lending._lend_one_task,
            Publisher.publish,
            TaskRunner.generate,
        )
        early: set[int] = set()
        published: dict[str, Tensor] = {}

        def remember(
            publisher: Publisher, version: int, tensors: Mapping[str, Tensor] | None = None
        ) -> None:
            publish(publisher, version, tensors)
            published.update(_weights(rank))

        def with_published_weights(runner: TaskRunner, *words: Any) -> Any:
            now = _weights(rank)
            assert all(torch.equal(now[name], tensor) for name, tensor in published.items()), (
                "unpublished weights"
            )
            return generate(runner, *words)

        def one_then_always(board: StepBoard, pending: list[tuple[int, ...]]) -> int:
            if 0 not in board.completed and board.step in early:
                return 0
            early.add(board.step)
            return 1

        strategy.on_bubble = one_then_always  # type: ignore[method-assign, assignment]
        Scheduler.opens = lambda *_: 0  # type: ignore[method-assign, assignment]

        def waited(
            lending: Lending, board: StepBoard, update: int, pending: list[tuple[int, ...]]
        ) -> Any:
            fragment = wait(lending, board, update, pending)
            assert fragment is not None or strategy.cut_fragment(pending, board) is None, (
                "lent although a fragment was ready"
            )
            return fragment

        def watched(lending: Lending, step: int, update: int) -> None:
            before = _own_state(rank)
            lend(lending, step, update)
            after = _own_state(rank)
            assert before.keys() == after.keys()
            assert all(torch.equal(before[name], after[name]) for name in before)
            accumulated = any(name.startswith("grad/") for name in before)
            moment = (
                "between" if strategy.state.updates_done else "open" if accumulated else "before"
            )
            (tmp_path / f"{moment}-{step}").touch()

        Lending._wait_for_move = waited  # type: ignore[method-assign, assignment]
        Lending._lend_one_task = watched  # type: ignore[method-assign]
        TaskRunner.generate = with_published_weights  # type: ignore[method-assign]
        Publisher.publish = remember  # type: ignore[method-assign]

    words = (
        "schedule.gap=1",
        "schedule.tag=true",
        "algorithm.updates_per_batch=2",
        "algorithm.optimizer.momentum=0.9",
    )
    config = configured(
        *LIGHT, *[f"+{w}" if "momentum" in w else w for w in words], "data.prompts_per_batch=6"
    )
    found = completed(run_cluster(tmp_path, 1, 1, config, after_build=lend_always))
    wanted = reference(config)
    assert_same_cells(found, wanted)
    assert all(torch.equal(found.weights[name], tensor) for name, tensor in wanted.weights.items())
    moments = [
        file.name for pattern in ("between-*", "open-*") for file in sorted(tmp_path.glob(pattern))
    ]
    assert moments == ["between-0", "between-1", "open-0", "open-1"]


def _weights(rank: run.Rank) -> dict[str, Tensor]:
    """Copies of the trained parameters."""
    parameters = rank.module.policy.adapter.trained_parameters()  # type: ignore[union-attr, operator]
    return {f"weight/{name}": parameter.detach().clone() for name, parameter in parameters.items()}


def _own_state(rank: run.Rank) -> dict[str, Tensor]:
    """Everything of a trainer that lending must not touch."""
    parameters = rank.module.policy.adapter.trained_parameters()  # type: ignore[union-attr, operator]
    state = _weights(rank)
    state |= {
        f"grad/{name}": p.grad.clone() for name, p in parameters.items() if p.grad is not None
    }
    for number, slots in enumerate(rank.trainer.optimizers[0].state.values()):
        state |= {
            f"slot/{number}/{name}": v.clone() for name, v in slots.items() if isinstance(v, Tensor)
        }
    state["rng/torch"] = torch.get_rng_state()
    state["rng/python"] = torch.tensor([hash(random.getstate()) & 0xFFFFFFFF])
    return state


@pytest.mark.processes
def test_I7_I8_I9_I10_versions_follow_the_rule_and_nothing_is_lost(
    everything: dict[str, Cluster],
) -> None:
    """One-step asynchrony: one version per trajectory and group, the one fixed by (step, group);
    staleness <= 1."""
    config, cluster = configured(*LIGHT, *EVERYTHING["async"]), everything["async"]
    found, spec = cluster.record, parts.schedule_spec(config, 2, 1)
    versions: dict[tuple[int, int], set[int]] = {}
    for (step, group, _, _), cell in found.cells.items():
        versions.setdefault((step, group), set()).add(cell.version)
    assert all(version == {group_version(spec, *key)} for key, version in versions.items())
    assert {step - version for (step, _), (version,) in versions.items()} == {0, 1}
    finished = [row for row in cluster.spans() if row["stage"] in ("generate", "lend")]
    issued = sum(row["samples"] for row in finished)
    trained = len({key[:3] for key in found.cells})
    assert issued == trained == 3 * 16, (
        "issued = trained + dropped + in flight, with none dropped or in flight"
    )
    assert_same_cells(found, reference_of(config))


@pytest.mark.parametrize("wrong", [-2, -1, 1])
def test_I9_a_group_of_another_version_raises(wrong: int) -> None:
    spec = replace(SPEC, async_steps=1, stale_fraction=0.5)
    board = StepBoard(spec, placed, 0, step=5, reward_weights={"r": 1.0})
    fresh, stale = group_tasks(spec, 5, 1)[0], group_tasks(spec, 5, 0)[0]
    assert (fresh.version, stale.version) == (5, 4)
    board.add_part(part(fresh))
    board.add_part(part(stale))
    other = group_tasks(spec, 5, 1)[1]
    with pytest.raises(StalenessError, match=rf"version {5 + wrong}, the schedule fixed version 5"):
        board.add_part(part(replace(other, version=5 + wrong)))


@pytest.fixture(scope="module")
def engine() -> RolloutEngine:
    config = configured(*LIGHT)
    reference = Reference(config)
    module = config.build("algorithm", policy=reference.policy)
    return RolloutEngine(
        reference.policy,
        reference.rewards,
        module.sde,
        module.train_steps,
        parts.sampling_spec(config),
        config.seed,
    )


PROMPT = Prompt("number seven", target="7")
TASK = Task(step=2, index=1, group=0, first_sample=2, samples=2, version=2)
CLAIM = Claim(position=1, rank=3, attempt=1)


def generated(
    engine: RolloutEngine, between: Callable[[Generation], Generation] = lambda g: g
) -> Generation:
    generation = engine.begin_task(TASK, PROMPT)
    while engine.steps_left(generation):
        generation = between(engine.take_step(generation))
    return generation


def assert_equal_states(a: Generation, b: Generation) -> None:
    for name in ("kept_latents", "kept_next_latents", "kept_log_probs"):
        assert all(
            torch.equal(x, y)
            for x, y in zip(getattr(a.state, name), getattr(b.state, name), strict=True)
        )
    assert torch.equal(a.state.latents, b.state.latents)


def test_I11_a_sample_depends_on_its_key_alone(engine: RolloutEngine) -> None:
    """Not on global generators, nor on what was generated before."""
    torch.manual_seed(1)
    one = generated(engine)
    torch.manual_seed(2)
    random.seed(3)
    engine.take_step(engine.begin_task(replace(TASK, step=7, first_sample=0), PROMPT))
    state = torch.get_rng_state()
    two = generated(engine)
    assert_equal_states(one, two)
    assert torch.equal(torch.get_rng_state(), state), "sampling drew from the global generator"
    other = engine.begin_task(replace(TASK, first_sample=0), PROMPT)
    assert not torch.equal(other.state.latents, engine.begin_task(TASK, PROMPT).state.latents)


def test_I12_a_trajectory_suspended_at_every_step_is_the_same(engine: RolloutEngine) -> None:
    """Through the wire format after each denoising step."""

    def travel(generation: Generation) -> Generation:
        data = b"".join(
            bytes(buffer) for buffer in encode(pack_state(generation.task, generation.state, CLAIM))
        )
        suspended = Suspended.from_message(decode(reader(data), 1 << 20), CLAIM.rank)
        assert (suspended.task, suspended.claim) == (TASK, CLAIM)
        return Generation(suspended.task, PROMPT, suspended.restore_state(torch.device("cpu")))

    assert_equal_states(generated(engine), generated(engine, travel))
    message = pack_state(TASK, engine.begin_task(TASK, PROMPT).state, CLAIM)
    with pytest.raises(WireError, match="lacks or garbles"):
        Suspended.from_message(replace(message, meta={"task": {"step": 1}}), 0)
    with pytest.raises(WireError, match="lacks or garbles"):
        Suspended.from_message(replace(message, tensors={}), 0).restore_state(torch.device("cpu"))


@pytest.mark.processes
@pytest.mark.parametrize("sharding", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_nothing_between_roles_is_pickled(tmp_path: Path, sharding: str) -> None:
    """A whole run, checkpoint and resume included, with every way to load a pickle broken in every
    rank. Only trainers keep the one by which Lightning tells its other ranks a path, inside their
    own process group."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something was unpickled")

    def break_pickle(world: World, session: Session) -> None:
        pickle.loads = pickle.load = pickle.Unpickler = refuse  # type: ignore[assignment, misc]
        ForkingPickler.loads = refuse  # bound at import, like the next
        if not world.is_trainer:
            distributed_c10d._unpickler = refuse
            tensor, size = distributed_c10d._object_to_tensor("anything", torch.device("cpu"), None)
            with pytest.raises(AssertionError, match="unpickled"):
                distributed_c10d._tensor_to_object(tensor, size, None)

    def own_group_alone(rank: run.Rank, world: World) -> None:
        setup = rank.strategy.setup_distributed

        def checked() -> None:
            setup()
            assert dist.get_world_size() == (2 if world.is_trainer else 1), (
                "a process group with another role"
            )

        rank.strategy.setup_distributed = checked  # type: ignore[method-assign]

    def run_it(*words: str, resume: bool = False) -> None:
        config = configured(
            "algorithm.kl_weight=0",
            "data.prompts_per_batch=2",
            LIGHT[-2],  # a small LoRA
            "schedule=full",
            f"parallel.sharding={sharding}",
            *words,
        )
        completed(
            run_cluster(
                tmp_path, 2, 1, config, resume, before=break_pickle, after_build=own_group_alone
            )
        )

    run_it("callbacks.checkpoint.every=1", "max_rl_steps=1")
    run_it("max_rl_steps=2", resume=True)
