"""`make export RUN=...`: a run's trained weights as a plain diffusers pipeline loads them, with a model card.

    python -m digenrl.cli.export run=RUN [out=FOLDER] [weights=evaluated|trained|average] [allow_targets=[PACKAGE]]

Writes FOLDER (RUN/export unless given): pytorch_lora_weights.safetensors or transformer/, README.md with the run's
curves, and the last evaluation's samples as PNG or MP4. The weights are those that the run evaluates with: the moving
average where it keeps one (algorithm.ema), else the trained ones. The last line on standard output is the folder.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from digenrl import config as configuration

USAGE = "usage: python -m digenrl.cli.export run=<run directory> [out=<folder>] [weights=evaluated|trained|average]"
WEIGHTS = ("evaluated", "trained", "average")
NOTES = {
    "trained": "the weights after the last update",
    "average": "the moving average, which the run evaluates with; weights=trained takes those of the last update",
}


class NoWeights(RuntimeError):
    """The run has no whole checkpoint, or not the weights that were asked for."""


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    run: Path
    out: Path
    weights: str
    words: tuple[str, ...] = ()
    """What the run's configuration must be loaded with: `allow_targets`, which only the command line may say."""

    @classmethod
    def from_arguments(cls, arguments: Sequence[str]) -> Request:
        """Raises ValueError, with the usage, for anything but its keys."""
        given: dict[str, str] = {}
        for argument in arguments:
            key, separator, value = argument.partition("=")
            if not separator or key not in ("run", "out", "weights", "allow_targets"):
                raise ValueError(f"{argument}: unknown. {USAGE}")
            given[key] = value
        if not given.get("run"):
            raise ValueError(f"run=... is missing. {USAGE}")
        weights = given.get("weights", WEIGHTS[0])
        if weights not in WEIGHTS:
            raise ValueError(f"weights={weights}: use {', '.join(WEIGHTS)}. {USAGE}")
        run = Path(given["run"])
        words = (f"allow_targets={given['allow_targets']}",) if "allow_targets" in given else ()
        return cls(run, Path(given["out"]) if given.get("out") else run / "export", weights, words)


def export(request: Request) -> Path:
    """Build the run's policy, give it the checkpoint's weights, write the folder and return it.

    Raises:
        ConfigError: no such run.
        NoWeights: no whole checkpoint, or no moving average in it.
        digenrl.models.diffusers_export.ExportError: what was written could not be read back.
    """
    composed = configuration.load([f"resume={request.run}", *request.words])

    # torch is imported only now, so that a mistyped word is refused at once.
    import numpy as np
    from omegaconf import OmegaConf

    from digenrl.models.card import write_card
    from digenrl.models.diffusers_export import export_policy
    from digenrl.models.sample_files import write_samples

    tensors, weights = read_weights(composed.run_dir / "checkpoints" / "last", request.weights)
    print(f"export: {NOTES[weights]}", file=sys.stderr)
    policy = configuration.instantiate(composed.config.model)
    policy.load_trained_parameters(tensors)
    export_policy(policy, request.out)
    samples = []
    evaluations = sorted((composed.run_dir / "samples").glob("eval-*.npz"), key=lambda p: int(p.stem.split("-")[1]))
    if evaluations:
        with np.load(evaluations[-1], allow_pickle=False) as stored:
            samples = write_samples(request.out, stored["media"])
    plain: Any = OmegaConf.to_container(composed.config, resolve=True)
    write_card(request.out, composed.run_dir, plain, type(policy.transformer).__name__, weights, samples)
    return request.out


def read_weights(checkpoint: Path, weights: str) -> tuple[dict[str, Any], str]:
    """(tensors by the names of `policy.trained_parameters()`, which weights they are: trained | average).

    Raises NoWeights.
    """
    import torch
    from safetensors.torch import load_file

    from digenrl.strategy.checkpoint_io import POLICY, STATE, CheckpointError, verify

    try:
        verify(checkpoint)
    except CheckpointError as error:
        raise NoWeights(f"{error} Nothing to export.") from error
    if weights == "trained":
        return load_file(checkpoint / POLICY), "trained"
    state = torch.load(checkpoint / STATE, map_location="cpu", weights_only=True)
    average: dict[str, Any] = state["algorithm"]["ema"]
    if not average and weights == "evaluated":
        return load_file(checkpoint / POLICY), "trained"
    if not average:
        raise NoWeights(f"{checkpoint} keeps no moving average (algorithm.ema=null); use weights=trained")
    return average, "average"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0; 2 when arguments, run or configuration do not fit; 1 without usable weights."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if list(arguments) in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    try:
        folder = export(Request.from_arguments(arguments))
    except (configuration.ConfigError, ValueError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
