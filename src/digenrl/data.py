"""Prompts of every RL step: a pure function of (seed, step), so that a resumed run needs no cursor
but the step.

Prompts of one batch are distinct. The stream of a file walks epochs. Each epoch is a permutation of
the file's prompts, ordered by a keyed hash of (seed, epoch, uid). So neither the order of lines nor
a library's shuffle matters. Several files share out each batch by their weights.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

import lightning.pytorch as pl

from digenrl.prompts import Prompt, most_of_batch, read_prompt_file, weighted_files

if TYPE_CHECKING:
    from digenrl.config.settings import DataSettings


def load_files(
    setting: str | Path | Sequence[Mapping[str, object]],
) -> list[tuple[tuple[Prompt, ...], float]]:
    """Return (distinct prompts, weight) of each file that `data.prompts` names. A prompt that two
    files hold is the first one's.

    Raises:
        digenrl.prompts.PromptFileError: a file is missing, empty or malformed; names file and line.
    """
    seen, files = set[int](), list[tuple[tuple[Prompt, ...], float]]()
    for name, weight in weighted_files(setting):
        prompts = list[Prompt]()
        for prompt in read_prompt_file(name).prompts:
            if (uid := prompt.uid) not in seen:
                seen.add(uid)
                prompts.append(prompt)
        files.append((tuple(prompts), weight))
    return files


def load_prompts(setting: str | Path | Sequence[Mapping[str, object]]) -> tuple[Prompt, ...]:
    """Return the distinct prompts of one file or several, in their order. Raises: see
    `load_files`."""
    return tuple(chain.from_iterable(prompts for prompts, _ in load_files(setting)))


class PromptSampler:
    """Chooses the prompts of each logical batch, the same on every rank.

    Args:
        prompts: distinct prompts, at least `prompts_per_batch`.
        prompts_per_batch: P. Each prompt of a batch gets the G samples of its group.
        seed: the run's seed.
        shares: (prompts, weight) of the files that `prompts` come from, in order; () = one file. Of
            a batch, each has its weight's part of P, rounded down or up, by a draw of (seed, step)
            that keeps the mean exact.

    Raises:
        ValueError: fewer prompts than a batch needs.
    """

    _CACHED = 4

    def __init__(
        self,
        prompts: Sequence[Prompt],
        prompts_per_batch: int,
        seed: int,
        shares: Sequence[tuple[int, float]] = (),
    ) -> None:
        if not 1 <= prompts_per_batch <= len(prompts):
            raise ValueError(
                f"data.prompts_per_batch = {prompts_per_batch}: the prompt file holds "
                f"{len(prompts)} different prompts "
                f"and a batch needs distinct ones; use 1 .. {len(prompts)}, or a longer file."
            )
        uids = [prompt.uid for prompt in prompts]
        self._prompts, self._at = prompts, {uid: index for index, uid in enumerate(uids)}
        if len(self._at) != len(prompts):
            raise ValueError(
                f"{len(prompts) - len(self._at)} prompts are duplicates; pass distinct ones "
                "(load_prompts)."
            )
        self._size, self._seed = prompts_per_batch, seed
        files = tuple(shares) or ((len(prompts), 1.0),)
        wanted = most_of_batch([weight for _, weight in files], prompts_per_batch)
        for number, ((count, weight), most) in enumerate(zip(files, wanted, strict=True)):
            if count < most:
                raise ValueError(
                    f"data.prompts: its file {number + 1} has {count} prompts that no earlier one "
                    f"has, and by its weight {weight:g} a batch of {prompts_per_batch} takes up to "
                    f"{most} distinct ones; lower its weight or data.prompts_per_batch, or give a "
                    "longer file."
                )
        ends = list(accumulate((count for count, _ in files), initial=0))
        self._epochs = [
            _Epochs(uids[first:last], seed, self._batch_span(n))
            for n, (first, last) in enumerate(pairwise(ends))
        ]
        weights = list(accumulate(weight for _, weight in files))
        self._bounds = [weight / weights[-1] for weight in weights]
        self._taken = [[0] for _ in files]
        """Prompts taken from each file by all batches before an RL step."""
        self._batches: dict[int, tuple[Prompt, ...]] = {}

    def prompts_at(self, step: int) -> tuple[Prompt, ...]:
        """Return the P distinct prompts of RL step `step` (0-based). Group g of the batch belongs
        to prompt g."""
        if step < 0:
            raise ValueError(f"step = {step}: RL steps count from 0.")
        if step not in self._batches:
            self._extend_taken(step + 1)
            uids = [
                uid
                for epochs, taken in zip(self._epochs, self._taken, strict=True)
                for uid in epochs.uids_between(taken[step], taken[step + 1])
            ]
            if len(self._epochs) > 1:
                uids.sort(key=lambda uid: _hash_parts(self._seed, "order", step, uid))
            self._batches[step] = tuple(self._prompts[self._at[uid]] for uid in uids)
            for far in sorted(self._batches, key=lambda known: abs(known - step))[self._CACHED :]:
                del self._batches[far]
        return self._batches[step]

    def _extend_taken(self, steps: int) -> None:
        """Know what the batches of so many RL steps take of each file."""
        for step in range(len(self._taken[0]) - 1, steps):
            draw = (
                0.5
                if len(self._taken) == 1
                else int.from_bytes(_hash_parts(self._seed, "files", step)[:6], "big") / 2**48
            )
            # P marks at equal distances over all weights: a file has those that fall on its own.
            below = [
                min(max(ceil(bound * self._size - draw), 0), self._size)
                for bound in self._bounds[:-1]
            ]
            for taken, (first, last) in zip(
                self._taken, pairwise([0, *below, self._size]), strict=True
            ):
                taken.append(taken[-1] + last - first)

    def _batch_span(self, number: int) -> Callable[[int], tuple[int, int]]:
        """Return a function for file `number`: position in its stream -> first position and end of
        the batch around it."""

        def span_around(position: int) -> tuple[int, int]:
            taken = self._taken[number]
            step = bisect_right(taken, position) - 1
            return taken[step], taken[step + 1]

        return span_around


class _Epochs:
    """The stream of one file's prompts.

    Args:
        span: of the batch around a position of the stream, its first position and its end.
    """

    _CACHED = 4

    def __init__(
        self, uids: Sequence[int], seed: int, span: Callable[[int], tuple[int, int]]
    ) -> None:
        self._uids, self._seed, self._span = uids, seed, span
        self._epochs: dict[int, tuple[int, ...]] = {}

    def uids_between(self, first: int, last: int) -> tuple[int, ...]:
        """Return the uids at the stream's positions first .. last-1. They belong to one batch and
        are distinct."""
        if first == last:
            return ()
        epoch, start = divmod(first, len(self._uids))
        found = self._epoch_order(epoch)[start : start + last - first]
        missing = last - first - len(found)
        return (*found, *(self._epoch_order(epoch + 1)[:missing] if missing else ()))

    def _epoch_order(self, epoch: int) -> tuple[int, ...]:
        """Return uids in the order of epoch `epoch`.

        A batch may take prompts from two epochs. The new epoch then takes the old epoch's prompts
        of that batch only after the batch. So the batch stays distinct, and every uid occurs once
        per epoch.
        """
        if epoch not in self._epochs:
            start = max((known for known in self._epochs if known < epoch), default=-1)
            previous = self._epochs.get(start, ())
            for index in range(start + 1, epoch + 1):
                previous = self._next_order(previous, index)
            self._epochs[epoch] = previous
            for far in sorted(self._epochs, key=lambda known: abs(known - epoch))[self._CACHED :]:
                del self._epochs[far]
        return self._epochs[epoch]

    def _next_order(self, previous: tuple[int, ...], epoch: int) -> tuple[int, ...]:
        order = sorted(self._uids, key=lambda uid: _hash_parts(self._seed, epoch, uid))
        began = epoch * len(order)
        first, last = self._span(began)
        if first == began:
            return tuple(order)
        before = set(previous[first - began :])
        head = [uid for uid in order if uid not in before][: last - began]
        chosen = set(head)
        return (*head, *(uid for uid in order if uid not in chosen))


def _hash_parts(*parts: int | str) -> bytes:
    return hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=16).digest()


class PromptData(pl.LightningDataModule):
    """The prompts of a run as Lightning's datamodule.

    Trainers do not iterate it: the Strategy puts its stream of fragments in the place of
    `train_dataloader`, and every rank asks `sampler` which prompts an RL step has.

    Args:
        settings: the group `data`.
    """

    def __init__(self, settings: DataSettings, seed: int) -> None:
        super().__init__()
        files = load_files(settings.prompts)
        self.prompts = tuple(chain.from_iterable(prompts for prompts, _ in files))
        self.heldout = self.prompts if settings.heldout is None else load_prompts(settings.heldout)
        """Evaluation prompts, never trained (the training prompts themselves where the set has no
        held-out split)."""
        shares = [(len(prompts), weight) for prompts, weight in files]
        self.sampler = PromptSampler(self.prompts, settings.groups_per_step, seed, shares)

    def train_dataloader(self) -> range:
        """Return a placeholder, which the Strategy replaces. (For Lightning a tuple would be a
        collection of loaders.)"""
        return range(len(self.prompts))
