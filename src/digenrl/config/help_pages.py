"""Pages of `--help`, from schemas and configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel

from digenrl.config.command_settings import schema_of
from digenrl.config.compose import compose_config, group_options, own_directories
from digenrl.config.errors import ConfigError, list_names
from digenrl.config.settings import Settings, may_change
from digenrl.config.shipped import config_directory
from digenrl.config.validation import Key, keys_of, show_value


def command_help(text: str | None, schema: type[BaseModel] | None = None) -> str:
    """Return the help page of a command with keys of its own: its docstring, and the keys."""
    lines = [(text or "").strip()]
    if schema is not None:
        keys = keys_of(schema)
        defaults = {
            key: "required" if its.required else show_value(its.default)
            for key, its in keys.items()
        }
        lines += ["\nkeys (key=value):", *_key_lines(keys, defaults)]
    return "\n".join(lines)


def configuration_help(config_name: str, text: str | None = None, words: Sequence[str] = ()) -> str:
    """Return the help page of a command that composes configs/<config_name>.yaml.

    The page lists the groups with their options, including those of directories that `words` name.
    Then it lists the keys with their default values.
    """
    options = group_options(config_directory(), *own_directories(words))
    keys, defaults = keys_of(schema_of(config_name)), defaults_of(config_name)
    # Commands around a reward compose no other group.
    whole = issubclass(schema_of(config_name), Settings)
    groups = {name: names for name, names in options.items() if whole or name == "reward"}
    return "\n".join(
        [
            (text or f"digenrl {config_name} [group=option ...] [key=value ...]").strip(),
            "\ngroups (group=option):",
            *(f"  {name:<24}{list_names(names)}" for name, names in groups.items()),
            "\nkeys (key=value; +key=value adds one, ~key removes one), with the value where "
            "nothing is said" + ("; keys with * may change on resume:" if whole else ":"),
            *_key_lines(keys, defaults),
        ]
    )


def _key_lines(keys: Mapping[str, Key], defaults: Mapping[str, str]) -> list[str]:
    lines = []
    for key, its in keys.items():
        # Keys of commands are in no list, and get no mark.
        mark = "*" if may_change(key) else " "
        lines.append(
            f"{mark} {f'{key} = {defaults[key]}' if key in defaults else key:<42}  {its.allowed}"
        )
        lines += [f"      {its.meaning}"] if its.meaning else []
    return lines


def defaults_of(config_name: str) -> dict[str, str]:
    """Return key -> its default value, for the keys that have one."""
    try:
        tree = compose_config(config_name, [])
        # Interpolations of `hydra:` read this global.
        HydraConfig.instance().set_config(tree)
    except ConfigError:  # a group has no default: what the primary file itself says
        primary = OmegaConf.load(config_directory() / f"{config_name}.yaml")
        assert isinstance(primary, DictConfig)
        tree = primary
    found = {}
    for key in keys_of(schema_of(config_name)):
        # `tree` stands for "no such key", because no key has it as a value.
        node = OmegaConf.select(tree, key, default=tree, throw_on_missing=False)
        if node is not tree and not OmegaConf.is_dict(node) and not OmegaConf.is_missing(tree, key):
            found[key] = show_value(node)
    return found
