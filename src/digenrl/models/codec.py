"""What stands before and behind a network: prompts become its conditioning, latents become media.

A `Codec` is no `nn.Module`, so that no sharding, optimizer or checkpoint sees its encoders and its
decoder. A family implements `encode_prompts` and `decode`.

Shapes: B rows, *L latent dimensions of one sample (packed families: [N, C]).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from digenrl.images import PromptImage
from digenrl.models.guidance import NEGATIVE, Guidance
from digenrl.models.wording import Condition, ConditionStore, Wording
from digenrl.types import Prompt, Sound, move_tensors

logger = logging.getLogger(__name__)

CACHED_TEXTS = 1024
"""Wordings whose embeddings stay on the CPU (4 MB each at 512 tokens x 4096 in bf16). The least
recently used go first."""


class Codec(ABC):
    """Encoders and decoder of a model family, with the embeddings that they made.

    Args:
        family: name of the model family, for messages.
        network: the network that reads the conditioning; its device is the codec's.
        latent_shape: *L of one sample.
        guidance: the network's own object, which says whether negative prompts are encoded.
    """

    reads: ClassVar[Mapping[str, tuple[int, int]]] = {}
    """Role of an image (`digenrl.images.ROLES`) -> least and largest number of such images that a
    prompt has here."""
    has_sound: ClassVar[bool] = False
    """Whether samples have sound, which `decode_sound` makes of their latents."""

    def __init__(
        self,
        family: str,
        network: nn.Module,
        latent_shape: tuple[int, ...],
        guidance: Guidance,
    ) -> None:
        self.family = family
        self.latent_shape = tuple(latent_shape)
        self.guidance = guidance
        self._network = network
        # Least recently used first (`CACHED_TEXTS`).
        self._embeddings: OrderedDict[Wording, Condition] = OrderedDict()
        self.store: ConditionStore | None = None
        self._said: set[str] = set()

    # ---- what a family implements

    @abstractmethod
    def encode_prompts(self, wordings: Sequence[Wording]) -> dict[str, Tensor]:
        """Return the conditioning of `wordings` on `self.device`. Every tensor has leading
        dimension len(wordings).

        Shapes and values of a row must not depend on the other wordings, so that rows of different
        prompts can be concatenated.
        """

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents [B, *L] -> media in [0, 1] fp32: images [B, C, H, W], videos [B, F, C, H,
        W]."""

    def decode_sound(self, latents: Tensor) -> Sound:
        """Decode the sound in latents [B, *L] (`has_sound`). Raises ValueError for a family without
        sound."""
        raise ValueError(
            f"{self.family} makes no sound: use a model that does (docs/models_and_rewards.md)."
        )

    def encode_media(self, images: Sequence[PromptImage]) -> Tensor:
        """Return the clean latents [B, *L] of B pictures: what `decode` inverts.

        Raises:
            ValueError: the family cannot read samples from files.
        """
        raise ValueError(
            f"data.samples = files: {self.family} has no `encode_media`, which turns a picture "
            "into latents; write it, or use data.samples=generated."
        )

    def default_negative(self) -> str | None:
        """Return the text of the unconditional branch when a prompt brings none; None = there is no
        default."""
        return None

    def modality_tokens(self, modality: str) -> slice:
        """Return where the tokens of one of `Policy.modalities` are in packed latents [N, C]."""
        raise NotImplementedError(f"{self.family} has modalities and no `modality_tokens`.")

    def trim_condition(self, condition: Condition) -> Condition:
        """Return the kept conditioning (on the CPU) as `encode` gives it. A family may leave out
        what no row reads.

        The result must not depend on which prompts were asked for together.
        """
        return condition

    # ---- what everybody calls

    @property
    def device(self) -> torch.device:
        """Device of the network's weights, to which conditioning goes."""
        return next(self._network.parameters()).device

    @classmethod
    def check_prompt(cls, prompt: Prompt, family: str) -> None:
        """Raise ValueError for a prompt with fewer or more images of a role than the family
        takes."""
        for role, (least, most) in cls.reads.items():
            given = sum(image.role == role for image in prompt.images)
            if not least <= given <= most:
                takes = least if least == most else f"{least} to {most}"
                raise ValueError(
                    f"{family} takes {takes} images of role {role}, the prompt has {given}."
                )

    def encode(self, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        """Return the conditioning with leading dimension len(prompts), on `self.device`. Each
        wording is encoded once and kept.

        With classifier-free guidance the conditioning includes the `negative_...` tensors.

        Raises:
            ValueError: a negative prompt is needed, and neither the prompt nor the family has one.
        """
        positive, negative = self.branch_wordings(prompts)
        wanted = list(dict.fromkeys(positive + negative))
        missing = [
            each for each in wanted if each not in self._embeddings and not self._load_stored(each)
        ]
        if missing:
            with torch.no_grad():
                encoded = self.encode_prompts(missing)
            for row, each in enumerate(missing):
                self._embeddings[each] = {
                    # A copy of the row, since a view would keep the whole batch alive.
                    key: value[row : row + 1].cpu().clone()
                    for key, value in encoded.items()
                }
        # Most recently used last.
        for each in wanted:
            self._embeddings.move_to_end(each)
        condition = self._stack_rows(positive)
        if negative:
            condition |= {
                NEGATIVE + key: value for key, value in self._stack_rows(negative).items()
            }
        elif any(prompt.negative for prompt in prompts):
            message = (
                f"negative prompts are ignored: {self.family} runs without classifier-free "
                "guidance here"
            )
            self.say_once("negative", message)
        if not self.reads and any(
            image.role in ("image", "last_image") for prompt in prompts for image in prompt.images
        ):
            self.say_once("images", f"images of prompts are ignored: {self.family} reads none")
        # After the rows are taken, because one call may ask for more than is kept.
        while len(self._embeddings) > CACHED_TEXTS:
            self._embeddings.popitem(last=False)
        return move_tensors(self.trim_condition(condition), self.device)

    def branch_wordings(self, prompts: Iterable[Prompt]) -> tuple[list[Wording], list[Wording]]:
        """Return the wordings that are encoded for the two branches of guidance, both with the
        prompt's images.

        The second list is empty if one forward serves. Raises as `check_prompt` does.
        """
        positive, negative = list[Wording](), list[Wording]()
        for prompt in prompts:
            self.check_prompt(prompt, self.family)
            images = tuple(image for image in prompt.images if image.role in self.reads)
            positive.append(Wording(prompt.text, images))
            if self.guidance.two_forwards:
                negative.append(Wording(self._negative_text(prompt), images))
        return positive, negative

    def say_once(self, topic: str, message: str) -> None:
        """Log `message` as a warning, the first time that this codec warns about `topic`."""
        if topic not in self._said:
            self._said.add(topic)
            logger.warning(message)

    def _load_stored(self, wording: Wording) -> bool:
        """Return whether the store has the wording, after taking it from there."""
        found = None if self.store is None else self.store.read_condition(wording)
        if found is not None:
            self._embeddings[wording] = found
        return found is not None

    def _stack_rows(self, wordings: Sequence[Wording]) -> dict[str, Tensor]:
        rows = [self._embeddings[each] for each in wordings]
        # [1, ...] each -> [B, ...]
        return {key: torch.cat([row[key] for row in rows]) for key in rows[0]}

    def _negative_text(self, prompt: Prompt) -> str:
        negative = self.default_negative() if prompt.negative is None else prompt.negative
        if negative is None:
            raise ValueError(
                f"guidance scale {self.guidance.cfg_scale} needs a negative prompt, and "
                f"'{prompt.text[:60]}' has none: "
                'add "negative" to the prompt file, set model.negative_prompt, or '
                "sampling.guidance_scale=1"
            )
        return negative
