"""The config.yaml of an earlier run, which may come from another machine: read as data, completed,
and compared.

A stored configuration has no interpolations left. A `${...}` in it was therefore put there by
somebody else, to be resolved with the reader's environment, and is refused. A URL in it sends
something to a host, so the reader must confirm every host on another machine. Loopback needs no
confirmation, because what listens there is the reader's own.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import xxhash
import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from digenrl.config.checks import resolve_tree
from digenrl.config.command_settings import schema_of
from digenrl.config.compose import compose_config, group_options, parse_words
from digenrl.config.copies import copies_of
from digenrl.config.errors import MOST_SHOWN, ConfigError, list_names, nearest_name
from digenrl.config.paths import absolute_path, lies_under
from digenrl.config.reaching import reaching_words
from digenrl.config.removed import present_name, removal_reason
from digenrl.config.settings import RESUMABLE, may_change
from digenrl.config.shipped import config_directory
from digenrl.config.targets import find_targets, walk_nodes
from digenrl.config.validation import keys_of, show_value
from digenrl.config.words import quote_value
from digenrl.record.redact import MASK, redact, redact_text
from digenrl.record.run_dir import CONFIG, ForeignEntry, require_own
from digenrl.record.stored_yaml import checked_text

_URL = re.compile(r"[a-z][a-z0-9+.-]{0,30}://([^/?#\s]*)", re.IGNORECASE)
_HOST_PORT = re.compile(r"(?!(?:cpu|cuda):\d+$)(?:[\w.-]+|\[[0-9a-f:.]+\]):\d{1,5}", re.IGNORECASE)
"""A whole value HOST:PORT, as in `ray.address`; `cuda:0` is a device."""
_WANDB_LOGGER = ".WandbLogger"
_LOOPBACK = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?", re.IGNORECASE)


def read_stored(run: Path, word: str) -> tuple[DictConfig, list[str]]:
    """Return RUN/config.yaml and notes about it. Keys that are newer than the run are added, and
    removed keys are left out.

    Args:
        word: the key of the command line that names the run, for messages.

    Raises:
        ConfigError: `run` is no run directory, or its configuration is not plain data.
    """
    file = run / CONFIG
    if not file.is_file() and not file.is_symlink():
        raise ConfigError([_no_run(run, word)])
    try:
        # Before the file is read: a link in the directory could lead to another user's file.
        require_own(run)
    except ForeignEntry as error:
        raise ConfigError([str(error)]) from error
    tree = read_yaml(file)
    # A plan keeps the keys of a run, too, and would start one.
    if "plan" in tree:
        raise ConfigError(
            [
                f"{word} = {run}: is the directory of a plan; name that of a run (with make: "
                "RUN=...)."
            ]
        )
    written = OmegaConf.to_container(tree, resolve=False)
    foreign = [
        (path, value)
        for path, value in walk_nodes(written)
        if isinstance(value, str) and "${" in value
    ]
    if foreign:
        raise ConfigError(
            [
                f"{file}: {path} = {show_value(value)}: is refused, because a run stores values "
                "and no interpolations; write the value there if you trust the file."
                for path, value in foreign
            ]
        )
    # Permissions are not inherited. Whoever resumes gives them again.
    tree["allow_targets"], tree["confirm_hosts"] = [], []
    for _, target, node in find_targets(tree):
        if isinstance(target, str):
            # A class may have moved since the run was stored.
            node["_target_"] = present_name(target)  # type: ignore[index]  # of OmegaConf
    added = _add_missing_keys(tree)
    notes = {"lacks keys that came after it; from the defaults": added}
    notes["names a directory that counts only on the command line; left out"] = _reset_prompt_store(
        tree
    )
    notes["holds keys that were removed; left out"] = _drop_removed_keys(tree)
    return tree, [f"{file} {said}: {', '.join(words)}." for said, words in notes.items() if words]


def read_yaml(file: Path) -> DictConfig:
    """Return a YAML file that holds keys.

    Raises:
        ConfigError: it cannot be read, or holds no keys.
    """
    try:
        tree = OmegaConf.load(io.StringIO(checked_text(file)))
    except (
        OmegaConfBaseException,
        yaml.YAMLError,
        ValueError,
        OSError,
        AssertionError,  # a single text
        RecursionError,
    ) as error:
        raise ConfigError(
            [f"{file}: cannot be read ({redact_text(' '.join(str(error).split()))})."]
        ) from error
    if not isinstance(tree, DictConfig):
        raise ConfigError([f"{file}: is not the config.yaml of a run (it holds no keys)."])
    return tree


def _reset_prompt_store(tree: DictConfig) -> list[str]:
    """Take the place of the prompt store back to `auto`, in place: a run writes there. Return what
    was there as key=value."""
    data = tree.get("data")
    if not isinstance(data, DictConfig) or data.get("prompt_store") in (None, "auto"):
        return []
    found, data["prompt_store"] = data["prompt_store"], "auto"
    return [f"data.prompt_store={show_value(found)}"]


def _no_run(run: Path, word: str) -> str:
    cause = "has no config.yaml" if run.is_dir() else "is no directory"
    near = [str(path.parent) for path in sorted(run.glob("*/config.yaml"))[-3:]]
    hint = f" It holds the runs {', '.join(near)}." if near else ""
    if not near and (
        close := nearest_name(
            run.name, [path.parent.name for path in run.parent.glob("*/config.yaml")]
        )
    ):
        hint = f" Nearest: {run.parent / close}."
    remedy = f"name a run directory, e.g. {word}=outputs/<experiment>/<time>-0 (with make: RUN=...)"
    return f"{word} = {run}: {cause}; {remedy}.{hint}"


def _add_missing_keys(tree: DictConfig) -> list[str]:
    """Add the keys that every configuration holds and a stored one lacks, in place, and return them
    as key=value.

    Each gets its default, with every mechanism of the schedule off.
    """
    experiment = str(tree.get("experiment_name"))
    known = experiment in group_options(config_directory())["experiment"]
    defaults = compose_config(
        # Mechanisms that the run did not know stay off: an option such as schedule=auto would turn
        # them on.
        "train",
        ["schedule=sync", *([f"experiment={experiment}"] if known else [])],
    )
    if "copies" not in tree:  # of a run from before they were stored
        tree["copies"] = copies_of(defaults, resolve_tree(defaults)[0])
    added: dict[str, Any] = {}
    for key in (key for key, its in keys_of(schema_of("train")).items() if its.required):
        head, _, leaf = key.rpartition(".")
        try:
            parent = OmegaConf.select(tree, head) if head else tree
        except OmegaConfBaseException:
            continue  # a list in a group's place, which the schema refuses
        here = parent is None or (isinstance(parent, DictConfig) and leaf not in parent)
        if here and key != "experiment_name":
            default = OmegaConf.select(defaults, key)
            added[key] = (
                OmegaConf.to_container(default) if OmegaConf.is_config(default) else default
            )
            OmegaConf.update(tree, key, added[key])
    return [f"{key}={value}" for key, value in added.items()]


def _drop_removed_keys(tree: DictConfig, path: str = "") -> list[str]:
    """Remove the removed keys, whatever they hold but a removed value, in place, and return them as
    key=value."""
    left_out = []
    for key, value in list(tree.items_ex(resolve=False)):
        its = path + str(key)
        # A removed value has a reason of its own. It stays here, and is refused later.
        if (cause := removal_reason(its)) is not None and removal_reason(its, value) == cause:
            left_out.append(f"{its}={tree.pop(key)}")
        elif isinstance(value, DictConfig):
            left_out += _drop_removed_keys(value, f"{its}.")
    return left_out


def unconfirmed_hosts(
    stored: object, tree: object, confirmed: Sequence[str], given: Collection[str] = ()
) -> list[str]:
    """Return a message for each host on another machine that the user has not confirmed.

    Only hosts count that `stored` names and that `tree` (with the command line's changes) still
    names, at keys other than those `given` by the command line.
    """
    # By host and not by key: a host that moved to another key is still the stored one.
    before, found = {host for _, host in _remote_hosts(stored)}, dict[str, str]()
    for path, host in _remote_hosts(tree):
        if host in before and host not in confirmed and not lies_under(path, given):
            found.setdefault(host, path)
    return [
        f"{path}: names {host}, and this configuration was stored by an earlier run, maybe "
        f"somebody else's; add confirm_hosts=[{','.join(found)}] to the command line (with make: "
        "ARGS=...) if data may go there."
        for host, path in islice(found.items(), MOST_SHOWN)
    ]


def unconfirmed_accounts(
    stored: object, tree: object, confirmed: Sequence[str], given: Collection[str] = ()
) -> list[str]:
    """Return a message for each account at W&B that a resumed run would send to, and that the user
    has not confirmed. Which count is said of `unconfirmed_hosts`."""
    before = {account for _, account in _wandb_accounts(stored)}
    return [
        f"{path}: names the account {account}, to which the run's metrics and pictures would go, "
        "and this configuration was stored by an earlier run, maybe somebody else's; add "
        f"confirm_hosts=[{account}] to the command line (with make: ARGS=...), or {path}=null for "
        "your own account."
        for path, account in islice(_wandb_accounts(tree), MOST_SHOWN)
        if account in before and account not in confirmed and not lies_under(path, given)
    ]


def _wandb_accounts(tree: object) -> Iterator[tuple[str, str]]:
    """Yield (dotted path, account) of every logger that may send to a named account at W&B."""
    for path, node in walk_nodes(tree):
        # Other loggers write into the run's directory alone.
        if isinstance(node, Mapping) and str(node.get("_target_")).endswith(_WANDB_LOGGER):
            entity = node.get("entity")
            if entity not in (None, "") and node.get("offline") is not True:
                yield f"{path}.entity", f"wandb.ai/{entity}"


def words_to_join(tree: object) -> list[str]:
    """Return the words with which a rank that joins confirms what the command line of the run
    `tree` has confirmed or set."""
    plain: Any = OmegaConf.to_container(tree) if OmegaConf.is_config(tree) else tree
    hosts = dict.fromkeys(host for _, host in _remote_hosts(plain))
    found = {"allow_targets": plain.get("allow_targets") or [], "confirm_hosts": list(hosts)}
    words = [
        f"{key}=[{','.join(map(quote_value, names))}]" for key, names in found.items() if names
    ]
    return [*words, *reaching_words(plain)]


def _remote_hosts(tree: object) -> Iterator[tuple[str, str]]:
    """Yield (dotted path, host and port as written) of every URL and HOST:PORT that leads to
    another machine."""
    for path, value in walk_nodes(tree):
        text = value.strip() if isinstance(value, str) else ""
        named = (
            [text]
            if _HOST_PORT.fullmatch(text) or (path == "ray.address" and _is_host(text))
            else []
        )
        # A text may hold several URLs, such as a list in one string.
        for host in [*named, *_URL.findall(text)]:
            if not _LOOPBACK.fullmatch(host):
                yield path, redact_text(host)


def _is_host(address: str) -> bool:
    """Return whether Ray's `address` names a machine. URLs and clusters on this machine do not
    count."""
    return address not in ("", "auto", "local") and "://" not in address


def forbidden_changes(
    stored: Mapping[str, object],
    tree: Mapping[str, object],
) -> list[str]:
    """Return what a resumed run has changed without permission, or nothing.

    The message names the keys that differ, why they must not, and the keys that may.
    """
    # Leaf by leaf, so that the message names keys and no groups.
    before, after = dict(_tree_leaves(stored)), dict(_tree_leaves(tree))
    differing = (
        key for key in before | after if before.get(key, _ABSENT) != after.get(key, _ABSENT)
    )
    keys = sorted(
        key
        for key in differing
        if not may_change(key)
        and _top_group(key) != "copies"
        and not _same_path(before.get(key), after.get(key))
        and MASK not in str(before.get(key))  # a masked secret cannot be compared
    )
    if not keys:
        return []
    said = ", ".join(
        f"{key} = {_leaf_text(after, key)} (stored: {_leaf_text(before, key)})" for key in keys
    )
    return [
        f"{said}: a resumed run keeps what its checkpoint was trained with; start a new run for "
        f"another value. May change: {list_names(RESUMABLE)}."
    ]


def _same_path(stored: object, now: object) -> bool:
    """Return whether `now` is the absolute form of a path that older versions stored as typed."""
    return isinstance(stored, str) and stored != "" and absolute_path(stored) == now


def _top_group(key: str) -> str:
    return key.partition(".")[0]


def configuration_identity(tree: DictConfig) -> dict[str, object]:
    """Return the values about which two ranks of one run must agree: dotted key -> value, without a
    machine's own keys."""
    # Ranks exchange these values, and secrets do not travel.
    plain = redact(OmegaConf.to_container(tree))
    return {
        key: value
        for key, value in _tree_leaves(plain)
        if _top_group(key) not in _OWN and key not in _OWN
    }


def tie_of(tree: DictConfig) -> dict[str, str]:
    """Return what ties a checkpoint to its configuration: a digest of the value of each key."""
    return _leaf_digests(OmegaConf.to_container(tree))


def _leaf_digests(tree: object) -> dict[str, str]:
    return {
        key: xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True, default=str).encode())
        for key, value in _tree_leaves(tree)
        if key not in _UNTIED and _top_group(key) != "copies"
    }


def compare_ties(
    run_dir: Path, ties: Sequence[Mapping[str, str]], words: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Compare a run's config.yaml with the configurations under which its checkpoint was written
    and resumed.

    Args:
        ties: results of `tie_of`. Each value must agree with at least one tie. Empty: the
            checkpoint holds no digests.
        words: the command line. A key that it sets may differ, and gives a note.

    Returns:
        (problems, notes).
    """
    file = run_dir / CONFIG
    # A checkpoint of an older version. It is resumed as before, and that is said.
    if not ties:
        return [], [f"{file}: its checkpoint has no digests of a configuration; not compared."]
    stored = read_yaml(file)
    plain = OmegaConf.to_container(stored, resolve=False)
    leaves, found = dict(_tree_leaves(plain)), _leaf_digests(plain)
    given = [
        word.key_or_group for word in parse_words([w for w in words if "=" in w or "~" in w]).values
    ]
    problems, notes = [], []
    for key in sorted(found.keys() | {key for tie in ties for key in tie}):
        if found.get(key) in [tie.get(key) for tie in ties]:
            continue
        if removal_reason(key) is not None and key not in found:
            continue  # a key that was removed since
        said = f"{key} = {_leaf_text(leaves, key)}: is not what the checkpoint was written with"
        if lies_under(key, given):
            notes.append(f"{file}: {said}; the command line sets it.")
        else:
            problems.append(
                f"{file}: {said}, so the file was changed since; restore it, or set {key}=... on "
                "the command line if you want it so."
            )
    return problems, notes


def find_disagreements(run: Mapping[str, object], own: Mapping[str, object]) -> list[str]:
    """Return the keys in which two identities differ, with both values."""
    keys = sorted(
        key for key in run.keys() | own.keys() if run.get(key, _ABSENT) != own.get(key, _ABSENT)
    )
    return [f"{key} = {_leaf_text(own, key)} (the run's: {_leaf_text(run, key)})" for key in keys]


# Keys of a machine or of a command line, about which two ranks of a run need not agree.
_OWN = ("resume", "output_root", "network", "allow_targets", "confirm_hosts", "data.prompt_store")
_UNTIED = ("resume", "allow_targets", "confirm_hosts", "data.prompt_store")
"""Keys that count on the command line alone, whatever a config.yaml holds."""
_ABSENT = object()


def _leaf_text(leaves: Mapping[str, object], key: str) -> str:
    return show_value(leaves[key]) if key in leaves else "absent"


def _tree_leaves(tree: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield (dotted key, value) of everything in `tree` that is not a group of keys. An empty group
    counts as a leaf."""
    if isinstance(tree, Mapping) and (tree or not path):
        for key, item in tree.items():
            yield from _tree_leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, tree
