"""All that a run lacks on this machine, said at once: GPUs first, then memory, weights and
packages, and the command that goes on."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from digenrl import devices
from digenrl.advisor import Advisor
from digenrl.config import Composed
from digenrl.config.commands import shell_command
from digenrl.config.settings import Settings
from digenrl.rewards.needs import download_remedy, require_weights, unscorable_prompts
from digenrl.settle import allocated_ranks, settle_run

_FETCH = "`make fetch` with the EXP, HW and ARGS of this run"
"""Words of messages that do not know the command line."""
_NO_MACHINE = re.compile(r"^(?P<needs>.* of .* GiB \(90% of [^)]*\)): set .*", re.DOTALL)
"""What a rank needs, and the split that would fit if this machine had more processors."""
_PLACES = ("hardware=", "allocation.", "schedule", "parallel.", "max_rl_steps=", "model.quantize=")
"""Beginnings of words that mean nothing to a tiny run on a processor."""


@dataclass(frozen=True)
class Need:
    """One requirement of a run, with the result of its check."""

    subject: str
    text: str
    missing: bool


def find_needs(composed: Composed, advisor: Advisor, local: bool = True) -> Iterator[Need]:
    """Yield what the run of a new configuration needs, GPUs first. Nothing is built.

    Args:
        local: whether this machine starts the ranks.
    """
    settings = composed.settings
    real_places = local and settings.launch == "local" and not settings.hardware.emulate
    if real_places:
        yield from _needs_of_check(
            "GPUs",
            lambda: devices.check_own_gpus(settings, sum(allocated_ranks(settings))),
            "the ranks have what they ask for",
        )
    yield from _needs_of_check("memory", lambda: settle_run(composed, advisor), "every rank fits")
    if settings.hardware.emulate:
        return
    yield _model_need(settings)
    weights = partial(require_weights, settings.node_at("reward"), settings.callbacks)
    yield from _needs_of_check("rewards", weights, "their weights are here")
    scorers = partial(unscorable_prompts, settings.node_at("reward"), ())
    yield from _needs_of_check("scorers", scorers, "their packages are here")


def explain_refusal(composed: Composed, advisor: Advisor, first: Exception, local: bool) -> str:
    """Return what a run that cannot start lacks, and the command that goes on.

    Args:
        first: the error at which the run failed. If no missing need explains this error, its text
            alone is returned.
    """
    if composed.resumed:
        return str(first)
    found = [need for need in find_needs(composed, advisor, local) if need.missing]
    if not _explains_failure(found, first):
        return str(first)
    hardware = composed.settings.hardware
    on_processors = hardware.build == "real" and all(
        pool.gpu == "cpu" for pool in hardware.pools.values()
    )
    lines = [f"  - {need.subject}: {_need_text(need, composed, on_processors)}" for need in found]
    too_large = on_processors and any(need.subject in ("memory", "model") for need in found)
    if too_large:
        lines.insert(0, f"  - GPUs: {_profile_needed(composed)}")
    count = "1 thing is" if len(lines) == 1 else f"{len(lines)} things are"
    head = f"{count} missing here for this run; nothing was started or written:"
    return "\n".join([head, *lines, *_go_on(composed, found, too_large)])


def _explains_failure(found: Sequence[Need], first: Exception) -> bool:
    """Return whether one of the missing things is why a run failed."""
    cause = str(first)
    return any(need.text in cause or cause in need.text for need in found) or (
        "is not on this machine" in cause and any(need.subject == "model" for need in found)
    )


def _model_need(settings: Settings) -> Need:
    model = settings.model
    real = model.get("build", "real") == "real"
    named = model.path if real and model.path != "random" else None
    remedy = named and "/" in named and download_remedy(named, "model.path", named)
    if remedy:
        licence = f"https://huggingface.co/{named}"
        known = f"if it is gated, accept its licence at {licence} and run `hf auth login` once"
        return Need("model", f"{named} is not here: {remedy}; {known}.", True)
    return Need("model", str(named or "nothing to download"), False)


def _needs_of_check(subject: str, check: Callable[[], object], fine: str) -> Iterator[Need]:
    """Yield each line of the check's ValueError, or `fine`."""
    try:
        check()
    except (ValueError, OSError) as error:
        yield from (Need(subject, line, True) for line in str(error).splitlines())
    else:
        yield Need(subject, fine, False)


def _need_text(need: Need, composed: Composed, on_processors: bool) -> str:
    text = need.text
    if need.subject == "memory" and on_processors and (found := _NO_MACHINE.match(text)):
        text = f"{found['needs']}."
    return name_commands(text, composed.overrides)


def name_commands(text: str, words: Sequence[str]) -> str:
    """Return a message with `make fetch` and `make plan` as the caller of this process has them."""
    fetch, plan = shell_command("fetch", words), shell_command("plan", ())
    return text.replace(_FETCH, f"`{fetch}`").replace("`make plan`", f"`{plan}`")


def _profile_needed(composed: Composed) -> str:
    here = devices.usable_gpus()
    name = composed.choices.get("hardware", "cpu")
    profile = "HW=NAME" if os.environ.get("DIGENRL_CALLER") == "make" else "hardware=NAME"
    listed = f"{profile} (`digenrl list hardware` names them)"
    if here:
        return (
            f"hardware={name} describes processors, and this machine has {len(here)} x "
            f"{here[0].name}: name the profile of your GPUs, {listed}."
        )
    return (
        f"this machine has none, hardware={name} describes processors, and the model is for GPUs: "
        f"start the run where they are, with their profile, {listed}."
    )


def _go_on(composed: Composed, found: Sequence[Need], too_large: bool) -> Iterator[str]:
    """Yield what can be done: elsewhere, and as the last line here.

    Args:
        too_large: whether the model is too large for processors, and no profile names GPUs.
    """
    given = list(composed.overrides)
    chosen = [word for word in given if word.startswith(("experiment=", "hydra.searchpath="))]
    no_gpus = any(need.subject == "GPUs" for need in found) or too_large
    check = shell_command("check", given, dialect="digenrl")
    if not no_gpus:
        yield f"All that this machine lacks: {check}"
        if any(need.subject in ("model", "rewards") for need in found):
            yield f"What goes on: {shell_command('fetch', given)}"
        return
    profile = [word for word in given if word.startswith("hardware=")]
    profile = profile if profile and not too_large else ["hardware=node_8xh100"]
    yield f"What it costs there, without a GPU: {shell_command('plan', [*chosen, *profile])}"
    yield f"All that a machine lacks, on that machine: {check}"
    kept = [word for word in given if not word.lstrip("+~").startswith(_PLACES)]
    tiny = shell_command("train", [*kept, "hardware=cpu_tiny", "max_rl_steps=2"])
    yield f"What goes on here, with a small random model: {tiny}"
