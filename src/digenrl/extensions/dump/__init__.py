"""Micro-batches behind skipped updates, on disk."""
