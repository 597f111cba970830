"""Opening a diffusers checkpoint, tiny or real, from a directory or the local hub cache, and
refusing a broken one.

Nothing is downloaded at run time: many ranks start at once, and a run must not depend on a server.
Weights that are not here give a message with the file, the licence page and the command that
fetches them.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from torch import nn

from digenrl.model_folder import CodeInFolder, require_data

if TYPE_CHECKING:
    from diffusers import ConfigMixin, ModelMixin

HUB = "https://huggingface.co"


class PretrainedError(ValueError):
    """A checkpoint is absent, incomplete, or of another family."""


def cache_root(kind: str) -> Path:
    """Return the folder of one `kind` of files that can be made again ("prompts", "tiny").

    The folder is $DIGENRL_CACHE, else .cache/ of a source checkout, else the user's cache
    directory.
    """
    if os.environ.get("DIGENRL_CACHE"):
        return Path(os.environ["DIGENRL_CACHE"]) / kind
    # From this file: models/, digenrl/, src/, the checkout.
    checkout = Path(__file__).resolve().parents[3]
    if (checkout / "pyproject.toml").exists():
        return checkout / ".cache" / kind
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "digenrl" / kind


def require_writable(root: Path) -> None:
    """Make a folder of `cache_root`.

    Raises:
        PretrainedError: the folder cannot be written. The message names DIGENRL_CACHE.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        # A real file, because permissions tell nothing of quotas and read-only mounts.
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        raise PretrainedError(
            f"{root}: cannot be written ({error.strerror or error}); set the environment variable "
            "DIGENRL_CACHE to a directory of your own, for what can be made again."
        ) from error


def hide_progress_bars() -> None:
    """Switch progress bars off, because many ranks load at once and share one terminal."""
    import diffusers
    import transformers

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()


def missing_error(path: str, file: str, reason: object) -> PretrainedError:
    """Return the error that says what to do when `file` of `path` is not on this machine.

    Of `reason`, often an exception, the first line is said.
    """
    said, reason = reason, (str(reason).strip().splitlines() or [type(reason).__name__])[0]
    # A hub id is OWNER/NAME.
    if Path(path).exists() or path.startswith((".", "/", "~")) or path.count("/") != 1:
        return PretrainedError(
            f"model.path={path} has no {file} ({reason}). Expected a directory in diffusers layout "
            "(model_index.json, transformer/, vae/, ...) or a hub id such as "
            "Wan-AI/Wan2.1-T2V-14B-Diffusers"
        )
    # The hub's own words speak of its cache and its switches, which nobody here has set.
    reason = "" if isinstance(said, LocalEntryNotFoundError) else f" ({reason})"
    return PretrainedError(
        f"{file} of {path} is not on this machine{reason}. Accept the licence at {HUB}/{path} "
        f"(gated models need it), run `hf auth login` once, then `make fetch` with the EXP, HW and "
        f"ARGS of this run (or `hf download {path}`); or try the tiny build: hardware=cpu_tiny"
    )


def model_index(path: str) -> dict[str, Any]:
    """Return the checkpoint's model_index.json. Raises PretrainedError with the remedy if it cannot
    be read."""
    from diffusers import DiffusionPipeline

    return _load_config(DiffusionPipeline, path, "model_index.json")


def require_family(path: str, pipelines: tuple[str, ...], family: str) -> None:
    """Raise PretrainedError unless the checkpoint at `path` was saved by one of `pipelines`."""
    found = model_index(path).get("_class_name")
    if found not in pipelines:
        raise PretrainedError(
            f"model.path={path} holds a {found}, and the {family} adapter reads "
            f"{' or '.join(pipelines)}: "
            "choose the model config of that family (configs/model) or another path"
        )


def load_component(
    component: type[ModelMixin], path: str, subfolder: str, dtype: torch.dtype
) -> nn.Module:
    """Return `component.from_pretrained` of one diffusers model, in eval mode. Raises
    PretrainedError if a tensor is missing."""
    folder = folder_of(path, f"{subfolder}/")
    try:
        model, info = component.from_pretrained(
            folder,
            subfolder=subfolder,
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise missing_error(path, f"{subfolder}/", error) from error
    # diffusers fills missing tensors with random numbers and only warns.
    absent = sorted(info.get("missing_keys", [])) + [
        str(key) for key in info.get("mismatched_keys", [])
    ]
    if absent:
        raise PretrainedError(
            f"{path}/{subfolder} lacks {len(absent)} tensors or has them in another shape (first: "
            f"{absent[0]}): "
            f"half a checkpoint, or another architecture; fetch it again with `hf download {path}`"
        )
    # Dropout would make replay differ from sampling.
    return model.eval()


def component_config(component: type[ModelMixin], path: str, subfolder: str) -> dict[str, Any]:
    """Return the checkpoint's SUBFOLDER/config.json."""
    return _load_config(component, path, f"{subfolder}/config.json", subfolder=subfolder)


def scheduler_config(path: str) -> dict[str, Any]:
    """Return the checkpoint's scheduler/scheduler_config.json."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return _load_config(
        FlowMatchEulerDiscreteScheduler,
        path,
        "scheduler/scheduler_config.json",
        subfolder="scheduler",
    )


def _load_config(owner: type[ConfigMixin], path: str, file: str, **where: str) -> dict[str, object]:
    folder = folder_of(path, file)
    try:
        return owner.load_config(folder, local_files_only=True, **where)
    except (OSError, ValueError) as error:
        raise missing_error(path, file, error) from error


def folder_of(path: str, wanted: str) -> Path:
    """Return the directory of a checkpoint on this machine. Raises PretrainedError, which names
    what was `wanted` of it, if there is none.

    For a checkpoint of the hub only the index is requested. A snapshot may lack files that no run
    opens, such as a second copy of the weights in another layout, and the hub's library would call
    it incomplete.
    """
    try:
        if Path(path).is_dir():
            folder = Path(path)
        else:
            folder = Path(
                snapshot_download(path, local_files_only=True, allow_patterns="model_index.json")
            )
    except (OSError, ValueError) as error:
        raise missing_error(path, wanted, error) from error
    try:
        require_data(folder)
    except CodeInFolder as error:
        raise PretrainedError(str(error)) from error
    return folder


def component_files(path: str, *kinds: str) -> list[Path]:
    """Return the files of a checkpoint's components whose names match `kinds`. Raises
    PretrainedError if there is none."""
    folder = folder_of(path, kinds[0])
    files = [file for kind in kinds for file in folder.glob(f"{kind}/**/*") if file.is_file()]
    if not files:
        raise missing_error(path, f"{kinds[0]}/", "no such directory")
    return sorted(files)


def require_shards(path: str, subfolder: str) -> None:
    """Raise PretrainedError when an index in `path/subfolder` names a weight file that is
    not there.

    transformers fills missing tensors with random numbers and only warns, so encoders are checked
    here.
    """
    folder = folder_of(path, subfolder) / subfolder
    if not folder.is_dir():
        return
    for index in sorted(file for file in folder.glob("*.index.json") if file.is_file()):
        files = set(json.loads(index.read_text())["weight_map"].values())
        absent = sorted(file for file in files if not (folder / file).is_file())
        if absent:
            raise missing_error(path, f"{subfolder}/{absent[0]}", f"{len(absent)} files missing")
    if not any(folder.glob("*.safetensors")):
        raise missing_error(path, f"{subfolder}/*.safetensors", "no weights in safetensors format")
