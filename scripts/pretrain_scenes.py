"""`make pretrain-scenes`: train the scenes base model and its judge again, into the files that the
repository commits.

    python -m scripts.pretrain_scenes [key=value ...]
    python -m scripts.pretrain_scenes task=edits steps=1600 wrong_captions=0.5
    python -m scripts.pretrain_scenes student [pairs=6144] [student_steps=1500]

Training is deterministic on a given machine with a single thread, and takes about fifteen minutes
of one idle core.

The base learns from right captions first, so that it binds words to objects. Its last `noise_steps`
steps have some random captions, which loosen that binding without undoing it: this is what is left
for reinforcement learning to improve. A base with wrong captions from the first step confirms half
as much, before any loosening: benchmarks/results/scenes-2026-11-25.md.

task=edits trains the base model of the edits, which begins as that of the scenes. Both share the
judge.

student (task=student) distils the scenes' base into two steps, for experiment=scenes_fewstep. The
base draws `pairs` pictures by the ODE of many steps. The student begins as the base, and learns to
take each half of the way in one step (as in progressive distillation, arXiv:2202.00512). Distilling
takes some minutes of an idle core.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from digenrl.config.help import Arguments, own_command
from digenrl.config.value_types import AtLeast0, AtLeast1, File, Positive, Share
from digenrl.extensions.tasks.scenes import (
    BASE_FILE,
    EDIT_BASE_FILE,
    STUDENT_FILE,
    ScenesEditPolicy,
    ScenesPolicy,
    pack_pictures,
    text_features,
)
from reward_models.drawn_scenes import (
    KINDS,
    SCENES,
    SIDE,
    Kind,
    Scene,
    draw,
    draw_places,
    draw_scenes,
)
from reward_models.scene_judges import (
    COUNTS,
    JUDGE_FILE,
    SceneDetector,
    SceneJudge,
    build_judge,
    spread,
)
from scripts.drawn_edits import EDITS, Edit
from scripts.flow_matching import Batch, sampled, save, train

CHUNK = 2048
"""Number of pictures that are drawn together."""
EMA = 0.997
NOISE_EMA = 0.97
"""Decay of the moving average of the weights, of the first and of the last steps."""
MUON_LR = 6e-3
"""Learning rate of the blocks' matrices, with updates of the size of AdamW's. Other weights take
the settings' rate."""


class Settings(Arguments):
    """Settings of the command line."""

    task: Literal["scenes", "edits", "student"] = "scenes"
    """Task whose base model is trained. scenes: the judge is trained as well. student: the scenes'
    base in two steps."""
    base: File | None = None
    """File for the base model. null: the task's committed file."""
    judge: File = str(JUDGE_FILE)
    """File for the judge."""
    steps: AtLeast1 = 3600
    """Optimizer steps of the base model with right captions."""
    noise_steps: AtLeast0 = 300
    """Further optimizer steps with some random captions or wrong edits."""
    wrong_captions: Share = 0.2
    """Share of random captions or wrong edits in the further steps."""
    judge_steps: AtLeast1 = 2400
    """Optimizer steps of the judge."""
    batch: AtLeast1 = 64
    """Pictures per step of the base model."""
    lr: Positive = 2e-3
    """Peak learning rate of the parameters that Muon does not train."""
    noise_lr: Positive = 5e-4
    """Learning rate of all parameters in the further steps."""
    pairs: AtLeast1 = 6144
    """Noises from which the base draws what the student learns."""
    teacher_steps: AtLeast1 = 6
    """Steps of the base for each of the student's two."""
    student_steps: AtLeast1 = 1500
    """Optimizer steps of the student."""
    seed: int = 0
    """Seed of scenes, noise, captions and initial weights."""


def pretrain_base(settings: Settings) -> ScenesPolicy:
    """Train on drawn scenes or edits, of which the last `settings.noise_steps` steps have some
    wrong captions."""
    policy: ScenesPolicy
    drawn: Callable[[float, torch.Generator], Batch]
    if settings.task == "edits":
        policy, drawn = _with_scenes(ScenesEditPolicy("random")), _edited
    else:
        policy, drawn = ScenesPolicy("random", seed=settings.seed), _captioned
    network, generator = policy.transformer, torch.Generator().manual_seed(settings.seed)

    def batches(steps: int, wrong: float) -> Iterator[Batch]:
        per_chunk = CHUNK // settings.batch
        for step in range(steps):
            place = step % per_chunk * settings.batch
            if place == 0:
                latents, condition = drawn(wrong, generator)
            rows = slice(place, place + settings.batch)
            yield latents[rows], {key: value[rows] for key, value in condition.items()}

    def rate(step: int) -> float:
        done = min(1.0, step / settings.steps)
        return min(1.0, (step + 1) / 100) * (0.515 + 0.485 * math.cos(math.pi * done))

    train(
        policy,
        batches(settings.steps, wrong=0.0),
        generator,
        make_optimizers(network, settings.lr),
        rate,
        clip=1.0,
        decay=lambda step: min(EMA, (step + 1) / (step + 10)),
    )
    round_weights(network)
    generator.manual_seed(settings.seed + 1)
    train(
        policy,
        batches(settings.noise_steps, settings.wrong_captions),
        generator,
        [_adamw(network.parameters(), settings.noise_lr)],
        clip=1.0,
        decay=lambda step: NOISE_EMA,
    )
    round_weights(network)
    return policy


def round_weights(network: nn.Module) -> None:
    """Round the weights to what the file keeps of them."""
    network.load_state_dict(halved(network))


def make_optimizers(network: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Return the optimizers of the first steps: Muon for the blocks' matrices, AdamW for the
    rest."""
    matrices = [p for n, p in network.named_parameters() if p.ndim == 2 and "blocks." in n]
    inner = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in network.parameters() if id(parameter) not in inner]
    muon = torch.optim.Muon(matrices, MUON_LR, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    return [muon, _adamw(others, lr)]


def _adamw(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr, betas=(0.9, 0.98), weight_decay=0.0)


def _with_scenes(policy: ScenesEditPolicy) -> ScenesEditPolicy:
    """Return the policy with the weights of the scenes' base model, and zero weights for the
    channels of the source."""
    weights, name = load_file(BASE_FILE), "x_embedder.weight"
    width = policy.transformer.get_parameter(name).shape[1]
    weights[name] = functional.pad(weights[name], (0, width - weights[name].shape[1]))
    policy.transformer.load_state_dict(weights)
    return policy


def _captioned(wrong: float, generator: torch.Generator) -> Batch:
    """Return latents [CHUNK, 36, 48] of drawn scenes, and the conditioning of their captions, of
    which a share `wrong` is that of any scene."""
    scenes, pictures = draw_scenes(CHUNK, generator)
    mistaken = torch.rand(CHUNK, generator=generator) < wrong
    choice = torch.rand(CHUNK, generator=generator)
    captions = [
        SCENES[int(choice[row] * len(SCENES))] if mistaken[row] else scene
        for row, scene in enumerate(scenes)
    ]
    return pack_pictures(pictures), features_of([caption.text for caption in captions])


def _edited(wrong: float, generator: torch.Generator) -> Batch:
    """Return latents [CHUNK, 36, 48] of edited scenes, and the conditioning of source and prompt.

    A third of the scenes has one object. A share `wrong` of all edits is one of the mistakes.
    """
    single = sum(len(edit.before.kinds) == 1 for edit in EDITS)  # they come first
    plain = torch.randint(single, (CHUNK,), generator=generator)
    pairs = torch.randint(single, len(EDITS), (CHUNK,), generator=generator)
    chosen = torch.where(torch.rand(CHUNK, generator=generator) < 1 / 3, plain, pairs)
    edits = [EDITS[int(row)] for row in chosen]
    places = draw_places([edit.before for edit in edits], generator)
    mistaken = torch.rand(CHUNK, generator=generator) < wrong
    choice = torch.rand(CHUNK, generator=generator)
    results = [
        edit.mistakes[int(choice[row] * len(edit.mistakes))] if mistaken[row] else edit.after
        for row, edit in enumerate(edits)
    ]
    before, after = (
        draw([scene.kinds for scene in s], places)
        for s in ([edit.before for edit in edits], results)
    )
    return pack_pictures(after), features_of([edit.text for edit in edits]) | {
        "image": pack_pictures(before)
    }


def features_of(texts: Sequence[str]) -> dict[str, Tensor]:
    """Return `text_features`, computed once per text."""
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    rows = [numbers[text] for text in texts]
    return {key: value[rows] for key, value in text_features(list(numbers)).items()}


def sample_scenes(policy: ScenesPolicy, scenes: list[Scene], steps: int, seed: int = 0) -> Tensor:
    """Return pictures [N, 3, 24, 24] of N scenes by the plain Euler ODE."""
    return sampled(policy, features_of([scene.text for scene in scenes]), steps, seed)


def sample_edits(
    policy: ScenesPolicy, edits: list[Edit], steps: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the drawn sources and the results [N, 3, 24, 24] of N edits."""
    before = [edit.before for edit in edits]
    sources = draw(
        [s.kinds for s in before], draw_places(before, torch.Generator().manual_seed(seed))
    )
    condition = features_of([edit.text for edit in edits]) | {"image": pack_pictures(sources)}
    return sources, sampled(policy, condition, steps, seed)


def fit_judge(seed: int, steps: int = 1200, batch: int = 96) -> nn.Sequential:
    """Train the held-out judge on real scenes and on scenes of one to three unrelated objects.

    The pictures are blurred and noisy, so that the judge can judge what a model draws and not only
    perfect scenes.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_judge()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)
    per_chunk = CHUNK // batch
    for step in range(steps):
        if step % per_chunk == 0:
            pictures, counts, centres = _counted(generator)
        rows = slice(step % per_chunk * batch, (step % per_chunk + 1) * batch)
        blur, noise = torch.rand(2, batch, 1, 1, 1, generator=generator)
        clear = pictures[rows]
        soft = functional.avg_pool2d(functional.pad(clear, (1, 1, 1, 1), mode="replicate"), 3, 1)
        seen = torch.lerp(clear, soft, 0.6 * blur) + 0.06 * noise * torch.randn(
            clear.shape, generator=generator
        )
        out = model(2 * seen - 1).view(batch, len(KINDS), COUNTS + 2)
        there = (counts[rows] > 0)[..., None]
        loss = len(KINDS) * functional.cross_entropy(
            out[..., :COUNTS].flatten(0, 1), counts[rows].flatten()
        )
        loss = loss + 20 * ((out[..., COUNTS:] - centres[rows]) ** 2 * there).sum() / there.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def _counted(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return pictures [CHUNK, 3, 24, 24], the number of objects of each kind [CHUNK, 12], and their
    mean centre / 24 [..., 2]."""
    half = CHUNK // 2
    scenes, _ = draw_scenes(half, generator)
    places = draw_places(scenes, generator)
    kinds: list[tuple[Kind, ...]] = [scene.kinds for scene in scenes]
    real = draw(kinds, places)
    loose = [draw_places(draw_scenes(half, generator)[0], generator) for _ in range(2)]
    mixed = torch.cat([loose[0], loose[1][:, :1]], 1)
    number = torch.randint(1, 4, (half,), generator=generator)
    chosen = torch.randint(len(KINDS), (half, 3), generator=generator)
    others = [tuple(KINDS[int(chosen[row, k])] for k in range(3)) for row in range(half)]
    several: list[tuple[Kind, ...]] = []
    # One object as often lies over another: then the judge must count what is visible.
    for row in range(half):
        apart = [k for k in range(int(number[row])) if mixed[row, k, 2] > 0]
        several.append(tuple(others[row][k] for k in apart))
        mixed[row, : len(apart)] = mixed[row, apart]
    pictures = torch.cat([real, draw(several, mixed)])
    counts = torch.zeros(CHUNK, len(KINDS), dtype=torch.int64)
    centres = torch.zeros(CHUNK, len(KINDS), 2)
    for row, (own, at) in enumerate(
        [*zip(kinds, places, strict=True), *zip(several, mixed, strict=True)]
    ):
        for kind, place in zip(own, at, strict=False):
            counts[row, KINDS.index(kind)] += 1
            centres[row, KINDS.index(kind)] += place[:2] / SIDE
    return pictures, counts.clamp(max=COUNTS - 1), centres / counts.clamp(min=1)[..., None]


def halved(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: value.half() if value.is_floating_point() else value
        for name, value in module.state_dict().items()
    }


def work(settings: Settings, _: list[str]) -> None:
    """Train, save and measure."""
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)  # for the dropout of the judge
    if settings.task == "student":
        from scripts.scenes_student import compare_student, distil_student  # it needs this file

        student = distil_student(settings)
        save(halved(student.transformer), Path(settings.base or STUDENT_FILE))
        compare_student(student, settings)
        return
    editing = settings.task == "edits"
    policy = pretrain_base(settings)
    save(
        halved(policy.transformer),
        Path(settings.base or (EDIT_BASE_FILE if editing else BASE_FILE)),
    )
    if editing:
        edits = list(EDITS[::7])
        scenes = [edit.after for edit in edits]
        pictures = sample_edits(policy, edits, steps=6)[1]
    else:
        save(halved(fit_judge(settings.seed + 3, settings.judge_steps)), Path(settings.judge))
        scenes = [scene for scene in SCENES[::11] for _ in range(8)]
        pictures = sample_scenes(policy, scenes, steps=6)
    perfect = SceneDetector(perfect=True).judge(pictures, scenes).mean()
    judged = SceneJudge(settings.judge).judge(pictures, scenes).mean()
    told = "" if editing else f"; centres spread by {spread(pictures, scenes)[1]:.2f} pixels"
    print(
        f"base model: all assertions hold in {perfect:.3f}, by the judge {judged:.3f} "
        f"({len(scenes)} samples){told}"
    )


def main(arguments: Sequence[str]) -> int:
    """Run the command. Returns exit code 2 on a bad argument."""
    words = ["task=student" if word == "student" else word for word in arguments]
    return own_command(Settings, __doc__, words, work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
