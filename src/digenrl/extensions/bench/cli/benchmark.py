"""`make benchmark RUN=... SUITE=geneval|dpg|parti|vbench|scenes`: a standard benchmark of a
checkpoint and its base.

    digenrl benchmark run=RUN suite=scenes
    digenrl benchmark run=RUN suite=geneval detector=DIR colours=DIR [step=base|last|N] [file=PATH]
    digenrl benchmark suite=dpg step=base experiment=sd35_flowgrpo model.path=DIR [reward=vlm_judge]

Prompts come from your copy of the suite's published file. Images of the base model and, unless
step=base, of a checkpoint are made from the same noise. They are written as the suite's own tool
reads them, and existing images are not made again. GenEval's rules score them with a detector of
yours. The embedded scenes have their own detector, and reward=NAME scores any suite with a reward.

ranks=N processes share the prompts, with a GPU each; the numbers are those of one process. A
benchmark that was killed continues where it was. Further key=value change the run's configuration.
The last line of standard output is the path of benchmark.json.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict, cast

from pydantic import Field

from digenrl import config as configuration
from digenrl import earlier_run
from digenrl.config.help import Arguments, Folder, RunDirectory, own_command
from digenrl.config.settings import Settings
from digenrl.extensions.bench.files import Item, Suite, SuiteError, read_suite
from digenrl.extensions.bench.statistics import Estimate, of_shares, of_values, over_tags
from digenrl.record.run_dir import atomic_replace, write_json
from digenrl.record.small_file import json_object, read_text
from digenrl.reward_command import reward_config, reward_suite

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from digenrl.algorithms.base import PolicyModule
    from digenrl.models.policy import Policy

RESULT = "benchmark.json"
SETTINGS = "settings.json"
IMAGES = "images.jsonl"
SCORES = "scores"
"""Folder beside the images' folders, with a file for each scored prompt until all are scored."""
MOST_FRAMES, MOST_PIXELS = 1 << 12, 1 << 30
"""Limits for reading a file that this command has written itself."""


class StepNotKept(RuntimeError):
    """The run lacks the checkpoint that was asked for."""


Scorer = Callable[[Item, "list[Tensor]"], list[tuple[float, str]]]
"""Function from a prompt and its images to (score, fault) of each image; NaN = missing score."""


class BenchmarkKeys(Arguments):
    """Arguments of the command line."""

    suite: Literal["geneval", "dpg", "parti", "vbench", "scenes"]
    """Prompt suite. scenes: the drawn scenes that come with the package."""
    run: RunDirectory | None = None
    """Run to benchmark. null: the other arguments name an experiment, and step is base."""
    step: str = Field("last", pattern=r"^(base|last|\d+)$")
    """Weights to use: base, last, or the RL step of a checkpoint."""
    file: str | None = None
    """The suite's published prompt file. null: the file of that name in suites/SUITE/."""
    out: Folder | None = None
    """Directory for images. null: RUN/benchmark or outputs/benchmark/EXPERIMENT."""
    samples: int | None = Field(None, ge=1)
    """Images per prompt. null: as many as the suite asks for."""
    prompts: int | None = Field(None, ge=1)
    """Use only the first n prompts. null: all."""
    seed: int = Field(1234, ge=0)
    """Seed of the noise, the same for base and checkpoint."""
    detector: Folder | None = None
    """geneval: a transformers object detector. null: only make the images."""
    colours: Folder | None = None
    """geneval: the CLIP model that recognizes colours."""
    threshold: float = Field(0.3, ge=0, le=1)
    """geneval: least confidence of a detection."""
    counting_threshold: float = Field(0.9, ge=0, le=1)
    """geneval: least confidence for prompts that count objects."""
    max_overlap: float = Field(1.0, ge=0, le=1)
    """geneval: overlap beyond which only the more confident of two boxes counts."""
    reward: str | None = None
    """Option of the group `reward` that scores the images. null: the suite's own rules."""
    ranks: int | None = Field(None, ge=1)
    """Number of processes that share the prompts. null: one per GPU."""


@dataclass(frozen=True)
class BenchmarkWork:
    """Images to make and score, as every rank gets them."""

    request: BenchmarkKeys
    words: tuple[str, ...]
    settings: Settings
    suite: Suite
    items: tuple[Item, ...]
    samples: int
    """Samples of each prompt."""
    folders: dict[str, Path]
    """Model -> folder of its images; the base model comes first."""
    checkpoint: Path | None
    """Checkpoint of the trained model; None = the base model alone."""
    ranks: int

    @property
    def scored_by(self) -> str | None:
        """Name of the scorer of the images; None if they are only made here."""
        request = self.request
        if request.reward:
            return f"reward={request.reward}"
        if self.suite.name == "scenes":
            return "GenEval's rules over the detector of the drawn scenes"
        if self.suite.name == "geneval" and request.detector:
            keys = ("detector", "colours", "threshold", "counting_threshold", "max_overlap")
            return (
                f"GenEval's rules over {' '.join(f'{key}={getattr(request, key)}' for key in keys)}"
            )
        return None

    def image_files(self, folder: Path, item: Item) -> list[Path]:
        """Return the image files of a prompt, in order of samples."""
        number = self.samples if "{sample" in self.suite.kind.layout else 1
        names = (
            self.suite.kind.layout.format(key=item.key, prompt=item.prompt, sample=i)
            for i in range(number)
        )
        return [folder / name for name in names]

    def score_file(self, folder: Path, item: Item) -> Path:
        """Return the file that holds a prompt's scores until all prompts are scored."""
        return folder.parent / SCORES / folder.name / f"{item.key}.json"

    def read_scores(self, folder: Path, item: Item) -> list[tuple[float, str]] | None:
        """Return the score and fault of each image of a prompt; None if not scored, or scored by
        another scorer."""
        try:
            note = json_object(read_text(self.score_file(folder, item)))
        except FileNotFoundError:
            return None
        if note["by"] != self.scored_by:
            return None
        scores: Any = note["scores"]
        return [(math.nan if value is None else value, reason) for value, reason in scores]


def run_benchmark(request: BenchmarkKeys, words: Sequence[str] = ()) -> Path:
    """Make the missing images, score all, write OUT/SUITE/benchmark.json and return its path.

    Args:
        words: changes of the run's configuration, or a whole configuration if there is no run.

    Raises:
        ConfigError: no such run, or words that do not fit.
        StepNotKept: the run has no such checkpoint.
        SuiteError: a missing or malformed file, images of other settings, a detector that does not
            fit.
    """
    if request.run is None and request.step != "base":
        raise SuiteError(
            f"step={request.step}: there is no run whose checkpoint it could be; name run=RUN or "
            "step=base."
        )
    suite = read_suite(
        request.suite, None if request.file is None else Path(os.path.expanduser(request.file))
    )
    known = {True: ", as published", False: ", not the published file", None: ""}[suite.published]
    print(
        f"{suite.name}: {len(suite.items)} prompts, sha256 {suite.digest}{known}", file=sys.stderr
    )
    composed = (
        configuration.load(words)
        if request.run is None
        else earlier_run.changed_run(request.run, words)
    )
    settings, items = composed.settings, suite.items[: request.prompts]
    samples = request.samples or suite.kind.samples
    above = (
        Path("outputs/benchmark", settings.experiment_name)
        if request.run is None
        else request.run / "benchmark"
    )
    out = (request.out or above) / suite.name
    checkpoint = (
        None if request.step == "base" else _find_checkpoint(composed.run_dir, request.step)
    )
    if checkpoint is not None:
        earlier_run.require_tied(composed.run_dir, checkpoint, words)
    models = {"base": "base"} | ({} if checkpoint is None else _checkpoint_digest(checkpoint))
    folders = {name: out / name for name in models}
    ranks = _process_count(request.ranks, len(items))
    work = BenchmarkWork(
        request, tuple(words), settings, suite, items, samples, folders, checkpoint, ranks
    )
    for name, weights in models.items():
        made_with: dict[str, Any] = {
            "digest": suite.digest,
            "samples": samples,
            "seed": request.seed,
        }
        for group in ("model", "sampling"):
            plain: Any = settings.as_plain()[group]
            made_with |= {f"{group}.{key}": value for key, value in plain.items()}
        made_with["weights"] = weights
        _same_settings(folders[name], made_with)
    _all_ranks(work)
    official = {name: suite.kind.then.format(folder=folder) for name, folder in folders.items()}
    result: dict[str, object] = {
        "suite": suite.name,
        "digest": suite.digest,
        "published": suite.published,
        "run": request.run and composed.run_dir,
        "prompts": len(items),
        "samples_per_prompt": samples,
        "seed": request.seed,
        "scored_by": work.scored_by,
        "official": official,
    }
    lines = [f"official scores: {command}" for command in official.values()]
    if work.scored_by is not None:
        numbers = _numbers_of(work)
        result.update(numbers)
        lines = _result_table(numbers)
        shutil.rmtree(out / SCORES)
    for line in lines:
        print(line, file=sys.stderr)
    write_json(out / RESULT, result)
    return out / RESULT


def run_share(rank: int, work: BenchmarkWork) -> None:
    """Make the missing images of every `ranks`-th prompt, and score those that are not scored yet.
    Raises as `run_benchmark` does."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as the ranks of a run: the same bits
    import torch

    from digenrl import devices

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    devices.take_gpu(rank)
    own = work.items[rank :: work.ranks]
    with ExitStack() as stack:
        score = _make_scorer(work, stack)
        _make_images(work, own, rank)
        if score is None:
            return
        for folder in work.folders.values():
            for item in own:
                if work.read_scores(folder, item) is None:
                    found = score(item, _read_samples(work.image_files(folder, item), work.samples))
                    note = work.score_file(folder, item)
                    note.parent.mkdir(parents=True, exist_ok=True)
                    write_json(note, {"by": work.scored_by, "scores": found})


def _process_count(asked: int | None, prompts: int) -> int:
    """Return the number of processes that share the prompts.

    Raises:
        SuiteError: more processes were asked for than there are GPUs.
    """
    from digenrl import accelerator

    gpus = accelerator.device_count()
    if asked is not None and 0 < gpus < asked:
        raise SuiteError(
            f"ranks={asked}: this machine has {gpus} GPUs, and each process takes one; lower it."
        )
    return min(asked or max(1, gpus), prompts)


class RankLost(RuntimeError):
    """A process of the benchmark failed. Images and scores so far are kept."""


def _all_ranks(work: BenchmarkWork) -> None:
    """Do the share of every rank, each in a process of its own; a single one in this process.

    Raises:
        RankLost: a rank failed, which ended the others; a single rank raises as `run_share` does.
    """
    if work.ranks == 1:
        return run_share(0, work)
    from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, spawn

    try:
        spawn(run_share, (work,), work.ranks)
    except (ProcessExitedException, ProcessRaisedException) as error:
        cause = str(error).strip().splitlines()[-1]
        raise RankLost(
            f"rank {error.error_index}: {cause}; the same command goes on where it was"
        ) from error
    return None


def _make_scorer(work: BenchmarkWork, stack: ExitStack) -> Scorer | None:
    """Return the scorer of the images; None if they are only made here."""
    request, suite, words = work.request, work.suite, work.words
    if request.reward is not None:
        from digenrl.rewards.suite import combine_scores
        from digenrl.types import Prompt

        own = [
            word
            for word in words
            if word.startswith(("hydra.searchpath=", "allow_targets=", "hardware.build="))
        ]
        wanted = f"reward={request.reward}"
        rewards = reward_suite(reward_config([wanted, *own], "serve_reward"))
        stack.callback(rewards.close)

        def by_reward(item: Item, images: list[Tensor]) -> list[tuple[float, str]]:
            import torch

            scores = rewards.score(torch.stack(images), [Prompt(item.prompt)] * len(images))
            return [(float(value), "") for value in combine_scores(scores, rewards.weights)]

        return by_reward
    if suite.name == "scenes":
        from digenrl.extensions.bench.detectors import SceneObjects

        detector: Any = SceneObjects()
    elif suite.name == "geneval" and request.detector is not None:
        from digenrl.extensions.bench.detectors import TransformersDetector

        least = min(request.threshold, request.counting_threshold)
        detector = TransformersDetector(
            request.detector, request.colours, least, request.max_overlap
        )
    else:
        return None
    from digenrl.extensions.bench.geneval import Rules, find_fault

    def by_rules(item: Item, images: list[Tensor]) -> list[tuple[float, str]]:
        wrong = [
            find_fault(
                cast(Rules, item.rules),
                image,
                detector,
                request.threshold,
                request.counting_threshold,
            )
            for image in images
        ]
        return [(float(not reason), reason) for reason in wrong]

    return by_rules


def _find_checkpoint(run_dir: Path, step: str) -> Path:
    """Return the complete checkpoint `step` (`last`, or an RL step). Raises StepNotKept."""
    from digenrl.strategy.checkpoint_io import (
        CheckpointError,
        newest_valid,
        step_of,
        verify_checkpoint,
    )

    folder = run_dir / "checkpoints"
    there = {str(step_of(found)): found for found in folder.glob("step-*")}
    try:
        if step == "last":
            return newest_valid(folder, say=partial(print, file=sys.stderr))
        if step not in there:
            names = ", ".join(sorted(there, key=int)) or "none"
            raise StepNotKept(
                f"step={step}: {run_dir} keeps no checkpoint of it; there are: {names}."
            )
        verify_checkpoint(there[step])
        return there[step]
    except CheckpointError as error:
        raise StepNotKept(str(error)) from error


def _checkpoint_digest(checkpoint: Path) -> dict[str, str]:
    """Return the name of the folder for a checkpoint's images -> a digest of its content."""
    from digenrl.strategy.checkpoint_io import MANIFEST, step_of

    digest = str(json_object(read_text(checkpoint / MANIFEST))["xxh3"])
    return {f"step-{step_of(checkpoint):06d}": digest}


def _same_settings(folder: Path, settings: dict[str, object]) -> None:
    """Write down the settings of a folder's images; raise SuiteError if it holds images of other
    settings."""
    note = folder / SETTINGS
    settings = json.loads(json.dumps(settings))
    if note.exists():
        before = json_object(read_text(note))
        changed = {
            key for key in settings.keys() | before.keys() if settings.get(key) != before.get(key)
        }
        if changed:
            first = min(changed)
            raise SuiteError(
                f"{folder} holds images of another {first} ({before.get(first)}, asked for "
                f"{settings.get(first)}): remove the folder, or write elsewhere: out=DIRECTORY."
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_json(note, settings)


def _make_images(work: BenchmarkWork, own: Sequence[Item], rank: int) -> None:
    """Make the missing images of the `own` prompts, those of the base model first."""
    missing = {
        name: [
            item
            for item in own
            if not all(path.exists() for path in work.image_files(folder, item))
        ]
        for name, folder in work.folders.items()
    }
    if not any(missing.values()):
        return

    from digenrl import accelerator
    from digenrl.parts import sampling_spec
    from digenrl.rollout.engine import ode_samples
    from digenrl.strategy.checkpoint_io import read_checkpoint
    from digenrl.types import Prompt

    policy: Policy = work.settings.build("model")
    module: PolicyModule = work.settings.build("algorithm", policy=policy)
    module.to(accelerator.device_kind())
    sampling, seed = sampling_spec(work.settings), work.request.seed
    for name, folder in work.folders.items():
        if name != "base":
            assert work.checkpoint is not None
            earlier_run.restore_module(module, read_checkpoint(work.checkpoint))
        with nullcontext() if name == "base" else module.averaged():
            for done, item in enumerate(missing[name]):
                media = ode_samples(
                    policy.eval(), sampling, [Prompt(item.prompt)], work.samples, seed
                )
                _write_media(work.image_files(folder, item), media, work.suite, item)
                if rank == 0 and sys.stderr.isatty():
                    print(
                        f"\r{name}: {done + 1} of {len(missing[name])} prompts",
                        end="",
                        file=sys.stderr,
                    )
        told = f" by rank {rank} of {work.ranks}" if work.ranks > 1 else ""
        print(
            f"{name}: {len(missing[name])} of {len(own)} prompts sampled{told}, in {folder}",
            file=sys.stderr,
        )


def _write_media(files: Sequence[Path], media: torch.Tensor, suite: Suite, item: Item) -> None:
    """Write the missing files of a prompt's media [n, C, H, W] or [n, F, C, H, W]."""
    from digenrl.report.media import image_grid, write_mp4

    if suite.kind.video != (media.ndim == 5):
        remedy = (
            "take a video model"
            if suite.kind.video
            else "set sampling.frames=1, or take an image model"
        )
        raise SuiteError(
            f"suite={suite.name}: the model gives media of shape {list(media.shape[1:])}; {remedy}."
        )
    files[0].parent.mkdir(parents=True, exist_ok=True)
    if files[0].parent.name == "samples":
        write_json(files[0].parent.parent / "metadata.jsonl", dict(item.rules), indent=None)
    for file, one in zip(files, media if len(files) == len(media) else media[None], strict=True):
        if file.exists():
            continue
        with atomic_replace(file) as unfinished:
            if suite.kind.video:
                write_mp4(unfinished, one)
            else:
                image_grid(one.reshape(-1, *one.shape[-3:]), gap=0).save(unfinished, "PNG")


def _read_samples(files: Sequence[Path], samples: int) -> list[Tensor]:
    """Return the media [C, H, W] or [F, C, H, W] of each sample as they were written."""
    from digenrl.extensions.bench.media_files import read_media

    media = [read_media(file, MOST_FRAMES, MOST_PIXELS) for file in files]
    if len(media) == samples:
        return media
    columns = math.ceil(math.sqrt(samples))
    rows = math.ceil(samples / columns)
    return [tile for row in media[0].chunk(rows, 1) for tile in row.chunk(columns, 2)][:samples]


class Estimates(TypedDict):
    """Means over prompts, each with the fields of `Estimate`."""

    overall: dict[str, float] | None
    tags: dict[str, dict[str, float]]


class ModelNumbers(Estimates):
    """Means of one model's images."""

    folder: Path
    missing: int
    """Images without a score."""


class Numbers(TypedDict):
    """Numbers of benchmark.json."""

    models: dict[str, ModelNumbers]
    difference: NotRequired[Estimates]


def _numbers_of(work: BenchmarkWork) -> Numbers:
    """Return the numbers of benchmark.json, and write a line per image to `images.jsonl` of each
    folder."""
    values: dict[str, dict[str, float]] = {}
    models: dict[str, ModelNumbers] = {}
    for name, folder in work.folders.items():
        lines: list[dict[str, Any]] = []
        values[name] = {}
        for item in work.items:
            files, scores = work.image_files(folder, item), work.read_scores(folder, item) or []
            for row, (value, reason) in enumerate(scores):
                file = files[min(row, len(files) - 1)].relative_to(folder)
                facts = {"file": str(file), "sample": row, "tags": item.tags, "prompt": item.prompt}
                lines.append(
                    facts | {"score": None if math.isnan(value) else value, "reason": reason}
                )
            if there := [value for value, _ in scores if not math.isnan(value)]:
                values[name][item.key] = fmean(there)
        with atomic_replace(folder / IMAGES) as unfinished:
            unfinished.write_text(
                "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            )
        estimate = of_shares if work.request.reward is None else of_values
        tags = _by_tag(work.items, values[name], estimate)
        missing = sum(line["score"] is None for line in lines)
        models[name] = {**_estimate_entries(tags), "folder": folder, "missing": missing}
    result: Numbers = {"models": models}
    if len(values) == 2:
        before, after = values.values()
        both = {key: after[key] - before[key] for key in after.keys() & before.keys()}
        result["difference"] = _estimate_entries(_by_tag(work.items, both, of_values))
    return result


def _by_tag(
    items: Sequence[Item], values: dict[str, float], estimate: Callable[[Sequence[float]], Estimate]
) -> dict[str, Estimate]:
    """Return tag -> estimate over its prompts, in the suite's order."""
    found: dict[str, list[float]] = {}
    for item in items:
        for tag in item.tags if item.key in values else ():
            found.setdefault(tag, []).append(values[item.key])
    return {tag: estimate(of_tag) for tag, of_tag in found.items()}


def _estimate_entries(tags: dict[str, Estimate]) -> Estimates:
    return {
        "overall": asdict(over_tags(tags)) if tags else None,
        "tags": {tag: asdict(estimate) for tag, estimate in tags.items()},
    }


def _result_table(numbers: Numbers) -> list[str]:
    """Return a table with a row per tag: mean and 95 % interval of each model, and of the
    difference."""
    columns: dict[str, Estimates] = {**numbers["models"]}
    if "difference" in numbers:
        columns["difference"] = numbers["difference"]
    lines = [f"{'':<24}{'prompts':>8}" + "".join(f"{name:>26}" for name in columns)]
    first = next(iter(columns.values()))
    for tag in [*first["tags"], "overall"]:
        cells = [
            column["tags"].get(tag) if tag in first["tags"] else column["overall"]
            for column in columns.values()
        ]
        shown = [
            f"{c['mean']:.3f} [{c['low']:.3f}, {c['high']:.3f}]" if c else "missing" for c in cells
        ]
        lines.append(
            f"{tag:<24}{(cells[0] or {}).get('prompts', 0):>8}"
            + "".join(f"{cell:>26}" for cell in shown)
        )
    return lines


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code.

    0 is success. 2 means that arguments, run, suite or configuration do not fit. 1 means no
    checkpoint or no score.
    """

    def run_request(request: BenchmarkKeys, words: list[str]) -> None:
        print(run_benchmark(request, words).absolute())

    return own_command(
        BenchmarkKeys, __doc__, arguments, run_request, others=True, failures=RuntimeError
    )
