"""What every class of settings is: a group of typed keys, or a whole tree of such groups."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any, Self

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ConfigDict, PrivateAttr

from digenrl.config.copies import link_copies, resolved_plain
from digenrl.config.targets import instantiate


class Closed(BaseModel):
    """A group of keys that accepts no other keys."""

    model_config = ConfigDict(
        # A misspelt key is an error, and not a knob that silently does nothing.
        extra="forbid",
        frozen=True,
        # Without conversions: the text "8" is no number, and 8.0 is no whole one.
        strict=True,
        allow_inf_nan=False,
        # Docstrings of fields become descriptions in the JSON schema, which `validation` reads.
        use_attribute_docstrings=True,
    )


class Open(Closed):
    """A group of keys that accepts other keys: those of the constructor that `_target_` names."""

    model_config = ConfigDict(extra="allow")

    def get(self, key: str, default: object = None) -> Any:
        """Return the value of a key, or `default` where the YAML lacks it. For keys that only the
        constructor knows; attributes have the others."""
        extra = self.model_extra or {}
        return (
            extra[key] if key in extra else getattr(self, key) if self.holds_key(key) else default
        )

    def holds_key(self, key: str) -> bool:
        """Return whether the YAML has the key, which may be null."""
        return key in self.model_fields_set or key in (self.model_extra or {})

    @property
    def target(self) -> str:
        """The class that the group instantiates (`_target_`)."""
        return str(self.get("_target_"))


_NOTHING = object()


class Whole(Closed):
    """A whole configuration, checked. Attributes are the keys. A group that describes an object
    keeps its keys as YAML has them, and `build` makes the object.

    Example:
        settings = load(["experiment=digits_flowgrpo"]).settings
        settings.data.group_size                        # 16, an int
        settings.build("model")                         # the policy
        settings.with_values({"data.group_size": 8})    # other settings
    """

    _plain: dict[str, object] = PrivateAttr()

    @classmethod
    def from_tree(cls, tree: Mapping[str, object] | DictConfig) -> Self:
        """Return the settings of a resolved tree that passed every check."""
        plain: Any = OmegaConf.to_container(tree) if isinstance(tree, DictConfig) else dict(tree)
        settings = cls.model_validate(copy.deepcopy(plain))
        settings._plain = copy.deepcopy(plain)
        return settings

    # Made when it is asked for: OmegaConf makes 10,000 nodes a second, and checks need none.
    @functools.cached_property
    def tree(self) -> DictConfig:
        """The same keys as a read-only tree, as config.yaml stores them."""
        tree = OmegaConf.create(self._plain)
        # Read-only, so that nobody changes a value behind the typed fields.
        OmegaConf.set_readonly(tree, True)
        return tree

    def as_plain(self) -> dict[str, object]:
        """Return a copy of the tree as dicts and lists."""
        return copy.deepcopy(self._plain)

    def node_at(self, group: str) -> Any:
        """Return the tree below a dotted key, as a component's constructor takes it.

        Raises:
            KeyError: there is no such key.
        """
        found = OmegaConf.select(self.tree, group, default=_NOTHING)
        if found is _NOTHING:
            raise KeyError(f"{group}: no such key in the settings")
        return found

    def build(self, group: str, *arguments: object, **named: object) -> Any:
        """Return the object that the group at a dotted key describes: `algorithm`,
        `algorithm.advantage`, `callbacks.evaluation`. Arguments and errors are those of
        `config.instantiate`."""
        return instantiate(self.node_at(group), *arguments, **named)

    def with_values(self, values: Mapping[str, object]) -> Self:
        """Return these settings with other values, dotted key -> value. Copies of a key follow."""
        config = OmegaConf.create(self.as_plain())
        # Copies become references, so that they follow the new values.
        link_copies(config)
        tree: Any = OmegaConf.to_container(config, resolve=False)
        for key, value in values.items():
            *groups, leaf = key.split(".")
            functools.reduce(lambda node, name: node[name], groups, tree)[leaf] = value
        return type(self).from_tree(resolved_plain(OmegaConf.create(tree)))
