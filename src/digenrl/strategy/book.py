"""The book of one RL step on one trainer rank: what was trained, what was dropped, how long what took."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from digenrl.report.run_dir import append_event
from digenrl.schedule.spec import ScheduleSpec
from digenrl.strategy.cells import StepBoard
from digenrl.strategy.lender import Lender
from digenrl.strategy.spans import SpanLog
from digenrl.strategy.world import World


class StepBook:
    """Opened when a step's first fragment is awaited, closed when its weights are published."""

    def __init__(self, spec: ScheduleSpec, world: World, spans: SpanLog, lender: Lender, run_dir: Path) -> None:
        self._spec, self._world, self._spans, self._lender, self._run_dir = spec, world, spans, lender, run_dir
        self._began = 0.0
        self._staleness = 0
        self._training: tuple[float, int, tuple[int, ...]] | None = None
        self.facts: dict[str, float] = {}
        """Numbers of the last closed step, for the recorder."""

    def open(self) -> None:
        """A step begins."""
        self._began = self._spans.now()
        self._staleness = 0

    def begin_fragment(self, board: StepBoard, fragment: tuple[int, ...]) -> None:
        """A fragment is about to be trained: book its staleness (I9) and its dropped groups (I10)."""
        self.end_fragment()
        self._staleness = max(self._staleness, *(board.step - version for version in board.versions(fragment)))
        for group in fragment:
            if group in board.dropped:
                samples = self._spec.group_size
                facts = {"reason": "missing_reward", "step": board.step, "group": group, "samples": samples}
                self._event("dropped", facts)
        self._spans.announce(f"train g{fragment[0]}")
        self._training = (self._spans.now(), board.step, fragment)

    def end_fragment(self) -> None:
        """The fragment in training is done; its duration goes to the lender's costs."""
        if self._training is None:
            return
        began, step, fragment = self._training
        self._training = None
        ended = self._spans.now()
        self._spans.add("train", began, ended, step=step, group=fragment[0], groups=len(fragment))
        self._lender.measured("train", self._world.rank, ended - began)

    def close(self, version: int) -> None:
        """The step's weights are published: settle the loans, and take down its numbers."""
        now = self._spans.now()
        loans, message = self._lender.finish_step(now)
        for loan in loans:
            self._event("lend", {"rl_step": float(version)} | loan)
        if message is not None:
            self._event("tag_off", {"message": message})
        samples, seconds = self._spec.prompts * self._spec.group_size, now - self._began
        self.facts = {
            "samples": samples,
            "step_s": seconds,
            "samples_per_s": samples / seconds,
            "staleness_max": self._staleness,
        }
        for (stage, cause), spent in self._spans.take_seconds().items():
            if stage == "wait":
                self.facts[f"bubble/{cause}"] = spent
        if self._lender.predicted_end is not None:
            self.facts["predicted_step_s"] = self._lender.predicted_end - self._began
        self._lender.predicted_end = None

    def _event(self, kind: str, facts: Mapping[str, object]) -> None:
        if self._world.rank == 0:
            append_event(self._run_dir, kind, facts)
