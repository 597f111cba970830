"""Rules for the keys of `algorithm.teachers`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from digenrl.prompts import PromptFileError, read, sources

TARGET = "digenrl.extensions.distillation.opd.Distillation"
POLICY = "checkpoints/last/policy.safetensors"


def weights_of(run: str) -> Path:
    """Return the file of a teacher's weights: the last checkpoint of a run, a file itself, or, by
    its name, a file beside this module."""
    path = Path(run).expanduser()
    if path.name == run and not path.exists():
        path = Path(__file__).with_name(run)
    return path / POLICY if path.is_dir() else path


def teacher_problems(get: Callable[[str], Any]) -> Iterator[str]:
    """Yield the reasons why nothing could be learnt from the teachers."""
    if get("algorithm._target_") != TARGET:
        return
    if not get("algorithm.teachers"):
        yield (
            "algorithm.teachers = {}: nobody teaches; name one, as "
            "algorithm.teachers.NAME={run: RUN}."
        )
        return
    for name, teacher in get("algorithm.teachers").items():
        key = f"algorithm.teachers.{name}"
        run, weight = teacher.get("run"), teacher.get("weight", 1.0)
        looked = "" if run is None else f" (looked for {weights_of(run)})"
        if run is None or not weights_of(run).is_file():
            yield (
                f"{key}.run = {run}: no such weights{looked}; name a finished run of the same "
                "model, or its policy.safetensors."
            )
        if not weight > 0:
            yield f"{key}.weight = {weight}: must be above 0; leave the teacher out instead."
    if (levels := get("algorithm.train_steps._target_")).endswith(".NoiseLevels"):
        yield (
            f"algorithm.train_steps = {levels} with {TARGET}: it compares transitions, and an ODE "
            "keeps none; use algorithm/train_steps=all_but_last."
        )
    yield from _untaught(get("data.prompts"), get("algorithm.teachers"))


def _untaught(asked: Any, teachers: dict[str, Any]) -> Iterator[str]:
    """Yield the first training prompt that no teacher knows."""
    if any(teacher.get("prompts") is None for teacher in teachers.values()):
        return
    try:
        taught = {p.uid for each in teachers.values() for p in read(each["prompts"]).prompts}
        files = [read(name) for name, _ in sources(asked)]
    except PromptFileError as error:
        yield f"algorithm.teachers: {error}"
        return
    for file in files:
        for line, prompt in zip(file.lines, file.prompts, strict=True):
            if prompt.uid not in taught:
                yield (
                    f"algorithm.teachers: none has the prompt of {file.path}:{line}; add it to the "
                    "`prompts` of one, or set a teacher's prompts=null (all)."
                )
                return
