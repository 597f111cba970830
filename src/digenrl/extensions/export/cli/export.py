"""`make export RUN=...`: write a run's trained weights for a plain diffusers pipeline, with a model
card.

    digenrl export run=RUN [out=FOLDER] [weights=evaluated|trained|average]
        [format=diffusers|comfyui|kohya] [merge=true] [allow_targets=[PACKAGE]]
        [confirm_hosts=[HOST]]

Writes FOLDER (RUN/export unless given): pytorch_lora_weights.safetensors or transformer/, and
README.md with the run's curves. The weights are those that the run evaluates with: the moving
average if it keeps one (algorithm.ema), otherwise the trained weights. With format=comfyui or
kohya, the adapter is also written under the names that these tools read (families with
`checkpoint_names`). With merge=true, transformer/ holds the base's weights with the adapter merged
in. The files of a second transformer (Wan2.2 A14B) end in _2. `hf upload OWNER/NAME FOLDER`
publishes the folder. The last line on standard output is the folder.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from digenrl import config as configuration
from digenrl.config.help import Arguments, Folder, RunDirectory, own_command
from digenrl.record.run_dir import share_as_folder

if TYPE_CHECKING:
    from torch import Tensor

    from digenrl.models.policy import Policy

NOTES = {
    "trained": "the weights after the last update",
    "average": (
        "the moving average, which the run evaluates with; weights=trained takes those of the last "
        "update"
    ),
}


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


def export_run(request: ExportKeys, words: Sequence[str] = ()) -> Path:
    """Build the run's policy, give it the checkpoint's weights, write the folder and return it.

    Args:
        words: changes of the run's configuration that only the command line may make:
            `allow_targets`, `confirm_hosts`.

    Raises:
        ConfigError: there is no such run.
        ValueError: merge without an adapter or with a format of adapters.
        NoWeights: no complete checkpoint, no moving average in it, or an average that is still the
            base model.
        digenrl.extensions.export.diffusers_export.ExportError: the written files could not be read
        back.
    """
    if request.merge and request.format != "diffusers":
        raise ValueError(
            f"merge = true with format = {request.format}: that format is for adapters; leave one "
            "of them out"
        )
    composed = configuration.load(words, stored=request.run)
    out = request.out or request.run / "export"

    # torch is imported only now, so that a mistyped word is refused at once.

    from digenrl.extensions.export.card import write_card
    from digenrl.extensions.export.diffusers_export import export_layout, export_policy

    ema = composed.settings.algorithm.get("ema")
    every = 1 if ema is None else composed.settings.build("algorithm.ema").every
    tensors, weights = read_weights(composed.run_dir / "checkpoints", request.weights, every, words)
    print(f"export: {NOTES[weights]}", file=sys.stderr)
    # A quantized base is for training: the adapter is merged with the published weights.
    whole = {"quantize": None} if composed.settings.model.holds_key("quantize") else {}
    policy: Policy = composed.settings.build("model", **whole)
    policy.adapter.load_trained_parameters(tensors)
    if request.merge:
        if policy.adapter.lora is None:
            raise ValueError(
                f"merge = true: {request.run} trained all weights, which are whole already; leave "
                "it out"
            )
        policy.adapter.merge()
    files = export_policy(policy, out)
    if request.format != "diffusers":
        files += export_layout(policy, out, request.format)
    for file in files:
        share_as_folder(file)
    plain: Any = composed.settings.as_plain()
    write_card(out, composed.run_dir, plain, policy, weights)
    return out


def read_weights(
    checkpoints: Path, weights: str, every: int = 1, words: Sequence[str] | None = None
) -> tuple[dict[str, Tensor], str]:
    """Read the newest checkpoint that verifies.

    Args:
        every: optimizer steps between two updates of the moving average.
        words: the command line, for `earlier_run.require_tied`; None: nothing is compared.

    Returns:
        (tensors by the names of `Adapter.trained_parameters`, kind of the weights: trained |
        average).

    Raises:
        NoWeights: no complete checkpoint, no moving average in it, or an average that has not
            moved.
    """
    from safetensors.torch import load_file

    from digenrl.earlier_run import require_tied
    from digenrl.strategy.checkpoint_io import CheckpointError, newest_valid, read_checkpoint
    from digenrl.strategy.checkpoint_storage import POLICY

    try:
        checkpoint = newest_valid(checkpoints, say=partial(print, file=sys.stderr))
    except CheckpointError as error:
        raise NoWeights(f"{error}\nNothing to export.") from error
    if words is not None:
        require_tied(checkpoints.parent, checkpoint, words)
    if weights == "trained":
        return load_file(checkpoint / POLICY), "trained"
    kept = read_checkpoint(checkpoint, ("algorithm",))["algorithm"]
    average: dict[str, Tensor] = kept["ema"]
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
        lambda request, _: print(export_run(request, allowance)),
        failures=RuntimeError,
    )
