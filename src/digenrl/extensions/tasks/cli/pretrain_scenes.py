"""`make pretrain-scenes`: train the scenes base model and its judge again, into the files that the
repository commits.

    digenrl pretrain-scenes [key=value ...]
    digenrl pretrain-scenes task=edits steps=1600 wrong_captions=0.5

Training is deterministic on a given machine with a single thread, and takes about fifteen minutes
of one idle core. `budget_s` cuts it into pieces, and the same command then continues.

The base learns from right captions first, so that it binds words to objects. Its last `noise_steps`
steps have some random captions, which loosen that binding without undoing it: this is what is left
for reinforcement learning to improve. A base with wrong captions from the first step confirms half
as much, before any loosening: benchmarks/results/scenes-2026-11-25.md.

task=edits trains the base model of the edits, which begins as that of the scenes. Both share the
judge.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from digenrl.config.help import Arguments, own_command
from digenrl.config.schema import AtLeast0, AtLeast1, File, Positive, Share
from digenrl.extensions.tasks.cli.pretrain import sampled, save

if TYPE_CHECKING:  # torch is imported only when the settings are read
    import torch
    from torch import Tensor

    from digenrl.extensions.tasks.scenes import ScenesEditPolicy, ScenesPolicy
    from reward_models.drawn_edits import Edit
    from reward_models.drawn_scenes import Kind, Scene

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

    task: Literal["scenes", "edits"] = "scenes"
    """Task whose base model is trained. scenes: the judge is trained as well."""
    base: File | None = None
    """File for the base model. null: the committed file."""
    judge: File | None = None
    """File for the judge. null: the committed file."""
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
    seed: int = 0
    """Seed of scenes, noise, captions and initial weights."""
    budget_s: Positive | None = None
    """Seconds after which the base model is saved, to be continued later. null: no limit."""


def pretrain_base(settings: Settings, unfinished: Path) -> ScenesPolicy | None:
    """Train by flow matching on drawn scenes or edits: regress eps - x0 at sigma ~
    shift(logit-normal(0, 1)).

    The last `settings.noise_steps` steps have some wrong captions. The result is the moving average
    of the weights. It is None when `settings.budget_s` is spent. Then the state is in the file
    `unfinished`, and the next call continues from there.
    """
    import torch
    from torch.nn import functional

    from digenrl.diffusion.sigmas import static_shift
    from digenrl.extensions.tasks.scenes import ScenesEditPolicy, ScenesPolicy

    started = time.monotonic()
    editing = settings.task == "edits"
    policy = (
        _with_scenes(ScenesEditPolicy("random"))
        if editing
        else ScenesPolicy("random", seed=settings.seed)
    )
    drawn = _edited if editing else _captioned
    network = policy.transformer
    average = {name: value.clone() for name, value in network.state_dict().items()}
    generator = torch.Generator().manual_seed(settings.seed)
    first, losses = 0, list[float]()
    parts = _optimizers(network, settings)
    if unfinished.exists():
        state = torch.load(unfinished, weights_only=True)
        network.load_state_dict(state["network"])
        average, first = state["average"], state["step"]
        generator.set_state(state["generator"])
        if first > settings.steps:
            parts = _noise_optimizers(network, settings)
        for part, saved in zip(parts, state["parts"], strict=True):
            part.load_state_dict(saved)
    per_chunk, last = CHUNK // settings.batch, settings.steps + settings.noise_steps
    for step in range(first, last):
        noisy = step >= settings.steps
        place = (step - settings.steps if noisy else step) % per_chunk
        if place == 0:
            spent = settings.budget_s is not None and time.monotonic() - started > settings.budget_s
            if spent and step > first:
                torch.save(
                    {
                        "network": network.state_dict(),
                        "average": average,
                        "step": step,
                        "generator": generator.get_state(),
                        "parts": [part.state_dict() for part in parts],
                    },
                    unfinished,
                )
                print(
                    f"step {step}/{last}: the time is spent; the same command goes on",
                    file=sys.stderr,
                )
                return None
            if step == settings.steps:
                average = {name: value.half().float() for name, value in average.items()}
                network.load_state_dict(average)
                parts = _noise_optimizers(network, settings)
                generator.manual_seed(settings.seed + 1)
            chunk = drawn(settings.wrong_captions if noisy else 0.0, generator)
        rows = slice(place * settings.batch, (place + 1) * settings.batch)
        clean, condition = chunk[0][rows], {key: value[rows] for key, value in chunk[1].items()}
        noise = torch.randn(clean.shape, generator=generator)
        sigmas = static_shift(
            torch.sigmoid(torch.randn(len(clean), generator=generator)), policy.shift
        )
        velocity = policy.velocity(
            torch.lerp(clean, noise, sigmas[:, None, None]), sigmas, condition
        )
        loss = functional.mse_loss(velocity, noise - clean)
        network.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        for part in parts:
            part.step()
        decay = NOISE_EMA if noisy else min(EMA, (step + 1) / (step + 10))
        for name, value in network.state_dict().items():
            average[name].lerp_(value, 1 - decay)
        losses.append(loss.item())
        if (step + 1) % 100 == 0:
            told = f"step {step + 1}/{last} loss {sum(losses) / len(losses):.4f}"
            print(f"{told} {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
            losses.clear()
    unfinished.unlink(missing_ok=True)
    network.load_state_dict({name: value.half().float() for name, value in average.items()})
    return policy


def _optimizers(network: torch.nn.Module, settings: Settings) -> list[Any]:
    """Return optimizers and rates of the first steps: Muon for the blocks' matrices, AdamW for the
    rest."""
    import torch

    matrices = [p for n, p in network.named_parameters() if p.ndim == 2 and "blocks." in n]
    inner = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in network.parameters() if id(parameter) not in inner]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, MUON_LR, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, settings.lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]

    def rate(step: int) -> float:
        done = min(1.0, step / settings.steps)
        return min(1.0, (step + 1) / 100) * (0.515 + 0.485 * math.cos(math.pi * done))

    rates = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in optimizers]
    return [*optimizers, *rates]


def _noise_optimizers(network: torch.nn.Module, settings: Settings) -> list[Any]:
    """Return the optimizer of the last steps: AdamW for every weight, at a constant rate."""
    import torch

    return [
        torch.optim.AdamW(
            network.parameters(), settings.noise_lr, betas=(0.9, 0.98), weight_decay=0.0
        )
    ]


def _with_scenes(policy: ScenesEditPolicy) -> ScenesEditPolicy:
    """Return the policy with the weights of the scenes' base model, and zero weights for the
    channels of the source."""
    from safetensors.torch import load_file
    from torch.nn.functional import pad

    from digenrl.extensions.tasks.scenes import BASE_FILE

    weights, name = load_file(BASE_FILE), "x_embedder.weight"
    width = policy.transformer.get_parameter(name).shape[1]
    weights[name] = pad(weights[name], (0, width - weights[name].shape[1]))
    policy.transformer.load_state_dict(weights)
    return policy


def _captioned(wrong: float, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
    """Return latents [CHUNK, 36, 48] of drawn scenes, and the conditioning of their captions, of
    which a share `wrong` is that of any scene."""
    import torch

    from digenrl.extensions.tasks.scenes import pack
    from reward_models.drawn_scenes import SCENES, draw_scenes

    scenes, pictures = draw_scenes(CHUNK, generator)
    mistaken = torch.rand(CHUNK, generator=generator) < wrong
    choice = torch.rand(CHUNK, generator=generator)
    captions = [
        SCENES[int(choice[row] * len(SCENES))] if mistaken[row] else scene
        for row, scene in enumerate(scenes)
    ]
    return pack(pictures), _features([caption.text for caption in captions])


def _edited(wrong: float, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
    """Return latents [CHUNK, 36, 48] of edited scenes, and the conditioning of source and prompt.

    A third of the scenes has one object. A share `wrong` of all edits is one of the mistakes.
    """
    import torch

    from digenrl.extensions.tasks.scenes import pack
    from reward_models.drawn_edits import EDITS
    from reward_models.drawn_scenes import draw, draw_places

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
    return pack(after), _features([edit.text for edit in edits]) | {"image": pack(before)}


def _features(texts: Sequence[str]) -> dict[str, Tensor]:
    """Return `text_features`, computed once per text."""
    from digenrl.extensions.tasks.scenes import text_features

    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    rows = [numbers[text] for text in texts]
    return {key: value[rows] for key, value in text_features(list(numbers)).items()}


def sample_scenes(policy: ScenesPolicy, scenes: list[Scene], steps: int, seed: int = 0) -> Tensor:
    """Return pictures [N, 3, 24, 24] of N scenes by the plain Euler ODE."""
    return sampled(policy, _features([scene.text for scene in scenes]), steps, seed)


def sample_edits(
    policy: ScenesPolicy, edits: list[Edit], steps: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the drawn sources and the results [N, 3, 24, 24] of N edits."""
    import torch

    from digenrl.extensions.tasks.scenes import pack
    from reward_models.drawn_scenes import draw, draw_places

    before = [edit.before for edit in edits]
    sources = draw(
        [s.kinds for s in before], draw_places(before, torch.Generator().manual_seed(seed))
    )
    condition = _features([edit.text for edit in edits]) | {"image": pack(sources)}
    return sources, sampled(policy, condition, steps, seed)


def fit_judge(seed: int, steps: int = 1200, batch: int = 96) -> torch.nn.Sequential:
    """Train the held-out judge on real scenes and on scenes of one to three unrelated objects.

    The pictures are blurred and noisy, so that the judge can judge what a model draws and not only
    perfect scenes.
    """
    import torch
    from torch.nn import functional

    from reward_models.drawn_scenes import KINDS
    from reward_models.scene_judges import COUNTS, build_judge

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
    import torch

    from reward_models.drawn_scenes import KINDS, SIDE, draw, draw_places, draw_scenes
    from reward_models.scene_judges import COUNTS

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
    for row in range(
        half
    ):  # one object as often lies over another: then the judge must count what is visible
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


def main(arguments: Sequence[str]) -> int:
    """Train, save and measure. Returns exit code 2 on a bad argument."""

    def work(settings: Settings, _: list[str]) -> None:
        import torch

        from digenrl.extensions.tasks.scenes import BASE_FILE, EDIT_BASE_FILE
        from reward_models.drawn_edits import EDITS
        from reward_models.drawn_scenes import SCENES
        from reward_models.scene_judges import JUDGE_FILE, SceneDetector, SceneJudge, spread

        torch.set_num_threads(1)
        editing = settings.task == "edits"
        base = Path(settings.base or (EDIT_BASE_FILE if editing else BASE_FILE))
        judge_file = Path(settings.judge or JUDGE_FILE)
        policy = pretrain_base(settings, base.with_suffix(".tmp"))
        if policy is None:
            return
        save(_halved(policy.transformer), base)
        if editing:
            edits = list(EDITS[::7])
            scenes, pictures = (
                [edit.after for edit in edits],
                sample_edits(policy, edits, steps=6)[1],
            )
        else:
            save(_halved(fit_judge(settings.seed + 3, settings.judge_steps)), judge_file)
            scenes = [scene for scene in SCENES[::11] for _ in range(8)]
            pictures = sample_scenes(policy, scenes, steps=6)
        perfect = SceneDetector(perfect=True).judge(pictures, scenes).mean()
        judged = SceneJudge(str(judge_file)).judge(pictures, scenes).mean()
        told = "" if editing else f"; centres spread by {spread(pictures, scenes)[1]:.2f} pixels"
        counted = f"({len(scenes)} samples){told}"
        print(
            f"base model: all assertions hold in {perfect:.3f}, by the judge {judged:.3f} {counted}"
        )

    return own_command(Settings, __doc__, arguments, work)


def _halved(module: torch.nn.Module) -> dict[str, Tensor]:
    return {
        name: value.half() if value.is_floating_point() else value
        for name, value in module.state_dict().items()
    }
