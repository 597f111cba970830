"""Composition: from command-line words to a Hydra tree. Every mistake is collected instead of the
first one raised."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from digenrl import facts
from digenrl.config.command_settings import schema_of
from digenrl.config.errors import MOST_SHOWN, ConfigError, list_names, nearest_name
from digenrl.config.paths import absolute_path, absolute_paths, lies_under, typed_paths
from digenrl.config.removed import removal_reason
from digenrl.config.settings import DERIVED_TRAINER_KEYS, NAMES_ELSEWHERE
from digenrl.config.shipped import config_directory
from digenrl.config.targets import has_key, walk_nodes
from digenrl.config.validation import keys_of
from digenrl.config.words import quote_path_word, quote_value, shell_word
from digenrl.record.redact import MASK, is_secret_name, redact_text

VERSION_BASE = "1.3"
_SEARCH = "hydra.searchpath"
_PATH_KEYS = frozenset(
    key for name in ("train", "score", "serve_reward") for key in typed_paths(name)
)
_SEARCH_FLAGS = ("--config-dir", "-cd")
# `replace`: otherwise a reload of this module would raise.
OmegaConf.register_new_resolver("cpu_tiny", facts.cpu_tiny, replace=True)


def group_options(*directories: Path) -> dict[str, list[str]]:
    """Return group -> names of its options. A folder inside a group is a group of its own, such as
    `algorithm/sde`.

    Files whose name begins with an underscore are parts of other files, not options.
    """
    groups: dict[str, list[str]] = {}
    for directory in directories:
        for file in sorted(glob("**/*.yaml", root_dir=directory, recursive=True)):
            group, _, name = file.removesuffix(".yaml").rpartition("/")
            if group and not name.startswith("_"):
                groups.setdefault(group, []).append(name)
    return groups


def with_search_path(argv: Sequence[str]) -> list[str]:
    """Return `argv` with each `--config-dir DIR` (`--config-dir=DIR`, `-cd DIR`) as the key that
    Hydra has for it."""
    words, rest = list[str](), iter(argv)
    for word in rest:
        flag, is_pair, value = word.partition("=")
        directory = (value if is_pair else next(rest, None)) if flag in _SEARCH_FLAGS else None
        words.append(word if directory is None else f"{_SEARCH}=[{quote_value(directory)}]")
    return words


@dataclass(frozen=True)
class Words:
    """Parsed overrides such as `experiment=x`, `data.group_size=8`, `+a.b=1`."""

    groups: list[Override]
    """Choices of group options, including Hydra's own groups."""
    values: list[Override]
    """All other overrides."""
    own: tuple[Path, ...]
    """Directories with options of the user's own, beside those of `config_directory`."""
    problems: list[str]


def parse_words(words: Sequence[str]) -> Words:
    """Sort the words of a command line, and say what is wrong with them."""
    # First of all, because options of the user's own are options below.
    named = list(own_directories(words))
    parsed = Words(
        [], [], tuple(path for path in named if path.is_dir()), list(_directory_problems(named))
    )
    options = group_options(config_directory(), *parsed.own)
    for word in words:
        try:
            override = read_word(word)
        except HydraException as error:
            # Hydra's messages end with a link to its documentation.
            reason = redact_text(re.sub(r"\s+", " ", str(error).split("\nSee ")[0]))
            shown, name = redact_text(word), word.partition("=")[0]
            if is_secret_name(name):
                shown, reason = f"{name}={MASK}", "its value is not shown"
            elif "=" not in word:
                reason = "it has no =; leave no spaces around ="
            key, _, held = shown.partition("=")
            quoted = f" If the value is text, quote it: {shell_word(key, held)}."
            parsed.problems.append(
                f"{shown}: cannot be read as key=value ({reason})."
                + quoted * (bool(held) and re.fullmatch(r"[+]{0,2}[\w./@]+", key) is not None)
            )
            continue
        key = override.key_or_group
        if word.startswith("="):
            parsed.problems.append(f"{redact_text(word)}: has no key; leave no spaces around =.")
        elif override.is_sweep_override():
            parsed.problems.append(
                f"{redact_text(word)}: several values need a sweep; add -m (make sweep). If the "
                "comma is part of one value, quote the value: "
                f"{redact_text(shell_word(key, word.partition('=')[2]))}."
            )
        elif key in options:
            if type(override.value()) in (int, float, bool):  # a name is text, whatever it is
                override = read_word(f"{key}={quote_value(word.partition('=')[2].strip())}")
            value = override.value()
            chosen = value if isinstance(value, list) else [value]
            wrong = [
                option
                for option in chosen
                if str(option) not in options[key] and not override.is_delete()
            ]
            parsed.problems.extend(
                unknown_option(key, "null" if o is None else str(o), options[key]) for o in wrong
            )
            if not wrong:
                parsed.groups.append(override)
        elif key.startswith("hydra/"):
            parsed.groups.append(override)
        # The search path was read above, as `own`.
        elif key != _SEARCH:
            parsed.values.append(override)
    return parsed


def read_word(word: str) -> Override:
    """Parse one word, also one that Hydra's grammar refuses although it can only mean one thing: a
    path with letters beyond ASCII, a leading `~`, brackets or quotes."""
    parser = OverridesParser.create()
    word = quote_path_word(word)
    try:
        return parser.parse_override(word)
    except HydraException:
        key, is_pair, value = word.partition("=")
        means_text = not value.isascii() or value.startswith("~/") or key.lstrip("+") in _PATH_KEYS
        # What begins as a list, a mapping or a quotation is meant as one.
        if not is_pair or not means_text or value[:1] in "[{'\"":
            raise
        return parser.parse_override(f"{key}={quote_value(value)}")


def own_directories(words: Sequence[str]) -> Iterator[Path]:
    """Return the user's own configuration directories that a command line names, absolute."""
    for word in (word for word in words if word.startswith(f"{_SEARCH}=")):
        try:
            value = OverridesParser.create().parse_override(word).value()
        except HydraException:
            continue  # said when all words are parsed
        for directory in value if isinstance(value, list) else [value]:
            yield Path(absolute_path(str(directory).removeprefix("file://")))


def _directory_problems(own: Sequence[Path]) -> Iterator[str]:
    known = group_options(config_directory()) if own else {}
    # Naming our own configs/ adds nothing.
    for directory in (path for path in own if path.resolve() != config_directory()):
        if not directory.is_dir():
            yield (
                f"--config-dir {directory}: is no directory; name one with groups, such as "
                "experiment/ or reward/."
            )
        for group, names in group_options(directory).items():
            for file in (directory / group / f"{name}.yaml" for name in names):
                if (wrong := _encoding_problem(file)) is not None:
                    yield f"{file}: {wrong}."
            for name in sorted({*names} & {*known.get(group, ())}):
                yield (
                    f"--config-dir {directory}: {group}/{name}.yaml has the name of an option that "
                    "is there already; rename it."
                )


def _encoding_problem(file: Path) -> str | None:
    """Return what nobody sees in a file, and YAML or Hydra read otherwise than meant."""
    try:
        text = file.read_text(encoding="utf-8")
    except ValueError:
        text = "\ufeff"
    if text.startswith("\ufeff"):
        return "is not UTF-8 without a byte order mark; save it so"
    if found := re.search(r"^[ \xa0]*\xa0", text, re.MULTILINE):
        line = text.count("\n", 0, found.start()) + 1
        return f"line {line} begins with a no-break space; indent it with spaces"
    return None


def unknown_option(group: str, option: str, options: Sequence[str]) -> str:
    """Return the message for an option that `group` does not have."""
    holding = [its for its in options if len(option) > 2 and option.lower() in its.lower()]
    close = ", ".join(holding) or nearest_name(option, options)
    hint = f"nearest: {close}. " if close else ""
    return (
        f"{group} = {redact_text(option)}: there is no such {group}; {hint}Available: "
        f"{list_names(options)}; your own are found with --config-dir DIR."
    )


def compose_config(config_name: str, groups: Sequence[str], own: Sequence[Path] = ()) -> DictConfig:
    """Return Hydra's composition of configs/<config_name>.yaml with the chosen group options,
    `hydra` node included.

    Args:
        own: further directories with options.

    Raises:
        ConfigError: Hydra refused the composition.
    """
    # The caller changes the tree, and the cache keeps it.
    return copy.deepcopy(_compose_cached(config_name, tuple(groups), tuple(own)))


# A sweep checks many jobs that differ in values alone; YAML does not change meanwhile.
@functools.lru_cache(maxsize=16)
def _compose_cached(config_name: str, groups: tuple[str, ...], own: tuple[Path, ...]) -> DictConfig:
    # Hydra has one global state, in which an earlier composition left its own.
    GlobalHydra.instance().clear()
    search = (
        [f"{_SEARCH}=[{','.join(quote_value(f'file://{directory}') for directory in own)}]"]
        if own
        else []
    )
    try:
        with initialize_config_dir(
            str(config_directory()), version_base=VERSION_BASE, job_name=config_name
        ):
            # With the `hydra` node, whose interpolations give the run directory. Single values are
            # applied later (`apply_values`): Hydra would stop at the first wrong one.
            return compose(config_name, overrides=[*search, *groups], return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError([_composition_message(error, own)]) from error
    except yaml.YAMLError as error:
        raise ConfigError([f"no valid YAML: {' '.join(str(error).split())}"]) from error


def _composition_message(error: Exception, own: Sequence[Path]) -> str:
    text = str(error)
    missing = re.search(r"Could not (?:find|load) '([\w/-]+)/([^/']+)'", text)
    if missing and (options := group_options(config_directory(), *own).get(missing[1])) is not None:
        where = re.search(r"In '([^']+)'", text)
        return (f"{where[1]}: " if where else "") + unknown_option(missing[1], missing[2], options)
    # Without the lines in which OmegaConf says where in its tree it was.
    kept = [
        line.strip()
        for line in text.splitlines()
        if line.strip() and not line.strip().startswith(("full_key", "object_type"))
    ]
    return redact_text("; ".join(kept))


class KnownKeys:
    """The keys of a composed tree and of its schema, from which "nearest valid key" is chosen."""

    def __init__(self, config: DictConfig, config_name: str) -> None:
        self._config = config
        self._schema = keys_of(schema_of(config_name))
        self._asked = 0

    @functools.cached_property
    def _keys(self) -> list[str]:
        tree = OmegaConf.to_container(self._config, resolve=False)
        paths = (path for path, _ in walk_nodes(tree) if path and "[" not in path)
        # What is below another unknown key is no suggestion, and a stored file may hold thousands.
        known = {*group_options(config_directory()), *self._schema}
        heads = {name.partition(".")[0] for name in known}
        return sorted({*known, *(path for path in paths if path.partition(".")[0] in heads)})

    def unknown_message(self, key: str, value: object) -> str:
        """Return the message for a key that does not exist: key, value, nearest valid key and the
        values that key may hold."""
        shown = MASK if is_secret_name(key) else redact_text(str(value))
        group, _, leaf = key.partition(".")
        if group == "trainer" and leaf in DERIVED_TRAINER_KEYS:
            return f"{key} = {shown}: is derived; {DERIVED_TRAINER_KEYS[leaf]}."
        if (why := removal_reason(key, value)) is not None:
            return f"{key} = {shown}: was removed; {why}."
        if any(name == key or name.startswith(f"{key}.") for name in self._schema):
            having = _options_with(key)
            does = f" ({having} does)" if having else ""
            return f"{key} = {shown}: nothing sets it here{does}; +{key}=... adds it."
        if key == "experiment":
            return (
                f"{key} = {shown}: its file holds no keys of a run, or they count inside "
                "`experiment` alone; let its first line be `# @package _global_`."
            )
        self._asked += 1
        if self._asked > MOST_SHOWN:  # a stored file may hold thousands
            return f"{key} = {shown}: no such key."
        leaf = key.rpartition(".")[2]
        if (elsewhere := NAMES_ELSEWHERE.get(leaf)) is not None:
            return f"{key} = {shown}: no such key; set {elsewhere}."
        if having := _options_with(key):
            return f"{key} = {shown}: no such key here; it comes with {having}."
        # Neither the key's own group nor what lies below the key is what was meant.
        known = [
            name
            for name in self._keys
            if not lies_under(key, [name]) and not lies_under(name, [key])
        ]
        close = nearest_name(key, known)
        if close is not None:
            allowed = f", allowed: {self._schema[close].allowed}" if close in self._schema else ""
            return f"{key} = {shown}: no such key; nearest: {close}{allowed}."
        if (meant := nearest_name(leaf, NAMES_ELSEWHERE)) is not None:
            return f"{key} = {shown}: no such key; set {NAMES_ELSEWHERE[meant]}."
        # Climb to the nearest ancestor that exists, and list what it holds.
        parent = key.rpartition(".")[0]
        while parent and not any(name.startswith(f"{parent}.") for name in known):
            parent = parent.rpartition(".")[0]
        inside = [
            k.removeprefix(f"{parent}.") for k in known if not parent or k.startswith(f"{parent}.")
        ]
        siblings = {name.partition(".")[0] for name in inside}
        return (
            f"{key} = {shown}: no such key; {parent or 'the top level'} has {list_names(siblings)}."
        )


def _options_with(key: str) -> str:
    """Return the options whose own files have `key`, as words; "" if there are none."""
    found = []
    for group, names in group_options(config_directory()).items():
        inside = key.removeprefix(f"{group.replace('/', '.')}.")
        for name in names if inside != key else ():
            text = (config_directory() / group / f"{name}.yaml").read_text(encoding="utf-8")
            if has_key(yaml.safe_load(text), inside):
                found.append(f"{group}={name}")
    return " or ".join(found)


def apply_values(config: DictConfig, values: Sequence[Override], config_name: str) -> list[str]:
    """Apply overrides of single keys in place, as Hydra does. Return a message for each that cannot
    be applied.

    `key=value` and `~key` need a key that exists. `+key=value` and `++key=value` may add one.
    """
    tree = OmegaConf.to_container(config, resolve=False)
    known = KnownKeys(config, config_name)
    problems: list[str] = []
    for override in values:
        key, value = override.key_or_group, override.value()
        if not (override.is_add() or override.is_force_add() or has_key(tree, key)):
            problems.append(known.unknown_message(key, "" if override.is_delete() else value))
            continue
        try:
            with open_dict(config):
                if override.is_delete():
                    parent, _, leaf = key.rpartition(".")
                    del (OmegaConf.select(config, parent) if parent else config)[leaf]
                else:
                    # As Hydra does: a mapping given for a group changes the keys that it names, and
                    # no others.
                    OmegaConf.update(config, key, value, merge=True)
        except (OmegaConfBaseException, TypeError, ValueError) as error:
            shown = redact_text(str(error).splitlines()[0])
            problems.append(f"{key}: cannot be set ({shown}).")
    return problems


def compose_words(words: Sequence[str], config_name: str) -> tuple[DictConfig, list[str]]:
    """Return the composed tree (with `hydra`) and what is wrong with the words, as far as the tree
    can be composed.

    Raises:
        ConfigError: nothing can be composed; the error has all problems found so far.
    """
    parsed = parse_words(words)
    try:
        config = compose_config(
            config_name, [str(word.input_line) for word in parsed.groups], parsed.own
        )
    except ConfigError as error:
        raise ConfigError([*parsed.problems, *error.problems]) from error
    problems = [*parsed.problems, *apply_values(config, parsed.values, config_name)]
    _place_paths(config, config_name)
    # Interpolations of `hydra:` read this when the tree is resolved.
    HydraConfig.instance().set_config(config)
    return config, problems


def merge_words(base: DictConfig, words: Sequence[str], config_name: str) -> list[str]:
    """Apply overrides of single values to the configuration of an earlier run, in place. Return
    what is wrong with them."""
    parsed = parse_words(words)
    kept = [
        f"{word.input_line}: a resumed run keeps its {word.key_or_group}; change single keys, or "
        "start a new run."
        for word in parsed.groups
    ]
    problems = [*parsed.problems, *kept, *apply_values(base, parsed.values, config_name)]
    _place_paths(base, config_name, [word.key_or_group for word in parsed.values])
    return problems


def _place_paths(tree: DictConfig, config_name: str, keys: Sequence[str] | None = None) -> None:
    """Make the paths of `tree` absolute in place; of `keys` alone, if there are any."""
    plain = OmegaConf.to_container(tree, resolve=False)
    for path, _, found in absolute_paths(plain, config_name):
        # A key with dots in its name has no dotted path that leads back to it.
        known = OmegaConf.select(tree, path, default=None) is not None
        if known and (keys is None or lies_under(path, keys)):
            OmegaConf.update(tree, path, found)
