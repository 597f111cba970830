"""Arguments by which an allowed class would start a process, load code, or write where it should
not.

The list of `targets` says which classes a configuration may name, not what they do with their
arguments. A few arguments reach further than the run: `tests/reachable.py` finds them in the source
of every such class. Each such argument obeys one of two rules.

- If it names code or a process, it counts on the command line alone, as `allow_targets` does.
  Neither a stored config.yaml nor a file of a `--config-dir` can set it.
- If it names a file of the run, it is a plain name without folders, wherever it comes from.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from digenrl.config.targets import known_components, walk_nodes
from digenrl.config.validation import show_value
from digenrl.config.words import quote_value
from digenrl.rewards.needs import flag_problems

_SERVE_KEYS = ("build", "gpus", "args")

_LOGGER_ARGUMENTS: Mapping[str, Collection[str]] = {
    "lightning.pytorch.loggers.CSVLogger": (
        "name",
        "version",
        "prefix",
        "flush_logs_every_n_steps",
    ),
    "lightning.pytorch.loggers.TensorBoardLogger": (
        "name",
        "version",
        "sub_dir",
        "prefix",
        "log_graph",
        "default_hp_metric",
        "purge_step",
        "max_queue",
        "flush_secs",
    ),
    "digenrl.callbacks.wandb_logger.WandbLogger": (
        "project",
        "entity",
        "name",
        "experiment",
        "group",
        "tags",
        "notes",
        "id",
        "offline",
        "timeout_s",
    ),
}
"""Logger -> arguments that a configuration may give. The directory is the run's own."""
_FOLDERS = ("name", "version", "sub_dir", "prefix", "project", "id")
"""Arguments of loggers that become names of files."""
_FOLDER = re.compile(r"(?!\.)[\w.+= @-]{0,128}")
_HYDRA_KEYS = ("_target_", "_partial_", "_recursive_", "_convert_")
_HUB_BACKEND = re.compile(r".*hub.*", re.IGNORECASE | re.DOTALL)
"""An attention backend whose kernel diffusers fetches from the hub and runs."""


def reaching_problems(tree: object, given: Collection[str]) -> Iterator[str]:
    """Yield what is wrong with the arguments of `tree` that reach beyond the run.

    Args:
        tree: a resolved configuration.
        given: keys that the command line sets.
    """
    for path, node in walk_nodes(tree):
        if not isinstance(node, Mapping):
            continue
        # Such a key would look like another one in every message.
        yield from (
            f"{path}: has the key {str(key)!a}, which is no name; use printable characters."
            for key in node
            if not str(key).isprintable()
        )
        target = node.get("_target_")
        # Positional arguments would escape the checks by name.
        if "_args_" in node and isinstance(target, str) and target in known_components():
            yield f"{path}._args_: is refused; give the arguments of {target} by their names."
        if "serve" in node:
            yield from _serve_problems(f"{path}.serve", node, given)
        if isinstance(target, str) and target in _LOGGER_ARGUMENTS:
            yield from _logger_problems(path, target, node)
        backend = node.get("attention_backend")
        if isinstance(backend, str) and _HUB_BACKEND.fullmatch(backend):
            yield from _unasked_problem(
                f"{path}.attention_backend",
                backend,
                "names a kernel that is fetched from the hub and run",
                given,
            )


def reaching_words(tree: object) -> list[str]:
    """Return the words that a command line must repeat to run the configuration `tree` again."""
    words = []
    # The same keys as `reaching_problems` guards.
    for path, node in walk_nodes(tree):
        if not isinstance(node, Mapping):
            continue
        serve, backend = node.get("serve"), node.get("attention_backend")
        if isinstance(serve, Mapping) and isinstance(serve.get("args"), list) and serve["args"]:
            items = ",".join(
                quote_value(item) if isinstance(item, str) else str(item) for item in serve["args"]
            )
            words.append(f"{path}.serve.args=[{items}]")
        if isinstance(backend, str) and _HUB_BACKEND.fullmatch(backend):
            words.append(f"{path}.attention_backend={backend}")
    return words


def _unasked_problem(path: str, value: object, what: str, given: Collection[str]) -> Iterator[str]:
    """Yield a message if the command line does not set the key at `path`."""
    if not any(path == key or path.startswith(f"{key}.") for key in given):
        yield (
            f"{path} = {show_value(value)}: {what}, so it counts only on the command line, not in "
            "a stored config.yaml or another YAML file; repeat it there if you want it."
        )


def _serve_problems(path: str, node: Mapping[str, object], given: Collection[str]) -> Iterator[str]:
    """Yield what is wrong with how a judge is served that the run starts."""
    serve, model = node["serve"], node.get("model")
    # The name becomes a word of the server's command line.
    if isinstance(model, str) and model.lstrip().startswith("-"):
        yield f"{path.rpartition('.')[0]}.model = {show_value(model)}: is an option, and no model."
    if serve is None:
        return
    if not isinstance(serve, Mapping) or {*map(str, serve)} - {*_SERVE_KEYS}:
        yield f"{path} = {show_value(serve)}: takes {', '.join(_SERVE_KEYS)} alone."
        return
    # Options of a server name files, plugins and code, so no list of good ones is complete.
    args = serve.get("args")
    if args in (None, []):
        return
    yield from (f"{path}.args = {show_value(args)}: {why}." for why in flag_problems(args))
    yield from _unasked_problem(
        f"{path}.args", args, "goes to the command of the judge's server", given
    )


def _logger_problems(path: str, target: str, node: Mapping[str, object]) -> Iterator[str]:
    """Yield what is wrong with the arguments of a logger."""
    known = _LOGGER_ARGUMENTS[target]
    for key, value in node.items():
        # `_args_` was refused above.
        if key not in (*known, *_HYDRA_KEYS, "_args_"):
            yield (
                f"{path}.{key}: is refused, because a logger writes into the run's directory; "
                f"it takes {', '.join(known)}."
            )
        elif key in _FOLDERS and isinstance(value, str) and not _FOLDER.fullmatch(value):
            yield (
                f"{path}.{key} = {show_value(value)}: is part of a file's name; use letters, "
                "digits, spaces and _ . + = @ -, not beginning with a dot."
            )
        # A list or a group would be formatted into a name.
        elif key in _FOLDERS and not isinstance(value, (str, int, type(None))):
            yield f"{path}.{key} = {show_value(value)}: is part of a file's name; use text."
