"""The options of digenrl.extensions.methods in messages about a configuration."""

from __future__ import annotations

import pytest

from digenrl import config


def test_the_sde_that_has_a_key_is_named() -> None:
    with pytest.raises(config.ConfigError) as caught:
        config.load(["algorithm.sde.eta=0.3"])
    (problem,) = caught.value.problems
    for part in ("algorithm.sde.eta = 0.3", "nothing sets it here (algorithm/sde=dance", "adds it"):
        assert part in problem
