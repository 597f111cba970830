"""Between the core and whoever knows costs: what a run asks before it starts, and plain answers.

The planner's advisor answers from costs, memory and simulated runs. `PlainAdvisor` answers with
fixed defaults and predicts nothing. `cli/extensions.py` chooses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from omegaconf import OmegaConf

from digenrl.config import Composed
from digenrl.config.compose import merge_words
from digenrl.config.copies import link_copies, resolved_plain
from digenrl.config.relations import needs_whole_batch

if TYPE_CHECKING:
    from digenrl.models.policy import Policy
    from digenrl.rewards.suite import RewardSuite
    from digenrl.transport.link import PeerLine

SMALL_TASK = 8
"""Most samples of a task of a model whose sizes nobody has counted. The planner tries no larger
tasks either."""


NO_ROOM = "rollouts have no memory for the evaluation's samples"


@dataclass(frozen=True)
class ModelPlacement:
    """How the ranks of a settled run hold the model; the values for keys that are `auto`."""

    sharding: str
    """`parallel.sharding`."""
    tsp_batch: int
    """`schedule.tsp.batch`: denoising steps of a forward."""
    gradient_checkpointing: Any
    """`model.gradient_checkpointing`: one value, or a list in the order of the trainers."""
    rollouts_evaluate: bool = True
    """Whether rollouts have memory for the samples of an evaluation, and take no more of the
    trainers' time than trainers would."""
    why: str = NO_ROOM
    """Why trainers evaluate, where `rollouts_evaluate` is false."""


class StandIn(Protocol):
    """What an emulated rank builds in place of the configured model and rewards
    (`hardware.emulate`)."""

    def build_policy(self) -> Policy:
        """Return what stands in for the network."""

    def build_rewards(self) -> RewardSuite:
        """Return what stands in for the configured rewards."""

    def line_to(self, peer: int) -> PeerLine:
        """Return what becomes of messages between this rank and `peer`, in one direction."""


@dataclass(frozen=True)
class Advice:
    """What every rank of a run is told when it starts."""

    expected: Mapping[tuple[str, int], float] = field(default_factory=dict)
    """(stage, rank) -> seconds, as `Scheduler.expected` takes them; {}: lending measures its
    own."""
    stand_ins: tuple[StandIn, ...] = ()
    """One for each rank of an emulated run; () for a real run."""
    planned: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """For the report: "gib" (role -> GiB of its fullest rank) and "seconds" (stage -> seconds per
    unit, as in a hardware profile); {}: nobody knows."""

    def stand_in(self, rank: int) -> StandIn | None:
        """Return what `rank` builds when the run is emulated. A rank that joined is as the last
        rollout."""
        return self.stand_ins[min(rank, len(self.stand_ins) - 1)] if self.stand_ins else None


class Advisor(Protocol):
    """Questions whose good answers need costs, memory or a simulation."""

    def task_size(self, composed: Composed, sizes: Sequence[int]) -> int:
        """Return the one of `sizes` (ascending) for `sampling.task_size=auto`."""

    def choose_schedule(self, composed: Composed, processes: int | None) -> Composed:
        """Return the configuration with a schedule in place of `schedule.auto`, and with the best
        split of the ranks where nothing else says one. Notes tell the user what was chosen.

        Args:
            processes: ranks that somebody else started; None: the hardware profile's.
        """

    def place_model(
        self, composed: Composed, trainers: int, rollouts: int, usual: ModelPlacement
    ) -> ModelPlacement:
        """Return how the ranks hold the model; `usual` is for a model whose sizes nobody has
        counted.

        Raises:
            ValueError: a rank does not fit into its GPU's memory, with a change that fits where
                there is one.
        """

    def advise_ranks(self, composed: Composed, trainers: int, rollouts: int) -> Advice:
        """Return what the ranks of a settled run are told.

        Raises:
            ValueError: the run is to be emulated, and nobody knows for how long its networks would
                compute.
        """

    def memory_lines(self, composed: Composed, trainers: int, rollouts: int) -> list[str]:
        """Return what each role's rank will hold, in words; [] where nobody knows."""


class PlainAdvisor:
    """Fixed defaults, for an installation without the planner and for models whose sizes nobody has
    counted."""

    def task_size(self, composed: Composed, sizes: Sequence[int]) -> int:
        """Return the largest size up to SMALL_TASK."""
        return max(size for size in sizes if size <= SMALL_TASK)

    def choose_schedule(self, composed: Composed, processes: int | None) -> Composed:
        """Return `composed` with groups that are trained as they complete, where advantages allow
        it."""
        if not composed.settings.schedule.auto:
            return composed
        words = ["schedule.auto=false"]
        if "schedule.gap" not in named_keys(composed) and not needs_whole_batch(
            composed.settings.node_at("algorithm.advantage")
        ):
            words.append("schedule.gap=1")
        said = (
            "schedule=auto: nothing is known to plan with here (docs/planner.md): "
            f"{' '.join(words)}."
        )
        return replace(with_words(composed, words), notes=(*composed.notes, said))

    def place_model(
        self, composed: Composed, trainers: int, rollouts: int, usual: ModelPlacement
    ) -> ModelPlacement:
        """Return `usual`."""
        return usual

    def advise_ranks(self, composed: Composed, trainers: int, rollouts: int) -> Advice:
        """Return nothing to expect; refuse emulation."""
        if composed.settings.hardware.emulate:
            raise ValueError(
                "hardware.emulate = true: needs the planner, which this installation lacks; "
                "install it, or set hardware.emulate=false."
            )
        return Advice()

    def memory_lines(self, composed: Composed, trainers: int, rollouts: int) -> list[str]:
        """Return nothing."""
        return []


def named_keys(composed: Composed) -> set[str]:
    """Return the keys of the command line, which no advisor changes."""
    return {word.lstrip("+").partition("=")[0] for word in composed.overrides} - {"schedule.auto"}


def with_words(composed: Composed, words: Sequence[str]) -> Composed:
    """Return the configuration, changed by the words of a command line.

    Raises:
        ValueError: a word names no key, or is no override.
    """
    tree = OmegaConf.create(composed.settings.as_plain())
    link_copies(tree)
    if wrong := merge_words(tree, list(words), "train"):
        raise ValueError("\n".join(wrong))
    return replace(composed, settings=type(composed.settings).from_tree(resolved_plain(tree)))
