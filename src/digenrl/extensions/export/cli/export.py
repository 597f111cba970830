"""`make export RUN=...`: write a run's trained weights for a plain diffusers pipeline, with a model
card.

    digenrl export run=RUN [out=FOLDER] [weights=evaluated|trained|average]
        [format=diffusers|comfyui|kohya] [merge=true] [push=OWNER/NAME] [allow_targets=[PACKAGE]]
        [confirm_hosts=[HOST]]

Writes FOLDER (RUN/export unless given): pytorch_lora_weights.safetensors or transformer/, README.md
with the run's curves, and the last evaluation's samples as PNG or MP4. The weights are those that
the run evaluates with: the moving average if it keeps one (algorithm.ema), otherwise the trained
weights. format=comfyui or kohya adds the adapter under the names that these tools read (families
with `checkpoint_names`). merge=true writes transformer/ with the adapter merged into the base's
weights. The files of a second transformer (Wan2.2 A14B) end in _2. push uploads the folder to a
model repository of the hub, with the token of `hf auth login`. The last line on standard output is
the folder.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from digenrl import config as configuration
from digenrl.config.help import Arguments, Folder, RunDirectory, own_command

NOTES = {
    "trained": "the weights after the last update",
    "average": (
        "the moving average, which the run evaluates with; weights=trained takes those of the last "
        "update"
    ),
}


class NotPushed(RuntimeError):
    """The folder was written, but it is not on the hub."""


class NoWeights(RuntimeError):
    """The run has no complete checkpoint, or the checkpoint lacks the weights that were asked
    for."""


class ExportKeys(Arguments):
    """Arguments of the command line."""

    run: RunDirectory
    """Run to export. It needs a complete checkpoint."""
    out: Folder | None = None
    """Directory to write to. null: RUN/export."""
    weights: Literal["evaluated", "trained", "average"] = "evaluated"
    """Weights to export. evaluated: the moving average if the run keeps one, otherwise the trained
    weights."""
    format: Literal["diffusers", "comfyui", "kohya"] = "diffusers"
    """Further files beside the diffusers file. comfyui, kohya: lora_FORMAT.safetensors for that
    program."""
    merge: bool = False
    """Write transformer/ as well: the base weights with the adapter added, in the dtype of the
    base."""
    push: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")] | None = None
    """Model repository on the hub to which the folder is uploaded. A new one is made private. null:
    no upload."""


def export(request: ExportKeys, words: Sequence[str] = ()) -> Path:
    """Build the run's policy, give it the checkpoint's weights, write the folder and return it.

    Args:
        words: changes of the run's configuration that only the command line may make:
            `allow_targets`, `confirm_hosts`.

    Raises:
        ConfigError: there is no such run.
        ValueError: merge without an adapter or with a format of adapters, push without a network.
        NoWeights: no complete checkpoint, no moving average in it, or an average that is still the
            base model.
        NotPushed: the hub refused, or was not reached.
        digenrl.extensions.export.diffusers_export.ExportError: the written files could not be read
        back.
    """
    from huggingface_hub import constants

    if request.merge and request.format != "diffusers":
        raise ValueError(
            f"merge = true with format = {request.format}: that format is for adapters; leave one "
            "of them out"
        )
    if request.push is not None and constants.is_offline_mode():
        raise ValueError(
            f"push = {request.push}: HF_HUB_OFFLINE is set; unset it, or export without push and "
            f"run `hf upload {request.push} FOLDER` where there is a network"
        )
    composed = configuration.load(words, stored=request.run)
    out = request.out or request.run / "export"

    # torch is imported only now, so that a mistyped word is refused at once.
    import numpy as np
    from omegaconf import OmegaConf

    from digenrl.extensions.export.card import write_card, write_samples
    from digenrl.extensions.export.diffusers_export import export_layout, export_policy

    ema = composed.config.algorithm.get("ema")
    every = 1 if ema is None else configuration.instantiate(ema).every
    tensors, weights = read_weights(composed.run_dir / "checkpoints", request.weights, every)
    print(f"export: {NOTES[weights]}", file=sys.stderr)
    # A quantized base is for training: the adapter is merged with the published weights.
    whole = {"quantize": None} if "quantize" in composed.config.model else {}
    policy = configuration.instantiate(composed.config.model, **whole)
    policy.load_trained_parameters(tensors)
    if request.merge:
        if policy.lora is None:
            raise ValueError(
                f"merge = true: {request.run} trained all weights, which are whole already; leave "
                "it out"
            )
        policy.merge_adapter()
    export_policy(policy, out)
    if request.format != "diffusers":
        export_layout(policy, out, request.format)
    samples = []
    evaluations = sorted(
        (composed.run_dir / "samples").glob("eval-*.npz"), key=lambda p: int(p.stem.split("-")[1])
    )
    if evaluations:
        with np.load(evaluations[-1], allow_pickle=False) as stored:
            samples = write_samples(out, stored["media"])
    plain: Any = OmegaConf.to_container(composed.config, resolve=True)
    write_card(out, composed.run_dir, plain, policy, weights, samples)
    if request.push is not None:
        push(out, request.push)
    return out


def push(folder: Path, repository: str) -> None:
    """Upload `folder` to a model repository of the hub. A missing repository is made, as a private
    one.

    Raises:
        NotPushed: the hub refused, or was not reached.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder)
    except Exception as error:  # of the hub's client, whose HTTP library depends on its version
        raise NotPushed(
            f"push = {repository}: {folder} is written, and was not uploaded "
            f"({' '.join(str(error).split())[:300]}). Run `hf auth login` with a token that may "
            f"write there, then `hf upload {repository} {folder}`."
        ) from error
    print(f"export: uploaded to https://huggingface.co/{repository}", file=sys.stderr)


def read_weights(checkpoints: Path, weights: str, every: int = 1) -> tuple[dict[str, Any], str]:
    """Read the newest checkpoint that verifies.

    Args:
        every: optimizer steps between two updates of the moving average.

    Returns:
        (tensors by the names of `policy.trained_parameters()`, kind of the weights: trained |
        average).

    Raises:
        NoWeights: no complete checkpoint, no moving average in it, or an average that has not
            moved.
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
            f"{checkpoint}: the moving average is still the base model, because it follows every "
            f"{every} optimizer "
            f"steps (algorithm.ema.every) and there were {kept['ema_steps']}; use weights=trained"
        )
    if not average and weights == "evaluated":
        return load_file(checkpoint / POLICY), "trained"
    if not average:
        raise NoWeights(
            f"{checkpoint} keeps no moving average (algorithm.ema=null); use weights=trained"
        )
    return average, "average"


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code.

    0 is success. 2 means that arguments, run or configuration do not fit. 1 means that there are no
    usable weights.
    """
    allowance = [
        word for word in arguments if word.startswith(("allow_targets=", "confirm_hosts="))
    ]
    own = [word for word in arguments if word not in allowance]
    return own_command(
        ExportKeys,
        __doc__,
        own,
        lambda request, _: print(export(request, allowance)),
        failures=RuntimeError,
    )
