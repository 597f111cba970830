"""Pages of `--help`: groups, keys, ranges, defaults."""
