"""`make join RUN=outputs/<experiment>/<run>`: one more rollout for a running run, from this or any
other machine.

    digenrl join run=outputs/digits_flowgrpo/2026-01-01_12-00-00-0
    digenrl join run=COPY address=trainer-node:41234

`run` is the run's directory, or a copy of its config.yaml and access.json. Code, libraries and
configuration must be the run's. SIGTERM, SIGUSR1 or Ctrl-C: the rollout gives its tasks away and
leaves, exit code 0; a second one ends it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from pydantic import Field

from digenrl import config as configuration
from digenrl.cli.train import before_forks
from digenrl.cluster.access import ACCESS, Access
from digenrl.cluster.signals import StopSignals, ignore_closed_terminal
from digenrl.config.commands import to_continue
from digenrl.config.help import Arguments, RunDirectory, own_command
from digenrl.launchers.reaching import read_access
from digenrl.record.run_dir import SUMMARY

TOKEN = "DIGENRL_RUN_TOKEN"


class JoinKeys(Arguments):
    """Keys of the command line."""

    run: RunDirectory
    """Directory of the running run, or of a copy of its config.yaml and access.json."""
    address: str | None = None
    """HOST:PORT of the run's control store. null: taken from access.json."""
    device: int = Field(0, ge=0)
    """Index of the GPU to use, among the GPUs visible to this process."""


class Failed(RuntimeError):
    """The rollout ended before the run did."""


def join_as_rollout(request: JoinKeys, words: Sequence[str], signals: StopSignals) -> str:
    """Be a rollout until the run ends or this process is asked to leave. Return what happened, in
    words.

    Raises:
        ConfigError, ValueError, OSError: this process cannot join.
        Failed: this process joined, and ended before the run did.
    """
    access = _resolve_access(request)
    composed = configuration.load(words, stored=request.run)
    before_forks()
    from digenrl import devices, run  # torch loads here
    from digenrl.cli.extensions import choose_advisor
    from digenrl.cluster.launcher import check_open_files
    from digenrl.cluster.store import StoreLost
    from digenrl.launchers import joining
    from digenrl.launchers.agreement import facts_of
    from digenrl.settle import begins_with

    settings = composed.settings
    trainers, rollouts = begins_with(settings)
    asked = joining.JoinRequest(access, settings, composed.run_dir, request.device)
    joining.check_agreement(asked, facts_of(settings))
    devices.check_gpus(
        settings,
        {trainers + rollouts - 1: request.device},
        request.device + 1,
        devices.usable_gpus(),
    )
    check_open_files(trainers + rollouts + 1)
    advice = choose_advisor().advise_ranks(composed, trainers, rollouts)
    print(
        f"joins the run at {asked.place}; Ctrl-C lets this rollout leave",
        file=sys.stderr,
        flush=True,
    )
    try:
        outcome = joining.join_run(asked, partial(run.fit_rank, settings, None, advice), signals)
    except (StoreLost, OSError) as error:
        raise Failed(f"the run at {asked.place} has ended ({error}).") from error
    if outcome.status == "failed":
        raise Failed(str(outcome.cause))
    return "the run is complete" if outcome.status == "completed" else "left the run, which goes on"


def _resolve_access(request: JoinKeys) -> Access:
    """Return how to reach the run: its access.json, changed by `address` and by the environment's
    token.

    Raises:
        ValueError: the run is not running, or `address` is malformed.
    """
    try:
        access = read_access(request.run)
    except FileNotFoundError:
        raise ValueError(f"{request.run}: {_why_closed(request.run)}") from None
    if token := os.environ.get(TOKEN):
        access = replace(access, token=token)
    if request.address is None:
        return access
    host, colon, port = request.address.rpartition(":")
    if not (host and colon and port.isdigit()):
        raise ValueError(
            f"address = {request.address}: give HOST:PORT, as access.json in the run's directory "
            "has them."
        )
    return replace(access, host=host.strip("[]"), port=int(port))


def _why_closed(run: Path) -> str:
    """Return why no process can join the run in this directory, and what to do."""
    if (run / SUMMARY).is_file():
        return f"this run has ended; continue it first, then join: {to_continue(run, given={})}"
    return (
        f"no run is running here: {ACCESS} is missing, which lies in the directory of every "
        "running run; start it, or "
        f"copy the file (mode 600) beside config.yaml from the machine where it runs."
    )


def main(arguments: Sequence[str]) -> int:
    """Run the command and return the exit code.

    Exit code 0: the run is complete, or this rollout left because it was asked to. Exit code 1: the
    rollout ended before the run did. Exit code 2: the rollout could not join.
    """
    ignore_closed_terminal()
    with StopSignals() as signals:

        def run_request(request: JoinKeys, words: list[str]) -> None:
            print(join_as_rollout(request, words, signals), file=sys.stderr)
            print(request.run)

        return own_command(JoinKeys, __doc__, arguments, run_request, others=True, failures=Failed)
