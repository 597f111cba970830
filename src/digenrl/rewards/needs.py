"""Check the needs of a configuration's rewards and statistics before any is built: weights on disk,
usable prompts, flags of a judge's server."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from digenrl.rewards.published import WEIGHTS, files_read

if TYPE_CHECKING:
    from digenrl.types import Prompt

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_Scorer = tuple[str, str, Mapping[str, Any]]
_KEYS = {"rewards": ("scorer", "weight", "placement", "for"), "heldout": ("scorer", "placement")}
"""Group of scorers -> keys of an entry."""
PLACEMENTS = ("inline", "thread", "process", "managed", "http")
"""Values of the key `placement` of a reward."""
MODALITIES = ("video", "audio")
"""Values of the key `for` of a reward."""
_MOST = 20
"""Most prompts that a message names; further ones are counted."""
SERVER_FLAGS: Mapping[str, bool] = {
    "--block-size": True,
    "--cpu-offload-gb": True,
    "--disable-log-stats": False,
    "--dtype": True,
    "--enable-chunked-prefill": False,
    "--enable-prefix-caching": False,
    "--enforce-eager": False,
    "--gpu-memory-utilization": True,
    "--kv-cache-dtype": True,
    "--limit-mm-per-prompt": True,
    "--max-model-len": True,
    "--max-num-batched-tokens": True,
    "--max-num-seqs": True,
    "--no-enable-chunked-prefill": False,
    "--no-enable-prefix-caching": False,
    "--pipeline-parallel-size": True,
    "--quantization": True,
    "--seed": True,
    "--swap-space": True,
}
"""Flags of `vllm serve` that decide about memory and speed alone -> whether a value follows. All
others are refused: vLLM reads code, plugins, files and addresses from them."""
_FLAG_VALUE = re.compile(r"[\w{\"\[][\w.,:{}\"\[\]= -]{0,200}")


def check_entry(name: str, entry: object, group: str) -> None:
    """Raise ValueError for an entry of `group` (rewards, heldout) without a scorer, with an unknown
    key, with a weight that is no number, or for an unknown modality."""
    if not isinstance(entry, Mapping) or "scorer" not in entry:
        raise ValueError(
            f"Reward `{name}` has no `scorer`: write {name}: {{scorer: {{_target_: "
            f"reward_models.<file>.<Class>}}}}."
        )
    for key in entry:
        if key not in _KEYS[group]:
            raise ValueError(
                f"Reward `{name}` has the unknown key `{key}`; known: {', '.join(_KEYS[group])}."
            )
    weight = entry.get("weight", 1.0)
    if type(weight) not in (int, float) or not math.isfinite(weight):
        raise ValueError(
            f"Weight of reward `{name}` is {weight!r}: give a finite number (0 = only logged, "
            "negative = minimised)."
        )

    asked = entry.get("for")
    if asked is not None and (
        isinstance(asked, str) or not asked or any(each not in MODALITIES for each in asked)
    ):
        raise ValueError(
            f"reward.rewards.{name}.for = {asked}: give a list of {' and '.join(MODALITIES)}, or "
            "leave it out (the reward moves all that is trained)."
        )


def placed_scorers(
    reward: Mapping[str, object], at: str = "inline thread process managed"
) -> Iterator[_Scorer]:
    """Yield (dotted key, name, YAML node) of every scorer of the group `reward` whose placement is
    among the words `at`. An entry's own placement comes before the group's. Raises as
    `check_entry`."""
    for group in _KEYS:
        entries = reward.get(group) or {}
        if not isinstance(entries, Mapping):
            raise ValueError(
                f"reward.{group} = {entries!a:.80}: write NAME: {{scorer: {{_target_: ...}}}}."
            )
        for name, entry in entries.items():
            check_entry(name, entry, group)
            if (entry.get("placement") or reward.get("placement", "thread")) in at.split():
                yield f"reward.{group}.{name}.scorer", name, entry["scorer"]


def needs_sound(scorer: object) -> bool:
    """Return whether a scorer, or the YAML node of one, declares `hears`. A node says so by its
    class, or by a key of that name for a scorer elsewhere (`RemoteScorer`)."""
    if not isinstance(scorer, Mapping):
        return bool(getattr(scorer, "hears", False))
    if "hears" in scorer:
        return bool(scorer["hears"])
    from hydra.utils import get_object

    try:
        return inspect.getattr_static(get_object(scorer["_target_"]), "hears", False) is True
    except Exception:  # whatever its module raises: said where the scorer is built
        return False


def scorers_of_sound(reward: Mapping[str, object]) -> list[str]:
    """Return the dotted keys of the scorers of the group `reward` that need sound, wherever they
    are placed."""
    everywhere = placed_scorers(reward, " ".join(PLACEMENTS))
    return [key for key, _, node in everywhere if needs_sound(node)]


def gpus_of(node: Mapping[str, Any]) -> int:
    """Return the GPUs that a scorer takes in a process of its own, from its YAML node.

    A judge takes those of its server, a scorer with a `device` one, and others run on processors.

    Example:
        >>> judge, scorer, rule = {"url": None, "serve": {"gpus": 2}}, {"device": "auto"}, {}
        >>> [gpus_of(node) for node in (judge, scorer, rule)]
        [2, 1, 0]
    """
    return int((node.get("serve") or {}).get("gpus", 1)) if "url" in node else int("device" in node)


def managed_gpus(reward: Mapping[str, object]) -> dict[str, int]:
    """Return reward -> GPUs of every reward of the group `reward` that is placed managed."""
    return {name: gpus_of(node) for _, name, node in placed_scorers(reward, "managed")}


def flag_problems(args: object) -> Iterator[str]:
    """Yield what is wrong with `args`, further words for `vllm serve`.

    >>> list(flag_problems(["--max-model-len", 4096, "--dtype=half"]))
    []
    >>> list(flag_problems(["--trust-remote-code"]))[0][:37]
    '--trust-remote-code is refused; allow'
    """
    if not isinstance(args, Sequence) or isinstance(args, str):
        yield "is no list of words"
        return
    if not all(isinstance(item, (str, int, float)) for item in args):
        yield "holds more than words and numbers"
        return
    words = iter(list(map(str, args)))
    for word in words:
        flag, is_pair, value = word.partition("=")
        if flag not in SERVER_FLAGS:
            yield f"{word[:80]} is refused; allowed are {', '.join(SERVER_FLAGS)}"
            return
        if not SERVER_FLAGS[flag]:
            if is_pair:
                yield f"{flag} takes no value"
        elif not _FLAG_VALUE.fullmatch(value if is_pair else next(words, "")):
            yield f"{flag} lacks a value, or its value is no plain word"


def scorers_and_statistics(
    reward: Mapping[str, object], callbacks: Mapping[str, object]
) -> Iterator[_Scorer]:
    """Yield (dotted key, description, YAML node) of every scorer built here, and of every statistic
    of the evaluation."""
    for key, name, node in placed_scorers(reward):
        yield key, f"reward {name}", node
    evaluation: Any = callbacks.get("evaluation") or {}
    for index, node in enumerate(evaluation.get("statistics") or ()):
        yield (
            f"callbacks.evaluation.statistics.{index}",
            f"statistic {node['_target_'].rpartition('.')[2]}",
            node,
        )


def require_weights(
    reward: Mapping[str, object], callbacks: Mapping[str, object] | None = None
) -> None:
    """Check that the weights of scorers and statistics are on this machine, without importing torch
    or a scorer.

    Args:
        reward: group `reward` of a checked configuration.
        callbacks: group `callbacks` of the same configuration; None = no callbacks.

    Raises:
        ValueError: weights are missing. The message says which, and how to get them.
    """
    problems = []
    for key, what, node in scorers_and_statistics(reward, callbacks or {}):
        reference = node.get("reference")
        if reference is not None and not Path(reference).exists():
            problems.append(
                f"{key}.reference = {reference}: there is no such file or folder; name another, or "
                f"set {key}.reference=null."
            )
        published = WEIGHTS.get(node["_target_"], {}) if node.get("build", "real") == "real" else {}
        for argument, source in published.items():
            value = node.get(argument)
            if (remedy := download_remedy(value, f"{key}.{argument}", source)) is not None:
                problems.append(
                    f"{key}.{argument} = {value or 'null'}: the weights of {what} are not here; "
                    f"{remedy}. "
                    "hardware.build=tiny tries everything else with small random weights."
                )
    if problems:
        raise ValueError("\n".join(problems))


def download_remedy(value: str | None, key: str, source: str) -> str | None:
    """Return how to get the weights at `value` (a path, a hub id, or None); None if they are
    here."""
    if value is None:
        return f"download them (`{source}`) and set {key}=FILE"
    if Path(value).exists():
        return None
    if not _HUB_ID.fullmatch(value):
        return f"there is no such file or directory (published: `{source}`)"
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        snapshot_download(
            value, local_files_only=True, allow_patterns=files_read(key.rpartition(".")[2])
        )
    except LocalEntryNotFoundError:
        where = f"into {constants.HF_HUB_CACHE}; HF_HOME moves it"
        command = f"`make fetch` with the EXP, HW and ARGS of this run, or `hf download {value}`"
        return f"download them with {command} ({where}), or set {key}=DIRECTORY"
    return None


def unscorable_prompts(
    reward: Mapping[str, object],
    prompts: Iterable[tuple[str, Prompt]],
    callbacks: Mapping[str, object] | None = None,
    evaluated: Iterable[tuple[str, Prompt]] = (),
) -> list[str]:
    """Return a message for each prompt that a scorer or a statistic could never score (the first
    twenty). Imports their modules.

    Args:
        reward: group `reward` of a checked configuration.
        prompts: (place of the prompt, prompt).
        callbacks: group `callbacks` of the same configuration, for the evaluation's statistics.
        evaluated: prompts of the evaluation, as `prompts`.

    Raises:
        ValueError: a scorer cannot be imported.
    """
    from hydra.utils import get_object

    every, few, problems = list(prompts), list(evaluated), list[str]()
    for key, what, node in scorers_and_statistics(reward, callbacks or {}):
        asked = few if key.startswith("callbacks.") else every
        try:
            check = inspect.getattr_static(get_object(node["_target_"]), "check_prompts", None)
        except Exception as error:  # whatever its module raises while it is imported
            raise ValueError(
                f"{what}: {' '.join(str(error).split())} If the module is yours: "
                "PYTHONPATH=ITS_DIRECTORY."
            ) from error
        for where, prompt in asked if isinstance(check, staticmethod) else ():
            try:
                check.__func__([prompt])
            except ValueError as error:
                problems.append(f"{where}: {what} cannot score it: {error}")
    more = [f"... and {len(problems) - _MOST} more"] if len(problems) > _MOST else []
    return [*problems[:_MOST], *more]
