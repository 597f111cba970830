"""Networks that are sharded first and read afterwards: no rank ever holds all weights."""
