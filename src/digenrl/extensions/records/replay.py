"""`record.trajectories` and `replay`: trainers write the messages that they train on, and another run reads them in the
order in which they came, in place of generating anything.

(That a run's scheduling *decisions* can be given again from its record is another thing: `digenrl.schedule.policy`.)
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
from digenrl.strategy.hooks import Hooks
from digenrl.strategy.stream import Inbox
from digenrl.transport.cells import Part, StepBoard, joined, owned_positions, pack
from digenrl.transport.wire import Message, MessageKind, decode, encode
from digenrl.types import CellBlock, Trajectory

Fragment = tuple[int, ...]


class Recording:
    """Writes the messages of a trainer into `files`: a `digenrl.strategy.stream.TrajectoryRecord`."""

    def __init__(self, files: TrajectoryFiles) -> None:
        self._files = files
        self._facts: dict[str, object] = {}

    def take(self, step: int, message: Message) -> None:
        """Write a message of RL step `step` that counts."""
        self._facts["rewards"] = message.meta["reward_names"]
        for name in ("means", "final"):
            self._facts[name] = bool(self._facts.get(name)) or name in message.tensors
        self._files.take(step, encode(message))

    def keep_base_means(self, block: CellBlock, means: Tensor) -> None:
        """Write the base model's transition means [b, K, *L] of a block's cells."""
        cells = {"group": block.group, "first_sample": block.first_sample, "steps": block.steps.tolist()}
        self._files.take(block.step, encode(Message(MessageKind.BASE_MEANS, cells, {"base_means": means.cpu()})))

    def finish(self, step: int) -> None:
        """Complete the record of RL step `step`, which is trained."""
        self._files.finish(step, self._facts)

    def close(self) -> None:
        """Keep finished steps alone."""
        self._files.close()


class Replay:
    """Fragments of a record, where `Lending` waits for those that ranks generate.

    Every trainer reads what all recorded ones got, so that their number and the placement of cells may differ, and
    takes the tasks in the order in which they came to trainer 0.

    Args:
        hooks: the Strategy's; `cut_fragment` is used.
    """

    def __init__(self, recorded: Recorded, inbox: Inbox, hooks: Hooks, sampler: PromptSampler, spans: SpanLog) -> None:
        self._recorded, self._inbox, self._cut_fragment = recorded, inbox, hooks.cut_fragment
        self._sampler, self._spans = sampler, spans

    def predicted_end(self, step: int) -> None:
        """Nobody generates, so nothing is predicted."""

    def next_fragment(self, board: StepBoard, update: int, pending: Sequence[Fragment]) -> Fragment:
        """As of `stream.FragmentSource`.

        Raises:
            TrajectoryError: the record is damaged, or is not of this schedule and these prompts.
        """
        fragment = self._cut_fragment(pending, board)
        if fragment is None and not board.completed:
            with self._spans.span("wait", cause="first_fragment", step=board.step):
                self._fill(board.step)
            fragment = self._cut_fragment(pending, board)
        if fragment is None:
            raise TrajectoryError(f"replay: the record of RL step {board.step} lacks groups of {pending[0]}.")
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
                    f"data.prompts: group {task[0]} of RL step {step} was recorded with another prompt than "
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
    """The messages with the means [b, *L] that `base` has of their steps, if it has all: sharded trainers must know
    alike whether the base model is to be computed."""
    found = {}
    for task, message in tasks.items():
        known, rows = base.get(task, {}), len(message.tensors["log_probs"])
        means = [known[step] for step in message.tensors["steps"].tolist() if step in known]
        if [len(mean) for mean in means] != [rows] * len(message.tensors["steps"]):
            return tasks
        found[task] = replace(message, tensors={**message.tensors, "base_means": torch.stack(means, dim=1)})
    return found


def step_bytes(spec: ScheduleSpec, trainers: int, lockstep: bool, outline: Trajectory, base: Tensor | None) -> int:
    """Bytes of the tensors that all trainers get in an RL step whose tasks are like `outline`, and of what the base
    model gives for a cell of it (`base`; None: it is not asked)."""

    def size(rank: int, part: int) -> int:
        positions = owned_positions(spec, partial(place, spec, trainers), rank, 0, part, lockstep)
        return sum(tensor.nbytes for tensor in pack(outline, positions, Claim(0, 0, 0), 0.0).tensors.values())

    cells = 0 if base is None else spec.prompts * spec.group_size * spec.trained_steps * base.nbytes
    sizes = (size(rank, part) for rank in range(trainers) for part in range(spec.tasks_per_group))
    return spec.prompts * sum(sizes) + cells
