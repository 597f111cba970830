"""Trajectories as messages, and their assembly into complete groups and micro-batches on a trainer
rank.

    rollout rank                          each trainer rank r
    Trajectory -- pack_cells(positions of r) -- CELLS message --> Part -- StepBoard.add_part --> complete groups
                                                                                                      |
                                                                StepBoard.micro_batches(fragment) --> TrainBatch, ...

Every trainer gets the rewards of every task, and the cells that it owns. A fragment waits until all
tasks of its groups have arrived. The last `add_part` completes it.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from digenrl.schedule import Placement, ScheduleSpec, group_version, update_fragments, update_of
from digenrl.schedule.claims import Claim
from digenrl.schedule.selection import (
    MISSING_REWARD,
    SURPLUS,
    ZERO_VARIANCE,
    decided_groups,
    left_out,
    update_groups,
)
from digenrl.schedule.staleness import StalenessError
from digenrl.schedule.timesteps import without_useless_tasks
from digenrl.transport.wire import Message, MessageKind, WireError
from digenrl.types import CellBlock, TrainBatch, Trajectory

_FIELDS = ("step", "index", "group", "uid", "first_sample", "version")

Place = Callable[[tuple[int, ...]], Placement]
"""The Strategy's `place_timesteps`: fragment -> placement."""
Useful = Callable[[Mapping[str, Tensor]], Tensor]
"""Rewards of the logical batch, [P, G] each -> [P, G] bool: samples whose cells can have a
gradient."""
Teaches = Callable[[Mapping[str, Tensor]], Tensor]
"""The same -> [P] bool: groups whose samples do not all score alike."""


def owned_positions(
    spec: ScheduleSpec, place: Place, rank: int, group: int, part: int, lockstep: bool
) -> tuple[int, ...]:
    """Return the positions (0..S-1) among a task's trained steps that trainer `rank` needs, because
    it trains them.

    A sharded rank without cells of a fragment still needs the fragment's first cell, for the
    forwards that it must join.

    Example:
        Two trainers divide four trained steps. In group 1 the second trainer gets the first half:

        >>> from digenrl.schedule.timesteps import place_fragment
        >>> spec = ScheduleSpec(prompts=4, group_size=8, task_size=4, denoise_steps=10,
        ...                     trained_steps=4, gap=1, tsp_batch=2, tsp_shard=True)
        >>> place = lambda fragment: place_fragment(spec, 2, fragment)
        >>> [owned_positions(spec, place, rank, group=1, part=0, lockstep=False) for rank in (0, 1)]
        [(2, 3), (0, 1)]
    """
    portion = spec.portion_of(group, part)
    fragment = next(f for f in update_fragments(spec, update_of(spec, portion)) if portion in f)
    own = [block for blocks in place(fragment)[rank] for block in blocks]
    mine = {position for b in own if (b.group, b.part) == (group, part) for position in b.steps}
    if lockstep and not own and portion == fragment[0] and part == spec.parts_of(portion)[0]:
        mine.add(0)
    return tuple(sorted(mine))


def pack_cells(
    trajectory: Trajectory, positions: Sequence[int], claim: Claim, seconds: float
) -> Message:
    """Return the message with one trainer rank's part of a trajectory: all rewards, and the cells
    at `positions`.

    The message also carries the claim under which the trajectory was generated, and the seconds
    that took. The trainers' cost estimates use the seconds.
    """
    meta = {name: getattr(trajectory, name) for name in _FIELDS} | {
        "positions": list(positions),
        "reward_names": list(trajectory.rewards),
        "maker": claim.rank,
        "queued": claim.position,
        "attempt": claim.attempt,
        "seconds": seconds,
    }

    def at_positions(tensor: Tensor) -> Tensor:
        """Return [b, S, ...] -> [b, len(positions), ...], without a copy if `positions` are all of
        S."""
        every = list(positions) == list(range(tensor.shape[1]))
        return tensor if every else tensor[:, list(positions)]

    tensors: dict[str, Tensor] = {
        f"rewards/{name}": value for name, value in trajectory.rewards.items()
    }
    # A rank without cells of this task gets the rewards alone.
    if positions:
        tensors |= {
            "steps": trajectory.steps[list(positions)],  # [K]
            "sigmas": trajectory.sigmas,  # [T + 1]
            "latents": at_positions(trajectory.latents),  # [b, K, *L]
            "next_latents": at_positions(trajectory.next_latents),
            "log_probs": at_positions(trajectory.log_probs),  # [b, K]
        }
        tensors |= {f"condition/{name}": value for name, value in trajectory.condition.items()}
        if trajectory.final is not None:
            tensors["final"] = trajectory.final
        if trajectory.means is not None:
            tensors["means"] = at_positions(trajectory.means)
    return Message(MessageKind.CELLS, meta, tensors)


class Part:
    """What a trainer rank holds of a task."""

    def __init__(self, message: Message) -> None:
        try:
            self.meta: dict[str, Any] = {name: int(message.meta[name]) for name in _FIELDS}
            self.claim = Claim(
                int(message.meta["queued"]),
                int(message.meta["maker"]),
                int(message.meta["attempt"]),
            )
            self.seconds = float(message.meta["seconds"])
            self.positions = [int(p) for p in message.meta["positions"]]
            self.rewards = {
                str(name): message.tensors[f"rewards/{name}"]
                for name in message.meta["reward_names"]
            }
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"a CELLS message lacks or garbles {error}.") from error
        self._tensors = message.tensors

    def cell_block(self, steps: Sequence[int]) -> CellBlock:
        """Return the cells at `steps` (positions among the trained steps), which must have been
        sent to this rank."""
        # `steps` counts all trained steps, `index` those that were sent to this rank.
        index = torch.tensor([self.positions.index(position) for position in steps])
        t = self._tensors
        return CellBlock(
            **{name: value for name, value in self.meta.items() if name != "index"},
            steps=t["steps"][index],
            sigmas=t["sigmas"],
            latents=t["latents"][:, index],
            next_latents=t["next_latents"][:, index],
            log_probs=t["log_probs"][:, index],
            condition={
                name.removeprefix("condition/"): t[name]
                for name in t
                if name.startswith("condition/")
            },
            final=t.get("final"),
            means=t["means"][:, index] if "means" in t else None,
        )


class StepBoard:
    """One RL step on one trainer rank: complete groups, their rewards, their cells.

    I4: a group is released only after every task of it has arrived with rewards. With
    `data.oversample` it must also be known whether the group is trained. A group without an
    optimised reward is dropped. All ranks see all rewards, so all leave out the same groups, and
    the same cells that cannot have a gradient.

    Args:
        teaches: tells which complete groups teach something, if the others are left out; None: all
            (`schedule.selection`).
        useful: tells which samples of complete groups can have a gradient; None: all.
        lockstep: weights or tokens are shared. Every forward is then a collective, and all ranks
            must run equally many. A rank with fewer blocks in a micro-batch is padded with a cell
            of weight zero. Other ranks compute what they own.
        neighbours: ranks that share one copy of the weights or the tokens; 0 means all trainers.
            When gradients are reduced, all ranks have run the same number of forwards.
    """

    def __init__(
        self,
        spec: ScheduleSpec,
        place: Place,
        rank: int,
        step: int,
        reward_weights: Mapping[str, float],
        useful: Useful | None = None,
        lockstep: bool = False,
        teaches: Teaches | None = None,
        neighbours: int = 0,
    ) -> None:
        self._spec, self._place, self._rank, self.step, self._lockstep = (
            spec,
            place,
            rank,
            step,
            lockstep,
        )
        self._neighbours = neighbours
        self._useful, self._teaches = useful, teaches
        self._weights = dict(reward_weights)
        self._parts: dict[tuple[int, int], Part] = {}
        self.rewards: dict[str, Tensor] = {}  # name -> [P, G]
        self.completed: set[int] = set()
        """Complete groups that are known to be trained, or known to be left out."""
        self.left_out: dict[int, str] = {}
        """Group of `completed` that is not trained -> the reason (`schedule.selection`)."""
        self._faults: dict[int, str | None] = {}
        """Complete group -> the reason why it teaches nothing, or None."""

    def add_part(self, part: Part) -> bool:
        """Take in the part of a task, and return whether the part was new.

        A second delivery of a task is ignored, because a task that was issued again gives the same
        samples.

        Raises:
            StalenessError: the part was generated by another version than its group's.
        """
        expected = group_version(self._spec, self.step, part.meta["group"])
        if part.meta["version"] != expected:
            raise StalenessError(
                f"group {part.meta['group']} of step {self.step} was generated by version "
                f"{part.meta['version']}, the schedule fixed version {expected}."
            )
        group, index = part.meta["group"], part.meta["first_sample"] // self._spec.task_size
        if (group, index) in self._parts:
            return False
        self._parts[group, index] = part
        rows = slice(part.meta["first_sample"], part.meta["first_sample"] + self._spec.task_size)
        for name, values in part.rewards.items():
            # NaN marks a reward that has not arrived.
            table = self.rewards.setdefault(
                name, torch.full((self._spec.prompts, self._spec.group_size), torch.nan)
            )
            table[group, rows] = values
        if all((group, i) in self._parts for i in range(self._spec.tasks_per_group)):
            self._faults[group] = self._group_fault(group)
            # With spare groups, one more complete group may decide about others that waited for it.
            for known in decided_groups(self._spec, self._faults):
                if known not in self.completed:
                    self.completed.add(known)
                    if (reason := left_out(self._spec, self._faults, known)) is not None:
                        self.left_out[known] = reason
        return True

    def _group_fault(self, group: int) -> str | None:
        if any(not torch.isfinite(self.rewards[name][group]).all() for name in self._weights):
            return MISSING_REWARD
        teaches = self._teaches is None or self._teaches(self.rewards)[group]
        return None if teaches else ZERO_VARIANCE

    def is_complete(self, fragment: tuple[int, ...]) -> bool:
        """Return whether every group of the fragment has arrived, is scored, and is known to be
        trained or not."""
        return self.completed.issuperset(self._spec.groups_of(fragment))

    def trains_fragment(self, fragment: tuple[int, ...]) -> bool:
        """Return whether this rank takes part in training the fragment."""
        return self._lockstep or any(self._place(fragment)[self._rank])

    def useful_samples(self, fragment: tuple[int, ...]) -> Tensor:
        """Return which samples are trained: [portions of the complete fragment, samples of a
        portion] bool."""
        useful = torch.ones(self._spec.prompts, self._spec.group_size, dtype=torch.bool)
        if self._useful is not None:
            useful &= self._useful(self._counted_rewards())
        useful[list(self.left_out)] = False
        return self.of_fragment(useful, fragment)

    def of_fragment(self, table: Tensor, fragment: tuple[int, ...]) -> Tensor:
        """Return a fragment's rows of a table: [P, G] -> [portions of the fragment, samples of a
        portion]."""
        # [P, G] -> [groups, slices, G / slices]. A fragment lies within one update, so within one
        # slice.
        portions = table[self._spec.groups_of(fragment)].unflatten(1, (self._spec.slices, -1))
        return portions[:, fragment[0] // self._spec.prompts]

    def micro_batches(self, fragment: tuple[int, ...], last: bool = False) -> list[TrainBatch]:
        """Return this rank's micro-batches of a complete fragment.

        After the `last` fragment of an update sharded trainers reduce their gradients, so each of
        them must run a forward.
        """
        spec = self._spec
        keep: dict[tuple[int, int], Tensor] = {}
        for portion, group, useful in zip(
            fragment, spec.groups_of(fragment), self.useful_samples(fragment), strict=True
        ):
            parts = zip(spec.parts_of(portion), useful.split(spec.task_size), strict=True)
            keep |= {(group, part): rows for part, rows in parts}
        # All ranks see all rewards, so all leave the same tasks out.
        placement = without_useless_tasks(
            self._place(fragment), frozenset(task for task, rows in keep.items() if not rows.any())
        )
        widths = [0] * len(placement[0])
        if self._lockstep:
            count = self._neighbours or len(placement)
            # First rank of this rank's group of neighbours.
            begin = self._rank - self._rank % count
            # As many forwards as the neighbour with the most blocks: each forward is a collective.
            widths = [
                max(map(len, ranks))
                for ranks in zip(*placement[begin : begin + count], strict=True)
            ]
            if last:
                # Gradients are reduced in the last micro-batch, so ranks without cells run a padded
                # forward.
                widths[-1] = max(1, *(len(own[-1]) for own in placement))
        batches = []
        for blocks, width in zip(placement[self._rank], widths, strict=True):
            tasks = [((block.group, block.part), block.steps) for block in blocks]
            cells = [
                self._parts[task].cell_block(steps).select_rows(keep[task]) for task, steps in tasks
            ]
            cells += [self._padding_block(fragment) for _ in range(width - len(cells))]
            batches.append(self._train_batch(fragment, cells))
        return batches

    def gradient_scale(self, update: int) -> float:
        """Return the factor for the gradient of a complete update.

        With `data.zero_variance_groups=drop` some groups leave the loss's denominator. They are
        known only when all groups of the update have been trained.
        """
        trained = sum(group not in self.left_out for group in update_groups(self._spec, update))
        dropped = self._spec.zero_variance_groups == "drop"
        # Each loss term was divided by all places, and only `trained` of them count.
        return self._spec.places / trained if trained and dropped else 1.0

    def made_under(self, fragment: tuple[int, ...]) -> list[tuple[int, Claim]]:
        """Return (version, claim) of every task that makes the fragment complete here."""
        # Otherwise the fragment had to wait for other groups too.
        alone = self._spec.gap > 0 and not self._spec.selects
        groups = set(self._spec.groups_of(fragment)) if alone else range(self._spec.prompts)
        return [
            (part.meta["version"], part.claim)
            for (group, _), part in self._parts.items()
            if group in groups
        ]

    def fragment_versions(self, fragment: tuple[int, ...]) -> set[int]:
        """Return the weight versions that generated the fragment."""
        groups = self._spec.groups_of(fragment)
        return {part.meta["version"] for (group, _), part in self._parts.items() if group in groups}

    def _train_batch(self, fragment: tuple[int, ...], blocks: list[CellBlock]) -> TrainBatch:
        return TrainBatch(
            blocks=tuple(blocks),
            rewards=self._counted_rewards(),
            reward_weights=self._weights,
            denominator=float(self._spec.cells_per_update),
            update=update_of(self._spec, fragment[0]),
            version=self.step,
        )

    def _counted_rewards(self) -> dict[str, Tensor]:
        """Return the rewards so far, NaN for groups that are surplus."""
        surplus = [group for group, reason in self.left_out.items() if reason == SURPLUS]
        return {
            name: table.index_fill(0, torch.tensor(surplus, dtype=torch.int64), torch.nan)
            for name, table in self.rewards.items()
        }

    def _padding_block(self, fragment: tuple[int, ...]) -> CellBlock:
        """Return the smallest block that this rank holds of a fragment, at weight zero."""
        held = sorted(key for key in self._parts if self._spec.portion_of(*key) in fragment)
        part = next(self._parts[key] for key in held if self._parts[key].positions)
        return replace(part.cell_block(part.positions[:1]), weight=0.0)
