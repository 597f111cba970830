"""`load`: command line words in, a checked and resolved configuration out."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from digenrl import prompts
from digenrl.config.checks import problems_of, resolved
from digenrl.config.compose import (
    KnownKeys,
    compose_words,
    composed,
    config_directory,
    group_options,
    merge_words,
)
from digenrl.config.errors import ConfigError
from digenrl.config.help import configuration_help, show
from digenrl.config.schema import SCHEMAS
from digenrl.config.validation import keys_of
from digenrl.record.redact import redact_text

EXIT_CODE = 2
"""Exit code of a refused configuration, as of wrong command line arguments elsewhere."""


@dataclass(frozen=True)
class Composed:
    """A configuration that passed every check."""

    config: DictConfig
    """Resolved and read-only; without the `hydra` node."""
    choices: Mapping[str, str]
    """Group -> chosen option ({} for a resumed run)."""
    overrides: tuple[str, ...]
    """The command line words."""
    run_dir: Path
    """Where the run writes; exists already only for a resumed run."""
    resumed: bool
    """run_dir is an earlier run to continue."""
    notes: tuple[str, ...]
    """What the user should know though it is no error (duplicate prompts)."""


def load(argv: Sequence[str], config_name: str = "train") -> Composed:
    """Compose configs/<config_name>.yaml with the overrides in `argv` and check the result; nothing is written.

    `resume=RUN` takes RUN/config.yaml as the base instead, and RUN as the run directory.

    Raises:
        ConfigError: with every problem that could be found.
    """
    words = [word for word in argv if not word.startswith("-")]
    problems = [
        f"{word}: unknown option; settings are key=value (see --help)." for word in argv if word.startswith("-")
    ]
    run, words = _resume_word(words)
    choices: dict[str, str] = {}
    completed: list[str] = []
    if run is None:
        tree, found = compose_words(words, config_name)
        choices = {
            name: str(value)
            for name, value in HydraConfig.get().runtime.choices.items()
            if not name.startswith("hydra/")
        }
        run_dir = Path(str(HydraConfig.get().run.dir))
        OmegaConf.set_struct(tree, False)
        del tree["hydra"]
    else:
        tree, completed = _stored(run)
        found = merge_words(tree, words, config_name)
        run_dir = run
    allow = _command_line_allowance(words, tree)
    problems += [*found, *problems_of(tree, config_name, KnownKeys(tree, config_name), allow)]
    if OmegaConf.is_list(tree.get("allow_targets")) and list(tree.allow_targets) != allow and run is None:
        problems.append(
            f"allow_targets = {list(tree.allow_targets)}: counts only on the command line, not in a YAML file; "
            "set it there, for this run."
        )
    problems += _unwritable(run_dir.absolute())
    if problems:
        raise ConfigError(problems)
    plain, _ = resolved(tree)
    for key in ("prompts", "heldout"):
        if plain["data"][key] is not None and prompts.locate(plain["data"][key]).parent != prompts.DIRECTORY:
            plain["data"][key] = str(prompts.locate(plain["data"][key]))  # a rank may have another working directory
    plain["allow_targets"] = list(allow)
    plain["resume"] = None if run is None else str(run)
    config = OmegaConf.create(plain)
    OmegaConf.set_readonly(config, True)
    return Composed(config, choices, tuple(argv), run_dir.absolute(), run is not None, (*completed, *_notes(plain)))


def _unwritable(run_dir: Path) -> list[str]:
    """Whether `run_dir` could be made, from its nearest existing ancestor; nothing is written."""
    existing = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return []
    cause = "is no writable directory" if existing.is_dir() else "is no directory"
    return [
        f"output_root: cannot write {run_dir}, because {existing} {cause}; set output_root=... to a writable directory."
    ]


def _notes(tree: Mapping[str, Any]) -> Iterator[str]:
    for key in ("prompts", "heldout"):
        if tree["data"][key] is not None:
            file = prompts.read(tree["data"][key])
            shown = ", ".join(f"line {line} repeats line {first}" for line, first in file.duplicates[:3])
            if file.duplicates:
                yield f"data.{key}: {file.path}: {len(file.duplicates)} duplicates left out ({shown})."


def load_or_exit(argv: Sequence[str], config_name: str = "train", doc: str | None = None) -> Composed:
    """`load` for a command: `--help` (a page that begins with `doc`) and `--cfg` print and exit 0; a ConfigError is
    printed to stderr, exit code 2."""
    words, asked = without_flags(argv)
    if "--help" in asked:
        show(configuration_help(config_name, doc))
        raise SystemExit(0)
    try:
        composed = load(words, config_name)
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise SystemExit(EXIT_CODE) from None
    if "--cfg" in asked:
        print(OmegaConf.to_yaml(composed.config))
        raise SystemExit(0)
    return composed


def without_flags(argv: Sequence[str]) -> tuple[list[str], set[str]]:
    """The overrides of a command line, and which of `--help` and `--cfg` it asks for (`--cfg job`, as Hydra writes it,
    is the same)."""
    words, asked = [], set()
    after_cfg = False
    for word in argv:
        if word in ("-h", "--help"):
            asked.add("--help")
        elif word in ("-c", "--cfg"):
            asked.add("--cfg")
        elif not (after_cfg and word in ("job", "all")):
            words.append(word)
        after_cfg = word in ("-c", "--cfg")
    return words, asked


def _resume_word(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The run to resume (the last `resume=` wins; `null` is none) and the other words."""
    given = [word.partition("=")[2].strip("'\"") for word in words if word.startswith("resume=")]
    others = [word for word in words if not word.startswith("resume=")]
    if not given or given[-1] in ("", "null"):
        return None, others
    return Path(given[-1]).expanduser().absolute(), others


def _stored(run: Path) -> tuple[DictConfig, list[str]]:
    """RUN/config.yaml, completed by keys that came after it; and a note of them."""
    file = run / "config.yaml"
    if not file.is_file():
        near = sorted(path.parent for path in run.glob("*/config.yaml"))[-3:] if run.is_dir() else []
        hint = f" It holds the runs {', '.join(map(str, near))}." if near else ""
        cause = "has no config.yaml" if run.is_dir() else "is no directory"
        raise ConfigError([f"resume = {run}: {cause}; name a run directory, e.g. outputs/<experiment>/<time>-0.{hint}"])
    try:
        tree = OmegaConf.load(file)
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, OSError) as error:
        raise ConfigError([f"{file}: cannot be read ({redact_text(' '.join(str(error).split()))})."]) from error
    if not isinstance(tree, DictConfig):
        raise ConfigError([f"{file}: is not the config.yaml of a run (it holds no keys)."])
    tree["allow_targets"] = []
    added = _complete(tree)
    note = f"{file} lacks keys that came after it; from the defaults: {', '.join(added)}."
    return tree, [note] if added else []


def _complete(tree: DictConfig) -> list[str]:
    """Add the keys that every configuration holds and a stored one lacks, in place: the default of each, with every
    mechanism of the schedule off. Returns them as key=value."""
    experiment = str(tree.get("experiment_name"))
    known = experiment in group_options(config_directory())["experiment"]
    defaults = composed("train", ["schedule=sync", *([f"experiment={experiment}"] if known else [])])
    added: dict[str, Any] = {}
    for key in (key for key, its in keys_of(SCHEMAS["train"]).items() if its.required):
        head, _, leaf = key.rpartition(".")
        parent = OmegaConf.select(tree, head) if head else tree
        here = parent is None or (isinstance(parent, DictConfig) and leaf not in parent)
        if here and key != "experiment_name":
            default = OmegaConf.select(defaults, key)
            added[key] = OmegaConf.to_container(default) if OmegaConf.is_config(default) else default
            OmegaConf.update(tree, key, added[key], force_add=True)
    return [f"{key}={value}" for key, value in added.items()]


def _command_line_allowance(words: Sequence[str], tree: DictConfig) -> list[str]:
    """Packages of `allow_targets=[...]`, which counts only when the command line holds it."""
    if not any(word.lstrip("+").startswith("allow_targets=") for word in words):
        return []
    value = tree.get("allow_targets")
    items = OmegaConf.to_container(value) if OmegaConf.is_list(value) else []
    return [item for item in items if isinstance(item, str) and item.strip()] if isinstance(items, list) else []
