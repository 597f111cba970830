"""Commands: `digenrl NAME key=value ...`."""
