"""The published experiments, each on its tiny build: one trainer and one rollout rank, from launch
to export.

Everything is the experiment's own except what `hardware=cpu_tiny` shrinks. Evaluation is left out
to save time. A model with random weights writes no text and draws no objects. If these are
rewarded, every sample scores 0 and nothing can be learnt. There the size of the JPEG file is
rewarded as well.
"""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from digenrl import config as configuration
from digenrl import run
from digenrl.cluster.launcher import Launch, RunOutcome, launch_ranks
from digenrl.cluster.world import Session, World
from digenrl.config.settings import Settings
from digenrl.extensions.export.cli.export import read_weights
from digenrl.extensions.export.diffusers_export import export_policy
from digenrl.models.pipeline import DiffusersPolicy
from digenrl.models.policy import Policy
from digenrl.settle import allocated_ranks
from tests.models.families import experiments
from tests.models.tiny_policies import exported, prompt
from tests.strategy.processes import logs

pytestmark = pytest.mark.heavy

EXPERIMENTS = experiments()
CHOSEN = ("wan21_flowgrpo",)
"""A video. An image from launch to export is each run of the digits task."""
STEPS = 3
WORDS = ("hardware=cpu_tiny", "~callbacks.evaluation", "logger=none", f"max_rl_steps={STEPS}")
SECOND_REWARD = (
    "+reward.rewards.jpeg_size={weight: 1.0, scorer: {_target_: reward_models.jpeg_size.JpegSize}}"
)
RATIO_BOUND = 1e-5
"""fp32, should the trainer's kernels round differently from the rollout's (design, section 5)."""


class Probe(pl.Callback):
    """Writes the weights before training, and the largest gradient of every trained parameter per
    update."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._gradients: list[dict[str, float | None]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        initial = {name: value.detach().clone() for name, value in _trained(pl_module).items()}
        save_file(initial, self._directory / "initial.safetensors")

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        gradients = {name: value.grad for name, value in _trained(pl_module).items()}
        self._gradients.append(
            {name: None if g is None else float(g.abs().max()) for name, g in gradients.items()}
        )

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        (self._directory / "gradients.json").write_text(json.dumps(self._gradients))


def _trained(module: Any) -> dict[str, torch.nn.Parameter]:
    trained: dict[str, torch.nn.Parameter] = module.policy.adapter.trained_parameters()
    return trained


@dataclass(frozen=True)
class Run:
    """A finished run of one experiment."""

    config: Settings
    outcome: RunOutcome
    directory: Path

    def rows(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / name).read_text().splitlines()]

    @property
    def initial(self) -> dict[str, Tensor]:
        return load_file(self.directory / "initial.safetensors")

    @property
    def final(self) -> dict[str, Tensor]:
        return read_weights(self.directory / "checkpoints", "trained")[0]


def composed(experiment: str, *words: str) -> Settings:
    config = configuration.load([f"experiment={experiment}", *WORDS, *words]).settings
    if {"ocr", "geneval"} & set(config.reward.rewards):
        config = configuration.load(
            [f"experiment={experiment}", *WORDS, SECOND_REWARD, *words]
        ).settings
    return config


def execute(experiment: str, directory: Path, *words: str) -> tuple[Run, Policy]:
    """Run the experiment in forked ranks; also the policy that every rank builds, untrained. Of
    sharded weights nobody holds all, so there are no gradients to look at."""
    torch.set_num_threads(1)
    config = composed(experiment, *words)
    for reward in config.node_at(
        "reward.rewards"
    ).values():  # loaded once here, not once in every rank
        importlib.import_module(reward.scorer._target_.rpartition(".")[0])
    policy: Policy = config.build("model")

    def rank_main(world: World, session: Session) -> None:
        callbacks = (
            [Probe(directory)] if world.rank == 0 and config.parallel.sharding != "fsdp" else []
        )
        run.build_rank(config, world, session, callbacks=callbacks).fit()

    outcome = launch_ranks(Launch(*allocated_ranks(config), rank_main, directory))
    return Run(config, outcome, directory), policy


@pytest.mark.parametrize(
    "experiment",
    [pytest.param(name, marks=() if name in CHOSEN else pytest.mark.slow) for name in EXPERIMENTS],
)
def test_experiment_runs_from_launch_to_export(experiment: str, tmp_path: Path) -> None:
    finished, policy = execute(experiment, tmp_path)
    assert allocated_ranks(finished.config) == (1, 1)
    assert finished.outcome.status == "completed", f"{finished.outcome.cause}\n{logs(tmp_path)}"
    steps = [row for row in finished.rows("metrics.jsonl") if row["kind"] == "step"]
    assert [row["rl_step"] for row in steps] == list(range(1, STEPS + 1))
    assert all(row["zero_variance_groups"] == 0 for row in steps), (
        "a constant reward teaches nothing"
    )
    check_ratio(finished, steps[0])
    check_gradients(finished)
    check_weights(finished)
    check_versions(finished)
    check_frozen(policy)
    check_export(finished, policy)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", [*experiments(unusual=True), "scenes_edit"])
def test_schedules_train_the_same_weights(experiment: str, tmp_path: Path) -> None:
    """Three steps in double precision, where rounding stays rounding under Adam. A deviation of the
    whole batch excludes the gap."""
    runs = {}
    for schedule in ("sync", "full", "colocated"):
        words = (f"schedule={schedule}", "schedule.async_steps=0", "model.dtype=float64")
        words += ("algorithm.advantage.std=group",)
        (tmp_path / schedule).mkdir()
        runs[schedule], _ = execute(experiment, tmp_path / schedule, *words)
        outcome = runs[schedule].outcome
        assert outcome.status == "completed", (
            f"{schedule}: {outcome.cause}\n{logs(tmp_path / schedule)}"
        )
        check_ratio(
            runs[schedule],
            next(row for row in runs[schedule].rows("metrics.jsonl") if row["kind"] == "step"),
        )
        check_weights(runs[schedule])
    if "wan22_" in experiment:  # ranks that need different experts at the same time
        words = (
            "schedule=sync",
            "model.dtype=float64",
            "allocation.trainers=2",
            "parallel.sharding=fsdp",
        )
        (tmp_path / "fsdp").mkdir()
        runs["fsdp"], _ = execute(experiment, tmp_path / "fsdp", *words)
        assert runs["fsdp"].outcome.status == "completed", (
            f"{runs['fsdp'].outcome.cause}\n{logs(tmp_path / 'fsdp')}"
        )
    wanted = runs.pop("sync").final
    for schedule, found in runs.items():
        for name, value in found.final.items():
            torch.testing.assert_close(
                value, wanted[name], rtol=1e-6, atol=1e-9, msg=f"{schedule}: {name}"
            )


def check_ratio(finished: Run, first: dict[str, Any]) -> None:
    """Replay reproduced the rollout's log-probs before the first update; methods of the forward
    process have none."""
    if finished.config.algorithm.target.endswith((".NFT", ".AWM", ".DGPO", ".RVM")):
        assert first.get("first_ratio_max_dev") is None
    else:
        assert 0.0 <= first["first_ratio_max_dev"] <= RATIO_BOUND


def check_gradients(finished: Run) -> None:
    """Check that every trained parameter has a gradient from the second update on (a LoRA's A gets
    none while B is 0)."""
    gradients: list[dict[str, float | None]] = json.loads(
        (finished.directory / "gradients.json").read_text()
    )
    assert len(gradients) == STEPS * finished.config.algorithm.updates_per_batch
    for number, update in enumerate(gradients):
        assert not [name for name, largest in update.items() if largest is None], f"update {number}"
    assert set(gradients[0]) == set(finished.initial)
    without = [name for name in gradients[0] if not any(update[name] for update in gradients[1:])]
    assert not without, (
        f"{len(without)} of {len(gradients[0])} trained parameters never had a gradient: "
        f"{without[:9]}"
    )


SHIFT = r"token_refiner\.refiner_blocks\.\d+\.attn\.to_k\.bias$"
"""HunyuanVideo's refiner normalises no keys: their bias moves all scores of a query alike, and
softmax sees nothing."""


def check_weights(finished: Run) -> None:
    initial, final = finished.initial, finished.final
    assert initial.keys() == final.keys()
    assert all(value.isfinite().all() for value in final.values())
    same = [name for name, value in initial.items() if torch.equal(value, final[name])]
    same = [name for name in same if not re.search(SHIFT, name)]
    assert not same, f"{len(same)} of {len(initial)} trained parameters did not change: {same[:9]}"


def check_versions(finished: Run) -> None:
    """The rollout adopted every version that a trainer published, with the publisher's digest."""
    events = finished.rows("events.jsonl")
    published = {e["version"]: e["digest"] for e in events if e["kind"] == "publish"}
    told = {(e["rank"], e["backend"]) for e in events if e["kind"] == "attention"}
    assert told == {(0, "native"), (1, "native")}, "the attention that trainer and rollout use"
    adopted = {
        s["version"]: s["digest"]
        for s in finished.rows("spans/rank-001.jsonl")
        if s["stage"] == "adopt"
    }
    assert sorted(published) == list(range(STEPS + 1))
    assert adopted.items() <= published.items()
    assert set(range(STEPS)) <= set(adopted), (
        "the last version may come when the run is over, the others may not"
    )
    assert len(set(published.values())) >= 2


def check_frozen(policy: Policy) -> None:
    """Full fine-tuning trains everything except the listed modules, whose output nobody reads."""
    if policy.adapter.lora is None:
        blocks = getattr(policy.transformer, policy.block_lists[0])  # type: ignore[attr-defined]
        unread = tuple(
            f"{policy.block_lists[0]}.{len(blocks) - 1}.{name}." for name in policy.unread
        )  # type: ignore[attr-defined]
        frozen = {name for name, _ in policy.transformer.named_parameters()} - set(
            policy.adapter.trained_parameters()
        )
        assert all(name.startswith((*unread, *policy.unused)) for name in frozen), sorted(frozen)  # type: ignore[attr-defined]


def check_export(finished: Run, policy: Policy) -> None:
    """A plain diffusers transformer with the exported weights computes what the policy computes,
    bit for bit."""
    policy.adapter.load_trained_parameters(finished.final)
    folder = finished.directory / "export"
    export_policy(policy, folder)
    assert isinstance(policy, DiffusersPolicy)
    plain = exported(policy, folder)
    noise = torch.randn(1, *policy.latent_shape, generator=torch.Generator().manual_seed(5))
    condition, sigma = policy.codec.encode([prompt("a red circle")]), torch.tensor([0.6])
    policy.eval()
    with torch.no_grad():
        ours = policy.velocity(noise, sigma, condition)
        policy.transformer = plain
        theirs = policy.velocity(noise, sigma, condition)
    assert torch.equal(ours, theirs)
