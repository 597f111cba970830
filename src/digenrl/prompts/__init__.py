"""Prompt files: their places and their format. Standard library only (no torch).

`.txt` holds one prompt per line. `.jsonl` holds one object `{prompt, negative?, target?, id?,
...metadata}` per line, with images as paths relative to the file: `image` (or `images`, a list),
`last_image`, `target_image`, and the samples to train on: `media`, or `preferred` and `rejected`,
each a path or a list. Lines that show nothing are skipped. LF, CRLF and CR end a line, and a byte
order mark may begin one. Text is kept as written, without Unicode normalisation. The files beside
this module are the project's own sets; `python -m scripts.generate_prompts` writes them again.
"""

from __future__ import annotations

import difflib
import hashlib
import io
import json
import math
import os
import unicodedata
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from digenrl.images import ROLES, SAMPLES, ImageLimits, PromptImage, open_regular, read_image

DIRECTORY = Path(__file__).resolve().parent
SUFFIXES = (".txt", ".jsonl")
FIELDS = ("prompt", "negative", "target", "images", *ROLES)
"""Fields of a .jsonl line that have a meaning here. All others are metadata, unless they look like
a misspelt field."""
MAX_CHARACTERS = 10_000
"""Longest accepted prompt. Text encoders cut at 77 to 512 tokens, so a longer line means a damaged
file."""
_MAX_LINE_BYTES = 1 << 20
_MAX_PROBLEMS = 20
_BLANKS = b" \t\r\n\v\f"
_UNSEEN = ("Cf", "Cc", "Zl", "Zp", "Zs")
"""Unicode categories of characters that show nothing."""


class PromptFileError(ValueError):
    """A prompt file cannot be used. The message names file and line of each problem (the first
    twenty)."""


@dataclass(frozen=True)
class Prompt:
    """One line of a prompt file."""

    text: str
    """What to draw. Kept exactly as written (no Unicode normalisation)."""
    negative: str | None = None
    """Negative prompt of classifier-free guidance; None = the family's default."""
    target: str | None = None
    """What a scorer should find (the word of a sign, the digit); None = the scorer derives it from
    the text."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Every other JSONL field; travels to the scorers untouched."""
    images: tuple[PromptImage, ...] = ()
    """What is edited, animated or compared with; a family reads those whose role it knows
    (`Codec.reads`)."""

    @property
    def uid(self) -> int:
        """63-bit hash of the content, never of the line number, so that reordering a file changes
        no sample."""
        facts: list[Any] = [self.text, self.negative, self.target, dict(self.metadata)]
        facts += [[image.role, image.digest] for image in self.images]
        content = json.dumps(facts, sort_keys=True, ensure_ascii=False)
        return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class PromptFile:
    """A valid prompt file without duplicates."""

    path: Path
    prompts: tuple[Prompt, ...]
    """Prompts in file order. Never empty."""
    lines: tuple[int, ...]
    """1-based line number of each prompt."""
    duplicates: tuple[tuple[int, int], ...]
    """(line, line of the first occurrence) of every prompt that was left out as a duplicate."""


def builtin_files() -> list[str]:
    """Return the names of the project's own prompt files."""
    return sorted(path.name for path in DIRECTORY.iterdir() if path.suffix in SUFFIXES)


def locate_file(name: str | Path) -> Path:
    """Return the file of `name`: a path (from the working directory), or else one of the project's
    own sets.

    Raises:
        PromptFileError: there is no such path or set, or it is no regular file.
    """
    given = Path(os.path.expanduser(name))
    candidates = [given, DIRECTORY / given] if given.name == str(given) else [given]
    for candidate in candidates:
        if candidate.is_file():
            return candidate.absolute()  # a link keeps its own suffix and folder
        if candidate.exists():
            raise PromptFileError(
                f"{candidate}: not a regular file; name a {' or '.join(SUFFIXES)} file."
            )
    raise PromptFileError(
        f"{name}: no such prompt file (looked in {Path.cwd()} and among the project's own: "
        f"{', '.join(builtin_files())})."
    )


def read_prompt_file(name: str | Path, limits: ImageLimits | None = None) -> PromptFile:
    """Read and check the prompt file `name` (see `locate_file`).

    Args:
        limits: bounds within which every image is decoded once; None = images are only read, for
            their digests.

    Raises:
        PromptFileError: missing, unreadable, not UTF-8, empty, or with malformed lines or unusable
            images.
    """
    path = locate_file(name)
    if path.suffix.lower() not in SUFFIXES:
        raise PromptFileError(f"{path}: unknown kind {path.suffix!r}; use {' or '.join(SUFFIXES)}.")
    found, first_line = list[Prompt](), dict[int, int]()
    duplicates, problems, wrong = list[tuple[int, int]](), list[str](), 0
    try:
        for line, raw in _read_lines(path):
            try:
                prompt = _parse_line(path, raw, limits)
            except ValueError as error:
                wrong += 1
                problems += [f"{path}:{line}: {error}"] * (wrong <= _MAX_PROBLEMS)
                continue
            if (first := first_line.setdefault(prompt.uid, line)) != line:
                duplicates.append((line, first))
            else:
                found.append(prompt)
    except OSError as error:
        raise PromptFileError(f"{path}: cannot be read ({error.strerror}).") from error
    if problems:
        more = [f"... and {wrong - _MAX_PROBLEMS} more lines"] if wrong > _MAX_PROBLEMS else []
        raise PromptFileError("; ".join([*problems, *more]))
    if not found:
        raise PromptFileError(f"{path}: holds no prompt; write one a line.")
    return PromptFile(path, tuple(found), tuple(first_line.values()), tuple(duplicates))


def weighted_files(
    setting: str | Path | Sequence[Mapping[str, Any]],
) -> tuple[tuple[str | Path, float], ...]:
    """Return (file, weight) of each prompt file that `data.prompts` or `data.heldout` names."""
    if isinstance(setting, (str, Path)):
        return ((setting, 1.0),)
    return tuple((str(entry["file"]), float(entry["weight"])) for entry in setting)


def most_of_batch(weights: Sequence[float], prompts: int) -> list[int]:
    """Return the most prompts of a batch of `prompts` that each file with these weights gives."""
    return [math.ceil(prompts * weight / sum(weights) - 1e-9) for weight in weights]


def _read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (1-based number, bytes) of every line that shows something, without a byte order mark.

    Raises:
        PromptFileError: a line is too long to be read.
    """
    number = 0
    # Latin-1 keeps every byte, and text mode knows all three ends of a line.
    with io.TextIOWrapper(open_regular(path), encoding="latin-1", newline=None) as file:
        while read := file.readline(_MAX_LINE_BYTES + 1):
            number += 1
            if len(read) > _MAX_LINE_BYTES:
                raise PromptFileError(
                    f"{path}:{number}: the line has more than {_MAX_LINE_BYTES} bytes; end it "
                    f"earlier (a prompt has at most {MAX_CHARACTERS} characters)."
                )
            raw = read.encode("latin-1").removeprefix(BOM_UTF8)
            if has_visible_text(raw.decode("utf-8", errors="replace")):
                yield number, raw


def has_visible_text(text: str) -> bool:
    """Return whether a text has a character that can be seen. Spaces of any width, marks of
    direction and byte order marks cannot.

    >>> has_visible_text("\u00a0\u200b\ufeff"), has_visible_text("a")
    (False, True)
    """
    return any(not (each.isspace() or unicodedata.category(each) in _UNSEEN) for each in text)


def _parse_line(path: Path, raw: bytes, limits: ImageLimits | None) -> Prompt:
    """Return the prompt of a line. Raises ValueError, whose text says what is wrong with the
    line."""
    text = _decode_line(raw.strip(_BLANKS))
    if path.suffix.lower() == ".jsonl":
        return _json_prompt(text, path.parent, limits)
    return Prompt(_check_text(text, "prompt"))


def _decode_line(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"byte {error.start + 1} is not UTF-8 ({error.reason}); save the file as UTF-8."
        ) from error


def _check_text(text: object, name: str) -> str:
    if not isinstance(text, str):
        raise ValueError(f"{name} = {json.dumps(text)[:60]} must be text.")
    if "\0" in text:
        raise ValueError(f"{name} holds a NUL character; remove it.")
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"{name} has {len(text)} characters; at most {MAX_CHARACTERS}.")
    return text


def _reject_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON number.")


def _parse_finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is out of the range of a number.")
    return value


def _unique_fields(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f'the field "{twice[:60]}" stands there twice; leave one out.')
    return found


def _json_prompt(text: str, folder: Path, limits: ImageLimits | None) -> Prompt:
    try:
        fields = json.loads(
            text,
            parse_constant=_reject_constant,
            parse_float=_parse_finite,
            object_pairs_hook=_unique_fields,
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON at column {error.colno} ({error.msg}).") from error
    except RecursionError as error:
        raise ValueError("nested too deeply.") from error
    if not isinstance(fields, dict):
        raise ValueError(
            f'must be an object such as {{"prompt": ...}}, not {type(fields).__name__}.'
        )
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("half of a surrogate pair (\\ud800 .. \\udfff) is no text.") from error
    if "prompt" not in fields:
        raise ValueError(
            f'the field "prompt" is missing (it has {", ".join(sorted(fields)) or "no field"}).'
        )
    for name in sorted(fields.keys() - set(FIELDS)):
        if close := difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.8):
            raise ValueError(
                f'no such field: "{name[:60]}"; nearest: {close[0]} (a field for scorers needs '
                "another name)."
            )
    prompt = _check_text(fields.pop("prompt"), "prompt")
    if not has_visible_text(prompt):
        raise ValueError("prompt is empty.")
    given = {
        name: text
        for name in ("negative", "target")
        if (text := fields.pop(name, None)) is not None
    }
    words = {name: _check_text(text, name) for name, text in given.items()}
    return Prompt(
        prompt, **words, images=tuple(_take_images(fields, folder, limits)), metadata=fields
    )


def _take_images(
    fields: dict[str, object], folder: Path, limits: ImageLimits | None
) -> Iterator[PromptImage]:
    """Yield the images that a line names, and remove them from `fields`."""
    several = fields.pop("images", None)
    if several is not None and fields.get("image") is not None:
        raise ValueError('give "image" or "images", not both.')
    if not isinstance(several, list | None):
        raise ValueError(f"images = {json.dumps(several)[:60]} must be a list of paths.")
    for role in ROLES:
        one = fields.pop(role, None)
        listed = one if role in SAMPLES else several if role == "image" else None
        names = listed if isinstance(listed, list) and listed else [] if one is None else [one]
        for name in names:
            yield read_image(role, _check_text(name, role), folder, limits)
