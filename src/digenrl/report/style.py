"""How every picture of a run looks: one palette (Okabe and Ito's, safe for colour-blind readers), sizes, light axes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl

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
    "reduce": "#74C4AA",
    "optimizer": "#006B4E",
    "publish": "#4D4D4D",
    "adopt": "#7D848F",
    "eval": "#E3B7CD",
}
"""Work: cool and neutral hues."""
CAUSE_COLOURS = {
    "first_fragment": "#F6C667",
    "weights": "#F08A5D",
    "tail": "#D7263D",
    "reward": "#F2A7C3",
    "straggler": "#8C2F39",
    "startup": "#EFE3C8",
}
"""Bubbles: warm hues, one per cause, so that lost time stands out."""

_SETTINGS: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8.0,
    "axes.labelsize": 9.5,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "xtick.major.size": 3.0,
    "ytick.major.size": 0.0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "figure.dpi": 100,
    "savefig.dpi": 180,
    "savefig.facecolor": "white",
    "savefig.bbox": "tight",
    "savefig.pad_inches": 0.08,
}


@contextmanager
def paper_style() -> Iterator[None]:
    """Matplotlib's settings for the body of the `with`; the caller's own are back afterwards."""
    with mpl.rc_context(_SETTINGS):
        yield
