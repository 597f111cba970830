"""`make tiny`: build the tiny model of every family (or of those named) and print where each one is.

python -m digenrl.cli.tiny [family ...]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(families: Sequence[str]) -> None:
    """Build what is missing; one line a family: name, directory."""
    from digenrl.models import tiny_builds

    for family in families or list(tiny_builds.BUILDERS):
        print(f"{family}\t{tiny_builds.ensure(family)}")


if __name__ == "__main__":
    main(sys.argv[1:])
