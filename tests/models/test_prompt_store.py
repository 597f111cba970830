"""Conditionings on disk: written once by however many, whole whatever kills a writer, and the
encoders' own bits."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from digenrl import config as configuration
from digenrl.data import PromptData
from digenrl.models.prompt_store import PromptStore, files_digest
from digenrl.models.wording import Condition, Wording
from digenrl.prompt_encoding import fill_prompt_store, store_conditioning
from digenrl.types import Prompt
from tests.changed import but
from tests.models.tiny_policies import NEGATIVE, make

TEXTS = [Wording(f"number {n}") for n in range(12)]
CPU = torch.device("cpu")
FORK = multiprocessing.get_context("fork")


def value(wording: Wording) -> Condition:
    states = torch.full((1, 3, 4), float(wording.text.split()[-1]), dtype=torch.bfloat16)
    return {"text": states, "mask": torch.ones(1, 3, dtype=torch.bool)}


def values(texts: Sequence[Wording]) -> Iterator[Condition]:
    return map(value, texts)


def run_process(work: Callable[[], None]) -> int:
    """Exit code of `work` in a process of its own."""
    process = FORK.Process(target=work)
    process.start()
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


def assert_holds(store: PromptStore, texts: Sequence[Wording]) -> None:
    for text in texts:
        found = store.read_condition(text)
        assert found is not None
        assert found.keys() == value(text).keys()
        assert all(torch.equal(found[key], expected) for key, expected in value(text).items())
        assert found["text"].dtype == torch.bfloat16


def test_what_is_stored_is_read_by_everybody_with_the_same_facts(tmp_path: Path) -> None:
    facts = {"encoders": "a", "dtype": "bfloat16", "length": 3}
    assert PromptStore(tmp_path, facts).read_condition(TEXTS[0]) is None
    assert PromptStore(tmp_path, facts).add_wordings([*TEXTS, *TEXTS], values) == len(TEXTS)
    assert_holds(PromptStore(tmp_path, dict(reversed(facts.items()))), TEXTS)
    assert PromptStore(tmp_path, facts).add_wordings(TEXTS[:3], values) == 0
    for other in ({"encoders": "b"}, {"dtype": "float32"}, {"length": 4}):
        assert PromptStore(tmp_path, facts | other).read_condition(TEXTS[0]) is None


@pytest.mark.processes
def test_writers_at_the_same_time_encode_every_text_once(tmp_path: Path) -> None:
    def slowly(texts: Sequence[Wording]) -> Iterator[Condition]:
        for text in texts:
            with (tmp_path / "encoded").open("a") as file:
                file.write(f"{text.text}\n")
            time.sleep(0.01)
            yield value(text)

    parts = (TEXTS[:9], TEXTS[3:], list(reversed(TEXTS)))
    processes = [
        FORK.Process(target=PromptStore(tmp_path, {}).add_wordings, args=(part, slowly))
        for part in parts
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert sorted((tmp_path / "encoded").read_text().split("\n")[:-1]) == sorted(
        wording.text for wording in TEXTS
    )
    assert_holds(PromptStore(tmp_path, {}), TEXTS)


@pytest.mark.processes
def test_a_killed_writer_loses_only_what_it_was_writing(tmp_path: Path) -> None:
    store, synced = PromptStore(tmp_path, {}), iter(range(len(TEXTS)))

    def killed() -> None:
        sync = os.fsync
        os.fsync = lambda file: (
            os.kill(os.getpid(), signal.SIGKILL) if next(synced) == 4 else sync(file)
        )  # type: ignore
        store.add_wordings(TEXTS, values)

    assert run_process(killed) == -signal.SIGKILL
    assert len(list(store.directory.glob("*.tmp"))) == 1, (
        "it was to die between writing and renaming"
    )
    assert_holds(store, TEXTS[:4])
    assert store.read_condition(TEXTS[4]) is None
    assert store.add_wordings(TEXTS, values) == len(TEXTS) - 4
    assert_holds(store, TEXTS)
    assert not list(store.directory.glob("*.tmp"))


@pytest.mark.processes
def test_a_full_disk_leaves_whole_entries_alone(tmp_path: Path) -> None:
    store = PromptStore(tmp_path, {})

    def last_is_large(texts: Sequence[Wording]) -> Iterator[Condition]:
        yield from values(texts[:-1])
        yield {"text": torch.zeros(1, 1 << 16)}

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, 1 << 14))
        with pytest.raises(OSError, match="File too large"):
            store.add_wordings(TEXTS, last_is_large)

    assert run_process(limited) == 0
    assert_holds(store, TEXTS[:-1])
    assert store.read_condition(TEXTS[-1]) is None
    assert not list(store.directory.glob("*.tmp"))


def test_a_damaged_entry_is_encoded_again(tmp_path: Path) -> None:
    store = PromptStore(tmp_path, {})
    store.add_wordings(TEXTS, values)
    damaged = next(store.directory.glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:20])
    assert store.add_wordings(TEXTS, values) == 1
    assert_holds(store, TEXTS)


def flip_a_bit(store: PromptStore) -> None:
    path = store.path_of(TEXTS[0])
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def exchange(store: PromptStore) -> None:
    shutil.copyfile(store.path_of(TEXTS[1]), store.path_of(TEXTS[0]))


def take_from_another_store(store: PromptStore) -> None:
    other = PromptStore(store.directory.parent, {"encoders": "b"})
    other.add_wordings(TEXTS[:1], values)
    shutil.copyfile(other.path_of(TEXTS[0]), store.path_of(TEXTS[0]))


def strip_the_metadata(store: PromptStore) -> None:
    save_file(value(TEXTS[0]), store.path_of(TEXTS[0]))


@pytest.mark.parametrize(
    "damage", [flip_a_bit, exchange, take_from_another_store, strip_the_metadata]
)
def test_a_file_that_is_not_what_was_stored_is_never_served(
    damage: Callable[[PromptStore], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = PromptStore(tmp_path, {})
    store.add_wordings(TEXTS, values)
    damage(store)
    assert store.read_condition(TEXTS[0]) is None
    assert "encoded again" in caplog.text
    assert_holds(store, TEXTS[1:])
    assert store.add_wordings(TEXTS, values) == 1
    assert_holds(store, TEXTS)


def test_the_digest_of_weights_is_of_their_bytes(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("config.json", "model.safetensors")]
    for file in files:
        file.write_bytes(b"1234")
    first = files_digest(files, tmp_path / "notes")
    files[1].touch()
    assert files_digest(files, tmp_path / "notes") == first, "same bytes at another time"
    files[1].write_bytes(b"1235")
    assert files_digest(files, tmp_path / "notes") != first
    assert len(list((tmp_path / "notes").iterdir())) == 3


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Class of every text encoder that is moved."""
    found: list[str] = []
    move = PreTrainedModel.to

    def counted(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        found.append(type(self).__name__)
        return move(self, *args, **kwargs)

    monkeypatch.setattr(PreTrainedModel, "to", counted)
    return found


@pytest.mark.heavy
@pytest.mark.parametrize("family", ["flux", "wan"])
def test_encoders_move_once_for_all_prompts_and_never_again(
    family: str, tmp_path: Path, moves: list[str]
) -> None:
    guided = {} if family == "flux" else {"guidance_scale": 4.0}
    prompts = [
        Prompt("a red cube"),
        Prompt("a green cone", negative="cubes"),
        Prompt("a blue ball"),
    ]
    texts = 3 if family == "flux" else 5  # NEGATIVE and "cubes", too
    plain = make(family, **guided)
    expected = plain.codec.encode(prompts)
    del moves[:]
    first = make(family, **guided)
    assert store_conditioning(first.codec, tmp_path, prompts, CPU) == (texts, texts)
    assert moves
    assert len(moves) == len(set(moves)), "each encoder once, however many prompts"
    assert "_pipeline" not in vars(first.codec), "the encoders are still in memory"
    del moves[:]
    second = make(family, **guided)
    assert store_conditioning(second.codec, tmp_path, prompts, CPU) == (texts, 0)
    for policy in (first, second):
        found = policy.codec.encode(prompts)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert not moves
    unforeseen = [Prompt(NEGATIVE + " again")]
    assert torch.equal(
        second.codec.encode(unforeseen)["text"], plain.codec.encode(unforeseen)["text"]
    )
    wide = make(family, dtype="float64", **guided)
    assert (
        store_conditioning(wide.codec, tmp_path, prompts[:1], CPU)
        == (1 if family == "flux" else 2,) * 2
    )


@pytest.mark.heavy
@pytest.mark.parametrize(("scale", "texts"), [(None, 2), (4.0, 3)])
def test_the_store_holds_what_the_evaluations_guidance_needs(
    scale: float | None, texts: int, tmp_path: Path
) -> None:
    """Trained without guidance and evaluated with it: the negative prompt is encoded too."""
    (tmp_path / "two.txt").write_text("a red cube\na green cone\n")
    config = but(
        configuration.load([]),
        max_rl_steps=1,
        data__prompts=str(tmp_path / "two.txt"),
        data__heldout=None,
        data__prompts_per_batch=2,
        data__prompt_store=str(tmp_path),
        sampling__eval__guidance_scale=scale,
    ).settings
    policy = make("wan", guidance_scale=1.0)
    filled = fill_prompt_store(config, policy, PromptData(config.data, 0))
    assert filled is not None
    assert (filled.texts, filled.encoded, policy.two_forwards) == (texts, texts, False)


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_is_the_same_with_and_without_and_the_next_encodes_nothing(
    running: Any, tmp_path: Path
) -> None:
    words = ("experiment=flux1_flowgrpo", "hardware=cpu_tiny", "logger=none", "max_rl_steps=2")
    words += ("~callbacks.evaluation",)
    store = tmp_path / "store"

    def run(where: object) -> Any:
        train = running(*words, f"data.prompt_store={where}", tiny=(), fork=True)
        assert train.finish() == 0, train.stderr
        return train

    trains = [run("null"), run(store), run(store)]
    weights = [
        (train.run_dir / "checkpoints/last/policy.safetensors").read_bytes() for train in trains
    ]
    assert weights[0] == weights[1] == weights[2]
    assert [row["reward"] for row in trains[0].rows("metrics.jsonl")] == [
        row["reward"] for row in trains[1].rows("metrics.jsonl")
    ]
    texts = 2 * 2  # two steps of two prompts, out of 500
    assert [train.summary["prompt_store"] for train in trains] == [
        None, {"encoded": texts, "reused": 0}, {"encoded": 0, "reused": texts},
    ]  # fmt: skip
    encoded = [
        row["encoded"] for row in trains[1].rows("events.jsonl") if row["kind"] == "prompt_store"
    ]
    assert sum(count > 0 for count in encoded) == 1, "the encoders moved for more than one rank"


@pytest.mark.slow
@pytest.mark.processes
def test_a_store_that_cannot_be_written_is_told_and_the_run_goes_on(
    running: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no directory")
    words = (
        "experiment=flux1_flowgrpo",
        "hardware=cpu_tiny",
        "logger=none",
        "~callbacks.evaluation",
        "max_rl_steps=1",
    )
    train = running(*words, f"data.prompt_store={tmp_path / 'file' / 'store'}", tiny=(), fork=True)
    assert train.finish() == 0, train.stderr
    assert any(
        "data.prompt_store" in warning and "make room" in warning
        for warning in train.summary["warnings"]
    )
