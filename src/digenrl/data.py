"""Prompts of every RL step: a pure function of (seed, step), so that a resumed run needs no cursor but the step.

Prompts of one batch are distinct. The stream walks epochs: each is a permutation of all prompts, ordered by a keyed
hash of (seed, epoch, uid), so that neither the line order of the file nor a library's shuffle matters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from digenrl.prompts import Record, read
from digenrl.schedule import groups_of_step
from digenrl.types import Prompt


def load_prompts(path: str | Path) -> tuple[Prompt, ...]:
    """The distinct prompts of one file, in file order.

    Raises:
        digenrl.prompts.PromptFileError: the file is missing, empty or malformed; names file and line.
    """
    return tuple(map(prompt_of, read(path).records))


def prompt_of(record: Record) -> Prompt:
    """The prompt of a line."""
    return Prompt(record.text, record.negative, record.target, record.metadata, record.images)


class PromptSampler:
    """Which prompts each logical batch holds; every rank computes the same.

    Args:
        prompts: distinct prompts, at least `prompts_per_batch`.
        prompts_per_batch: P. Each prompt of a batch gets the G samples of its group.
        seed: the run's seed.

    Raises:
        ValueError: fewer prompts than a batch needs.
    """

    _CACHED_EPOCHS = 4

    def __init__(self, prompts: Sequence[Prompt], prompts_per_batch: int, seed: int) -> None:
        if not 1 <= prompts_per_batch <= len(prompts):
            raise ValueError(
                f"data.prompts_per_batch = {prompts_per_batch}: the prompt file holds {len(prompts)} different prompts "
                f"and a batch needs distinct ones; use 1 .. {len(prompts)}, or a longer file."
            )
        self._by_uid = {prompt.uid: prompt for prompt in prompts}
        if len(self._by_uid) != len(prompts):
            raise ValueError(
                f"{len(prompts) - len(self._by_uid)} prompts are duplicates; pass distinct ones (load_prompts)."
            )
        self._size, self._seed = prompts_per_batch, seed
        self._epochs: dict[int, tuple[int, ...]] = {}

    def batch(self, step: int) -> tuple[Prompt, ...]:
        """The P distinct prompts of RL step `step` (0-based); group g of the batch belongs to prompt g."""
        if step < 0:
            raise ValueError(f"step = {step}: RL steps count from 0.")
        total = len(self._by_uid)
        epoch, first = divmod(step * self._size, total)
        uids = list(self._epoch(epoch)[first : first + self._size])
        if len(uids) < self._size:
            uids += self._epoch(epoch + 1)[: self._size - len(uids)]
        return tuple(self._by_uid[uid] for uid in uids)

    def _epoch(self, epoch: int) -> tuple[int, ...]:
        """uids in the order of epoch `epoch`.

        Where a batch takes prompts from two epochs, those of the old epoch come right after that batch in the new one:
        the batch stays distinct, and every uid still occurs once per epoch.
        """
        if epoch not in self._epochs:
            start = max((known for known in self._epochs if known < epoch), default=-1)
            previous = self._epochs.get(start, ())
            for index in range(start + 1, epoch + 1):
                previous = self._following(previous, index)
            self._epochs[epoch] = previous
            for far in sorted(self._epochs, key=lambda known: abs(known - epoch))[self._CACHED_EPOCHS :]:
                del self._epochs[far]
        return self._epochs[epoch]

    def _following(self, previous: tuple[int, ...], epoch: int) -> tuple[int, ...]:
        order = self._shuffled(epoch)
        taken = epoch * len(order) % self._size
        if not taken:
            return tuple(order)
        before = set(previous[-taken:])
        head = [uid for uid in order if uid not in before][: self._size - taken]
        chosen = set(head)
        return (*head, *(uid for uid in order if uid not in chosen))

    def _shuffled(self, epoch: int) -> list[int]:
        def key(uid: int) -> bytes:
            return hashlib.blake2b(f"{self._seed}/{epoch}/{uid}".encode(), digest_size=16).digest()

        return sorted(self._by_uid, key=key)


class PromptData(pl.LightningDataModule):
    """The prompts of a run as Lightning's datamodule.

    Trainers do not iterate it: the Strategy puts its stream of fragments in the place of `train_dataloader`, and every
    rank asks `sampler` which prompts an RL step has.

    Args:
        settings: the `data` group of a configuration.
    """

    def __init__(self, settings: Any, seed: int) -> None:
        super().__init__()
        self.prompts = load_prompts(settings.prompts)
        self.heldout = self.prompts if settings.heldout is None else load_prompts(settings.heldout)
        """Evaluation prompts, never trained (the training prompts themselves where the set has no held-out split)."""
        self.sampler = PromptSampler(self.prompts, groups_of_step(settings), seed)

    def train_dataloader(self) -> range:
        """A placeholder, which the Strategy replaces. (A tuple would be a collection of loaders to Lightning.)"""
        return range(len(self.prompts))
