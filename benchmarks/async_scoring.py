"""How much of a scorer's time asynchronous scoring hides behind generation.

    python -m benchmarks.async_scoring [tasks=20] [generation=0.2] [share=0.5] [quick=true]

The scorer takes `share` of a task's generation time; both are sleeps, as a GPU and a scorer's
process leave this thread free. Prints the wall time of generation alone, with scoring inline and
with scoring asynchronous, and the share of the scoring time that is hidden: 1 - (asynchronous -
generation) / (inline - generation). The last task's score can only follow its generation, so at
most 1 - 1/tasks can be hidden. The bar is 0.9 (exit code 1 below it).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks._shared import Report, options
from digenrl.rewards.scorer import AsyncScorer
from digenrl.rewards.suite import RewardSuite
from digenrl.types import Prompt

BAR = 0.9


class SlowScorer:
    """Takes `seconds` a batch."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        time.sleep(self.seconds)
        return media.flatten(1).mean(1)


def wall_s(placement: str, tasks: int, generation_s: float, scorer_s: float) -> float:
    """Seconds until every task is generated and scored; placement "none" does not score."""
    scorer = AsyncScorer(
        RewardSuite(
            {"slow": {"scorer": SlowScorer(scorer_s)}},
            placement=placement.replace("none", "inline"),
        )
    )
    futures = []
    began = time.perf_counter()
    for task in range(tasks):
        time.sleep(generation_s)
        if placement != "none":
            media = torch.rand(4, 3, 64, 64, generator=torch.Generator().manual_seed(task))
            futures.append(scorer.submit(media, [Prompt(f"{task}-{row}") for row in range(4)]))
    for future in futures:
        future.result(60)
    elapsed = time.perf_counter() - began
    scorer.close()
    return elapsed


def main(words: list[str]) -> int:
    """Exit code 1 below the bar."""
    given = options(
        words, {"tasks": "20", "generation": "0.2", "share": "0.5"}, {"generation": "0.05"}
    )
    tasks, generation_s, share = (
        int(given["tasks"]),
        float(given["generation"]),
        float(given["share"]),
    )
    notes = (
        f"{tasks} tasks of {generation_s} s, a scorer of {share} x that; at most "
        f"{1 - 1 / tasks:.1%} can be hidden."
    )
    report = Report("Asynchronous scoring", notes, (" " * 20, "seconds"))
    seconds = {
        name: wall_s(name, tasks, generation_s, share * generation_s)
        for name in ("none", "inline", "thread")
    }
    hidden = 1 - (seconds["thread"] - seconds["none"]) / (seconds["inline"] - seconds["none"])
    for name, label in (
        ("none", "generation alone"),
        ("inline", "scoring inline"),
        ("thread", "scoring asynchronous"),
    ):
        report.row(label, f"{seconds[name]:.3f}")
    report.verdict(
        hidden >= BAR, f"{hidden:.1%} of the scoring time is hidden, at least {BAR:.0%} wanted"
    )
    return report.close(given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
