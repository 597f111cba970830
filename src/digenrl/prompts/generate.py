"""Writes the project's own prompt sets, the same bytes every time: `python -m digenrl.prompts.generate [DIRECTORY]`.

A set and its held-out split come from one stream, so that they have the same distribution and share no prompt; no
held-out sign has the text of a training sign. A candidate whose words overlap too much with an accepted prompt is
skipped.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from digenrl.prompts import DIRECTORY
from digenrl.prompts import vocabulary as v

Record = dict[str, str]

SETS: dict[str, tuple[int, int]] = {"signs": (500, 100), "scenes": (500, 100), "videos": (200, 50)}
"""Name -> (training prompts, held-out prompts)."""
MAX_OVERLAP = 0.6
"""Largest accepted Jaccard overlap of the word sets of two prompts."""


class _Deck:
    """Draws from a list without repetition until it is used up, so that every entry occurs about equally often."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self._piles: dict[tuple[str, ...], list[str]] = {}

    def draw(self, entries: tuple[str, ...]) -> str:
        pile = self._piles.setdefault(entries, [])
        if not pile:
            pile.extend(entries)
            self._random.shuffle(pile)
        return pile.pop()


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def sign_candidates() -> Iterator[Record]:
    """Endless {prompt, target} records; `target` is the quoted text."""
    deck = _Deck("signs")
    kinds = ("shop", "shop", "notice", "direction", "title", "label", "label")
    while True:
        match deck.draw(kinds):
            case "shop":
                text, surface = f"{deck.draw(v.FIRST_NAMES)} {deck.draw(v.TRADES)}", deck.draw(v.SHOP_SURFACES)
            case "notice":
                text, surface = deck.draw(v.NOTICES), deck.draw(v.NOTICE_SURFACES)
            case "direction":
                number = deck.draw(tuple(str(n) for n in range(2, 60)))
                text, surface = f"{deck.draw(v.PLACES)} {number}", deck.draw(v.DIRECTION_SURFACES)
            case "title":
                text, surface = f"{deck.draw(v.TITLE_HEADS)} {deck.draw(v.TITLE_TAILS)}", deck.draw(v.TITLE_SURFACES)
            case _:
                text, surface = (
                    f"{deck.draw(v.LABEL_GOODS)} {deck.draw(v.LABEL_QUALIFIERS)}",
                    deck.draw(v.LABEL_SURFACES),
                )
        verb = deck.draw(("that reads", "that says", "with the words", "bearing the text"))
        yield {"prompt": f'{_capital(surface)} {verb} "{text}", {deck.draw(v.SIGN_LIGHTS)}', "target": text}


def scene_candidates() -> Iterator[Record]:
    """Endless {prompt} records: described scenes, and compositions of counted and coloured objects."""
    deck = _Deck("scenes")
    while True:
        if deck.draw(("scene", "scene", "composition")) == "scene":
            subjects, places = v.SCENES[deck.draw(tuple(v.SCENES))]
            what = f"{_capital(deck.draw(subjects))} {deck.draw(places)}"
            text = f"{what}, {deck.draw(v.SCENE_LIGHTS)}, {deck.draw(v.SCENE_STYLES)}"
        else:
            first = f"{deck.draw(v.NUMBERS)} {deck.draw(v.COLOURS)} {deck.draw(v.OBJECTS)}"
            colour, single = deck.draw(v.COLOURS), deck.draw(v.SINGLE_OBJECTS)
            article = "an" if colour[0] in "aeiou" else "a"
            second = f"{article} {colour} {single} {deck.draw(v.COMPOSITION_PLACES)}"
            text = f"{_capital(first)} {deck.draw(v.RELATIONS)} {second}"
        yield {"prompt": text}


def video_candidates() -> Iterator[Record]:
    """Endless {prompt} records: who moves, how, where, and what the camera does."""
    deck = _Deck("videos")
    while True:
        movers, motions, places = v.VIDEOS[deck.draw(tuple(v.VIDEOS))]
        who = f"{_capital(deck.draw(movers))} {deck.draw(motions)} {deck.draw(places)}"
        yield {"prompt": f"{who}, {deck.draw(v.CAMERAS)}"}


_CANDIDATES: dict[str, Callable[[], Iterator[Record]]] = {
    "signs": sign_candidates,
    "scenes": scene_candidates,
    "videos": video_candidates,
}


def distinct(candidates: Iterator[Record], count: int) -> list[Record]:
    """The first `count` candidates that neither repeat a target nor overlap too much with an earlier one."""
    accepted: list[Record] = []
    word_sets: list[frozenset[str]] = []
    texts: set[str] = set()
    for record in candidates:
        words = frozenset(record["prompt"].lower().replace(",", "").replace('"', "").split())
        key = record.get("target", record["prompt"])
        if key in texts or any(len(words & other) > MAX_OVERLAP * len(words | other) for other in word_sets):
            continue
        texts.add(key)
        word_sets.append(words)
        accepted.append(record)
        if len(accepted) == count:
            break
    return accepted


def contents() -> dict[str, str]:
    """File name -> content of every generated prompt file."""
    digits = [{"prompt": f"number {word}", "target": str(value)} for value, word in enumerate(v.DIGITS)]
    files = {"digits.jsonl": _json_lines(digits)}
    for name, (train, heldout) in SETS.items():
        records = distinct(_CANDIDATES[name](), train + heldout)
        # Every (train + heldout) / heldout-th record is held out, so that both halves have the same mix of kinds.
        stride = len(records) // heldout
        kept = [record for index, record in enumerate(records) if index % stride != stride - 1]
        held = [record for index, record in enumerate(records) if index % stride == stride - 1]
        suffix, write = ("jsonl", _json_lines) if name == "signs" else ("txt", _text_lines)
        files[f"{name}.{suffix}"], files[f"{name}_heldout.{suffix}"] = write(kept), write(held)
    return files


def _json_lines(records: list[Record]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def _text_lines(records: list[Record]) -> str:
    return "".join(record["prompt"] + "\n" for record in records)


def main() -> None:
    """Write every file into the directory given, or beside this module."""
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else DIRECTORY
    for name, content in contents().items():
        (directory / name).write_text(content, encoding="utf-8", newline="\n")
        print(f"{directory / name}: {content.count(chr(10))} prompts")


if __name__ == "__main__":
    main()
