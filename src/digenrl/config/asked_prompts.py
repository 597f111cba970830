"""The prompts that a run asks its rewards about, with their places, before any rank starts."""

from __future__ import annotations

from collections.abc import Iterator

from digenrl import prompts
from digenrl.config.settings import Settings

Placed = tuple[str, prompts.Prompt]
"""(key, file and line; prompt)."""


def training_prompts(settings: Settings) -> Iterator[Placed]:
    """Yield the prompts that are trained."""
    yield from _placed_prompts("data.prompts", settings.data.prompts)


def evaluation_prompts(settings: Settings) -> Iterator[Placed]:
    """Yield the prompts that are evaluated: the first `max_prompts` of the held-out ones, else of
    the training prompts."""
    evaluation = (settings.callbacks or {}).get("evaluation")
    if evaluation is None:
        return
    for key, source in (("heldout_prompts", "data.heldout"), ("prompts", "data.prompts")):
        if (files := evaluation.get(key)) is not None:
            own = {"data.heldout": settings.data.heldout, "data.prompts": settings.data.prompts}
            # Where the value is a copy, name the key that a user would change.
            key = source if files == own[source] else f"callbacks.evaluation.{key}"
            for number, placed in enumerate(_placed_prompts(key, files)):
                if number == evaluation.get("max_prompts"):
                    break
                yield placed
            return


def _placed_prompts(key: str, files: object) -> Iterator[Placed]:
    for name, _ in prompts.weighted_files(files):  # type: ignore[arg-type]
        file = prompts.read_prompt_file(name)
        for line, prompt in zip(file.lines, file.prompts, strict=True):
            yield f"{key}: {file.path}:{line}", prompt
