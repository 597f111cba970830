"""`make report RUN=outputs/<experiment>/<run>`: rebuild a run's summary, trace, pictures and report from its files.

    python -m digenrl.cli.report run=outputs/digits_flowgrpo/2026-01-01_12-00-00-0

Works on a finished, crashed or running run. The last line of standard output is the report's path.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence

from rich.console import Console

from digenrl.display import final_table
from digenrl.record.run_dir import REPORT
from digenrl.report.build import rebuild

USAGE = "usage: python -m digenrl.cli.report run=<run directory>"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 when the arguments or the directory do not fit."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if list(arguments) in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    values = dict(argument.partition("=")[::2] for argument in arguments)
    if set(values) != {"run"} or not values["run"]:
        unknown = next((key for key in values if key != "run"), None)
        hint = " Did you mean run?" if unknown and difflib.get_close_matches(unknown, ["run"]) else ""
        print(f"got {' '.join(arguments) or 'no argument'}.{hint} {USAGE}", file=sys.stderr)
        return 2
    try:
        summary = rebuild(values["run"])
    except OSError as error:
        print(error, file=sys.stderr)
        return 2
    Console(stderr=True).print(final_table(summary))
    print(f"{values['run'].rstrip('/')}/{REPORT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
