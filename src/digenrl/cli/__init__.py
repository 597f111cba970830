"""Commands: `python -m digenrl.cli.<name> key=value ...`."""
