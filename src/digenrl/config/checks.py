"""Every check of a composed configuration, none of which imports torch."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from digenrl import prompts
from digenrl.config.command_settings import schema_of
from digenrl.config.compose import KnownKeys
from digenrl.config.relations import relation_problems
from digenrl.config.settings import DERIVED_TRAINER_KEYS
from digenrl.config.targets import target_problems, walk_nodes
from digenrl.config.validation import problems_by_key, show_value
from digenrl.images import ImageLimits
from digenrl.record.redact import MASK, is_secret_name, redact_text
from digenrl.schedule import groups_of_step

_ABSENT = object()


def problems_of(
    tree: Mapping[str, object],
    unresolved: dict[str, str],
    config_name: str,
    known: KnownKeys,
    allow: Sequence[str],
) -> list[str]:
    """Return everything wrong with a composed configuration (without the `hydra` node).

    Args:
        tree: the configuration, as `resolve_tree` returns it.
        unresolved: path -> problem of the leaves that are not in it.
        config_name: name of the schema that the tree must obey.
        known: keys from which "nearest valid key" is chosen.
        allow: further packages that targets may name.
    """
    wrong = problems_by_key(schema_of(config_name), tree, known.unknown_message)
    # A leaf that cannot be resolved is absent from the tree. Its own message says more.
    wrong = {key: text for key, text in wrong.items() if key not in unresolved} | unresolved
    return [
        *wrong.values(),
        *_leaf_problems(tree, wrong),
        *_trainer_problems(tree),
        *_component_problems(tree),
        # What the schema has refused is not said twice.
        *(text for text in target_problems(tree, allow) if text.split(" = ")[0] not in wrong),
        # Rules that read a broken key stay silent: its own message is in `wrong`.
        *relation_problems(tree, wrong),
        *_prompt_problems(tree, wrong),
    ]


def resolve_tree(config: DictConfig) -> tuple[dict[str, object], dict[str, str]]:
    """Return `config` as plain dicts and lists with resolved interpolations, and path -> problem of
    the leaves left out."""
    problems: dict[str, str] = {}
    with suppress(OmegaConfBaseException):
        whole: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        if _has_text_keys(whole):
            return whole, problems

    # Leaf by leaf: `to_container` raises at the first one that it cannot resolve. Keys that are no
    # text are looked for as text below, and refused.
    def resolve_leaf(parent: DictConfig | ListConfig, key: Any, path: str) -> object:
        try:
            if OmegaConf.is_missing(parent, key):
                problems[path] = f"{path}: a value is required; set {path}=..."
                return _ABSENT
            return resolve_node(parent[key], path)
        except OmegaConfBaseException as error:
            problems[path] = (
                f"{path}: cannot be resolved ({redact_text(str(error).splitlines()[0])})."
            )
            return _ABSENT

    def resolve_node(value: object, path: str) -> object:
        if isinstance(value, DictConfig):
            return resolve_group(value, f"{path}.")
        if isinstance(value, ListConfig):
            return [
                item
                for i in range(len(value))
                if (item := resolve_leaf(value, i, f"{path}[{i}]")) is not _ABSENT
            ]
        return value

    def resolve_group(group: DictConfig, head: str) -> dict[str, object]:
        names = [str(key) for key in group]
        items = {name: resolve_leaf(group, name, head + name) for name in names}
        return {name: item for name, item in items.items() if item is not _ABSENT}

    return resolve_group(config, ""), problems


def _has_text_keys(tree: object) -> bool:
    """Return whether every key of plain dicts and lists is text."""
    nodes = (node for _, node in walk_nodes(tree))
    return all(isinstance(key, str) for node in nodes if isinstance(node, dict) for key in node)


def _leaf_problems(tree: Mapping[str, object], reported: Collection[str]) -> Iterator[str]:
    """Return problems that a leaf anywhere can have: a number that is not finite, and a secret."""
    for path, value in walk_nodes(tree):
        # The schema has refused it where a key is typed. This reaches the open groups.
        if (
            isinstance(value, float)
            and not math.isfinite(value)
            and path.partition("[")[0] not in reported
        ):
            yield f"{path} = {value}: is not finite; use a finite number."
        elif isinstance(value, str) and value and is_secret_name(path):
            yield (
                f"{path} = {MASK}: a configuration is written to disk and shown in reports; pass "
                "secrets in the environment (WANDB_API_KEY, HF_TOKEN, DIGENRL_REWARD_TOKEN)."
            )
        elif path == "experiment_name" and isinstance(value, str) and redact_text(value) != value:
            yield (
                f"{path} = {redact_text(value)}: names directories and reports; choose a name "
                "without a secret."
            )
        elif path.rpartition(".")[2] == "token_env" and not re.fullmatch(
            r"DIGENRL_\w+", str(value)
        ):
            yield (
                f"{path} = {show_value(value)}: a reward is sent variables named DIGENRL_... "
                "only, so that no configuration can ask for another secret; put its token into "
                "one of those."
            )
        elif isinstance(value, str) and MASK in value:
            yield (
                f"{path} = {redact_text(value)}: was masked when the run's config.yaml was "
                "written, because it looks like a secret; set it again."
            )


def _trainer_problems(tree: Mapping[str, object]) -> Iterator[str]:
    trainer = tree.get("trainer")
    for key, remedy in DERIVED_TRAINER_KEYS.items():
        if isinstance(trainer, Mapping) and key in trainer:
            yield f"trainer.{key} = {show_value(trainer[key])}: is derived; {remedy}."


def _component_problems(tree: Mapping[str, object]) -> Iterator[str]:
    """Yield a message for each callback or logger that names no class."""
    for group in ("callbacks", "logger"):
        nodes = tree.get(group)
        for name, node in nodes.items() if isinstance(nodes, Mapping) else ():
            if isinstance(node, Mapping) and "_target_" not in node:
                yield (
                    f"{group}.{name}: has no _target_; name its class "
                    f"(+{group}.{name}._target_=...), or write ~{group}.{name} to leave it out."
                )


def _prompt_problems(tree: Mapping[str, object], broken: Collection[str]) -> Iterator[str]:
    data = tree.get("data")
    if not isinstance(data, Mapping):
        return
    # Files are read here, before any rank starts, where a mistake costs seconds.
    for leaf in ("prompts", "heldout"):
        if f"data.{leaf}" in broken or data.get(leaf) is None:
            continue
        keys = {name: f"image_{name}" for name in vars(ImageLimits())}
        # A bound that is itself wrong was reported, and its default holds here.
        bounds = {name: data[key] for name, key in keys.items() if f"data.{key}" not in broken}
        files, whole = list[tuple[prompts.PromptFile, float]](), True
        for name, weight in prompts.weighted_files(data[leaf]):
            try:
                files.append((prompts.read_prompt_file(name, ImageLimits(**bounds)), weight))
            except prompts.PromptFileError as error:
                yield f"data.{leaf}: {error}"
                whole = False
        if (
            not whole
            or leaf != "prompts"
            or {"data.prompts_per_batch", "data.oversample"} & set(broken)
        ):
            continue
        wanted, more, weights = (
            data["prompts_per_batch"],
            data["oversample"],
            [weight for _, weight in files],
        )
        for (file, weight), most in zip(
            files, prompts.most_of_batch(weights, groups_of_step(data)), strict=True
        ):
            if len(file.prompts) < most:
                # Times False, the texts are empty.
                share = f", {most} of them by its weight {weight:g} of {sum(weights):g}" * (
                    len(files) > 1
                )
                yield (
                    "data.prompts_per_batch = "
                    f"{wanted}{f' with data.oversample = {more}' * bool(more)}: {file.path.name} "
                    f"holds {len(file.prompts)} different prompts and a batch needs distinct "
                    f"ones{share}; allowed: 1 .. "
                    f"{int(len(file.prompts) * sum(weights) / weight)}{' in all' * bool(more)}."
                )
