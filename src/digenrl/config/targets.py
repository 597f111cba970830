"""The classes that `_target_` may name, checked without importing any of them.

Hydra turns `_target_` into a call, so a configuration is code. The rule is that a target may be one
of three:

- A class in `ROOMS` that a file of the shipped configs/ names.
- A class in `FOREIGN`.
- Anything public in a package that `allow_targets` names on the command line. Our own packages are
  excepted.

So commands, functions and whatever calls something by another name (`class_path`,
`hydra.utils.get_method`) are no components. A configuration directory of the user's own adds
nothing to the list.

Two gates keep the rule. Before anything is imported, every target of the whole tree must obey it.
At instantiation, what `allow_targets` admitted must also have been defined in an admitted package,
so that an alias such as `mine.os.system` leads nowhere.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import hydra.utils
import yaml
from hydra.errors import InstantiationException
from omegaconf import DictConfig, ListConfig, OmegaConf

from digenrl.config.arguments import argument_problems
from digenrl.config.errors import MOST_SHOWN, nearest_name
from digenrl.config.removed import present_name
from digenrl.config.shipped import config_directory

ROOMS: tuple[str, ...] = (
    "digenrl.algorithms",
    "digenrl.callbacks",
    "digenrl.diffusion",
    "digenrl.extensions",
    "digenrl.models",
    "digenrl.rewards",
    "digenrl.strategy",
    "reward_models",
)
"""Packages of our own that hold components. A file of configs/ can add a class of these to the
list, nothing else."""

FOREIGN: tuple[str, ...] = (
    "lightning.pytorch.Trainer",
    "lightning.pytorch.loggers.CSVLogger",
    "lightning.pytorch.loggers.TensorBoardLogger",
    "torch.optim.Adam",
    "torch.optim.AdamW",
    "torch.optim.SGD",
)
"""Classes of other packages: those that configs/ names, and the optimizers that docs/adding.md
offers beside them."""

_OWN = ("digenrl", "reward_models")


def walk_nodes(tree: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield (dotted path, node) of `tree` and of everything inside it, depth first."""
    yield path, tree
    if isinstance(tree, Mapping):
        for key, item in tree.items():
            yield from walk_nodes(item, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, (list, tuple)):
        for index, item in enumerate(tree):
            yield from walk_nodes(item, f"{path}[{index}]")


def has_key(tree: object, key: str) -> bool:
    """Return whether plain dicts and lists have a dotted key, such as `reward.rewards[0].path`. A
    key with dots in its own name has no such path."""
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


def find_targets(tree: object) -> Iterator[tuple[str, object, Mapping[str, object]]]:
    """Yield (dotted path, target, node) of every node with `_target_`, depth first."""
    for path, node in walk_nodes(tree):
        if isinstance(node, Mapping) and "_target_" in node:
            yield path, node["_target_"], node


@functools.cache
def known_components() -> frozenset[str]:
    """Return the dotted names of the classes that every configuration may name."""
    named = set(FOREIGN)
    for file in config_directory().rglob("*.yaml"):
        try:
            # The C parser where there is one, because every file of configs/ is read.
            tree = yaml.load(
                file.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)
            )
        except yaml.YAMLError:
            continue  # Hydra says what is wrong with the file when somebody chooses it
        own = (target for _, target, _ in find_targets(tree) if isinstance(target, str))
        named.update(target for target in own if _lies_in(target, ROOMS))
    return frozenset(named)


def _lies_in(target: str, packages: Sequence[str]) -> bool:
    """Return whether the dotted name is a public one inside a package of `packages`."""
    public = not any(part.startswith("_") for part in target.split("."))
    return public and any(target.startswith(f"{package}.") for package in packages)


def is_allowed(target: str, allow: Sequence[str] = ()) -> bool:
    """Return whether `target` obeys the rule above.

    Args:
        allow: the packages that `allow_targets` names on the command line.
    """
    # Our own packages are left out of `allow`: their classes are on the list, and the rest of them
    # is no component.
    return target in known_components() or (
        target.partition(".")[0] not in _OWN and _lies_in(target, allow)
    )


def target_problems(tree: object, allow: Sequence[str] = ()) -> list[str]:
    """Return everything wrong with the targets of `tree`. Nothing is imported."""
    problems = list[str]()
    # Every node, also those that nobody instantiates: a later version may.
    for path, target, node in find_targets(tree):
        where = f"{path}._target_" if path else "_target_"
        if not isinstance(target, str):
            problems.append(f"{where} = {target!r}: use the dotted name of a class, as text.")
        elif not is_allowed(target, allow):
            # A stored file may hold thousands, and a look for the nearest name takes milliseconds.
            reason = _refusal_reason(target, looks=len(problems) < MOST_SHOWN)
            problems.append(f"{where} = {target}: refused, because {reason}.")
        else:
            problems += argument_problems(where, path, target, node)
    return problems


def _refusal_reason(target: str, looks: bool) -> str:
    """Return why `target` is not allowed, and what can be done. `looks`: name the nearest."""
    if (now := present_name(target)) != target:
        return f"it has moved; write {now}"
    close = nearest_name(target, known_components()) if looks else None
    hint = f"; nearest: {close}" if close else ""
    if target.partition(".")[0] in _OWN:
        return f"no file of the shipped configs/ names it as a component{hint}"
    package = target.rpartition(".")[0] or target
    trust = f"if you trust it, add 'allow_targets=[{package}]' on the command line"
    return f"it is not among the classes that a run uses{hint}; {trust}"


def instantiate(node: object, *arguments: object, **named: object) -> Any:
    """Call `hydra.utils.instantiate(node, *arguments, **named)` if the allow-list admits every
    target.

    The list is extended by `allow_targets` at the root of the configuration that `node` belongs to.
    `load` takes that key from the command line only.

    Raises:
        PermissionError: a target of `node`, or of anything below it, is not allowed, or is an alias
            of something that was defined elsewhere.
        Exception: what the target itself raised, in its own words.
    """
    root = node._get_root() if isinstance(node, (DictConfig, ListConfig)) else None
    allow = tuple(root.get("allow_targets") or ()) if isinstance(root, DictConfig) else ()
    plain = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    if problems := target_problems(plain, allow):
        raise PermissionError("; ".join(problems))
    for path, target, _ in find_targets(plain):
        assert isinstance(target, str)  # `target_problems` refuses all others
        # This imports the module, so it comes after the check by name.
        found = hydra.utils.get_object(target)
        if target.partition(".")[0] in _OWN and not isinstance(found, type):
            raise PermissionError(f"{path or 'node'}: _target_ = {target} is no class.")
        # Where it was defined, whatever name leads to it.
        home = f"{getattr(found, '__module__', None)}.{getattr(found, '__qualname__', '')}"
        if target not in known_components() and not is_allowed(home, allow):
            raise PermissionError(
                f"{path or 'node'}: _target_ = {target} is an alias of {home}, which is refused."
            )
    try:
        return hydra.utils.instantiate(node, *arguments, **named)
    except InstantiationException as error:  # one frame of Hydra's for every level of the tree
        cause: BaseException = error
        while isinstance(cause, InstantiationException) and cause.__cause__ is not None:
            cause = cause.__cause__
    raise cause
