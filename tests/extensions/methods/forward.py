"""What tests of methods of the forward process share: modules on a toy policy, and the cells of a
block worked out one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from digenrl import keys
from digenrl.algorithms.advantages import Advantage
from digenrl.algorithms.base import PolicyModule
from digenrl.diffusion.sde import FlowSDE
from digenrl.extensions.methods.awm import AWM
from digenrl.extensions.methods.dgpo import DGPO
from digenrl.extensions.methods.nft import OldPolicySchedule
from digenrl.extensions.methods.noise_levels import NoiseLevels
from digenrl.extensions.methods.rvm import RVM
from digenrl.types import CellBlock, TrainBatch
from tests.algorithms.fit import ADAMW
from tests.algorithms.toy_policy import ToyPolicy, roll


def build(kind: type[PolicyModule], policy: ToyPolicy, **changes: Any) -> PolicyModule:
    """A module of `kind`; `changes` are constructor arguments."""
    arguments: dict[str, Any] = {
        "sde": FlowSDE(0.0),
        "train_steps": NoiseLevels(size=3),
        "optimizer": ADAMW,
        "advantage": Advantage(),
        "seed": 0,
        "kl_weight": 0.0,
    }
    if kind is not RVM:
        arguments["old_policy"] = OldPolicySchedule(ceiling=0.3)
    if kind is AWM:
        arguments["old_weight"] = 0.0
    return kind(policy, **(arguments | changes))


METHODS = (AWM, DGPO, RVM)


def blocks_of(policy: ToyPolicy, step: int = 0, groups: int = 2) -> list[CellBlock]:
    return roll(policy, FlowSDE(0.0), NoiseLevels(size=3), step=step, version=step, groups=groups)


def gradient(module: PolicyModule, item: TrainBatch) -> Tensor:
    module.zero_grad()
    module.training_step(item, 0).backward()
    return torch.cat(
        [p.grad.flatten() for p in module.policy.adapter.trained_parameters().values()]
    )


def shift(policy: ToyPolicy, by: float) -> None:
    """Move the policy away from what it was."""
    with torch.no_grad():
        for index, parameter in enumerate(policy.transformer.parameters()):
            parameter.add_(by * torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
            parameter.mul_(1 + 0.01 * index)


def each_cell(
    block: CellBlock, stream: str, noise_of: Callable[[int], int] = lambda number: number
) -> list[list[tuple[Tensor, Tensor, float]]]:
    """[b][K] of (x_t, eps - x0, t): each cell by itself, at the grid's levels."""
    assert block.final is not None
    rows = []
    for row, number in enumerate(block.numbers):
        clean, cells = block.final[row].float(), []
        for step in block.steps.tolist():
            shape = tuple(clean.shape)
            eps = keys.noise(0, block.step, block.uid, [noise_of(number)], step, shape, stream)[0]
            t = float(block.sigmas[step])
            cells.append(((1 - t) * clean + t * eps, eps - clean, t))
        rows.append(cells)
    return rows


def velocity(policy: ToyPolicy, block: CellBlock, noisy: Tensor, t: float) -> Tensor:
    """The velocity of one cell by a forward of its own."""
    return policy.velocity(noisy[None], torch.tensor([t]), block.condition)[0]
