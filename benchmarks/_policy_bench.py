"""One policy with random weights and what can be measured of it: a denoising step, a trained
micro-batch, the first ratio, encoding, decoding, publication, an RL step. Every measurement goes
through the classes that a run uses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partialmethod
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from benchmarks import _device
from benchmarks._random_builds import FAMILY, TINY, random_weights
from digenrl import config as configuration
from digenrl.config import Composed
from digenrl.data import PromptData
from digenrl.diffusion import denoise
from digenrl.diffusion.steps import StepPlan
from digenrl.extensions.planner.cli.profile import training_batch
from digenrl.extensions.planner.counts import backward_flops, forward_bytes, forward_flops
from digenrl.extensions.planner.memory import (
    FRAGMENTATION,
    GIB,
    TrainerLoad,
    moment_bytes,
    rollout_memory,
    saved_bytes,
    trainer_memory,
)
from digenrl.extensions.planner.reading import workload_of
from digenrl.facts import facts_by_family
from digenrl.models import tiny as tiny_builds
from digenrl.models.pipeline import DiffusersPolicy
from digenrl.models.policy import Policy
from digenrl.parts import sampling_spec, schedule_spec
from digenrl.recompute import parse_recompute
from digenrl.rollout.engine import RolloutEngine
from digenrl.schedule import Task
from digenrl.transport.weights import adopt, publish
from digenrl.types import CellBlock, Prompt, TrainBatch, move_tensors

EXPERIMENTS = {
    model: facts_by_family()[family].measured["experiment"] for model, family in FAMILY.items()
}
"""Model -> experiment whose sizes, guidance and loss are measured."""
EAGER, COMPILED = ENGINES = ("eager", "compiled")
GRADES = {"all": "false", "products": "products", "attention": "attention", "inputs": "true"}
"""What blocks keep for the backward pass -> `model.gradient_checkpointing`."""
PROMPT = Prompt("a shop window at night with a hand-painted sign that says open, rain on the glass")
NOBODY: Any = SimpleNamespace(multicast=lambda routes, message: None)
"""A link without peers, for publications that are only copied and hashed."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Build:
    """How a policy is built. Measurements with equal builds share a policy."""

    compiled: bool = False
    kept: str = "inputs"
    """Key of `GRADES`: what blocks keep."""
    full: bool = False
    """Whether all weights are trained, in place of LoRA."""
    tiling: bool | None = None
    """Whether the decoder works in tiles, if encoders and decoder are measured. None: the
    transformer is measured."""

    @property
    def words(self) -> list[str]:
        """Overrides of the experiment. (All weights and a reference copy are more than most GPUs
        hold: no KL.)"""
        lora = "model.lora={rank: 64, alpha: 128, targets: attention_ff}"
        tiles = [] if self.tiling is None else [f"++model.vae_tiling={str(self.tiling).lower()}"]
        return [
            *(("model.lora=null", "algorithm.kl_weight=0.0") if self.full else (lora,)),
            f"model.compile={str(self.compiled).lower()}",
            f"model.gradient_checkpointing={GRADES[self.kept]}",
            *tiles,
        ]


@dataclass(frozen=True)
class Unit:
    """One measurement."""

    model: str
    build: Build
    stage: str
    """Key of `MEASURES`."""
    engine: str = EAGER
    samples: int = 1
    steps: int = 1
    """K, the steps of a sample in one forward."""

    @property
    def key(self) -> str:
        """Name of the unit among the results."""
        build = self.build
        trained = "full" if build.full else "lora"
        what = (
            f"{trained}-{build.kept}"
            if build.tiling is None
            else "tiles"
            if build.tiling
            else "whole"
        )
        return f"{self.model}/{self.stage}/{self.engine}/{what}/b{self.samples}/k{self.steps}"


def composed(model: str, size: str, *words: str) -> Composed:
    """The model's experiment, with its tiny build's tokenizers and a reward that needs no
    weights."""
    hardware = "cpu_tiny" if size == TINY else "single_gpu"
    folder = tiny_builds.ensure(FAMILY[model])
    own = [
        f"experiment={EXPERIMENTS[model]}",
        f"hardware={hardware}",
        "reward=jpeg",
        "schedule.tsp.batch=all",
    ]
    return configuration.load([*own, f"model.path={folder}", *words])


@dataclass(frozen=True)
class Bench:
    """A policy and its algorithm on a device."""

    model: str
    size: str
    device: torch.device
    composed: Composed
    policy: Policy
    module: Any
    condition: dict[str, Tensor]
    grid: Tensor

    def start(self, samples: int) -> denoise.SampleState:
        """Samples before their first step."""
        key = denoise.SampleKey(0, 0, PROMPT.uid, tuple(range(samples)))
        dtype = getattr(torch, self.composed.settings.sampling.storage_dtype)
        return denoise.initial_state(key, self.policy.latent_shape, dtype, self.device)

    def advance(self, state: denoise.SampleState, trained: int = 1) -> denoise.SampleState:
        """One denoising step as a rollout makes it; the first `trained` steps are kept."""
        steps = tuple(range(trained))
        means = self.module.needs_means
        return denoise.advance_state(
            self.policy,
            self.condition,
            state,
            self.grid,
            self.module.sde,
            StepPlan(steps, steps),
            means,
        )

    def cells(self, samples: int, steps: int) -> TrainBatch:
        """A micro-batch of the first `steps` transitions of `samples` samples."""
        state = self.start(samples)
        for _ in range(steps):
            state = self.advance(state, steps)
        block = CellBlock(
            step=0,
            group=0,
            uid=PROMPT.uid,
            first_sample=0,
            version=0,
            steps=torch.arange(steps),
            sigmas=self.grid,
            latents=torch.stack(state.kept_latents, dim=1),
            next_latents=torch.stack(state.kept_next_latents, dim=1),
            log_probs=torch.stack(state.kept_log_probs, dim=1),
            condition=self.condition,
            means=torch.stack(state.kept_means, dim=1) if state.kept_means else None,
        )
        unequal = torch.linspace(0.0, 1.0, max(samples, 4)).unsqueeze(
            0
        )  # so that every term of the loss counts
        made = TrainBatch(
            blocks=(block,),
            rewards={"unequal": unequal},
            reward_weights={"unequal": 1.0},
            denominator=float(samples * steps),
            update=0,
            version=0,
        )
        return made.to(self.device)

    def weights(self) -> Any:
        """Inside, encoders and decoder are made with random weights when they are first asked
        for."""
        return random_weights(self.model, self.size, self.device)


def build(model: str, size: str, device: torch.device, how: Build, *words: str) -> Bench:
    """A policy of `model` with random weights and its algorithm, both on `device`; `words`: further
    overrides. A processor would compile for minutes: there blocks are traced and run as they are.
    """
    settings = composed(model, size, *how.words, *words)
    encoded = conditioning(model, size, device)
    torch.manual_seed(0)
    compiling = partialmethod(
        nn.Module.compile, **({"backend": "eager"} if device.type == "cpu" else {})
    )
    with random_weights(model, size, device), mock.patch.object(nn.Module, "compile", compiling):
        policy: Policy = settings.settings.build("model").to(device)
    with torch.no_grad():
        for name, parameter in policy.adapter.trained_parameters().items():
            if "lora_B" in name:  # zero at first: the adapters would not show
                parameter.normal_(std=0.01)
    module = settings.settings.build("algorithm", policy=policy)
    module.train()
    module.on_train_start()
    grid = policy.sigma_grid(settings.settings.sampling.steps)
    condition = {
        key: value.to(policy.dtype) if value.is_floating_point() else value
        for key, value in encoded.items()
    }
    return Bench(model, size, device, settings, policy, module, condition, grid)


@cache
def conditioning(model: str, size: str, device: torch.device) -> dict[str, Tensor]:
    """What the text encoders make of a prompt, by a policy that is not kept."""
    settings = composed(
        model, size, *Build().words, "model.offload_encoders=false"
    ).settings.tree.model
    with random_weights(model, size, device):
        policy: Policy = configuration.instantiate(settings).to(device)
        encoded = policy.codec.encode([PROMPT])
    del policy
    _device.release(device)
    return encoded


# ---- measurements


def generate(bench: Bench, unit: Unit) -> Row:
    """Seconds of a denoising step of a task of `samples`."""
    state = bench.start(unit.samples)
    taken = _device.seconds(lambda: bench.advance(state), bench.device)
    work = workload_of(bench.composed)
    weights = rollout_memory(work, unit.samples, encoders=False)
    forward = FRAGMENTATION * forward_bytes(work, unit.samples * work.passes)
    return {
        "seconds": taken,
        "tokens": work.tokens,
        "passes": work.passes,
        "flops": unit.samples * work.passes * forward_flops(work),
        "model_gib": (weights.frozen + weights.trained + forward) / GIB,
    }


def train(bench: Bench, unit: Unit) -> Row:
    """Seconds of a micro-batch of `samples` x `steps` cells: forward, backward, under KL the
    reference's forward."""
    batch = bench.cells(unit.samples, unit.steps)
    _device.watch_peak(bench.device)

    def trained() -> None:
        bench.module.training_step(batch, 0).backward()
        bench.module.zero_grad(set_to_none=True)

    taken = _device.seconds(trained, bench.device)
    work = workload_of(bench.composed)
    kept = parse_recompute(bench.composed.settings.tree.model.gradient_checkpointing)
    rows = unit.samples * unit.steps * work.passes
    load = TrainerLoad(1, unit.samples, unit.steps, generates=False, lends=False)
    held = trainer_memory(work, load, kept)
    saved, moment = saved_bytes(work, rows, kept), moment_bytes(work, rows, kept)
    resting = held.frozen + held.trained + held.gradients + held.copies
    return {
        "seconds": taken,
        "tokens": work.tokens,
        "passes": work.passes,
        "reference": work.reference,
        "flops": rows * ((1 + int(work.reference)) * forward_flops(work) + backward_flops(work)),
        "model_gib": (resting + FRAGMENTATION * saved + moment) / GIB,
    }


def ratio(bench: Bench, unit: Unit) -> Row:
    """max |ratio - 1| before any update: sampled as rollouts sample, replayed as trainers
    replay."""
    (block,) = bench.cells(unit.samples, unit.steps).blocks
    new = denoise.replay(bench.policy, block, bench.module.sde).log_prob.detach()
    return {"deviation": float((new - block.log_probs).exp().sub(1.0).abs().max())}


def encode(bench: Bench, unit: Unit) -> Row:
    """Seconds of a prompt: by encoders that stay on the device, and by encoders that come from the
    CPU and go back."""
    policy: Any = bench.policy
    found = {}
    with bench.weights(), torch.no_grad():
        for name, offload in (("seconds", False), ("moved_seconds", True)):
            policy.codec.offload_encoders = offload
            found[name] = _device.seconds(
                lambda: policy.codec.encode_prompts(policy.codec.branch_wordings([PROMPT])[0]),
                bench.device,
            )
    return found


def decode(bench: Bench, unit: Unit) -> Row:
    """Seconds of a sample, decoder on the device."""
    policy: Any = bench.policy
    policy.codec.offload_encoders = False
    latents = bench.start(unit.samples).latents
    with bench.weights():
        taken = _device.seconds(lambda: policy.codec.decode(latents), bench.device)
    return {
        "seconds": taken,
        "tokens": workload_of(bench.composed).tokens,
        "tiling": policy.codec.vae_tiling,
    }


def publication(bench: Bench, unit: Unit) -> Row:
    """Bytes of a version, seconds to copy and hash them on their way, seconds to adopt them."""
    parameters: dict[str, Any] = bench.policy.adapter.trained_parameters()
    size = sum(parameter.numel() * parameter.element_size() for parameter in parameters.values())
    free = psutil.virtual_memory().available
    if 3 * size > free:  # page-locked blocks are rounded up to powers of two
        return {
            "skipped": (
                f"a version of {size / GIB:.0f} GiB, and {free / GIB:.0f} GiB of host memory are "
                "free"
            )
        }

    def copied() -> Any:
        return publish(1, parameters, NOBODY, {}, lambda digest: None)

    taken = _device.seconds(copied, bench.device, most=3)
    version = copied()
    adopting = _device.seconds(lambda: adopt(parameters, version), bench.device, most=3)
    return {"bytes": size, "seconds": taken, "adopt_seconds": adopting}


def mask(bench: Bench, unit: Unit) -> Row:
    """Seconds of a denoising step with the prompt cut to its real length, as runs have it, and
    padded and masked."""
    policy, state = bench.policy, bench.start(unit.samples)
    if not isinstance(policy, DiffusersPolicy) or "mask" not in policy.facts().conditioning:
        return {"skipped": "the family passes no mask"}
    length = bench.condition["text"].shape[1]
    padding = policy.codec.max_sequence_length - length
    texts = [key for key in bench.condition if key.endswith("text")]
    padded = dict(bench.condition)
    for text, mask in ((key, key.removesuffix("text") + "mask") for key in texts):
        counts = padded.get(mask, torch.ones(1, length, dtype=torch.bool, device=bench.device))
        padded |= {text: pad(padded[text], (0, 0, 0, padding)), mask: pad(counts, (0, padding))}
    trimmed = _device.seconds(lambda: bench.advance(state), bench.device)
    policy.keep_padding(True)
    seconds = _device.seconds(lambda: replace(bench, condition=padded).advance(state), bench.device)
    policy.keep_padding(False)
    return {"seconds": seconds, "trimmed_seconds": trimmed, "text_tokens": length}


def rl_step(bench: Bench, unit: Unit) -> Row:
    """An RL step of one GPU with `samples` images: encode, generate, decode, score, replay and
    backward, optimizer.

    One task after the other, as a colocated run; the reward is the size of a JPEG, on the CPU
    beside generation.
    """
    device, config, module = bench.device, bench.composed.settings, bench.module
    rewards = config.build("reward")
    sampling = sampling_spec(config)
    engine = RolloutEngine(
        bench.policy, rewards, module.sde, module.train_steps, sampling, 0, module.needs_means
    )
    spec = schedule_spec(
        config, module.train_steps.count_trained(sampling.steps), trainers=1, rollouts=0
    )
    optimizer = module.configure_optimizers()
    prompts = PromptData(config.data, 0).sampler.prompts_at(0)
    parts = dict.fromkeys(("generate", "decode", "score", "train", "optimizer"), 0.0)

    @contextmanager
    def part(name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        _device.wait(device)
        parts[name] += time.perf_counter() - began

    def step(tasks: int) -> None:
        futures = []
        for index in range(tasks):
            group, first = divmod(index * spec.task_size, spec.group_size)
            task = Task(0, index, group % spec.prompts, first, spec.task_size, 0)
            with torch.no_grad(), part("generate"):
                generation = engine.begin_task(task, prompts[task.group])
                while engine.steps_left(generation):
                    generation = engine.take_step(generation)
            with part("decode"):
                media = engine.decode(generation)
            futures.append(engine.score(generation, media))
        with part("score"):
            trajectories = [future.result() for future in futures]
        for trajectory in trajectories:
            with part("train"):
                batch = training_batch(
                    move_tensors(trajectory, "cpu"), spec, engine.reward_weights
                ).to(device)
                module.training_step(batch, 0).backward()
        with part("optimizer"):
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            module.zero_grad(set_to_none=True)

    tasks = max(1, unit.samples // spec.task_size)
    try:
        with bench.weights():
            step(1)  # encoders, decoder and kernels are made
            parts |= dict.fromkeys(parts, 0.0)
            step(tasks)
    finally:
        engine.close()
    total, images = sum(parts.values()), tasks * spec.task_size
    return {"seconds": total, "images": images, "images_per_s": images / total, "parts": parts}


MEASURES: dict[str, Callable[[Bench, Unit], Row]] = {
    "generate": generate,
    "train": train,
    "ratio": ratio,
    "encode": encode,
    "decode": decode,
    "publish": publication,
    "mask": mask,
    "step": rl_step,
}


def attempt(bench: Bench, unit: Unit) -> Row:
    """The measurement with its peak of memory and what it took, or `full`, `failed` or `skipped`
    with the reason."""
    _device.release(bench.device)
    _device.watch_peak(bench.device)
    began = time.monotonic()
    try:
        row = MEASURES[unit.stage](bench, unit)
        row |= {"gib": _device.peak_gib(bench.device)}
    except Exception as error:  # the others are measured all the same
        bench.module.zero_grad(set_to_none=True)
        said = " ".join(str(error).split())[:300]
        row = (
            {"full": said} if _device.full(error) else {"failed": f"{type(error).__name__}: {said}"}
        )
    return row | {"took_s": round(time.monotonic() - began, 2)}
