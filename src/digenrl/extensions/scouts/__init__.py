"""Scouts: cheap tries choose the initial noises that a task generates from."""
