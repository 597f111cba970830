"""Distil the scenes' base into two steps (`make pretrain-scenes ARGS=student`).

The base draws pictures by the ODE of many steps. The student begins as the base and learns to make
each half of the way in one step, as in progressive distillation (arXiv:2202.00512).
"""

from __future__ import annotations

import itertools
import math
import sys
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from digenrl.extensions.tasks.scenes import BASE_FILE, ScenesPolicy, ScenesStudentPolicy
from digenrl.rollout.engine import picture_detail
from reward_models.drawn_scenes import SCENES
from reward_models.scene_judges import SceneDetector, SceneJudge, spread
from scripts.pretrain_scenes import (
    EMA,
    Settings,
    features_of,
    make_optimizers,
    round_weights,
    sample_scenes,
)

STUDENT_GRID = 2
"""Steps of the student."""


def distil_student(settings: Settings) -> ScenesPolicy:
    """Return a policy that makes each of two steps of the ODE at once, as the base makes it in
    `settings.teacher_steps`."""
    teacher, student = ScenesPolicy(), ScenesStudentPolicy(str(BASE_FILE))
    generator = torch.Generator().manual_seed(settings.seed)
    choice = torch.randint(len(SCENES), (settings.pairs,), generator=generator)
    condition = features_of([SCENES[int(row)].text for row in choice])
    points = [torch.randn(settings.pairs, *teacher.latent_shape, generator=generator)]
    grid = teacher.sigma_grid(STUDENT_GRID)
    for sigma, after in itertools.pairwise(grid):
        points.append(_teach(teacher, points[-1], condition, sigma, after, settings.teacher_steps))
        print(f"drew {settings.pairs} halves", file=sys.stderr, flush=True)
    network = student.transformer.requires_grad_(True)
    optimizers = make_optimizers(network, settings.lr / 2)
    rate = partial(_cosine, settings.student_steps)
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, rate) for each in optimizers]
    average = {name: value.clone() for name, value in network.state_dict().items()}
    for step in range(settings.student_steps):
        rows = torch.randint(settings.pairs, (settings.batch,), generator=generator)
        given = {name: value[rows] for name, value in condition.items()}
        # Half of the batch at each of the two noise levels.
        half = torch.arange(settings.batch) % STUDENT_GRID
        start, end = (
            torch.stack([points[int(k) + offset][row] for k, row in zip(half, rows, strict=True)])
            for offset in (0, 1)
        )
        sigma, after = grid[half], grid[half + 1]
        velocity = (end - start) / (after - sigma)[:, None, None]
        # Errors of the picture, which a step makes of its velocity.
        loss = functional.mse_loss(
            student.velocity(start, sigma, given) * sigma[:, None, None],
            velocity * sigma[:, None, None],
        )
        network.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        for name, value in network.state_dict().items():
            average[name].lerp_(value, 1 - min(EMA, (step + 1) / (step + 10)))
        if (step + 1) % 100 == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", file=sys.stderr, flush=True)
    network.load_state_dict(average)
    round_weights(network)
    return student


@torch.no_grad()
def _teach(
    teacher: ScenesPolicy,
    latents: Tensor,
    condition: dict[str, Tensor],
    sigma: Tensor,
    after: Tensor,
    steps: int,
) -> Tensor:
    """Return where the base's ODE leads from `sigma` to `after` in equal steps."""
    made = []
    for first in range(0, len(latents), 512):
        rows = slice(first, first + 512)
        given = {name: value[rows] for name, value in condition.items()}
        x = latents[rows]
        for low, high in itertools.pairwise(torch.linspace(float(sigma), float(after), steps + 1)):
            x = x + (high - low) * teacher.velocity(x, low.expand(len(x)), given)
        made.append(x)
    return torch.cat(made)


def _cosine(steps: int, step: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))


def compare_student(student: ScenesPolicy, settings: Settings) -> None:
    """Print how the student draws in two steps, beside the base in two and in twelve."""
    scenes = [scene for scene in SCENES[::11] for _ in range(8)]
    detector, base = SceneDetector(perfect=True), ScenesPolicy()
    for name, policy, steps in (
        ("student", student, STUDENT_GRID),
        ("base", base, STUDENT_GRID),
        ("base", base, STUDENT_GRID * settings.teacher_steps),
    ):
        pictures = sample_scenes(policy, scenes, steps)
        print(
            f"{name}, {steps} steps: all assertions hold in "
            f"{detector.judge(pictures, scenes).mean():.3f}, by the judge "
            f"{SceneJudge(settings.judge).judge(pictures, scenes).mean():.3f}; detail "
            f"{picture_detail(pictures).mean():.3f}; "
            f"centres spread by {spread(pictures, scenes)[1]:.2f}"
        )
