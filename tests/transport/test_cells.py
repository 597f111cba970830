"""Tasks on their way to a trainer: the cells that it trains, bit for bit, and the rewards of all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from digenrl.schedule import ScheduleSpec, Task, group_tasks, place_fragment, update_fragments
from digenrl.schedule.claims import Claim
from digenrl.schedule.timesteps import Block
from digenrl.transport.cells import Part, StepBoard, owned_positions, pack_cells
from digenrl.types import Trajectory

SPEC = ScheduleSpec(prompts=4, group_size=4, task_size=2, denoise_steps=4, trained_steps=3)
CLAIM = Claim(position=5, rank=1, attempt=2)


def trajectory(task: Task, reward: float = 0.5, more: bool = False) -> Trajectory:
    """Every number of it is another one; means and clean latents if there is `more`."""
    count = iter(range(1, 9))

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(next(count)))

    return Trajectory(
        step=task.step,
        index=task.index,
        group=task.group,
        uid=70 + task.group,
        first_sample=task.first_sample,
        version=task.version,
        steps=torch.tensor([0, 1, 3]),
        sigmas=torch.linspace(1, 0, 5),
        latents=numbers(2, 3, 5),
        next_latents=numbers(2, 3, 5),
        log_probs=numbers(2, 3),
        rewards={"r": torch.full((2,), reward), "logged": numbers(2)},
        condition={"text": numbers(1, 2), "negative_text": numbers(1, 2)},
        final=numbers(2, 5) if more else None,
        means=numbers(2, 3, 5) if more else None,
    )


def board_of(spec: ScheduleSpec, scores: list[float], **options: Any) -> StepBoard:
    """The board of the first of one trainer, on which group g scores `scores[g]`."""
    board = StepBoard(spec, lambda f: place_fragment(spec, 1, f), 0, 0, {"r": 1.0}, **options)
    for group, score in enumerate(scores):
        for task in group_tasks(spec, 0, group):
            board.add_part(Part(pack_cells(trajectory(task, score), (0, 1, 2), CLAIM, 0.5)))
    return board


def test_each_trainer_is_sent_what_it_trains_of_each_task() -> None:
    blocks = Block(0, 0, (0, 2)), Block(0, 1, (1,)), Block(1, 0, (1,)), Block(1, 1, (0, 1, 2))

    def placed(fragment: tuple[int, ...]) -> Any:
        return ((blocks[0],), (blocks[3],)), ((blocks[1],), (blocks[2],))

    tasks = [(0, 0), (0, 1), (1, 0), (1, 1)]
    found = [[owned_positions(SPEC, placed, rank, *at, False) for at in tasks] for rank in (0, 1)]
    assert found == [[(0, 2), (), (), (0, 1, 2)], [(), (1,), (1,), ()]]


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("positions", [(0, 2), (1,), (0, 1, 2)])
def test_cells_arrive_as_they_were_generated(positions: tuple[int, ...], more: bool) -> None:
    (_, task), made = group_tasks(SPEC, 0, 2), None
    made = trajectory(task, more=more)
    message = pack_cells(made, positions, CLAIM, 0.5)
    part = Part(message)
    assert (part.claim, part.seconds, part.positions) == (CLAIM, 0.5, list(positions))
    assert all(torch.equal(part.rewards[name], made.rewards[name]) for name in ("r", "logged"))
    for position in positions:
        block, at = part.cell_block((position,)), slice(position, position + 1)
        assert (block.step, block.group, block.uid, block.first_sample, block.version) == (
            0, 2, 72, 2, 0,
        )  # fmt: skip
        assert torch.equal(block.steps, made.steps[at])
        assert torch.equal(block.sigmas, made.sigmas)
        for name in ("latents", "next_latents", "log_probs", *(("means",) if more else ())):
            assert torch.equal(getattr(block, name), getattr(made, name)[:, at]), name
        assert block.condition.keys() == made.condition.keys()
        assert all(torch.equal(block.condition[name], its) for name, its in made.condition.items())
        assert torch.equal(block.final, made.final) if more else block.final is block.means is None
    uncopied = message.tensors["latents"].data_ptr() == made.latents.data_ptr()
    assert uncopied == (len(positions) == 3)
    assert message.tensors["log_probs"].shape == (2, len(positions)), "no more than is trained"


def test_a_trainer_without_cells_of_a_task_is_sent_the_rewards_alone() -> None:
    (task, _) = group_tasks(SPEC, 0, 0)
    assert list(pack_cells(trajectory(task), (), CLAIM, 0.5).tensors) == [
        "rewards/r",
        "rewards/logged",
    ]


def differ(rewards: Any) -> Tensor:
    return rewards["r"][:, 0] > 0.25


@pytest.mark.parametrize("oversample", [0, 2])
def test_groups_that_teach_nothing_and_those_beyond_the_places_are_left_out(
    oversample: int,
) -> None:
    spec = replace(SPEC, oversample=oversample, zero_variance_groups="drop")
    board = board_of(spec, [0.0, 1.0, 2.0, 3.0], teaches=differ)
    surplus = {3: "surplus"} if oversample else {}
    assert board.left_out == {0: "zero_variance", **surplus}
    fragment = (0, 1, 2, 3)
    assert board.is_complete(fragment)
    trained = [1, 2] if oversample else [1, 2, 3]
    assert board.useful_samples(fragment).all(dim=1).tolist() == [n in trained for n in range(4)]
    batches = board.micro_batches(fragment, last=True)
    assert sorted({b.group for batch in batches for b in batch.blocks}) == trained
    for batch in batches:
        rows = batch.rewards["r"]
        assert rows.isnan().any(dim=1).tolist() == [n in surplus for n in range(4)]
        assert rows[1].tolist() == [1.0] * 4
    assert board.gradient_scale(0) == (1.0 if oversample else 4 / 3)


def test_samples_without_a_gradient_are_told_from_the_rewards_that_count() -> None:
    """Each portion of a group keeps the samples of its own tasks, also in the second update."""
    spec = replace(SPEC, gap=2, updates_per_batch=2, updates_split="samples")
    asked: list[Tensor] = []

    def useful(rewards: Any) -> Tensor:
        asked.append(rewards["r"])
        table = torch.zeros(4, 4, dtype=torch.bool)
        table[1, 0] = table[2, 3] = table[3] = True
        return table

    board = board_of(spec, [0.0, 1.0, 2.0, 3.0], useful=useful)
    found = {
        (update, block.group): block.numbers
        for update in (0, 1)
        for fragment in update_fragments(spec, update)
        for batch in board.micro_batches(fragment, last=False)
        for block in batch.blocks
        if block.steps.tolist() == [0]
    }
    assert found == {(0, 1): (0,), (0, 3): (0, 1), (1, 2): (3,), (1, 3): (2, 3)}
    assert [rows[:, 0].tolist() for rows in asked] == [[0.0, 1.0, 2.0, 3.0]] * 4


def test_a_rank_that_only_joins_in_runs_one_step_of_one_task() -> None:
    def placed(fragment: tuple[int, ...]) -> Any:
        return ((Block(0, 0, (0, 1, 2)),),), ((),)

    board = StepBoard(SPEC, placed, 1, 0, {"r": 1.0}, lockstep=True)
    for task in group_tasks(SPEC, 0, 0):
        board.add_part(Part(pack_cells(trajectory(task), (0, 1, 2), CLAIM, 0.5)))
    ((batch),) = board.micro_batches((0,), last=False)
    (block,) = batch.blocks
    assert (block.steps.tolist(), block.latents.shape, block.weight) == ([0], (2, 1, 5), 0.0)
