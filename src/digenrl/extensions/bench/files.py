"""Read the prompt files of standard benchmarks as published, and name images as the benchmarks' own
tools expect.

The user brings the file. torch is imported only for the embedded scenes.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from digenrl import prompts

if TYPE_CHECKING:
    from digenrl.extensions.bench.geneval import Clause, Rules
    from reward_models.drawn_scenes import Scene

FOLDER = Path("suites")
"""Folder in which a suite's file is looked for, inside a folder of the suite's name."""


class SuiteError(ValueError):
    """A benchmark that cannot be run as asked: the file, its content, or images of another
    setting."""


@dataclass(frozen=True)
class Item:
    """One prompt of a suite."""

    key: str
    """Name of its images: the line's number or the published id."""
    prompt: str
    tags: tuple[str, ...]
    """Categories that the prompt counts for; a prompt of VBench may have several."""
    rules: Mapping[str, object] = field(default_factory=dict)
    """Published line; for GenEval's rules {tag, include, exclude}."""


@dataclass(frozen=True)
class PromptFormat:
    """Known facts of a suite: its file, its number of samples, the names of its images."""

    read: Callable[[str], list[Item]]
    """Function from the file's text to items. It raises ValueError or LookupError for a file of
    another form."""
    samples: int
    """Samples of each prompt that the suite asks for."""
    layout: str
    """Path of one image, from {key} or {prompt}, and {sample}. Without {sample} all samples are in
    one square grid."""
    then: str
    """Official way to score the images in {folder}, for the user."""
    file: str = ""
    """Name of the published file; "" = no file is needed."""
    source: str = ""
    """Address of the published file."""
    sha256: str = ""
    """SHA-256 of the published file; "" = not known here."""

    @property
    def video(self) -> bool:
        """Whether the suite asks for videos."""
        return self.layout.endswith(".mp4")


@dataclass(frozen=True)
class Suite:
    """A suite after reading its file."""

    name: str
    kind: PromptFormat
    items: tuple[Item, ...]
    digest: str
    """SHA-256 of the file."""

    @property
    def published(self) -> bool | None:
        """Whether the file is the published one; None = not known here."""
        return self.digest == self.kind.sha256 if self.kind.sha256 else None


def read_suite(name: str, file: Path | None = None) -> Suite:
    """Read the suite `name`, from `file` or from the file in the suite's folder.

    Raises:
        SuiteError: the file does not exist or has another form. The message names its source and
            its place.
    """
    kind = KINDS[name]
    if not kind.file and file is not None:
        raise SuiteError(
            f"suite={name} needs no file: its prompts are embedded; leave file={file} out."
        )
    path = file or (
        FOLDER / name / kind.file if kind.file else prompts.locate_file("drawn_scenes_heldout.txt")
    )
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SuiteError(
            f"{path}: cannot be read ({error.strerror}). Download {kind.source} there, or name "
            "your copy: file=PATH."
        ) from error
    try:
        items = kind.read(content.decode("utf-8-sig"))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        cause = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise SuiteError(
            f"{path}: is not {kind.file or name} as published ({cause}); see {kind.source}."
        ) from error
    if not items:
        raise SuiteError(f"{path}: holds no prompt; see {kind.source}.")
    return Suite(name, kind, tuple(items), hashlib.sha256(content).hexdigest())


def _parse_geneval(text: str) -> list[Item]:
    lines = [json.loads(line) for line in text.splitlines() if line.strip()]
    for line in lines:
        for clause in [*line["include"], *line.get("exclude", [])]:
            clause["class"], clause["count"]
    return [
        Item(f"{row:05d}", line["prompt"], (line["tag"],), line) for row, line in enumerate(lines)
    ]


def _parse_dpg(text: str) -> list[Item]:
    found: dict[str, str] = {}
    for row in csv.DictReader(io.StringIO(text)):
        found.setdefault(row["item_id"], row["text"])
    if odd := [key for key in found if Path(key).name != key]:
        raise ValueError(f"item_id {odd[0]!r} is no name of a file")
    return [Item(key, prompt, ("all",)) for key, prompt in found.items()]


def _parse_parti(text: str) -> list[Item]:
    rows = list(csv.DictReader(io.StringIO(text), delimiter="\t", quoting=csv.QUOTE_NONE))
    return [
        Item(f"{number:05d}", row["Prompt"], (row["Category"],), row)
        for number, row in enumerate(rows)
    ]


def _parse_vbench(text: str) -> list[Item]:
    rows = json.loads(text)
    if odd := [
        row["prompt_en"]
        for row in rows
        if "/" in row["prompt_en"] or len(row["prompt_en"].encode()) > 240
    ]:
        raise ValueError(
            f"the tool names videos by their prompts, and {odd[0]!r} is no name of a file"
        )
    return [
        Item(f"{number:05d}", row["prompt_en"], tuple(row["dimension"]))
        for number, row in enumerate(rows)
    ]


def _parse_scenes(text: str) -> list[Item]:
    """Return the embedded scenes with lines for GenEval's rules: exactly the objects that the
    prompt names."""
    from reward_models.drawn_scenes import asked_scene

    items = []
    for row, prompt in enumerate(text.split("\n")):
        if prompt.strip():
            rules = scene_rules(asked_scene(prompt))
            items.append(Item(f"{row:05d}", prompt, (rules["tag"],), {**rules, "prompt": prompt}))
    return items


def scene_rules(scene: Scene) -> Rules:
    """Return GenEval's rules of a scene.

    Two objects of one shape differ by colour only, and GenEval's clauses do not tell them apart.
    For these the class is colour and shape. `object` is the class of everything in the picture.
    """
    number = len(scene.kinds)
    exclude: list[Clause] = [{"class": "object", "count": number + 1}]
    if not scene.relation:
        colour, shape = scene.kinds[0]
        return {
            "tag": "colors" if number == 1 else "counting",
            "include": [{"class": shape, "count": number, "color": colour}],
            "exclude": exclude,
        }
    same = len({shape for _, shape in scene.kinds}) == 1
    first, second = (
        _clause_of(colour, shape, named_together=same) for colour, shape in scene.kinds
    )
    first["position"] = [scene.relation, 0]
    return {"tag": "position", "include": [second, first], "exclude": exclude}


def _clause_of(colour: str, shape: str, named_together: bool) -> Clause:
    if named_together:
        return {"class": f"{colour} {shape}", "count": 1}
    return {"class": shape, "count": 1, "color": colour}


PAIRS = "{key}/samples/{sample:04d}.png"
KINDS: Mapping[str, PromptFormat] = {
    "geneval": PromptFormat(
        _parse_geneval,
        samples=4,
        layout=PAIRS,
        then="evaluation/evaluate_images.py {folder} of github.com/djghosh13/geneval",
        file="evaluation_metadata.jsonl",
        source="https://github.com/djghosh13/geneval/blob/main/prompts/evaluation_metadata.jsonl",
        sha256="5c48e0813e812e3c373fa5c8ed07a8f0a483be30272b4427b0559c8048e67c13",
    ),
    "dpg": PromptFormat(
        _parse_dpg,
        samples=4,
        layout="{key}.png",
        then="dpg_bench/dist_eval.sh {folder} RESOLUTION of github.com/TencentQQGYLab/ELLA",
        file="dpg_bench.csv",
        source="https://github.com/TencentQQGYLab/ELLA/blob/main/dpg_bench/dpg_bench.csv",
    ),
    "parti": PromptFormat(
        _parse_parti,
        samples=1,
        layout=PAIRS,
        then="people: PartiPrompts has no tool; reward=NAME scores {folder} with a reward",
        file="PartiPrompts.tsv",
        source="https://github.com/google-research/parti/blob/main/PartiPrompts.tsv",
        sha256="fab29e41bb512a169b56acab4cf2a41dcb675e285df2efcde6640c7dd3c440eb",
    ),
    "vbench": PromptFormat(
        _parse_vbench,
        samples=5,
        layout="{prompt}-{sample}.mp4",
        then="vbench evaluate --videos_path {folder} --dimension DIMENSION of "
        "github.com/Vchitect/VBench",
        file="VBench_full_info.json",
        source="VBench_full_info.json of https://github.com/Vchitect/VBench/tree/master/vbench",
    ),
    "scenes": PromptFormat(
        _parse_scenes, samples=8, layout=PAIRS, then="the detector of reward_models.scene_judges"
    ),
}
"""Suite -> known facts of it."""
