"""Settings with which others saw a model break (`traps` of the families' facts)."""

from __future__ import annotations

from collections.abc import Iterator

from digenrl.config.settings import Settings
from digenrl.facts import of_target


def known_traps(settings: Settings) -> Iterator[str]:
    """Yield a warning for each setting of a run with which others saw its model break."""
    facts = of_target(settings.model.target)
    for trap in () if facts is None else facts.traps:
        try:
            found = settings.node_at(trap["key"])
        except KeyError:  # the algorithm has no such argument
            continue
        numbers = [found] if isinstance(found, int | float) else found
        largest = max((each for each in numbers or () if isinstance(each, int | float)), default=0)
        if largest >= trap["at_least"]:
            yield f"{trap['key']} = {largest:g}: {trap['seen']}; {trap['do']}."
