"""Small tasks for a laptop: digits, drawn scenes, edits, a mixture of Gaussians."""
