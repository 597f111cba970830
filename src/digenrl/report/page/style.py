"""Style of all pictures of a run: Okabe and Ito's palette (safe for colour-blind readers), sizes,
light axes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import matplotlib.style as mpl_style

BLUE, ORANGE, GREEN = "#0072B2", "#E69F00", "#009E73"
VERMILION, PURPLE, SKY = "#D55E00", "#CC79A7", "#56B4E9"
INK, FAINT, GRID = "#222222", "#8A8F98", "#E4E6EA"
CYCLE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)

STAGE_COLOURS = {
    "generate": BLUE,
    "train": GREEN,
    "lend": "#7FB8D8",
    "encode": "#9AD1F0",
    "decode": SKY,
    "score": "#7A68B8",
    "send": "#B7BDC6",
    "optimizer": "#006B4E",
    "publish": "#4D4D4D",
    "adopt": "#7D848F",
    "eval": "#E3B7CD",
}
"""Colours of stages of work: cool and neutral hues."""
CAUSE_COLOURS = {
    "first_fragment": "#F6C667",
    "weights": "#F08A5D",
    "tail": "#D7263D",
    "reward": "#F2A7C3",
    "straggler": "#8C2F39",
    "startup": "#EFE3C8",
    "evaluation": "#E08FB0",
}
"""Colours of bubbles by cause: warm hues, so that lost time stands out."""


def paper_style() -> AbstractContextManager[None]:
    """Set matplotlib's settings for the body of a `with`, and restore the caller's settings
    afterwards."""
    return mpl_style.context(Path(__file__).with_name("paper.mplstyle"))
