"""`load`: command-line words in, a checked and resolved configuration out."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from digenrl import prompts
from digenrl.config.checks import problems_of, resolve_tree
from digenrl.config.command_settings import settings_of
from digenrl.config.compose import (
    KnownKeys,
    compose_words,
    merge_words,
    parse_words,
    with_search_path,
)
from digenrl.config.copies import copies_of, link_copies
from digenrl.config.errors import ConfigError
from digenrl.config.help import show_page
from digenrl.config.help_pages import configuration_help
from digenrl.config.paths import (
    absolute_path,
    absolute_paths,
    lies_under,
    node_at,
    own_prompt_files,
    parts_of,
    taken_for_files,
    why_unwritable,
)
from digenrl.config.reaching import reaching_problems
from digenrl.config.settings import DataSettings, Settings
from digenrl.config.stored import (
    forbidden_changes,
    read_stored,
    unconfirmed_accounts,
    unconfirmed_hosts,
)
from digenrl.config.validation import show_value
from digenrl.config.words import unquote_text

SWEEP_FLAGS = ("-m", "--multirun")
EXIT_CODE = 2
"""Exit code of a refused configuration, as of wrong command line arguments elsewhere."""


@dataclass(frozen=True)
class Composed:
    """A configuration that passed every check."""

    settings: Settings
    """Every key, typed; without the `hydra` node."""
    choices: Mapping[str, str]
    """Group -> chosen option ({} for a resumed run)."""
    overrides: tuple[str, ...]
    """Words of the command line."""
    run_dir: Path
    """Directory in which the run writes. It exists already only for a resumed run."""
    resumed: bool
    """Whether run_dir is an earlier run to continue."""
    notes: tuple[str, ...]
    """Messages for the user that are not errors (duplicate prompts)."""
    planned: Mapping[str, object] | None = None
    """What the planner predicts for the run that it chose (`Advisor.choose_schedule`), for the
    run's records."""

    def with_values(self, values: Mapping[str, object]) -> Self:
        """Return the configuration with other values, dotted key -> value."""
        return replace(self, settings=self.settings.with_values(values))


def load(argv: Sequence[str], config_name: str = "train", stored: Path | None = None) -> Composed:
    """Compose configs/<config_name>.yaml with the overrides in `argv`, and check the result.
    Nothing is written.

    `--config-dir DIR` adds a directory with options of the user's own. `resume=RUN` takes
    RUN/config.yaml as the base instead, and RUN as the run directory. Only the keys of
    `digenrl.config.settings.RESUMABLE` may then differ from it.

    Args:
        stored: a run whose config.yaml is the base, to look at what it made. Every key may differ.

    Raises:
        ConfigError: the error has every problem that could be found.
    """
    try:
        return _load_checked(argv, config_name, stored)
    except OSError as error:  # a path that a word names
        raise ConfigError([f"{show_value(error.filename)}: {error.strerror}."]) from error


def _load_checked(argv: Sequence[str], config_name: str, stored: Path | None) -> Composed:
    given = with_search_path(argv)
    words = [word for word in given if not word.startswith("-")]
    problems = [
        f"{word}: unknown option; settings are key=value without dashes (see --help)."
        for word in given
        if word.startswith("-")
    ]
    # `resume` chooses the tree to which all other words apply, so it is taken out first.
    resumed, words = _split_resume(words)
    stored = None if stored is None else Path(os.path.expanduser(stored))
    run = resumed if stored is None else Path(absolute_path(str(stored)))
    choices: dict[str, str] = {}
    completed: list[str] = []
    base: dict[str, object] | None = None
    if run is None:
        # From weak to strong: configs/train.yaml, options of groups, the experiment, the hardware
        # profile, the words. The `defaults` of train.yaml state this order.
        tree, found = compose_words(words, config_name)
        choices = {
            name: str(value)
            for name, value in HydraConfig.get().runtime.choices.items()
            if not name.startswith("hydra/")
        }
        # Before the `hydra` node goes, in which the directory is an interpolation.
        run_dir = _run_dir()
        # Hydra has locked the tree: without this, deleting a key raises.
        OmegaConf.set_struct(tree, False)
        del tree["hydra"]
    else:
        tree, completed = (
            read_stored(run, "resume") if stored is None else read_stored(stored, "run")
        )
        # What the run stored, before this command line changes it.
        base, _ = resolve_tree(tree)
        _keep_own_prompts(tree)
        # The words may change a source, and its copies follow.
        link_copies(tree)
        found = merge_words(tree, words, config_name)
        found += _taken_for_files(base, keys_set_by(words))
        run_dir = run
    allow, confirmed = (
        command_line_list(key, words, tree) for key in ("allow_targets", "confirm_hosts")
    )
    plain, unresolved = resolve_tree(tree)
    copies = copies_of(tree, plain)
    if run is None:  # paths that interpolations make
        for path, _, absolute in list(absolute_paths(plain, config_name)):
            *around, last = parts_of(path)
            node_at(plain, around)[last] = absolute
    known = KnownKeys(tree, config_name)
    problems += [*found, *problems_of(plain, unresolved, config_name, known, allow)]
    if run is None:
        problems += _only_on_the_command_line(tree, allow)
    set_now = keys_set_by(words)
    problems += reaching_problems(plain, set_now)
    problems += _check_writable(run_dir.absolute())
    if base is not None:
        problems += unconfirmed_hosts(base, plain, confirmed, set_now)
        if resumed is not None:
            # An evaluation starts no loggers. Only a resumed run sends to an account.
            problems += unconfirmed_accounts(base, plain, confirmed, set_now)
            problems += forbidden_changes(base, plain)
    # All at once, so that a user mends them in one go.
    if problems:
        raise ConfigError(problems)
    # What the command line gave, and not what any YAML file holds.
    plain["allow_targets"], plain["confirm_hosts"] = allow, confirmed
    plain["copies"] = copies
    plain["resume"] = None if run is None else str(run)
    settings = settings_of(config_name).from_tree(plain)
    return Composed(
        settings,
        choices,
        tuple(given),
        run_dir.absolute(),
        run is not None,
        (*completed, *_duplicate_notes(settings.data)),
    )


def _keep_own_prompts(tree: DictConfig) -> None:
    """Let names of our own prompt files in a stored `tree` mean these, in place, also where the
    working directory has files of these names."""
    for path, file in own_prompt_files(OmegaConf.to_container(tree), "train"):
        OmegaConf.update(tree, path, file)


def _taken_for_files(stored: object, given: Sequence[str]) -> Iterator[str]:
    """Yield a message for each value of a stored run that would mean a file of this working
    directory, where the run meant something else."""
    for path, value in taken_for_files(stored, "train"):
        if not lies_under(path, given):
            yield (
                f"{path} = {value}: was stored as a name that was no path, and {Path.cwd()} holds "
                f"{value}; work in another directory, or set {path}=... to what you mean."
            )


def _only_on_the_command_line(tree: DictConfig, allow: Sequence[str]) -> Iterator[str]:
    """Yield what a new run's YAML files set, though only the command line may."""
    if OmegaConf.is_list(tree.get("allow_targets")) and list(tree.allow_targets) != list(allow):
        yield (
            f"allow_targets = {list(tree.allow_targets)}: counts only on the command line, not in "
            "a YAML file; set it there, for this run."
        )


def keys_set_by(words: Sequence[str]) -> list[str]:
    """Return the keys to which a command line gives values."""
    return [word.key_or_group for word in parse_words(words).values if not word.is_delete()]


def _run_dir() -> Path:
    try:
        return Path(absolute_path(str(HydraConfig.get().run.dir)))
    except OmegaConfBaseException as error:
        cause = str(error).splitlines()[0]
        raise ConfigError([f"hydra.run.dir: {cause}; do not remove what it names."]) from error


def _check_writable(run_dir: Path) -> list[str]:
    """Return a message if `run_dir` cannot be made. Nothing is written."""
    # Bytes of a path that are no UTF-8 are lone surrogates in Python.
    if any("\ud800" <= letter <= "\udfff" for letter in str(run_dir)):
        return [
            f"output_root: the path {str(run_dir)!a} is no UTF-8, and config.yaml could not hold "
            "it; set output_root=... to another directory, or work in one."
        ]
    if (cause := why_unwritable(run_dir)) is None:
        return []
    return [
        f"output_root: cannot write {run_dir}, because {cause}; set output_root=... to a writable "
        "directory."
    ]


def _duplicate_notes(data: DataSettings) -> Iterator[str]:
    for key, setting in (("prompts", data.prompts), ("heldout", data.heldout)):
        for name, _ in () if setting is None else prompts.weighted_files(setting):
            file = prompts.read_prompt_file(name)
            lines = ", ".join(
                f"line {line} repeats line {first}" for line, first in file.duplicates[:3]
            )
            if file.duplicates:
                yield (
                    f"data.{key}: {file.path}: {len(file.duplicates)} duplicates left out "
                    f"({lines})."
                )


def load_or_exit(
    argv: Sequence[str], config_name: str = "train", doc: str | None = None
) -> Composed:
    """Return `load`'s result for a command, or print and exit.

    `--help` (a page that begins with `doc`) and `--cfg` exit with code 0. A ConfigError goes to
    stderr, exit code 2.
    """
    words, asked = without_flags(argv)
    if "--help" in asked:
        show_page(configuration_help(config_name, doc, words))
        raise SystemExit(0)
    try:
        composed = load(words, config_name)
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise SystemExit(EXIT_CODE) from None
    if "--cfg" in asked:
        print(OmegaConf.to_yaml(composed.settings.tree))
        raise SystemExit(0)
    return composed


def without_flags(argv: Sequence[str]) -> tuple[list[str], set[str]]:
    """Return the overrides of a command line, with `--config-dir` as one of them, and whether it
    has `--help` and `--cfg`.

    Hydra's own form `--cfg job` means the same as `--cfg`.
    """
    words, asked = [], set()
    after_cfg = False
    for word in with_search_path(argv):
        if word in ("-h", "--help"):
            asked.add("--help")
        elif word in ("-c", "--cfg"):
            asked.add("--cfg")
        elif not (after_cfg and word in ("job", "all")):
            words.append(word)
        after_cfg = word in ("-c", "--cfg")
    return words, asked


def _split_resume(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the run that `resume` names, and the other words. The last one wins; `null` is
    none."""
    # Hydra's grammar has not read the word yet, so quotes are still around its value.
    given = [unquote_text(word[7:]) for word in words if word.startswith("resume=")]
    others = [word for word in words if not word.startswith("resume=")]
    if not given or given[-1] in ("", "null"):
        return None, others
    return Path(absolute_path(given[-1])), others


def command_line_list(key: str, words: Sequence[str], tree: DictConfig) -> list[str]:
    """Return the items of `key` = allow_targets | confirm_hosts, which count only on the command
    line."""
    if not any(word.lstrip("+").startswith(f"{key}=") for word in words):
        return []
    value = tree.get(key)
    items: Any = OmegaConf.to_container(value) if OmegaConf.is_list(value) else []
    return [item for item in items if isinstance(item, str) and item.strip()]


def is_multirun(argv: Sequence[str]) -> bool:
    """Return whether a command line asks for a sweep."""
    return any(word in SWEEP_FLAGS for word in argv)
