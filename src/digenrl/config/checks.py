"""Every check of a composed configuration, none of which imports torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from digenrl import prompts
from digenrl.config.compose import unknown_key
from digenrl.config.cross import cross_problems
from digenrl.config.rules import CLOSED, DERIVED_TRAINER_KEYS, KEYS, REQUIRED
from digenrl.config.targets import target_problems
from digenrl.record.redact import MASK, is_secret_name, redact_text

_ABSENT = object()


def problems_of(config: DictConfig, roots: Sequence[str], known: Sequence[str], allow: Sequence[str]) -> list[str]:
    """Everything wrong with a composed training configuration (without the `hydra` node).

    Args:
        config: the tree, unresolved.
        roots: allowed top-level keys.
        known: dotted keys that "nearest valid key" may offer.
        allow: further packages that targets may name.
    """
    tree, unresolved = resolved(config)
    problems = list(unresolved.values())
    problems += [unknown_key(key, tree[key], known) for key in tree if key not in roots]
    problems += _closed_problems(tree, known)
    rule_problems = {key: text for key, text in _rule_problems(tree).items() if key not in unresolved}
    problems += rule_problems.values()
    problems += _non_finite(tree, rule_problems)
    problems += _secret_problems(tree)
    problems += _trainer_problems(tree)
    problems += target_problems(tree, allow)
    problems += cross_problems(tree, broken={*rule_problems, *unresolved})
    problems += _prompt_problems(tree, broken={*rule_problems, *unresolved})
    return problems


def lookup(tree: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """The value at a dotted key of a plain tree; `default` where there is none."""
    node: Any = tree
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return default
        node = node[part]
    return node


def resolved(config: DictConfig) -> tuple[dict[str, Any], dict[str, str]]:
    """`config` as plain dicts and lists, interpolations resolved; and path -> problem of the leaves left out."""
    problems: dict[str, str] = {}

    def leaf(parent: DictConfig | ListConfig, key: Any, path: str) -> Any:
        try:
            if OmegaConf.is_missing(parent, key):
                problems[path] = f"{path}: a value is required; set {path}=..."
                return _ABSENT
            return node(parent[key], path)
        except OmegaConfBaseException as error:
            problems[path] = f"{path}: cannot be resolved ({redact_text(str(error).splitlines()[0])})."
            return _ABSENT

    def node(value: Any, path: str) -> Any:
        if isinstance(value, DictConfig):
            names = [str(key) for key in value]
            items = {name: leaf(value, name, f"{path}.{name}" if path else name) for name in names}
            return {name: item for name, item in items.items() if item is not _ABSENT}
        if isinstance(value, ListConfig):
            return [item for i in range(len(value)) if (item := leaf(value, i, f"{path}[{i}]")) is not _ABSENT]
        return value

    return node(config, ""), problems


def _closed_problems(tree: Mapping[str, Any], known: Sequence[str]) -> list[str]:
    problems = []
    for parent in CLOSED:
        node = lookup(tree, parent, None)
        if node is None:
            continue
        children = {key[len(parent) + 1 :].partition(".")[0] for key in KEYS if key.startswith(f"{parent}.")}
        if not isinstance(node, Mapping):
            problems.append(f"{parent} = {redact_text(str(node))}: must hold the keys {', '.join(sorted(children))}.")
            continue
        problems += [unknown_key(f"{parent}.{key}", node[key], known) for key in node if key not in children]
    return problems


def _rule_problems(tree: Mapping[str, Any]) -> dict[str, str]:
    problems: dict[str, str] = {}
    for key, rule in KEYS.items():
        value = lookup(tree, key, _ABSENT)
        if value is _ABSENT:
            if key in REQUIRED and _parent_is_mapping(tree, key):
                problems[key] = f"{key}: missing; allowed: {rule.describe()}."
        elif (wrong := rule.problem(value)) is not None:
            problems[key] = f"{key} = {redact_text(_shown(value))}: {wrong}; allowed: {rule.describe()}."
    return problems


def _parent_is_mapping(tree: Mapping[str, Any], key: str) -> bool:
    parent = key.rpartition(".")[0]
    return not parent or isinstance(lookup(tree, parent, {}), Mapping)


def _shown(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, item in tree.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list):
        for index, item in enumerate(tree):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, tree


def _non_finite(tree: Mapping[str, Any], reported: Mapping[str, str]) -> list[str]:
    return [
        f"{path} = {value}: is not finite; use a finite number."
        for path, value in _leaves(tree)
        if isinstance(value, float) and not math.isfinite(value) and path.partition("[")[0] not in reported
    ]


def _secret_problems(tree: Mapping[str, Any]) -> list[str]:
    problems = []
    for path, value in _leaves(tree):
        if isinstance(value, str) and value and is_secret_name(path):
            problems.append(
                f"{path} = {MASK}: a configuration is written to disk and shown in reports; pass secrets in the "
                "environment (WANDB_API_KEY, HF_TOKEN, DIGENRL_REWARD_TOKEN)."
            )
        elif isinstance(value, str) and MASK in value:
            problems.append(
                f"{path} = {redact_text(value)}: was masked when the run's config.yaml was written; set it again."
            )
    return problems


def _trainer_problems(tree: Mapping[str, Any]) -> list[str]:
    trainer = tree.get("trainer")
    if not isinstance(trainer, Mapping):
        return []
    return [
        f"trainer.{key} = {_shown(trainer[key])}: is derived; {remedy}."
        for key, remedy in DERIVED_TRAINER_KEYS.items()
        if key in trainer
    ]


def _prompt_problems(tree: Mapping[str, Any], broken: set[str]) -> list[str]:
    problems = []
    for key in ("data.prompts", "data.heldout"):
        name = lookup(tree, key, None)
        if name is None or key in broken:
            continue
        try:
            file = prompts.read(name)
        except prompts.PromptFileError as error:
            problems.append(f"{key}: {error}")
            continue
        wanted = lookup(tree, "data.prompts_per_batch", 1)
        if key == "data.prompts" and "data.prompts_per_batch" not in broken and len(file.records) < wanted:
            problems.append(
                f"data.prompts_per_batch = {wanted}: {file.path.name} holds {len(file.records)} different prompts and "
                f"a batch needs distinct ones; allowed: 1 .. {len(file.records)}."
            )
    return problems
