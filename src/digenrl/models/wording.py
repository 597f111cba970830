"""What is encoded, and what comes of it: the input and the output of a family's text encoders."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from digenrl.images import PromptImage

Condition = dict[str, Tensor]
"""Conditioning of one wording: every tensor has leading dimension 1."""


class Wording(NamedTuple):
    """Input of one encoding: a text with the images that the family reads beside it."""

    text: str
    images: tuple[PromptImage, ...] = ()

    @property
    def key(self) -> str | list[object]:
        """JSON value that identifies the wording."""
        return (
            [self.text, *([image.role, image.digest] for image in self.images)]
            if self.images
            else self.text
        )


class ConditionStore(Protocol):
    """Conditionings that were encoded before (`data.prompt_store`)."""

    def read_condition(self, wording: Wording) -> Condition | None:
        """Return the wording's conditioning, on the CPU; None if it is not there."""
