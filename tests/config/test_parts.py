"""Small parts of the configuration by themselves: quoting, words of a schema, what two ranks disagree
about, removed keys, and relations at their limits. Nothing is composed."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from PIL import Image
from pydantic import TypeAdapter

from digenrl.config import (
    checks,
    compose,
    copies,
    errors,
    output_dir,
    relations,
    shipped,
    stored,
    targets,
    validation,
    value_types,
)
from digenrl.config import help as help_
from digenrl.config.relations import batches, ranks
from digenrl.config.removed import REMOVED, removal_reason
from digenrl.config.shipped import config_directory
from digenrl.config.words import quote_value
from digenrl.record.redact import MASK

PARSER = OverridesParser.create()


@given(st.text("\\'\" ,[]{}()a=:$*~", max_size=8).map(lambda text: text + "."))
def test_what_is_quoted_is_read_as_it_was(text: str) -> None:
    assert PARSER.parse_override(f"key={quote_value(text)}").value() == text


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
    assert validation._allowed_phrase(node) == words


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
    assert (validation.kind_of(value), validation.show_value(value)) == (kind, shown)


def test_two_ranks_disagree_in_what_differs_and_in_what_one_of_them_lacks() -> None:
    run, own = {"seed": 1, "b": 2, "same": 3, "c": None}, {"seed": 4, "same": 3, "a": 5, "c": None}
    found = stored.find_disagreements(run, own)
    assert [text.split(" = ")[0] for text in found] == ["a", "b", "seed"]
    assert found[2] == "seed = 4 (the run's: 1)"
    assert stored.find_disagreements(run, dict(run)) == []


@pytest.mark.parametrize("old", sorted(REMOVED))
def test_a_removed_key_says_why_with_any_name_and_for_what_is_below_it(old: str) -> None:
    key, _, value = old.partition("=")
    named = key.replace("*", "mine")
    if value:
        assert removal_reason(named, value) == REMOVED[old]
        assert removal_reason(named, "another") == REMOVED.get(key)
    else:
        assert removal_reason(named) == removal_reason(f"{named}.deeper", 3) == REMOVED[old]
    assert removal_reason(f"x{named}", value or None) is None


def _said(rule: Any, **values: Any) -> list[str]:
    """What a rule says of keys, of which `__` is a dot."""
    given_ = {name.replace("__", "."): value for name, value in values.items()}
    return list(rule(given_.__getitem__))


def _expect(said: list[str], refused: str | None) -> None:
    """Assert that one message holds the text `refused`; None: that there is none."""
    assert len(said) == (refused is not None)
    assert refused is None or refused in said[0]


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
        ranks._shard_group,
        parallel__sharding=sharding, parallel__shard_group=group, allocation__trainers=trainers,
    )  # fmt: skip
    _expect(said, refused)


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
        ranks._rank_counts,
        hardware__pools=pools, allocation__trainers=trainers, allocation__rollouts=rollouts,
    )  # fmt: skip
    _expect(said, refused)


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
        ranks._recomputation_entries,
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
    said = _said(ranks._split_claims, **(plain | changes))
    _expect(said, refused)


KNOWN = [
    "seed", "sampling.steps", "sampling.eval.steps", "sampling.height", "data.group_size",
    "data.prompts", "Model.LoRA.rank", "optimizer.lr", "reward.rewards.clip.weight", "a.b",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("sed", "seed"),
        ("sampling.stepz", "sampling.steps"),  # a child of its own parent
        ("data.groupsize", "data.group_size"),
        ("optimzer.lr", "optimizer.lr"),
        ("steps", "sampling.steps"),  # by its last part, the shortest path first
        ("optimizer.steps", "sampling.steps"),
        ("rank", "Model.LoRA.rank"),  # in any case of letters
        ("model.lora.rnk", "Model.LoRA.rank"),
        ("stepz", "sampling.steps"),
        ("eigh", "reward.rewards.clip.weight"),
        ("clip", "reward.rewards.clip.weight"),  # what contains it
        ("pts", "data.prompts"),
        ("sampling.weight", "sampling.height"),  # before `weight` elsewhere
        ("ab", "a.b"),
        ("a.c", None),
        ("zz", None),
        ("zzz", None),
    ],
)
def test_the_nearest_name_is_looked_for_among_siblings_by_the_last_part_and_as_a_whole(
    name: str, found: str | None
) -> None:
    assert errors.nearest_name(name, KNOWN) == errors.nearest_name(name, reversed(KNOWN)) == found


def test_of_those_that_contain_a_name_the_shortest_is_the_nearest_and_two_letters_are_too_few() -> (
    None
):
    known = ["one.long.abcdefgh", "abcdefghi"]
    assert errors.nearest_name("cde", known) == "abcdefghi"
    assert errors.nearest_name("cd", known) is None


def test_problems_are_said_once_each_and_counted() -> None:
    one, two = errors.ConfigError(["a", "a"]), errors.ConfigError(["b", "a", "b"])
    assert str(one) == "1 error in the configuration; nothing was started or written:\n  - a"
    assert str(two).startswith("2 errors in the configuration; nothing was started or written:\n")
    assert (one.problems, two.problems) == (("a",), ("b", "a"))
    assert (errors.list_names(["b", "a"]), errors.list_names([])) == ("a, b", "none")


def test_directories_of_ones_own_become_a_key_of_hydra() -> None:
    words = ["--config-dir", "x y", "a=1", "-cd=z", "--config-dirs=q", "--config-dir"]
    key = "hydra.searchpath"
    found = compose.with_search_path(words)
    assert found == [f"{key}=['x y']", "a=1", f"{key}=['z']", "--config-dirs=q", "--config-dir"]
    given_ = [f"{key}=['~/a','file:///b c']", "seed=1", f"{key}=/d", f"{key}=[["]
    home = Path.home()
    assert list(compose.own_directories(given_)) == [home / "a", Path("/b c"), Path("/d")]


def test_an_option_that_is_not_there_names_the_nearest_and_all() -> None:
    def said(option: str, *options: str) -> str:
        return compose.unknown_option("reward", option, options)

    head, own = (
        "reward = clp: there is no such reward; ",
        "; your own are found with --config-dir DIR.",
    )
    assert said("clp", "ocr", "clip") == f"{head}nearest: clip. Available: clip, ocr{own}"
    assert said("clp") == f"{head}Available: none{own}"
    assert "nearest: aesthetic, static. " in said("TIC", "aesthetic", "static", "ocr")
    assert "nearest" not in said("ti", "aesthetic", "static"), "two letters are too few"


@pytest.mark.parametrize(
    ("key", "there"),
    [
        ("a", True), ("a.b", True), ("a.b[0]", True), ("a.b[1].c", True), ("a.b.1.c", True), ("x", True),
        ("a.b[2]", False), ("a.b[1].d", False), ("x.y", False), ("y", False), ("a.b.c", False),
    ],
)  # fmt: skip
def test_whether_a_key_is_there_at_any_depth(key: str, there: bool) -> None:
    assert targets.has_key({"a": {"b": [1, {"c": 2}]}, "x": None}, key) is there


def test_words_are_sorted_into_options_and_values_and_what_is_wrong_is_said() -> None:
    words = [
        "data.group_size=8", "+a.b=1", "reward=nope", "experiment=null", "seed=1,2", "~callbacks",
        "hydra/job_logging=disabled", "b=ä ö", "a=[ä", "api_key=[", "hydra.searchpath=[/absent]",
    ]  # fmt: skip
    found = compose.parse_words(words)
    assert [word.input_line for word in found.groups] == [
        "~callbacks",
        "hydra/job_logging=disabled",
    ]
    values = [(word.key_or_group, word.value()) for word in found.values]
    assert values == [("data.group_size", 8), ("a.b", 1), ("b", "ä ö")]
    assert found.own == ()
    starts = [
        "--config-dir /absent: is no directory",
        "reward = nope: there is no such reward; ",
        "experiment = null: there is no such experiment; ",
        "seed=1,2: several values need a sweep; add -m (make sweep).",
        "a=[ä: cannot be read as key=value (",
        f"api_key={MASK}: cannot be read as key=value (its value is not shown).",
    ]
    assert len(found.problems) == len(starts)
    for problem, start in zip(found.problems, starts, strict=True):
        assert problem.startswith(start)


def test_a_fresh_run_directory_counts_up_from_the_number_that_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def names(wanted: str, times: int) -> list[str]:
        return [
            output_dir._make_fresh(tmp_path / "new" / "runs" / wanted).name for _ in range(times)
        ]

    assert names("noon-3", 3) == ["noon-3", "noon-4", "noon-5"]
    assert names("plain", 3) == ["plain", "plain-1", "plain-2"]
    assert names("noon-4x", 2) == ["noon-4x", "noon-4x-1"]
    monkeypatch.setattr(output_dir, "_MAX_ATTEMPTS", 3)
    with pytest.raises(FileExistsError, match="every numbered name is taken"):
        names("plain", 1)
    assert names("more", 3) == ["more", "more-1", "more-2"]


def test_a_stored_configuration_is_masked_names_no_run_and_leaves_no_other_file(
    tmp_path: Path,
) -> None:
    config = OmegaConf.create({"resume": "outputs/x", "api_key": "secret", "seed": 3})
    for _ in range(2):
        output_dir.store_config(config, tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.name == "config.yaml"
    assert OmegaConf.load(path) == {"resume": None, "api_key": MASK, "seed": 3}


class Few(help_.Arguments):
    """Keys of a command."""

    steps: int = 3
    """Number of steps."""
    name: str
    """Name of the thing."""


def test_a_command_reads_its_own_keys_and_leaves_the_others() -> None:
    read = help_.read_arguments
    assert read(Few, ["name=x", "steps=4"]) == (Few(name="x", steps=4), [])
    assert read(Few, ["name=x", "seed=1", "a=b=c"], others=True) == (
        Few(name="x"),
        ["seed=1", "a=b=c"],
    )
    with pytest.raises(errors.ConfigError) as found:
        read(Few, ["step=4", "plain", "steps=x", "zzz=1"])
    assert found.value.problems[0] == "plain: settings are key=value; keys: name, steps."
    said = sorted(found.value.problems)
    assert said[0] == "name: missing; allowed: text (Name of the thing)."
    assert said[2] == "step = 4: no such key; nearest: steps."
    assert said[3].startswith("steps = x: ")
    assert said[4] == "zzz = 1: no such key; keys: name, steps."


def test_a_page_whose_reader_has_quit_ends_without_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stdout = os.fdopen(writing, "w")
    monkeypatch.setattr(sys, "stdout", stdout)
    help_.show_page("A page.")
    print("What comes later.", flush=True)
    stdout.close()


class Share(help_.Arguments):
    """A key of a command that is a fraction."""

    share: float
    """How much."""


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_fraction_of_a_command_is_finite_and_stays_as_it_was_given(value: str) -> None:
    with pytest.raises(errors.ConfigError, match=r"share = .*is not finite; allowed: number"):
        help_.read_arguments(Share, [f"share={value}"])
    own, _ = help_.read_arguments(Share, ["share=0.5"])
    with pytest.raises(ValueError, match="frozen"):
        own.share = 0.25  # type: ignore[misc]


def test_a_command_ends_by_what_happened(capsys: pytest.CaptureFixture[str]) -> None:
    done: list[Any] = []

    def command(words: list[str], error: Exception | None = None, **how: Any) -> int:
        def work(own: Few, rest: list[str]) -> None:
            done.append((own, rest))
            if error is not None:
                raise error

        return help_.own_command(Few, "A page.", words, work, **how)

    assert command(["name=x", "-cd", "d"], others=True) == 0
    assert done == [(Few(name="x"), ["hydra.searchpath=['d']"])]
    assert command(["nme=x"]) == 2
    for error in (ValueError("bad value"), OSError("bad file")):
        assert command(["name=x"], error) == 2
    assert command(["name=x"], KeyError("gone"), failures=(KeyError,)) == 1
    with pytest.raises(KeyError):
        command(["name=x"], KeyError("gone"))
    said = capsys.readouterr()
    assert all(text in said.err for text in ("nearest: name", "bad value", "bad file", "gone"))
    count = len(done)
    for word in ("-h", "--help"):
        assert command(["name=x", word]) == 0
    assert len(done) == count, "help does no work"
    assert capsys.readouterr().out.count("A page.") == 2


ONE_PLACE: dict[str, Any] = {"hardware__links": {}}
DDP = {**ONE_PLACE, "parallel__sharding": "ddp"}
JOINED = {"hardware__links": {"wan": {"between": ["a", "b"], "gb_s": 1.0}}}


@pytest.mark.parametrize(
    ("rule", "values", "refused"),
    [
        ("task_size", {"sampling__task_size": 2, "data__group_size": 4}, None),
        ("task_size", {"sampling__task_size": 4, "data__group_size": 4}, None),
        ("task_size", {"sampling__task_size": 3, "data__group_size": 4}, "allowed: auto, 1, 2, 4."),
        ("task_size", {"sampling__task_size": "auto", "data__group_size": 4}, None),
        ("same_noise", {"sampling__same_noise": True, "algorithm__sde__noise_level": 0}, "same picture"),
        ("same_noise", {"sampling__same_noise": True, "algorithm__sde__noise_level": 0.1}, None),
        ("same_noise", {"sampling__same_noise": False, "algorithm__sde__noise_level": 0}, None),
        ("trainer_precision", {"trainer__precision": "32-true"}, None),
        ("trainer_precision", {"trainer__precision": 32}, None),
        ("trainer_precision", {"trainer__precision": "bf16-mixed"}, "ratios leave 1"),
        ("async_rollouts", {"schedule__async_steps": 1, "allocation__rollouts": 0}, "nobody generates"),
        ("async_rollouts", {"schedule__async_steps": 1, "allocation__rollouts": 1}, None),
        ("async_rollouts", {"schedule__async_steps": 0, "allocation__rollouts": 0}, None),
        ("share_counts", {"schedule__shares": "equal", "allocation__trainers": 2}, None),
        ("share_counts", {"schedule__shares": [1, 0], "allocation__trainers": 2}, None),
        ("share_counts", {"schedule__shares": [1, 2], "allocation__trainers": "auto"}, None),
        ("share_counts", {"schedule__shares": [0, 0], "allocation__trainers": 2}, "must be above 0"),
        ("share_counts", {"schedule__shares": [1], "allocation__trainers": 2}, "has 1 entries"),
        ("sharded_trainers", {"parallel__sharding": "fsdp", "allocation__trainers": 1}, "nobody to share"),
        ("sharded_trainers", {"parallel__sharding": "hsdp", "allocation__trainers": 1}, "nobody to share"),
        ("sharded_trainers", {"parallel__sharding": "fsdp", "allocation__trainers": 2}, None),
        ("sharded_trainers", {"parallel__sharding": "ddp", "allocation__trainers": 1}, None),
        ("compressed_gradients", {**DDP, "parallel__compress": 0.4, "allocation__trainers": 2}, None),
        ("compressed_gradients", {**DDP, "parallel__compress": 0.5, "allocation__trainers": 2},
         "set it below 0.5, or to off."),
        ("compressed_gradients", {**DDP, "parallel__compress": 0.5, "allocation__trainers": "auto"}, None),
        ("compressed_gradients", {**DDP, "parallel__compress": "auto", "allocation__trainers": 1}, "nobody"),
        ("compressed_gradients", {**DDP, "parallel__compress": "off", "allocation__trainers": 1}, None),
        ("compressed_gradients",
         {**ONE_PLACE, "parallel__sharding": "hsdp", "parallel__compress": 0.1, "allocation__trainers": 2},
         "set parallel.sharding=ddp, or parallel.compress=off."),
        ("compressed_gradients",
         {**JOINED, "parallel__sharding": "hsdp", "parallel__compress": 0.1, "allocation__trainers": 2},
         "set parallel.sharding=ddp, or parallel.compress=off with all trainers in one place of hardware.links."),
        ("compressed_gradients",
         {**DDP, **JOINED, "parallel__compress": 0.5, "allocation__trainers": 2},
         "set it below 0.5, or to auto."),
        ("compressed_gradients",
         {**ONE_PLACE, "parallel__sharding": "hsdp", "parallel__compress": "auto", "allocation__trainers": 2}, None),
        ("batch_wide_statistics", {"algorithm__advantage": {"std": "batch"}, "schedule__gap": 0}, None),
        ("batch_wide_statistics", {"algorithm__advantage": {"std": "group"}, "schedule__gap": 1}, None),
        ("batch_wide_statistics", {"algorithm__advantage": {"std": "batch"}, "schedule__gap": 1},
         "advantage.std = batch needs every reward"),
        ("batch_wide_statistics", {"algorithm__advantage": {"std": "max_group"}, "schedule__gap": 2},
         "set schedule.gap=0 or algorithm.advantage.std=group."),
        ("batch_wide_statistics",
         {"algorithm__advantage": {"std": "group", "renormalise": True}, "schedule__gap": 1},
         "set schedule.gap=0 or algorithm.advantage.renormalise=false."),
    ],
)  # fmt: skip
def test_a_relation_holds_or_says_what_to_set(
    rule: str, values: dict[str, Any], refused: str | None
) -> None:
    said = _said(getattr(batches if hasattr(batches, f"_{rule}") else ranks, f"_{rule}"), **values)
    _expect(said, refused)


@pytest.mark.parametrize(
    ("split", "size", "group", "updates", "prompts", "oversample", "refused"),
    [
        ("groups", 3, 8, 2, 4, 0, []),
        ("groups", 1, 8, 2, 4, 2, []),
        ("groups", 1, 8, 3, 4, 0, ["must divide data.prompts_per_batch = 4; allowed: 1, 2, 4; or"]),
        ("groups", 1, 8, 2, 4, 3, ["allowed: 0, 2, 4, ..."]),
        ("groups", 1, 8, 3, 4, 4, ["must divide", "allowed: 0, 3, 6, ..."]),
        ("samples", 4, 8, 2, 3, 1, []),
        ("samples", "auto", 8, 2, 3, 1, []),
        ("samples", 1, 8, 3, 3, 1, ["must divide data.group_size = 8; allowed: 1, 2, 4, 8."]),
        ("samples", 8, 8, 2, 3, 1, ["takes 4 samples of a group; allowed: auto, 1, 2, 4."]),
    ],
)
def test_updates_divide_the_batch_or_every_group(
    split: str,
    size: Any,
    group: int,
    updates: int,
    prompts: int,
    oversample: int,
    refused: list[str],
) -> None:
    values = {
        "data__updates_split": split, "sampling__task_size": size, "data__group_size": group,
        "algorithm__updates_per_batch": updates, "data__prompts_per_batch": prompts,
        "data__oversample": oversample,
    }  # fmt: skip
    said = [*_said(batches._update_count, **values), *_said(batches._updates_within, **values)]
    assert len(said) == len(refused)
    assert all(part in text for part, text in zip(refused, said, strict=True))


def test_a_rule_is_silent_about_what_is_absent_or_reported() -> None:
    tree = {"parallel": {"sharding": "fsdp"}, "allocation": {"trainers": 1}}
    (said,) = relations.relation_problems(tree)
    assert said.startswith("parallel.sharding = fsdp with allocation.trainers = 1")
    for broken in ("allocation.trainers", "parallel.sharding", "allocation.trainers.x"):
        assert relations.relation_problems(tree, [broken]) == []
    assert relations.relation_problems(tree, ["allocation.train"]) == [said]
    assert relations.relation_problems({"parallel": {"sharded_trainers": "fsdp"}}) == []
    assert relations.most_rollouts({"min": 1, "max": 4}) == relations.most_rollouts(4) == 4


def test_a_key_that_is_no_text_is_refused() -> None:
    tree = OmegaConf.create({"a": {1: "${b}", "c": "${b}"}, "b": [2]})
    plain, problems = checks.resolve_tree(tree)
    assert plain == {"a": {"c": [2]}, "b": [2]}
    assert [*problems] == ["a.1"]


def test_a_default_in_the_place_of_a_missing_source_is_no_copy() -> None:
    tree = OmegaConf.create({"a": "${oc.select:x,3}", "b": "${oc.select:y,3}", "y": 1})
    assert copies.copies_of(tree, checks.resolve_tree(tree)[0]) == {"b": "y"}


def test_leaves_that_cannot_be_resolved_are_left_out_and_named() -> None:
    tree = OmegaConf.create(
        {
            "a": "${b}",
            "b": 3,
            "c": "???",
            "d": {"e": ["${gone}", 1, {"f": "${b}"}]},
            "g": {"h": None},
        }
    )
    plain, problems = checks.resolve_tree(tree)
    assert plain == {"a": 3, "b": 3, "d": {"e": [1, {"f": 3}]}, "g": {"h": None}}
    assert problems["c"] == "c: a value is required; set c=..."
    assert problems["d.e[0]"].startswith("d.e[0]: cannot be resolved (")
    assert len(problems) == 2


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"a": {"b": [1.0, float("inf")]}}, "a.b[1] = inf: is not finite"),
        ({"a": 1.0, "b": None, "c": "x"}, None),
        ({"api_key": "x"}, f"api_key = {MASK}: a configuration is written to disk"),
        ({"api_key": ""}, None),
        ({"api_key": None}, None),
        ({"experiment_name": "sk-" + "a1" * 20}, "names directories and reports"),
        ({"experiment_name": "plain"}, None),
        ({"token_env": "HOME"}, "token_env = HOME: a reward is sent variables named DIGENRL_"),
        ({"r": {"token_env": "DIGENRL_X"}}, None),
        ({"a": f"x{MASK}"}, "was masked"),
    ],
)
def test_a_leaf_anywhere_may_be_wrong(tree: dict[str, Any], said: str | None) -> None:
    found = list(checks._leaf_problems(tree, []))
    assert len(found) == (said is not None)
    assert said is None or said in found[0]
    assert list(checks._leaf_problems({"a": {"b": [float("nan")]}}, ["a.b"])) == []


def test_prompts_are_read_within_the_bounds_that_are_sound_and_each_file_is_told_by_itself(
    tmp_path: Path,
) -> None:
    Image.new("RGB", (40, 30)).save(tmp_path / "a.png")
    file = tmp_path / "edits.jsonl"
    file.write_text('{"prompt": "one", "image": "a.png"}\n')
    data: dict[str, Any] = {
        "prompts": str(file), "heldout": None, "prompts_per_batch": 1, "oversample": 0,
        "image_max_mib": 1.0, "image_max_pixels": 1200,
    }  # fmt: skip

    def said(broken: Sequence[str] = (), **changes: Any) -> list[str]:
        return list(checks._prompt_problems({"data": data | changes}, broken))

    assert said() == []
    assert "at most 1199" in said(image_max_pixels=1199)[0]
    assert said(["data.image_max_pixels"], image_max_pixels="many") == []
    (alone,) = said(prompts_per_batch=2)
    assert alone.endswith(
        "holds 1 different prompts and a batch needs distinct ones; allowed: 1 .. 1."
    )
    (absent,) = said(
        prompts=[{"file": str(file), "weight": 1}, {"file": "absent.txt", "weight": 1}],
        prompts_per_batch=9,
    )
    assert "no such prompt file" in absent, "how many prompts there are is not known then"


@pytest.mark.parametrize(
    ("hydras", "said"),
    [
        ("In 'mine': Could not find 'reward/clp'\n\nAvailable: ...", "mine: reward = clp: there is no such reward; "),
        ("Could not find 'algorithm/sde/dnce'", "algorithm/sde = dnce: there is no such algorithm/sde; "),
        ("Could not find 'nowhere/clp'", "Could not find 'nowhere/clp'"),
        ("One.\n \n  full_key: a.b\nobject_type=dict\n  api_key=canary-canary", f"One.; api_key={MASK}"),
    ],
)  # fmt: skip
def test_what_hydra_refuses_is_said_in_one_line(hydras: str, said: str) -> None:
    found = compose._composition_message(ValueError(hydras), ())
    assert found.startswith(said)
    assert "\n" not in found
    assert ("Available: " in found) == said.endswith("; ")


def test_keys_of_hydra_and_of_a_lists_items_are_not_proposed() -> None:
    tree = {"hydra": {"zebra": 1}, "logger": [{"okapi": 2}], "callbacks": {"gnu": {"tapir": 3}}}
    known = compose.KnownKeys(OmegaConf.create(tree), "train")
    assert "nearest: callbacks.gnu.tapir." in known.unknown_message("tapor", 1)
    for key in ("zebro", "okapy"):
        assert known.unknown_message(key, 1).startswith(
            f"{key} = 1: no such key; the top level has "
        )
    assert known.unknown_message("callbacks.qqqq.wwww.zzzz", 1).endswith("; callbacks has gnu.")


def test_values_go_into_the_groups_that_are_there_and_keys_are_added_and_removed() -> None:
    config = OmegaConf.create({"a": {"b": 1, "c": 2, "d": 3}, "e": 4, "l": [1]})
    OmegaConf.set_struct(config, True)
    words = ["a={b:5}", "+f.g=6", "++a.h=7", "~e", "~a.c", "x=1", "~y", "~l.0", "+l.i=8"]
    said = compose.apply_values(config, [*map(PARSER.parse_override, words)], "train")
    assert config == {"a": {"b": 5, "d": 3, "h": 7}, "f": {"g": 6}, "l": [1]}
    starts = (
        "x = 1: no such key", "y = : no such key", "l.0: cannot be set (list indices",
        "l.i: cannot be set (invalid literal",
    )  # fmt: skip
    assert len(said) == len(starts)
    assert all(text.startswith(start) for text, start in zip(said, starts, strict=True))


def test_a_program_that_uses_hydra_itself_may_compose() -> None:
    compose._compose_cached.cache_clear()
    with initialize_config_dir(str(config_directory()), version_base=compose.VERSION_BASE):
        assert (
            compose.compose_config(
                "train", ["experiment=flux1_flowgrpo", "schedule=gap"]
            ).schedule.gap
            == 1
        )


FILES = {"file": "a.txt", "weight": 1}


@pytest.mark.parametrize(
    ("kind", "value", "refused"),
    [
        (value_types.Kept, {"products": 0.5, "attention": 0.5}, None),
        (value_types.Kept, {"products": 0.5, "attention": 0.6}, "sums to more than 1"),
        (value_types.Ports, [29600, 29600], None),
        (value_types.Ports, [29601, 29600], "begins after its end"),
        (value_types.Span, {"min": 2, "max": 2}, None),
        (value_types.Span, {"min": 3, "max": 2}, "has min 3 above max 2"),
        (value_types.Component, {"_target_": "a.B", "_partial_": True}, None),
        (value_types.Component, {"_target_": "a.B"}, "lacks _partial_=true"),
        (value_types.PromptFiles, [FILES, {"file": "b.txt", "weight": 0.5}], None),
        (value_types.PromptFiles, [FILES, {"file": "b.txt", "weight": True}], "the weight True"),
        (value_types.PromptFiles, [{"file": "b.txt", "weight": float("inf")}], "the weight inf"),
        (value_types.PromptFiles, [{"file": "b.txt", "weight": "1"}], "the weight 1"),
        (
            value_types.PromptFiles,
            [{"file": " ", "weight": 1}],
            "expected {file: path, weight: number}",
        ),
        (
            value_types.PromptFiles,
            [{"file": 3, "weight": 1}],
            "expected {file: path, weight: number}",
        ),
    ],
)
def test_a_value_is_kept_as_it_is_or_refused_with_the_reason(
    kind: Any, value: Any, refused: str | None
) -> None:
    adapter = TypeAdapter(kind)
    if refused is None:
        assert adapter.validate_python(value) == value
    else:
        with pytest.raises(ValueError, match=re.escape(refused)):
            adapter.validate_python(value)


def test_the_shipped_configurations_are_those_of_the_checkout_or_lie_in_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipped, "_PACKAGE", tmp_path / "src" / "digenrl")
    assert shipped.config_directory() == tmp_path / "src" / "digenrl" / "configs"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "train.yaml").touch()
    assert shipped.config_directory() == tmp_path / "configs"


def test_what_a_stored_run_leaves_open_is_kept_when_removed_keys_are_left_out() -> None:
    tree = OmegaConf.create(
        {"seed": "???", "reward": {"cache_size": 3, "pending": "???"}, "handshake": {"a": {"b": 1}}}
    )
    assert stored._drop_removed_keys(tree) == ["reward.cache_size=3", "handshake={'a': {'b': 1}}"]
    assert OmegaConf.to_container(tree) == {"seed": "???", "reward": {"pending": "???"}}


def test_ranks_agree_about_everything_but_what_belongs_to_a_machine() -> None:
    config = {
        "seed": 1, "resume": "a", "output_root": "b", "network": {"ports": [1, 2]}, "allow_targets": [],
        "confirm_hosts": [], "data": {"prompt_store": "c", "group_size": 2, "links": {}}, "api_key": "d",
    }  # fmt: skip
    found = stored.configuration_identity(OmegaConf.create(config))
    assert found == {"seed": 1, "data.group_size": 2, "data.links": {}, "api_key": MASK}


@pytest.mark.parametrize(("per_node", "refused"), [(None, False), (6, True), (8, False)])
def test_a_node_of_unsaid_size_is_divided_into_context_groups(
    per_node: int | None, refused: bool
) -> None:
    pool = {"gpu": "H100", "count": 8, "per_node": per_node}
    tree = {
        "parallel": {"context": 4},
        "allocation": {"trainers": 8},
        "schedule": {"shares": "equal"},
        "hardware": {"pools": {"a": pool}},
    }
    said = [each for each in relations.relation_problems(tree) if "of a node" in each]
    assert bool(said) is refused
