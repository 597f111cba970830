"""Prompt files, the project's own sets, and which prompts each RL step gets."""

from __future__ import annotations

import bisect
import itertools
import json
import math
import os
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl import config as configuration
from digenrl import prompts
from digenrl.data import PromptData, PromptSampler, load_prompts
from digenrl.schedule import ScheduleSpec, version_queue
from digenrl.types import Prompt
from scripts import generate_prompts as generate


def make(count: int) -> list[Prompt]:
    return [Prompt(f"prompt {index}") for index in range(count)]


def test_fields_of_a_jsonl_record(tmp_path: Path) -> None:
    record = {
        "prompt": " a b ",
        "negative": "n",
        "target": "t",
        "id": 7,
        "tags": ["x", {"y": None}],
    }
    (tmp_path / "p.jsonl").write_text(
        json.dumps(record) + "\n\n" + json.dumps({"prompt": "e\u0301 שלום 🙂"}) + "\n"
    )
    first, second = load_prompts(tmp_path / "p.jsonl")
    assert first == Prompt(" a b ", "n", "t", {"id": 7, "tags": ["x", {"y": None}]})
    assert second.text == "e\u0301 שלום 🙂"  # kept as written: no Unicode normalisation
    assert second.negative is second.target is None


def test_a_misspelt_field_is_refused_with_its_line_and_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(
        '{"prompt": "a", "tags": []}\n{"prompt": "b", "targt": "1"}\n'
    )
    with pytest.raises(
        prompts.PromptFileError, match=r'p\.jsonl:2: no such field: "targt"; nearest: target'
    ):
        prompts.read_prompt_file(tmp_path / "p.jsonl")


def test_byte_order_mark_carriage_returns_and_duplicates(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo\r\none\r\nthree")
    loaded = load_prompts(tmp_path / "p.txt")
    assert [prompt.text for prompt in loaded] == ["one", "two", "three"]
    assert prompts.read_prompt_file(tmp_path / "p.txt").duplicates == ((4, 1),)


def test_other_line_separators_stay_inside_a_prompt(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a\u2028b\x85c\nnext\n", encoding="utf-8")
    assert [prompt.text for prompt in load_prompts(tmp_path / "p.txt")] == ["a\u2028b\x85c", "next"]


def test_the_first_twenty_problems_are_named(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text("{}\n" * 30)
    with pytest.raises(prompts.PromptFileError, match=r"p\.jsonl:20: .*and 10 more lines"):
        prompts.read_prompt_file(tmp_path / "p.jsonl")


def test_a_line_that_does_not_end_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    with path.open("wb") as file:
        file.write(b"one\n")
        file.truncate(256 << 20)
    tracemalloc.start()
    with pytest.raises(
        prompts.PromptFileError, match=r"p\.txt:2: the line has more than 1048576 bytes; .*a prompt"
    ):
        prompts.read_prompt_file(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_a_prompt_file_that_became_a_pipe_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    os.mkfifo(path)
    with pytest.raises(prompts.PromptFileError, match="not a regular file"):
        prompts.read_prompt_file(path)


def test_own_sets_are_found_from_anywhere_but_a_local_file_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(load_prompts("digits.jsonl")) == 10
    Path("digits.jsonl").write_text('{"prompt": "mine"}\n')
    assert [prompt.text for prompt in load_prompts("digits.jsonl")] == ["mine"]


def test_committed_sets_are_what_the_generator_writes() -> None:
    for name, content in generate.contents().items():
        assert (prompts.DIRECTORY / name).read_text(encoding="utf-8") == content, name


def test_set_sizes_and_held_out_splits() -> None:
    for name, (train, heldout) in {
        "signs": (500, 100),
        "scenes": (500, 100),
        "videos": (200, 50),
    }.items():
        suffix = "jsonl" if name == "signs" else "txt"
        kept, held = load_prompts(f"{name}.{suffix}"), load_prompts(f"{name}_heldout.{suffix}")
        assert (len(kept), len(held)) == (train, heldout)
        assert not prompts.read_prompt_file(f"{name}.{suffix}").duplicates
        assert {prompt.uid for prompt in kept}.isdisjoint(prompt.uid for prompt in held)
    signs = [*load_prompts("signs.jsonl"), *load_prompts("signs_heldout.jsonl")]
    assert all(prompt.target and f'"{prompt.target}"' in prompt.text for prompt in signs)
    assert len({prompt.target for prompt in signs}) == 600
    assert [prompt.target for prompt in load_prompts("digits.jsonl")] == [
        str(digit) for digit in range(10)
    ]


@pytest.mark.parametrize("name", ["signs.jsonl", "scenes.txt", "videos.txt"])
def test_own_sets_are_varied(name: str) -> None:
    """No two prompts nearly equal, and no single word carries the set."""
    words = [
        frozenset(prompt.text.lower().replace(",", "").replace('"', "").split())
        for prompt in load_prompts(name)
    ]
    for index, mine in enumerate(words):
        assert all(
            len(mine & other) <= generate.MAX_OVERLAP * len(mine | other) for other in words[:index]
        )
    counts = Counter(word for mine in words for word in mine if len(word) > 4)
    assert len(counts) > 200
    assert counts.most_common(1)[0][1] < 0.45 * len(words)


def check_k_repeat(batch: Callable[[int], tuple[Prompt, ...]]) -> None:
    """Every prompt of an epoch exactly G times, whoever asks first: ranks work on steps out of
    order."""
    spec = ScheduleSpec(
        4, group_size=6, task_size=2, denoise_steps=3, trained_steps=2, async_steps=1
    )
    asked = [2, 0, 1, 1]  # one rank prefetches step 2, another comes to step 1 later
    made = {}
    for step in asked:
        tasks = [
            task
            for version in (step - 1, step)
            for task in version_queue(spec, version, 2)
            if task.step == step
        ]
        samples, chosen = Counter(), batch(step)
        shards = [tasks[rank::3] for rank in range(3)]  # any split over the ranks is disjoint
        for task in (task for shard in shards for task in shard):
            samples.update(
                (chosen[task.group].uid, task.first_sample + i) for i in range(task.samples)
            )
        assert set(samples.values()) == {1}
        assert made.setdefault(step, samples) == samples
    groups = Counter(uid for step in (0, 1, 2) for uid, _ in made[step])
    assert groups == {prompt.uid: 6 for prompt in make(12)}


def test_k_repeat_sampling_over_ranks_survives_prefetch() -> None:
    """Check 20: each selected prompt exactly k = G times over all ranks, in disjoint shards, a
    function of (seed, epoch) alone. A sampler with a cursor (a DataLoader whose workers run ahead,
    trap T19) fails."""
    check_k_repeat(PromptSampler(make(12), 4, seed=3).prompts_at)
    cursor = itertools.count()
    with pytest.raises(AssertionError):
        check_k_repeat(lambda step: PromptSampler(make(12), 4, seed=3).prompts_at(next(cursor) % 3))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**40))
def test_each_epoch_holds_every_prompt_once_and_batches_are_distinct(
    total: int, size: int, seed: int
) -> None:
    size = min(size, total)
    sampler = PromptSampler(make(total), size, seed)
    steps = 3 * total // size + 2
    batches = [sampler.prompts_at(step) for step in range(steps)]
    assert all(len({prompt.uid for prompt in batch}) == size for batch in batches)
    stream = [prompt.uid for batch in batches for prompt in batch]
    for epoch in range(len(stream) // total):
        assert len(set(stream[epoch * total : (epoch + 1) * total])) == total


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=12))
def test_a_batch_depends_on_seed_and_step_alone(steps: list[int]) -> None:
    """Not on what was asked before: that is what makes a resumed run exact."""
    sampler = PromptSampler(make(11), 4, seed=3)
    assert [sampler.prompts_at(step) for step in steps] == [
        PromptSampler(make(11), 4, seed=3).prompts_at(step) for step in steps
    ]


def test_line_order_changes_nothing_and_seeds_and_epochs_differ() -> None:
    prompts_ = make(20)
    forward, backward = PromptSampler(prompts_, 20, 0), PromptSampler(prompts_[::-1], 20, 0)
    assert forward.prompts_at(0) == backward.prompts_at(0)
    assert forward.prompts_at(0) != forward.prompts_at(1)
    assert forward.prompts_at(0) != PromptSampler(prompts_, 20, 1).prompts_at(0)


def test_too_few_prompts() -> None:
    with pytest.raises(
        ValueError, match=r"data\.prompts_per_batch = 4: the prompt file holds 3 .* use 1 \.\. 3"
    ):
        PromptSampler(make(3), 4, 0)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(12, 40), st.floats(0.1, 9)), min_size=1, max_size=4),
    st.integers(1, 12),
)
def test_files_share_out_each_batch_by_their_weights(
    shares: list[tuple[int, float]], size: int
) -> None:
    """Whoever asks, in whatever order, every file's own prompts come round once before one comes
    again."""
    made = make(sum(count for count, _ in shares))
    asked = [PromptSampler(made, size, 3, shares).prompts_at(step) for step in (50, 0)]
    sampler, ends = (
        PromptSampler(made, size, 3, shares),
        list(itertools.accumulate(count for count, _ in shares)),
    )
    batches = [sampler.prompts_at(step) for step in range(51)]
    assert asked == [batches[50], batches[0]]
    assert all(len({prompt.uid for prompt in batch}) == size for batch in batches)
    place = {prompt.uid: bisect.bisect_right(ends, index) for index, prompt in enumerate(made)}
    for number, (_, weight) in enumerate(shares):
        part = size * weight / sum(weight for _, weight in shares)
        streams = [
            [prompt.uid for prompt in batch if place[prompt.uid] == number] for batch in batches
        ]
        assert {len(stream) for stream in streams} <= {
            math.floor(part),
            math.ceil(part),
            round(part),
        }
        assert abs(sum(map(len, streams)) - 51 * part) < 25, (
            "51 draws of a part below 1, within about 7 deviations"
        )
        own = Counter(dict.fromkeys((uid for uid, file in place.items() if file == number), 0))
        for stream in streams:
            own.update(stream)
            assert max(own.values()) - min(own.values()) <= 1


def test_one_file_gives_the_prompts_that_it_gave_before_there_were_weights() -> None:
    batches = [PromptSampler(make(11), 4, seed=3).prompts_at(step) for step in (0, 1, 2, 7)]
    texts = [prompt.text.removeprefix("prompt ") for batch in batches for prompt in batch]
    assert " ".join(texts) == "7 1 10 0 9 8 5 2 6 4 3 8 5 6 4 7"


def test_several_files_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"a {index}\n" for index in range(30)))
    (tmp_path / "b.jsonl").write_text('{"prompt": "a 3"}\n{"prompt": "b"}\n{"prompt": "c"}\n')
    files = [
        {"file": str(tmp_path / "a.txt"), "weight": 3},
        {"file": str(tmp_path / "b.jsonl"), "weight": 1},
    ]
    usual = configuration.load([]).settings.data
    own = {"prompts": files, "heldout": None, "prompts_per_batch": 8, "oversample": 0}
    settings_ = usual.model_copy(update=own)
    data = PromptData(settings_, seed=0)
    assert len(data.prompts) == 32, "the first file's `a 3` is the second's too"
    assert (
        [prompt.text for prompt in data.prompts][-2:]
        == ["b", "c"]
        == [prompt.text for prompt in data.prompts[30:]]
    )
    for step in range(9):
        drawn = Counter(prompt.text[0] for prompt in data.sampler.prompts_at(step))
        assert (drawn["a"], drawn["b"], drawn["c"]) == (6, 1, 1)
    even = settings_.model_copy(update={"prompts": [{**entry, "weight": 2} for entry in files]})
    with pytest.raises(
        ValueError, match=r"its file 2 has 2 prompts .* weight 2 a batch of 8 takes up to 4 "
    ):
        PromptData(even, seed=0)


def test_datamodule() -> None:
    own = {"prompts": "digits.jsonl", "heldout": None, "prompts_per_batch": 4, "oversample": 2}
    settings_ = configuration.load([]).settings.data.model_copy(update=own)
    data = PromptData(settings_, seed=0)
    assert len(data.sampler.prompts_at(0)) == 6
    assert data.heldout is data.prompts
    assert all(prompt in data.prompts for prompt in data.sampler.prompts_at(0))
    other = settings_.model_copy(update={"heldout": "videos_heldout.txt"})
    assert len(PromptData(other, seed=0).heldout) == 50


UNSEEN = ["\u00a0", "\u200b", "\ufeff", "\u3000 \t", "\u2060\u200d", "\u2028", "\u00ad", "\u200e"]


@pytest.mark.parametrize("unseen", UNSEEN)
@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
def test_lines_that_show_nothing_are_no_prompts(tmp_path: Path, unseen: str, ends: str) -> None:
    lines = ["one", unseen, "two", f" {unseen} ", "\ufeffthree"]
    (tmp_path / "a.txt").write_bytes(ends.join(lines).encode())
    file = prompts.read_prompt_file(tmp_path / "a.txt")
    assert [prompt.text for prompt in file.prompts] == ["one", "two", "three"]
    assert file.lines == (1, 3, 5)
    content = ['{"prompt": "one"}', unseen, '\ufeff{"prompt": "two"}']
    (tmp_path / "a.jsonl").write_bytes(ends.join(content).encode())
    assert prompts.read_prompt_file(tmp_path / "a.jsonl").lines == (1, 3)
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": unseen}))
    with pytest.raises(prompts.PromptFileError, match="prompt is empty"):
        prompts.read_prompt_file(tmp_path / "b.jsonl")


@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
def test_a_fault_has_the_number_of_its_line_whatever_ends_lines(tmp_path: Path, ends: str) -> None:
    (tmp_path / "a.txt").write_bytes(ends.encode().join([b"one", b"two", b"\xff", b"four"]))
    with pytest.raises(prompts.PromptFileError, match=r"a\.txt:3: byte 1 is not UTF-8"):
        prompts.read_prompt_file(tmp_path / "a.txt")


def test_a_long_file_without_line_feeds_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\r".join(b"prompt %06d" % n for n in range(100_000)))
    assert len(prompts.read_prompt_file(tmp_path / "a.txt").prompts) == 100_000


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "a", "prompt": "b"}',
        '{"prompt": "a", "target": "x", "target": "x"}',
        '{"prompt": "a", "include": [{"class": "cat", "class": "dog"}]}',
    ],
)
def test_a_field_that_stands_twice_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(prompts.PromptFileError, match=r'a\.jsonl:2: the field "\w+" stands there'):
        prompts.read_prompt_file(file)


@pytest.mark.parametrize(("name", "text"), [("A.TXT", "a"), ("A.Jsonl", '{"prompt": "a"}')])
def test_a_suffix_may_have_capitals(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    (found,) = prompts.read_prompt_file(tmp_path / name).prompts
    assert found.text == "a"
