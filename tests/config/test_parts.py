"""Small parts of the configuration by themselves: quoting, words of a schema, what two ranks disagree
about, removed keys, and relations at their limits. Nothing is composed."""

from __future__ import annotations

from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from digenrl.config import relations, stored, validation
from digenrl.config.compose import quoted
from digenrl.config.removed import REMOVED, reason

PARSER = OverridesParser.create()


@given(st.text("\\'\" ,[]{}()a=:$*~", max_size=8).map(lambda text: text + "."))
def test_what_is_quoted_is_read_as_it_was(text: str) -> None:
    assert PARSER.parse_override(f"key={quoted(text)}").value() == text


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"type": "integer", "minimum": 1}, "whole number >= 1"),
        ({"type": "integer"}, "whole number"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "number > 0 and <= 0.5"),
        ({"type": "number", "exclusiveMaximum": 2.0}, "number < 2"),
        ({"type": "array", "items": {"type": "string"}}, "list of (text)"),
        ({"enum": ["a", "b"]}, "a | b"),
        (
            {"anyOf": [{"enum": ["a", "b"]}, {"const": "c"}, {"type": "null"}]},
            "a or b or c or null",
        ),
        ({"type": "boolean"}, "true or false"),
        ({"type": "object"}, "a group of keys"),
        ({"phrase": "a colour", "type": "string"}, "a colour"),
    ],
)
def test_a_schema_in_words(node: dict[str, Any], words: str) -> None:
    assert validation._phrase(node) == words


@pytest.mark.parametrize(
    ("value", "kind", "shown"),
    [
        (None, "null", "null"),
        (True, "true/false", "true"),
        ("x", "text", "x"),
        ([1], "a list", "[1]"),
        ({"a": 1}, "a group of keys", "{'a': 1}"),
        (3, "a whole number", "3"),
        (0.5, "a number", "0.5"),
        ("x" * 200, "text", "x" * 200),
        ("x" * 201, "text", "x" * 200 + "..."),
    ],
)
def test_a_value_in_words(value: Any, kind: str, shown: str) -> None:
    assert (validation._kind_of(value), validation.shown(value)) == (kind, shown)


def test_two_ranks_disagree_in_what_differs_and_in_what_one_of_them_lacks() -> None:
    run, own = {"seed": 1, "b": 2, "same": 3, "c": None}, {"seed": 4, "same": 3, "a": 5, "c": None}
    found = stored.disagreements(run, own)
    assert [text.split(" = ")[0] for text in found] == ["a", "b", "seed"]
    assert found[2] == "seed = 4 (the run's: 1)"
    assert stored.disagreements(run, dict(run)) == []


@pytest.mark.parametrize("old", sorted(REMOVED))
def test_a_removed_key_says_why_with_any_name_and_for_what_is_below_it(old: str) -> None:
    key, _, value = old.partition("=")
    named = key.replace("*", "mine")
    if value:
        assert reason(named, value) == REMOVED[old]
        assert reason(named, "another") == REMOVED.get(key)
    else:
        assert reason(named) == reason(f"{named}.deeper", 3) == REMOVED[old]
    assert reason(f"x{named}", value or None) is None


def _said(rule: Any, **values: Any) -> list[str]:
    """What a rule says of keys, of which `__` is a dot."""
    given_ = {name.replace("__", "."): value for name, value in values.items()}
    return list(rule(given_.__getitem__))


@pytest.mark.parametrize(
    ("sharding", "group", "trainers", "refused"),
    [
        ("hsdp", 2, 4, None),
        ("hsdp", 4, 4, None),
        ("auto", 1, 3, None),
        ("hsdp", 3, 4, "must divide allocation.trainers = 4; allowed: 1, 2, 4, or auto"),
        ("hsdp", 8, 4, "must divide"),
        ("hsdp", "auto", 4, None),
        ("hsdp", 3, "auto", None),
        ("fsdp", "auto", 4, None),
        ("fsdp", 2, 4, "only hsdp"),
    ],
)
def test_a_shard_group_divides_the_trainers(
    sharding: str, group: Any, trainers: Any, refused: str | None
) -> None:
    said = _said(
        relations._shard_group,
        parallel__sharding=sharding, parallel__shard_group=group, allocation__trainers=trainers,
    )  # fmt: skip
    assert len(said) == (refused is not None)
    assert refused is None or refused in said[0]


@pytest.mark.parametrize(
    ("pools", "trainers", "rollouts", "refused"),
    [
        ({"a": {}}, 1, 0, None),
        ({"a": {}}, 1, 1, "need 2 ranks, but the hardware profile has 1 (a: 1 (auto))"),
        ({"a": {"count": 3}}, 1, 2, None),
        ({"a": {"count": 3}}, 2, {"min": 1, "max": 2}, "need 4 ranks"),
        ({"a": {"count": 2}}, "auto", "auto", None),
        ({"a": {"count": 1}}, "auto", 1, "need 2 ranks"),
        ({"a": {"role": "trainer"}, "b": {"count": 2}}, 3, 0, None),
        (
            {"a": {"role": "rollout", "count": 2}, "b": {"count": 2}},
            3,
            1,
            "2 devices that may be trainers",
        ),
        ({"a": {"role": "trainer"}, "b": {"count": 2}}, 1, 2, None),
        ({"a": {"role": "trainer", "count": 2}, "b": {}}, 1, 2, "allowed: at most 1"),
    ],
)
def test_ranks_fit_the_devices_that_may_have_their_role(
    pools: dict[str, Any], trainers: Any, rollouts: Any, refused: str | None
) -> None:
    said = _said(
        relations._rank_counts,
        hardware__pools=pools, allocation__trainers=trainers, allocation__rollouts=rollouts,
    )  # fmt: skip
    assert len(said) == (refused is not None)
    assert refused is None or refused in said[0]


@pytest.mark.parametrize(
    ("kept", "trainers", "refused"),
    [
        ([0.5, 1], 2, False),
        ([0.5], 2, True),
        ([0.5, 1, 1], 2, True),
        (True, 2, False),
        ([1], "auto", False),
    ],
)
def test_each_trainer_has_its_recomputation(kept: Any, trainers: Any, refused: bool) -> None:
    said = _said(
        relations._recomputation,
        model__gradient_checkpointing=kept, allocation__trainers=trainers,
    )  # fmt: skip
    assert len(said) == refused


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, None),
        ({"schedule__claims": "shared", "schedule__tag": True}, None),
        ({"allocation__rollouts": 0, "schedule__tag": True}, None),
        ({"allocation__rollouts": {"min": 1, "max": 2}}, "none can join or leave"),
        ({"schedule__tag": True}, "none is left for a trainer"),
        ({"allocation__max_lost_rollouts": 0}, None),
        ({"allocation__max_lost_rollouts": 1}, "nobody takes over"),
    ],
)
def test_divided_claims_leave_no_task_to_others(
    changes: dict[str, Any], refused: str | None
) -> None:
    plain: dict[str, Any] = {
        "schedule__claims": "split", "allocation__rollouts": 2, "schedule__tag": False,
        "allocation__max_lost_rollouts": "auto",
    }  # fmt: skip
    said = _said(relations._split_claims, **(plain | changes))
    assert len(said) == (refused is not None)
    assert refused is None or refused in said[0]
