"""Scouts: cheap trial samples choose the initial noises that a task generates from."""
