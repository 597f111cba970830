"""From command line words to a composed Hydra tree, with every mistake collected instead of the first one raised."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from digenrl.config.errors import ConfigError, listing, nearest
from digenrl.config.schema import DERIVED_TRAINER_KEYS, SCHEMAS
from digenrl.config.targets import nodes
from digenrl.config.validation import keys_of
from digenrl.record.redact import MASK, is_secret_name, redact_text

_PACKAGE = Path(__file__).resolve().parents[1]
VERSION_BASE = "1.3"


def config_directory() -> Path:
    """configs/ of the checkout, or the copy that an installed wheel carries."""
    checkout = _PACKAGE.parents[1] / "configs"
    return checkout if (checkout / "train.yaml").is_file() else _PACKAGE / "configs"


def group_options(directory: Path) -> dict[str, list[str]]:
    """Group -> names of its options; a folder inside a group is a group of its own, such as `algorithm/sde`.

    Files whose name begins with an underscore are parts of other files, no options.
    """
    groups: dict[str, list[str]] = {}
    for file in sorted(directory.rglob("*.yaml")):
        group = file.parent.relative_to(directory).as_posix()
        if group != "." and not file.name.startswith("_"):
            groups.setdefault(group, []).append(file.stem)
    return groups


def parse_words(words: Sequence[str]) -> tuple[list[Override], list[Override], list[str]]:
    """Parse overrides such as `experiment=x`, `data.group_size=8`, `+a.b=1`.

    Returns:
        (choices of group options, Hydra's own groups included; everything else; what is wrong).
    """
    options = group_options(config_directory())
    groups: list[Override] = []
    values: list[Override] = []
    problems: list[str] = []
    for word in words:
        try:
            override = OverridesParser.create().parse_override(word)
        except HydraException as error:
            reason = redact_text(re.sub(r"\s+", " ", str(error).split("\nSee ")[0]))
            shown, name = redact_text(word), word.partition("=")[0]
            if is_secret_name(name):
                shown, reason = f"{name}={MASK}", "its value is not shown"
            problems.append(f"{shown}: cannot be read as key=value ({reason}).")
            continue
        key = override.key_or_group
        if override.is_sweep_override():
            problems.append(f"{redact_text(word)}: several values need a sweep; add -m (make sweep).")
        elif key in options:
            value = override.value()
            chosen = value if isinstance(value, list) else [value]
            wrong = [option for option in chosen if str(option) not in options[key] and not override.is_delete()]
            problems += [unknown_option(key, "null" if o is None else str(o), options[key]) for o in wrong]
            if not wrong:
                groups.append(override)
        elif key.startswith("hydra/"):
            groups.append(override)
        else:
            values.append(override)
    return groups, values, problems


def unknown_option(group: str, option: str, options: Sequence[str]) -> str:
    """The message for a name that `group` has not."""
    close = nearest(option, options)
    hint = f"nearest: {close}. " if close else ""
    return f"{group} = {redact_text(option)}: there is no such {group}; {hint}Available: {listing(options)}."


def composed(config_name: str, groups: Sequence[str]) -> DictConfig:
    """Hydra's composition of configs/<config_name>.yaml with the chosen group options, `hydra` node included.

    Raises:
        ConfigError: Hydra refused it.
    """
    config = copy.deepcopy(_composed(config_name, tuple(groups)))
    HydraConfig.instance().set_config(config)
    OmegaConf.set_readonly(config.hydra, False)  # hydra.run.dir is applied with the other values
    return config


@functools.lru_cache(maxsize=16)  # a sweep checks many jobs that differ in values alone; YAML does not change meanwhile
def _composed(config_name: str, groups: tuple[str, ...]) -> DictConfig:
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(config_directory()), version_base=VERSION_BASE, job_name=config_name):
            return compose(config_name, overrides=list(groups), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([_composition_message(error)]) from error
    except yaml.YAMLError as error:
        raise ConfigError([f"no valid YAML: {' '.join(str(error).split())}"]) from error


def _composition_message(error: Exception) -> str:
    text = str(error)
    missing = re.search(r"Could not find '([\w/-]+)/([^/']+)'", text)
    if missing and (options := group_options(config_directory()).get(missing[1])) is not None:
        where = re.search(r"In '([^']+)'", text)
        return (f"{where[1]}: " if where else "") + unknown_option(missing[1], missing[2], options)
    kept = [
        line.strip()
        for line in text.splitlines()
        if line.strip() and not line.strip().startswith(("full_key", "object_type"))
    ]
    return redact_text("; ".join(kept))


class KnownKeys:
    """The keys of a composed tree and of its schema: what "nearest valid key" may offer."""

    def __init__(self, config: DictConfig, config_name: str) -> None:
        tree = OmegaConf.to_container(config, resolve=False)
        assert isinstance(tree, dict)
        tree.pop("hydra", None)
        self._schema = keys_of(SCHEMAS[config_name])
        self._keys = sorted({*(path for path, _ in nodes(tree) if path and "[" not in path), *self._schema})

    def unknown(self, key: str, value: Any) -> str:
        """The message for a key that does not exist: key, value, nearest valid key and what that one may hold."""
        shown = MASK if is_secret_name(key) else redact_text(str(value))
        group, _, leaf = key.partition(".")
        if group == "trainer" and leaf in DERIVED_TRAINER_KEYS:
            return f"{key} = {shown}: is derived; {DERIVED_TRAINER_KEYS[leaf]}."
        if any(name == key or name.startswith(f"{key}.") for name in self._schema):
            return f"{key} = {shown}: nothing sets it here; +{key}=... adds it."
        known = [name for name in self._keys if name != key and not name.startswith(f"{key}.")]
        close = nearest(key, known)
        if close is not None:
            allowed = f", allowed: {self._schema[close].allowed}" if close in self._schema else ""
            return f"{key} = {shown}: no such key; nearest: {close}{allowed}."
        parent = key.rpartition(".")[0]
        while parent and not any(name.startswith(f"{parent}.") for name in known):
            parent = parent.rpartition(".")[0]
        inside = [k.removeprefix(f"{parent}.") for k in known if not parent or k.startswith(f"{parent}.")]
        siblings = {name.partition(".")[0] for name in inside}
        return f"{key} = {shown}: no such key; {parent or 'the top level'} has {listing(siblings)}."


def _exists(tree: Any, key: str) -> bool:
    for part in re.split(r"\.|\[|\]\.?", key):
        if part == "":
            continue
        if isinstance(tree, Mapping) and part in tree:
            tree = tree[part]
        elif isinstance(tree, list) and part.isdigit() and int(part) < len(tree):
            tree = tree[int(part)]
        else:
            return False
    return True


def apply_values(config: DictConfig, values: Sequence[Override], config_name: str) -> list[str]:
    """Apply overrides of single keys in place, as Hydra does; returns a message for each that cannot be applied.

    `key=value` and `~key` need a key that exists, `+key=value` and `++key=value` may add one.
    """
    tree = OmegaConf.to_container(config, resolve=False)
    known = KnownKeys(config, config_name)
    problems: list[str] = []
    for override in values:
        key, value = override.key_or_group, override.value()
        if not (override.is_add() or override.is_force_add() or _exists(tree, key)):
            problems.append(known.unknown(key, "" if override.is_delete() else value))
            continue
        try:
            with open_dict(config):
                if override.is_delete():
                    parent, _, leaf = key.rpartition(".")
                    del (OmegaConf.select(config, parent) if parent else config)[leaf]
                else:
                    OmegaConf.update(config, key, value, merge=True, force_add=True)
        except (OmegaConfBaseException, TypeError) as error:
            shown = redact_text(str(error).splitlines()[0])
            problems.append(f"{key}: cannot be set ({shown}).")
    return problems


def compose_words(words: Sequence[str], config_name: str) -> tuple[DictConfig, list[str]]:
    """The composed tree (with `hydra`) and what is wrong with the words, as far as it can be composed.

    Raises:
        ConfigError: nothing can be composed; all problems found so far.
    """
    groups, values, problems = parse_words(words)
    try:
        config = composed(config_name, [str(word.input_line) for word in groups])
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from error
    problems += apply_values(config, values, config_name)
    HydraConfig.instance().set_config(config)
    return config, problems


def merge_words(base: DictConfig, words: Sequence[str], config_name: str) -> list[str]:
    """Apply value overrides to the configuration of a resumed run, in place; returns what is wrong with them."""
    groups, values, problems = parse_words(words)
    problems += [
        f"{word.input_line}: a resumed run keeps its {word.key_or_group}; change single keys, or start a new run."
        for word in groups
    ]
    return problems + apply_values(base, values, config_name)
