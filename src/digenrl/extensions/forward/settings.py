"""Rules for samples that come from files (`data.samples`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from digenrl.images import SAMPLES
from digenrl.prompts import PromptFileError, read, sources

PREFERENCE = ("preferred", "rejected")
"""Roles of the files of even and of odd samples of a group, where there are preferences."""
SUPERVISED = "digenrl.extensions.forward.sft.Supervised"
OFFLINE_DPO = "digenrl.extensions.forward.dpo.OfflineDPO"


def file_problems(get: Callable[[str], Any]) -> Iterator[str]:
    """Yield why a configuration cannot take its samples from files, or trains files that it does
    not read."""
    target = get("algorithm._target_")
    offline = target == OFFLINE_DPO
    if get("data.samples") == "generated":
        if target in (SUPERVISED, OFFLINE_DPO):
            yield (
                f"algorithm._target_ = {target} with data.samples = generated: it trains on files, "
                "and the model's own samples would teach it nothing; set data.samples=files."
            )
        return
    levels = get("algorithm.train_steps._target_")
    if not levels.endswith(".NoiseLevels"):
        yield (
            f"algorithm.train_steps = {levels} with data.samples = files: a file has no denoising "
            "steps to train; use algorithm=sft, offline_dpo, nft or dpo."
        )
    if (candidates := get("sampling.scouts.candidates")) > 1:
        yield (
            f"data.samples = files with sampling.scouts.candidates = {candidates}: nothing is "
            "generated; set sampling.scouts.candidates=1."
        )
    if offline and isinstance(size := get("sampling.task_size"), int) and size % 2:
        yield (
            f"sampling.task_size = {size} with {target}: a task holds pairs of a preferred and a "
            f"rejected file; use an even number, such as {size + 1}."
        )
    wanted = PREFERENCE if offline else ("media",)
    for name, _ in sources(get("data.prompts")):
        try:
            file = read(name)
        except PromptFileError:  # said by the check of the files
            return
        for line, prompt in zip(file.lines, file.prompts, strict=True):
            named = {image.role for image in prompt.images if image.role in SAMPLES}
            if named != set(wanted):
                found = ", ".join(sorted(named)) or "no file"
                yield (
                    f"algorithm._target_ = {target} with data.samples = files needs "
                    f"{' and '.join(wanted)} in every line, and {file.path}:{line} names {found}; "
                    "change the line, or the algorithm."
                )
                return
