"""digenrl from Python, for notebooks and scripts: read a run, sample from it, score pictures, plan.

    import digenrl

    run = digenrl.load_run("outputs/digits_flowgrpo/2026-01-01_12-00-00-0")
    run.metrics["reward"], run.summary["heldout_last"], run.samples[-1].media.shape
    pictures = digenrl.sample(run, ["number seven"], samples=8)
    digenrl.score("jpeg", pictures.media, pictures.prompts).total
    digenrl.plan("experiment=sd35_flowgrpo", "hardware=node_8xh100")["candidates"][0]["step_s"]
    loop = digenrl.rl_loop("experiment=digits_flowgrpo")
    loop.train(loop.generate())["reward"]

`words` are those of the command line, `--config-dir DIR` included. torch is imported by `sample`,
`score` and `rl_loop` alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from digenrl.cli.extensions import plan_of
from digenrl.earlier_run import changed_run, last_checkpoint, restore_module
from digenrl.record.run_dir import Row
from digenrl.report.pictures import Samples, read_samples, sample_files
from digenrl.report.read_run import Run, read_run
from digenrl.report.summary import build_summary
from digenrl.report.summary_record import Summary
from digenrl.report.tables import key_figures
from digenrl.reward_command import reward_config, reward_suite

if TYPE_CHECKING:
    from digenrl.algorithms.base import PolicyModule
    from digenrl.api.loop import Loop
    from digenrl.models.policy import Policy
    from digenrl.types import Prompt


@dataclass(frozen=True)
class LoadedRun:
    """A run directory, finished, crashed or still running, as it was when it was read."""

    run: Run
    """Everything in it: events, spans of all ranks, warnings."""

    def __repr__(self) -> str:
        return f"LoadedRun({str(self.path)!r}, {len(self.run.steps)} RL steps)"

    def _repr_html_(self) -> str:
        rows = [
            ("run", str(self.path)),
            ("status", self.summary["status"]),
            *key_figures(self.summary),
        ]
        cells = (f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows)
        return f"<table>{''.join(cells)}</table>"

    @property
    def path(self) -> Path:
        """The run's directory."""
        return self.run.path

    @property
    def config(self) -> Mapping[str, Any]:
        """config.yaml as plain data."""
        return self.run.config

    @cached_property
    def summary(self) -> Summary:
        """What summary.json holds, from the files as they are."""
        return build_summary(self.run)

    @cached_property
    def metrics(self) -> dict[str, list[object]]:
        """Column -> value of every RL step, None where a step has none:
        `pandas.DataFrame(run.metrics)` takes it."""
        return _columns_of(self.run.steps)

    @cached_property
    def evals(self) -> dict[str, list[object]]:
        """The same of every evaluation."""
        return _columns_of(self.run.evals)

    @cached_property
    def samples(self) -> tuple[Samples, ...]:
        """What each evaluation kept, by rising RL step: the same prompts from the same noise."""
        return tuple(read_samples(path) for path in sample_files(self.run))


@dataclass(frozen=True)
class Scored:
    """Scores of N samples."""

    total: NDArray[np.float32]
    """[N]: the mixture's weighted sum, NaN where a reward is missing."""
    rewards: Mapping[str, NDArray[np.float32]]
    """name -> [N], NaN where it is missing."""

    def __repr__(self) -> str:
        names = ", ".join(self.rewards)
        return f"Scored({len(self.total)} samples, mean {np.nanmean(self.total):.4g}, of {names})"


def load_run(directory: str | os.PathLike[str]) -> LoadedRun:
    """Read a run directory.

    Raises:
        FileNotFoundError: there is no run in it.
    """
    return LoadedRun(read_run(directory))


def sample(
    run: LoadedRun | str | os.PathLike[str],
    prompts: str | Prompt | Sequence[str | Prompt],
    *words: str,
    samples: int = 4,
    weights: Literal["last", "base"] = "last",
    steps: int | None = None,
    seed: int = 1234,
) -> Samples:
    """Sample from a run's model, on a GPU where there is one.

    Args:
        run: a run, or its directory.
        prompts: a text, a prompt of `digenrl.data.load_prompts`, or a list of such.
        words: changes of the run's configuration, such as `sampling.guidance_scale=3`.
        samples: of each prompt, one after the other.
        weights: of the newest checkpoint (its moving average where the run keeps one), or of the
            base model.
        steps: denoising steps; None: those of the run's evaluations.
        seed: of the noise, which depends on seed, prompt and number of the sample alone.

    Returns:
        uint8 media [len(prompts) * samples, C, H, W], or [..., F, C, H, W] of videos; no scores.

    Raises:
        ConfigError: no such run, or words that do not fit.
        NoCheckpoint: weights="last", but the run has no whole checkpoint.
        ValueError: weights that are neither, or fewer than one sample or step.
    """
    if weights not in ("last", "base"):
        raise ValueError(f"weights = {weights!r}: use 'last' (the newest checkpoint) or 'base'")
    for name, count in (("samples", samples), ("steps", 1 if steps is None else steps)):
        if count < 1:
            raise ValueError(f"{name} = {count}: at least 1 is needed")
    composed = changed_run(run.path if isinstance(run, LoadedRun) else Path(run), words)
    checkpoint, rl_step = (
        last_checkpoint(composed.run_dir, composed.overrides) if weights == "last" else (None, 0)
    )

    import torch

    from digenrl import accelerator
    from digenrl.parts import sampling_spec
    from digenrl.rollout.engine import ode_samples

    policy: Policy = composed.settings.build("model")
    module: PolicyModule = composed.settings.build("algorithm", policy=policy)
    module.to(accelerator.device_kind())
    if checkpoint is not None:
        restore_module(module, checkpoint)
    asked = as_prompts(prompts)
    with nullcontext() if checkpoint is None else module.averaged():
        media = ode_samples(
            policy.eval(), sampling_spec(composed.settings), asked, samples, seed, steps
        )
    texts = tuple(prompt.text for prompt in asked for _ in range(samples))
    return Samples(rl_step, media.mul(255.0).round().to(torch.uint8).numpy(), texts, {})


def score(
    reward: str,
    media: ArrayLike,
    prompts: Sequence[str | Prompt],
    *words: str,
    heldout: bool = False,
) -> Scored:
    """Score pictures or videos with an option of the group `reward`.

    Args:
        reward: such as "ocr", or one of your own with `--config-dir` among the words.
        media: [N, C, H, W] or, of videos, [N, F, C, H, W]; uint8, or floating point in [0, 1].
        prompts: N texts, or N prompts where scorers read more of them.
        words: such as `hardware.build=tiny`, `allow_targets=[my_module]`.
        heldout: also the mixture's held-out rewards.

    Raises:
        ConfigError: the reward does not exist, or its weights are missing here.
        ValueError: media or prompts that do not fit, or that a scorer could never score.
    """
    settings = reward_config([f"reward={reward}", *words], "serve_reward")

    import torch

    from digenrl.rewards.suite import combine_scores

    array = np.asarray(media)
    pictures = torch.as_tensor(
        array / 255.0 if array.dtype == np.uint8 else array, dtype=torch.float32
    )
    asked = as_prompts(prompts)
    suite = reward_suite(settings)
    try:
        suite.check_prompts(asked)
        scores = suite.score(pictures, asked, heldout=heldout)
        return Scored(
            combine_scores(scores, suite.weights).numpy(),
            {name: values.numpy() for name, values in scores.items()},
        )
    finally:
        suite.close()


def plan(*words: str) -> dict[str, Any]:
    """Return what a run would cost: the content of plan.json, best candidates first. Nothing is
    written.

    Args:
        words: those of `digenrl plan`.

    Raises:
        ConfigError: words that do not fit.
        PlanError: nothing fits; an error of the planner, and a ValueError.
        ValueError: the allocation cannot be placed on the hardware.
        ExtensionMissing: the planner is not installed.
    """
    return plan_of(words)


def rl_loop(*words: str) -> Loop:
    """Return a loop of RL steps in this process, for notebooks and debuggers. There is no launcher,
    Strategy or Trainer, and nothing is written.

    Args:
        words: of `make train`, such as `experiment=digits_flowgrpo`.

    Raises:
        ConfigError: words that do not fit.
        ValueError: a word that the loop sets otherwise; or more than the profile's GPU has memory
            for.
    """
    from digenrl.api import loop

    return loop.rl_loop(*words)


def as_prompts(prompts: str | Prompt | Sequence[str | Prompt]) -> list[Prompt]:
    """Return a list of prompts. Texts become prompts without target and metadata."""
    from digenrl.types import Prompt

    prompts = [prompts] if isinstance(prompts, str | Prompt) else prompts
    return [Prompt(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]


def _columns_of(rows: Sequence[Row]) -> dict[str, list[object]]:
    names = dict.fromkeys(key for row in rows for key in row)
    return {name: [row.get(name) for row in rows] for name in names}
