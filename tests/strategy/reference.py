"""The single-process reference loop: what the cluster must equal. No strategy, schedule or
algorithm code takes part, except for the rule that names stale groups; the loss is written out
here, and advantages are those of examples/grpo_in_one_file.py. Unlike that page, the loop knows
stale groups, small tasks and every dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from digenrl.config.settings import Settings
from digenrl.data import PromptData
from digenrl.diffusion import denoise
from digenrl.diffusion.sde import FlowSDE
from digenrl.diffusion.steps import AllButLast
from digenrl.models.policy import Policy
from digenrl.schedule import ScheduleSpec, group_version
from digenrl.types import CellBlock, Prompt
from examples.grpo_in_one_file import group_advantages
from tests import sampling
from tests.strategy.processes import Cell, Record


class Reference:
    """Training in plain loops, with a single policy and optimizer.

    Args:
        config: the same configuration that the cluster gets; its `schedule` is not read, except
            async_steps and stale_fraction. A group with a missing reward is dropped; so are those
            that `data.zero_variance_groups` and `data.oversample` leave out.
        block_steps: trained steps of one forward (K). 1 = the per-step loop.
    """

    def __init__(self, config: Settings, block_steps: int = 1) -> None:
        torch.set_num_threads(1)
        self.config, self.block_steps = config, block_steps
        self.policy: Policy = config.build("model")
        self.policy.eval()
        self.rewards = config.build("reward")
        self.sde = FlowSDE(config.node_at("algorithm.sde.noise_level"))
        self.steps = config.sampling.steps
        self.grid = self.policy.sigma_grid(self.steps)
        self.sampler = PromptData(config.data, config.seed).sampler
        self.optimizer = config.build("algorithm.optimizer")(
            list(self.policy.adapter.trained_parameters().values())
        )
        self.record = Record()
        self.groups = config.data.groups_per_step

    def run(self) -> Record:
        """All RL steps."""
        config = self.config
        stale: dict[int, list[CellBlock]] = {}
        stale_rewards: dict[int, Tensor] = {}
        for step in range(config.max_rl_steps):
            blocks, rewards = dict(stale), dict(stale_rewards)
            stale, stale_rewards = {}, {}
            for group in range(self.groups):
                if group not in blocks:
                    assert self._version(step, group) == step
                    blocks[group], rewards[group] = self._generate(step, group, version=step)
            if step + 1 < config.max_rl_steps:
                for group in range(self.groups):
                    if self._version(step + 1, group) == step:
                        stale[group], stale_rewards[group] = self._generate(
                            step + 1, group, version=step
                        )
            self._learn(blocks, rewards)
        self.record.weights = {
            n: p.detach().clone() for n, p in self.policy.adapter.trained_parameters().items()
        }
        self.rewards.close()
        return self.record

    def _version(self, step: int, group: int) -> int:
        data, schedule = self.config.data, self.config.schedule
        spec = ScheduleSpec(
            self.groups,
            data.group_size,
            self.config.sampling.task_size,
            self.steps,
            self.steps - 1,
            async_steps=schedule.async_steps,
            stale_fraction=schedule.stale_fraction,
        )
        return group_version(spec, step, group)

    @torch.no_grad()
    def _generate(self, step: int, group: int, version: int) -> tuple[list[CellBlock], Tensor]:
        """Every block of a group, K trained steps each, and its rewards [G]."""
        config = self.config
        prompt: Prompt = self.sampler.prompts_at(step)[group]
        condition = self.policy.codec.encode([prompt])
        plan = AllButLast().plan_steps(config.seed, step, self.steps)
        dtype = getattr(torch, config.sampling.storage_dtype)
        blocks, rewards = [], []
        for first in range(0, config.data.group_size, config.sampling.task_size):
            rows = tuple(range(first, first + config.sampling.task_size))
            key = denoise.SampleKey(config.seed, step, prompt.uid, rows)
            made = sampling.sample(self.policy, condition, key, self.grid, self.sde, plan, dtype)
            scores = self.rewards.score(self.policy.codec.decode(made.final), [prompt] * len(rows))[
                "judge_a"
            ]
            rewards.append(scores)
            for row, sample in enumerate(rows):
                for k, denoise_step in enumerate(plan.trained):
                    self.record.cells[step, group, sample, denoise_step] = Cell(
                        version,
                        made.latents[row, k].clone(),
                        made.next_latents[row, k].clone(),
                        made.log_probs[row, k].clone(),
                        scores[row].clone(),
                    )
            for k in range(0, len(plan.trained), self.block_steps):
                part = slice(k, k + self.block_steps)
                blocks.append(
                    CellBlock(
                        step=step,
                        group=group,
                        uid=prompt.uid,
                        first_sample=first,
                        version=version,
                        steps=made.steps[part],
                        sigmas=self.grid,
                        latents=made.latents[:, part].contiguous(),
                        next_latents=made.next_latents[:, part].contiguous(),
                        log_probs=made.log_probs[:, part].contiguous(),
                        condition=condition,
                    )
                )
        return blocks, torch.cat(rewards)

    def _learn(self, blocks: dict[int, list[CellBlock]], rewards: dict[int, Tensor]) -> None:
        """The optimizer updates of one logical batch: groups in order, one backward per block. An
        update takes some of the groups, or some samples of every group."""
        config = self.config
        updates = config.algorithm.updates_per_batch
        among, within = (1, updates) if config.data.updates_split == "samples" else (updates, 1)
        per_update, places = self.groups // among, config.data.prompts_per_batch // among
        samples = config.data.group_size // within
        for update in range(updates):
            self.optimizer.zero_grad(set_to_none=True)
            first, own = (
                update % among * per_update,
                range(update % within * samples, (update % within + 1) * samples),
            )
            groups = self._selected(rewards, range(first, first + per_update))[:places]
            denominator = places * samples * (self.steps - 1)
            for group in groups:
                advantages = group_advantages(rewards[group])
                for block in blocks[group]:
                    if block.first_sample not in own:
                        continue
                    rows = slice(block.first_sample, block.first_sample + block.samples)
                    (self._losses(block, advantages[rows]).sum() / denominator).backward()
            if groups and config.data.zero_variance_groups != "keep":
                for parameter in self.policy.adapter.trained_parameters().values():
                    if (
                        parameter.grad is not None
                    ):  # as if they had never been counted; log-probs round to fp32
                        parameter.grad *= places / len(groups)
            self.record.gradients.append(
                {
                    n: p.grad.clone()
                    for n, p in self.policy.adapter.trained_parameters().items()
                    if p.grad is not None
                }
            )
            if config.algorithm.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(
                    self.policy.adapter.trained_parameters().values(),
                    config.algorithm.max_grad_norm,
                )
            self.optimizer.step()

    def _selected(self, rewards: dict[int, Tensor], groups: range) -> list[int]:
        """Return the groups that may be trained, in order."""
        scored = [group for group in groups if not rewards[group].isnan().any()]
        if not self.config.data.oversample and self.config.data.zero_variance_groups == "keep":
            return scored
        return [group for group in scored if rewards[group].min() != rewards[group].max()]

    def _losses(self, block: CellBlock, advantages: Tensor) -> Tensor:
        """max(-A r, -A clip(r)) + kl_weight * KL(new || base), [b, K]."""
        algorithm = self.config.algorithm
        reference = None
        if algorithm.kl_weight:
            with torch.no_grad(), self.policy.adapter.reference():
                reference = denoise.replay(self.policy, block, self.sde).mean
        new = denoise.replay(self.policy, block, self.sde)
        ratio = torch.exp(new.log_prob - block.log_probs)
        weight = advantages[:, None]
        clip = algorithm.clip_range
        losses = torch.maximum(-weight * ratio, -weight * ratio.clamp(1.0 - clip, 1.0 + clip))
        if reference is None:
            return losses
        kl = (new.mean - reference).square().flatten(2).mean(dim=2) / (2.0 * new.scale**2)
        return losses + algorithm.kl_weight * kl


def reference(config: Settings, block_steps: int = 1) -> Record:
    """The record that a run of `config` must equal."""
    return Reference(config, block_steps).run()


def mean_reward(record: Record, step: int, groups: Sequence[int]) -> float:
    """Mean reward of some groups of one RL step."""
    return float(
        torch.stack(
            [c.reward for k, c in record.cells.items() if k[0] == step and k[1] in groups]
        ).mean()
    )
