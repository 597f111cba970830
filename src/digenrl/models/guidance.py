"""The scales of guidance, which a network applies and its codec encodes prompts for."""

from __future__ import annotations

from dataclasses import dataclass

NEGATIVE = "negative_"
"""Prefix of the conditioning of the unconditional branch of classifier-free guidance."""


@dataclass
class Guidance:
    """How strongly samples follow their prompts.

    The scale changes while an evaluation has one of its own. Network and codec share one object, so
    that negative prompts are encoded exactly while the network reads them.

    Example:
        >>> Guidance(4.0, cfg=True).two_forwards
        True
        >>> Guidance(4.0).two_forwards  # the scale is an input of the network
        False
    """

    scale: float = 1.0
    """`sampling.guidance_scale`."""
    cfg: bool = False
    """Whether `scale` is that of classifier-free guidance by a second, unconditional forward. False
    leaves the scale to `Policy.predict`."""
    true_cfg_scale: float = 1.0
    """Scale of classifier-free guidance where `scale` has another meaning; 1 = off."""

    @property
    def cfg_scale(self) -> float:
        """Scale of classifier-free guidance; 1 = off."""
        return self.scale if self.cfg else self.true_cfg_scale

    @property
    def two_forwards(self) -> bool:
        """Whether a velocity needs the `negative_...` conditioning."""
        return self.cfg_scale > 1.0
