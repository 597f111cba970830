"""`make tiny`: build the tiny model of every family (or of those named) and print where each one
is.

digenrl tiny [FAMILY ...]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from digenrl.config.help import help_page, show, wants_help


def main(families: Sequence[str]) -> int:
    """Build what is missing, and print name and directory of each family. Exit code 2: there is no
    such family."""
    if wants_help(families):
        show(help_page(__doc__, "command_help", __doc__))
        return 0
    from digenrl import facts
    from digenrl.extensions.tiny.builds import ensure

    try:
        for family in families or [
            family for family, known in facts.families().items() if known.tiny
        ]:
            print(f"{family}\t{ensure(family)}")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0
