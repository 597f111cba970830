"""Write the project's own prompt sets, the same bytes every time.

    python -m scripts.generate_prompts [DIRECTORY]

A set and its held-out split come from one stream, so that they have the same distribution and share
no prompt. No held-out sign has the text of a training sign. A candidate whose words overlap too
much with an accepted prompt is skipped.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

from digenrl.prompts import DIRECTORY

Record = dict[str, str]

SETS: dict[str, tuple[int, int]] = {"signs": (500, 100), "scenes": (500, 100), "videos": (200, 50)}
"""Name -> (training prompts, held-out prompts)."""
v = SimpleNamespace(**json.loads((DIRECTORY / "vocabulary.json").read_text(encoding="utf-8")))
"""The project's own words. `scenes` and `videos` say which subject fits which place."""
MAX_OVERLAP = 0.6
"""Largest accepted Jaccard overlap of the word sets of two prompts."""


class _Deck:
    """Draws from a list without repetition until all entries are used, so that each occurs about
    equally often."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self._piles: dict[tuple[str, ...], list[str]] = {}

    def draw(self, entries: Sequence[str]) -> str:
        pile = self._piles.setdefault(tuple(entries), [])
        if not pile:
            pile.extend(entries)
            self._random.shuffle(pile)
        return pile.pop()


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def sign_candidates() -> Iterator[Record]:
    """Yield {prompt, target} records without end; `target` is the quoted text."""
    deck = _Deck("signs")
    kinds = ("shop", "shop", "notice", "direction", "title", "label", "label")
    while True:
        match deck.draw(kinds):
            case "shop":
                text, surface = (
                    f"{deck.draw(v.first_names)} {deck.draw(v.trades)}",
                    deck.draw(v.shop_surfaces),
                )
            case "notice":
                text, surface = deck.draw(v.notices), deck.draw(v.notice_surfaces)
            case "direction":
                number = deck.draw([str(n) for n in range(2, 60)])
                text, surface = f"{deck.draw(v.places)} {number}", deck.draw(v.direction_surfaces)
            case "title":
                text, surface = (
                    f"{deck.draw(v.title_heads)} {deck.draw(v.title_tails)}",
                    deck.draw(v.title_surfaces),
                )
            case _:
                text, surface = (
                    f"{deck.draw(v.label_goods)} {deck.draw(v.label_qualifiers)}",
                    deck.draw(v.label_surfaces),
                )
        verb = deck.draw(("that reads", "that says", "with the words", "bearing the text"))
        yield {
            "prompt": f'{_capital(surface)} {verb} "{text}", {deck.draw(v.sign_lights)}',
            "target": text,
        }


def scene_candidates() -> Iterator[Record]:
    """Yield {prompt} records without end: described scenes, and compositions of counted and
    coloured objects."""
    deck = _Deck("scenes")
    while True:
        if deck.draw(("scene", "scene", "composition")) == "scene":
            setting = v.scenes[deck.draw(list(v.scenes))]
            what = f"{_capital(deck.draw(setting['subjects']))} {deck.draw(setting['places'])}"
            text = f"{what}, {deck.draw(v.scene_lights)}, {deck.draw(v.scene_styles)}"
        else:
            first = f"{deck.draw(v.numbers)} {deck.draw(v.colours)} {deck.draw(v.objects)}"
            colour, single = deck.draw(v.colours), deck.draw(v.single_objects)
            article = "an" if colour[0] in "aeiou" else "a"
            second = f"{article} {colour} {single} {deck.draw(v.composition_places)}"
            text = f"{_capital(first)} {deck.draw(v.relations)} {second}"
        yield {"prompt": text}


def video_candidates() -> Iterator[Record]:
    """Yield {prompt} records without end: a subject, its movement, a place, and a movement of the
    camera."""
    deck = _Deck("videos")
    while True:
        kind = v.videos[deck.draw(list(v.videos))]
        who = (
            f"{_capital(deck.draw(kind['movers']))} {deck.draw(kind['motions'])} "
            f"{deck.draw(kind['places'])}"
        )
        yield {"prompt": f"{who}, {deck.draw(v.cameras)}"}


_CANDIDATES: dict[str, Callable[[], Iterator[Record]]] = {
    "signs": sign_candidates,
    "scenes": scene_candidates,
    "videos": video_candidates,
}


def distinct(candidates: Iterator[Record], count: int) -> list[Record]:
    """Return the first `count` candidates that neither repeat a target nor overlap too much with an
    earlier one."""
    accepted: list[Record] = []
    word_sets: list[frozenset[str]] = []
    texts: set[str] = set()
    for record in candidates:
        words = _words(record)
        if _text(record) in texts or _overlaps(words, word_sets):
            continue
        texts.add(_text(record))
        word_sets.append(words)
        accepted.append(record)
        if len(accepted) == count:
            break
    return accepted


def _text(record: Record) -> str:
    return record.get("target", record["prompt"])


def _words(record: Record) -> frozenset[str]:
    return frozenset(record["prompt"].lower().replace(",", "").replace('"', "").split())


def _overlaps(words: frozenset[str], others: Collection[frozenset[str]]) -> bool:
    return any(len(words & other) > MAX_OVERLAP * len(words | other) for other in others)


def split(name: str) -> tuple[list[Record], list[Record]]:
    """Return the project's own training and held-out records of one set."""
    train, heldout = SETS[name]
    records = distinct(_CANDIDATES[name](), train + heldout)
    # Every (train + heldout) / heldout-th record is held out, so that both halves have the same mix
    # of kinds.
    stride = len(records) // heldout
    kept = [record for index, record in enumerate(records) if index % stride != stride - 1]
    return kept, [record for index, record in enumerate(records) if index % stride == stride - 1]


def drawn_scenes() -> tuple[list[Record], list[Record]]:
    """Return training and held-out prompts of scenes of one or two objects
    (`reward_models.drawn_scenes`).

    Training has none of the kinds in `drawn_held_out`. Held out are 24 prompts without these kinds,
    and 24 with only these kinds.
    """
    objects = [" ".join(kind) for kind in itertools.product(v.drawn_colours, v.drawn_shapes)]
    kept, seen, unseen = list[Record](), list[Record](), list[Record]()
    for strange, group in itertools.groupby(
        sorted(objects, key=v.drawn_held_out.__contains__), v.drawn_held_out.__contains__
    ):
        own = list(group)
        texts = [text for kind in own for text in (f"a {kind}", f"two {kind}s")]
        texts += [
            f"a {first} {relation} a {second}"
            for first, second in itertools.permutations(own, 2)
            for relation in v.drawn_relations
        ]
        random.Random("drawn scenes").shuffle(texts)
        records = [{"prompt": text} for text in texts]
        if strange:
            unseen += records[:24]
        else:
            kept, seen = records[24:], records[:24]
    return kept, seen + unseen


def contents() -> dict[str, str]:
    """Return file name -> content of every generated prompt file."""
    digits = [
        {"prompt": f"number {word}", "target": str(value)} for value, word in enumerate(v.digits)
    ]
    files = {"digits.jsonl": _json_lines(digits)}
    for name, (kept, held) in {
        **{name: split(name) for name in SETS},
        "drawn_scenes": drawn_scenes(),
    }.items():
        files |= dict([_file(name, kept), _file(f"{name}_heldout", held)])
    return files


def _file(name: str, records: list[Record]) -> tuple[str, str]:
    if "target" in records[0]:
        return f"{name}.jsonl", _json_lines(records)
    return f"{name}.txt", "".join(record["prompt"] + "\n" for record in records)


def _json_lines(records: list[Record]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def main() -> None:
    """Write every file into the directory given, or where the package has them."""
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else DIRECTORY
    for name, content in contents().items():
        (directory / name).write_text(content, encoding="utf-8", newline="\n")
        print(f"{directory / name}: {content.count(chr(10))} prompts")


if __name__ == "__main__":
    main()
