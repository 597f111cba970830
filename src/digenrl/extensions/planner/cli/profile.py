"""Measure this machine: the seconds per unit that a hardware profile's `seconds` table holds.

    digenrl profile experiment=... hardware=... [pool=NAME] [key=value ...]
    digenrl profile run=RUN [pool=NAME]

The experiment's own policy, rewards and algorithm run one rollout task and one training block at
their configured sizes, on one device, without a cluster. The resulting profile.yaml replaces the
`seconds:` line of the profile's YAML. Its path is the last line on standard output. `pool` names
the pool that this machine stands for, if there are several.

With `run`, nothing is computed: the seconds are those of a run on one pool, from its second RL step
on, and profile.yaml is written into its directory. Spans are the host's seconds. On an accelerator
a stage that does not wait for its work looks shorter than it is.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import yaml

from digenrl import config as configuration
from digenrl.config import Composed
from digenrl.config.help import Arguments, RunDirectory, own_command, read_arguments
from digenrl.config.help_pages import command_help
from digenrl.config.settings import Settings
from digenrl.config.stored import read_stored
from digenrl.extensions.planner.advice import PlannerAdvisor
from digenrl.record.run_dir import atomic_replace
from digenrl.report.read_run import read_run
from digenrl.report.stages import UNITS, unit_seconds
from digenrl.settle import with_task_size

if TYPE_CHECKING:
    from digenrl.algorithms.base import PolicyModule
    from digenrl.models.policy import Policy
    from digenrl.rewards.suite import RewardSuite
    from digenrl.rollout.engine import Generation
    from digenrl.schedule import ScheduleSpec
    from digenrl.types import TrainBatch, Trajectory

REPEATS = 5
"""Timed calls of each kind of work, after one warm-up call."""


class ProfileKeys(Arguments):
    """Keys that the command has beside the keys of a run."""

    pool: str | None = None
    """Pool of the profile that this machine belongs to. Needed if the profile has several."""
    run: RunDirectory | None = None
    """Run whose recorded seconds are used, so that nothing is measured."""


@dataclass(frozen=True)
class Measured:
    """Seconds per unit of one stage."""

    median: float
    fastest: float
    slowest: float
    units: int
    """Units of work in one timed call."""


def main(words: Sequence[str]) -> int:
    """Measure, print the table and write profile.yaml; return the exit code."""
    own = [word for word in words if word.startswith("pool=")]
    if any(word.startswith("run=") for word in words):
        return own_command(ProfileKeys, __doc__, words, _profile_run)
    doc = command_help(__doc__, ProfileKeys)
    composed = configuration.load_or_exit([word for word in words if word not in own], doc=doc)
    try:
        composed = with_task_size(composed, PlannerAdvisor())
        hardware = composed.settings.hardware
        named = read_arguments(ProfileKeys, own)[0].pool
        pool = chosen_pool(list(hardware.pools), hardware.emulate, named)
    except (configuration.ConfigError, ValueError) as error:
        print(error, file=sys.stderr)
        return configuration.EXIT_CODE
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as the ranks of a run
    run_dir = configuration.prepare_run_dir_or_exit(composed)
    table = measure_stages(composed.settings)
    print("\n".join(table_lines(table)))
    path = run_dir / "profile.yaml"
    with atomic_replace(path) as unfinished:
        unfinished.write_text(seconds_yaml(table, pool, composed), encoding="utf-8")
    print(path)
    return 0


def _profile_run(keys: ProfileKeys, _: Sequence[str]) -> None:
    run = read_run(str(keys.run))
    hardware = read_stored(run.path, "run")[0].hardware
    pool = chosen_pool([str(name) for name in hardware.pools], hardware.emulate, keys.pool)
    path = run.path / "profile.yaml"
    text = yaml.safe_dump({"seconds": {s: {pool: value} for s, value in unit_seconds(run).items()}})
    with atomic_replace(path) as unfinished:
        head = f"# Seconds per unit, recorded by the run {run.path.name}\n"
        unfinished.write_text(head + text, encoding="utf-8")
    print(f"{text}{path}")


def chosen_pool(pools: Sequence[str], emulated: bool, name: str | None) -> str:
    """Return the pool that this machine stands for: `name`, or the only one of `pools`.

    Raises:
        ValueError: an emulated profile, an unknown pool, or several and none named.
    """
    if emulated:
        raise ValueError(
            "hardware.emulate = true: sleeps cannot be measured; set hardware.emulate=false."
        )
    if name is None and len(pools) > 1:
        raise ValueError(
            f"pool: the profile has {', '.join(pools)}; say which of them this machine is, "
            f"pool={pools[0]}."
        )
    if name is not None and name not in pools:
        raise ValueError(f"pool = {name}: the profile has no such pool; use {', '.join(pools)}.")
    return name or pools[0]


def measure_stages(settings: Settings) -> dict[str, Measured]:
    """Return stage -> seconds per unit on this machine (on its GPU if it has one), in the order of
    a sample's life."""
    import torch

    from digenrl import accelerator, parts
    from digenrl.data import PromptData
    from digenrl.run import engine_of
    from digenrl.schedule import Task

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(settings.seed)
    device = torch.device(accelerator.device_kind())
    policy: Policy = settings.build("model").to(device)
    rewards: RewardSuite = settings.build("reward")
    module: PolicyModule = settings.build("algorithm", policy=policy).to(device)
    module.train()
    module.on_train_start()  # algorithms that keep copies of the weights make them here
    engine = engine_of(settings, module, rewards)
    spec = parts.schedule_spec(
        settings, module.train_steps.count_trained(settings.sampling.steps), trainers=1
    )
    prompt = PromptData(settings.data, settings.seed).sampler.prompts_at(0)[0]
    rows = spec.task_size
    task = Task(step=0, index=0, group=0, first_sample=0, samples=rows, version=0)

    def generate_task() -> Generation:
        generation = engine.begin_task(task, prompt)
        while engine.steps_left(generation):
            generation = engine.take_step(generation)
        return generation

    try:
        encode = _time_work(
            lambda: torch.no_grad()(policy.codec.encode_prompts)(
                policy.codec.branch_wordings([prompt])[0]
            ),
            1,
        )
        generation = generate_task()
        media = engine.decode(generation)
        batch = training_batch(
            engine.score(generation, media).result(), spec, engine.reward_weights
        ).to(device)

        def train_once() -> None:
            module.training_step(batch, 0).backward()
            module.zero_grad(set_to_none=True)

        return {
            "encode": encode,
            "generate": _time_work(generate_task, rows),
            "decode": _time_work(lambda: engine.decode(generation), rows),
            "score": _time_work(lambda: rewards.score(media, [prompt] * rows), rows),
            "train": _time_work(train_once, rows * len(batch.blocks[0].steps)),
        }
    finally:
        engine.close()


def training_batch(
    trajectory: Trajectory, spec: ScheduleSpec, weights: Mapping[str, float]
) -> TrainBatch:
    """Return a micro-batch that trains `schedule.tsp.batch` steps of the task in one forward."""
    import torch

    from digenrl.schedule.claims import Claim
    from digenrl.transport.cells import Part, pack_cells
    from digenrl.types import TrainBatch

    steps = range(len(trajectory.steps))
    block = Part(pack_cells(trajectory, steps, Claim(0, 0, 0), 0.0)).cell_block(
        steps[: spec.tsp_batch]
    )
    # Unequal, so that every loss term counts.
    scores = torch.linspace(0.0, 1.0, spec.group_size).repeat(spec.prompts, 1)
    return TrainBatch(
        blocks=(block,),
        rewards={name: scores.clone() for name in weights},
        reward_weights=dict(weights),
        denominator=float(spec.cells_per_update),
        update=0,
        version=0,
    )


def _time_work(work: Callable[[], object], units: int) -> Measured:
    """Return the seconds per unit of `work`, one call of which does `units` units."""
    import torch

    from digenrl import accelerator

    seconds = []
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        work()
        if accelerator.device_count():
            torch.accelerator.synchronize()
        seconds.append((time.perf_counter() - began) / units)
    kept = seconds[1:]
    return Measured(statistics.median(kept), min(kept), max(kept), units)


def table_lines(table: Mapping[str, Measured]) -> list[str]:
    """Return the table for the terminal."""
    head = f"{'stage':<10}{'unit':<8}{'units':>6}{'seconds/unit':>14}{'fastest':>12}{'slowest':>12}"
    return [head] + [
        f"{stage:<10}{UNITS[stage]:<8}{m.units:>6}{m.median:>14.6f}{m.fastest:>12.6f}{m.slowest:>12.6f}"
        for stage, m in table.items()
    ]


def seconds_yaml(table: Mapping[str, Measured], pool: str, composed: Composed) -> str:
    """Return YAML that replaces the `seconds:` line of the hardware profile."""
    choices = composed.choices
    source = (
        f"experiment={choices['experiment']} hardware={choices['hardware']}"
        if choices
        else composed.run_dir.name
    )
    # "#" keeps the point, without which YAML reads 3e-05 as text.
    rows = [f"  {stage}: {{{pool}: {measured.median:#.6g}}}" for stage, measured in table.items()]
    note = f"# Seconds per unit (median of {REPEATS}), measured by `digenrl profile {source}`"
    return "\n".join([note, "seconds:", *rows]) + "\n"
