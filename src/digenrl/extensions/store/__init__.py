"""Prompt store: conditionings of prompts on disk, for all ranks and later runs."""
