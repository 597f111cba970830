"""`make export RUN=...`: a run's trained weights as a plain diffusers pipeline loads them, with a model card.

    python -m digenrl.cli.export run=RUN [out=FOLDER] [weights=evaluated|trained|average]
        [format=diffusers|comfyui|kohya] [allow_targets=[PACKAGE]] [confirm_hosts=[HOST]]

Writes FOLDER (RUN/export unless given): pytorch_lora_weights.safetensors or transformer/, README.md with the run's
curves, and the last evaluation's samples as PNG or MP4. The weights are those that the run evaluates with: the moving
average where it keeps one (algorithm.ema), else the trained ones. format=comfyui or kohya adds the adapter under the
names that those read (FLUX.1, Qwen-Image, SD3.5, Wan). The last line on standard output is the folder.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from digenrl import config as configuration
from digenrl.config.help import Arguments, Folder, RunDirectory, own_command

NOTES = {
    "trained": "the weights after the last update",
    "average": "the moving average, which the run evaluates with; weights=trained takes those of the last update",
}


class NoWeights(RuntimeError):
    """The run has no whole checkpoint, or not the weights that were asked for."""


class Request(Arguments):
    """What the command line asks for."""

    run: RunDirectory = Field(description="with a whole checkpoint")
    out: Folder | None = Field(None, description="where to write; null: RUN/export")
    weights: Literal["evaluated", "trained", "average"] = Field(
        "evaluated", description="evaluated: the moving average where the run keeps one, else the trained ones"
    )
    format: Literal["diffusers", "comfyui", "kohya"] = Field(
        "diffusers", description="comfyui, kohya: beside diffusers' file, lora_FORMAT.safetensors for those"
    )


def export(request: Request, words: Sequence[str] = ()) -> Path:
    """Build the run's policy, give it the checkpoint's weights, write the folder and return it.

    Args:
        words: what only the command line may say about the run's configuration: `allow_targets`, `confirm_hosts`.

    Raises:
        ConfigError: no such run.
        NoWeights: no whole checkpoint, no moving average in it, or one that is still the base model.
        digenrl.models.diffusers_export.ExportError: what was written could not be read back.
    """
    composed = configuration.load(words, stored=request.run)
    out = request.out or request.run / "export"

    # torch is imported only now, so that a mistyped word is refused at once.
    import numpy as np
    from omegaconf import OmegaConf

    from digenrl.models.card import write_card
    from digenrl.models.diffusers_export import export_layout, export_policy
    from digenrl.models.sample_files import write_samples

    ema = composed.config.algorithm.get("ema")
    every = 1 if ema is None else configuration.instantiate(ema).every
    tensors, weights = read_weights(composed.run_dir / "checkpoints", request.weights, every)
    print(f"export: {NOTES[weights]}", file=sys.stderr)
    policy = configuration.instantiate(composed.config.model)
    policy.load_trained_parameters(tensors)
    export_policy(policy, out)
    if request.format != "diffusers":
        export_layout(policy, out, request.format)
    samples = []
    evaluations = sorted((composed.run_dir / "samples").glob("eval-*.npz"), key=lambda p: int(p.stem.split("-")[1]))
    if evaluations:
        with np.load(evaluations[-1], allow_pickle=False) as stored:
            samples = write_samples(out, stored["media"])
    plain: Any = OmegaConf.to_container(composed.config, resolve=True)
    write_card(out, composed.run_dir, plain, policy.family, type(policy.transformer).__name__, weights, samples)
    return out


def read_weights(checkpoints: Path, weights: str, every: int = 1) -> tuple[dict[str, Any], str]:
    """(tensors by the names of `policy.trained_parameters()`, which weights they are: trained | average), of the newest
    checkpoint that verifies.

    Args:
        every: optimizer steps between two of the moving average.

    Raises:
        NoWeights: no whole checkpoint, no moving average in it, or one that has not moved.
    """
    from safetensors.torch import load_file

    from digenrl.strategy.checkpoint_io import CheckpointError, newest_valid, read
    from digenrl.strategy.checkpoint_storage import POLICY

    try:
        checkpoint = newest_valid(checkpoints, say=partial(print, file=sys.stderr))
    except CheckpointError as error:
        raise NoWeights(f"{error}\nNothing to export.") from error
    if weights == "trained":
        return load_file(checkpoint / POLICY), "trained"
    kept = read(checkpoint, ("algorithm",))["algorithm"]
    average: dict[str, Any] = kept["ema"]
    if average and kept["ema_steps"] < every:
        raise NoWeights(
            f"{checkpoint}: the moving average is still the base model, because it follows every {every} optimizer "
            f"steps (algorithm.ema.every) and there were {kept['ema_steps']}; use weights=trained"
        )
    if not average and weights == "evaluated":
        return load_file(checkpoint / POLICY), "trained"
    if not average:
        raise NoWeights(f"{checkpoint} keeps no moving average (algorithm.ema=null); use weights=trained")
    return average, "average"


def main(arguments: Sequence[str]) -> int:
    """Exit code: 0; 2 when arguments, run or configuration do not fit; 1 without usable weights."""
    allowance = [word for word in arguments if word.startswith(("allow_targets=", "confirm_hosts="))]
    own = [word for word in arguments if word not in allowance]
    return own_command(
        Request, __doc__, own, lambda request, _: print(export(request, allowance)), failures=RuntimeError
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
