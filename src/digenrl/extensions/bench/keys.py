"""Keys of configs/score.yaml."""

from __future__ import annotations

from digenrl.config.schema import AtLeast1, Directory, File, PromptFile, ScorerKeys


class ScoreKeys(ScorerKeys):
    """Scoring a folder: configs/score.yaml."""

    images: Directory
    """its pictures and videos are taken in order of name"""
    prompts: PromptFile
    """one prompt a line, in the order of the files"""
    output: File | None
    """where the scores are written, as JSON; null: outputs/scores/<time>.json"""
    heldout: bool
    """also the mixture's held-out rewards"""
    batch: AtLeast1
    """files read and scored together, if of equal size"""
    max_frames: AtLeast1
    """of a video; longer ones are cut"""
    max_pixels: AtLeast1
    """frames x height x width of a file, and about those held at once"""
