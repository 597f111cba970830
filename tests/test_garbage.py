"""Where the garbage collector is off, and what it finds afterwards."""

from __future__ import annotations

import gc

import pytest

from digenrl.garbage import no_garbage


@pytest.fixture(autouse=True)
def as_before():
    frozen = gc.get_freeze_count()
    yield
    gc.enable()
    if frozen:
        gc.freeze()
    else:
        gc.unfreeze()


def test_it_is_off_inside_and_on_afterwards_even_after_an_error() -> None:
    with no_garbage():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), no_garbage():
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    with no_garbage():
        pass
    assert not gc.isenabled(), "it was off before"


@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_left_is_old_and_frozen_objects_stay_frozen(frozen: bool) -> None:
    (gc.freeze if frozen else gc.unfreeze)()
    with no_garbage():
        left: list[list[int]] = [[] for _ in range(50_000)]
    assert len(gc.get_objects(generation=0)) < len(left) / 2
    assert (gc.get_freeze_count() > len(left)) == frozen
