"""Loggers in threads of their own, so that none can hold up or end a run."""
