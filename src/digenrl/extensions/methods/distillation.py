"""On-policy distillation: the student samples, and the teachers say where they would have gone from
each of its steps.

DiffusionOPD (arXiv 2605.15055): a student's transition and a teacher's are Gaussian around
different means with one deviation, so their KL has a closed form. As in Tencent-Hunyuan/UniRL
algorithms/diffusionopd.py at 2586b6c, teachers are adapters of one base, and each teaches the
prompts of its own domain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NotRequired, TypedDict, Unpack, get_args

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from digenrl.algorithms.base import CommonArguments, PolicyModule
from digenrl.algorithms.copies import ParameterCopy
from digenrl.algorithms.objectives import gaussian_kl, mean_square_kl
from digenrl.config.relations.methods import teacher_weights
from digenrl.data import load_prompts
from digenrl.diffusion.denoise import replay
from digenrl.models.policy import Policy
from digenrl.types import CellBlock, TrainBatch

Divergence = Literal["gaussian", "means"]


def transition_distance(
    mean: Tensor, teacher: Tensor, scale: Tensor, divergence: Divergence
) -> Tensor:
    """Return the distance from a teacher's transition, per dimension, [b, K].

    `gaussian` is mean_dims((mean - teacher)^2) / (2 S^2), the KL of the transitions. `means` is the
    same without S. The paper uses it for the ODE, and UniRL by default
    (`add_kl_coefficient=False`).

    mean, teacher [b, K, *L]; scale [b, K] S.
    """
    if divergence == "gaussian":
        return gaussian_kl(mean, teacher, scale)
    return 0.5 * mean_square_kl(mean, teacher)


@dataclass
class Teacher:
    """Weights that the student learns from, in the place of its own."""

    run: str
    """Run whose last checkpoint has them, or a file."""
    weight: float
    uids: frozenset[int] | None
    """Prompts that the teacher teaches; None: all."""
    copy: ParameterCopy


class TeacherKeys(TypedDict):
    """Keys of algorithm.teachers.NAME."""

    run: str
    prompts: NotRequired[str | None]
    weight: NotRequired[float]


class Distillation(PolicyModule):
    """Loss per cell: the sum over the prompt's teachers of weight * `transition_distance`."""

    rewarded = False

    def __init__(
        self,
        policy: Policy,
        teachers: Mapping[str, TeacherKeys],
        divergence: Divergence = "gaussian",
        **common: Unpack[CommonArguments],
    ) -> None:
        """Take the settings of `algorithm`. `teachers` has name -> keys of a teacher."""
        super().__init__(policy, **common)
        if divergence not in get_args(Divergence):
            raise ValueError(
                f"algorithm.divergence = {divergence}: use {' or '.join(get_args(Divergence))}"
            )
        if not self.sde.stochastic:
            raise ValueError(
                "distillation compares transitions, and an ODE keeps none: use algorithm/sde=flow "
                "with a noise level above 0"
            )
        self.divergence: Divergence = divergence
        self.teachers = {name: _make_teacher(**settings) for name, settings in teachers.items()}

    def on_train_start(self) -> None:
        """Load the teachers. Only trainers hold them.

        Raises:
            ValueError: weights of another model, or those that the student begins with.
        """
        super().on_train_start()
        own = self.policy.adapter.trained_parameters()
        for name, teacher in self.teachers.items():
            file = teacher_weights(teacher.run, f"{__name__}.{type(self).__name__}")
            teacher.copy.tensors = _fit_to_student(
                f"algorithm.teachers.{name}: {file}", load_file(file), own
            )

    def cell_losses(
        self, block: CellBlock, advantages: Tensor, batch: TrainBatch, live: bool
    ) -> Tensor:
        """Return the losses, [b, K]."""
        own, targets = self.policy.adapter.trained_parameters(), dict[str, Tensor]()
        for name, teacher in self.teachers.items():
            if teacher.uids is None or block.uid in teacher.uids:
                with torch.no_grad(), teacher.copy.swapped_into(own):
                    targets[name] = replay(self.policy, block, self.sde).mean
        new = replay(self.policy, block, self.sde)
        total = torch.zeros_like(new.log_prob)
        for name, target in targets.items():
            apart = transition_distance(new.mean, target, new.scale, self.divergence)
            self._meters.update(f"distance/{name}", apart.sum() * live, apart.numel() * live)
            total = total + self.teachers[name].weight * apart
        return total


def _make_teacher(run: str, prompts: str | None = None, weight: float = 1.0) -> Teacher:
    uids = None if prompts is None else frozenset(each.uid for each in load_prompts(prompts))
    return Teacher(run, float(weight), uids, ParameterCopy())


def _fit_to_student(
    where: str, tensors: Mapping[str, Tensor], own: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Return a teacher's tensors, each where and as the student holds its own."""
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    wanted = {name: tuple(value.shape) for name, value in own.items()}
    if differing := sorted(name for name, _ in shapes.items() ^ wanted.items()):
        raise ValueError(
            f"{where} is of another model or adapter: {len(set(differing))} trained tensors differ "
            f"(first: {differing[0]}); train teacher and student with the same `model`"
        )
    moved = {name: value.to(own[name].device, own[name].dtype) for name, value in tensors.items()}
    if all(torch.equal(value, _full_tensor(own[name])) for name, value in moved.items()):
        raise ValueError(
            f"{where} equals the student: it would teach nothing; name a run that was trained more"
        )
    return {
        name: distribute_tensor(value, at.device_mesh, at.placements)
        if isinstance(at := own[name], DTensor)
        else value
        for name, value in moved.items()
    }


def _full_tensor(parameter: nn.Parameter) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
