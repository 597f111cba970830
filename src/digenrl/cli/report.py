"""`make report RUN=outputs/<experiment>/<run>`: rebuild a run's summary, trace, pictures and report
from its files.

    digenrl report run=outputs/digits_flowgrpo/2026-01-01_12-00-00-0

Works on a finished, crashed or running run. The last line of standard output is the report's path.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from digenrl.config.help import Arguments, RunDirectory, own_command
from digenrl.record.run_dir import REPORT, require_own
from digenrl.report.build import rebuild_report
from digenrl.report.tables import final_table


class ReportKeys(Arguments):
    """Keys of the command line."""

    run: RunDirectory
    """Run to report on. It may be finished, crashed or still running."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return the exit code: 0, or 2 if the arguments or the directory do not
    fit."""

    def run_request(request: ReportKeys, _: list[str]) -> None:
        if request.run.is_dir():  # otherwise `rebuild` says what to name
            require_own(request.run)
        Console(stderr=True).print(final_table(rebuild_report(request.run)))
        print(request.run / REPORT)

    return own_command(ReportKeys, __doc__, arguments, run_request)
