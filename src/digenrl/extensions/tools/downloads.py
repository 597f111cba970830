"""What a configuration needs from the hub: which files of which repositories, and nothing else of
them.

Repositories of models hold the same weights several times, in other layouts and precisions. The
patterns here name the files that a run opens. A test traces the files of every experiment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from digenrl.config.settings import ModelSettings, Settings
from digenrl.rewards.needs import placed_scorers, scorers_and_statistics, scorers_of_sound
from digenrl.rewards.published import WEIGHTS, files_read

if TYPE_CHECKING:
    from digenrl.models.pipeline import DiffusersPolicy

_HUB_COMMAND = re.compile(r"hf download (?P<repository>[\w.-]+/[\w.-]+)(?: (?P<file>\S+))?")
_BESIDE_TEXT = ("image_encoder", "image_processor", "feature_extractor", "processor")
"""Folders of families whose prompts have pictures; other families' repositories lack them."""
IGNORED = (
    "*.fp16*",
    "*.bf16*",
    "*.bin",
    "*.h5",
    "*.msgpack",
    "*.onnx*",
    "text_encoder*/diffusion_pytorch_model*",
)
"""Copies of the weights that no run opens: other precisions, other libraries' formats."""


@dataclass(frozen=True)
class Download:
    """Files of a repository, and the key of the configuration that needs them."""

    key: str
    repository: str
    files: tuple[str, ...]
    """Patterns of the files' names, as the hub's library takes them."""
    to_set: bool = False
    """Whether the key has no value yet, and takes the path of the file."""

    @property
    def page(self) -> str:
        """Page of the repository, with its licence."""
        return f"https://huggingface.co/{self.repository}"

    @property
    def ignored(self) -> tuple[str, ...]:
        """Patterns of files that are left out though `files` has them."""
        return () if self.to_set else IGNORED

    @property
    def command(self) -> str:
        """Command that fetches the same on another machine."""
        if self.to_set:
            return f"hf download {self.repository} {self.files[0]}"
        kept, left = (" ".join(map(repr, names)) for names in (self.files, self.ignored))
        return f"hf download {self.repository} --include {kept} --exclude {left}"


def find_downloads(settings: Settings) -> tuple[list[Download], list[str]]:
    """Return what a checked configuration needs from the hub, and a line for each thing that lies
    elsewhere. What is on this machine as a file or directory is left out."""
    listen = bool(scorers_of_sound(settings.node_at("reward")))
    found, elsewhere = list(_model_download(settings.model, listen)), list[str]()
    served = {key for key, _, _ in placed_scorers(settings.node_at("reward"), "managed")}
    for key, what, node in scorers_and_statistics(
        settings.node_at("reward"), settings.callbacks or {}
    ):
        if (model := node.get("model")) and "url" in node:
            if key not in served:
                elsewhere.append(f"{key}: {model}, served at {node['url']} by you")
            elif (node.get("serve") or {}).get("build", "real") == "real":
                files = tuple(dict.fromkeys(files_read("processor") + files_read("path")))
                found += [] if Path(model).exists() else [Download(f"{key}.model", model, files)]
        published = WEIGHTS.get(node["_target_"], {}) if node.get("build", "real") == "real" else {}
        for argument, source in published.items():
            value, hub = node.get(argument), _HUB_COMMAND.fullmatch(source)
            if value is not None and Path(os.path.expanduser(value)).exists():
                continue
            if hub is None or (hub["file"] and value is not None):
                elsewhere.append(f"{key}.{argument} of {what}: {source}")
            elif hub["file"]:
                file = (hub["file"],)
                found.append(Download(f"{key}.{argument}", hub["repository"], file, to_set=True))
            else:
                files = tuple(files_read(argument))
                found.append(Download(f"{key}.{argument}", value or hub["repository"], files))
    unique = {(each.repository, each.files): each for each in reversed(found)}
    return [*reversed(unique.values())], elsewhere


def _model_download(model: ModelSettings, listen: bool) -> Iterator[Download]:
    if model.path is None or model.get("build", "real") != "real" or Path(model.path).exists():
        return
    from hydra.utils import get_class

    patterns = tuple(_checkpoint_patterns(get_class(model.target), listen))
    yield Download("model.path", model.path, patterns)


def _checkpoint_patterns(policy: type[DiffusersPolicy], listen: bool) -> Iterator[str]:
    """Yield patterns of the files that a policy of the class opens in its checkpoint, with those
    that make sound if a reward listens."""
    yield from ("model_index.json", "*scheduler/scheduler_config.json")
    # text_encoder* is text_encoder and text_encoder_2: some repositories also have text_encoders/.
    kinds = [(kind.strip("*"), kind.replace("*", "_?")) for kind in policy.codec_class.encoders]
    encoders = dict.fromkeys(name for pair in kinds for name in pair)
    sound = policy.codec_class.sound_decoders if listen else ()
    for folder in (*policy.components, "vae", *sound, *encoders, *_BESIDE_TEXT):
        yield f"{folder}/*"
