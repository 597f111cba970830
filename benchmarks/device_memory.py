"""The planner's memory model held against the strict device's peak counter (tests/device), which
counts every byte.

    python -m benchmarks.device_memory [experiments=flux1_flowgrpo] [width=2] [depth=4]

A model's build is its tiny one, `width` times wider (16 x 2 x width numbers a token) and `depth`
units of blocks deep. Its sizes are counted as those of published builds are
(benchmarks/count_facts.py), and real runs of two trainers and one rollout say what ranks held.
By default every family is run: `FAMILIES` in all `CASES`, the others in a `FEW` of them. Then each
decoder that takes whole pictures decodes at published width. Prints a table; about half a minute of a core for
each row. Needs g++.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from benchmarks import _families, count_facts
from benchmarks._shared import options
from digenrl import config as configuration
from digenrl import run
from digenrl.cluster.world import World
from digenrl.config import Composed
from digenrl.data import PromptData
from digenrl.extensions.planner.memory import (
    FRAGMENTATION,
    RESERVED,
    decode_bytes,
    rollout_memory,
    stored_bytes,
    trainer_memory,
    vae_bytes,
)
from digenrl.extensions.planner.reading import workload
from digenrl.extensions.planner.workload import Workload, counted
from digenrl.extensions.tiny import builds
from digenrl.facts import Facts, families, of_module
from digenrl.models import pipeline
from digenrl.models.pipeline import DiffusersPolicy
from digenrl.recompute import parse_recompute
from digenrl.rollout.engine import RolloutEngine
from tests.device import build
from tests.device.environment import MARK, environment
from tests.strategy.processes import FULL, Job, Probe, logs, run_series

MIB = 2**20
RANK = 8
FAMILIES = ("flux1_flowgrpo", "sd35_flowgrpo", "hunyuanvideo_dancegrpo", "wan21_flowgrpo",
            "qwen_image_flowgrpo")  # fmt: skip
OTHERS = ("flux1_kontext_flowgrpo", "flux2_klein_flowgrpo", "zimage_flowgrpo",
          "qwen_image_edit_flowgrpo", "qwen_image21_flowgrpo", "hunyuan15_flowgrpo", "ltx2_flowgrpo",
          "ltx23_flowgrpo", "wan21_i2v_flowgrpo", "wan22_a14b_flowgrpo",
          "minimax_h3_flowgrpo")  # fmt: skip
DEFAULTS = {
    "experiments": ",".join((*FAMILIES, *OTHERS)),
    "decoders": "all",
    "width": "2",
    "depth": "4",
}
WIDTHS = ("num_attention_heads", "n_heads", "n_kv_heads", "dim", "ffn_dim", "caption_projection_dim",
          "audio_num_attention_heads", "cross_attention_dim", "audio_cross_attention_dim",
          "added_kv_proj_dim")  # fmt: skip
WORDS = (
    "hardware=cpu_tiny", "schedule=sync", "callbacks=default", "~callbacks.evaluation",
    "callbacks.checkpoint.every=1000", "logger=none", "reward=jpeg", "max_rl_steps=2",
    "allocation.max_restarts=0", "allocation.patience_s=0", "model.dtype=bfloat16",
    "sampling.height=256", "sampling.width=256", "data.group_size=2", "data.prompts_per_batch=1",
    "algorithm.updates_per_batch=1",
)  # fmt: skip

LORA = (f"++model.lora={{rank: {RANK}, alpha: {RANK}, targets: attention_ff}}",)


@dataclass(frozen=True)
class Case:
    """How a run trains."""

    sharding: str
    full: bool
    keeps: str
    """Value of `model.gradient_checkpointing`."""
    task: int
    """Samples of a task."""
    steps: int
    """Steps of a sample in one forward (K)."""

    @property
    def name(self) -> str:
        trained = "all" if self.full else "LoRA"
        return f"{self.sharding} | {trained} | {self.keeps} | {self.task} | {self.steps}"

    @property
    def words(self) -> tuple[str, ...]:
        trained = FULL if self.full else LORA
        return (
            *trained,
            f"parallel.sharding={self.sharding}",
            f"model.gradient_checkpointing={self.keeps}",
            f"sampling.task_size={self.task}",
            f"schedule.tsp.batch={self.steps}",
        )


CASES = (
    Case("ddp", False, "false", 2, 1),
    Case("ddp", False, "true", 2, 2),
    Case("ddp", False, "products", 1, 3),
    Case("ddp", False, "offload", 2, 2),
    Case("fsdp", False, "false", 2, 1),
    Case("ddp", True, "true", 2, 1),
    Case("fsdp", True, "true", 2, 2),
)
FEW = (CASES[0], CASES[6])


def composed(experiment: str, *words: str) -> Composed:
    return configuration.load([f"experiment={experiment}", *WORDS, *words])


def middle(model: str, width: int, depth: int) -> Facts:
    """Return the facts of the model with its tiny build made wider and deeper, under its name
    everywhere in this process."""
    facts, kind = _families.models()[model], _families.adapter(_families.models()[model])
    tiny, sizes = dict(builds.part(facts, "transformer")), dict(facts.models[model])
    tiny |= {name: tiny[name] * width for name in WIDTHS if name in tiny}
    published, (first, *others) = sizes["network"], kind.depths
    few = [name for name in others if name in published]
    tiny |= {first: depth} | {name: depth * published[name] // published[first] for name in few}
    if "dual_attention_layers" in tiny:
        tiny["dual_attention_layers"] = list(range(depth // 2))
        sizes["period"] = 2
    if "n_refiner_layers" in tiny:
        del tiny["n_refiner_layers"]  # the published number
    blocks = sizes["blocks"] - published[first] + depth
    network = {key: value for key, value in tiny.items() if key != "class"}
    made = {"network": network, "blocks": blocks, "hidden": 0,
            "attention_blocks": blocks * sizes["attention_blocks"] // sizes["blocks"]}  # fmt: skip
    return _known(
        replace(facts, tiny=dict(facts.tiny) | dict.fromkeys(kind.components, tiny)),
        model,
        sizes | made,
    )


def _known(facts: Facts, model: str, sizes: dict[str, Any]) -> Facts:
    """Return the facts with these sizes of `model`, known under its name in this process."""
    wide = replace(facts, models={model: sizes})
    beside = of_module(_families.adapter(facts).__module__)
    for known, name in ((beside, wide.family), (families(), wide.family), (counted(), model)):
        known[name] = wide  # type: ignore[index]
    _families.models()[model] = wide
    return wide


def count(experiment: str, width: int, depth: int) -> Facts:
    """Return the facts of the middle build, with the conditioning that its own prompts have."""
    known = composed(experiment, *LORA)
    config, model = cast(Any, known.config), known.choices["model"]
    facts = middle(model, width, depth)
    policy: DiffusersPolicy = configuration.instantiate(config.model)
    sampler = PromptData(config.data, config.seed).sampler
    prompts = [prompt for step in range(config.max_rl_steps) for prompt in sampler.batch(step)]
    encoded = [policy.trimmed(policy.encode([prompt])) for prompt in prompts]
    shapes = {}
    for key, published in facts.conditioning.items():
        found = next((each[key].shape[1:] for each in encoded if key in each), published)
        shapes[key] = tuple(
            word if isinstance(word, str) else size
            for word, size in zip(published, found, strict=True)
        )
    text = max(each["text"].shape[1] for each in encoded)
    sizes = dict(facts.models[model]) | {"text_tokens": text}
    facts = _known(replace(facts, conditioning=shapes), model, sizes)
    with torch.device("meta"):
        network = _families.network(model)
    side = int(math.sqrt(workload(known).tokens))
    count_facts.CASES = (
        (2, side, text), (2, 2 * side, text), (2, side, 2 * text), (4, side, text)
    )  # fmt: skip
    counted = {
        trained: count_facts.activations(model, trained, repeats=False)
        for trained in ("full", "attn_ff")
    }
    counts = {
        **count_facts.parameter_counts(network),
        "buffers": count_facts.stored_buffers(network),
        "lora_parameters_per_rank": count_facts.lora_per_rank(model, network),
        "kept_bytes": {trained: each[0] for trained, each in counted.items()},
        "beside_bytes": {trained: each[1] for trained, each in counted.items()},
        "forward_bytes": {trained: each[3] for trained, each in counted.items()},
    }
    return replace(facts, models={model: sizes | counts})


def planned(experiment: str, case: Case, trainer: bool) -> float:
    """Return the plan's bytes of a rank, without the reserve for what the device does not have. A
    rollout's are those of its forwards: the decoders here have a sixteenth of the plan's width."""
    # A tiny build reads fewer text tokens than the configuration asks for.
    work = replace(workload(composed(experiment, *case.words)), most_text=None)
    if trainer:
        shards = 2 if case.sharding == "fsdp" else 1
        recompute = parse_recompute({"false": False, "true": True}.get(case.keeps, case.keeps))
        steps = min(case.steps, work.trained_steps)
        found = trainer_memory(work, shards, case.task, steps, recompute, False, False)
        return found.total - RESERVED
    weights = rollout_memory(work, case.task, encoders=False)
    return (
        weights.frozen
        + weights.trained
        + FRAGMENTATION * work.forward_bytes(case.task * work.passes // work.launches)
        + FRAGMENTATION * stored_bytes(work, case.task)
    )


def decoders() -> list[str]:
    """Return a model for each decoder whose option decodes without tiles."""
    found: dict[str, str] = {}
    for model, facts in _families.models().items():
        decode = facts.models[model]["decode"]
        if decode["bytes"]["frame"] == 0.0:
            found.setdefault(str(decode), model)
    return [*found.values()]


def decoded(model: str) -> tuple[float, int]:
    """Return the planned and the held bytes of one decode of 64 x 64 pixels at published width,
    beside the weights."""
    facts = _families.models()[model]
    kind = _families.adapter(facts)
    side = 64 // kind.spatial_stride
    policy = _families.policy(facts, (1 if kind.temporal_stride is None else 3, side, side))
    strict = torch.get_device_module()
    vae = _families.decoder(facts).to(torch.accelerator.current_accelerator())
    latents = torch.zeros(1, *policy.latent_shape, device=torch.accelerator.current_accelerator())
    weights = strict.memory_allocated()
    strict.reset_peak_memory_stats()
    with torch.no_grad():
        policy.decode_latents(vae, latents)
    work = Workload(model, 64, 64, policy.frames, 1, 1, 1, 1, 1, False, None)
    plan = (decode_bytes(work) - vae_bytes(work)) / (512 * 512 // (64 * 64 * policy.frames))
    return plan, strict.max_memory_allocated() - weights


def watched(rank: run.Rank, world: World) -> None:
    """Write the peak of this rank when it has ended; a rollout's is that of its forwards."""
    pipeline.STAYS = 0  # no decoder waits on the device
    trainer: Any = rank.trainer
    # The probe of a test run keeps a copy of every cell on the device.
    trainer.callbacks = [each for each in trainer.callbacks if not isinstance(each, Probe)]
    vars(rank.strategy.session.progress)["gauge"] = None  # nobody else resets the counter
    strict = torch.get_device_module()
    strict.reset_peak_memory_stats()
    fit: Any = run.Rank.fit
    advance: Any = RolloutEngine.advance
    peaks = [0]

    def forwards(engine: RolloutEngine, *args: Any) -> Any:
        strict.reset_peak_memory_stats()
        done = advance(engine, *args)
        peaks.append(strict.max_memory_allocated())
        return done

    def to_the_end(self: run.Rank, *args: Any) -> None:
        fit(self, *args)
        peak = strict.max_memory_allocated() if world.is_trainer else max(peaks)
        (self.strategy.session.run_dir / f"peak-{world.rank}").write_text(str(peak))
        run.Rank.fit, RolloutEngine.advance = fit, advance  # type: ignore[method-assign]

    run.Rank.fit, RolloutEngine.advance = to_the_end, forwards  # type: ignore[method-assign, assignment]


def measured(path: Path, experiment: str) -> Iterator[tuple[Case, dict[int, int]]]:
    """Return each case with rank -> peak bytes."""
    cases = {
        str(number): case for number, case in enumerate(FEW if experiment in OTHERS else CASES)
    }
    jobs = [
        Job(name, composed(experiment, *case.words).config, watched) for name, case in cases.items()
    ]
    # Each in ranks of its own: the process keeps something of the case before.
    for job, done in (pair for one in jobs for pair in run_series(path, 2, 1, [one])):
        assert done.outcome.status == "completed", f"{done.outcome.cause}\n{logs(done.run_dir)}"
        yield cases[job.name], {r: int((done.run_dir / f"peak-{r}").read_text()) for r in range(3)}


def main() -> None:
    if MARK not in os.environ:
        build.load_or_build()
        given = environment(devices=3, memory_mib=2048)
        words = [sys.executable, "-m", "benchmarks.device_memory", *sys.argv[1:]]
        raise SystemExit(subprocess.run(words, env=given).returncode)
    given = options(sys.argv[1:], DEFAULTS, {})
    # Real tensors are faster than fake ones at this size, and nobody asks for FLOPs.
    count_facts.FakeTensorMode = nullcontext  # type: ignore[assignment, misc]
    # The strict device's autocast has a GPU's list of operators, and its attention is the CPU's one kernel.
    count_facts.DEVICE = count_facts.BACKWARD = "strict"
    count_facts.attend = nn.functional.scaled_dot_product_attention
    count_facts.MANY_TOKENS = count_facts.CASES[0]
    count_facts.RANK = RANK
    count_facts.MODES = ("all", "products", "inputs")  # type: ignore[assignment]
    for experiment in filter(None, given["experiments"].split(",")):
        size = int(given["width"]), int(given["depth"])
        facts = aside(count, experiment, *size)
        for model, sizes in facts.models.items():
            _known(facts, model, sizes)
        with tempfile.TemporaryDirectory() as folder:
            for case, peaks in measured(Path(folder), experiment):
                for role, peak in (("trainer", max(peaks[0], peaks[1])), ("rollout", peaks[2])):
                    plan = planned(experiment, case, role == "trainer")
                    line(f"{experiment} | {role} | {case.name}", plan, peak)
    for model in decoders() if given["decoders"] == "all" else filter(None, [given["decoders"]]):
        line(f"{model} | decoder | | | | 1 |", *aside(decoded, model))


def aside(function: Callable[..., Any], *args: Any) -> Any:
    """Return what the function returns in a process of its own. A backward pass starts torch's
    threads, and then no rank could be forked here."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(function, *args).result()


def line(name: str, plan: float, peak: float) -> None:
    share = f"{plan / MIB:.1f} | {peak / MIB:.1f} | {plan / peak:.2f}"
    print(f"| {name} | {share} |", flush=True)


if __name__ == "__main__":
    main()
