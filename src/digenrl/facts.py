"""Facts of model families that need no torch: sizes, latents, counts, tiny builds.

Every adapter module has a file of facts beside it: `NAME.py` has `NAME.facts.yaml`. The adapter,
the planner, the configuration and the tests all read this file, and none of them imports another
for it. Its first part is written by hand, one entry for each family; its second part is written by
`python -m benchmarks.count_facts MODEL`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import yaml

ENDING = ".facts.yaml"
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Latents:
    """Geometry of a family's latents, as the planner counts with it."""

    side: int = 8
    """Pixels per latent pixel and side."""
    frames: float = 4.0
    """Video frames per latent frame behind the first, in the mean."""
    channels: int = 16
    """Numbers per latent pixel."""
    patch: int = 2
    """Latent pixels per token and side."""


class FlopsPoint(TypedDict):
    """FLOPs that were counted of one forward of a sample."""

    tokens: int
    text: int
    """Text tokens."""
    flops: float


class Fitted(TypedDict):
    """Bytes of a forward: `forward`, and for each row what it takes itself, for each of its tokens
    and for each of its text tokens."""

    forward: float
    row: float
    token: float
    text: float


class Encoders(TypedDict):
    """Text encoders of a model."""

    parameters: int
    tokens: int
    """Tokens of a prompt."""


class DecoderBytes(TypedDict):
    """Peak bytes of decoding: fixed, by pixel, by frame, by both."""

    fixed: float
    pixel: float
    frame: float
    both: float


class Decoder(TypedDict):
    """Counts of the VAE's decoder."""

    parameters: int
    flops_per_latent_pixel_frame: float
    bytes: DecoderBytes


class ModelSizes(TypedDict):
    """Sizes of one model. The first keys are published and written by hand, from `parameters` on
    they are counted. Counts that depend on training have "full", "attn" and "attn_ff" (all weights,
    LoRA on attention, LoRA on feed-forwards too)."""

    network: Mapping[str, Any]
    """Arguments of the transformer's class."""
    period: NotRequired[int]
    """Number of blocks whose mean stands for every block, if blocks differ (else 1)."""
    encoders: Encoders
    points: list[list[int]]
    """[frames, rows, columns] of tokens at which FLOPs are counted."""
    blocks: int
    hidden: int
    attention_blocks: int
    text_tokens: int
    joint_attention: bool
    """Whether text goes through the blocks."""
    padded: NotRequired[int]
    """Text tokens in addition to `model.max_sequence_length`, up to which every prompt is padded.
    Absent if padding is cut."""
    parameters: int
    largest_block_parameters: int
    outside_parameters: int
    """Parameters outside the blocks."""
    buffers: NotRequired[int]
    """Numbers in the buffers that the network stores."""
    tensors: int
    lora_parameters_per_rank: Mapping[str, int]
    flops: list[FlopsPoint]
    """Four points: few and many tokens, each with much and with little text."""
    kept_bytes: Mapping[str, Mapping[str, Fitted]]
    """Training -> mode of `digenrl.recompute` -> bytes that a unit of blocks keeps."""
    beside_bytes: Mapping[str, Mapping[str, Fitted]]
    """Training -> mode -> bytes beside those that blocks keep."""
    repeated_flops: Mapping[str, Mapping[str, float]]
    """Training -> mode -> share of a forward's FLOPs outside attention that a backward repeats."""
    forward_bytes: Mapping[str, Fitted]
    """Training -> peak bytes of a denoising step."""
    decode: Decoder


@dataclass(frozen=True)
class Facts:
    """Facts of one model family."""

    family: str
    """Name of the family: the key of the entry, and the adapter's class attribute."""
    adapter: str
    """Name of the adapter's class, in the module beside which the file lies."""
    file: Path
    """File that holds the facts, beside the adapter's module."""
    tiny: Mapping[str, Any] = field(default_factory=dict)
    """Parts of the tiny pipeline, in the order in which weights are drawn
    (`digenrl.models.tiny`)."""
    models: Mapping[str, ModelSizes] = field(default_factory=dict)
    """Option of configs/model -> its sizes. A model that nobody has counted has no counts."""
    latents: Latents = Latents()
    own_levels: str = ""
    """Part of a sample that the network denoises on noise levels of its own ("sound"). A solver
    that uses the sample's levels would be wrong for it. "": no such part."""
    context: bool = False
    """Whether several ranks can share the tokens of a sample (`parallel.context`)."""
    conditioning: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)
    """Shapes of one prompt's conditioning at published size. Words stand for numbers: `text` and
    `glyphs` tokens, `tokens` of an image, latent `frames`, `rows` and `columns`."""
    decoded: tuple[int, int, int] = (1, 64, 64)
    """Latent frames, rows and columns at which FLOPs of the decoder are counted."""
    cpu_tiny: Mapping[str, int] = field(default_factory=dict)
    """Keys of `sampling` that differ under `hardware=cpu_tiny`."""
    traps: tuple[Mapping[str, Any], ...] = ()
    """Settings with which others saw the model break: `key`, `at_least` (a number), what was
    `seen` and where, and what to `do`."""
    measured: Mapping[str, Any] = field(default_factory=dict)
    """What `make gpu` measures of the first of `models`: `experiment`, whose sizes are taken;
    `images_per_s` and `source`, a published speed of its RL steps per GPU. {}: nothing."""


def of_module(module: str) -> Mapping[str, Facts]:
    """Return family -> facts of an adapter module, which is not imported; {} where no file lies
    beside the module."""
    name = module.rpartition(".")[2] + ENDING
    paths = (folder / name for folder in _folders_of(module))
    return next((_read_facts(path) for path in paths if path.is_file()), {})


def file_beside(target: str, name: str) -> Path:
    """Return the path of the file `name` beside the module of a `_target_`, which is not imported;
    the bare name where there is no such file."""
    paths = (folder / name for folder in _folders_of(target.rpartition(".")[0]))
    return next((path for path in paths if path.is_file()), Path(name))


def _folders_of(module: str) -> list[Path]:
    """Return the directories that may hold a module, which is not imported."""
    root, *rest = module.split(".")
    if not module.replace(".", "_").isidentifier():
        return []
    try:
        spec = find_spec(root)  # of a top-level name: imports nothing
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    folders = spec.submodule_search_locations or (
        [str(Path(spec.origin).parent)] if spec.origin else []
    )
    return [Path(folder).joinpath(*rest[:-1]) for folder in folders]


def of_target(target: str) -> Facts | None:
    """Return the facts of the adapter that a model's `_target_` names; None where there are
    none."""
    if not isinstance(target, str):  # a configuration that is not checked yet
        return None
    module, _, adapter = target.rpartition(".")
    return next((facts for facts in of_module(module).values() if facts.adapter == adapter), None)


@cache
def facts_by_family() -> Mapping[str, Facts]:
    """Return family -> facts of every adapter in this package."""
    files = sorted(Path(__file__).parent.rglob(f"*{ENDING}"))
    return {family: facts for path in files for family, facts in _read_facts(path).items()}


def cpu_tiny(target: str | None, key: str, usual: int) -> int:
    """Return the value of `sampling.KEY` under `hardware=cpu_tiny` for the model's `_target_`."""
    facts = of_target(target or "")
    return usual if facts is None else facts.cpu_tiny.get(key, usual)


@cache
def _read_facts(path: Path) -> Mapping[str, Facts]:
    documents = list(yaml.load_all(path.read_text(encoding="utf-8"), Loader=_LOADER))
    written, counts = documents[0], documents[1] if len(documents) > 1 else {}
    found = {}
    for family, entry in written.items():
        models = {
            name: sizes | counts.get(name, {}) for name, sizes in entry.pop("models", {}).items()
        }
        latents = Latents(**entry.pop("latents", {}))
        try:
            found[family] = Facts(family, file=path, models=models, latents=latents, **entry)
        except TypeError as error:
            raise ValueError(
                f"{path.name}: {family}: {error}; the keys are the fields of digenrl.facts.Facts"
            ) from error
    return found
