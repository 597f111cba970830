"""The decision whether a run whose ranks died starts again from its newest checkpoint, or ends with
the cause."""

from __future__ import annotations

from collections import defaultdict


class Restarts:
    """Counts the deaths of a run under one command, and decides about each restart.

    Args:
        most: restarts (`allocation.max_restarts`).
        pause_s: seconds before the first restart (`allocation.restart_pause_s`); doubled before
            each next one.
        steps: RL steps of the whole run.
    """

    def __init__(self, most: int, pause_s: float, steps: int) -> None:
        self._most, self._pause_s, self._steps = most, pause_s, steps
        self._causes: defaultdict[int, list[str]] = defaultdict(list)
        """RL steps finished -> causes of the deaths in the step that followed."""

    @property
    def pause_s(self) -> float:
        """Seconds until the next attempt."""
        return float(self._pause_s * 2 ** max(0, self._deaths - 1))

    @property
    def _deaths(self) -> int:
        return sum(len(causes) for causes in self._causes.values())

    def refuse_restart(self, cause: str, began: int, finished: int) -> str | None:
        """Count a death. Return why the run ends with it, or None if the run starts again.

        Args:
            cause: why the run died.
            began: RL steps that were finished when the attempt began.
            finished: RL steps that were finished when the run died.

        Example:
            A run of 30 steps dies in step 4, and after its restart in the same step:

            >>> restarts = Restarts(most=3, pause_s=1.0, steps=30)
            >>> restarts.refuse_restart("rank 1 died", began=0, finished=3)  # begins again
            >>> restarts.refuse_restart("rank 1 died", began=3, finished=3)
            'rank 1 died; RL step 4 is poison: the run has died in it before (rank 1 died)'
        """
        earlier, deaths = list(self._causes[finished]), self._deaths
        self._causes[finished].append(cause)
        if not self._most or (
            not deaths and finished == began
        ):  # what is wrong from the start would be so again
            return cause
        if earlier and finished >= self._steps:
            return f"{cause}; the run has died after its last RL step before ({earlier[0]})"
        # A second death in the same step: the step itself is at fault.
        if earlier:
            return (
                f"{cause}; RL step {finished + 1} is poison: the run has died in it before "
                f"({earlier[0]})"
            )
        if deaths == self._most:
            return f"{cause}; it had begun again {deaths} times (allocation.max_restarts)"
        return None
