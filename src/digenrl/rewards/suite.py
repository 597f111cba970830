"""`RewardSuite`: the scorers of a run, their weights, and the counts of missing scores.

The suite returns *raw* scores per reward. The algorithm normalises and sums them
(`digenrl.algorithms.advantages`). `weights` says which rewards are optimised, and how much each
counts.
"""

from __future__ import annotations

import math
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NotRequired, TypedDict

import torch
from torch import Tensor

from digenrl.rewards.needs import check_entry, needs_sound
from digenrl.rewards.placement import place_scorer
from digenrl.rewards.protocol import (
    Identity,
    RewardError,
    RewardUnavailable,
    Scorer,
    call_scorer,
    check_media,
    check_scores,
    contain_exits,
    identity_of,
)
from digenrl.types import Prompt, Sound

CAUSES_KEPT = 8
"""Distinct causes of failures kept per reward. Further causes are only counted."""


@dataclass
class FailureCount:
    """Counts of how often a reward was asked and gave no score. They grow during a run, hence not
    frozen."""

    scored: int = 0
    missing: int = 0
    causes: Counter[str] = field(default_factory=Counter)

    @property
    def share(self) -> float:
        """Share of samples without a score; 0 before the first sample."""
        asked = self.scored + self.missing
        return self.missing / asked if asked else 0.0


_Routed = TypedDict("_Routed", {"for": NotRequired[Sequence[str] | None]})


class RewardEntry(_Routed):
    """One reward of the group `reward`. `for` has the modalities that it moves (`video`, `audio`);
    all where it is absent."""

    scorer: Scorer | Mapping[str, object]
    """A scorer, or the YAML node that describes one."""
    weight: NotRequired[float]
    """1 where it is absent."""
    placement: NotRequired[str | None]


class RewardSuite:
    """Suite of scorers that scores media with every reward of a mixture.

    The defaults are those of configs/reward/_suite.yaml.

    Args:
        rewards: name -> entry. A reward of weight 0 is scored and logged in every step, and never
            optimised.
        heldout: name -> entry without weight. These are scored only in evaluations, and never
            optimised.
        placement: placement of scorers whose entry has none: `inline` (in the caller's thread),
            `thread` (in the asynchronous scorer's thread), `process` (a process per scorer), `http`
            (a reward service, see `urls`).
        urls: reward services that answer for the scorers placed `http`, name -> list of URLs.
        max_missing_share: `check_missing` raises once more than this share of a reward's samples is
            missing ...
        min_missing_samples: ... among at least this many samples.
        pending: bound on tasks that wait for scores (see `digenrl.rewards.scorer.AsyncScorer`).
        start_s: placement `process`: seconds until a scorer must be built.
        call_s: placements `process` and `http`: seconds after which a batch without scores is
            missing.
    """

    def __init__(
        self,
        rewards: Mapping[str, RewardEntry],
        heldout: Mapping[str, RewardEntry] | None = None,
        placement: str = "thread",
        urls: Mapping[str, Sequence[str]] | None = None,
        max_missing_share: float = 0.25,
        min_missing_samples: int = 64,
        pending: int = 4,
        start_s: float = 600.0,
        call_s: float = 240.0,
    ) -> None:
        if not rewards:
            raise ValueError(
                "The reward mixture is empty: name at least one reward under `reward.rewards`."
            )
        heldout = heldout or {}
        if both := sorted(set(rewards) & set(heldout)):
            raise ValueError(
                f"{both} are optimised and held out at once: a held-out reward must not be "
                "optimised; drop one."
            )
        urls = urls or {}
        if unknown := sorted(set(urls) - set(rewards) - set(heldout)):
            raise ValueError(
                f"reward.urls names unknown rewards {unknown}; known: "
                f"{sorted([*rewards, *heldout])}."
            )
        self.placement = placement
        self.pending = pending
        self.max_missing_share, self.min_missing_samples = max_missing_share, min_missing_samples
        self.weights: dict[str, float] = {}
        for name, entry in rewards.items():
            check_entry(name, entry, "rewards")
            self.weights[name] = float(entry.get("weight", 1.0))
        self.routes = {
            name: None if (asked := entry.get("for")) is None else tuple(asked)
            for name, entry in rewards.items()
            if self.weights[name]
        }
        """Optimised reward -> modalities that it moves; None: all."""
        if not any(self.weights.values()):
            raise ValueError(
                f"Every reward weight of {sorted(self.weights)} is 0: nothing would be optimised; "
                "give one a weight."
            )
        for name, entry in heldout.items():
            check_entry(name, entry, "heldout")
        self._makers = {
            name: place_scorer(
                name,
                entry["scorer"],
                entry.get("placement") or placement,
                urls.get(name),
                start_s,
                call_s,
            )
            for name, entry in {**rewards, **heldout}.items()
        }
        self._described = {name: entry["scorer"] for name, entry in {**rewards, **heldout}.items()}
        self.names: tuple[str, ...] = tuple(rewards)
        self.heldout: tuple[str, ...] = tuple(heldout)
        self.on_missing: Callable[[str, int, str], None] = lambda name, samples, cause: None
        """Callback (reward, samples, cause) for samples that stay without a score, with which a run
        records them."""
        self.stage: Callable[[str], AbstractContextManager[object]] = nullcontext
        """Context entered with "score NAME" around every call of a scorer, with which a run marks
        its stage."""
        self.run_dir: Path | None = None
        """Directory of the run; None outside of a run, where nobody asks people."""
        self.tick: Callable[[], None] = lambda: None
        """Function that a scorer calls while it waits for people, so that the run sees progress."""
        self._failures = {name: FailureCount() for name in self._makers}
        self._lock = threading.Lock()

    @cached_property
    def _scorers(self) -> dict[str, Scorer]:
        """Scorers, built on first use, so that a rank that never scores holds no reward model.

        Building does not change training's random numbers.
        """
        with torch.random.fork_rng(devices=[]):
            scorers = {name: make() for name, make in self._makers.items()}
        for scorer in scorers.values():
            if _asks_people(scorer) and self.run_dir is not None:
                scorer.join_run(self.run_dir, self.tick)  # type: ignore[attr-defined]
        return scorers

    def build_scorers(self) -> None:
        """Build the scorers now."""
        self._scorers  # noqa: B018

    @cached_property
    def _hearing(self) -> frozenset[str]:
        return frozenset(name for name, each in self._described.items() if needs_sound(each))

    def needs_sound(self, heldout: bool = False) -> bool:
        """Return whether `score` needs the sound of samples. Builds no scorer."""
        asked = self.names + self.heldout if heldout else self.names
        return not self._hearing.isdisjoint(asked)

    def score(
        self,
        media: Tensor,
        prompts: Sequence[Prompt],
        heldout: bool = False,
        sound: Sound | None = None,
    ) -> dict[str, Tensor]:
        """Return raw scores: name -> [B] fp32 on the CPU, NaN = missing.

        A sample without a score is asked for once more before it counts as missing, except from
        people.

        Args:
            media: [B, C, H, W] or [B, F, C, H, W] in [0, 1].
            prompts: B prompts.
            heldout: also score the held-out rewards, as an evaluation does. People are not asked:
                their rewards are left out.
            sound: sound of the samples; None: they have none, or nobody asks for it.

        Raises:
            ValueError: media or prompts do not fit the protocol.
            RewardError: a scorer broke the protocol. An unavailable scorer only gives NaN, which is
                counted.
        """
        check_media(media, prompts)
        wanted = self.names + self.heldout if heldout else self.names
        if heldout:
            wanted = tuple(name for name in wanted if not _asks_people(self._scorers[name]))
        return {name: self._score_one(name, media, prompts, sound) for name in wanted}

    def _score_one(
        self, name: str, media: Tensor, prompts: Sequence[Prompt], sound: Sound | None
    ) -> Tensor:
        scores, cause = self._ask_scorer(name, media, prompts, sound)
        lost = scores.isnan()
        if lost.any() and not _asks_people(self._scorers[name]):
            asked = [prompt for prompt, gone in zip(prompts, lost.tolist(), strict=True) if gone]
            rest = None if sound is None else sound.rows(lost.to(sound.waveform.device))
            scores[lost], cause = self._ask_scorer(name, media[lost.to(media.device)], asked, rest)
        missing = int(scores.isnan().sum())
        with self._lock:
            count = self._failures[name]
            count.scored += len(prompts) - missing
            count.missing += missing
            if missing and (cause in count.causes or len(count.causes) < CAUSES_KEPT):
                count.causes[cause] += missing
        if missing:
            self.on_missing(name, missing, cause)
        return scores

    def _ask_scorer(
        self, name: str, media: Tensor, prompts: Sequence[Prompt], sound: Sound | None
    ) -> tuple[Tensor, str]:
        """Return (scores [B], cause of missing ones)."""
        try:
            with self.stage(f"score {name}"), torch.no_grad(), contain_exits(name):
                # A scorer may write into what it is given: the next one, and the caller, keep what
                # was generated.
                given = None if sound is None else replace(sound, waveform=sound.waveform.clone())
                answer = call_scorer(self._scorers[name], media.clone(), prompts, given)
                scores = check_scores(name, answer, len(prompts))
            return scores.clone(), "the scorer gave no finite score"
        except RewardUnavailable as error:
            kept = torch.full((len(prompts),), math.nan) if error.scores is None else error.scores
            return check_scores(name, kept, len(prompts)).clone(), str(error)
        except RewardError:
            raise
        except Exception as error:
            said = traceback.format_exception_only(error)[-1].strip()
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise RewardError(
                f"Reward `{name}` raised {said} ({frame.filename}, line {frame.lineno})"
            ) from error

    def find_scorer(self, name: str) -> Scorer:
        """Return the scorer of a reward, optimised or held-out. Raise KeyError with the known
        names."""
        if name not in self._scorers:
            raise KeyError(f"Unknown reward `{name}`; known: {', '.join(self._scorers)}.")
        return self._scorers[name]

    def scorer_identities(self) -> dict[str, Identity]:
        """Return name -> identity of its scorer, for the run's manifest."""
        return {name: identity_of(scorer) for name, scorer in self._scorers.items()}

    def failure_counts(self) -> dict[str, FailureCount]:
        """Return name -> a copy of the counts so far."""
        with self._lock:
            return {
                n: FailureCount(c.scored, c.missing, Counter(c.causes))
                for n, c in self._failures.items()
            }

    def check_missing(self) -> None:
        """Raise RewardError with reward, share and commonest cause if too many samples are
        missing."""
        for name, count in self.failure_counts().items():
            if (
                count.scored + count.missing >= self.min_missing_samples
                and count.share > self.max_missing_share
            ):
                cause = count.causes.most_common(1)[0][0]
                raise RewardError(
                    f"Reward `{name}` is missing for {count.missing} of "
                    f"{count.scored + count.missing} samples ({count.share:.0%}, "
                    f"reward.max_missing_share allows {self.max_missing_share:.0%}). Commonest "
                    f"cause: {cause}"
                )

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Raise ValueError for the first prompt that a scorer could never score. Call this before a
        run begins."""
        for scorer in self._scorers.values():
            if check := getattr(scorer, "check_prompts", None):
                check(prompts)

    def stop_waiting(self) -> None:
        """End the wait of scorers that ask people; their samples are missing."""
        for scorer in self.__dict__.get("_scorers", {}).values():
            if _asks_people(scorer):
                scorer.close()

    def close(self) -> None:
        """Stop processes and connections of the scorers. Idempotent."""
        for scorer in self.__dict__.get("_scorers", {}).values():  # those that were built
            if close := getattr(scorer, "close", None):
                close()


def combine_scores(scores: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """Return the weighted sum [B] of the optimised rewards, NaN where one of them is missing. For
    logs and tables.

    Raises KeyError if a reward with a weight has no scores.

    Example:
        >>> scores = {"ocr": torch.tensor([0.5, 1.0]), "clip": torch.tensor([0.25, torch.nan])}
        >>> combine_scores(scores, weights={"ocr": 1.0, "clip": 2.0})
        tensor([1., nan])
    """
    if missing := sorted(name for name, weight in weights.items() if weight and name not in scores):
        raise KeyError(f"No scores for the optimised rewards {missing}; got {sorted(scores)}.")
    terms = [weight * scores[name] for name, weight in weights.items() if weight]
    return torch.stack(terms).sum(0)


def _asks_people(scorer: Scorer) -> bool:
    return bool(getattr(scorer, "asks_people", False))
