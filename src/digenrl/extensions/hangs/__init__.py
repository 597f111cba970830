"""Ranks that hang are found by the progress of their threads (`limits.stage_factor`)."""
