"""Warnings about a run that its reader must not overlook."""
