"""`make eval RUN=... [STEP=base|last] [DATA=FILE]`: score a run's model again, with own prompts,
steps or rewards.

    digenrl eval run=outputs/digits_flowgrpo/2026-01-01_12-00-00-0
    digenrl eval run=RUN step=base data=prompts.txt sampling.eval.steps=20
    digenrl eval run=RUN reward=jpeg sampling.guidance_scale=3 sampling.height=768

Samples the base model and, unless step=base, the last checkpoint, both from the same noise. The
configuration is the run's own. Every further `key=value` changes it (`digenrl train --help`
lists the keys). Writes RUN/eval.json and RUN/eval.png (before above after). The last line of
standard output is the path of eval.json.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NotRequired, TypedDict

from digenrl import config as configuration
from digenrl.config.asked_prompts import evaluation_prompts
from digenrl.config.help import Arguments, RunDirectory, own_command
from digenrl.config.words import quote_value
from digenrl.earlier_run import (
    NoCheckpoint,
    changed_run,
    last_checkpoint,
    restore_module,
)
from digenrl.rewards.needs import require_weights, unscorable_prompts

if TYPE_CHECKING:
    from digenrl.algorithms.base import PolicyModule
    from digenrl.models.policy import Policy
    from digenrl.rewards.suite import RewardSuite
    from digenrl.rollout.engine import Pictures, RolloutEngine
    from digenrl.rollout.evaluation import FixedSamples

RESULT = "eval.json"
PICTURE = "eval.png"
_TELL_S = 10.0
"""Seconds between two lines of progress."""


class EvaluateKeys(Arguments):
    """Keys of the command line."""

    run: RunDirectory
    """Run to evaluate. It needs an evaluation callback and, unless step=base, a complete
    checkpoint."""
    step: Literal["base", "last"] = "last"
    """Weights to evaluate: only the base model, or the last checkpoint as well."""
    reward: str | None = None
    """Option of the group `reward` to score with. null: the run's own."""
    data: str | None = None
    """Prompt file. null: the run's held-out prompts."""


class Evaluated(TypedDict):
    """What eval.json holds."""

    run: str
    prompts: int
    samples_per_prompt: int
    steps: int
    seed: int
    rl_step: NotRequired[int]
    """Step of the checkpoint; absent for the base model alone."""
    base: NotRequired[dict[str, float]]
    last: NotRequired[dict[str, float]]
    """Numbers of the base model, and of the checkpoint, by name."""


def evaluate_run(request: EvaluateKeys, words: Sequence[str] = ()) -> Evaluated:
    """Sample, score and write. Return the content of eval.json.

    Args:
        words: changes of the run's configuration.

    Raises:
        ConfigError: there is no such run, or its configuration does not allow a change.
        NoCheckpoint: step=last, but the run has no whole checkpoint.
        ValueError: the run's configuration has no evaluation callback.
    """
    changes = [*([f"data.heldout={quote_value(request.data)}"] if request.data else []), *words]
    composed = changed_run(request.run, changes)
    for note in composed.notes:
        print(note, file=sys.stderr)
    settings = composed.settings
    scoring = settings
    if request.reward is not None:
        kept = ("hydra.searchpath=", "allow_targets=", "hardware.build=")
        own = [word for word in words if word.startswith(kept)]
        scoring = configuration.load([f"reward={request.reward}", *own]).settings
    if "evaluation" not in (settings.callbacks or {}):
        raise ValueError(
            f"{request.run}/config.yaml has no callbacks.evaluation, which says what to evaluate; "
            "add one"
        )

    require_weights(scoring.node_at("reward"), settings.callbacks)
    asked = list(evaluation_prompts(settings))
    if problems := unscorable_prompts(scoring.node_at("reward"), asked, settings.callbacks, asked):
        raise ValueError("\n".join(problems))

    # torch is imported only now, so that a mistyped word is refused at once.
    from digenrl import accelerator
    from digenrl.callbacks.evaluation import Evaluation
    from digenrl.record.run_dir import write_json
    from digenrl.run import engine_of

    try:
        checkpoint, rl_step = (
            last_checkpoint(composed.run_dir, composed.overrides)
            if request.step == "last"
            else (None, 0)
        )
    except NoCheckpoint as error:
        raise NoCheckpoint(f"{error}\nstep=base evaluates without one.") from error
    evaluation: Evaluation = settings.build("callbacks.evaluation")
    policy: Policy = settings.build("model")
    module: PolicyModule = settings.build("algorithm", policy=policy)
    module.to(accelerator.device_kind())
    rewards: RewardSuite = scoring.build("reward")
    drawn = evaluation.drawn
    rewards.check_prompts(drawn.prompts)
    engine = engine_of(settings, module, rewards)
    result: Evaluated = {
        "run": str(composed.run_dir),
        "prompts": len(drawn.prompts),
        "samples_per_prompt": drawn.per_prompt,
        "steps": drawn.steps or settings.sampling.eval.steps or settings.sampling.steps,
        "seed": drawn.seed,
    }
    before = after = _draw_and_tell("base", drawn, engine)
    if checkpoint is not None:
        result["rl_step"] = rl_step
        restore_module(module, checkpoint)
        with module.averaged():
            after = _draw_and_tell("last", drawn, engine)
    engine.close()
    result["base"] = evaluation.measure_pictures(engine, before)
    if checkpoint is not None:
        result["last"] = evaluation.measure_pictures(engine, after)
    save_before_after(composed.run_dir / PICTURE, before, after, rl_step)
    write_json(composed.run_dir / RESULT, result)
    return result


def _draw_and_tell(name: str, drawn: FixedSamples, engine: RolloutEngine) -> Pictures:
    """Return the pictures of all of an evaluation's samples, and say every few seconds how many
    prompts are drawn."""
    told = -math.inf

    def tell(number: int) -> None:
        nonlocal told
        if time.monotonic() - told > _TELL_S:
            done = sum(map(len, drawn.pieces[:number]))
            print(f"eval: {name}: {done} of {len(drawn.prompts)} prompts", file=sys.stderr)
            told = time.monotonic()

    pieces = range(len(drawn.pieces))
    return drawn.draw_pieces(engine, pieces, noise=name == "base", before_piece=tell)


def save_before_after(path: Path, before: Pictures, after: Pictures, rl_step: int) -> None:
    """Draw the before/after grid of two evaluations."""
    from digenrl.report.page.comparison import save_comparison
    from digenrl.report.pictures import Samples

    grids = (
        Samples(step, shown.media.numpy(), tuple(prompt.text for prompt in shown.prompts), {})
        for step, shown in ((0, before), (rl_step, after))
    )
    save_comparison(path, *grids)


def result_table(result: Evaluated) -> str:
    """Return the numbers of `result`, one row per metric."""
    found = {"base": result.get("base"), "last": result.get("last")}
    columns = {name: numbers for name, numbers in found.items() if numbers is not None}
    rows = [f"{'':<24}" + "".join(f"{name:>12}" for name in columns)]
    for key in dict.fromkeys(key for numbers in columns.values() for key in numbers):
        # Some are measured of the base alone.
        cells = (numbers.get(key) for numbers in columns.values())
        shown = ("-" if cell is None else f"{cell:.4g}" for cell in cells)
        rows.append(f"{key:<24}" + "".join(f"{cell:>12}" for cell in shown))
    return "\n".join(rows)


def main(arguments: Sequence[str]) -> int:
    """Run the command and return the exit code: 0 for success, 1 without a whole checkpoint.

    2 stands for arguments, a run or a configuration that do not fit.
    """

    def run_request(request: EvaluateKeys, words: list[str]) -> None:
        result = evaluate_run(request, words)
        print(result_table(result), file=sys.stderr)
        print(Path(result["run"]) / RESULT)

    return own_command(
        EvaluateKeys, __doc__, arguments, run_request, others=True, failures=NoCheckpoint
    )
