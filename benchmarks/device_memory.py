"""The planner's memory model held against the strict device's peak counter (tests/device), which
counts every byte.

    python -m benchmarks.device_memory [experiments=flux1_flowgrpo] [decoders=] [again=counts|held]

A model's build is its tiny one, `WIDTH` times wider (16 x 2 x width numbers a token) and `DEPTH`
units of blocks deep. Its sizes are counted as those of published builds are
(benchmarks/count_facts.py), and real runs of two trainers and one rollout say what ranks held.
By default every family is run: `FAMILIES` in all `CASES`, the others in a `FEW` of them. Then each
decoder that takes whole pictures decodes at published width.

Counts and held bytes are kept in benchmarks/results/device_memory.jsonl. Only missing models are
counted (a minute or two of a core), and only missing cases are run (a minute each). `again` repeats
this for the named experiments. The printed table has every kept case, with the plan as it is now.
Needs g++.
"""

from __future__ import annotations

import gc
import json
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from benchmarks import _families, count_facts
from benchmarks._shared import RESULTS, options, spread_of
from digenrl import config as configuration
from digenrl import run
from digenrl.cluster.world import World
from digenrl.config import Composed
from digenrl.data import PromptData
from digenrl.extensions.planner.counts import forward_bytes
from digenrl.extensions.planner.memory import (
    FRAGMENTATION,
    RESERVED,
    TrainerLoad,
    decode_bytes,
    rollout_memory,
    stored_bytes,
    trainer_memory,
    vae_bytes,
)
from digenrl.extensions.planner.reading import workload_of
from digenrl.extensions.planner.workload import Workload, counted_models
from digenrl.facts import Facts, ModelSizes, facts_by_family, of_module
from digenrl.models import pipeline_codec
from digenrl.models import tiny as builds
from digenrl.models.pipeline import DiffusersPolicy
from digenrl.recompute import MODES, Recompute, parse_recompute
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
DEFAULTS = {"experiments": ",".join((*FAMILIES, *OTHERS)), "decoders": "all", "again": ""}
WIDTH, DEPTH = 2, 4
AIM = 0.95, 1.15
"""Bounds of planned over held bytes (issue 28)."""
KEPT = RESULTS / "device_memory.jsonl"
COUNTS, DECODER = "counts", "decoder"
Kept = dict[tuple[str, str], dict[str, Any]]
"""(experiment, name of a case) -> role -> bytes that a rank held. (experiment, COUNTS) -> counts.
(model, DECODER) -> planned and held bytes."""
HEAD = """| model | rank | sharding | trained | blocks keep | samples of a task | steps in a forward \
| plan MiB | held MiB | plan / held |
|---|---|---|---|---|---|---|---|---|---|"""
WIDTHS = ("num_attention_heads", "n_heads", "n_kv_heads", "dim", "ffn_dim", "caption_projection_dim",
          "audio_num_attention_heads", "cross_attention_dim", "audio_cross_attention_dim",
          "added_kv_proj_dim")  # fmt: skip
CONNECTED = ("video_hidden_dim", "video_connector_num_attention_heads", "audio_hidden_dim",
             "audio_connector_num_attention_heads")  # fmt: skip
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
        keeps = {"false": "all", "true": "inputs"}.get(self.keeps, self.keeps)
        return f"{self.sharding} | {trained} | {keeps} | {self.task} | {self.steps}"

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


def middle(model: str) -> Facts:
    """Return the facts of the model with its tiny build made wider and deeper, under its name
    everywhere in this process."""
    facts, kind = _families.models()[model], _families.adapter(_families.models()[model])
    tiny, sizes = dict(builds.describe_part(facts, "transformer")), facts.models[model].copy()
    tiny |= {name: tiny[name] * WIDTH for name in WIDTHS if name in tiny}
    published, (first, *others) = sizes["network"], kind.depths
    few = [name for name in others if name in published]
    tiny |= {first: DEPTH} | {name: DEPTH * published[name] // published[first] for name in few}
    if "dual_attention_layers" in tiny:
        tiny["dual_attention_layers"] = list(range(DEPTH // 2))
        sizes["period"] = 2
    if "n_refiner_layers" in tiny:
        del tiny["n_refiner_layers"]  # the published number
    blocks = sizes["blocks"] - published[first] + DEPTH
    parts = dict(facts.tiny) | dict.fromkeys(kind.components, tiny)
    if not tiny.get("use_prompt_embeddings", True):  # blocks read the connectors' text as it is
        connectors = builds.describe_part(facts, "connectors")
        parts["connectors"] = dict(connectors) | {n: connectors[n] * WIDTH for n in CONNECTED}
    sizes["network"] = {key: value for key, value in tiny.items() if key != "class"}
    sizes["attention_blocks"] = blocks * sizes["attention_blocks"] // sizes["blocks"]
    sizes["blocks"], sizes["hidden"] = blocks, 0
    return _known(replace(facts, tiny=parts), model, sizes)


def _known(facts: Facts, model: str, sizes: ModelSizes) -> Facts:
    """Return the facts with these sizes of `model`, known under its name in this process."""
    wide = replace(facts, models={model: sizes})
    beside = of_module(_families.adapter(facts).__module__)
    for known, name in (
        (beside, wide.family),
        (facts_by_family(), wide.family),
        (counted_models(), model),
    ):
        known[name] = wide  # type: ignore[index]
    _families.models()[model] = wide
    return wide


def count(experiment: str) -> dict[str, Any]:
    """Return what is counted of the middle build, with the conditioning that its own prompts
    have."""
    gc.freeze()  # or every collection would walk through all modules
    known = composed(experiment, *LORA)
    config, model = cast(Any, known.settings), known.choices["model"]
    facts = _families.models()[model]
    policy: DiffusersPolicy = config.build("model")
    sampler = PromptData(config.data, config.seed).sampler
    prompts = [prompt for step in range(config.max_rl_steps) for prompt in sampler.prompts_at(step)]
    encoded = [policy.codec.trim_condition(policy.codec.encode([prompt])) for prompt in prompts]
    shapes = {}
    for key, published in facts.conditioning.items():
        found = next((each[key].shape[1:] for each in encoded if key in each), published)
        shapes[key] = tuple(
            word if isinstance(word, str) else size
            for word, size in zip(published, found, strict=True)
        )
    text = max(each["text"].shape[1] for each in encoded)
    sizes = facts.models[model].copy()
    sizes["text_tokens"] = text
    _known(replace(facts, conditioning=shapes), model, sizes)
    with torch.device("meta"):
        network = _families.network(model)
    side = int(math.sqrt(workload_of(known).tokens))
    count_facts.CASES = (
        (2, side, text), (2, 2 * side, text), (2, side, 2 * text), (4, side, text)
    )  # fmt: skip
    counted = {
        trained: count_facts.activations(model, trained, repeats=False)
        for trained in ("full", "attn_ff")
    }
    return {
        "text_tokens": text,
        **count_facts.parameter_counts(network),
        "buffers": count_facts.stored_buffers(network),
        "lora_parameters_per_rank": count_facts.lora_per_rank(model, network),
        "kept_bytes": {trained: each[0] for trained, each in counted.items()},
        "beside_bytes": {trained: each[1] for trained, each in counted.items()},
        "forward_bytes": {trained: each[3] for trained, each in counted.items()},
    }


def parse(keeps: str) -> Recompute:
    return parse_recompute({"false": False, "true": True}.get(keeps, keeps))


def planned(experiment: str, case: Case, trainer: bool) -> float:
    """Return the plan's bytes of a rank, without the reserve for what the device does not have. A
    rollout's are those of its forwards: the decoders here have a sixteenth of the plan's width."""
    # A tiny build reads fewer text tokens than the configuration asks for.
    work = replace(workload_of(composed(experiment, *case.words)), most_text=None)
    if trainer:
        shards = 2 if case.sharding == "fsdp" else 1
        steps = min(case.steps, work.trained_steps)
        load = TrainerLoad(shards, case.task, steps, generates=False, lends=False)
        found = trainer_memory(work, load, parse(case.keeps))
        return found.total - RESERVED
    weights = rollout_memory(work, case.task, encoders=False)
    return (
        weights.frozen
        + weights.trained
        + FRAGMENTATION * forward_bytes(work, case.task * work.passes // work.launches)
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
    kind = _families.adapter(facts).codec_class
    side = 64 // kind.spatial_stride
    policy = _families.policy(facts, (1 if kind.temporal_stride is None else 3, side, side))
    strict = torch.get_device_module()
    vae = _families.decoder(facts).to(torch.accelerator.current_accelerator())
    latents = torch.zeros(1, *policy.latent_shape, device=torch.accelerator.current_accelerator())
    weights = strict.memory_allocated()
    strict.reset_peak_memory_stats()
    with torch.no_grad():
        policy.codec.decode_latents(vae, latents)
    work = Workload(model, 64, 64, policy.codec.frames, 1, 1, 1, 1, 1, False, None)
    plan = (decode_bytes(work) - vae_bytes(work)) / (512 * 512 // (64 * 64 * policy.codec.frames))
    return plan, strict.max_memory_allocated() - weights


def watched(rank: run.Rank, world: World) -> None:
    """Write the peak of this rank when it has ended; a rollout's is that of its forwards."""
    pipeline_codec.STAYS = 0  # no decoder waits on the device
    trainer: Any = rank.trainer
    # The probe of a test run keeps a copy of every cell on the device.
    trainer.callbacks = [each for each in trainer.callbacks if not isinstance(each, Probe)]
    vars(rank.strategy.session.progress)["gauge"] = None  # nobody else resets the counter
    strict = torch.get_device_module()
    strict.reset_peak_memory_stats()
    fit: Any = run.Rank.fit
    advance: Any = RolloutEngine.take_step
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
        run.Rank.fit, RolloutEngine.take_step = fit, advance  # type: ignore[method-assign]

    run.Rank.fit, RolloutEngine.take_step = to_the_end, forwards  # type: ignore[method-assign, assignment]


def measured(experiment: str, cases: Mapping[str, Case]) -> Iterator[tuple[str, dict[str, int]]]:
    """Return the name of each case with the most bytes that a rank of each role held. A case that
    fails has no row."""
    jobs = [
        Job(str(number), composed(experiment, *case.words).settings, watched)
        for number, case in enumerate(cases.values())
    ]
    with tempfile.TemporaryDirectory() as folder:
        # Each in ranks of its own: the process keeps something of the case before.
        for name, job in zip(cases, jobs, strict=True):
            for _, done in run_series(Path(folder), 2, 1, [job]):
                if done.outcome.status != "completed":
                    print(name, done.outcome.cause, logs(done.run_dir), file=sys.stderr)
                    continue
                held = [int((done.run_dir / f"peak-{rank}").read_text()) for rank in range(3)]
                yield name, {"trainer": max(held[:2]), "rollout": held[2]}


def take(kept: Kept, experiment: str, again: str) -> None:
    """Count and run what is not kept of an experiment's model."""
    chosen = {case.name: case for case in (FEW if experiment in OTHERS else CASES)}
    grades = {parse(case.keeps).modes_of(1)[0] for case in chosen.values()}
    count_facts.MODES = tuple(mode for mode in MODES if mode in grades)  # type: ignore[assignment]
    for name in chosen if again == "held" else ():
        kept.pop((experiment, name), None)
    if again == "counts" or (experiment, COUNTS) not in kept:
        keep(kept, experiment, COUNTS, aside(count, experiment))
    missing = {name: case for name, case in chosen.items() if (experiment, name) not in kept}
    for name, held in measured(experiment, missing):
        keep(kept, experiment, name, held)


def stored() -> Kept:
    """Return what is kept of the commands before."""
    lines = KEPT.read_text().splitlines() if KEPT.exists() else []
    return {(of, name): found for of, name, found in map(json.loads, lines)}


def keep(kept: Kept, of: str, name: str, found: dict[str, Any]) -> None:
    kept[of, name] = found
    lines = (json.dumps([*key, each]) for key, each in kept.items())
    KEPT.write_text("\n".join(lines) + "\n")


def table(kept: Kept) -> Iterator[tuple[str, float, int]]:
    """Return the name of each row, with its bytes by the plan as it is now and those held."""
    for experiment in (*FAMILIES, *OTHERS):
        model = composed(experiment).choices["model"]
        if (experiment, COUNTS) in kept:
            facts = _families.models()[model]
            counted = {**facts.models[model], **kept[experiment, COUNTS]}
            _known(facts, model, cast(ModelSizes, counted))
        for case in CASES:
            for role, held in kept.get((experiment, case.name), {}).items():
                plan = planned(experiment, case, role == "trainer")
                yield f"{model} | {role} | {case.name}", plan, held
    for (model, name), found in kept.items():
        if name == DECODER:
            yield f"{model} | {name} | | | | 1 |", found["plan"], found["held"]


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
    for experiment in (*FAMILIES, *OTHERS):
        middle(composed(experiment).choices["model"])
    kept = stored()
    for experiment in filter(None, given["experiments"].split(",")):
        take(kept, experiment, given["again"])
    for model in decoders():
        if (model, DECODER) not in kept and given["decoders"] in (model, "all"):
            plan, held = aside(decoded, model)
            keep(kept, model, DECODER, {"plan": plan, "held": held})
    rows = [*table(kept)]
    print(HEAD)
    for name, plan, held in rows:
        share = plan / held
        shown = f"{share:.2f}" if AIM[0] <= share <= AIM[1] else f"**{share:.2f}**"
        print(f"| {name} | {plan / MIB:.2f} | {held / MIB:.2f} | {shown} |")
    print()
    for line in summary(rows):
        print(line)
    within = [AIM[0] <= plan / held <= AIM[1] for _, plan, held in rows]
    print(f"\n{sum(within)} of {len(rows)} within")


def summary(rows: Sequence[tuple[str, float, int]]) -> Iterator[str]:
    """Return the lines of a table with a row for each model: how many rows it has, the most bytes
    held, and the least, the lower median and the largest plan over held."""
    yield "| model | rows | most held, MiB | plan / held: least, median, largest |"
    yield "|---|---|---|---|"
    models: dict[str, list[tuple[float, int]]] = {}
    for name, plan, held in rows:
        model, role, *_ = name.split(" | ")
        model += " decoder" * (role == DECODER)
        models.setdefault(model, []).append((plan, held))
    for model, found in models.items():
        most = max(held for _, held in found) / MIB
        shares = spread_of((plan / held for plan, held in found), digits=2)
        yield f"| {model} | {len(found)} | {most:.2f} | {shares} |"


def aside(function: Callable[..., Any], *args: Any) -> Any:
    """Return what the function returns in a process of its own. A backward pass starts torch's
    threads, and then no rank could be forked here."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(function, *args).result()


if __name__ == "__main__":
    main()
