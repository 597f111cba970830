"""Record and replay trajectories (`record.trajectories`, `replay`).

Trainers write the messages that they train on. Another run reads them in the order in which they
came, and generates nothing. Replaying the scheduling *decisions* of a run is a different feature
(`digenrl.schedule.policy`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from digenrl.data import PromptSampler
from digenrl.extensions.records.trajectories import Recorded, TrajectoryError, TrajectoryFiles
from digenrl.record.span_log import SpanLog
from digenrl.schedule import ScheduleSpec, place
from digenrl.schedule.claims import Claim
from digenrl.strategy.shared import Hooks
from digenrl.strategy.stream import Inbox, TrajectoryRecord
from digenrl.transport.cells import Part, StepBoard, joined, owned_positions, pack
from digenrl.transport.wire import Message, MessageKind, decode, encode
from digenrl.types import CellBlock, Trajectory

Fragment = tuple[int, ...]


class Recording(TrajectoryRecord):
    """A record that writes the messages of a trainer into `files`."""

    def __init__(self, files: TrajectoryFiles) -> None:
        self._files = files
        self._facts: dict[str, object] = {}

    def take(self, step: int, message: Message) -> None:
        """Write a message that is trained in RL step `step`."""
        self._facts["rewards"] = message.meta["reward_names"]
        for name in ("means", "final"):
            self._facts[name] = bool(self._facts.get(name)) or name in message.tensors
        self._files.take(step, encode(message))

    def keep_base_means(self, block: CellBlock, means: Tensor) -> None:
        """Write the base model's transition means [b, K, *L] of a block's cells."""
        cells = {
            "group": block.group,
            "first_sample": block.first_sample,
            "steps": block.steps.tolist(),
        }
        self._files.take(
            block.step, encode(Message(MessageKind.BASE_MEANS, cells, {"base_means": means.cpu()}))
        )

    def finish(self, step: int) -> None:
        """Complete the record of RL step `step`, after it was trained."""
        self._files.finish(step, self._facts)

    def close(self) -> None:
        """Keep finished steps only."""
        self._files.close()


class RecordedSource:
    """Source of fragments that come from a record instead of from ranks that generate.

    Every trainer reads the files of all recorded trainers, so the number of trainers and the
    placement of cells may differ from the recorded run. Tasks keep the order in which they came to
    trainer 0.

    Args:
        hooks: hooks of the Strategy, of which `cut_fragment` is used.
    """

    def __init__(
        self, recorded: Recorded, inbox: Inbox, hooks: Hooks, sampler: PromptSampler, spans: SpanLog
    ) -> None:
        self._recorded, self._inbox, self._cut_fragment = recorded, inbox, hooks.cut_fragment
        self._sampler, self._spans = sampler, spans

    def predicted_end(self, step: int) -> None:
        """Do nothing: without generation there is nothing to predict."""

    def next_fragment(self, board: StepBoard, update: int, pending: Sequence[Fragment]) -> Fragment:
        """Return the next fragment, as `stream.FragmentSource` asks.

        Raises:
            TrajectoryError: the record is damaged, or belongs to another schedule or other prompts.
        """
        fragment = self._cut_fragment(pending, board)
        if fragment is None and not board.completed:
            with self._spans.span("wait", cause="first_fragment", step=board.step):
                self._fill(board.step)
            fragment = self._cut_fragment(pending, board)
        if fragment is None:
            raise TrajectoryError(
                f"replay: the record of RL step {board.step} lacks groups of {pending[0]}."
            )
        return fragment

    def _fill(self, step: int) -> None:
        prompts = self._sampler.batch(step)
        by_rank: list[dict[tuple[int, int], Message]] = []
        base: dict[tuple[int, int], dict[int, Tensor]] = {}
        for rank in range(len(self._recorded.ranks)):
            by_rank.append({})
            for message in self._messages(rank, step):
                task = message.meta["group"], message.meta["first_sample"]
                if message.kind is MessageKind.CELLS:
                    by_rank[-1][task] = message
                else:
                    means = message.tensors["base_means"].unbind(1)
                    base.setdefault(task, {}).update(zip(message.meta["steps"], means, strict=True))
        whole = {task: joined([messages[task] for messages in by_rank]) for task in by_rank[0]}
        for task, message in _with_base_means(whole, base).items():
            part = Part(message)
            if part.meta["uid"] != prompts[task[0]].uid:
                raise TrajectoryError(
                    f"data.prompts: group {task[0]} of RL step {step} was recorded with another "
                    "prompt than "
                    f"{prompts[task[0]].text!r}; give the prompt file of the recorded run."
                )
            self._inbox.add(part)

    def _messages(self, rank: int, step: int) -> Iterator[Message]:
        data, at = self._recorded.read(rank, step), 0

        def read(buffer: memoryview) -> None:
            nonlocal at
            buffer[:] = data[at : at + len(buffer)]
            at += len(buffer)

        while at < len(data):
            yield decode(read, len(data))


def _with_base_means(
    tasks: Mapping[tuple[int, int], Message], base: Mapping[tuple[int, int], Mapping[int, Tensor]]
) -> Mapping[tuple[int, int], Message]:
    """Return the messages with the base model's means [b, *L] of their steps, if `base` has all of
    them.

    If one is missing, no message gets means: sharded trainers must agree on whether to compute the
    base model.
    """
    found = {}
    for task, message in tasks.items():
        known, rows = base.get(task, {}), len(message.tensors["log_probs"])
        means = [known[step] for step in message.tensors["steps"].tolist() if step in known]
        if [len(mean) for mean in means] != [rows] * len(message.tensors["steps"]):
            return tasks
        found[task] = replace(
            message, tensors={**message.tensors, "base_means": torch.stack(means, dim=1)}
        )
    return found


def step_bytes(
    spec: ScheduleSpec, trainers: int, lockstep: bool, outline: Trajectory, base: Tensor | None
) -> int:
    """Return the bytes that all trainers record in an RL step.

    Args:
        lockstep: whether trainers meet in every forward.
        outline: a trajectory with the shapes of a task.
        base: the base model's means for one cell; None if they are not recorded.
    """

    def size(rank: int, part: int) -> int:
        positions = owned_positions(spec, partial(place, spec, trainers), rank, 0, part, lockstep)
        return sum(
            tensor.nbytes
            for tensor in pack(outline, positions, Claim(0, 0, 0), 0.0).tensors.values()
        )

    cells = 0 if base is None else spec.prompts * spec.group_size * spec.trained_steps * base.nbytes
    sizes = (size(rank, part) for rank in range(trainers) for part in range(spec.tasks_per_group))
    return spec.prompts * sum(sizes) + cells
