"""Types of the values of keys: their ranges, and the phrase by which `--help` and
docs/configuration.md name them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints, WithJsonSchema


def _check_component(node: Mapping[str, object]) -> Mapping[str, object]:
    if "_target_" not in node:
        raise ValueError("has no _target_")
    if node.get("_partial_") is not True:
        raise ValueError("lacks _partial_=true")
    return node


def _at_most_all(shares: dict[str, float]) -> dict[str, float]:
    # Sums such as 0.1 + 0.2 + 0.7 may exceed 1 by rounding.
    if sum(shares.values()) > 1.0 + 1e-9:
        raise ValueError("sums to more than 1")
    return shares


def _check_order(ports: list[int]) -> list[int]:
    if ports[0] > ports[-1]:
        raise ValueError(f"{ports} begins after its end, expected [first, last]")
    return ports


def _check_weights(files: list[dict[str, object]]) -> list[dict[str, object]]:
    for entry in files:
        file, weight = entry.get("file"), entry.get("weight")
        if entry.keys() != {"file", "weight"} or not isinstance(file, str) or not file.strip():
            raise ValueError(f"holds {entry}, expected {{file: path, weight: number}}")
        # In Python a bool is an int.
        if (
            not isinstance(weight, (int, float))
            or isinstance(weight, bool)
            or not 0 < weight < math.inf
        ):
            raise ValueError(f"gives {file} the weight {weight}, expected a number above 0")
    if len({entry["file"] for entry in files}) < len(files):
        raise ValueError("names a file twice")
    return files


def _check_span(rollouts: dict[str, int]) -> dict[str, int]:
    if rollouts.keys() != {"min", "max"}:
        raise ValueError("names not both, expected {min: m, max: n}")
    if rollouts["min"] > rollouts["max"]:
        raise ValueError(
            f"has min {rollouts['min']} above max {rollouts['max']}: lower min, or raise max"
        )
    return rollouts


AtLeast0 = Annotated[int, Field(ge=0)]
AtLeast1 = Annotated[int, Field(ge=1)]
Amount = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Part = Annotated[float, Field(gt=0, lt=1)]
Steps = Annotated[int, Field(ge=1, le=1000)]
Port = Annotated[int, Field(ge=1, le=65535)]
Ports = Annotated[
    list[Port],
    Field(min_length=2, max_length=2),
    AfterValidator(_check_order),
    WithJsonSchema({"phrase": "[first, last], each from 1 to 65535"}),
]
Auto = Literal["auto"]
ABSENT: Any = None
"""Default of a key that a configuration need not have. The default is never read."""
# Not blank alone.
_Text = StringConstraints(pattern=r"\S")
Text = Annotated[str, _Text, WithJsonSchema({"phrase": "text"})]
Name = Annotated[
    str,
    StringConstraints(pattern=r"^\w[\w.+= -]*$"),
    WithJsonSchema(
        {
            "phrase": (
                "name of a directory: letters, digits, spaces, _ . + = -; a letter or digit first"
            )
        }
    ),
]
# `phrase` is what --help prints. `path` makes `paths` turn the value into an absolute path.
Directory = Annotated[str, _Text, WithJsonSchema({"phrase": "path of a directory", "path": "own"})]
File = Annotated[str, _Text, WithJsonSchema({"phrase": "path of a file", "path": "own"})]
PromptFile = Annotated[
    str,
    _Text,
    WithJsonSchema({"phrase": "path of a .txt or .jsonl prompt file", "path": "prompts"}),
]
PromptFiles = Annotated[
    list[dict[str, Any]],
    Field(min_length=1),
    AfterValidator(_check_weights),
    WithJsonSchema({"phrase": "[{file: path, weight: number > 0}, ...]", "path": "prompts"}),
]
Package = Annotated[str, _Text, WithJsonSchema({"phrase": "package name"})]
Component = Annotated[
    dict[str, Any],
    AfterValidator(_check_component),
    WithJsonSchema({"phrase": "a group of keys with _target_ and _partial_=true"}),
]
Kept = Annotated[
    dict[Literal["products", "attention", "inputs", "offload"], Share],
    AfterValidator(_at_most_all),
    WithJsonSchema({"phrase": "{products|attention|inputs|offload: share of the blocks}"}),
]
Recomputation = bool | Share | Literal["auto", "products", "attention", "offload"] | Kept
Span = Annotated[
    dict[Literal["min", "max"], AtLeast1],
    AfterValidator(_check_span),
    WithJsonSchema({"phrase": "{min: m, max: n}, whole numbers >= 1"}),
]
ByTrainer = Annotated[
    list[Recomputation],
    Field(min_length=1),
    WithJsonSchema({"phrase": "a list of these, one for each trainer"}),
]
Urls = Annotated[dict[str, list[Text]], WithJsonSchema({"phrase": "{reward: [URL, ...]}"})]
Seconds = Annotated[
    dict[str, dict[str, Positive]],
    WithJsonSchema({"phrase": "{stage: {pool: seconds}}, as `make profile` writes it"}),
]
GpuName = Annotated[str, _Text, WithJsonSchema({"phrase": "name of the GPU, or cpu"})]
PoolPair = Annotated[
    list[Text], Field(min_length=2, max_length=2), WithJsonSchema({"phrase": "[pool, pool]"})
]
