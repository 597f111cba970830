"""RL steps in this process, one after another: for notebooks, debuggers and whoever wants to see a
gradient.

    loop = digenrl.rl_loop("experiment=digits_flowgrpo", "data.prompts_per_batch=4")
    made = loop.generate()              # trajectories: latents, log-probs, rewards
    found = loop.train(made)            # loss, backward, optimizer step; the step's metrics

The policy, the rollout engine, the board of the step and the algorithm's LightningModule are those
of a run. Launcher, Strategy and Lightning's Trainer take no part, so that a breakpoint anywhere
stops everything. Samples, gradients and weights equal those of a run with the same settings on one
rank (tests/api/test_loop.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import SingleDeviceStrategy

from digenrl import accelerator, devices
from digenrl import config as configuration
from digenrl.algorithms.advantages import reward_statistics
from digenrl.algorithms.base import PolicyModule
from digenrl.cli.extensions import choose_advisor
from digenrl.config.settings import Settings
from digenrl.data import PromptData
from digenrl.models.policy import Policy
from digenrl.parts import schedule_spec
from digenrl.rewards.suite import RewardSuite
from digenrl.run import engine_of
from digenrl.schedule import group_tasks, place_fragment, update_fragments
from digenrl.schedule.claims import Claim
from digenrl.settle import with_allocation, with_task_size
from digenrl.strategy import gradients
from digenrl.transport.cells import Part, StepBoard, pack_cells
from digenrl.types import Trajectory

ALONE = (
    "schedule=sync",
    "allocation.trainers=1",
    "allocation.rollouts=0",
    "reward.placement=inline",
)
"""Words of a run that is this process alone."""


def rl_loop(*words: str) -> Loop:
    """Return the loop of a configuration.

    Args:
        words: of `make train`, such as `experiment=digits_flowgrpo`.

    Raises:
        ConfigError: words that do not fit.
        ValueError: another value for a key of `ALONE`; or more than the profile's GPU has memory
            for.
    """
    fixed = dict(word.split("=") for word in ALONE)
    for key, _, value in (word.partition("=") for word in words):
        if fixed.get(key, value) != value:
            raise ValueError(
                f"{key}={value}: the loop is one rank that generates and trains, "
                f"{key}={fixed[key]}."
            )
    composed = configuration.load([*words, *ALONE])
    try:
        advisor = choose_advisor()
        sized = with_task_size(composed, advisor)
        return Loop(with_allocation(sized, trainers=1, rollouts=0, advisor=advisor).settings)
    except ValueError as error:
        cause, _, remedy = str(error).partition(": ")
        advice = "use hardware.build=tiny, a profile with a larger GPU, or smaller media."
        said = f"{cause}; the loop is one rank: {advice}" if "allocation." in remedy else error
        raise ValueError(said) from error


class Loop:
    """One policy, its rewards and its optimizer in this process, at RL step `step`."""

    def __init__(self, settings: Settings) -> None:
        """Build the loop from settled settings of one rank that generates and trains. The policy is
        on a GPU if there is one."""
        torch.manual_seed(settings.seed)
        devices.take_gpu(0)
        self.step = 0
        """RL steps done, which is the version of the weights."""
        self.policy: Policy = settings.build("model")
        self.rewards: RewardSuite = settings.build("reward")
        self.module: PolicyModule = settings.build("algorithm", policy=self.policy)
        # It stands for the Trainer, and the module keeps it by a weak reference alone.
        # A strategy that names the device: for a kind that it does not know, Fabric takes the CPU.
        alone = SingleDeviceStrategy(accelerator.current_device())
        self.fabric = self.module.fabric = Fabric(
            accelerator=devices.lightning_accelerator(), strategy=alone, devices=1
        )
        self.module.to(self.fabric.device)
        self.engine = engine_of(settings, self.module, self.rewards)
        self.data = PromptData(settings.data, settings.seed)
        self.rewards.check_prompts(self.data.prompts)
        self.optimizer = self.module.configure_optimizers()
        self._spec = schedule_spec(
            settings,
            self.module.train_steps.count_trained(settings.sampling.steps),
            trainers=1,
            rollouts=0,
        )
        self.module.on_train_start()

    def generate(self) -> tuple[Trajectory, ...]:
        """Return the scored tasks of this RL step, group by group, including the spare groups of
        `data.oversample`."""
        board, made = self._empty_board(), []
        prompts = self.data.sampler.prompts_at(self.step)
        with self.module.rollout_weights():
            for group, prompt in enumerate(prompts):
                for task in group_tasks(self._spec, self.step, group):
                    generation = self.engine.begin_task(task, prompt)
                    while self.engine.steps_left(generation):
                        generation = self.engine.take_step(generation)
                    made.append(
                        self.engine.score(generation, self.engine.decode(generation)).result()
                    )
                    _add_trajectory(board, made[-1])
        self.rewards.check_missing()
        return tuple(made)

    def train(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Make the optimizer updates of the RL step from the trajectories of `generate`, which may
        have been changed. Return the step's metrics.

        Raises:
            ValueError: tasks of the step are missing.
        """
        board = self._empty_board()
        for trajectory in trajectories:
            _add_trajectory(board, trajectory)
        for update in range(self._spec.updates_per_batch):
            self.optimizer.zero_grad(set_to_none=True)
            for fragment in update_fragments(self._spec, update):
                if not board.is_complete(fragment):
                    missing = sorted(set(self._spec.groups_of(fragment)) - set(board.completed))
                    raise ValueError(
                        f"groups {missing} of RL step {self.step} are not complete: give `train` "
                        "every trajectory that `generate` made in this step."
                    )
                for batch in board.micro_batches(fragment):
                    latest = batch.to(self.policy.device)
                    self.module.training_step(latest, 0).backward()
            gradients.scale_grads(
                self.policy.adapter.trained_parameters().values(), board.gradient_scale(update)
            )
            self.module.configure_gradient_clipping(self.optimizer)
            self.optimizer.step()
        self.step += 1
        advantages = self.module.advantage(latest.rewards, latest.reward_weights)
        found = self.module.collect_metrics() | reward_statistics(advantages, latest.rewards)
        return {name: float(value) for name, value in found.items()}

    def close(self) -> None:
        """Stop the scorers."""
        self.engine.close()
        self.rewards.close()

    def _empty_board(self) -> StepBoard:
        spec, weights, module = self._spec, self.engine.reward_weights, self.module
        return StepBoard(
            spec,
            lambda fragment: place_fragment(spec, 1, fragment),
            rank=0,
            step=self.step,
            reward_weights=weights,
            useful=(lambda rewards: module.useful_samples(rewards, weights))
            if spec.skip_zero
            else None,
            teaches=(lambda rewards: module.teaching_groups(rewards, weights))
            if spec.selects
            else None,
        )


def _add_trajectory(board: StepBoard, trajectory: Trajectory) -> None:
    """Put a task on the board as if it had come from another rank."""
    claim = Claim(trajectory.index, rank=0, attempt=0)
    board.add_part(Part(pack_cells(trajectory, range(len(trajectory.steps)), claim, seconds=0.0)))
