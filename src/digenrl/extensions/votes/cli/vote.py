"""`digenrl vote RUN`: where people judge the samples of a run with reward=votes.

    digenrl vote outputs/scenes_flowgrpo/2026-01-01_12-00-00-0

Prints the address of the page, with its token, as the only line of standard output, and opens it in
a browser where there is a screen. The address holds for this machine and until the run starts
again. From another machine: `ssh -L PORT:127.0.0.1:PORT HOST`, then the same address there.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

import httpx

from digenrl.cluster.access import ACCESS
from digenrl.config.commands import to_continue
from digenrl.config.help import Arguments, RunDirectory, own_command
from digenrl.extensions.votes.ballots import FOLDER, votes_wanted
from digenrl.launchers.reaching import read_access
from digenrl.record.run_dir import own_folder, printable_text, require_own

_TOKEN = re.compile(r"[\w-]{20,64}")
_OPENS = """<!DOCTYPE html><meta charset="utf-8"><meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0;url={address}"><a href="{address}">vote</a>
"""


class VoteKeys(Arguments):
    """Keys of the command line."""

    run: RunDirectory
    """Running run whose samples are to be judged."""
    open: bool = True
    """Whether the page is opened in a browser where there is a screen."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return the exit code: 0, or 2 if no page is served for the run."""

    def run_request(request: VoteKeys, _: list[str]) -> None:
        require_own(request.run)
        a_step, steps = votes_wanted(request.run)
        if not a_step:
            raise ValueError(
                f"{request.run}: is no run whose rewards ask people; train with reward=votes."
            )
        host, address = page_address(request.run)
        print(f"{a_step} votes an RL step, {a_step * steps} in all", file=sys.stderr)
        if host != socket.gethostname():
            port = httpx.URL(address).port
            print(printable_text(f"first: ssh -L {port}:127.0.0.1:{port} {host}"), file=sys.stderr)
        print(address, flush=True)
        here = host == socket.gethostname() and request.open
        if here and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
            open_page(request.run / FOLDER, address)

    return own_command(VoteKeys, __doc__, arguments, run_request)


def page_address(run: Path) -> tuple[str, str]:
    """Return (host that serves a run's page, address of the page there, with the token).

    Raises:
        ValueError: the run serves none.
    """
    try:
        access = read_access(run / FOLDER)
        address = f"http://127.0.0.1:{int(access.port)}/"
        if not _TOKEN.fullmatch(access.token):
            raise ValueError(f"{run / FOLDER / ACCESS} has no token of a page.")
        asked = {"Authorization": f"Bearer {access.token}"}
        if access.host == socket.gethostname():
            answer = httpx.get(f"{address}state", headers=asked, trust_env=False, timeout=5.0)
            answer.raise_for_status()
    except (OSError, httpx.HTTPError) as error:
        raise ValueError(
            f"{run}: no page is served, so this run is not running now, or has not begun to draw; "
            f"to continue it: {to_continue(run)}"
        ) from error
    return access.host, f"{address}#{access.token}"


def open_page(folder: Path, address: str) -> None:
    """Open the page by a file that only this user can read: other users see the words of a
    browser's command line, and the address has the token."""
    file = own_folder(folder) / "open.html"
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as target:
        target.write(_OPENS.format(address=address))
    webbrowser.open(file.absolute().as_uri())
